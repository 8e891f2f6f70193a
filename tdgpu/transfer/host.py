"""Reading extents into host memory on native threads: plain, or inflated and checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tdgpu.errors import LoadError, TdgpuError
from tdgpu.layout.mapped import nested_view
from tdgpu.layout.tree import Extent, Key, Leaf
from tdgpu.transfer import native, runs
from tdgpu.transfer.base import Flight, Transfer, failed_piece
from tdgpu.transfer.chunks import Chunker
from tdgpu.transfer.native import CHUNK, PIECE, Work
from tdgpu.transfer.runs import PIECE_RUN, Sources

RING_BYTES = 16 << 20  # of what is read part by part
PIECE_BYTES = 1 << 20  # of plain bytes: small enough that all threads share a leaf, and that Ctrl-C is heard


@dataclass(frozen=True)
class Want:
    """Some bytes of an extent.

    Attributes:
        extent: where they are.
        key: the leaf that they belong to, for messages.
        first: the first wanted byte of what the extent holds (inflated, if it is compressed).
        nbytes: how many.
        address: where they go in host memory, valid until the read is over; 0: they are checked and dropped.
    """

    extent: Extent
    key: Key
    first: int
    nbytes: int
    address: int


def read(
    save: str,
    wants: Sequence[Want],
    *,
    threads: int,
    verify: bool = False,
    tell: Callable[[int], None] | None = None,
) -> None:
    """Reads all of it, and returns when it is there.

    Entries, and blocks of entries that have a block index, are inflated side by side. Memory is bounded by a few
    blocks per thread. The size and the CRC-32 of everything that is inflated are checked.

    Args:
        save: the save's path, for messages.
        wants: what is wanted. What goes nowhere must be an archive's, and its stored entries are checked too.
        threads: native threads; 0 and 1 are one after the other.
        verify: whether the CRC-32 of an archive's stored entries is checked, too.
        tell: called now and then with the bytes that are done.

    Raises:
        ChecksumError: an entry does not inflate to the bytes that the archive promises.
        LoadError: a file cannot be read, or ended early.
        NotSupported: a library to inflate with is missing.
    """
    wants = [want for want in wants if want.nbytes or want.extent.packed is not None]
    if wants:
        flight = HostFlight(save, wants, threads, verify=verify)
        try:
            flight.begin()
            flight.synchronize(tell)
        finally:
            flight.close()


def stream(
    save: str, wants: Sequence[Want], *, threads: int, verify: bool, ring_bytes: int | None = None
) -> Generator[tuple[Want, int, memoryview], None, None]:
    """The wanted bytes part by part, through a ring of bounded size, while native threads fill the rest of it.

    Args:
        save, threads, verify: as of :func:`read`.
        wants: what is wanted; where it goes does not matter.
        ring_bytes: bytes of the ring; None for RING_BYTES.

    Yields:
        What a part belongs to, where it begins in that, and its bytes, which are valid until the next part is asked
        for. Parts may come in any order. A want without bytes is checked, and has no part. What is inflated is known to
        be right when all of its parts have come.

    Raises:
        ChecksumError, LoadError, NotSupported: as of :func:`read`.
    """
    read(save, [want for want in wants if not want.nbytes], threads=threads, verify=verify)
    wants = [want for want in wants if want.nbytes]
    ring_bytes = RING_BYTES if ring_bytes is None else ring_bytes
    ring = np.empty(ring_bytes, np.uint8)
    stage = native.Stage(ring.ctypes.data, ring_bytes, max(1, threads), ring)
    try:
        sources, chunker = Sources(), Chunker[Want](min(PIECE_BYTES, ring_bytes // 4), ring_bytes, stage.threads)
        for number, want in enumerate(wants):
            chunker.add(sources.cut(want.extent, want.first, want.nbytes, number, verify=verify), want, _ANYWHERE)
        pieces, chunks = chunker.finish()
        if not len(chunks):
            return
        work = Work(sources.files, pieces, chunks, sources.runs())
        under_way = native.StagedRead(stage)
        stage.post(work, under_way)
        for number, (want, first) in enumerate(chunker.targets):
            while (offset := under_way.wait_ready(number)) is None:
                pass
            _raise_failure(save, wants, work, under_way.report())
            yield want, first, ring[offset : offset + int(chunks["bytes"][number])].data
            under_way.set_copied(number)
    finally:
        stage.close()  # what is under way is not wanted any more


# A chunk that is taken from the ring needs no destination, but one of 0 would mean that nobody wants it.
_ANYWHERE = 1


def _raise_failure(save: str, wants: Sequence[Want], work: Work, report: native.Report) -> None:
    if report.cause == "none":
        return
    piece = work.pieces[report.piece]
    want = wants[int(piece["leaf"])]
    raise failed_piece(report, save, want.key, work.files[int(piece["file"])][0], want.extent.packed)


class HostFlight(Flight):
    """A read, under way once it has begun.

    Args:
        save, wants, threads, verify: as of :func:`read`.
        keep: whose memory is written to.
    """

    consequence = ""

    def __init__(self, save: str, wants: Sequence[Want], threads: int, *, verify: bool, keep: object = None) -> None:
        self._work = _work(wants, verify)
        names = [(want.key, want.extent.packed) for want in wants]
        super().__init__(save, names, sum(want.nbytes for want in wants), self._work, "inflated")
        self._read = native.Read()
        with self._named():
            self._readers = native.Readers(max(1, min(threads, len(self._work.pieces))), keep)

    def begin(self) -> None:
        """Starts it. Its threads are ended by :meth:`close`, or when this is dropped."""
        with self._named():
            self._read = self._readers.post(self._work)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except TdgpuError as error:
            error.save = self.save
            raise

    def wait(self, milliseconds: int = native.SLICE_MS) -> bool:
        if self._read.report().cause != "none":
            self._read.cancel()  # the first failure is enough
        return self._read.wait_filled(milliseconds)

    def wait_filled(self, milliseconds: int = native.SLICE_MS) -> bool:
        return self._read.wait_filled(milliseconds)

    def cancel(self) -> None:
        self._read.cancel()

    def failure(self) -> Exception | None:
        return self.error_of(self._read.report())

    @property
    def moved(self) -> int:
        return self._read.report().bytes_read

    def close(self) -> None:
        """Ends the threads, without what is not read yet. Nothing is written to any destination afterwards."""
        self._readers.close()


class HostTransfer(Transfer):
    """Leaves on their way into new CPU tensors.

    There is no stream on the CPU: who waits for the load is the host.
    """

    def __init__(self, flight: HostFlight, tensors: dict[Leaf, torch.Tensor]) -> None:
        super().__init__(torch.device("cpu"), flight, tensors, lambda flight: None)
        self.flight: HostFlight = flight

    def wait(self, leaf: Leaf | None = None) -> None:
        self.synchronize()

    def cancel(self) -> None:
        super().cancel()
        self.flight.close()

    def synchronize(self, tell: Callable[[int], None] | None = None) -> None:
        super().synchronize(tell)
        self.flight.close()


def start(save: str, leaves: Sequence[Leaf], *, threads: int, verify: bool = False) -> HostTransfer:
    """Starts reading leaves into new CPU tensors. Arguments as :func:`read`.

    Raises:
        LoadError: the memory for a leaf cannot be had.
        NotSupported: a library to inflate with is missing.
    """
    values: dict[Leaf, torch.Tensor] = {}
    wants = []
    for leaf in leaves:
        assert leaf.extent is not None
        shape = leaf.shape if leaf.nested_sizes is None else (leaf.nbytes // leaf.dtype.itemsize,)
        try:
            values[leaf] = torch.empty(shape, dtype=leaf.dtype, device="cpu")
        except (RuntimeError, MemoryError) as error:
            raise LoadError(
                f"There is no memory for a leaf of {leaf.nbytes} bytes: {error}", save=save, key=leaf.key,
                file=leaf.extent.file,
            ) from error  # fmt: skip
        wants.append(Want(leaf.extent, leaf.key, leaf.first, leaf.nbytes, values[leaf].data_ptr()))
    flight = HostFlight(save, wants, threads, verify=verify, keep=list(values.values()))
    tensors = {
        leaf: tensor if leaf.nested_sizes is None else nested_view(tensor, leaf.nested_sizes)
        for leaf, tensor in values.items()
    }
    transfer = HostTransfer(flight, tensors)
    flight.begin()
    return transfer


def _work(wants: Sequence[Want], verify: bool) -> Work:
    """One chunk per want; ``pieces["leaf"]`` is an index into `wants`."""
    sources = Sources()
    tables = []
    chunks = np.zeros(len(wants), CHUNK)
    count = 0
    for number, want in enumerate(wants):
        pieces = sources.cut(want.extent, want.first, want.nbytes, number, verify=verify or not want.address)
        if not pieces[0, PIECE_RUN]:
            pieces = runs.split(pieces, PIECE_BYTES)
        chunks[number] = (want.address, max(want.nbytes, 1), count, len(pieces), 0, 0)
        tables.append(pieces)
        count += len(pieces)
    return Work(sources.files, runs.structures(PIECE, runs.COLUMNS, tables), chunks, sources.runs())
