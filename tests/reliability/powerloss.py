"""Lets the power fail at every call of an append, and looks at each state that the disk may then be in."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import tdgpu

from .bed import TEMPORARY, Bed, Torn, snapshot
from .disk import Disk, State
from .kinds import Kind
from .sweep import Lost, Tally, examine
from .tracing import SYNCS, Call, Shared, run_traced

__all__ = ["OMISSIONS", "after_recovery", "power_loss"]

Edit = Callable[[list[Call], Bed, Path], list[Call]]


def power_loss(
    kind: Kind, *, seed: int = 0, omit: str = "", most: int | None = None, directory: Path | None = None
) -> Tally:
    """The power fails at every call of a durable append, and the disk has each of the states that it may have.

    After the append returned, its rows have to be there in all of them.

    Args:
        omit: leaves out syncs of the log (one of ``OMISSIONS``), to show that they are needed.
        most: look at so many states, at random; None: at all of them.
    """
    tally = Tally(f"{kind.name}, power")
    with tempfile.TemporaryDirectory(prefix="tdgpu-power-", dir=directory) as scratch:
        prefix = Path(scratch) / "save"
        rows = kind.make(prefix)
        before = _files(prefix)
        calls, _ = _logged(kind, prefix, rows)
        if omit:
            calls = OMISSIONS[omit](calls, kind.bed, prefix)
        disk = Disk(before, prefix, calls)
        _try_states(kind, prefix, rows, disk, tally, seed, promised=rows + kind.steps[-1], most=most)
    return tally


def after_recovery(kind: Kind, *, seed: int = 0, most: int | None = None, directory: Path | None = None) -> Tally:
    """A durable append is killed at each of its last calls, recovered, and the power fails at a call of the recovery.

    What the killed append had not synced is still not synced when the recovery begins. ``most`` as above, each time.
    """
    tally = Tally(f"{kind.name}, recovery, power")
    recovery = replace(kind, act=lambda prefix, rows, promised: tdgpu.recover_memmap(prefix))
    with tempfile.TemporaryDirectory(prefix="tdgpu-power-", dir=directory) as scratch:
        prefix = Path(scratch) / "save"
        rows = kind.make(prefix)
        before = _files(prefix)
        calls, _ = _logged(kind, prefix, rows)
        first = next(call for call in calls if call.path.endswith(TEMPORARY))
        for kill_at in [call.exit for call in calls if call.entry >= first.entry and call.name != "flock"]:
            shutil.rmtree(prefix)
            _write(prefix, before)
            killed, points = _logged(kind, prefix, rows, kill_at=kill_at)
            recovered, _ = _logged(recovery, prefix, rows, after=points)
            disk = Disk(before, prefix, killed + recovered)
            # While the append itself runs, that is power_loss().
            disk.ends = [end for end in disk.ends if end >= points]
            # Nothing was promised: the append did not return. But what it left must be one of the two.
            _try_states(kind, prefix, rows, disk, tally, seed, promised=rows, most=most)
    return tally


def _try_states(
    kind: Kind,
    prefix: Path,
    rows: int,
    disk: Disk,
    tally: Tally,
    seed: int,
    *,
    promised: int,
    most: int | None = None,
) -> None:
    tally.points += len(disk.ends)
    source = random.Random(f"{kind.name} {seed}")
    states = list(disk.states(source))
    for at, state in states if most is None or most >= len(states) else source.sample(states, most):
        shutil.rmtree(prefix)
        _write(prefix, state)
        try:
            found = examine(kind, prefix, rows, promised if at == disk.ends[-1] else rows)
            tally.add(found > rows)
        except (Torn, Lost, tdgpu.TdgpuError, OSError) as error:
            tally.fail(error, f"the power failed at point {at} (seed {seed})")


def _logged(kind: Kind, prefix: Path, rows: int, *, kill_at: int = 0, after: int = 0) -> tuple[list[Call], int]:
    """The calls of a run, as if it began after that point, and its number of points."""
    trace = run_traced(lambda: kind.act(prefix, rows, Shared()), root=prefix, kill_at=kill_at, log=True)
    if trace.error:
        raise RuntimeError(f"{kind.name} fails: {trace.error}")
    calls = [replace(call, entry=call.entry + after, exit=call.exit + after) for call in trace.calls]
    return calls, trace.points


def _files(prefix: Path) -> State:
    return {path: data for path, (_, data) in snapshot(prefix).items() if (prefix / path).is_file()}


def _write(prefix: Path, state: State) -> None:
    for path, content in state.items():
        file = prefix / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


# --- what is done to show that a sync is needed ---


def _is_top(call: Call, bed: Bed, prefix: Path) -> bool:
    return call.path == os.path.realpath(prefix / bed.top)


def _commit(calls: list[Call], bed: Bed, prefix: Path) -> Call:
    """The rename of the top level's metadata."""
    top = os.path.realpath(prefix / bed.top)
    return next(call for call in calls if call.name == "rename" and os.path.dirname(call.path) == top)


def _no_sync_of_commit(calls: list[Call], bed: Bed, prefix: Path) -> list[Call]:
    commit = _commit(calls, bed, prefix)
    return [c for c in calls if not (c.name in SYNCS and c.entry > commit.exit and _is_top(c, bed, prefix))]


def _no_sync_of_rows(calls: list[Call], bed: Bed, prefix: Path) -> list[Call]:
    return [c for c in calls if not (c.name in SYNCS and c.path.endswith(".memmap"))]


def _no_sync_of_metadata(calls: list[Call], bed: Bed, prefix: Path) -> list[Call]:
    return [c for c in calls if not (c.name in SYNCS and c.path.endswith(TEMPORARY))]


def _no_sync_of_directories(calls: list[Call], bed: Bed, prefix: Path) -> list[Call]:
    commit = _commit(calls, bed, prefix)
    return [c for c in calls if not (c.name in SYNCS and c.exit < commit.entry and os.path.isdir(c.path))]


# A log without these syncs has to be found wanting.
OMISSIONS: dict[str, Edit] = {
    "sync of the commit": _no_sync_of_commit,
    "sync of the rows": _no_sync_of_rows,
    "sync of the metadata": _no_sync_of_metadata,
    "sync of the directories": _no_sync_of_directories,
}
