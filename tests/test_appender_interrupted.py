"""Appenders that are called, closed, interrupted or fail at an awkward moment: no row is lost without a word."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from appends import INTERRUPTS
from forked import in_process
from tensordict import TensorDict

import tdgpu
from tdgpu import errors, signals
from tdgpu.append import batch as batches
from tdgpu.layout import commit
from tdgpu.transfer import outgoing, outlets


def rows(first: int, count: int = 1) -> TensorDict:
    return TensorDict({"a": torch.arange(first, first + count, dtype=torch.float32)}, [count])


def saved(path: Path) -> list[float]:
    return TensorDict.load_memmap(path)["a"].tolist()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows(0).memmap(tmp_path / "save")
    return tmp_path / "save"


@contextlib.contextmanager
def on_signal(handler: Any) -> Any:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def send_after(seconds: float) -> threading.Thread:
    def send() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


# --- calls that meet each other ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["append", "flush", "close"])
def test_a_signal_handler_cannot_call_into_a_call(path, monkeypatch, call):
    appender = tdgpu.MemmapAppender(path, durable=False)
    appender.append(rows(1))
    real = outlets.HostOutlet.pack

    def pack(self: Any, *arguments: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return real(self, *arguments)

    def handler(*_: Any) -> None:
        getattr(appender, call)(*([rows(100)] if call == "append" else []))

    monkeypatch.setattr(outlets.HostOutlet, "pack", pack)
    with on_signal(handler), pytest.raises(errors.AppendError, match="signal handler"):
        appender.append(rows(2))
    monkeypatch.undo()
    appender.append(rows(2))
    appender.close()
    assert saved(path) == [0, 1, 2]


@pytest.mark.parametrize("call", ["flush", "close"])
def test_rows_that_the_background_loses_are_told_to_who_waits(path, monkeypatch, call):
    begun = threading.Event()

    def sync(self: Any) -> None:
        begun.set()
        time.sleep(0.3)
        raise outgoing.FileError(0, errno.EIO)

    monkeypatch.setattr(outgoing.Files, "sync", sync)
    appender = tdgpu.MemmapAppender(path, durable=True, flush_rows=3)
    appender.append(rows(1, 3))
    assert begun.wait(10)
    with pytest.raises(errors.AppendError, match="3 rows that were not committed are lost") as caught:
        getattr(appender, call)()
    assert caught.value.errno == errno.EIO and caught.value.key == ("a",)
    appender.close()
    monkeypatch.undo()
    assert saved(path) == [0]
    tdgpu.append_memmap(path, rows(1))
    assert saved(path) == [0, 1]


def test_rows_from_another_thread_are_refused_while_it_closes(path, monkeypatch):
    real, begun = commit.advance, threading.Event()

    def advance(*arguments: Any, **more: Any) -> None:
        begun.set()
        time.sleep(0.3)
        real(*arguments, **more)

    monkeypatch.setattr("tdgpu.layout.commit.advance", advance)
    appender = tdgpu.MemmapAppender(path, durable=False)
    appender.append(rows(1))
    closing = threading.Thread(target=appender.close)
    closing.start()
    assert begun.wait(10)
    with pytest.raises(errors.InvalidArgument, match="closed"):
        appender.append(rows(2))
    closing.join()
    assert saved(path) == [0, 1]


def test_a_forked_child_does_not_wait_for_its_parents_threads(path):
    appender = tdgpu.MemmapAppender(path, durable=False)
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        go_on.wait(20)

    holder = threading.Thread(target=appender._lock.run, args=(hold,))
    holder.start()
    assert inside.wait(10)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            appender.append(rows(1))
        except errors.ForkError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    go_on.set()
    holder.join()
    appender.close()


# --- interrupts -------------------------------------------------------------------------------------------------------


def test_a_sync_that_failed_is_not_forgotten_for_an_interrupt(path, monkeypatch):
    calls = []

    def sync(self: Any) -> None:
        calls.append(1)
        time.sleep(0.3)
        if len(calls) == 1:
            raise outgoing.FileError(0, errno.EIO)

    monkeypatch.setattr(outgoing.Files, "sync", sync)
    appender = tdgpu.MemmapAppender(path, durable=True)
    appender.append(rows(1, 3))
    with on_signal(interrupt):
        sender = send_after(0.1)
        with pytest.raises(KeyboardInterrupt):
            appender.flush()
        sender.join()
    with pytest.raises(errors.AppendError, match="lost"):
        appender.flush()
    appender.close()
    assert saved(path) == [0]


def test_close_finishes_and_then_says_that_it_was_interrupted(path, monkeypatch):
    real = commit.advance

    def advance(*arguments: Any, **more: Any) -> None:
        time.sleep(0.3)
        real(*arguments, **more)

    monkeypatch.setattr("tdgpu.layout.commit.advance", advance)
    appender = tdgpu.MemmapAppender(path, durable=False)
    appender.append(rows(1))
    with on_signal(interrupt):
        sender = send_after(0.1)
        with pytest.raises(KeyboardInterrupt):
            appender.close()
        sender.join()
    monkeypatch.undo()
    assert saved(path) == [0, 1]
    tdgpu.MemmapAppender(path, timeout=0).close()


def test_what_fails_in_the_middle_leaves_the_rows_before_it(sim, tmp_path, monkeypatch):
    """Rows of two places, when the batch has room for one chunk more: the rows of others are not in its store."""
    monkeypatch.setattr(batches, "MOST_CHUNKS", 5)
    save = tmp_path / "save"

    def mixed(i: int) -> TensorDict:
        host = {f"h{k}": torch.full((1, 8), float(i)) for k in range(5)}
        return TensorDict({**host, "d": torch.full((1, 8), float(i)).to("simgpu")}, [1])

    mixed(0).cpu().memmap(save)
    appender = tdgpu.MemmapAppender(save, durable=False)
    for i in range(1, 20):
        appender.append(mixed(i))
        with monkeypatch.context() as patch:
            patch.setattr(outlets.GatedOutlet, "pack", interrupt)
            with pytest.raises(KeyboardInterrupt):
                appender.append(mixed(999))
    appender.append(mixed(20).cpu())
    appender.close()
    loaded = TensorDict.load_memmap(save)
    for value in loaded.values():
        assert torch.equal(value, torch.arange(21.0).view(21, 1).expand(21, 8))


@pytest.mark.parametrize("always", [False, True])
def test_an_interrupt_before_it_begins(monkeypatch, always):
    done: list[int] = []
    real = signals._Job.start
    first = [True]

    def start(self: Any) -> None:
        if first:
            first.clear()
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(signals._Job, "start", start)
    with pytest.raises(KeyboardInterrupt):
        signals.uninterrupted(lambda: done.append(1), always=always)
    assert done == ([1] if always else [])


def test_an_interrupt_while_it_runs():
    done: list[int] = []

    def work() -> None:
        time.sleep(0.3)
        done.append(1)

    with on_signal(interrupt):
        sender = send_after(0.05)
        with pytest.raises(KeyboardInterrupt):
            signals.uninterrupted(work)
        sender.join()
    assert done == [1]


def test_where_no_thread_can_be_started_it_runs_all_the_same(monkeypatch):
    def start(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", start)
    assert signals.uninterrupted(lambda: 5) == 5


def test_ctrl_c_while_rows_are_appended_and_flushed(tmp_path):
    found = in_process(
        INTERRUPTS
        + textwrap.dedent("""
        import random, time
        path = Path(sys.argv[1])
        def handler(number, frame):
            raise KeyboardInterrupt
        sys.unraisablehook = lambda _: None
        signal.signal(signal.SIGALRM, handler)
        flat(0, 1).memmap(path)
        chance, interrupts, rows, deadline = random.Random(7), 0, 1, time.monotonic() + 2.5
        while time.monotonic() < deadline:
            appender = tdgpu.MemmapAppender(path, durable=chance.random() < 0.3, timeout=5, flush_rows=50)
            for _ in range(4):
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.02))
                    while time.monotonic() < deadline:  # it may have been raised in a finalizer, which swallows it
                        for _ in range(chance.randint(0, 20)):
                            before = len(appender) + appender.pending
                            appender.append(flat(before, 1))
                        appender.flush()
                except KeyboardInterrupt:
                    interrupts += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                there = len(appender) + appender.pending
                assert there >= rows, (there, rows)
                rows = there
            appender.close()
            assert is_free(path)
            report = tdgpu.recover_memmap(path)
            assert (report.state, report.surplus, report.rows) == ("clean", 0, rows), (report, rows)
        loaded = tensordict.load_memmap(path)
        assert loaded.batch_size == (rows,)
        for key, value in flat(0, rows).items(True, True):
            assert torch.equal(loaded[key], value), key
        print(interrupts > 10, rows > 100)
        """),
        tmp_path / "save",
    )
    assert found == "True True\n"


INTERRUPTED_APPENDER = INTERRUPTS + textwrap.dedent("""
    import gc
    where, point = Path(sys.argv[1]), sys.argv[2]
    flat(0, 1).memmap(where / "old")
    sys.unraisablehook = lambda _: None
    step = 31 if point == "append" else 3
    wrong, at, last = [], 1 + os.getpid() % step, 0
    save = where / "save"
    with tdgpu.options(durable=False, lock_timeout=0, threads=1):
        while True:
            shutil.copytree(where / "old", save)
            taken, appender, ended = 1, None, "well"
            guard = Interrupt(at)
            inside, after = guard, contextlib.nullcontext()
            if point == "close":
                inside, after = after, inside
            try:
                appender = tdgpu.MemmapAppender(save)
                with inside:
                    for i in (1, 2):
                        appender.append(flat(taken, i))
                        taken += i
                    appender.flush()
                    assert len(appender) == taken
                    appender.append(flat(taken, 1))
                    taken += 1
                with after:
                    appender.close()
            except BaseException as error:
                ended = repr(error)
            if guard.at is None:
                break
            there = len(appender) + appender.pending
            appender.close()
            rows = tensordict.load_memmap(save).batch_size[0]
            report = tdgpu.recover_memmap(save)
            facts = (guard.at, ended, taken, there, rows, report.state, report.surplus)
            if ended not in ("well", "KeyboardInterrupt()") or report.state != "clean" or report.surplus:
                wrong.append(facts)
            elif rows not in (taken, there):
                wrong.append(facts)
            elif any(not torch.equal(tensordict.load_memmap(save)[key], value)
                     for key, value in flat(0, rows).items(True, True)):
                wrong.append(facts)
            appender = None
            shutil.rmtree(save)
            at += step
            last += 1
    assert last > 5, last
    print(len(wrong), wrong[:5])
""")


@pytest.mark.parametrize("point", ["append", "close"])
def test_an_interrupt_anywhere_loses_no_row_that_was_taken(tmp_path, point):
    """In append and flush: rows are taken or not. In close, which is then called again: they are committed."""
    assert in_process(INTERRUPTED_APPENDER, tmp_path, point) == "0 []\n"


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_queue_that_a_capture_refuses_to_look_at_is_not_a_broken_device(sim, tmp_path):
    TensorDict(a=torch.zeros(1, 50_000), batch_size=[1]).memmap(tmp_path)
    sim.set(delay_us=300_000)
    with tdgpu.MemmapAppender(tmp_path, durable=False) as appender:
        appender.append(TensorDict(a=torch.ones(2, 50_000), batch_size=[2]).to("simgpu"))
        sim.fail("cuStreamQuery", 0, 900)
        appender.flush()
        assert len(appender) == 3


def test_after_a_full_disk_nothing_that_was_appended_is_lost(path, monkeypatch):
    real = outgoing.Files.reserve
    full = [True]

    def reserve(self: Any, first: int, last: int) -> None:
        if full and last > 5:
            raise outgoing.FileError(0, errno.ENOSPC)
        real(self, first, last)

    monkeypatch.setattr(outgoing.Files, "reserve", reserve)
    monkeypatch.setattr(batches, "MOST_CHUNKS", 2)
    appender = tdgpu.MemmapAppender(path, durable=False)
    for i in range(1, 7):
        appender.append(rows(i))
    with pytest.raises(errors.AppendError, match="not taken; 6 others are pending") as caught:
        appender.append(rows(7))
    assert caught.value.errno == errno.ENOSPC and caught.value.key == ("a",)
    with pytest.raises(errors.AppendError, match="no space"):
        appender.flush()
    assert (len(appender), appender.pending) == (1, 6)
    full.clear()  # somebody has deleted something
    appender.flush()
    assert (len(appender), appender.pending) == (7, 0)
    appender.close()
    assert saved(path) == [0, 1, 2, 3, 4, 5, 6]


def test_what_a_full_disk_has_no_room_for_is_counted_at_the_end(path, monkeypatch):
    real = outgoing.Files.reserve

    def reserve(self: Any, first: int, last: int) -> None:
        if last > 5:
            raise outgoing.FileError(0, errno.ENOSPC)
        real(self, first, last)

    monkeypatch.setattr(outgoing.Files, "reserve", reserve)
    monkeypatch.setattr(batches, "MOST_CHUNKS", 2)
    appender = tdgpu.MemmapAppender(path, durable=False)
    for i in range(1, 7):
        appender.append(rows(i))
    with pytest.raises(errors.AppendError, match="2 rows that were pending are lost; 5 are committed"):
        appender.close()
    appender.close()
    assert saved(path) == [0, 1, 2, 3, 4]
    monkeypatch.undo()
    tdgpu.append_memmap(path, rows(5))
    assert saved(path) == [0, 1, 2, 3, 4, 5]


def test_an_appender_that_failed_rests(path, monkeypatch):
    def sync(self: Any) -> None:
        raise outgoing.FileError(0, errno.EIO)

    monkeypatch.setattr(outgoing.Files, "sync", sync)
    appender = tdgpu.MemmapAppender(path, durable=True, flush_seconds=0.01)
    appender.append(rows(1))
    assert appender._thread is not None
    assert appender._thread.join(10)
    with pytest.raises(errors.AppendError, match="lost"):
        appender.append(rows(2))
    appender.close()


def test_a_ring_of_another_size_is_another_ring(path):
    for ring_bytes in (64 << 10, 1 << 20):
        with tdgpu.options(ring_bytes=ring_bytes):
            appender = tdgpu.MemmapAppender(path, durable=False)
            appender.append(rows(1))
            (outlet,) = appender._session._stager._outlets.values()
            assert abs(outlet.native.ring_bytes - ring_bytes) <= 4096
            appender.close()
