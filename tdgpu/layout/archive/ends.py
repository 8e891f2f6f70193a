"""Where the central directory of a zip archive lies, as Python's ``zipfile`` finds it, but with nothing believed."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import NamedTuple

from tdgpu.errors import TdgpuError

__all__ = ["End", "find"]

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")

_END_SIGNATURE = b"PK\x05\x06"
_LOCATOR_SIGNATURE = b"PK\x06\x07"
_END64_SIGNATURE = b"PK\x06\x06"

_LONGEST_COMMENT = 1 << 16

Refuse = Callable[[str], TdgpuError]


class End(NamedTuple):
    """What the end of an archive says.

    Attributes:
        start, nbytes: the central directory's first byte in the file, and its bytes.
        entries: how many there are.
        shift: bytes in front of the archive, such as the program of a self-extracting one: offsets do not count them.
        is_zip64: whether the numbers have 64 bits.
    """

    start: int
    nbytes: int
    entries: int
    shift: int
    is_zip64: bool


def find(fd: int, size: int, refuse: Refuse) -> End | None:
    """Reads the end records of the file.

    Args:
        fd: the file.
        size: its bytes.
        refuse: makes the error for an archive whose end contradicts itself.

    Returns:
        What they say, or None if the file does not end like a zip archive.
    """
    at = max(size - _LONGEST_COMMENT - _END.size, 0)
    tail = os.pread(fd, size - at, at)
    plain = tail[-_END.size :]
    if len(plain) == _END.size and plain[:4] == _END_SIGNATURE and plain[-2:] == b"\0\0":
        record = len(tail) - _END.size
    else:  # there is a comment, in which the signature is taken not to occur
        record = tail.rfind(_END_SIGNATURE)
    if record < 0 or len(tail) - record < _END.size:
        return None
    _, disk, first_disk, count_here, count, nbytes, start, comment = _END.unpack_from(tail, record)
    if record + _END.size + comment > len(tail):
        raise refuse(f"The archive is truncated: {len(tail) - record - _END.size} of {comment} bytes of its comment")
    location = at + record
    locator = os.pread(fd, _LOCATOR.size, location - _LOCATOR.size) if location >= _LOCATOR.size else b""
    is_zip64 = len(locator) == _LOCATOR.size and locator[:4] == _LOCATOR_SIGNATURE
    recorded_at = None
    if is_zip64:
        _, locator_disk, recorded_at, disks = _LOCATOR.unpack(locator)
        location -= _LOCATOR.size + _END64.size
        large = os.pread(fd, _END64.size, location) if location >= 0 else b""
        if len(large) < _END64.size or large[:4] != _END64_SIGNATURE:
            raise refuse("The zip64 end record is not where it must be, before its locator")
        short = (disk, first_disk, count_here, count, nbytes, start)
        _, record_bytes, _, _, *long = _END64.unpack(large)
        if record_bytes != _END64.size - 12:
            raise refuse(f"The zip64 end record says it has {record_bytes} bytes, not {_END64.size - 12}")
        for little, big, bits in zip(short, long, (16, 16, 16, 16, 32, 32), strict=True):
            if little != big and little != (1 << bits) - 1:
                raise refuse(f"The two end records contradict each other: {little} is not {big}")
        disk, first_disk, count_here, count, nbytes, start = long
        if locator_disk or disks > 1:
            raise refuse("Archives of several disks are not supported")
    if disk or first_disk or count_here != count:
        raise refuse("Archives of several disks are not supported")
    shift = location - nbytes - start
    if shift < 0:
        raise refuse(f"The central directory ({nbytes} bytes at {start}) does not end before byte {location}")
    if recorded_at is not None and recorded_at + shift != location:
        raise refuse(f"The zip64 end record is at {location}, not at {recorded_at + shift} as its locator says")
    return End(start + shift, nbytes, count, shift, is_zip64)
