"""Where the cache lies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tdgpu.options import get

__all__ = ["directory"]


def directory() -> Path:
    """The cache directory, which need not exist yet: the option ``cache``, else the platform's place for caches.

    >>> from tdgpu.options import options
    >>> with options(cache="/scratch/cache"):
    ...     print(directory())
    /scratch/cache
    """
    chosen = get().cache
    if chosen is not None:
        return Path(chosen).expanduser().absolute()
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the specification has others ignored
        return Path(given) / "tdgpu"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "tdgpu"
