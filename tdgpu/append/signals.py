"""What no signal handler may interrupt."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["uninterrupted"]


class _Job:
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._claim = threading.Lock()
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def claim(self) -> bool:
        """Whether the caller is the first to ask: either the thread runs the job, or nobody does."""
        return self._claim.acquire(blocking=False)

    @property
    def has_begun(self) -> bool:
        """Whether somebody has claimed it."""
        return self._claim.locked()

    def start(self) -> None:
        """Has a thread run it. May be called again: only one of the threads does."""
        try:
            threading.Thread(target=self.run, name="tdgpu-commit", daemon=True).start()
        except RuntimeError:  # no threads any more: the interpreter ends, or the system has no more of them
            self.run()

    def run(self) -> None:
        if self.claim():
            try:
                self.result = self._function()
            except BaseException as error:
                self.error = error
            self.done.set()


def uninterrupted(function: Callable[[], Any], *, always: bool = False) -> Any:
    """Calls ``function`` so that it runs to its end or not at all, whatever signal handlers raise meanwhile.

    Python runs signal handlers, such as that of Ctrl-C, in the main thread only. So there the function is called in
    another thread; what a handler raises is raised once the function has ended, or at once if it has not begun.

    Args:
        function: what to call.
        always: it runs also if an interrupt comes before it has begun.

    >>> uninterrupted(lambda: 3)
    3
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    context = contextvars.copy_context()
    job = _Job(lambda: context.run(function))
    interrupt: BaseException | None = None
    while not job.done.is_set():
        try:
            if interrupt is not None and not always and job.claim():
                break  # nobody has begun, and nobody will
            if not job.has_begun:
                job.start()
            job.done.wait()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt from job.error
    if job.error is not None:
        raise job.error
    return job.result
