"""From leaves to chunks: where each leaf's bytes will lie on the device, and which copies carry them there.

    leaf of 1 MiB or more    a tensor of its own, cut in chunks
    smaller leaves           packed into segments: one chunk, one copy, one device allocation; the leaves are tensors
                             that share the segment's storage, each aligned to 256 bytes

A chunk is one copy through the ring. It consists of pieces, which the reader threads fill independently.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tdgpu.errors import DeviceError
from tdgpu.layout import collector
from tdgpu.layout.mapped import nested_view
from tdgpu.layout.tree import Leaf
from tdgpu.transfer.native import CHUNK, PIECE, Files

MiB = 1 << 20

OWN_STORAGE = MiB  # a leaf of this size keeps no others alive
ALIGNMENT = 256  # what CUDA's allocators guarantee, so that packed leaves are as usable as others
PIECE_BYTES = 256 << 10  # small enough that all readers share one chunk, large enough that a read call costs nothing
PAGE = 4096
CHUNKS_WANTED = 400  # two operations each: within the about 1,000 that a stream's queue holds
EVENTS_WANTED = 32  # how finely LoadFuture.wait(key) can tell leaves apart


@dataclass
class LoadPlan:
    """Everything that one transfer needs, destinations allocated.

    Attributes:
        files: paths and inodes.
        pieces, chunks: arrays of the native core's structures; ``chunks["destination"]`` holds device addresses.
        targets: per chunk, the storage and the byte offset in it that the copy writes to.
        leaves: the leaves, in the order of their pieces.
        piece_leaf: per piece, the index of its leaf.
        last_chunk: per leaf, the chunk that completes it.
        values: per leaf, its tensor on the device (the flat values of a nested one).
        events: how many events are recorded on the way.
        nbytes: bytes to read.
    """

    files: Files
    pieces: np.ndarray
    chunks: np.ndarray
    targets: list[tuple[torch.UntypedStorage, int]]
    leaves: list[Leaf]
    piece_leaf: np.ndarray
    last_chunk: list[int]
    values: list[torch.Tensor]
    events: int
    nbytes: int

    def leaf_of(self, piece: int) -> Leaf:
        """The leaf that a piece belongs to."""
        return self.leaves[int(self.piece_leaf[piece])]

    def tensors(self) -> dict[Leaf, torch.Tensor]:
        """The finished tensor of each leaf."""
        return {
            leaf: values if leaf.nested_sizes is None else nested_view(values, leaf.nested_sizes)
            for leaf, values in zip(self.leaves, self.values, strict=True)
        }


def chunk_size(nbytes: int, wanted: int, ring_bytes: int) -> int:
    """Bytes of one copy: what is wanted; more for a large load, so that its chunks fit a stream's queue; and never more
    than a quarter of the ring, so that some chunks can be filled while others are copied.

    >>> chunk_size(10 * MiB, MiB, 16 * MiB) // MiB, chunk_size(1 << 30, MiB, 16 * MiB) // MiB
    (1, 3)
    """
    fitting = -(-nbytes // CHUNKS_WANTED // MiB) * MiB if nbytes > CHUNKS_WANTED * MiB else 0
    size = min(max(wanted, fitting), ring_bytes // 4)
    # Whole pieces, or at least whole pages.
    unit = PIECE_BYTES if size >= PIECE_BYTES else PAGE
    return max(size // unit, 1) * unit


def make_plan(
    leaves: Sequence[Leaf], device: torch.device, *, chunk_bytes: int, ring_bytes: int, early: bool, direct: bool
) -> LoadPlan:
    """Allocates the destinations, on the current stream of `device`, and cuts the leaves into chunks.

    Args:
        leaves: leaves with elements. Their sizes have been checked.
        device: where to.
        chunk_bytes: bytes of a copy, before it is adapted to the load.
        ring_bytes: bytes of the staging ring.
        early: whether leaves will be waited for one by one.
        direct: whether large leaves are read past the page cache.

    Raises:
        DeviceError: a tensor of that dtype or size cannot be made on the device.
    """
    builder = _Builder(device, chunk_size(sum(leaf.nbytes for leaf in leaves), chunk_bytes, ring_bytes), direct)
    with collector.paused():
        for leaf in leaves:
            builder.add(leaf)
        return builder.finish(early)


_PIECES = ("file_offset", "bytes", "chunk_offset", "file", "direct")
_CHUNKS = ("destination", "bytes", "first_piece", "piece_count")


class _Builder:
    def __init__(self, device: torch.device, chunk_bytes: int, direct: bool) -> None:
        self.device = device
        self.chunk_bytes = chunk_bytes
        self.direct = direct
        self.files: Files = []
        self.leaves: list[Leaf] = []
        self.values: list[torch.Tensor] = []
        self.last_chunk: list[int] = []
        self.targets: list[tuple[torch.UntypedStorage, int]] = []
        # Rows of the arrays to come, a table per leaf or segment, with the columns of _PIECES and _CHUNKS.
        self.pieces: list[np.ndarray] = []
        self.chunks: list[np.ndarray] = []
        self.piece_count = 0
        self.chunk_count = 0
        # The segment being packed: leaves and their offsets.
        self.open: list[tuple[Leaf, int]] = []
        self.open_bytes = 0

    def add(self, leaf: Leaf) -> None:
        # A nested tensor addresses its buffer from the storage's start, so it cannot share one.
        if leaf.nbytes >= OWN_STORAGE or leaf.nbytes > self.chunk_bytes or leaf.is_nested:
            self._add_alone(leaf)
            return
        if self.open_bytes + leaf.nbytes > self.chunk_bytes:
            self._close_segment()
        self.open.append((leaf, self.open_bytes))
        self.open_bytes += -(-leaf.nbytes // ALIGNMENT) * ALIGNMENT

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype, leaf: Leaf, what: str) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except (RuntimeError, TypeError, AssertionError) as error:
            # torch.OutOfMemoryError stays what it is: programs catch it to make room and try again.
            if isinstance(error, torch.OutOfMemoryError):
                error.add_note(f"while loading {what} {'/'.join(leaf.key)!r}") if hasattr(error, "add_note") else None
                raise
            raise DeviceError(f"{what} cannot be made on {self.device}: {error}", key=leaf.key) from error

    def _add_alone(self, leaf: Leaf) -> None:
        assert leaf.extent is not None
        shape = leaf.shape if leaf.nested_sizes is None else (leaf.nbytes // leaf.dtype.itemsize,)
        values = self._empty(shape, leaf.dtype, leaf, "a leaf")
        size, chunk, piece = leaf.nbytes, self.chunk_bytes, min(self.chunk_bytes, PIECE_BYTES)
        starts = np.arange(0, size, piece, dtype=np.uint64)
        pieces = np.empty((len(starts), len(_PIECES)), np.uint64)
        pieces[:, 0] = starts + np.uint64(leaf.extent.offset)
        pieces[:, 1] = piece
        pieces[-1, 1] = size - int(starts[-1])
        pieces[:, 2] = starts % np.uint64(chunk)
        pieces[:, 3] = self._file(leaf)
        pieces[:, 4] = self.direct
        self._add_chunks(pieces, values.untyped_storage(), size, pieces_per_chunk=chunk // piece)
        self._placed(leaf, values)

    def _close_segment(self) -> None:
        if not self.open:
            return
        last, offset = self.open[-1]
        size = offset + last.nbytes
        segment = self._empty((size,), torch.uint8, last, "a segment of small leaves ending with")
        storage = segment.untyped_storage()
        rows = []
        for leaf, offset in self.open:
            assert leaf.extent is not None
            rows.append((leaf.extent.offset, leaf.nbytes, offset, self._file(leaf), 0))
        self._add_chunks(np.array(rows, np.uint64), storage, size, pieces_per_chunk=len(rows))
        for leaf, offset in self.open:
            # Not a view of the segment: views share a version counter, and an in-place update of one parameter would
            # make autograd refuse the others.
            values = torch.empty(0, dtype=leaf.dtype, device=self.device)
            values.set_(storage, offset // leaf.dtype.itemsize, leaf.shape, _contiguous_strides(leaf.shape))
            self._placed(leaf, values)
        self.open = []
        self.open_bytes = 0

    def _add_chunks(
        self, pieces: np.ndarray, storage: torch.UntypedStorage, size: int, *, pieces_per_chunk: int
    ) -> None:
        """Chunks that fill `storage` from its start, each with the next `pieces_per_chunk` pieces."""
        first = np.arange(0, len(pieces), pieces_per_chunk, dtype=np.uint64)
        starts = first // np.uint64(pieces_per_chunk) * np.uint64(self.chunk_bytes)
        chunks = np.empty((len(first), len(_CHUNKS)), np.uint64)
        chunks[:, 0] = starts + np.uint64(storage.data_ptr())
        chunks[:, 1] = self.chunk_bytes
        chunks[-1, 1] = size - int(starts[-1])
        chunks[:, 2] = first + np.uint64(self.piece_count)
        chunks[:, 3] = pieces_per_chunk
        chunks[-1, 3] = len(pieces) - int(first[-1])
        self.targets.extend((storage, start) for start in starts.tolist())
        self.pieces.append(pieces)
        self.chunks.append(chunks)
        self.piece_count += len(pieces)
        self.chunk_count += len(chunks)

    def _file(self, leaf: Leaf) -> int:
        assert leaf.extent is not None
        # Absolute, since the readers may come to it after the program has changed its directory.
        file = leaf.extent.file
        self.files.append((file if file[:1] == "/" else os.path.abspath(file), leaf.extent.inode))
        return len(self.files) - 1

    def _placed(self, leaf: Leaf, values: torch.Tensor) -> None:
        self.leaves.append(leaf)
        self.values.append(values)
        self.last_chunk.append(self.chunk_count - 1)

    def finish(self, early: bool) -> LoadPlan:
        self._close_segment()
        pieces, chunks = _structures(PIECE, _PIECES, self.pieces), _structures(CHUNK, _CHUNKS, self.chunks)
        # Files and leaves were numbered together, so a piece's file is its leaf.
        events = _spread_events(chunks) if early else 0
        return LoadPlan(
            self.files, pieces, chunks, self.targets, self.leaves, pieces["file"], self.last_chunk, self.values,
            events, int(pieces["bytes"].sum()),
        )  # fmt: skip


def _structures(dtype: np.dtype, names: Sequence[str], tables: list[np.ndarray]) -> np.ndarray:
    """Tables of columns as one array of structures; what is no column is zero."""
    rows = sum(len(table) for table in tables)
    found = np.zeros(rows, dtype)
    if rows:
        whole = np.concatenate(tables)
        for column, name in enumerate(names):
            found[name] = whole[:, column]
    return found


@functools.lru_cache(maxsize=1024)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _spread_events(chunks: np.ndarray) -> int:
    """Numbers EVENTS_WANTED chunks at most, evenly by bytes, the last of all excepted: the end has an event anyway."""
    share = -(-int(chunks["bytes"].sum()) // EVENTS_WANTED)
    events = since = 0
    for index, size in enumerate(chunks["bytes"][:-1].tolist()):
        since += size
        if since >= share:
            events += 1
            since = 0
            chunks["event"][index] = events
    return events
