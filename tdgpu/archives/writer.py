"""Writes zip files: entries one after another, then the central directory.

The standard library's writer cannot put an extra block into the central directory alone, nor take payloads that were
compressed elsewhere. This one writes what tdgpu needs: no data descriptors, sizes of 64 bits in every local header (as
tensordict's writer does, so that an entry may grow to any size), and in the central directory where they are needed.
"""

from __future__ import annotations

import os
import struct
import time
from typing import Any

from tdgpu.errors import InvalidArgument
from tdgpu.layout.archive.index import EXTRA_ID

__all__ = ["STORED", "DEFLATE", "BZIP2", "LZMA", "ZSTD", "ZipWriter"]

STORED, DEFLATE, BZIP2, LZMA, ZSTD = 0, 8, 12, 14, 93

# Stored tensors begin at multiples of this, so that they can be mapped as any dtype.
ALIGNMENT = 64
# The extra block whose length aligns them, as tensordict writes it.
_PADDING_ID = 0x6474

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_LOCAL_WIDE = struct.Struct("<HHQQ")
_CENTRAL = struct.Struct("<4sBBHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END_WIDE = struct.Struct("<4sQHHIIQQQQ")
_END_LOCATOR = struct.Struct("<4sIQI")

_WIDE_16, _WIDE_32 = 0xFFFF, 0xFFFFFFFF
_ID_WIDE = 1
_UNIX = 3
_MODE = 0o100644 << 16
_UTF8 = 0x800
# Version 4.5 of the format is the first with sizes of 64 bits; later methods need later ones.
_NEEDED = {STORED: 45, DEFLATE: 45, BZIP2: 46, LZMA: 63, ZSTD: 63}
# bzip2 and deflate need no flags; an LZMA stream says that it ends with a marker.
_FLAGS = {LZMA: 0x02}

_BUFFER_BYTES = 1 << 20


class _Entry:
    __slots__ = ("crc", "extra", "flags", "method", "name", "nbytes", "offset", "payload", "stored")

    def __init__(self, name: bytes, method: int, flags: int, offset: int) -> None:
        self.name = name
        self.method = method
        self.flags = flags
        self.offset = offset
        self.payload = self.nbytes = self.stored = self.crc = 0
        self.extra = b""


class ZipWriter:
    """Writes one archive to a new file.

    One entry at a time: :meth:`begin`, any number of :meth:`write`, :meth:`end`. Then :meth:`finish`.
    """

    def __init__(self, fd: int) -> None:
        """``fd``: an empty file, open for writing, which can be sought in."""
        self._fd = fd
        self._buffer = bytearray()
        self._flushed = 0
        self._entries: list[_Entry] = []
        self._names: set[bytes] = set()
        year, month, day, hour, minute, second = time.localtime()[:6]
        # What the format's two words can say: even seconds, from 1980 to 2107.
        year = min(max(year, 1980), 2107)
        self._date, self._time = (year - 1980) << 9 | month << 5 | day, hour << 11 | minute << 5 | second // 2

    @property
    def offset(self) -> int:
        """Bytes written so far."""
        return self._flushed + len(self._buffer)

    def begin(self, name: str, method: int, *, aligned: bool = False) -> None:
        """Begins an entry.

        Args:
            name: its name, with ``/`` between directories.
            method: how its payload is compressed, as zip numbers the methods.
            aligned: whether the payload begins at a multiple of 64 bytes.

        Raises:
            InvalidArgument: a name that no entry can have, or that one has already.
        """
        try:
            raw = name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"The name {name!r} is not Unicode: an archive cannot hold it.") from error
        if not raw or len(raw) > _WIDE_16 or b"\0" in raw:
            raise InvalidArgument(f"An archive cannot hold an entry of the name {name[:80]!r}.")
        if raw in self._names:
            raise InvalidArgument(f"Two files would have the name {name!r} in the archive.")
        self._names.add(raw)
        flags = _FLAGS.get(method, 0) | (0 if name.isascii() else _UTF8)
        entry = _Entry(raw, method, flags, self.offset)
        padding = b""
        if aligned:
            start = entry.offset + _LOCAL.size + len(raw) + 4 + _LOCAL_WIDE.size
            pad = -start % ALIGNMENT
            padding = struct.pack("<HH", _PADDING_ID, pad) + bytes(pad)
        self._entries.append(entry)
        self._append(self._local(entry, len(padding) + _LOCAL_WIDE.size))
        self._append(raw)
        self._append(padding)
        self._append(_LOCAL_WIDE.pack(_ID_WIDE, 16, 0, 0))
        entry.payload = self.offset

    def _local(self, entry: _Entry, extra_bytes: int) -> bytes:
        return _LOCAL.pack(
            b"PK\x03\x04", _NEEDED[entry.method], entry.flags, entry.method, self._time, self._date, entry.crc,
            _WIDE_32, _WIDE_32, len(entry.name), extra_bytes,
        )  # fmt: skip

    def write(self, data: Any) -> None:
        """Appends to the payload of the entry that was begun: any buffer of bytes."""
        self._append(data)

    def end(self, nbytes: int, crc: int, index: bytes = b"") -> bool:
        """Ends the entry.

        Args:
            nbytes: bytes of its contents, inflated.
            crc: their CRC-32.
            index: its block index, for the central directory.

        Returns:
            Whether the index was taken. It is not if it is too long.
        """
        entry = self._entries[-1]
        entry.nbytes, entry.crc, entry.stored = nbytes, crc, self.offset - entry.payload
        # The CRC is four bytes of the header; the sizes are the last 16 before the payload.
        self._patch(entry.offset + 14, struct.pack("<I", crc))
        self._patch(entry.payload - 16, struct.pack("<QQ", nbytes, entry.stored))
        block = struct.pack("<HH", EXTRA_ID, len(index) & _WIDE_16) + index if index else b""
        fits = len(block) + len(_wide_block(entry)) <= _WIDE_16
        if fits:
            entry.extra = block
        return fits

    def finish(self) -> None:
        """Writes the central directory. The archive is complete then."""
        start = self.offset
        for entry in self._entries:
            self._append(self._central(entry))
        size, count = self.offset - start, len(self._entries)
        if count >= _WIDE_16 or start >= _WIDE_32 or size >= _WIDE_32:
            wide = self.offset
            self._append(_END_WIDE.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start))
            self._append(_END_LOCATOR.pack(b"PK\x06\x07", 0, wide, 1))
            count, size, start = min(count, _WIDE_16), min(size, _WIDE_32), min(start, _WIDE_32)
        self._append(_END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0))
        self._flush()

    def _central(self, entry: _Entry) -> bytes:
        extra = _wide_block(entry) + entry.extra
        head = _CENTRAL.pack(
            b"PK\x01\x02", _NEEDED[entry.method], _UNIX, _NEEDED[entry.method], entry.flags, entry.method, self._time,
            self._date, entry.crc, min(entry.stored, _WIDE_32), min(entry.nbytes, _WIDE_32), len(entry.name),
            len(extra), 0, 0, 0, _MODE, min(entry.offset, _WIDE_32),
        )  # fmt: skip
        return head + entry.name + extra

    # --- the file ---

    def _append(self, data: Any) -> None:
        if len(data) + len(self._buffer) < _BUFFER_BYTES:
            self._buffer += data
            return
        self._flush()
        self._write_out(data)

    def _flush(self) -> None:
        self._write_out(self._buffer)
        self._buffer = bytearray()

    def _write_out(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            written = os.write(self._fd, rest)
            self._flushed += written
            rest = rest[written:]

    def _patch(self, offset: int, data: bytes) -> None:
        """Replaces bytes that were written before."""
        if offset < self._flushed < offset + len(data):
            self._flush()
        if offset >= self._flushed:
            at = offset - self._flushed
            self._buffer[at : at + len(data)] = data
        else:
            os.pwrite(self._fd, data, offset)


def _wide_block(entry: _Entry) -> bytes:
    """The extra block with the numbers that 32 bits in the central directory cannot hold, in the format's order."""
    wide = [value for value in (entry.nbytes, entry.stored, entry.offset) if value >= _WIDE_32]
    return struct.pack(f"<HH{len(wide)}Q", _ID_WIDE, 8 * len(wide), *wide) if wide else b""
