"""The rows of a save, opened: what the core gathers them from, and what it is told to gather."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tdgpu.data.form import BatchForm, remember
from tdgpu.errors import LoadError, NotSupported, TransferError
from tdgpu.transfer import host, native
from tdgpu.transfer.base import failed_piece
from tdgpu.transfer.gather import Gather, GatheredRead
from tdgpu.transfer.host import Want
from tdgpu.transfer.native import CHUNK, GATHERED, PIECE, RUN, RowSource, Work

__all__ = ["Rows"]

# Bytes that one thread gathers at a time: all threads share a batch of large rows.
PIECE_BYTES = 1 << 20
_NO_RUNS = np.empty(0, RUN)


class Rows:
    """The leaves of a save, opened in this process, of which any rows can be gathered.

    Leaves that an archive has compressed are inflated into memory, all of them, when this is made. The others are
    mapped: what is gathered from them is in the page cache, or comes there.

    Args:
        form: what a batch of the save is.
        threads: native threads that inflate.

    Raises:
        LoadError: a file cannot be opened, is no longer the one that was checked, or is too short.
        ChecksumError, NotSupported: a leaf cannot be inflated.
    """

    def __init__(self, form: BatchForm, threads: int) -> None:
        self.form = form
        self.files: native.Files = []
        self._inflated: dict[int, torch.Tensor] = {}
        self.sources: list[RowSource] = []
        self._gathers: dict[tuple[int, ...], Gather] = {}
        self._plans: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}
        if not form.rows:
            return
        self._inflate(threads)
        for number, (leaf, nbytes) in enumerate(zip(form.leaves, form.row_nbytes, strict=True)):
            extent = leaf.extent
            assert extent is not None
            self.files.append((extent.file, extent.inode))
            place: tuple[str, int, int] | int = (extent.file, extent.inode, extent.offset + leaf.first)
            memory = self._inflated.get(number)
            if memory is not None:
                place = memory.data_ptr()
            try:
                self.sources.append(RowSource(place, nbytes, form.rows, memory))
            except TransferError as error:
                raise LoadError(error.message, save=form.save.prefix, key=leaf.key, file=extent.file) from None

    def _inflate(self, threads: int) -> None:
        wants = []
        for number, leaf in enumerate(self.form.leaves):
            if leaf.extent is not None and leaf.extent.is_compressed:
                memory = torch.empty(leaf.nbytes, dtype=torch.uint8, device="cpu")
                self._inflated[number] = memory
                wants.append(Want(leaf.extent, leaf.key, leaf.first, leaf.nbytes, memory.data_ptr()))
        host.read(self.form.save.prefix, wants, threads=threads)

    def one(self, index: int) -> Any:
        """A row on the CPU, without the first batch dimension."""
        return self.take(np.array([index], np.int64))[0]

    def take(self, index: np.ndarray) -> Any:
        """A batch of rows on the CPU, gathered by the calling thread, each leaf in memory of its own.

        Args:
            index: int64, each at least 0 and below ``form.rows``.

        Raises:
            LoadError: a file has changed under the save.
        """
        count, form = len(index), self.form
        tensors = [
            torch.empty((count, *row_shape), dtype=leaf.dtype, device="cpu")
            for leaf, row_shape in zip(form.leaves, form.row_shapes, strict=True)
        ]
        if count and tensors:
            addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
            self.raise_failure((count,), self._gather((count,)).now(index, addresses).report())
        return form.build(tensors, count, None)

    def post(
        self, readers: native.Readers, index: np.ndarray, sizes: tuple[int, ...], addresses: np.ndarray
    ) -> GatheredRead:
        """Starts to gather the rows of some batches into memory on the host.

        Args:
            readers: whose threads do it.
            index: which rows, int64, of one batch behind the other.
            sizes: how many of them each batch has, at least one.
            addresses: of the memory of each leaf of each batch (uint64), which stays until it is over.
        """
        return self._gather(sizes).post(readers, index, addresses)

    def _gather(self, sizes: tuple[int, ...]) -> Gather:
        found = self._gathers.get(sizes)
        if found is None:
            found = Gather(Work([], *self._plan_apart(sizes), _NO_RUNS, 0, self.sources), sum(sizes))
            remember(self._gathers, sizes, found)
        return found

    def _plan_apart(self, sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The pieces and chunks of some batches. Each leaf of each is a chunk, and has memory of its own."""
        pieces: list[tuple[int, ...]] = []
        chunks: list[tuple[int, ...]] = []
        begin = 0
        for size in sizes:
            for number, nbytes in enumerate(self.form.row_nbytes):
                first, per_piece = len(pieces), max(1, PIECE_BYTES // nbytes)
                for row in range(0, size, per_piece):
                    part = nbytes * min(per_piece, size - row)
                    pieces.append((begin + row, part, nbytes * row, number, 0, GATHERED, number))
                chunks.append((0, nbytes * size, first, len(pieces) - first, 0, 0))
            begin += size
        return np.array(pieces, PIECE), np.array(chunks, CHUNK)

    def work(self, index: np.ndarray, address: int, most_chunk_bytes: int, most_threads: int) -> Work:
        """What the core is to do to gather rows for a device.

        Args:
            index: which rows, int64, at least one.
            address: of the memory of a batch, on the device.
            most_chunk_bytes: bytes of the largest chunk.
            most_threads: how many may work on it; 0: all.

        Raises:
            NotSupported: a row is larger than that.
        """
        key = len(index)
        plan = self._plans.get(key)
        if plan is None or plan[0] != most_chunk_bytes:
            plan = most_chunk_bytes, *self._plan(key, most_chunk_bytes)
            remember(self._plans, key, plan)
        _, pieces, chunks = plan
        chunks = chunks.copy()
        chunks["destination"] += np.uint64(address)
        return Work(self.files, pieces, chunks, _NO_RUNS, most_threads, self.sources, index)

    def _plan(self, count: int, most_chunk_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """The pieces and chunks of so many rows for a device, in one piece of memory that begins at 0."""
        pieces: list[tuple[int, ...]] = []
        chunks: list[tuple[int, ...]] = []
        start, first = 0, 0  # of the chunk that is being filled: its place, and its first piece
        end = 0
        offsets = self.form.layout(count).offsets
        for number, (offset, nbytes) in enumerate(zip(offsets, self.form.row_nbytes, strict=True)):
            if nbytes > most_chunk_bytes:
                raise NotSupported(
                    f"A row of {nbytes} bytes does not fit in a quarter of the staging ring: set the option ring_bytes"
                    f" to at least {4 * nbytes} before the device is first used.",
                    save=self.form.save.prefix, key=self.form.leaves[number].key,
                )  # fmt: skip
            per_piece = max(1, min(PIECE_BYTES, most_chunk_bytes) // nbytes)
            for row in range(0, count, per_piece):
                size = nbytes * min(per_piece, count - row)
                place = offset + nbytes * row
                if place + size - start > most_chunk_bytes and len(pieces) > first:
                    chunks.append((start, end - start, first, len(pieces) - first, 0, 0))
                    start, first = place, len(pieces)
                end = place + size
                pieces.append((row, size, place - start, number, 0, GATHERED, number))
        chunks.append((start, end - start, first, len(pieces) - first, 0, 0))
        return np.array(pieces, PIECE), np.array(chunks, CHUNK)

    def raise_failure(self, sizes: tuple[int, ...], report: native.Report) -> None:
        """Raises what a gather of batches of so many rows has met with.

        Raises:
            LoadError: it names the file.
        """
        if report.cause == "none":
            return
        save = self.form.save.prefix
        if report.piece < 0:
            raise LoadError(f"Rows could not be gathered: {report.message}", save=save)
        number = int(self._gather(sizes).work.pieces[report.piece]["leaf"])
        leaf = self.form.leaves[number]
        packed = None if leaf.extent is None else leaf.extent.packed
        raise failed_piece(report, save, leaf.key, self.files[number][0], packed)
