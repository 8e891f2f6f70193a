"""Appends survive being killed, failing disks and power failures: whatever happens, whole rows, and none lost.

Bounded here; ``python -m tests.reliability --runs 10000`` is the whole. ``TDGPU_RELIABILITY_RUNS`` says how many
processes are killed, ``TDGPU_RELIABILITY_SEED`` at which of their system calls.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability import diskfull, faults, order, powerloss, processes
from reliability.bed import CLASS, NESTED
from reliability.kinds import KINDS, NEGATIVE, Kind, named
from reliability.sweep import Tally, sweep
from reliability.tracing import run_traced

RUNS = int(os.environ.get("TDGPU_RELIABILITY_RUNS", "48"))
SEED = int(os.environ.get("TDGPU_RELIABILITY_SEED", random.SystemRandom().randrange(1 << 30)))

DURABLE, HASTY, TENSORCLASS = map(
    named, ("append_memmap, durable", "append_memmap, not durable", "append_memmap, tensorclass")
)

Warm = Callable[..., Any]


def prepare() -> None:
    torch.set_num_threads(1)
    if os.access("/dev/shm", os.W_OK):  # what an append asks the disk for is counted, and not waited for
        tempfile.tempdir = "/dev/shm"
    gc.freeze()


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """Calls a function in a process that has everything imported, and no thread but its own: one that can be forked."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, prepare) as executor:
        yield lambda function, *args, **kwargs: executor.submit(function, *args, **kwargs).result()


def assert_sound(tally: Tally) -> None:
    print(f"{tally}; TDGPU_RELIABILITY_SEED={SEED}")
    assert tally.lost == tally.torn == 0, "\n".join(tally.failures)
    assert tally.runs == tally.old + tally.new > 0


# --- the instruments ---


def log_of_known_calls(directory: Path) -> None:
    def act() -> None:
        with open(directory / "a", "wb") as file:
            file.write(b"abc")
        os.rename(directory / "a", directory / "b")
        os.unlink(directory / "b")

    trace = run_traced(act, root=directory, log=True)
    assert [(call.name, Path(call.path).name) for call in trace.calls] == [
        ("open", "a"), ("write", "a"), ("rename", "a"), ("unlink", "b"),
    ]  # fmt: skip
    assert trace.calls[1].data == b"abc"
    # Killed at the beginning of a call, it was not made; at its end, it was.
    for call, at, left in ((3, "entry", ["a"]), (3, "exit", ["b"]), (4, "entry", ["b"]), (4, "exit", [])):
        killed = run_traced(act, root=directory, kill_at=getattr(trace.calls[call - 1], at))
        assert killed.exit_code is None
        assert os.listdir(directory) == left
        (directory / "b").unlink(missing_ok=True)
    # Failed by the tracer, it was not made either.
    failed = run_traced(act, root=directory, fail=(3, 3), error=28)
    assert "No space left" in failed.error
    assert os.listdir(directory) == ["a"]


def test_a_tracer_kills_where_it_is_told(warm: Warm, tmp_path: Path) -> None:
    warm(log_of_known_calls, tmp_path)


def child_that_hangs() -> None:
    with pytest.raises(TimeoutError):
        run_traced(lambda: time.sleep(60), seconds=0.3)


def test_a_child_that_hangs_is_an_error(warm: Warm) -> None:
    warm(child_that_hangs)


@pytest.mark.parametrize("kind", NEGATIVE, ids=lambda kind: kind.name)
def test_the_sweep_notices_an_append_in_a_wrong_order(warm: Warm, kind: Kind) -> None:
    tally = warm(sweep, kind, 16, seed=SEED)
    assert tally.torn > 0, f"{tally}; TDGPU_RELIABILITY_SEED={SEED}"


@pytest.mark.parametrize("omission", powerloss.OMISSIONS)
def test_a_power_failure_shows_that_a_sync_is_missing(warm: Warm, omission: str) -> None:
    tally = warm(powerloss.power_loss, TENSORCLASS, seed=SEED, omit=omission, most=100)
    assert tally.torn + tally.lost > 0, f"{tally}; TDGPU_RELIABILITY_SEED={SEED}"


# --- killed ---


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_killed_at_any_system_call(warm: Warm, kind: Kind) -> None:
    assert_sound(warm(sweep, kind, max(1, RUNS // len(KINDS)), seed=SEED))


# --- the power fails ---


@pytest.mark.parametrize("kind", [DURABLE, TENSORCLASS], ids=lambda kind: kind.name)
def test_the_power_fails_at_any_call(warm: Warm, kind: Kind) -> None:
    tally = warm(powerloss.power_loss, kind, seed=SEED, most=100)
    assert_sound(tally)
    assert tally.old
    assert tally.new


def test_the_power_fails_while_a_killed_append_is_recovered(warm: Warm) -> None:
    assert_sound(warm(powerloss.after_recovery, TENSORCLASS, seed=SEED, most=4))


@pytest.mark.parametrize(("kind", "durable"), [(DURABLE, True), (TENSORCLASS, True), (HASTY, False)])
def test_the_order_of_an_append(warm: Warm, kind: Kind, durable: bool) -> None:
    warm(order.check_order, kind, durable=durable)


# --- calls fail ---


@pytest.mark.parametrize(
    ("name", "error", "most"),
    [
        ("append_memmap, durable", "EIO", None),
        ("append_memmap, first rows", "EIO", 12),
        ("append_memmap, tensorclass", "ENOSPC", 12),
        ("append_memmap, not durable", "EDQUOT", 12),
        ("MemmapAppender, durable", "EIO", 12),
    ],
)
def test_a_call_that_fails(warm: Warm, name: str, error: str, most: int | None) -> None:
    assert_sound(warm(faults.every_call, named(name), error, most=most))


@pytest.mark.parametrize("name", ["append_memmap, durable", "MemmapAppender, durable"])
def test_a_disk_that_goes_away(warm: Warm, name: str) -> None:
    assert_sound(warm(faults.from_here_on, named(name), most=12))


def test_a_file_system_that_cannot_reserve_space(warm: Warm) -> None:
    assert_sound(warm(faults.without_fallocate, DURABLE))


# --- a disk that is full ---


@pytest.fixture
def mountable(tmp_path: Path) -> Path:
    """Where a tmpfs can be mounted."""
    try:
        with diskfull.mounted(tmp_path / "try", "size=1m"):
            pass
    except PermissionError as error:
        if os.environ.get("CI", "").lower() == "true":
            raise
        pytest.skip(f"needs the right to mount: {error}")
    return tmp_path / "disk"


def test_a_full_disk(warm: Warm, mountable: Path) -> None:
    tally = warm(diskfull.full_disk, mountable, step=2)
    assert_sound(tally)
    assert tally.old > len(NESTED.leaves)
    assert tally.new


def test_a_disk_that_takes_no_more_files(warm: Warm, mountable: Path) -> None:
    tally = warm(diskfull.no_more_files, mountable)
    assert_sound(tally)
    assert tally.old == len(NESTED.levels)


# --- several processes ---


def test_a_second_writer_is_told_who_is_first_or_waits(warm: Warm, tmp_path: Path) -> None:
    warm(processes.second_writer_is_told, tmp_path / "save")


def test_two_writers_lose_nothing(warm: Warm, tmp_path: Path) -> None:
    warm(processes.two_writers_lose_nothing, tmp_path / "save")


def test_a_killed_writer_leaves_no_lock(warm: Warm, tmp_path: Path) -> None:
    warm(processes.killed_writer_leaves_no_lock, tmp_path / "save")


def test_a_reader_sees_whole_rows_while_rows_are_appended(warm: Warm, tmp_path: Path) -> None:
    assert warm(processes.reader_sees_whole_rows, tmp_path / "one by one", NESTED, appends=100, appender=False) > 10
    assert warm(processes.reader_sees_whole_rows, tmp_path / "kept open", CLASS, appends=1000, appender=True) > 100


def test_a_user_without_rights_changes_nothing(warm: Warm) -> None:
    with tempfile.TemporaryDirectory() as directory:  # not pytest's, into which other users cannot look
        warm(processes.without_rights, Path(directory))
