"""``uninterrupted``: what it runs is run whole or not at all, and the interrupt comes after it."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
from typing import Any

import pytest
from appends import in_process

from tdgpu.signals import uninterrupted

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
