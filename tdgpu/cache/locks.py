"""Who uses what in the cache: locks of the kernel's, which end with their process, however it ends.

- A :class:`Hold` says that a directory is in use. Any number of processes may have one; its lock is a shared one.
- An :class:`Exclusive` lock says that one process builds, or removes.

Both are a ``flock`` on a file, never on a directory: NFS, which makes them record locks, wants a file that can be
written to. Where a file system has no locks at all, that is said once; then nobody knows what is in use, so nothing is
removed that could be, and two processes may build the same.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import warnings
from collections.abc import Callable

from tdgpu.errors import user_level
from tdgpu.layout.flock import FIRST_PAUSE, LONGEST_PAUSE, ExclusiveLock, holder, is_still_there, try_lock
from tdgpu.signals import uninterrupted, until_exit

__all__ = ["USED", "CacheWarning", "Exclusive", "Hold", "while_locked"]

#: The file in a directory that whoever uses the directory locks. Its time is that of the last use.
USED = "used"

_READ_ONLY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
#: How long it is waited for somebody who removes a directory: he holds its lock only until he has renamed it.
_REMOVAL_SECONDS = 5.0
#: After so long, whoever waits for another builder is told for whom.
PATIENCE_SECONDS = 10.0

_told: set[int] = set()


class CacheWarning(UserWarning):
    """Something about the cache that the user should know, and that is no error."""


def _tell(descriptor: int, path: str, error: OSError) -> None:
    """Says once of a file system that it has no locks."""
    device = os.fstat(descriptor).st_dev
    if device not in _told:
        _told.add(device)
        warnings.warn(
            f"The file system of {path} has no locks ({error.strerror}). So nothing tells which results of the"
            " cache are in use, and none is removed; and processes that need the same result at once each compute"
            " it. Have TDGPU_CACHE name a directory on another file system.",
            CacheWarning,
            stacklevel=user_level(),
        )


class Hold:
    """That a directory is in use, for as long as this object lives: it is not removed.

    A forked child has a copy of it, and the lock lasts until both are gone: it is never unlocked, only closed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     hold = Hold.begin(path)
    ...     print(Exclusive(f"{path}/used").acquire())
    ...     del hold
    ...     print(Exclusive(f"{path}/used").acquire())
    False
    True
    """

    __slots__ = ("_descriptor", "directory")

    def __init__(self, directory: str, descriptor: int) -> None:
        self.directory = directory
        self._descriptor = descriptor

    @classmethod
    def begin(cls, directory: str | os.PathLike[str]) -> Hold | None:
        """As :meth:`take`, for a directory that is new and has no file to lock yet."""
        return cls._take(os.fspath(directory), os.O_RDWR | os.O_CREAT)

    @classmethod
    def take(cls, directory: str | os.PathLike[str]) -> Hold | None:
        """A hold of a directory; None if it is not there, or is being removed."""
        return cls._take(os.fspath(directory), os.O_RDWR)

    @classmethod
    def _take(cls, directory: str, flags: int) -> Hold | None:
        deadline = time.monotonic() + _REMOVAL_SECONDS
        while True:
            found: Hold | bool | None = uninterrupted(lambda: cls._try(directory, flags))
            if not isinstance(found, bool):
                return found
            # Somebody removes it, or looks whether somebody uses it: that takes no time.
            if time.monotonic() > deadline:
                return None
            time.sleep(FIRST_PAUSE)

    @classmethod
    def _try(cls, directory: str, flags: int) -> Hold | bool | None:
        """A hold; None if there is nothing to hold; False if it is locked."""
        path = os.path.join(directory, USED)
        try:
            descriptor = _open(path, flags)
        except (FileNotFoundError, NotADirectoryError):
            return None
        hold = None
        try:
            if try_lock(descriptor, fcntl.LOCK_SH, path, lambda at, error: _tell(at, path, error)) is False:
                return False
            if is_still_there(descriptor, path):
                hold = cls(directory, descriptor)
            return hold
        finally:
            if hold is None:
                os.close(descriptor)

    def touch(self) -> None:
        """Notes that it is used now. Where nothing can be written, nothing is noted."""
        with contextlib.suppress(OSError):
            os.utime(os.path.join(self.directory, USED))

    @until_exit
    def __del__(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        # For a shared lock a file need not be writable: what others have made can be used.
        if error.errno not in _READ_ONLY or flags & os.O_CREAT:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


class Exclusive(ExclusiveLock):
    """The right to build what a file stands for, or to remove what it lies in.

    Args:
        path: the file. It is made if need be, but no directory is.
    """

    __slots__ = ()

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)

    def acquire(self) -> bool:
        """Takes the lock if nobody has it: whether it did.

        Raises:
            OSError: the file cannot be opened for writing.
        """
        acquired: bool = uninterrupted(self._try)
        return acquired

    def wait(self, what: str) -> None:
        """Takes the lock, as soon as it can be had. ``what`` names what for, for whom it takes long.

        Raises:
            OSError: the file cannot be opened for writing.
        """
        told = time.monotonic() + PATIENCE_SECONDS
        pause = FIRST_PAUSE
        while not self.acquire():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if time.monotonic() > told:
                told = float("inf")
                pid = holder(self._path)
                who = "this very process" if pid == os.getpid() else f"process {pid}" if pid else "another process"
                warnings.warn(f"Waiting for {who}, which {what}.", CacheWarning, stacklevel=user_level())

    def release(self) -> None:
        """Gives it back. May be called again; in a forked child it does nothing, for the parent still has it."""
        uninterrupted(super().release, always=True)

    def _tell(self, descriptor: int, error: OSError) -> None:
        _tell(descriptor, self._path, error)


def while_locked(path: str | os.PathLike[str], function: Callable[[], None]) -> bool:
    """Calls a function while a file is locked, unless somebody else has locked it, or nothing can be: whether it did.

    Raises:
        OSError: the file cannot be opened for writing.
    """
    lock = Exclusive(path)

    def run() -> bool:
        if not lock.acquire():
            return False
        try:
            if lock.is_real:
                function()
            return lock.is_real
        finally:
            lock.release()

    done: bool = uninterrupted(run)
    return done
