"""From leaves to chunks: where each leaf's bytes will lie on the device, and which copies carry them there.

    leaf of 1 MiB or more    a tensor of its own, cut in chunks
    smaller leaves           packed into segments: one chunk, one copy, one device allocation; the leaves are tensors
                             that share the segment's storage, each aligned to 256 bytes

A chunk is one copy through the ring. It consists of pieces, which the reader threads fill independently; only the
pieces of one run (see :mod:`tdgpu.transfer.runs`) are one thread's, in order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tdgpu.errors import DeviceError
from tdgpu.layout import collector
from tdgpu.layout.mapped import nested_view
from tdgpu.layout.tree import Key, Leaf, Packed
from tdgpu.transfer.chunks import PAGE, PIECE_BYTES, Chunker
from tdgpu.transfer.native import Files, Work
from tdgpu.transfer.runs import AT, Sources

MiB = 1 << 20

OWN_STORAGE = MiB  # a leaf of this size keeps no others alive
ALIGNMENT = 256  # what CUDA's allocators guarantee, so that packed leaves are as usable as others
CHUNKS_WANTED = 400  # two operations each: within the about 1,000 that a stream's queue holds
EVENTS_WANTED = 32  # how finely LoadFuture.wait(key) can tell leaves apart


@dataclass
class LoadPlan:
    """Everything that one transfer needs, destinations allocated.

    Attributes:
        work: what the readers are to do.
        targets: per chunk, the storage and the byte offset in it that the copy writes to.
        leaves: the leaves, in the order of their pieces.
        last_chunk: per leaf, the chunk that completes it.
        values: per leaf, its tensor on the device (the flat values of a nested one).
        events: how many events are recorded on the way.
        nbytes: bytes of all leaves.
    """

    work: Work
    targets: list[tuple[torch.UntypedStorage, int]]
    leaves: list[Leaf]
    last_chunk: list[int]
    values: list[torch.Tensor]
    events: int
    nbytes: int

    @property
    def pieces(self) -> np.ndarray:
        """The core's pieces; ``pieces["leaf"]`` is an index into `leaves`."""
        return self.work.pieces

    @property
    def chunks(self) -> np.ndarray:
        """The core's chunks; ``chunks["destination"]`` holds device addresses."""
        return self.work.chunks

    @property
    def files(self) -> Files:
        """Paths and inodes."""
        return self.work.files

    def leaf_of(self, piece: int) -> Leaf:
        """The leaf that a piece belongs to."""
        return self.leaves[int(self.pieces["leaf"][piece])]

    def names(self) -> list[tuple[Key, Packed | None]]:
        """Of each leaf its key and what an archive says of it."""
        return [(leaf.key, None if leaf.extent is None else leaf.extent.packed) for leaf in self.leaves]

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
    leaves: Sequence[Leaf],
    device: torch.device,
    *,
    chunk_bytes: int,
    ring_bytes: int,
    threads: int,
    early: bool = False,
    direct: bool = False,
    verify: bool = False,
    most_threads: int = 0,
) -> LoadPlan:
    """Allocates the destinations, on the current stream of `device`, and cuts the leaves into chunks.

    Args:
        leaves: leaves with elements. Their sizes have been checked.
        device: where to.
        chunk_bytes: bytes of a copy, before it is adapted to the load.
        ring_bytes: bytes of the staging ring.
        threads: reader threads that there are.
        early: whether leaves will be waited for one by one.
        direct: whether large leaves are read past the page cache.
        verify: whether the CRC-32 of an archive's stored entries is checked, too.
        most_threads: how many of the readers may work on this load; 0 for all.

    Raises:
        DeviceError: a tensor of that dtype or size cannot be made on the device.
        NotSupported: a library to inflate the leaves with is missing.
    """
    lanes = min(threads, most_threads or threads)
    builder = _Builder(
        device,
        chunk_size(sum(leaf.nbytes for leaf in leaves), chunk_bytes, ring_bytes),
        ring_bytes,
        lanes,
        direct,
        verify,
    )
    with collector.paused():
        for leaf in leaves:
            builder.add(leaf)
        return builder.finish(early, most_threads)


class _Builder:
    def __init__(
        self, device: torch.device, chunk_bytes: int, ring_bytes: int, lanes: int, direct: bool, verify: bool
    ) -> None:
        self.device = device
        self.chunk_bytes = chunk_bytes
        self.verify = verify
        self.sources = Sources()
        self.chunker = Chunker[torch.UntypedStorage](chunk_bytes, ring_bytes, lanes, direct=direct)
        self.leaves: list[Leaf] = []
        self.values: list[torch.Tensor] = []
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

    def _cut(self, leaf: Leaf) -> np.ndarray:
        assert leaf.extent is not None
        return self.sources.cut(leaf.extent, leaf.first, leaf.nbytes, len(self.leaves), verify=self.verify)

    def _placed(self, leaf: Leaf, values: torch.Tensor) -> None:
        self.leaves.append(leaf)
        self.values.append(values)

    def _add_alone(self, leaf: Leaf) -> None:
        """A leaf with a storage of its own."""
        shape = leaf.shape if leaf.nested_sizes is None else (leaf.nbytes // leaf.dtype.itemsize,)
        values = self._empty(shape, leaf.dtype, leaf, "a leaf")
        storage = values.untyped_storage()
        self.chunker.add(self._cut(leaf), storage, storage.data_ptr())
        self._placed(leaf, values)

    def _close_segment(self) -> None:
        """The open leaves, which share a storage."""
        if not self.open:
            return
        last, offset = self.open[-1]
        segment = self._empty((offset + last.nbytes,), torch.uint8, last, "a segment of small leaves ending with")
        storage = segment.untyped_storage()
        tables = []
        for leaf, offset in self.open:
            pieces = self._cut(leaf)
            pieces[:, AT] += np.uint64(offset)
            tables.append(pieces)
            # Not a view of the segment: views share a version counter, and an in-place update of one parameter would
            # make autograd refuse the others.
            values = torch.empty(0, dtype=leaf.dtype, device=self.device)
            values.set_(storage, offset // leaf.dtype.itemsize, leaf.shape, _contiguous_strides(leaf.shape))
            self._placed(leaf, values)
        self.chunker.add_together(np.concatenate(tables), storage, storage.data_ptr())
        self.open = []
        self.open_bytes = 0

    def finish(self, early: bool, most_threads: int) -> LoadPlan:
        self._close_segment()
        pieces, chunks = self.chunker.finish()
        events = _spread_events(chunks) if early else 0
        last_chunk = np.zeros(len(self.leaves), np.int64)
        np.maximum.at(last_chunk, pieces["leaf"], np.repeat(np.arange(len(chunks)), chunks["piece_count"]))
        return LoadPlan(
            Work(self.sources.files, pieces, chunks, self.sources.runs(), most_threads),
            self.chunker.targets,
            self.leaves,
            last_chunk.tolist(),
            self.values,
            events,
            sum(leaf.nbytes for leaf in self.leaves),
        )


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
