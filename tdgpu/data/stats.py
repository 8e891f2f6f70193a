"""Where the time of a training loop goes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tdgpu.data.fetch import Fetch

__all__ = ["LoaderStats", "Stopwatch"]


@dataclass(frozen=True)
class LoaderStats:
    """What a loader has done. Times are in seconds; those of threads add up over all of them.

    Attributes:
        batches, rows, nbytes: handed out.
        waiting: the program waited for a batch: what data loading costs it.
        working: the program did something else between two batches, ``collate_fn`` and ``transform`` included.
        gathering: native threads copied rows that were in memory.
        reading: they waited for rows that were not, and copied those.
    """

    batches: int
    rows: int
    nbytes: int
    waiting: float
    working: float
    gathering: float
    reading: float

    @property
    def stalled(self) -> float:
        """The share of the time that the program waited for data, from 0 to 1."""
        total = self.waiting + self.working
        return self.waiting / total if total else 0.0

    def __str__(self) -> str:
        return (
            f"{self.batches} batches, {self.rows} rows, {self.nbytes / 1e6:.1f} MB; waiting for data"
            f" {self.waiting:.3f} s ({self.stalled:.0%}), working {self.working:.3f} s; threads: gathering"
            f" {self.gathering:.3f} s, reading {self.reading:.3f} s"
        )


class Stopwatch:
    """Adds up what the iterators of a loader do."""

    def __init__(self) -> None:
        self._batches = self._rows = self._nbytes = 0
        self._waiting = self._working = self._gathering = self._reading = 0.0

    def built(self, batches: int, rows: int, row_nbytes: int) -> None:
        """Batches will go to the program."""
        self._batches += batches
        self._rows += rows
        self._nbytes += rows * row_nbytes

    def taken_back(self, rows: int, row_nbytes: int) -> None:
        """A batch will not."""
        self.built(-1, -rows, row_nbytes)

    def fetched(self, fetch: Fetch) -> None:
        """The rows of some batches are there."""
        self._gathering += fetch.warm_seconds
        self._reading += fetch.cold_seconds

    def waited(self, seconds: float) -> None:
        """The program waited."""
        self._waiting += seconds

    def worked(self, seconds: float) -> None:
        """The program did something else."""
        self._working += seconds

    def stats(self, waiting: Iterable[tuple[list[int], int]] = ()) -> LoaderStats:
        """All of it, without the batches that are still to go to the program: rows of each, and bytes of a row."""
        sizes = [(len(rows), sum(rows), sum(rows) * row_nbytes) for rows, row_nbytes in waiting]
        batches, rows, nbytes = (sum(column) for column in zip((0, 0, 0), *sizes, strict=True))
        return LoaderStats(
            self._batches - batches, self._rows - rows, self._nbytes - nbytes,
            self._waiting, self._working, self._gathering, self._reading,
        )  # fmt: skip
