"""``uninterrupted``: what it runs is run whole or not at all, and the interrupt comes after it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
import weakref
from typing import Any

import pytest
from forked import in_process

from tdgpu.signals import Descriptor, finalizer, uninterrupted

pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


def test_uninterrupted_returns_and_raises_what_the_function_does():
    assert uninterrupted(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 // 0)
    with pytest.raises(SystemExit):
        uninterrupted(sys.exit)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(uninterrupted(threading.get_ident)))
    thread.start()
    thread.join()
    assert found == [thread.ident]


@contextlib.contextmanager
def alarms(first: float, interval: float = 0.0):
    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, first, interval)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("interval", [0.0, 0.01])
def test_an_interrupt_while_the_function_runs_comes_after_it(interval):
    steps: list[int] = []

    def function() -> None:
        for i in range(10):
            time.sleep(0.02)
            steps.append(i)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), alarms(0.05, interval):
        uninterrupted(function)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert steps == list(range(10))
    assert time.monotonic() - began >= 0.2


def test_interrupts_at_any_moment_run_it_whole_or_not_at_all(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # Python swallows those that hit a finalizer
    chance, interrupts = random.Random(1), 0
    for _ in range(150):
        steps: list[int] = []

        def function(steps: list[int] = steps) -> None:
            for i in range(3):
                steps.append(i)
                time.sleep(0.0001)

        finished = False
        try:
            with alarms(chance.uniform(0.00001, 0.001)):
                uninterrupted(function)
                finished = True
        except KeyboardInterrupt:
            interrupts += 1
        assert steps in ([], [0, 1, 2])
        assert steps or not finished
        time.sleep(0.0005)
        assert steps in ([], [0, 1, 2])  # nothing begins later
    assert interrupts > 10


def test_one_interrupt_before_it_begins_and_one_while_that_is_dealt_with():
    found = in_process(
        """
        import threading
        from tdgpu import signals
        start, claim, ran, left = signals._Job.start, signals._Job.claim, [], {"start": 1, "claim": 1}
        def interrupt(name):
            if threading.current_thread() is threading.main_thread():
                left[name] -= 1
                if left[name] == 0:
                    raise KeyboardInterrupt
        def interrupted_start(job):
            interrupt("start")
            start(job)
        def interrupted_claim(job):
            claimed = claim(job)
            interrupt("claim")  # the call has returned, but what it returned is lost
            return claimed
        signals._Job.start, signals._Job.claim = interrupted_start, interrupted_claim
        try:
            signals.uninterrupted(lambda: ran.append(1))
        except KeyboardInterrupt:
            print(len(ran))
        """,
        timeout=10,
    )
    assert found.strip() in {"0", "1"}


# --- finalizers -------------------------------------------------------------------------------------------------------


class Ended:
    """What a finalizer has done: it is interrupted each time that it runs, except from a certain one on."""

    def __init__(self, interrupts: int) -> None:
        self.interrupts = interrupts
        self.runs = 0
        self.is_whole = False

    @finalizer
    def run(self) -> None:
        self.runs += 1
        end = time.monotonic() + 30
        while self.runs <= self.interrupts:
            assert time.monotonic() < end
        self.is_whole = True


@contextlib.contextmanager
def ctrl_c(ended: Ended):
    """SIGINT, whenever the finalizer runs anew."""

    def press() -> None:
        for number in range(1, ended.interrupts + 1):
            while ended.runs < number:
                time.sleep(0.001)
            signal.pthread_kill(main, signal.SIGINT)

    main = threading.get_ident()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("by", ["__del__", "weak reference"])
@pytest.mark.parametrize(("interrupts", "runs", "is_whole"), [(1, 2, True), (3, 4, True), (8, 8, False)])
def test_ctrl_c_in_a_finalizer_comes_behind_it(by, interrupts, runs, is_whole):
    """Which has run to its end by then, unless it hangs and Ctrl-C comes again and again."""
    ended = Ended(interrupts)

    class Dropped:
        if by == "__del__":

            def __del__(self) -> None:
                ended.run()

    dropped = Dropped()
    if by == "weak reference":
        weakref.finalize(dropped, ended.run)

    def drop() -> None:
        nonlocal dropped
        del dropped
        assert (ended.runs, ended.is_whole) == (runs, is_whole)
        time.sleep(30)

    with ctrl_c(ended), pytest.raises(KeyboardInterrupt):
        drop()


def test_a_descriptor_is_closed_once_and_never_lost(tmp_path):
    path = str(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        Descriptor().open(path, os.O_RDONLY)
    (tmp_path / "file").touch()
    before = len(os.listdir("/proc/self/fd"))
    for closes in (True, False):
        file = Descriptor()
        number = file.open(path, os.O_RDONLY)
        assert os.readlink(f"/proc/self/fd/{number}") == path
        if closes:
            file.close()
            assert os.open(path, os.O_RDONLY) == number  # another one's by now
            file.close()
        del file
        os.close(number) if closes else None
    assert len(os.listdir("/proc/self/fd")) == before
