"""A save that is kept open while it grows: what is committed when, what an error costs, and rows of all sizes."""

from __future__ import annotations

import contextlib
import errno
import gc
import math
import os
import random
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from appends import expect, failing, flat, is_free, load, refusing, ring_of, state, wait_until
from tensordict import TensorDict

import tdgpu
from tdgpu import MemmapAppender, errors
from tdgpu.layout import commit
from tdgpu.transfer import outgoing

MiB = 1 << 20

pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def save(tmp_path: Path) -> Path:
    flat(0, 1).memmap(tmp_path / "save")
    return tmp_path / "save"


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
