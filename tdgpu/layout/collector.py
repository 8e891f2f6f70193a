"""Pausing the garbage collector while a tree is built."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["paused"]

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pauses the cyclic garbage collector. May be nested, and used by several threads at once.

    Tens of thousands of objects are made here, and none is garbage. The collector counts objects, so it would go
    through all that the process holds meanwhile, torch's modules included, which can take longer than the load.
    """
    global _pauses, _was_enabled
    with _lock:
        _pauses += 1
        if _pauses == 1:
            _was_enabled = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
