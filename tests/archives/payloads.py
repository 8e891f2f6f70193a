"""The compressed form of an entry's bytes, by zip's number of the method; and deflate in independent blocks."""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from collections.abc import Sequence

__all__ = [
    "BZIP2",
    "DEFLATE",
    "LZMA",
    "METHODS",
    "STORED",
    "ZSTD",
    "compress",
    "compress_lzma",
    "deflate_blocks",
    "deflated_zeros",
    "index_body",
    "index_extra",
    "lzma_header",
]

STORED, DEFLATE, BZIP2, LZMA, ZSTD = 0, 8, 12, 14, 93
METHODS = {"stored": STORED, "deflate": DEFLATE, "bzip2": BZIP2, "lzma": LZMA, "zstd": ZSTD}

#: Id of the private extra field that holds a block index, and the end of the name of an entry that holds one.
INDEX_ID = 0x4454
SIDECAR = ".tdgpu-index"


def compress(data: bytes, method: int, level: int = 6) -> bytes:
    """The payload of an entry that holds ``data``."""
    if method == STORED:
        return data
    if method == DEFLATE:
        deflater = zlib.compressobj(level, zlib.DEFLATED, -15)
        return deflater.compress(data) + deflater.flush()
    if method == BZIP2:
        return bz2.compress(data)
    if method == LZMA:
        return compress_lzma(data)
    if method == ZSTD:
        import zstandard

        return zstandard.ZstdCompressor(level=3).compress(data)
    raise ValueError(f"no encoder for method {method}")


def compress_lzma(data: bytes, dictionary: int = 1 << 16) -> bytes:
    """LZMA as zip wants it: version, size of the properties, the five bytes of them, the raw stream.

    Python's encoder ends the stream with a mark, which bit 1 of the entry's flags tells; 7-Zip does without.
    """
    spec = {"id": lzma.FILTER_LZMA1, "dict_size": dictionary, "lc": 3, "lp": 0, "pb": 2}
    stream = lzma.compress(data, lzma.FORMAT_RAW, filters=[spec])
    return lzma_header(dictionary) + stream


def lzma_header(dictionary: int = 1 << 16, lc_lp_pb: int = 93, size: int = 5) -> bytes:
    """What precedes the LZMA stream of an entry."""
    return struct.pack("<BBHBI", 9, 4, size, lc_lp_pb, dictionary)


def deflate_blocks(data: bytes, nbytes: int, level: int = 6) -> list[bytes]:
    """Deflate in blocks of ``nbytes``, each to be inflated by itself; joined, they are one ordinary stream."""
    blocks = []
    for at in range(0, max(len(data), 1), nbytes):
        deflater = zlib.compressobj(level, zlib.DEFLATED, -15)
        last = at + nbytes >= len(data)
        blocks.append(
            deflater.compress(data[at : at + nbytes]) + deflater.flush(zlib.Z_FINISH if last else zlib.Z_FULL_FLUSH)
        )
    return blocks


def index_body(
    sizes: Sequence[int],
    crcs: Sequence[int],
    nbytes: int,
    *,
    version: int = 2,
    log2: int | None = None,
    reserved: int = 0,
    count: int | None = None,
) -> bytes:
    """A block index; the keywords make it lie."""
    head = struct.pack(
        "<BBHI",
        version,
        nbytes.bit_length() - 1 if log2 is None else log2,
        reserved,
        len(sizes) if count is None else count,
    )
    return head + struct.pack(f"<{len(sizes)}I", *sizes) + struct.pack(f"<{len(crcs)}I", *crcs)


def index_extra(body: bytes) -> bytes:
    """The extra field around a block index."""
    return struct.pack("<HH", INDEX_ID, len(body)) + body


def deflated_zeros(nbytes: int) -> bytes:
    """A deflate stream of ``nbytes`` zeros (whole MiB), made without compressing them all."""
    chunk = bytes(1 << 20)
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    one = deflater.compress(chunk) + deflater.flush(zlib.Z_FULL_FLUSH)
    return one * (nbytes >> 20) + b"\x03\x00"  # an empty last block
