"""Hostile payloads: bombs, checksums that do not fit, streams that end early or late, metadata without bounds."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from archives import small
from archives.hostile import CASES, add, family
from archives.payloads import (
    BZIP2,
    DEFLATE,
    LZMA,
    METHODS,
    STORED,
    ZSTD,
    compress,
    compress_lzma,
    deflated_zeros,
    lzma_header,
)
from archives.raw import ALL_16, ALL_32, SIGNATURES, Entry, write, zip64_field
from tdgpu.errors import ArchiveError, ChecksumError, FormatError, NotSupported, TdgpuError

__all__ = ["CASES"]

A_NAME, META = "a.memmap", "n/meta.json"
MiB = 1 << 20
LARGE = {BZIP2: 64 * MiB, LZMA: 64 * MiB, ZSTD: 512 * MiB}
COMPRESSED = {name: method for name, method in METHODS.items() if method}
# What does not inflate to what it promises; or what is seen to be impossible before it is tried.
BROKEN = (ChecksumError, ArchiveError)


def packed(method: int, payload: bytes | Callable[[], bytes], **fields: Any) -> Callable[[], Sequence[Entry]]:
    """The small save with this payload of ``a``."""

    def make() -> Sequence[Entry]:
        data = payload() if callable(payload) else payload
        return small.entries(method, a={"payload": data, **fields})

    return make


# --- bombs ------------------------------------------------------------------------------------------------------------


def bombs(name: str, method: int) -> None:
    family(
        f"bomb, {name}",
        {
            "declared small, inflates to far more": packed(method, lambda: bomb(method)),
            "one byte more than declared": packed(method, lambda: compress(small.A + b"x", method)),
            "one byte less than declared": packed(method, lambda: compress(small.A[:-1], method)),
        },
        ChecksumError,
        "bytes",
        A_NAME,
    )
    small_one = {"declared as 64 MiB, inflates to 40000 bytes": lambda: grown(method, 64 * MiB)}
    family(f"bomb, {name}", small_one, BROKEN, "bytes", A_NAME)


def impossible(size: int) -> None:
    name = f"2^{size.bit_length() - 1} bytes, more than deflate can pack in so few"
    family("bomb, deflate", {name: lambda: grown(DEFLATE, size)}, BROKEN, "local", A_NAME)


@functools.cache
def bomb(method: int) -> bytes:
    """The payload of very many zeros."""
    return deflated_zeros(1024 * MiB) if method == DEFLATE else compress(bytes(LARGE[method]), method)


def grown(method: int, nbytes: int) -> list[Entry]:
    """The small save whose metadata and headers say that ``a`` has ``nbytes``, more than it has."""
    listed = small.entries(method)
    listed[0] = Entry("meta.json", small.level_meta(["n"], a=small.leaf_meta([nbytes // 4])))
    payload = listed[1].packed
    if nbytes >= ALL_32:
        sizes = {"usize": ALL_32, "zip64": zip64_field(nbytes)}
        local = {"usize": ALL_32, "csize": ALL_32, "zip64": zip64_field(nbytes, len(payload))}
        listed[1].central, listed[1].local = sizes, local
    else:
        listed[1].both = {"usize": nbytes}
    return listed


# --- metadata without bounds ------------------------------------------------------------------------------------------


def metadata() -> None:
    def huge(method: int = DEFLATE, **fields: Any) -> bytes:
        listed = small.entries()
        crc = 0
        for _ in range(1024):
            crc = zlib.crc32(bytes(MiB), crc)
        both = {"usize": 1 << 30, "crc": crc, **fields}
        listed[2] = Entry(META, b"", method, bomb(DEFLATE), both=both)
        return write(listed).data

    impossible_size = ALL_32 - 1
    add("metadata: a gigabyte", huge, FormatError, "central", META, unpacks=True)
    add("metadata: a gigabyte, declared small", lambda: huge(usize=200), BROKEN, "central", META)
    add("metadata: 4 GiB, more than deflate can pack in so few", lambda: huge(usize=impossible_size), FormatError,
        "central", META)  # fmt: skip
    family("metadata, stored", {"wrong CRC": lambda: _meta_entry(STORED, both={"crc": 1})}, BROKEN, "central", META)

    def deep(levels: int) -> bytes:
        meta = small.level_meta(["d"])
        return write([Entry("d/" * i + "meta.json", meta) for i in range(levels)]).data

    far = Entry("d/" * 5000 + "x", b"x")
    add("metadata: 400 levels", lambda: deep(400), FormatError, unpacks=True)
    add("metadata: 5000 levels", lambda: deep(5000), FormatError, unpacks=True)
    add("metadata: a name of 5000 levels beside", lambda: write([*small.entries(), far]).data, (), unpacks=True)
    add("metadata: a million entries", million_entries, TdgpuError)
    add("metadata: ten thousand entries, all sound", many_entries, (), unpacks=True)


def packed_metadata(name: str, method: int) -> None:
    family(
        f"metadata, {name}",
        {
            "wrong CRC": lambda: _meta_entry(method, both={"crc": 1}),
            "damaged": lambda: _meta_entry(method, payload=b"\xff" * 50),
            "one byte short": lambda: _meta_entry(method, both={"usize": len(_meta()) - 1}),
            "inflates to far more": lambda: _meta_entry(method, payload=bomb(method)),
        },
        BROKEN,
        "central",
        META,
    )


def _meta() -> bytes:
    return small.level_meta(c=small.leaf_meta([200], "int64"))


def _meta_entry(method: int, **fields: Any) -> Sequence[Entry]:
    listed = small.entries()
    listed[2] = Entry(**{"name": META, "data": _meta(), "method": method, **fields})
    return listed


def million_entries(count: int = 1_000_000) -> bytes:
    """A central directory of a million names, all of one and the same local header."""
    local = write([Entry("meta.json", b"{}")])
    head = local.data[: local.span("meta.json", "central", "signature").start]
    first = local.span("meta.json", "central", "signature").start
    own = local.data[first : local.span("", "end", "signature").start]
    start = own[:28] + struct.pack("<H", 8) + own[30:46]
    directory = own + b"".join([start + b"%08d" % i for i in range(count)])
    return head + directory + ends(count + 1, len(directory), first)


def many_entries(count: int = 10_000) -> bytes:
    """The small save and very many empty entries that nothing refers to."""
    base = write(small.entries())
    one = write([Entry("x0000000", b"")])
    local = one.data[: one.span("x0000000", "central", "signature").start]
    record = one.data[len(local) : one.span("", "end", "signature").start]
    size = base.span("meta.json", "central", "signature").start
    own = base.data[size : base.span("", "end", "signature").start]
    names = [b"x%07d" % i for i in range(count)]
    headers = b"".join([local[:30] + name for name in names])
    places = [(size + i * len(local)).to_bytes(4, "little") for i in range(count)]
    directory = own + b"".join([record[:42] + place + name for place, name in zip(places, names, strict=True)])
    return base.data[:size] + headers + directory + ends(count + 4, len(directory), size + len(headers))


def ends(count: int, size: int, start: int) -> bytes:
    """The end records behind a central directory of more entries than the short one can count."""
    end64 = struct.pack("<IQHHIIQQQQ", SIGNATURES["end64"], 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<IIQI", SIGNATURES["locator64"], 0, start + size, 1)
    return end64 + locator + struct.pack("<IHHHHIIH", SIGNATURES["end"], 0, 0, ALL_16, ALL_16, ALL_32, ALL_32, 0)


# --- streams ----------------------------------------------------------------------------------------------------------


def streams(name: str, method: int) -> None:
    def whole() -> bytes:
        return compress(small.A, method)

    family(
        f"stream, {name}",
        {
            "wrong CRC": lambda: small.entries(method, a={"both": {"crc": 1}}),
            "ends early": packed(method, lambda: whole()[:-20]),
            "is cut in half": packed(method, lambda: whole()[: len(whole()) // 2]),
            "is empty": packed(method, b""),
            "one byte only": packed(method, lambda: whole()[:1]),
            "is noise": packed(method, bytes((i * 197 + 89) & 255 for i in range(5000))),
            "a flipped bit": packed(method, lambda: flipped(whole())),
            "other bytes, well packed": packed(method, lambda: compress(small.A[::-1], method)),
        },
        BROKEN,
        "bytes",
        A_NAME,
    )
    garbage = {"garbage behind its end": packed(method, lambda: whole() + b"garbage")}
    # zipfile, and with it tensordict, minds what is behind the end for deflate only.
    family(f"stream, {name}", garbage, BROKEN if method == DEFLATE else (), "bytes")


def flipped(payload: bytes) -> bytes:
    """The payload with one bit in the middle changed."""
    middle = len(payload) // 2
    return payload[:middle] + bytes([payload[middle] ^ 4]) + payload[middle + 1 :]


def deflate_streams() -> None:
    head = zlib.compressobj(6, zlib.DEFLATED, -15)
    half = head.compress(small.A) + head.flush(zlib.Z_SYNC_FLUSH)
    family(
        "stream, deflate",
        {
            "no last block": packed(DEFLATE, half),
            "a block of no known type": packed(DEFLATE, half + b"\x07"),
            "a zlib header": packed(DEFLATE, zlib.compress(small.A)),
            "a second stream behind": packed(DEFLATE, compress(small.A, DEFLATE) + compress(b"", DEFLATE)),
            "only empty blocks": packed(DEFLATE, b"\0\0\0\xff\xff" * 1000 + b"\x03\0"),
        },
        BROKEN,
        "bytes",
        A_NAME,
    )
    # Slow to get through, but sound.
    many = b"\0\0\0\xff\xff" * 400_000 + compress(small.A, DEFLATE)
    family("stream, deflate", {"400000 empty blocks first": packed(DEFLATE, many)}, (), "bytes")


def lzma_streams() -> None:
    stream = compress_lzma(small.A)[len(lzma_header()) :]
    family(
        "stream, lzma",
        {
            "impossible properties": packed(LZMA, lzma_header(lc_lp_pb=255) + stream),
            "other properties": packed(LZMA, lzma_header(lc_lp_pb=0) + stream),
            "no properties": packed(LZMA, lzma_header(size=0) + stream),
            "long properties": packed(LZMA, lzma_header(size=65535) + stream),
            "half a header": packed(LZMA, lzma_header()[:6]),
        },
        (*BROKEN, NotSupported),
        "bytes",
        A_NAME,
    )
    # A decoder that believes the first takes that much memory for a leaf of 40 000 bytes.
    family(
        "stream, lzma",
        {
            "a dictionary of 4 GiB": packed(LZMA, lzma_header(ALL_32) + stream),
            "a dictionary of 2 GiB": packed(LZMA, lzma_header(1 << 31) + stream),
            "a dictionary of no bytes": packed(LZMA, lzma_header(0) + stream),
        },
        (),
        "bytes",
    )


def zstd_frame(window: int) -> bytes:
    """A frame of raw blocks with this window descriptor."""
    data = small.A
    block = struct.pack("<I", len(data) << 3 | 1)[:3] + data
    return struct.pack("<IBB", 0xFD2FB528, 0, window) + block


def zstd_streams() -> None:
    windows = {
        "a window of 2 GiB": packed(ZSTD, zstd_frame(0xA8)),
        "the largest window": packed(ZSTD, zstd_frame(0xFF)),
    }
    family("stream, zstd", windows, (), "bytes")


def bzip2_streams() -> None:
    halves = small.A[:20_000], small.A[20_000:]
    family("stream, bzip2", {"two streams": packed(BZIP2, lambda: b"".join(compress(half, BZIP2) for half in halves))},
           (), "bytes")  # fmt: skip


for title, number in COMPRESSED.items():
    bombs(title, number)
    packed_metadata(title, number)
    streams(title, number)
for exponent in (36, 40, 50):
    impossible(1 << exponent)
metadata()
deflate_streams()
lzma_streams()
zstd_streams()
bzip2_streams()
