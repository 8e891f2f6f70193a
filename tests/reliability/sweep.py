"""Kills a kind of append at its system calls, one after another, and looks at what is left each time."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import tdgpu

from .bed import Torn, look, recover_by_hand, temporaries
from .kinds import MOST_ROWS, Kind
from .tracing import CHANGING, Shared, Trace, run_traced

__all__ = ["Tally", "sweep"]

# One run in so many is recovered as tensordict's documentation says, too, on a copy.
BY_HAND = 8
MOST_FAILURES = 20


class Lost(Exception):
    """Rows are gone that were promised to stay."""


@dataclass
class Tally:
    """What a number of runs came to.

    Attributes:
        points: where the child could have been killed (or a call could have failed, or the power).
        old, new: runs that left the rows from before, or new ones too, whole.
        lost, torn: runs after which promised rows were missing; or that left anything else that must not be.
        failures: a line for each of the first of these, with what is needed to see it again.
    """

    name: str
    points: int = 0
    runs: int = 0
    old: int = 0
    new: int = 0
    lost: int = 0
    torn: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, new: bool) -> None:
        """A run that went as it must."""
        self.runs += 1
        self.new += new
        self.old += not new

    def fail(self, error: Exception, where: str) -> None:
        """A run that did not."""
        self.runs += 1
        self.lost += isinstance(error, Lost)
        self.torn += not isinstance(error, Lost)
        if len(self.failures) < MOST_FAILURES:
            self.failures.append(f"{self.name}: {where}: {type(error).__name__}: {error}")


def sweep(kind: Kind, runs: int, *, seed: int = 0, directory: Path | None = None) -> Tally:
    """Kills ``kind`` at so many points: all of them if there are not more, else a random sample.

    A third of the sample are the points around the calls that rename and remove, a third those around any call that
    changes what is on disk; the others are spread evenly.

    Args:
        runs: at how many points.
        seed: of the sample.
        directory: where the saves are made; a temporary one if not given.
    """
    tally = Tally(kind.name)
    with tempfile.TemporaryDirectory(prefix="tdgpu-sweep-", dir=directory) as scratch:
        prefix = Path(scratch) / "save"
        rows = kind.make(prefix)
        trace = _attempt(kind, prefix, rows, Shared(rows), log=True)
        if trace.exit_code != 0:
            raise RuntimeError(f"{kind.name} fails even if nobody kills it: {trace.error or trace.killed_at}")
        tally.points = trace.points
        rows = kind.make(prefix)
        for point in _choose(trace, runs, random.Random(f"{kind.name} {seed}")):
            if kind.fresh or rows > MOST_ROWS:
                rows = kind.make(prefix)
            promised = Shared(rows)
            where = f"killed at point {point}"
            try:
                trace = _attempt(kind, prefix, rows, promised, kill_at=point)
                where += f" ({trace.killed_at or 'it ended before'}; seed {seed}, {rows} rows before)"
                by_hand = tally.runs % BY_HAND == 0
                found = examine(kind, prefix, rows, promised.value, by_hand=by_hand)
                tally.add(found > rows)
                rows = found + 1
            except (Torn, Lost, tdgpu.TdgpuError, OSError, TimeoutError) as error:
                tally.fail(error, where)
                rows = kind.make(prefix)
    return tally


def _attempt(kind: Kind, prefix: Path, rows: int, promised: Shared, *, kill_at: int = 0, log: bool = False) -> Trace:
    trace = run_traced(lambda: kind.act(prefix, rows, promised), root=prefix.parent, kill_at=kill_at, log=log)
    if trace.error:
        raise Torn(f"the child raised: {trace.error}")
    return trace


def _choose(trace: Trace, runs: int, source: random.Random) -> list[int]:
    everything = list(range(1, trace.points + 1))
    chosen: list[int] = []
    while runs - len(chosen) >= len(everything):
        chosen += everything
    for names in (frozenset({"rename", "unlink"}), CHANGING):
        calls = [call for call in trace.calls if call.name in names]
        around = sorted({point for call in calls for point in (call.entry, call.exit)})
        chosen += _spread(around, min((runs - len(chosen)) // 3, len(around)), source)
    return chosen + _spread(everything, runs - len(chosen), source)


def _spread(points: list[int], count: int, source: random.Random) -> list[int]:
    """One point at random of each of ``count`` equal parts."""
    bounds = [len(points) * i // count for i in range(count + 1)] if count else []
    return [points[source.randrange(low, high)] for low, high in itertools.pairwise(bounds)]


def examine(kind: Kind, prefix: Path, rows: int, promised: int, *, by_hand: bool = False) -> int:
    """Looks at what a killed child left, recovers it, looks again, and appends a row.

    Args:
        rows: that were there before.
        promised: rows of which the child was told that they are there to stay.
        by_hand: recover a copy as tensordict's documentation says, too.

    Returns:
        The number of rows that were found (without the one that was appended).

    Raises:
        Torn, Lost: it is not as it must be.
    """
    bed = kind.bed
    shown = look(prefix, bed)
    if shown not in {rows + step for step in kind.steps}:
        raise (Lost if shown < promised else Torn)(f"{shown} rows, of {rows} and {kind.steps} more")
    if shown < promised:
        raise Lost(f"{promised} rows were promised, and {shown} are shown")
    if shown < 0:
        return _begin_again(kind, prefix)
    if by_hand:
        copy = prefix.with_name("by hand")
        shutil.copytree(prefix, copy)
        recover_by_hand(copy, bed)
        if (found := look(copy, bed, plain=True)) != shown:
            raise Torn(f"{found} rows after a recovery by hand, {shown} before")
        shutil.rmtree(copy)
    report = tdgpu.recover_memmap(prefix)
    if report.rows != shown:
        raise Torn(f"the recovery reports {report.rows} rows, a load shows {shown}")
    for plain in (True, False):
        if (found := look(prefix, bed, plain=plain)) != shown:
            raise Torn(f"{found} rows after the recovery, {shown} before")
    if left := temporaries(prefix):
        raise Torn(f"left behind: {left}")
    with tdgpu.options(durable=False, lock_timeout=0):
        tdgpu.append_memmap(prefix, bed.rows(shown, 1))
    if (found := look(prefix, bed)) != shown + 1:
        raise Torn(f"{found} rows after one was appended to {shown}")
    return shown


def _begin_again(kind: Kind, prefix: Path) -> int:
    """After a creation that was killed before there was a save: another one succeeds."""
    with tdgpu.MemmapAppender.create(prefix, kind.bed.rows(0, 1)) as appender:
        appender.append(kind.bed.rows(0, 1))
    if (found := look(prefix, kind.bed)) != 1:
        raise Torn(f"{found} rows in a save that was created again")
    return -1
