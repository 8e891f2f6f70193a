"""Locks of the kernel's (``flock``), which end with the process that has them, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from tdgpu.signals import until_exit

__all__ = ["FIRST_PAUSE", "LONGEST_PAUSE", "ExclusiveLock", "holder", "is_still_there", "try_lock"]

#: Locks are polled for: a ``flock`` that blocks has no time limit, and would hold up signals in the calling thread.
FIRST_PAUSE = 0.001
LONGEST_PAUSE = 0.05

# What flock fails with where the file system has no such locks.
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})

# The descriptors of this process's exclusive locks. A fork waits while one is being taken, so that the child knows all
# of them; reentrant, because a signal handler may fork in the middle of that.
_taking = threading.RLock()
_descriptors: set[int] = set()


def _close_in_child() -> None:
    """Closes what a fork copied: the lock would outlive its killed owner for as long as the child lives."""
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
    _taking.release()


os.register_at_fork(before=_taking.acquire, after_in_parent=_taking.release, after_in_child=_close_in_child)


def try_lock(descriptor: int, operation: int, path: str, tell: Callable[[int, OSError], None]) -> bool | None:
    """Takes a lock without waiting: whether it was to be had; None, and ``tell`` is called, where there are no locks.

    Raises:
        OSError: anything else is wrong.
    """
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise OSError(error.errno, error.strerror, path) from error
        tell(descriptor, error)
        return None
    return True


def is_still_there(descriptor: int, path: str) -> bool:
    """Whether what is open is still what has the name: another may have taken its place meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


class ExclusiveLock(ABC):
    """An exclusive lock on a file or directory, which is not taken yet.

    Args:
        path: what is locked.
        flags: of ``os.open``, by which it is opened.

    Attributes:
        is_real: whether others are kept away: False where the file system has no locks.
    """

    __slots__ = ("_descriptor", "_flags", "_owner", "_path", "is_real")

    def __init__(self, path: str, flags: int) -> None:
        self._path = path
        self._flags = flags
        self._owner = os.getpid()
        self._descriptor = -1
        self.is_real = True

    @abstractmethod
    def _tell(self, descriptor: int, error: OSError) -> None:
        """The file system has no locks."""

    def _try(self) -> bool:
        """Takes the lock if nobody has it: whether it did. Not to be interrupted.

        Raises:
            OSError: it cannot be opened.
        """
        with _taking:
            descriptor = os.open(self._path, self._flags | os.O_CLOEXEC, 0o666)
            try:
                locked = try_lock(descriptor, fcntl.LOCK_EX, self._path, self._tell)
                # Whoever removes it has its lock: something else may have its name by now.
                if locked is not False and is_still_there(descriptor, self._path):
                    self.is_real = locked is True
                    self._descriptor = descriptor
                    _descriptors.add(descriptor)
                    return True
            finally:
                if self._descriptor < 0:
                    os.close(descriptor)
        return False

    def release(self) -> None:
        """Gives it back. May be called again; in a forked child it does nothing, for the parent still has it."""
        descriptor = self._descriptor
        if descriptor < 0 or self._owner != os.getpid():
            return
        # First of all, and said aloud: an interrupt may come in between, and closing alone would not do while a process
        # that is just being started has a copy.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        _descriptors.discard(descriptor)
        self._descriptor = -1
        os.close(descriptor)

    @until_exit
    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            ExclusiveLock.release(self)


def holder(path: str) -> int | None:
    """The process that holds the lock, from ``/proc/locks``; None where that does not tell."""
    try:
        status = os.stat(path)
        with open("/proc/locks", encoding="ascii") as locks:
            lines = [line.split() for line in locks]
    except (OSError, ValueError):
        return None
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    # A line is: number, FLOCK, ADVISORY, WRITE, pid, place, 0, EOF; one that waits has "->" after its number.
    for line in lines:
        if len(line) > 5 and line[1] == "FLOCK" and line[5] == place and line[4].isdecimal() and int(line[4]) > 0:
            return int(line[4])
    return None
