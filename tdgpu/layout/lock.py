"""One writer at a time: an advisory lock on the directory of a save.

It is a ``flock`` on the directory itself, so that nothing is added to the save, and the kernel releases it when the
writer ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
import warnings

from tdgpu.errors import SaveLocked
from tdgpu.signals import uninterrupted, until_exit

__all__ = ["WriterLock"]

# What flock fails with where the file system has no such locks.
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05

# The descriptors of this process's locks. A fork waits while one is being made, so that the child knows all of them;
# reentrant, because a signal handler may fork in the middle of that.
_descriptors: set[int] = set()
_making = threading.RLock()


def _close_in_child() -> None:
    """Closes what a fork copied: the lock would outlive its killed owner for as long as the child lives."""
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
    _making.release()


os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_close_in_child)


class WriterLock:
    """The right to append to a save, from when it is made until :meth:`release`.

    Args:
        prefix: directory of the save.
        timeout: seconds to wait for another writer; 0 does not wait.

    Raises:
        SaveLocked: another writer did not end in time (a TimeoutError).
        OSError: the directory cannot be opened.

    Warns:
        RuntimeWarning: the file system has no such locks. Then nothing keeps another writer away.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     lock = WriterLock(path, timeout=0)
    ...     try:
    ...         WriterLock(path, timeout=0)
    ...     except SaveLocked as error:
    ...         print(error.pid == os.getpid())
    ...     lock.release()
    True
    """

    __slots__ = ("_descriptor", "_owner", "prefix")

    def __init__(self, prefix: str, timeout: float) -> None:
        self.prefix = prefix
        self._owner = os.getpid()
        self._descriptor = -1
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while not uninterrupted(self._try):
            left = deadline - time.monotonic()
            if left <= 0:
                raise _locked(prefix, timeout)
            # Polled: a blocking flock has no time limit, and would hold up signals in the calling thread.
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _try(self) -> bool:
        with _making:
            descriptor = os.open(self.prefix, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if _lock(descriptor, self.prefix) and _is_still_there(descriptor, self.prefix):
                    self._descriptor = descriptor
                    _descriptors.add(descriptor)
                    return True
            finally:
                if self._descriptor < 0:
                    os.close(descriptor)
        return False

    def is_for(self, prefix: str) -> bool:
        """Whether the directory of that name is the locked one, and no other has taken its place."""
        return _is_still_there(self._descriptor, prefix)

    def release(self) -> None:
        """Gives the right back. May be called again; in a forked child it does nothing, for the parent still has it."""
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
            self.release()


def _lock(descriptor: int, prefix: str) -> bool:
    """Whether the lock was to be had; where there are no locks, it always is."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise OSError(error.errno, error.strerror, prefix) from error
        warnings.warn(
            f"The file system of {prefix} has no locks ({error.strerror}): nothing keeps two writers from appending to"
            " this save at once, which loses rows. See to it that there is one.",
            RuntimeWarning,
            stacklevel=4,
        )
    return True


def _is_still_there(descriptor: int, prefix: str) -> bool:
    """Whether the locked directory is still the one of that name: another may have taken its place meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(prefix))
    except FileNotFoundError:
        return False


def _locked(prefix: str, timeout: float) -> SaveLocked:
    pid = _holder(prefix)
    if pid == os.getpid():
        who = f"This very process ({pid}) appends to the save already, through an appender that is open or in a thread"
    else:
        who = (
            f"Another process ({'of a pid that the system does not tell' if pid is None else pid}) appends to the save"
        )
    waited = f" and did not end within {timeout:g} s." if timeout > 0 else ". It was not waited for (timeout 0)."
    return SaveLocked(who + waited, save=prefix, pid=pid)


def _holder(prefix: str) -> int | None:
    """The process that holds the lock, from ``/proc/locks``; None where that does not tell."""
    try:
        status = os.stat(prefix)
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
