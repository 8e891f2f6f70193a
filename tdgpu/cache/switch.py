"""Whether results are kept, and where they lie if not: in a temporary directory of the process that makes them."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

from tdgpu.cache.budget import clear, sweep
from tdgpu.cache.locks import Hold
from tdgpu.errors import CacheError

__all__ = ["disable_caching", "enable_caching", "is_caching_enabled", "temporary_directory"]

_PREFIX = "tdgpu-cache-"
_enabled = True
_latest: tuple[int, Hold] | None = None  # the process that made it: a forked child has a copy of this


def enable_caching() -> None:
    """Has transforms find their results in the cache, and put them there. It is so from the start.

    It is set for the process, and for what it forks.
    """
    global _enabled
    _enabled = True


def disable_caching() -> None:
    """Has every transform compute its result anew, into a temporary directory that is removed when the process ends.

    The directory lies where :mod:`tempfile` makes them (``TMPDIR``). ``dataset.save_to_disk(path)`` keeps a result.

    >>> disable_caching()
    >>> is_caching_enabled()
    False
    >>> enable_caching()
    """
    global _enabled
    _enabled = False


def is_caching_enabled() -> bool:
    """Whether results are looked for in the cache, and kept there.

    >>> is_caching_enabled()
    True
    """
    return _enabled


def temporary_directory() -> Hold:
    """The directory for results of this process that are not kept; it is removed when the process ends.

    Raises:
        CacheError: there is no place for it.
    """
    global _latest
    latest = _latest
    if latest is not None and latest[0] == os.getpid() and os.path.isdir(latest[1].directory):
        return latest[1]
    sweep(_left_behind())
    while True:
        try:
            path = tempfile.mkdtemp(prefix=_PREFIX)
        except OSError as error:
            raise CacheError(f"No temporary directory can be made: {error.strerror}.", file=error.filename) from error
        hold = Hold.begin(path)
        if hold is not None:  # else somebody who sweeps has taken the new directory for one that is left
            break
    # Not by `atexit` alone: what multiprocessing starts ends without it.
    Finalize(None, clear, args=(Path(path),), exitpriority=-100)
    _latest = (os.getpid(), hold)
    return hold


def _left_behind() -> list[Path]:
    """The user's own temporary directories, of any process."""
    found = []
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as members:
        for member in members:
            if member.name.startswith(_PREFIX):
                with contextlib.suppress(OSError):
                    status = member.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                        found.append(Path(member.path))
    return found


def sweep_temporary() -> list[Path]:
    """Removes what killed processes have left of their temporary directories."""
    return sweep(_left_behind())
