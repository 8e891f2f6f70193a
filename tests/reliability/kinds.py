"""What is killed: appends and recoveries of every kind, each told as what a child process does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tdgpu

from .bed import CLASS, NESTED, Bed, halfway
from .naive import append
from .tracing import Shared

__all__ = ["KINDS", "NEGATIVE", "Kind", "named"]

# A save is made anew when it has grown to this: so that a run costs the same throughout.
MOST_ROWS = 120


@dataclass(frozen=True)
class Kind:
    """Something that a child does to a save, and what may be found after it was killed.

    Attributes:
        act: run in the child: with the prefix, the number of rows there, and a number that it sets to how many rows
            it was promised are there to stay.
        steps: how many rows may have been added when it is killed, in order; the first is 0: none of them.
        prepare: makes the save at a path where nothing is, and returns its rows (-1: there is no save).
        fresh: whether each run needs a new save.
    """

    name: str
    bed: Bed
    act: Callable[[Path, int, Shared], object]
    steps: tuple[int, ...]
    prepare: Callable[[Path], int]
    fresh: bool = False

    def __reduce__(self) -> tuple[Callable[[str], Kind], tuple[str]]:
        return named, (self.name,)  # a process that runs one has them all

    def make(self, prefix: Path) -> int:
        """A new save at the prefix, in place of what is there."""
        if prefix.exists():
            shutil.rmtree(prefix)
        return self.prepare(prefix)


def _saved(bed: Bed, rows: int) -> Callable[[Path], int]:
    def prepare(prefix: Path) -> int:
        bed.save(prefix, rows)
        return rows

    return prepare


def _halfway(bed: Bed, renamed: int, *, cut: bool = False) -> Callable[[Path], int]:
    def prepare(prefix: Path) -> int:
        halfway(prefix, bed, 4, 6, renamed, cut=cut)
        return 6 if renamed else 4

    return prepare


def _absent(prefix: Path) -> int:
    return -1


def _appending(bed: Bed, *, durable: bool, count: int = 3) -> Callable[[Path, int, Shared], None]:
    def act(prefix: Path, first: int, promised: Shared) -> None:
        with tdgpu.options(durable=durable):
            tdgpu.append_memmap(prefix, bed.rows(first, count))
        promised.value = first + count

    return act


def _appender(bed: Bed, *, durable: bool) -> Callable[[Path, int, Shared], None]:
    """Two flushes and a close; the steps are 0, 3, 5, 6."""

    def act(prefix: Path, first: int, promised: Shared) -> None:
        with tdgpu.MemmapAppender(prefix, durable=durable) as appender:
            appender.append(bed.rows(first, 1))
            appender.append(bed.rows(first + 1, 2))
            appender.flush()
            promised.value = first + 3
            appender.append(bed.rows(first + 3, 1))
            appender.append(bed.rows(first + 4, 1))
            appender.flush()
            promised.value = first + 5
            appender.append(bed.rows(first + 5, 1))
        promised.value = first + 6

    return act


def _creating(bed: Bed) -> Callable[[Path, int, Shared], None]:
    def act(prefix: Path, first: int, promised: Shared) -> None:
        with tdgpu.MemmapAppender.create(prefix, bed.rows(0, 1)) as appender:
            promised.value = 0
            appender.append(bed.rows(0, 2))
            appender.flush()
            promised.value = 2

    return act


def _flushing(prefix: Path, first: int, promised: Shared) -> None:
    appender = tdgpu.MemmapAppender(prefix, durable=True)
    appender.append(NESTED.rows(first, 3))
    appender.flush()  # what it returned for has to last without a close()
    promised.value = first + 3


def _recovering(prefix: Path, first: int, promised: Shared) -> None:
    tdgpu.recover_memmap(prefix)


KINDS = (
    Kind("append_memmap, durable", NESTED, _appending(NESTED, durable=True), (0, 3), _saved(NESTED, 2)),
    Kind("append_memmap, not durable", NESTED, _appending(NESTED, durable=False), (0, 3), _saved(NESTED, 2)),
    Kind("append_memmap, tensorclass", CLASS, _appending(CLASS, durable=True), (0, 3), _saved(CLASS, 2)),
    Kind("append_memmap, first rows", NESTED, _appending(NESTED, durable=True), (0, 3), _saved(NESTED, 0), fresh=True),
    Kind("MemmapAppender, durable", NESTED, _appender(NESTED, durable=True), (0, 3, 5, 6), _saved(NESTED, 2)),
    Kind("MemmapAppender, not durable", CLASS, _appender(CLASS, durable=False), (0, 3, 5, 6), _saved(CLASS, 2)),
    Kind("MemmapAppender.flush", NESTED, _flushing, (0, 3), _saved(NESTED, 2)),
    Kind("MemmapAppender.create", NESTED, _creating(NESTED), (0, 1, 3), _absent, fresh=True),
    Kind("recover_memmap, to undo", NESTED, _recovering, (0,), _halfway(NESTED, 0, cut=True), fresh=True),
    Kind("recover_memmap, to complete", NESTED, _recovering, (0,), _halfway(NESTED, 1), fresh=True),
    Kind("recover_memmap, half completed", NESTED, _recovering, (0,), _halfway(NESTED, 3), fresh=True),
    Kind("recover_memmap, tensorclass", CLASS, _recovering, (0,), _halfway(CLASS, 1), fresh=True),
)


def _wrongly(order: str) -> Kind:
    def act(prefix: Path, first: int, promised: Shared) -> None:
        append(prefix, NESTED, first, 3, order)

    return Kind(order, NESTED, act, (0, 3), _saved(NESTED, 2), fresh=True)


# Appends that lose or mix rows when they are killed: a sweep that finds nothing wrong with them is worth nothing.
NEGATIVE = tuple(_wrongly(order) for order in ("children first", "in place", "rows last", "top alone"))


def named(name: str) -> Kind:
    """The kind of that name."""
    return next(kind for kind in (*KINDS, *NEGATIVE) if kind.name == name)
