"""Staged rows that have not been given to the writers yet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tdgpu.transfer.outgoing import PART, NativeOutlet, Store
from tdgpu.transfer.outlets import Outlet, Staged

__all__ = ["Batch"]

# Chunks of one batch; a ring has gates for 1024 (csrc/ring.h). And parts: a part takes 32 bytes of host memory.
MOST_CHUNKS = 256
MOST_PARTS = 1 << 16
LONGEST_PART = 8 << 20


class Batch:
    """Rows on their way to the writers, who get all that was staged for one file in one call.

    Attributes:
        parts: arrays of :data:`PART`, in the order of rows in each file.
        chunks: the chunks that the parts are in.
        keep: what the addresses of other parts belong to.
        nbytes: bytes of rows.
        store: what the writers get; it tells whether they have it.
    """

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.chunks: list[tuple[NativeOutlet, int]] = []
        self.keep: list[object] = []
        self.nbytes = 0
        self.store: Store | None = None
        self._part_count = 0
        self._costs: dict[Outlet, int] = {}

    def has_room(self, *chunks: tuple[Outlet, int, int]) -> bool:
        """Whether chunks may be claimed while this batch waits (see :class:`Outlet`).

        Args:
            *chunks: of each its outlet, of which there is no other among them, its bytes and its parts.
        """
        return (
            all(self._costs.get(outlet, 0) + outlet.cost(nbytes) <= outlet.budget for outlet, nbytes, _ in chunks)
            and len(self.chunks) + len(chunks) <= MOST_CHUNKS
            and self._part_count + sum(parts for _, _, parts in chunks) <= MOST_PARTS
        )

    def add_chunk(
        self, outlet: Outlet, staged: Staged, files: np.ndarray, sizes: np.ndarray, places: np.ndarray
    ) -> None:
        """Adds a chunk that holds runs of bytes, one behind the other.

        Args:
            outlet: whose chunk it is.
            staged: the chunk.
            files: number of each run's file.
            sizes: its bytes, uint64.
            places: where it goes in its file.
        """
        self.chunks.append((staged.outlet, staged.chunk))
        self._costs[outlet] = self._costs.get(outlet, 0) + outlet.cost(staged.nbytes)
        part = np.empty(len(files), PART)
        part["address"] = sizes.cumsum() - sizes + np.uint64(staged.address)
        part["bytes"], part["offset"], part["file"], part["chunk"] = sizes, places, files, len(self.chunks)
        self._add(part, staged.nbytes)

    def add_run(self, outlet: Outlet, staged: Staged, file: int, place: int) -> None:
        """Adds a chunk that holds bytes of one file."""
        self.add_chunk(
            outlet, staged, np.array([file], np.uint32), np.array([staged.nbytes], np.uint64),
            np.array([place], np.uint64),
        )  # fmt: skip

    def add_memory(
        self, addresses: Sequence[int], files: np.ndarray, sizes: np.ndarray, places: np.ndarray, keep: object
    ) -> None:
        """Adds runs of bytes where they are in host memory, which belongs to ``keep``.

        Long ones in several parts: between parts a writer hears that they are given up.
        """
        where = np.array(addresses, np.uint64)
        if int(sizes.max()) > LONGEST_PART:
            cuts = [
                (address + first, place + first, file, min(size - first, LONGEST_PART))
                for address, place, file, size in zip(
                    addresses, places.tolist(), files.tolist(), sizes.tolist(), strict=True
                )
                for first in range(0, size, LONGEST_PART)
            ]
            where, places, files, sizes = (np.array(column, np.uint64) for column in zip(*cuts, strict=True))
        part = np.empty(len(where), PART)
        part["address"], part["bytes"], part["offset"], part["file"] = where, sizes, places, files
        part["chunk"] = 0
        self.keep.append(keep)
        self._add(part, int(sizes.sum()))

    def _add(self, part: np.ndarray, nbytes: int) -> None:
        self.parts.append(part)
        self._part_count += len(part)
        self.nbytes += nbytes

    def all_parts(self) -> np.ndarray:
        """All parts in one array."""
        # As numbers: numpy is slow with arrays of structures.
        return np.concatenate([part.view(np.uint64) for part in self.parts]).view(PART)

    def mark(self) -> tuple[int, int, int]:
        """Where the batch is now, for :meth:`take_back`."""
        return len(self.parts), len(self.chunks), len(self.keep)

    def take_back(self, mark: tuple[int, int, int]) -> None:
        """Drops what was added since ``mark``."""
        parts, chunks, keep = mark
        for part in self.parts[parts:]:
            self._part_count -= len(part)
            self.nbytes -= int(part["bytes"].sum())
        # What they cost stays counted: their places come free only in order.
        del self.parts[parts:], self.chunks[chunks:], self.keep[keep:]
