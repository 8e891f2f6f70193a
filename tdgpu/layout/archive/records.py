"""The records of a zip archive: what its central directory says of each entry, and its local header once more."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

from tdgpu.errors import ArchiveError, NotSupported, TdgpuError
from tdgpu.layout.archive.ends import End
from tdgpu.layout.archive.index import EXTRA_ID
from tdgpu.layout.archive.inflate import METHODS

__all__ = ["LOCAL_BYTES", "LOCAL_SIGNATURE", "Central", "Entry", "Refuse", "check_local", "encoded"]

_CENTRAL = struct.Struct("<4s4B4H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_EXTRA = struct.Struct("<HH")
_U64 = struct.Struct("<Q")

#: Bytes of a local header, without the name and the extra field.
LOCAL_BYTES = _LOCAL.size
LOCAL_SIGNATURE = b"PK\x03\x04"
_CENTRAL_SIGNATURE = b"PK\x01\x02"

_ENCRYPTED = 1 << 0 | 1 << 6 | 1 << 13  # the bytes; strongly; the central directory
_DESCRIPTOR = 1 << 3
_PATCH = 1 << 5
_UTF8 = 1 << 11

_ZIP64 = 0x0001
_LARGE = 0xFFFF_FFFF
_LARGE_DISK = 0xFFFF
_LATEST_VERSION = 63
_LINK = 0xA  # the upper four bits of the external attributes, as in S_IFLNK

_STORED, _DEFLATE = 0, 8
# No deflate stream inflates to more than that many times its size; beginning and end aside.
_DEFLATE_RATIO = 1032


class Refuse(Protocol):
    """Makes the error about the archive, or its entry ``name``."""

    def __call__(self, name: str | None, what: str, cause: type[TdgpuError] = ArchiveError) -> TdgpuError: ...


class Entry:
    """One file of an archive.

    Attributes:
        name: its name, with ``/`` between the parts.
        method: how it is compressed, as zip numbers the methods.
        flags: zip's general purpose flags.
        crc: CRC-32 of the inflated bytes.
        stored: bytes in the archive.
        nbytes: bytes when it is inflated.
        header: first byte of its local header in the file.
        limit: where the next thing in the file begins, before which it ends.
        index: the extra block of a block index, or None.
        payload: first byte of its bytes in the file; -1 until its local header has been read.
    """

    __slots__ = ("crc", "flags", "header", "index", "limit", "method", "name", "nbytes", "payload", "stored")

    def __init__(
        self, name: str, method: int, flags: int, crc: int, stored: int, nbytes: int, header: int, index: bytes | None
    ) -> None:
        self.name = name
        self.method = method
        self.flags = flags
        self.crc = crc
        self.stored = stored
        self.nbytes = nbytes
        self.header = header
        self.index = index
        self.limit = 0
        self.payload = -1

    def __repr__(self) -> str:
        return f"Entry({self.name!r}, {METHODS.get(self.method, self.method)}, {self.stored}, {self.nbytes})"


class Central:
    """The central directory.

    Args:
        data: its bytes.
        end: what the end of the archive says of it.
        refuse: makes the errors.

    Attributes:
        entries: the files, by name, in their order here.
        names: the names of all entries, those of directories with a ``/`` at the end.
        refused: what speaks against the first entry that is refused, or None. It is not raised here, because another
            zip file than that of a save may well have such entries.

    Raises:
        ArchiveError: it is damaged.
    """

    def __init__(self, data: bytes, end: End, refuse: Refuse) -> None:
        self.entries: dict[str, Entry] = {}
        self.names: list[str] = []
        self.refused: TdgpuError | None = None
        self._refuse = refuse
        # Of each entry: first byte, least end, name, and the entry if it is a file.
        self._spans: list[tuple[int, int, str, Entry | None]] = []
        position = 0
        while position < end.nbytes:
            position = self._record(data, position, end)
        # Writers without zip64 begin again at 0 after 65535.
        count = len(self.names)
        if count != end.entries and (end.is_zip64 or count & 0xFFFF != end.entries):
            raise refuse(None, f"The archive has {count} entries, not {end.entries} as its end says")

    def _record(self, data: bytes, position: int, end: End) -> int:
        """Reads the record at ``position``, and returns where the next one begins."""
        begin = position + _CENTRAL.size
        if begin > end.nbytes:
            raise self._refuse(None, f"The central directory ends inside the record of entry {len(self.names)}")
        (
            signature, _, _, version, _, flags, method, _, _, crc, stored, nbytes, name_bytes, extra_bytes,
            comment_bytes, disk, _, attributes, header,
        ) = _CENTRAL.unpack_from(data, position)  # fmt: skip
        if signature != _CENTRAL_SIGNATURE:
            raise self._refuse(None, f"There is no record of entry {len(self.names)} at byte {end.start + position}")
        position = begin + name_bytes + extra_bytes + comment_bytes
        if position > end.nbytes:
            raise self._refuse(None, f"The central directory ends inside the record of entry {len(self.names)}")
        raw = data[begin : begin + name_bytes]
        name = _decoded(raw, flags)
        if name is None:
            raise self._refuse(None, f"The name {raw!r} is not UTF-8, as its entry says")
        index: bytes | None = None
        if extra_bytes:
            begin += name_bytes
            extra = data[begin : begin + extra_bytes]
            long, index = _extra(extra, name, self._refuse)
            if long is not None:
                nbytes, stored, header = _widened(long, (nbytes, stored, header), name, self._refuse)
        header += end.shift
        self.names.append(name)
        if LOCAL_BYTES * len(self.names) > end.start:  # before much time is spent on what cannot be
            raise self._refuse(name, "The entries overlap: there are more than have room before the central directory")
        entry = None
        if not name.endswith("/"):
            entry = self.entries[name] = Entry(name, method, flags, crc, stored, nbytes, header, index)
            if nbytes != stored and method in (_STORED, _DEFLATE):
                self._check_ratio(entry)
        self._spans.append((header, header + LOCAL_BYTES + name_bytes + stored, name, entry))
        if flags & (_ENCRYPTED | _PATCH) or disk or version > _LATEST_VERSION or attributes >> 28 == _LINK:
            self._check_kind(name, flags, disk, version, attributes)
        return position

    def _check_ratio(self, entry: Entry) -> None:
        if entry.method == _STORED or entry.nbytes > _DEFLATE_RATIO * (entry.stored + 64):
            method = METHODS[entry.method]
            what = f"Its {entry.stored} bytes, by method {method}, cannot be {entry.nbytes} bytes when inflated"
            self.refused = self.refused or self._refuse(entry.name, what)

    def _check_kind(self, name: str, flags: int, disk: int, version: int, attributes: int) -> None:
        refused: TdgpuError | None = None
        if flags & _ENCRYPTED:
            refused = self._refuse(name, "The entry is encrypted")
        elif disk not in (0, _LARGE_DISK):
            refused = self._refuse(name, f"It lies on disk {disk}: archives of several disks are not supported")
        elif attributes >> 28 == _LINK:
            refused = self._refuse(name, "The entry is a symbolic link")
        elif version > _LATEST_VERSION:
            refused = self._refuse(name, f"The entry needs version {version / 10} of zip", NotSupported)
        elif flags & _PATCH:
            refused = self._refuse(name, "The entry is compressed patched data", NotSupported)
        self.refused = self.refused or refused

    def bound(self, start: int) -> None:
        """Sets ``limit`` of each entry: where the next one begins, or the central directory, at ``start``.

        Raises:
            ArchiveError: an entry goes beyond it, so that two would share bytes.
        """
        self._spans.sort(key=lambda span: span[0], reverse=True)
        limit = start
        for header, least, name, entry in self._spans:
            if least > limit:
                raise self._refuse(name, f"It takes bytes {header} to {least}, and overlaps what begins at {limit}")
            if entry is not None:
                entry.limit = limit
            limit = header


def check_local(header: bytes, more: Callable[[int, int], bytes], entry: Entry, refuse: Refuse) -> int:
    """Compares the local header of an entry with what the central directory says.

    Args:
        header: the file's bytes from ``entry.header`` on, those of the name included.
        more: reads from the file, given the first byte and how many.
        entry: what the central directory says.
        refuse: makes the errors.

    Returns:
        The first byte of the entry's bytes in the file.

    Raises:
        ArchiveError: it says otherwise, or is not there.
    """
    signature, _, flags, method, _, _, crc, stored, nbytes, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
    if signature != LOCAL_SIGNATURE:
        raise refuse(entry.name, f"There is no local header at byte {entry.header}")
    begin = entry.header + LOCAL_BYTES + name_bytes
    payload = begin + extra_bytes
    if payload + entry.stored > entry.limit:
        end = payload + entry.stored
        raise refuse(entry.name, f"It takes bytes {entry.header} to {end}, and overlaps what begins at {entry.limit}")
    name = header[LOCAL_BYTES : LOCAL_BYTES + name_bytes]
    if _decoded(name, flags) != entry.name:
        raise refuse(entry.name, f"Its local header has another name, {name!r}")

    if method != entry.method:
        raise _differs(entry, refuse, "methods", entry.method, method)
    if flags & _ENCRYPTED:
        raise _differs(entry, refuse, "flags", entry.flags, flags)
    if not flags & _DESCRIPTOR:  # else the central directory alone has them
        if crc != entry.crc:
            raise _differs(entry, refuse, "CRC-32", entry.crc, crc)
        if _LARGE in (stored, nbytes):
            long, _ = _extra(more(begin, extra_bytes), entry.name, refuse)
            if long is not None:
                nbytes, stored, _ = _widened(long, (nbytes, stored, 0), entry.name, refuse)
        if (stored, nbytes) != (entry.stored, entry.nbytes):
            raise _differs(entry, refuse, "sizes", (entry.stored, entry.nbytes), (stored, nbytes))
    return payload


def _differs(entry: Entry, refuse: Refuse, what: str, wanted: object, found: object) -> TdgpuError:
    return refuse(entry.name, f"Its local header has other {what}: {found}, not {wanted} as the central directory")


def encoded(name: str, flags: int) -> bytes:
    """A name as it is in the archive."""
    return name.encode("utf-8" if flags & _UTF8 or name.isascii() else "cp437")  # ASCII is the same in both


def _decoded(name: bytes, flags: int) -> str | None:
    """A name as ``zipfile`` reads it; None if it cannot."""
    if not (flags & _UTF8 or name.isascii()):
        return name.decode("cp437")
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


def _extra(extra: bytes, name: str, refuse: Refuse) -> tuple[bytes | None, bytes | None]:
    """The blocks that matter in an extra field of the entry ``name``, or None: zip64's and that of a block index."""
    long: bytes | None = None
    index: bytes | None = None
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = _EXTRA.unpack_from(extra, at)
        at += 4
        if at + nbytes > len(extra):
            raise refuse(name, f"Its extra block {kind:#06x} of {nbytes} bytes goes past the extra field")
        if kind == _ZIP64:
            if long is not None:
                raise refuse(name, "It has two zip64 blocks")
            long = extra[at : at + nbytes]
        elif kind == EXTRA_ID:
            index = extra[at : at + nbytes]
        at += nbytes
    return long, index


def _widened(long: bytes, values: tuple[int, int, int], name: str, refuse: Refuse) -> tuple[int, int, int]:
    """``values`` with those that 32 bits could not hold, as a zip64 block gives them: one after the other."""
    found = list(values)
    at = 0
    for i, value in enumerate(values):
        if value == _LARGE:
            if at + 8 > len(long):
                raise refuse(name, f"Its zip64 block of {len(long)} bytes is too short")
            (found[i],) = _U64.unpack_from(long, at)
            at += 8
    return found[0], found[1], found[2]
