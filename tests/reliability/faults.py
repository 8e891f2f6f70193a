"""Lets each call of an append fail, one after another, and looks at what it says and at what it leaves."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import tdgpu

from .bed import Torn, look, snapshot
from .kinds import Kind
from .sweep import Tally, examine
from .tracing import CHANGING, Call, Shared, run_traced

__all__ = ["every_call", "from_here_on", "without_fallocate"]

# What a full disk and a used-up quota refuse.
ALLOCATING = frozenset({"write", "pwrite", "writev", "pwritev", "pwritev2", "fallocate", "ftruncate", "open", "mkdir"})
ERRORS = {
    "EIO": (errno.EIO, CHANGING),
    "ENOSPC": (errno.ENOSPC, ALLOCATING | {"rename", "fsync", "fdatasync"}),
    "EDQUOT": (errno.EDQUOT, ALLOCATING | {"rename", "fsync", "fdatasync"}),
}

# How the child ended.
RETURNED, RAISED, COMMITTED = 0, 1, 2


def every_call(kind: Kind, error: str, *, most: int | None = None, directory: Path | None = None) -> Tally:
    """Each call that an append of this kind makes on the save fails once, with ``"EIO"``, ``"ENOSPC"`` or ``"EDQUOT"``.

    The append has to raise an error that names the file. The save is then as it was, byte for byte, unless
    the rows were committed, which the error has to say.

    Args:
        most: try only so many calls, evenly spread; None: all.
    """
    number, names = ERRORS[error]
    tally = Tally(f"{kind.name}, {error}")
    for prefix, rows, call in _cases(kind, names, tally, most, directory):
        before = snapshot(prefix)
        try:
            ended, said = _run(kind, prefix, rows, fail=(call.index, call.index), failing=names, error=number)
            found = look(prefix, kind.bed)
            if ended == RETURNED:
                raise Torn(f"the append said nothing, and left {found} rows")
            # What an appender has flushed before is not what the error is about: then only examine() below tells.
            if len(kind.steps) == 2 and (ended == COMMITTED) != (found > rows):
                raise Torn(f"the error {'says' if ended == COMMITTED else 'does not say'} that rows are committed,"
                           f" and there are {found}: {said}")  # fmt: skip
            if len(kind.steps) == 2 and found == rows and snapshot(prefix) != before:
                raise Torn(f"not as it was: {_difference(before, snapshot(prefix))}")
            tally.add(examine(kind, prefix, rows, found) > rows)
        except (Torn, tdgpu.TdgpuError, OSError, TimeoutError) as failure:
            tally.fail(failure, f"{error} at {call}")
    return tally


def from_here_on(kind: Kind, *, most: int | None = None, directory: Path | None = None) -> Tally:
    """From each call on, everything that would change the disk fails with EIO, what the append tries to undo included.

    The append has to raise. What it leaves may need recovery, but has the rows from before, or the new ones, whole, and
    all that a flush returned for. ``most`` as above.
    """
    tally = Tally(f"{kind.name}, disk gone")
    for prefix, rows, call in _cases(kind, CHANGING, tally, most, directory):
        promised = Shared(rows)
        try:
            ended, _ = _run(kind, prefix, rows, promised, fail=(call.index, 1 << 60), failing=CHANGING)
            if ended == RETURNED:
                raise Torn("the append said nothing")
            tally.add(examine(kind, prefix, rows, promised.value) > rows)
        except (Torn, tdgpu.TdgpuError, OSError, TimeoutError) as failure:
            tally.fail(failure, f"the disk is gone from {call} on")
    return tally


def without_fallocate(kind: Kind, *, directory: Path | None = None) -> Tally:
    """A file system that cannot reserve space: the append goes on without."""
    tally = Tally(f"{kind.name}, no fallocate", points=1)
    with tempfile.TemporaryDirectory(prefix="tdgpu-faults-", dir=directory) as scratch:
        prefix = Path(scratch) / "save"
        rows = kind.make(prefix)
        try:
            everything = (1, 1 << 60)
            ended, said = _run(kind, prefix, rows, fail=everything, failing={"fallocate"}, error=errno.EOPNOTSUPP)
            if ended != RETURNED:
                raise Torn(f"the append failed: {said}")
            tally.add(examine(kind, prefix, rows, rows + kind.steps[-1]) > rows)
        except (Torn, tdgpu.TdgpuError, OSError, TimeoutError) as failure:
            tally.fail(failure, "fallocate is not supported")
    return tally


def _cases(
    kind: Kind, names: frozenset[str], tally: Tally, most: int | None, directory: Path | None
) -> Iterator[tuple[Path, int, Call]]:
    """For each call of those names: a new save, its rows, and the call."""
    with tempfile.TemporaryDirectory(prefix="tdgpu-faults-", dir=directory) as scratch:
        prefix = Path(scratch) / "save"
        rows = kind.make(prefix)
        trace = run_traced(_reporting(kind, prefix, rows, Shared(rows), Shared()), root=prefix, log=True)
        if trace.exit_code != 0:
            raise RuntimeError(f"{kind.name} fails even if no call does: {trace.error}")
        calls = [call for call in trace.calls if call.name in names and call.result >= 0]
        tally.points = len(calls)
        chosen = calls if most is None else calls[:: max(1, -(-len(calls) // most))]
        for call in chosen:
            yield prefix, kind.make(prefix), call


def _run(
    kind: Kind,
    prefix: Path,
    rows: int,
    promised: Shared | None = None,
    *,
    fail: tuple[int, int],
    failing: frozenset[str] | set[str],
    error: int = errno.EIO,
) -> tuple[int, str]:
    """How the append ended, and the text of its error.

    Raises:
        Torn: the error is of no kind that is documented, or does not name the file.
    """
    ended = Shared(-1)
    act = _reporting(kind, prefix, rows, promised or Shared(rows), ended)
    trace = run_traced(act, root=prefix, fail=fail, failing=failing, error=error, log=True)
    if trace.exit_code is None:
        raise Torn(f"the child was killed: {trace.killed_at}; {trace.error}")
    if ended.value == RETURNED:
        return RETURNED, ""
    if ended.value < 0:
        raise Torn(f"not an error that is documented: {trace.error}")
    message = trace.error.strip().splitlines()[-1]
    failed = [call for call in trace.calls if call.result == -error and fail[0] <= call.index <= fail[1]]
    if not any(path and path in message for call in failed for path in (call.path, call.path2)):
        raise Torn(f"the error does not name the file of {failed[0]}: {message}")
    return ended.value, message


def _reporting(kind: Kind, prefix: Path, rows: int, promised: Shared, ended: Shared) -> Callable[[], None]:
    """What the child does: the append; and if that raises what it may, the error goes to the trace."""

    def act() -> None:
        try:
            kind.act(prefix, rows, promised)
            ended.value = RETURNED
        except OSError as error:
            text = str(error).lower()
            ended.value = COMMITTED if "rows are committed" in text else RAISED
            raise

    return act


def _difference(before: dict[str, tuple[int, bytes]], after: dict[str, tuple[int, bytes]]) -> str:
    def word(name: str) -> str:
        return "new" if name not in before else "gone" if name not in after else "other"

    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return ", ".join(f"{name or os.curdir} ({word(name)})" for name in changed)
