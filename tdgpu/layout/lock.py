"""One writer at a time: an advisory lock on the directory of a save.

It is a ``flock`` on the directory itself, so that nothing is added to the save, and the kernel releases it when the
writer ends, however it ends.
"""

from __future__ import annotations

import os
import time
import warnings

from tdgpu.errors import SaveLocked, user_level
from tdgpu.layout.flock import FIRST_PAUSE, LONGEST_PAUSE, ExclusiveLock, holder, is_still_there
from tdgpu.signals import uninterrupted

__all__ = ["WriterLock"]


class WriterLock(ExclusiveLock):
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

    __slots__ = ("prefix",)

    def __init__(self, prefix: str, timeout: float) -> None:
        super().__init__(prefix, os.O_RDONLY | os.O_DIRECTORY)
        self.prefix = prefix
        deadline = time.monotonic() + timeout
        pause = FIRST_PAUSE
        while not uninterrupted(self._try):
            left = deadline - time.monotonic()
            if left <= 0:
                raise _locked(prefix, timeout)
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)

    def is_for(self, prefix: str) -> bool:
        """Whether the directory of that name is the locked one, and no other has taken its place."""
        return is_still_there(self._descriptor, prefix)

    def _tell(self, descriptor: int, error: OSError) -> None:
        warnings.warn(
            f"The file system of {self.prefix} has no locks ({error.strerror}): nothing keeps two writers from"
            " appending to this save at once, which loses rows. See to it that there is one.",
            RuntimeWarning,
            stacklevel=user_level(),
        )


def _locked(prefix: str, timeout: float) -> SaveLocked:
    pid = holder(prefix)
    if pid == os.getpid():
        who = f"This very process ({pid}) appends to the save already, through an appender that is open or in a thread"
    else:
        who = (
            f"Another process ({'of a pid that the system does not tell' if pid is None else pid}) appends to the save"
        )
    waited = f" and did not end within {timeout:g} s." if timeout > 0 else ". It was not waited for (timeout 0)."
    return SaveLocked(who + waited, save=prefix, pid=pid)
