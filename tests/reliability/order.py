"""The order in which an append's calls reach the kernel, as its log has it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .bed import TEMPORARY
from .kinds import Kind
from .tracing import CHANGING, SYNCS, Call, Shared, run_traced

__all__ = ["check_order"]


def check_order(kind: Kind, *, durable: bool) -> None:
    """Asserts the order that recovery and readers rely on: lock, rows, temporary metadata, the commit, the others.

    And, if durable, that each step is on the disk before the next begins; if not, that nothing waits for the disk.
    """
    with tempfile.TemporaryDirectory(prefix="tdgpu-order-") as scratch:
        prefix = Path(scratch) / "save"
        rows = kind.make(prefix)
        trace = run_traced(lambda: kind.act(prefix, rows, Shared()), root=prefix, log=True)
        assert trace.exit_code == 0, trace.error
        top, *others = (os.path.realpath(prefix / level) for level in kind.bed.levels.values())
        leaves = [os.path.realpath(prefix / file) for file in kind.bed.files()]
    calls = [call for call in trace.calls if call.result >= 0]

    def of(path: str, *names: str) -> list[Call]:
        return [call for call in calls if call.path == path and call.name in names]

    def temporary(level: str) -> str:
        return os.path.join(level, TEMPORARY)

    lock = next(call for call in calls if call.name == "flock")
    assert all(call.entry > lock.exit for call in calls if call.name in CHANGING - {"open"})
    created = {level: of(temporary(level), "open")[0] for level in (top, *others)}
    renamed = {level: of(temporary(level), "rename")[0] for level in (top, *others)}
    begin = min(call.entry for call in created.values())
    commit = renamed[top]
    assert created[top].entry == begin, "the top's temporary file is not the first one"
    for leaf in leaves:
        written = of(leaf, "write", "pwrite", "writev", "pwritev")
        assert written, f"nothing was written to {leaf}"
        assert max(call.exit for call in written) < begin, "rows are written after the metadata"
    assert max(call.exit for call in created.values()) < commit.entry
    assert [call.path for call in sorted(renamed.values(), key=lambda call: call.entry)] == [
        temporary(level) for level in (top, *others)
    ], "not in the order: the top, then parents before children"

    syncs = [call for call in calls if call.name in SYNCS | {"syncfs"}]
    if not durable:
        assert not syncs, f"it waits for the disk: {syncs[0]}"
        return

    def synced(path: str, after: int, before: int) -> bool:
        return any(call.path == path and call.entry > after and call.exit < before for call in syncs)

    for leaf in leaves:
        written = of(leaf, "write", "pwrite", "writev", "pwritev", "fallocate", "ftruncate")
        assert synced(leaf, max(call.exit for call in written), begin), f"{leaf} is not synced before the metadata"
    for level in (top, *others):
        content = max(call.exit for call in of(temporary(level), "write", "pwrite", "fchmod"))
        assert synced(temporary(level), content, commit.entry), f"the metadata of {level} is not synced"
        assert synced(level, created[level].exit, commit.entry), f"the name of the metadata in {level} is not synced"
    second = min((call.entry for call in renamed.values() if call is not commit), default=trace.points)
    assert synced(top, commit.exit, second), "the commit is not synced before what follows from it"
    for level in others:
        assert synced(level, renamed[level].exit, trace.points), f"the new metadata of {level} is not synced"
