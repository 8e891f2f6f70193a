"""Where the time of a training loop goes."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable
from dataclasses import dataclass

from tdgpu.data.fetch import Fetch
from tdgpu.transfer.base import CopyTimes

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
        copying: the device copied batches to its memory, by its own clock: without what a copy waits for. It is told
            when a copy is over, so batches that were handed out lately may be missing while a loop runs. 0 on the CPU,
            and where the save is on the device.
    """

    batches: int
    rows: int
    nbytes: int
    waiting: float
    working: float
    gathering: float
    reading: float
    copying: float

    @property
    def stalled(self) -> float:
        """The share of the time that the program waited for data, from 0 to 1."""
        total = self.waiting + self.working
        return self.waiting / total if total else 0.0

    def __str__(self) -> str:
        return (
            f"{self.batches} batches, {self.rows} rows, {self.nbytes / 1e6:.1f} MB; waiting for data"
            f" {self.waiting:.3f} s ({self.stalled:.0%}), working {self.working:.3f} s; threads: gathering"
            f" {self.gathering:.3f} s, reading {self.reading:.3f} s; device: copying {self.copying:.3f} s"
        )


class Stopwatch:
    """Adds up what the iterators of a loader do."""

    def __init__(self) -> None:
        self._batches = self._rows = self._nbytes = 0
        self._waiting = self._working = self._gathering = self._reading = self._copying = 0.0
        # Of batches that were read, oldest first; those whose copies are not over. They are few: what is not copied
        # is in the ring.
        self._copies: collections.deque[CopyTimes] = collections.deque()

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
        if fetch.copy_times is not None:
            self._copies.append(fetch.copy_times)
        self._collect()

    def _collect(self) -> None:
        """Adds up the copies that are over. Other threads and signal handlers may do so at the same time."""
        while True:
            try:
                times = self._copies.popleft()
            except IndexError:
                return
            seconds = times.seconds()
            if seconds is None:
                self._copies.appendleft(times)
                return
            self._copying += seconds

    def waited(self, seconds: float) -> None:
        """The program waited."""
        self._waiting += seconds

    def worked(self, seconds: float) -> None:
        """The program did something else."""
        self._working += seconds

    def stats(self, waiting: Iterable[tuple[list[int], int]] = (), patience: float = 0) -> LoaderStats:
        """All of it.

        Args:
            waiting: batches that are still to go to the program, which do not count: rows of each, and bytes of a row.
            patience: seconds to wait for copies that are under way.
        """
        deadline = time.monotonic() + patience
        self._collect()
        while self._copies and time.monotonic() < deadline:
            time.sleep(0.0005)
            self._collect()
        sizes = [(len(rows), sum(rows), sum(rows) * row_nbytes) for rows, row_nbytes in waiting]
        batches, rows, nbytes = (sum(column) for column in zip((0, 0, 0), *sizes, strict=True))
        return LoaderStats(
            self._batches - batches, self._rows - rows, self._nbytes - nbytes,
            self._waiting, self._working, self._gathering, self._reading, self._copying,
        )  # fmt: skip
