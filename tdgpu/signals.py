"""What no signal handler may interrupt.

Python runs signal handlers, such as that of Ctrl-C, between any two steps of the main thread, and what they raise is
raised there. ``threading``'s own events and threads do not survive that in every place (an event's lock may stay
taken), so only what is one step of the interpreter is used here: plain locks and ``_thread``.
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Background", "Descriptor", "finalizer", "uninterrupted", "until_exit"]

# Ctrl-C during a finalizer comes again so many seconds later, when that is over.
AGAIN_SECONDS = 0.01
# How often it has to come for a finalizer that hangs to be given up.
ATTEMPTS = 8


def until_exit(finalizer: Callable[..., None]) -> Callable[..., None]:
    """Makes a ``__del__`` do nothing once the interpreter is taken apart: what it calls may be gone by then. What must
    be done before is done by ``atexit``; the rest goes with the process."""
    is_finalizing = sys.is_finalizing

    @functools.wraps(finalizer)
    def finalize(*arguments: Any) -> None:
        if not is_finalizing():
            finalizer(*arguments)

    return finalize


class Background:
    """A function in a thread of its own.

    Raises:
        RuntimeError: no thread can be started: the interpreter ends, or the system has no more of them.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self.ident: int | None = None
        self.is_over = False
        self._running = _thread.allocate_lock()
        self._running.acquire()
        _thread.start_new_thread(self._run, (function, arguments))

    def _run(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            self.ident = threading.get_ident()
            function(*arguments)
        finally:
            self.is_over = True
            self._running.release()

    def join(self, timeout: float = -1) -> bool:
        """Waits until it has ended; whether it has, within ``timeout`` seconds (-1: without limit)."""
        if not self.is_over and self.ident != threading.get_ident() and self._running.acquire(timeout=timeout):
            self._running.release()
        return self.is_over


class _Job:
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._claim = _thread.allocate_lock()
        self.done = _thread.allocate_lock()
        self.done.acquire()
        self.is_done = False
        self.is_cancelled = False
        self.result: Any = None
        self.error: BaseException | None = None

    def claim(self) -> bool:
        """Whether the caller is the first to ask: only one thread runs the job."""
        return self._claim.acquire(blocking=False)

    @property
    def has_begun(self) -> bool:
        """Whether somebody has claimed it."""
        return self._claim.locked()

    def start(self) -> None:
        """Has a thread run it. May be called again: only one of the threads does."""
        try:
            _thread.start_new_thread(self.run, ())
        except RuntimeError:  # no threads any more: the interpreter ends, or the system has no more of them
            self.run()

    def run(self) -> None:
        if self.claim():
            try:
                if not self.is_cancelled:
                    self.result = self._function()
            except BaseException as error:
                self.error = error
            self.is_done = True
            self.done.release()


def uninterrupted(function: Callable[[], Any], *, always: bool = False) -> Any:
    """Calls ``function`` so that it runs to its end or not at all, whatever signal handlers raise meanwhile.

    In the main thread it is called in another one; what a handler raises is raised once the function has ended, or at
    once if it has not begun.

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
    while not job.is_done:
        try:
            # Whoever comes to it first is told: it need not begin any more.
            job.is_cancelled = interrupt is not None and not always
            if not job.has_begun:
                job.start()
            job.done.acquire()
        except BaseException as error:
            interrupt = error
    try:
        if interrupt is not None:
            raise interrupt from job.error
        if job.error is not None:
            raise job.error
        return job.result
    finally:
        # An exception holds this frame: it would hold itself, and with it what the caller's frames hold.
        del interrupt, job


def finalizer(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a ``__del__`` or the callback of a weak reference one that Ctrl-C neither cuts short nor is lost in.

    Python prints what is raised in a finalizer, and goes on as if nothing had been. So a KeyboardInterrupt has the
    function run again, which must do no harm; and SIGINT is sent once more, for the code that goes on behind it.
    When the interpreter ends, nothing is done, as with :func:`until_exit`.

    >>> finalizer(print)("gone")
    gone
    """

    @functools.wraps(function)
    def finalize(*arguments: Any) -> None:
        interrupts = 0
        while interrupts < ATTEMPTS:
            try:
                function(*arguments)
                break
            except KeyboardInterrupt:
                interrupts += 1
        if interrupts:
            with contextlib.suppress(RuntimeError):  # no threads any more: the interpreter ends
                _thread.start_new_thread(_interrupt_again, ())

    return until_exit(finalize)


def _interrupt_again() -> None:
    time.sleep(AGAIN_SECONDS)
    main = threading.main_thread().ident
    if main is not None and signal.getsignal(signal.SIGINT) not in (signal.SIG_DFL, signal.SIG_IGN, None):
        signal.pthread_kill(main, signal.SIGINT)  # a real one: it ends a wait, too


class Descriptor(list[int]):
    """The descriptor of a file, once it is open: closed when nobody holds this any more, if not before.

    An interrupt that comes right behind ``os.open`` loses it; here it is in its place by then. And it is closed once
    only, since its number may soon be another file's.
    """

    __slots__ = ()

    def open(self, path: str, flags: int) -> int:
        """``os.open``, with its errors."""
        self.extend(map(os.open, (path,), (flags,)))  # one step of the interpreter
        return self[-1]

    def close(self) -> None:
        """May be called again."""
        while self:
            any(map(os.close, map(self.pop, (-1,))))  # likewise

    __del__ = finalizer(close)
