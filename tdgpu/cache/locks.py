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
import threading
import time
import warnings
from collections.abc import Callable

from tdgpu.layout.lock import _holder
from tdgpu.layout.objects import _user_level
from tdgpu.signals import uninterrupted, until_exit

__all__ = ["USED", "CacheWarning", "Exclusive", "Hold", "while_locked"]

#: The file in a directory that whoever uses the directory locks. Its time is that of the last use.
USED = "used"

# What flock fails with where the file system has no such locks.
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})
_READ_ONLY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05
#: How long it is waited for somebody who removes a directory: he holds its lock only until he has renamed it.
_REMOVAL_SECONDS = 5.0
#: After so long, whoever waits for another builder is told for whom.
PATIENCE_SECONDS = 10.0

# The descriptors of this process's exclusive locks. A fork waits while one is being taken, so that the child knows all
# of them; reentrant, because a signal handler may fork in the middle of that.
_taking = threading.RLock()
_exclusive: set[int] = set()
_told: set[int] = set()


class CacheWarning(UserWarning):
    """Something about the cache that the user should know, and that is no error."""


def _close_in_child() -> None:
    """Closes what a fork copied: the lock would outlive its killed owner for as long as the child lives."""
    for descriptor in _exclusive:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _exclusive.clear()
    _taking.release()


os.register_at_fork(before=_taking.acquire, after_in_parent=_taking.release, after_in_child=_close_in_child)


def _flock(descriptor: int, operation: int, path: str) -> bool | None:
    """Takes a lock without waiting: whether it was to be had; None where there are no locks."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise OSError(error.errno, error.strerror, path) from error
        device = os.fstat(descriptor).st_dev
        if device not in _told:
            _told.add(device)
            warnings.warn(
                f"The file system of {path} has no locks ({error.strerror}). So nothing tells which results of the"
                " cache are in use, and none is removed; and processes that need the same result at once each compute"
                " it. Have TDGPU_CACHE name a directory on another file system.",
                CacheWarning,
                stacklevel=_user_level(),
            )
        return None
    return True


def _is_there(descriptor: int, path: str) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


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
            time.sleep(_FIRST_PAUSE)

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
            if _flock(descriptor, fcntl.LOCK_SH, path) is False:
                return False
            if _is_there(descriptor, path):
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


class Exclusive:
    """The right to build what a file stands for, or to remove what it lies in.

    Args:
        path: the file. It is made if need be, but no directory is.

    Attributes:
        is_real: whether others are kept away: False where the file system has no locks.
    """

    __slots__ = ("_descriptor", "_owner", "_path", "is_real")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._descriptor = -1
        self._owner = os.getpid()
        self.is_real = True

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
        pause = _FIRST_PAUSE
        # Polled: a flock that blocks would hold up signals, Ctrl-C among them.
        while not self.acquire():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if time.monotonic() > told:
                told = float("inf")
                pid = _holder(self._path)
                who = "this very process" if pid == os.getpid() else f"process {pid}" if pid else "another process"
                warnings.warn(f"Waiting for {who}, which {what}.", CacheWarning, stacklevel=_user_level())

    def _try(self) -> bool:
        with _taking:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                locked = _flock(descriptor, fcntl.LOCK_EX, self._path)
                # Whoever removes the file has its lock: another file may have its name by now.
                if locked is not False and _is_there(descriptor, self._path):
                    self.is_real = locked is True
                    self._descriptor = descriptor
                    _exclusive.add(descriptor)
                    return True
            finally:
                if self._descriptor < 0:
                    os.close(descriptor)
        return False

    def release(self) -> None:
        """Gives it back. May be called again; in a forked child it does nothing, for the parent still has it."""
        uninterrupted(self._release, always=True)

    def _release(self) -> None:
        descriptor = self._descriptor
        if descriptor < 0 or self._owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing would not do while a process being started has a copy
        self._descriptor = -1
        _exclusive.discard(descriptor)
        os.close(descriptor)

    @until_exit
    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self._release()


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
