"""A save that is kept open while it grows: what is committed when, what is never lost, and how it ends."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import math
import os
import random
import signal
import stat
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from compare import assert_same
from saves import Frame, Point, Thing, Typed, point
from tensordict import NonTensorStack, TensorDict, lazy_stack
from test_append import INTERRUPTS, expect, flat, in_process, is_free, load, ring_of, run_process, state

import tdgpu
from tdgpu import MemmapAppender, errors
from tdgpu.layout import commit
from tdgpu.signals import uninterrupted
from tdgpu.transfer import outgoing

MiB = 1 << 20

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*allow_pickle.*:FutureWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def save(tmp_path: Path) -> Path:
    flat(0, 1).memmap(tmp_path / "save")
    return tmp_path / "save"


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.005)


def failing(code: int) -> Callable[..., None]:
    def function(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return function


def refusing(code: int) -> Callable[..., None]:
    def function(*_: Any, **__: Any) -> None:
        raise outgoing.FileError(0, code)

    return function


# --- what is committed when -------------------------------------------------------------------------------------------


def test_pending_and_committed_rows_are_counted(save):
    appender = MemmapAppender(save)
    assert (len(appender), appender.pending, bool(appender)) == (1, 0, True)
    appender.append(flat(1, 2))
    appender.append(flat(3, 0))
    appender.append(flat(3, 1))
    assert (len(appender), appender.pending) == (1, 3)
    assert "1 rows, 3 pending" in repr(appender) and str(save) in repr(appender)
    expect(save, 1)
    appender.flush()
    assert (len(appender), appender.pending) == (4, 0)
    expect(save, 4)
    before = state(save)
    appender.flush()
    assert state(save) == before
    appender.append(flat(4, 1))
    appender.close()
    assert (len(appender), appender.pending) == (5, 0)
    assert "closed" in repr(appender)
    appender.close()
    expect(save, 5)
    assert is_free(save)


def test_a_save_without_rows(tmp_path):
    flat(0, 0).memmap(tmp_path)
    before = state(tmp_path)
    with MemmapAppender(tmp_path) as appender:
        assert len(appender) == 0 and bool(appender)
        appender.flush()
    assert state(tmp_path) == before
    with MemmapAppender(tmp_path) as appender:
        appender.append(flat(0, 2))
    expect(tmp_path, 2)


def test_the_end_of_a_with_block_commits_whatever_ends_it(save):
    for i, error in enumerate((ValueError, KeyboardInterrupt, SystemExit)):
        with contextlib.suppress(error), MemmapAppender(save) as appender:
            appender.append(flat(1 + i, 1))
            raise error
        expect(save, 2 + i)
        assert is_free(save)


def test_rows_that_do_not_fit_are_not_taken_and_nothing_else_is_lost(save):
    with MemmapAppender(save) as appender:
        appender.append(flat(1, 1))
        for wrong in (flat(0, 1).exclude("a"), flat(0, 1).double(), torch.zeros(3), None, flat(0, 1)[0]):
            with pytest.raises((ValueError, TypeError)):
                appender.append(wrong)
        appender.append(flat(2, 1))
    expect(save, 3)


def test_on_disk_it_is_as_if_all_rows_had_been_appended_at_once(tmp_path):
    for name in ("one", "many"):
        flat(0, 1).memmap(tmp_path / name)
    tensordict.append_memmap(tmp_path / "one", flat(1, 30))
    with MemmapAppender(tmp_path / "many") as appender:
        for i in range(1, 31):
            appender.append(flat(i, 1))
            if i % 7 == 0:
                appender.flush()
    assert state(tmp_path / "one") == state(tmp_path / "many")


# --- rows may be overwritten ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 100, 70_000, 1_000_000])
@pytest.mark.parametrize("layout", ["plain", "strided", "expanded"])
def test_rows_may_be_overwritten_at_once(tmp_path, width, layout):
    TensorDict({"x": torch.zeros(1, width), "s": torch.zeros(1, dtype=torch.int16)}, [1]).memmap(tmp_path)
    memory = torch.empty(2, width, 2)
    x = memory.view(-1)[: 2 * width].view(2, width)
    if layout == "strided":
        x = memory[..., 0]
    elif layout == "expanded":
        x = memory[:1, :1, 0].expand(2, width)
    short = torch.empty(2, dtype=torch.int16)
    with MemmapAppender(tmp_path, durable=False) as appender:
        for i in range(1, 9):
            memory.fill_(i)
            short.fill_(i)
            appender.append(TensorDict({"x": x, "s": short}, [2]))
            memory.fill_(-1)
            short.fill_(-1)
    loaded = load(tmp_path)
    wanted = torch.tensor([0.0] + [float(i) for i in range(1, 9) for _ in range(2)])
    assert torch.equal(loaded["s"].float(), wanted)
    assert torch.equal(loaded["x"], wanted.view(-1, 1).expand(-1, width))


def test_rows_are_let_go_without_a_flush(tmp_path):
    """Large ones are written from where they are: they must not be kept until the next commit."""
    TensorDict({"x": torch.zeros(1, 1 << 18)}, [1]).memmap(tmp_path)
    with MemmapAppender(tmp_path, durable=False) as appender:
        alive = []
        for i in range(8):
            x = torch.full((1, 1 << 18), float(i))
            alive.append(weakref.ref(x))
            appender.append(TensorDict({"x": x}, [1]))
            del x
        gc.collect()
        wait_until(lambda: sum(reference() is not None for reference in alive) <= 1)
        assert appender.pending == 8


# --- commits in the background ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [{"flush_rows": 3}, {"flush_bytes": 3 * 22}, {"flush_seconds": 0.05}])
def test_the_background_commits(save, when):
    with MemmapAppender(save, durable=False, **when) as appender:
        for i in range(1, 4):
            appender.append(flat(i, 1))
        wait_until(lambda: len(appender) == 4)
        expect(save, 4)
        appender.append(flat(4, 1))
        if "flush_seconds" in when:
            wait_until(lambda: len(appender) == 5)
        else:
            time.sleep(0.2)
            assert len(appender) == 4
    expect(save, 5)


@pytest.mark.parametrize("when", [{"flush_rows": 10}, {"flush_bytes": 220}, {"flush_seconds": 0.02}])
def test_the_background_commits_while_appends_go_on(save, when):
    seen: set[Any] = set()
    with MemmapAppender(save, durable=False, **when) as appender:
        first, deadline = 1, time.monotonic() + 20
        while len(seen) < 5 and time.monotonic() < deadline:
            appender.append(flat(first, 1))
            first += 1
            seen.add(len(appender))
    assert len(seen) == 5
    expect(save, first)


def test_the_oldest_row_waits_so_long_and_not_longer(save):
    with MemmapAppender(save, durable=False, flush_seconds=0.3) as appender:
        first, began = 1, time.monotonic()
        while len(appender) == 1:
            appender.append(flat(first, 1))
            first += 1
            time.sleep(0.01)
            assert time.monotonic() < began + 20
        assert time.monotonic() - began >= 0.25
    expect(save, first)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in ("flush_rows", "flush_bytes", "flush_seconds", "timeout")
        for value in (-1, math.nan, "3")
    ]
    + [("flush_rows", 0), ("flush_bytes", 0)],
)
def test_limits_that_make_no_sense_are_refused(save, name, value):
    with pytest.raises((errors.InvalidArgument, errors.InvalidArgumentType), match=name):
        MemmapAppender(save, **{name: value})
    assert is_free(save)


@pytest.mark.parametrize("seconds", [math.inf, 1e12])
def test_a_limit_that_is_never_reached_does_not_keep_the_others_from_working(save, seconds):
    with MemmapAppender(save, flush_rows=2, flush_seconds=seconds) as appender:
        appender.append(flat(1, 1))
        time.sleep(0.1)
        appender.append(flat(2, 1))
        wait_until(lambda: len(appender) == 3, 5)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["append", "flush", "close"])
def test_an_error_in_the_background_is_raised_at_the_next_call(faulty, save, style):
    appender = MemmapAppender(save, flush_rows=2)
    appender.append(flat(1, 2))
    wait_until(lambda: len(appender) == 3)
    faulty.io.fail_write(0, errno.EIO, "b.memmap")
    appender.append(flat(3, 2))
    wait_until(lambda: appender._session.failed is not None)
    call = {"append": lambda: appender.append(flat(3, 1)), "flush": appender.flush, "close": appender.close}[style]
    with pytest.raises(errors.AppendError, match="2 rows that were not committed are lost; 3 are committed") as raised:
        call()
    assert raised.value.errno == errno.EIO and raised.value.file == str(save / "n" / "b.memmap")
    faulty.io.reset()
    if style != "close":
        with pytest.raises(errors.AppendError):  # it stays failed
            appender.append(flat(3, 1))
        appender.close()
    appender.close()
    expect(save, 3)
    assert is_free(save)
    assert (save / "a.memmap").stat().st_size == 3 * 12
    tdgpu.append_memmap(save, flat(3, 2))
    expect(save, 5)


@pytest.mark.parametrize("width", [1, 100_000])
def test_a_failed_write_ends_the_block_with_an_error_and_no_committed_row_is_lost(faulty, tmp_path, width):
    def rows(i: int) -> TensorDict:
        return TensorDict({"x": torch.full((1, width), float(i)), "y": torch.tensor([i])}, [1])

    rows(0).memmap(tmp_path)
    appender = MemmapAppender(tmp_path)
    appender.append(rows(1))
    appender.flush()
    faulty.io.fail_write(1, errno.ENOSPC, "x.memmap")
    if width > 1:  # written before append returns: these rows alone are not taken
        with pytest.raises(errors.AppendError):
            appender.append(rows(7))
        appender.append(rows(2))
        appender.close()
    else:
        appender.append(rows(2))
        with pytest.raises(errors.AppendError):
            appender.close()
    loaded = load(tmp_path)
    wanted = torch.arange(3 if width > 1 else 2)
    assert torch.equal(loaded["y"], wanted)
    assert torch.equal(loaded["x"], wanted.float().view(-1, 1).expand(-1, width))
    assert is_free(tmp_path)


@pytest.mark.parametrize("large", [False, True])
def test_a_full_disk_leaves_what_was_appended_before(tmp_path, monkeypatch, large):
    width = 100_000 if large else 1

    def rows(i: int) -> TensorDict:
        return TensorDict({"x": torch.full((1, width), float(i))}, [1])

    rows(0).memmap(tmp_path)
    appender = MemmapAppender(tmp_path)
    appender.append(rows(1))
    with monkeypatch.context() as patch:
        patch.setattr(outgoing.Files, "reserve", refusing(errno.ENOSPC))
        if large:
            with pytest.raises(errors.AppendError, match="no space") as raised:
                appender.append(rows(9))
        else:
            appender.append(rows(2))
            with pytest.raises(errors.AppendError, match="no space") as raised:
                appender.flush()
        assert raised.value.errno == errno.ENOSPC
        assert raised.value.file == str(tmp_path / "x.memmap")
    assert (len(appender), appender.pending) == (1, 1 if large else 2)
    if large:
        appender.append(rows(2))
    appender.flush()
    appender.append(rows(3))
    appender.close()
    assert load(tmp_path)["x"][:, -1].tolist() == [0, 1, 2, 3]


def test_a_full_disk_in_the_background_is_not_asked_without_end(save, monkeypatch):
    calls = []

    def reserve(*_: Any) -> None:
        calls.append(1)
        raise outgoing.FileError(0, errno.ENOSPC)

    with monkeypatch.context() as patch:
        patch.setattr(outgoing.Files, "reserve", reserve)
        appender = MemmapAppender(save, flush_seconds=0.02)
        appender.append(flat(1, 1))
        wait_until(lambda: len(calls) >= 1)
        time.sleep(0.5)
        assert len(calls) <= 3
    with pytest.raises(errors.AppendError):
        appender.append(flat(2, 1))
    wait_until(lambda: len(appender) == 2)  # it is tried again, although nobody appends
    appender.close()
    expect(save, 2)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("background", [True, False])
def test_metadata_that_cannot_be_written_leaves_rows_pending(save, monkeypatch, durable, background):
    appender = MemmapAppender(save, durable=durable, flush_rows=2 if background else None)
    before = {name: what for name, what in state(save).items() if name.endswith("meta.json")}
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing(errno.EIO))
        appender.append(flat(1, 2))
        if background:
            wait_until(lambda: appender._error is not None)
        with pytest.raises(errors.AppendError) as raised:
            appender.flush()
        assert "are committed, and" not in str(raised.value)
        assert (len(appender), appender.pending) == (1, 2)
        assert {name: what for name, what in state(save).items() if name.endswith((".json", ".tmp"))} == before
    appender.append(flat(3, 1))
    appender.flush()
    assert (len(appender), appender.pending) == (4, 0)
    expect(save, 4)
    appender.close()
    expect(save, 4)


@pytest.mark.parametrize("nth", [2, 3])
def test_what_fails_after_the_commit_is_completed_by_the_next(save, monkeypatch, nth):
    appender = MemmapAppender(save)
    real, calls = os.replace, []

    def replace(old: Any, new: Any) -> None:
        calls.append(new)
        if len(calls) >= nth:
            raise OSError(errno.EIO, "refused")
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        appender.append(flat(1, 2))
        with pytest.raises(errors.AppendError, match="All 3 rows are committed"):
            appender.flush()
    assert (len(appender), appender.pending) == (3, 0)
    assert tdgpu.load_memmap(save)["n", "m", "c"].tolist() == [0, 1, 2]
    appender.flush()
    expect(save, 3)
    appender.append(flat(3, 1))
    appender.close()
    expect(save, 4)
    assert not list(save.rglob(commit.TEMPORARY))


def test_a_failed_sync_loses_what_it_was_about_and_says_so(save, monkeypatch):
    appender = MemmapAppender(save, durable=True)
    appender.append(flat(1, 1))
    appender.flush()
    with monkeypatch.context() as patch:
        patch.setattr(outgoing.Files, "sync", refusing(errno.EIO))
        appender.append(flat(2, 1))
        with pytest.raises(errors.AppendError, match="1 rows that were not committed are lost; 2 are committed"):
            appender.flush()
    with pytest.raises(errors.AppendError):  # what the system says after that cannot be trusted
        appender.append(flat(2, 1))
    appender.close()
    expect(save, 2)
    assert is_free(save)


def test_a_writer_that_asks_for_no_lock_is_noticed(save):
    appender = MemmapAppender(save)
    appender.append(flat(1, 1))
    tensordict.append_memmap(save, flat(1, 2))
    with pytest.raises(errors.AppendError, match="did not ask for the lock"):
        appender.flush()
    with pytest.raises(errors.AppendError, match="did not ask for the lock"):
        appender.close()
    assert load(save).batch_size == (3,)
    assert is_free(save)


# --- many rows of many sizes ------------------------------------------------------------------------------------------


def test_thousands_of_small_appends(tmp_path):
    total = 4000
    numbers = torch.arange(total)
    data = {"byte": (numbers % 251).byte(), "wide": torch.randn(total, 5), "flag": numbers % 3 == 0}
    TensorDict({key: value[:0] for key, value in data.items()}, [0]).memmap(tmp_path)
    chance = random.Random(3)
    with ring_of(256 << 10), MemmapAppender(tmp_path, durable=False) as appender:
        first = 0
        while first < total:
            last = min(total, first + chance.choice((0, 1, 1, 1, 1, 2, 3)))
            appender.append(TensorDict({key: value[first:last] for key, value in data.items()}, [last - first]))
            first = last
            if chance.random() < 0.01:
                appender.flush()
    for key, value in data.items():
        assert (tmp_path / f"{key}.memmap").read_bytes() == value.numpy().tobytes()


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_mixed_sizes(tmp_path, seed):
    """Leaves from a byte to megabytes, any number of rows, rings smaller than a leaf: the bytes of one cat."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    widths = {f"w{i}": chance.choice((1, 1, 2, 7, 100, 5000, 40_000)) for i in range(chance.randint(1, 9))}
    if chance.random() < 0.7:
        widths["large"] = chance.choice((300_000, 900_000))
    kinds = (torch.uint8, torch.bool, torch.int16, torch.float32, torch.complex64)
    dtypes = {key: chance.choice(kinds) for key in widths}

    def part(key: str, count: int) -> torch.Tensor:
        raw = torch.randint(0, 2, (count, widths[key], 2), dtype=torch.uint8, generator=generator)
        made = raw.to(dtypes[key])
        way = chance.randrange(4)
        if way == 0:
            return made[..., 0]
        if way == 1:
            return made[..., 1].contiguous()
        if way == 2:
            return made[..., 0].t().contiguous().t()
        return made[:, :1, 0].expand(count, widths[key])

    parts: dict[str, list[torch.Tensor]] = {key: [part(key, 1)] for key in widths}
    TensorDict({key: value[0] for key, value in parts.items()}, [1]).memmap(tmp_path)
    total = 1
    options = {"chunk_bytes": chance.choice((4096, 64 << 10, MiB)), "threads": chance.randint(1, 4)}
    ring, limit = chance.choice((64 << 10, 200_000, MiB, 16 * MiB)), chance.choice((None, 5, 40))
    with ring_of(ring, **options), MemmapAppender(tmp_path, durable=False, flush_rows=limit) as appender:
        for _ in range(25):
            count = chance.choice((0, 1, 1, 1, 2, 5)) if max(widths.values()) > 10_000 else chance.randint(0, 60)
            rows = {key: part(key, count) for key in widths}
            for key, value in rows.items():
                parts[key].append(value.clone())
            appender.append(TensorDict(rows, [count]))
            total += count
            for value in rows.values():
                if value.stride(-1):
                    value.zero_()
            if chance.random() < 0.15:
                appender.flush()
                assert len(appender) == total
    assert load(tmp_path).batch_size == (total,)
    for key, values in parts.items():
        assert (tmp_path / f"{key}.memmap").read_bytes() == torch.cat(values).numpy().tobytes(), key


# --- threads, processes, the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 80_000])
def test_threads_append_at_once(tmp_path, width):
    TensorDict({"x": torch.zeros(0, width), "y": torch.zeros(0, dtype=torch.int64)}, [0]).memmap(tmp_path)
    failed: list[BaseException] = []

    def work(which: int) -> None:
        try:
            for i in range(20):
                number = torch.tensor([which * 100 + i])
                appender.append(TensorDict({"x": number.float().view(1, 1).repeat(1, width), "y": number}, [1]))
                if i % 8 == which:
                    appender.flush()
        except BaseException as error:
            failed.append(error)

    with MemmapAppender(tmp_path, durable=False, flush_rows=7) as appender:
        threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failed == []
    loaded = load(tmp_path)
    assert sorted(loaded["y"].tolist()) == [which * 100 + i for which in range(4) for i in range(20)]
    assert torch.equal(loaded["x"], loaded["y"].float().view(-1, 1).expand(-1, width))


@pytest.mark.parametrize("width", [3, 100_000])
def test_what_append_took_while_another_thread_closes_is_committed(tmp_path, width):
    """append has returned, and close "commits all rows that were appended": one of the two must say no."""
    rows = TensorDict({"x": torch.ones(1, width)}, [1])
    rows.memmap(tmp_path)
    for _ in range(8):
        before = load(tmp_path).batch_size[0]
        appender = MemmapAppender(tmp_path, durable=False)
        taken, began = [0], threading.Event()
        errors_seen: list[Any] = []

        def work(appender=appender, taken=taken, seen=errors_seen, began=began) -> None:
            try:
                while True:
                    appender.append(rows)
                    taken[0] += 1
                    began.set()
            except errors.InvalidArgument as error:
                seen.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        began.wait(10)
        appender.close()
        thread.join(20)
        assert len(errors_seen) == 1 and "closed" in errors_seen[0]
        assert load(tmp_path).batch_size[0] - before == taken[0]
    assert bool((load(tmp_path)["x"] == 1).all())


def test_a_second_appender_is_refused_and_told_who_it_is(save):
    with MemmapAppender(save) as appender:
        for timeout in (0, 0.1):
            with pytest.raises(errors.SaveLocked) as raised:
                MemmapAppender(save, timeout=timeout)
            assert raised.value.pid == os.getpid()
        with tdgpu.options(lock_timeout=0), pytest.raises(errors.SaveLocked):
            tdgpu.append_memmap(save, flat(1, 1))
        appender.append(flat(1, 1))
    with MemmapAppender(save, timeout=0) as appender:
        appender.append(flat(2, 1))
    expect(save, 3)


def test_it_waits_for_another_writer(save):
    first = MemmapAppender(save)
    threading.Timer(0.3, first.close).start()
    with MemmapAppender(save, timeout=20) as second:
        second.append(flat(1, 1))
    expect(save, 2)


def test_a_closed_appender_says_so(save):
    appender = MemmapAppender(save, flush_rows=5)
    appender.close()
    with pytest.raises(errors.InvalidArgument, match="closed"):
        appender.append(flat(1, 1))
    with pytest.raises(errors.InvalidArgument, match="closed"):
        appender.flush()
    with pytest.raises(errors.InvalidArgument, match="closed"), appender:
        appender.append(flat(1, 1))
    expect(save, 1)


@pytest.mark.parametrize("when", [{}, {"flush_rows": 1000}, {"flush_seconds": 0.001}])
def test_one_that_is_dropped_commits_and_warns(save, when):
    appender = MemmapAppender(save, **when)
    appender.append(flat(1, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del appender
        gc.collect()
        wait_until(lambda: is_free(save))
    told = [str(warning.message) for warning in caught if warning.category is ResourceWarning]
    assert len(told) == 1 and f"{save} was not closed; 2 pending rows" in told[0]
    expect(save, 3)


def test_dropping_one_while_the_background_is_at_work(tmp_path):
    flat(0, 1).memmap(tmp_path)
    rows = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for i in range(40):
            appender = MemmapAppender(tmp_path, durable=False, flush_rows=1 + i % 3, flush_seconds=0.001, timeout=10)
            for _ in range(3):
                appender.append(flat(rows, 1))
                rows += 1
            if i % 2:
                time.sleep(0.001)
            del appender
        wait_until(lambda: is_free(tmp_path))
    expect(tmp_path, rows)
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "tdgpu-append"])


# How a program ends that has two saves open, with two pending rows each.
ENDINGS = {
    "end": "",
    "exception": "raise ZeroDivisionError",
    "in a cycle": "cycle = [first, second]; cycle.append(cycle); del first, second, cycle",
    "in a daemon thread": "threading.Thread(target=lambda kept=first: time.sleep(60), daemon=True).start(); del first",
    "dropped, where warnings are errors": "warnings.simplefilter('error'); del first, second; gc.collect()",
    "the first cannot commit": "os.replace = refuse_in('first')",
    "the second cannot commit": "os.replace = refuse_in('second')",
    "no thread can be started": "threading.Thread.start = refuse",
}


def test_what_is_open_at_the_end_of_the_program_is_committed(tmp_path):
    """However it ends, and whatever else fails then."""
    for name in ENDINGS:
        for which in ("first", "second"):
            flat(0, 1).memmap(tmp_path / name / which)
    status, out, err = run_process(
        """
        import gc, json, signal, sys, time
        from test_append import *
        real = os.replace
        def refuse(*_):
            raise RuntimeError("can't start new thread")
        def refuse_in(name):
            def replace(old, new):
                if f'/{name}/' in str(new):
                    raise OSError(5, "refused")
                real(old, new)
            return replace
        for name, code in json.loads(sys.argv[2]).items():
            if os.fork() == 0:
                signal.alarm(20)
                first, second = (
                    tdgpu.MemmapAppender(Path(sys.argv[1]) / name / which, flush_rows=1000, flush_seconds=1000)
                    for which in ("first", "second")
                )
                first.append(flat(1, 2))
                second.append(flat(1, 2))
                exec(code)
                sys.exit(0)
            print(f"{name}: {os.wait()[1]}", flush=True)
        """,
        tmp_path,
        json.dumps(ENDINGS),
        timeout=120,
    )
    assert status == 0, err
    assert out == "".join(f"{name}: {256 if name == 'exception' else 0}\n" for name in ENDINGS), err
    assert "Fatal" not in err
    left = {
        f"{name}, {which}": load(tmp_path / name / which).batch_size[0]
        for name in ENDINGS for which in ("first", "second")
    }  # fmt: skip
    assert {at for at, rows in left.items() if rows != 3} == {
        "the first cannot commit, first", "the second cannot commit, second"
    }, left  # fmt: skip
    assert err.count("refused") >= 2


def test_a_fork_leaves_the_appender_to_the_parent(save):
    found = in_process(
        """
        import sys, signal, gc
        from test_append import *
        path = Path(sys.argv[1])
        appender = tdgpu.MemmapAppender(path, flush_rows=1000)
        appender.append(flat(1, 2))
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            for call in (lambda: appender.append(flat(3, 1)), appender.flush):
                try:
                    call()
                except errors.ForkError:
                    continue
                os._exit(1)
            len(appender), appender.pending, repr(appender)
            appender.close()
            del appender
            gc.collect()
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert not is_free(path)
        appender.append(flat(3, 1))
        appender.close()
        print(is_free(path))
        """,
        save,
    )
    assert found == "True\n"
    expect(save, 4)


def test_a_fork_while_a_thread_appends_ends_in_an_error_not_in_a_hang(save):
    found = in_process(
        """
        import sys, signal
        from test_append import *
        appender = tdgpu.MemmapAppender(sys.argv[1])
        inside, on = threading.Event(), threading.Event()
        class Slow(TensorDict):  # the moment in which append looks at rows
            @property
            def batch_dims(self):
                inside.set()
                on.wait(30)
                return 1
        slow = flat(1, 1)
        slow.__class__ = Slow
        thread = threading.Thread(target=appender.append, args=(slow,))
        thread.start()
        inside.wait(30)
        pid = os.fork()
        if pid == 0:
            signal.alarm(5)
            try:
                appender.append(flat(2, 1))
            except errors.ForkError:
                os._exit(0)
            os._exit(1)
        status = os.waitpid(pid, 0)[1]
        on.set()
        thread.join(30)
        appender.close()
        print(status)
        """,
        save,
    )
    assert found == "0\n"
    expect(save, 2)


def test_memory_does_not_grow(tmp_path):
    """Not over many small appends with commits, nor over large ones without."""
    found = in_process(
        """
        import sys
        from test_append import *
        def rss():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        path, width = Path(sys.argv[1]), 100_000
        rows = TensorDict({"a": torch.ones(1, 8), "n": TensorDict({"b": torch.ones(1)}, [1])}, [1])
        with tdgpu.MemmapAppender.create(path / "small", rows, durable=False, flush_rows=2000) as appender:
            for _ in range(5000):
                appender.append(rows)
            before, files = rss(), len(os.listdir("/proc/self/fd"))
            for _ in range(20_000):
                appender.append(rows)
            print(rss() - before, len(os.listdir("/proc/self/fd")) - files)
        rows = TensorDict({"x": torch.zeros(1, width), "y": torch.zeros(1)}, [1])
        with tdgpu.MemmapAppender.create(path / "large", rows, durable=False) as appender:
            for i in range(160):
                if i == 40:
                    before = rss()
                appender.append(TensorDict({"x": torch.full((1, width), float(i)), "y": torch.ones(1)}, [1]))
            print(rss() - before, appender.pending)
        """,
        tmp_path,
    )
    grown, files, large, pending = map(int, found.split())
    assert grown < 8 * MiB and files == 0
    assert large < 16 * MiB and pending == 160
    assert load(tmp_path / "small").batch_size == (25_000,)


# --- interrupts -------------------------------------------------------------------------------------------------------


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


# --- create -----------------------------------------------------------------------------------------------------------


def test_create_makes_a_save_and_opens_it_again(tmp_path):
    path = tmp_path / "deep" / "er" / "save"
    with MemmapAppender.create(path, flat(7, 3)) as appender:
        assert (len(appender), appender.pending) == (0, 0)
        assert load(path).batch_size == (0,)
        appender.append(flat(0, 2))
    with MemmapAppender.create(str(path), flat(7, 1), durable=False) as appender:
        assert len(appender) == 2
        appender.append(flat(2, 1))
    expect(path, 3)
    assert os.listdir(tmp_path / "deep" / "er") == ["save"]
    flat(0, 3).memmap(tmp_path / "plain")
    assert {name: entry[1] for name, entry in state(path).items()} == {
        name: entry[1] for name, entry in state(tmp_path / "plain").items()
    }
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_create_takes_an_empty_directory_and_nothing_else(tmp_path):
    (tmp_path / "empty").mkdir()
    MemmapAppender.create(tmp_path / "empty", flat(0, 1)).close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_bytes(b"x")
    (tmp_path / "file").write_bytes(b"x")
    flat(0, 2).save(tmp_path / "archive.tdz")
    before = state(tmp_path)
    for name in ("full", "file", "archive.tdz"):
        with pytest.raises(errors.SaveExists):
            MemmapAppender.create(tmp_path / name, flat(0, 1))
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(errors.SaveExists):
        MemmapAppender.create(tmp_path / "dangling", flat(0, 1))
    (tmp_path / "dangling").unlink()
    assert state(tmp_path) == before


def test_create_refuses_another_structure(tmp_path):
    flat(0, 2).memmap(tmp_path / "save")
    before = state(tmp_path)
    for example in (flat(0, 1).exclude("a"), flat(0, 1).double(), point(), flat(0, 4).view(2, 2)):
        with pytest.raises(errors.InvalidArgument):
            MemmapAppender.create(tmp_path / "save", example)
    for example in (torch.zeros(3), None, {"a": torch.zeros(3)}):
        with pytest.raises(errors.InvalidArgumentType):
            MemmapAppender.create(tmp_path / "other", example)
    stack = lazy_stack([TensorDict({"a": torch.zeros(2, i)}, [2]) for i in (1, 2)], 1)
    for example in (
        stack,
        lazy_stack([flat(0, 1)[0], flat(1, 1)[0]]),
        NonTensorStack("a", "b"),
        TensorDict({"s": NonTensorStack("a", "b")}, [2]),
    ):
        with pytest.raises(errors.InvalidArgument):
            MemmapAppender.create(tmp_path / "other", example)
    assert state(tmp_path) == before
    assert is_free(tmp_path / "save")


def _text() -> TensorDict:
    rows = TensorDict({"t": torch.rand(2)}, [2])
    rows.set_non_tensor("text", "words")
    rows.set_non_tensor("thing", Thing(3))
    return rows


EXAMPLES: dict[str, Callable[[], Any]] = {
    "flat": lambda: flat(0, 2),
    "two batch dimensions": lambda: TensorDict({"a": torch.rand(2, 3, 4)}, [2, 3], names=["time", "env"]),
    "tensorclass": lambda: Point(x=torch.rand(2), y=torch.rand(2, 3), batch_size=[2]),
    "nested tensorclass": lambda: Frame(
        image=torch.rand(2, 4), at=point()[:2], label="cat", extra={"k": [1, None]}, batch_size=[2]
    ),
    "values": _text,
    "gradients": lambda: TensorDict({"a": torch.rand(2, 3, requires_grad=True) * 2}, [2]),
    "expanded": lambda: TensorDict({"a": torch.rand(1, 3).expand(2, 3)}, [2]),
    "typed": lambda: Typed(a=torch.rand(2, 3), batch_size=[2]),
    "a view": lambda: flat(0, 4)._get_sub_tensordict(slice(1, 3)),
    "hollow": lambda: TensorDict({"a": torch.rand(2, 0), "n": TensorDict({}, [2])}, [2]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_create_from_examples_of_all_kinds(tmp_path, name):
    rows = EXAMPLES[name]()
    with MemmapAppender.create(tmp_path / "save", rows, allow_pickle=True) as appender:
        appender.append(rows)
        appender.append(rows)
    loaded = load(tmp_path / "save")
    assert loaded.batch_size == (4, *rows.batch_size[1:])
    rows.detach().memmap(tmp_path / "direct")
    tensordict.append_memmap(tmp_path / "direct", rows, allow_pickle=True)
    if name == "values":  # the pickle of a value is not the same bytes each time
        assert_same(loaded["t"], load(tmp_path / "direct")["t"])
        assert (loaded["text"], loaded["thing"]) == ("words", Thing(3))
    elif name not in ("typed", "a view"):
        assert_same(loaded, load(tmp_path / "direct"))


@pytest.mark.parametrize("name", ["flat", "tensorclass", "nested tensorclass", "values"])
def test_create_from_one_row_without_its_dimension(tmp_path, name):
    rows = EXAMPLES[name]()
    with MemmapAppender.create(tmp_path / "save", rows[0], allow_pickle=True) as appender:
        appender.append(rows)
    assert load(tmp_path / "save").batch_size == (2,)
    with pytest.raises(errors.InvalidArgument), MemmapAppender(tmp_path / "save", allow_pickle=True) as appender:
        appender.append(rows[0])


def test_create_from_an_example_without_bytes(tmp_path):
    """Only its structure is used; if it is refused all the same, then clearly, and nothing is there."""
    try:
        appender = MemmapAppender.create(tmp_path / "save", flat(0, 2).to("meta"))
    except (errors.InvalidArgument, errors.NotSupported):
        assert os.listdir(tmp_path) == []
        return
    with appender:
        appender.append(flat(0, 2))
    expect(tmp_path / "save", 2)


def test_several_processes_create_the_same_save(tmp_path):
    found = in_process(
        """
        import sys, time
        from test_append import *
        path, begin = Path(sys.argv[1]) / "save", time.monotonic() + 0.5
        children = []
        for which in range(4):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    time.sleep(max(0, begin - time.monotonic()))
                    with tdgpu.MemmapAppender.create(path, flat(0, 1), timeout=30) as appender:
                        appender.append(flat(len(appender), 5))
                    code = 0
                finally:
                    os._exit(code)
            children.append(pid)
        print([os.waitpid(pid, 0)[1] for pid in children])
        """,
        tmp_path,
    )
    assert found == "[0, 0, 0, 0]\n"
    expect(tmp_path / "save", 20)
    assert os.listdir(tmp_path) == ["save"]


def test_a_create_that_is_killed_leaves_no_half_save(tmp_path):
    found = in_process(
        """
        import sys, signal
        from test_append import *
        def stopping(nth):
            left = [nth]
            def trace(frame, event, argument):
                if event == "call":
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
            return trace
        where, nth, seen = Path(sys.argv[1]), 1, set()
        tdgpu.MemmapAppender.create(where / "first", flat(0, 1)).close()  # imports what there is to import
        while True:
            path = where / str(nth)
            pid = os.fork()
            if pid == 0:
                sys.settrace(stopping(nth))
                appender = tdgpu.MemmapAppender.create(path / "save", flat(0, 1), durable=False)
                sys.settrace(None)
                os._exit(0)
            status = os.waitpid(pid, 0)[1]
            if (path / "save").exists():
                assert load(path / "save").batch_size == (0,), nth
            seen.add((path / "save").exists())
            with tdgpu.MemmapAppender.create(path / "save", flat(0, 1), durable=False) as appender:
                appender.append(flat(0, 1))
            expect(path / "save", 1)
            if status == 0:
                break
            nth += 199
        print(sorted(seen))
        """,
        tmp_path,
    )
    assert found == "[False, True]\n"


# --- uninterrupted ----------------------------------------------------------------------------------------------------


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
