"""How payloads are compressed: the methods, their levels, and a stream of each."""

from __future__ import annotations

import bz2
import lzma
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from zlib_ng import zlib_ng

from tdgpu.archives.writer import BZIP2, DEFLATE, LZMA, STORED, ZSTD
from tdgpu.errors import InvalidArgument, InvalidArgumentType, NotSupported
from tdgpu.layout.archive.index import LARGEST_BLOCK, SMALLEST_BLOCK

__all__ = ["Compression", "crc32", "crc32_combine", "deflate_block", "resolve", "stream"]

_NAMES = {
    None: STORED,
    "stored": STORED,
    "deflate": DEFLATE,
    "deflated": DEFLATE,
    "bzip2": BZIP2,
    "lzma": LZMA,
    "zstd": ZSTD,
}
# The levels that each method has. What has none takes any, as the standard library's writer does.
_LEVELS = {DEFLATE: range(-1, 10), BZIP2: range(1, 10)}

# The filter of Python's own zip writer, and what an entry says of it: version 9.4, five bytes of properties.
_LZMA_FILTER = {"id": lzma.FILTER_LZMA1, "lc": 3, "lp": 0, "pb": 2, "dict_size": 8 << 20}
_LZMA_HEADER = b"\x09\x04\x05\x00" + b"\x5d" + (8 << 20).to_bytes(4, "little")

_STEP_BYTES = 256 << 10

crc32: Callable[..., int] = zlib_ng.crc32
crc32_combine: Callable[[int, int, int], int] = zlib_ng.crc32_combine


class Compression(NamedTuple):
    """What was chosen.

    Attributes:
        method: as zip numbers the methods.
        level: the level, or None for the method's own default.
        block_bytes: bytes of a block of deflate; None for one plain stream.
    """

    method: int
    level: int | None
    block_bytes: int | None

    @property
    def in_blocks(self) -> bool:
        """Whether payloads are made of blocks."""
        return self.method == DEFLATE and self.block_bytes is not None


def resolve(compression: object, level: object, block_size: object) -> Compression:
    """The choice that the arguments of ``pack_memmap`` and ``save`` make.

    Raises:
        InvalidArgument, InvalidArgumentType: an unknown method, a level that it does not have, no such block size.
        NotSupported: a method that cannot be written.
    """
    if isinstance(compression, bool) or not isinstance(compression, (str, int, type(None))):
        raise InvalidArgumentType(f"compression is a name or a zipfile constant, not {compression!r}.")
    method = compression if isinstance(compression, int) else _NAMES.get(compression and compression.lower())
    if method is None:
        known = ", ".join(repr(name) for name in _NAMES if name not in (None, "deflated", "zstd"))
        raise InvalidArgument(f"Unknown compression {compression!r}: it is {known}, or a zipfile constant.")
    if method not in (STORED, DEFLATE, BZIP2, LZMA):
        raise NotSupported(f"Compression {compression!r} cannot be written: use 'deflate', 'bzip2' or 'lzma'.")
    if level is not None:
        if isinstance(level, bool) or not isinstance(level, int):
            raise InvalidArgumentType(f"compresslevel is a whole number, not {level!r}.")
        levels = _LEVELS.get(method)
        if levels is not None and level not in levels:
            raise InvalidArgument(f"compresslevel is {levels[0]} to {levels[-1]} for this method, not {level}.")
    if block_size is not None:
        if isinstance(block_size, bool) or not isinstance(block_size, int):
            raise InvalidArgumentType(f"block_size is a number of bytes, not {block_size!r}.")
        if not SMALLEST_BLOCK <= block_size <= LARGEST_BLOCK or block_size & (block_size - 1):
            raise InvalidArgument(
                f"block_size is a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}, or None, not {block_size}."
            )
    return Compression(method, level, block_size)


def deflate_block(data: Any, level: int | None, *, last: bool) -> tuple[bytes, bytes, int]:
    """One block of a deflate stream, which can be inflated without those before it.

    Returns:
        Its bytes, in two parts, and the CRC-32 of ``data``.
    """
    # A compressor of its own looks back at nothing; the full flush ends it at a byte, for the next to follow.
    compressor = zlib_ng.compressobj(-1 if level is None else level, zlib_ng.DEFLATED, -15)
    body = compressor.compress(data)
    tail = compressor.flush(zlib_ng.Z_FINISH if last else zlib_ng.Z_FULL_FLUSH)
    return body, tail, crc32(data)


def stream(pieces: Iterable[memoryview], compression: Compression, stop: threading.Event) -> Iterator[bytes]:
    """Compresses pieces into one ordinary stream of the method; ends early once `stop` is set."""
    compressor: Any
    if compression.method == DEFLATE:
        compressor = zlib_ng.compressobj(-1 if compression.level is None else compression.level, zlib_ng.DEFLATED, -15)
    elif compression.method == BZIP2:
        compressor = bz2.BZ2Compressor(9 if compression.level is None else compression.level)
    else:
        yield _LZMA_HEADER
        compressor = lzma.LZMACompressor(lzma.FORMAT_RAW, filters=[_LZMA_FILTER])
    for piece in pieces:
        # In steps: some methods take seconds for a piece, and Ctrl-C must not wait for that.
        for first in range(0, len(piece), _STEP_BYTES):
            if stop.is_set():
                return
            compressed = compressor.compress(piece[first : first + _STEP_BYTES])
            if compressed:
                yield compressed
    if not stop.is_set():
        yield compressor.flush()
