"""Digests that are remembered by file, so that a save that has not changed is not read again.

Whether a file has changed is told by its identity: device, inode, size and times. That is never wrong if

- the file's own times move with every change. A write through a shared mapping moves them only when it touches a page
  that is clean, so the file is synced first, which makes its pages clean; and only on file systems that are known to do
  so (tmpfs is not). The time of a ``write`` is taken when it begins, so one under way is waited for;
- another change would give other times: they were old already when the file was hashed, by far more than the clock's
  steps (git calls a file that is not "racily clean"), have fractions of a second, and the clock has not been set since;
- the system has not been restarted since, after which a change may be on disk and its time not.

Whatever does not hold, and whatever is damaged: the file is hashed again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import stat
import struct
import time
from pathlib import Path
from typing import NamedTuple

import xxhash

__all__ = ["Identity", "Remembered", "identity", "settled"]

#: How long before its hashing a file must have changed last, in nanoseconds.
SETTLED_NS = 10_000_000_000
#: By how much the clock may differ from the one that counts from the start of the system: far less than SETTLED_NS.
STEP_NS = 1_000_000_000
#: Records that are kept, the latest ones: 2 MiB.
RECORDS = 1 << 16
#: ext2 to ext4, xfs and btrfs: they move a file's times when a clean page is written to through a mapping, and have
#: `lseek(SEEK_DATA)` or reads wait for a write under way.
TRUSTED = frozenset({0xEF53, 0x58465342, 0x9123683E})

_MAGIC = b"tdgpu digests 1\n"
_HEADER = struct.Struct("<16s36sq")  # magic, the run of the system, when it began by the clock
_SUM = 16
_RECORD = 32  # what was hashed, and its digest


class Identity(NamedTuple):
    """What tells a file, and whether it has changed."""

    device: int
    file_system: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def identity(file: str) -> Identity | None:
    """The identity of a file; None if there is no telling whether it changes."""
    try:
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode) or not _is_trusted(file, status.st_dev):
            return None
        return _identity(status, os.statvfs(file).f_fsid)
    except OSError:
        return None


def _identity(status: os.stat_result, file_system: int) -> Identity:
    return Identity(
        status.st_dev, file_system, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )  # fmt: skip


def settled(file: str) -> Identity | None:
    """The identity of a file from which any later change will differ; None if that is not sure.

    Waits for writes that are under way, and syncs the file.
    """
    known = identity(file)
    if known is None or not _is_old(known):
        return None
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        os.fdatasync(fd)
        # It takes the lock that a write holds from before it sets the time until all of its bytes are there.
        with contextlib.suppress(OSError):  # there is no data: an empty file, or a hole
            os.lseek(fd, 0, os.SEEK_DATA)
        now = _identity(os.fstat(fd), known.file_system)
    except OSError:
        return None
    finally:
        os.close(fd)
    return now if _is_old(now) else None


def _is_old(known: Identity) -> bool:
    has_fractions = known.ctime_ns % 1_000_000_000 != 0
    return has_fractions and max(known.mtime_ns, known.ctime_ns) + SETTLED_NS < now_ns()


def now_ns() -> int:
    """The clock that files' times are of."""
    return time.time_ns()


def began_ns() -> int:
    """When the system started, by the clock: another moment after the clock has been set."""
    readings = []
    for _ in range(3):
        before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        now = now_ns()
        after = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        readings.append((after - before, now - before))
    return min(readings)[1]


def _run() -> bytes:
    """Which run of the system this is."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()


_trusted: dict[int, bool] = {}


def _is_trusted(file: str, device: int) -> bool:
    if device not in _trusted:
        _trusted[device] = magic_of(file) in TRUSTED
    return _trusted[device]


def magic_of(file: str) -> int | None:
    """The number by which the system knows the kind of a file's file system; None where that cannot be asked."""
    try:
        statfs = ctypes.CDLL(None, use_errno=True).statfs
    except (OSError, AttributeError):
        return None
    found = ctypes.create_string_buffer(512)
    statfs.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    if statfs(os.fsencode(file), found) != 0:
        return None
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF


class Remembered:
    """The digests that are remembered in a directory.

    A missing, foreign or damaged file is an empty one. Processes that save at once do not lose each other's, and no
    reader sees half of a file.
    """

    def __init__(self, directory: Path, began: int | None) -> None:
        self._file = directory / "digests"
        self._began = began
        self._known: dict[bytes, bytes] = {}
        self._new: dict[bytes, bytes] = {}

    @classmethod
    def load(cls, directory: Path) -> Remembered:
        """What is remembered in a directory, which need not exist."""
        try:
            memory = cls(directory, began_ns())
            memory._known = memory._read()
        except (OSError, AttributeError):  # a system without such a clock
            memory = cls(directory, None)
        return memory

    def get(self, file: Identity | None, what: tuple[int, ...]) -> bytes | None:
        """The digest of a range of a file; None if it must be hashed."""
        return None if file is None or not self._known else self._known.get(_key(file, what))

    def add(self, file: Identity | None, what: tuple[int, ...], digest: bytes) -> None:
        """Remembers a digest, unless the file is None."""
        if file is not None:
            self._new[_key(file, what)] = digest

    def save(self) -> None:
        """Writes what was added. A directory that cannot be written to, or a full disk, is no error."""
        if not self._new or self._began is None:
            return
        with contextlib.suppress(OSError):
            if abs(began_ns() - self._began) > STEP_NS:
                return  # the clock was set while these were hashed
            self._file.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(f"{self._file}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                records = self._read()
                for key in self._new:
                    records.pop(key, None)  # the latest come last
                records |= self._new
                self._write(records)
            finally:
                os.close(lock)
            self._known, self._new = records, {}

    def _read(self) -> dict[bytes, bytes]:
        try:
            data = self._file.read_bytes()
        except FileNotFoundError:
            return {}
        body = data[:-_SUM]
        if len(body) < _HEADER.size or (len(body) - _HEADER.size) % _RECORD or data[-_SUM:] != _sum(body):
            return {}
        magic, run, began = _HEADER.unpack_from(body)
        if magic != _MAGIC or run != _run() or self._began is None or abs(began - self._began) > STEP_NS:
            return {}
        starts = range(_HEADER.size, len(body), _RECORD)
        return {body[start : start + 16]: body[start + 16 : start + _RECORD] for start in starts}

    def _write(self, records: dict[bytes, bytes]) -> None:
        latest = list(records.items())[-RECORDS:]
        body = _HEADER.pack(_MAGIC, _run(), self._began) + b"".join(key + digest for key, digest in latest)
        new = f"{self._file}.new"  # the lock is held: nobody else writes it, and a killed writer's is written over
        with open(new, "wb") as file:
            file.write(body + _sum(body))
        os.replace(new, self._file)


def _key(file: Identity, what: tuple[int, ...]) -> bytes:
    return xxhash.xxh3_128_digest(repr((*file, *what)).encode())


def _sum(body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(body)
