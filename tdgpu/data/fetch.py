"""From indices to batches: gathered into host memory, into a device's ring and on to the device, or on the device."""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from tdgpu.data.memory import LARGE, BatchMemory
from tdgpu.data.rows import Rows
from tdgpu.errors import BatchTimeout
from tdgpu.transfer import native, registry, streams
from tdgpu.transfer.base import CopyTimes, Transfer
from tdgpu.transfer.gather import GatheredRead
from tdgpu.transfer.native import SLICE_MS
from tdgpu.transfer.plan import LoadPlan

__all__ = ["DeviceFetcher", "Fetch", "Fetcher", "HostFetcher", "ResidentFetcher"]

_CPU = torch.device("cpu")


Tensors = Sequence[torch.Tensor]  # of the leaves


class Fetch(abc.ABC):
    """Batches under way together.

    Attributes:
        sizes: how many rows each has.
        warm_seconds, cold_seconds: when it is finished, how long threads have gathered what was in memory, and what a
            disk was read for.
        copy_times: when it is finished, what tells how long the device takes to copy it; None where nothing does.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.warm_seconds = self.cold_seconds = 0.0
        self.copy_times: CopyTimes | None = None

    @abc.abstractmethod
    def is_read(self, milliseconds: int) -> bool:
        """Whether all of its bytes are read, waiting for up to `milliseconds`."""

    @abc.abstractmethod
    def finish(self) -> Iterable[Tensors]:
        """The tensors of each batch, once all is read. The device's current stream waits for their copy; the host does
        not.

        Raises:
            LoadError: it could not be read.
        """

    def follow(self) -> None:  # noqa: B027 - on the CPU there is no such order
        """Makes the device's current stream wait for the batch if it is another one than at :meth:`finish`."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Gives the batch up, and returns when nothing writes to its memory any more."""

    def result(self, timeout: float) -> Iterable[Tensors]:
        """The tensors of each batch, as soon as they are read.

        Args:
            timeout: seconds to wait; 0 for as long as it takes.

        Raises:
            BatchTimeout: it takes longer. It goes on.
            LoadError: it could not be read.
        """
        deadline = time.monotonic() + timeout if timeout else None
        while not self.is_read(SLICE_MS if deadline is None else _slice(deadline)):
            if deadline is not None and time.monotonic() >= deadline:
                raise BatchTimeout(f"A batch was not there within {timeout:g} s.")
        return self.finish()


def _slice(deadline: float) -> int:
    return max(0, min(SLICE_MS, int((deadline - time.monotonic()) * 1000) + 1))


class Fetcher(abc.ABC):
    """Starts batches.

    Attributes:
        rows: the save's rows.
        device: where the batches go.
        says_device: the device that a batch says it is on; None: as the save says.
        together_bytes: what batches may have together that are fetched at a time.
        has_streams: whether a batch is for one stream at a time (:meth:`Fetch.follow`).
    """

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self.rows = rows
        self.device = device
        self.has_streams = device != _CPU
        # To begin costs as much as this many bytes take to be gathered, or less; on the CPU the caches keep them.
        self.together_bytes = 4 << 20 if self.has_streams else 1 << 20
        self.says_device = device if self.has_streams else None

    @abc.abstractmethod
    def start(self, index: np.ndarray, sizes: tuple[int, ...]) -> Fetch:
        """Starts to fetch the rows of some batches.

        Args:
            index: int64, of one batch behind the other, each at least 0 and below ``rows.form.rows``. It is not changed
                meanwhile.
            sizes: how many rows each batch has: all but the last one as many.

        Raises:
            DeviceError, TransferError: the device refuses.
        """

    def close(self) -> None:  # noqa: B027 - some have nothing to end
        """Ends what is the fetcher's own. No batch is under way."""


# --- to the host ------------------------------------------------------------------------------------------------------


class HostFetcher(Fetcher):
    """Batches on the CPU, gathered by threads of their own.

    Each leaf of each batch has memory of its own: whoever hands one to another process, which moves its memory, moves
    that of nothing else.
    """

    def __init__(self, rows: Rows, threads: int, *, pin: bool, depth: int) -> None:
        super().__init__(rows, _CPU)
        # Memory that threads write to must outlive whoever drops the batch: as long as the threads, if need be.
        self._under_way: set[_HostFetch] = set()
        self._readers = native.Readers(threads, keep=self._under_way)
        self._pin = pin
        self._depth = depth
        self._memory = BatchMemory()

    def start(self, index: np.ndarray, sizes: tuple[int, ...]) -> Fetch:
        # Those under way, that of the program, and two lots of small ones more.
        self._memory.allow((self._depth + 1) * self.rows.form.row_total * sizes[0] + 3 * self.together_bytes)
        batches = [self._batch(size) for size in sizes]
        return _HostFetch(self.rows, self._readers, index, sizes, batches, self._under_way)

    def _batch(self, size: int) -> list[torch.Tensor]:
        form = self.rows.form
        tensors = []
        for leaf, nbytes, (_, shape, strides) in zip(
            form.leaves, form.row_nbytes, form.layout(size).views, strict=True
        ):
            if self._pin or nbytes * size < LARGE:
                tensor = torch.empty(shape, dtype=leaf.dtype, device=_CPU, pin_memory=self._pin)
            else:
                storage = self._memory.take(nbytes * size).untyped_storage()
                tensor = torch.empty(0, dtype=leaf.dtype, device=_CPU).set_(storage, 0, shape, strides)
            tensors.append(tensor)
        return tensors

    def close(self) -> None:
        self._readers.close()
        self._memory.close()


class _HostFetch(Fetch):
    def __init__(
        self,
        rows: Rows,
        readers: native.Readers,
        index: np.ndarray,
        sizes: tuple[int, ...],
        batches: list[list[torch.Tensor]],
        under_way: set[_HostFetch],
    ) -> None:
        super().__init__(sizes)
        self._rows = rows
        self._batches = batches
        self._under_way = under_way
        self._read: GatheredRead | None = None
        if rows.form.leaves and len(index):
            addresses = np.array([tensor.data_ptr() for batch in batches for tensor in batch], np.uint64)
            under_way.add(self)
            try:
                self._read = rows.post(readers, index, sizes, addresses)
            except Exception:
                under_way.discard(self)
                raise

    def is_read(self, milliseconds: int) -> bool:
        if self._read is None:
            return True
        if not self._read.is_over(milliseconds):
            return False
        self._under_way.discard(self)
        return True

    def finish(self) -> Iterable[Tensors]:
        outcome = None if self._read is None else self._read.outcome
        if outcome is not None:
            if outcome.cause:
                assert self._read is not None
                self._rows.raise_failure(self.sizes, self._read.report())
            self.warm_seconds, self.cold_seconds = outcome.warm_ns * 1e-9, outcome.cold_ns * 1e-9
        return self._batches

    def cancel(self) -> None:
        if self._read is not None:
            self._read.cancel()
            while not self.is_read(SLICE_MS):
                pass


# --- to a device ------------------------------------------------------------------------------------------------------


class DeviceFetcher(Fetcher):
    """Batches on an accelerator: gathered into the slots of its ring, and copied on its copy stream."""

    def __init__(self, rows: Rows, device: torch.device, most_threads: int) -> None:
        super().__init__(rows, device)
        self._most_threads = most_threads
        self._most_chunk_bytes = registry.most_chunk_bytes(device)

    def start(self, index: np.ndarray, sizes: tuple[int, ...]) -> Fetch:
        return _DeviceFetch(self.rows, self.device, index, sizes, self._most_chunk_bytes, self._most_threads)


def _split(tensors: list[torch.Tensor], sizes: tuple[int, ...]) -> Iterable[Tensors]:
    """Of tensors of the leaves, the rows of each batch."""
    if len(sizes) == 1:
        return (tensors,)
    if not tensors:
        return ((),) * len(sizes)
    # The unsafe split is the one whose parts know nothing of each other: a change in place of one is not seen by
    # autograd as a change of the others.
    return zip(*(tensor.unsafe_split(sizes[0]) for tensor in tensors), strict=True)


class _DeviceFetch(Fetch):
    def __init__(
        self,
        rows: Rows,
        device: torch.device,
        index: np.ndarray,
        sizes: tuple[int, ...],
        most_chunk_bytes: int,
        most_threads: int,
    ) -> None:
        super().__init__(sizes)
        self._device = device
        self._tensors: list[torch.Tensor] = []
        self._transfer: Transfer | None = None

        def plan() -> LoadPlan:
            memory, self._tensors = rows.form.empty(len(index), device)
            work = rows.work(index, memory.data_ptr(), most_chunk_bytes, most_threads)
            storage, first = memory.untyped_storage(), memory.data_ptr()
            targets = [(storage, int(address) - first) for address in work.chunks["destination"]]
            last = len(targets) - 1
            leaves = rows.form.leaves
            nbytes = sum(rows.form.row_nbytes) * len(index)
            # It empties its list when it is given up, and another thread may be about to build this batch then.
            return LoadPlan(work, targets, leaves, [last] * len(leaves), list(self._tensors), 0, nbytes)

        if not len(index):
            _, self._tensors = rows.form.empty(0, device)
        elif rows.form.leaves:
            self._transfer = registry.start_plan(rows.form.save.prefix, plan, device)

    def is_read(self, milliseconds: int) -> bool:
        return self._transfer is None or self._transfer.flight.wait_filled(milliseconds)

    def finish(self) -> Iterable[Tensors]:
        if self._transfer is not None:
            seconds = self._transfer.flight.gathered()
            if seconds is None:
                self._transfer.flight.raise_failure()
            else:
                self.warm_seconds, self.cold_seconds = seconds
            self.copy_times = self._transfer.flight.copy_times
            self._stream = streams.current_stream(self._device)
            self._transfer.wait()
        return _split(self._tensors, self.sizes)

    def follow(self) -> None:
        if self._transfer is not None and self._stream != streams.current_stream(self._device):
            self._transfer.wait()

    def cancel(self) -> None:
        if self._transfer is not None:
            # The transfer keeps the memory until its copies are over.
            self._transfer.cancel()


# --- on a device ------------------------------------------------------------------------------------------------------


class ResidentFetcher(Fetcher):
    """Batches of a save that is on the device, all of it: gathered there."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        super().__init__(rows, device)
        form = rows.form
        self._leaves: list[torch.Tensor] = []
        self._stream = streams.current_stream(device)
        if form.rows and form.leaves:
            transfer = registry.start(form.save.prefix, form.leaves, device, early=False)
            transfer.synchronize()
            transfer.wait()
            self._leaves = [transfer.tensor(leaf) for leaf in form.leaves]

    def start(self, index: np.ndarray, sizes: tuple[int, ...]) -> Fetch:
        return _ResidentFetch(self, index, sizes)

    def gather(self, index: np.ndarray) -> list[torch.Tensor]:
        """The tensors of a batch, queued on the current stream."""
        form = self.rows.form
        _, tensors = form.empty(len(index), self.device)
        where = torch.from_numpy(index).to(self.device)
        current = streams.current_stream(self.device)
        if len(index):
            for whole, tensor in zip(self._leaves, tensors, strict=True):
                torch.index_select(_as_words(whole), 0, where, out=_as_words(tensor))
                if current != self._stream:
                    # The allocator must not give its memory away before, should it be dropped meanwhile.
                    whole.record_stream(current)
        return tensors


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of rows, as the widest integers that they are: torch does not select rows of every dtype."""
    flat = rows.view(len(rows), -1).view(torch.uint8)
    widths = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return flat.view(next(width for width in widths if flat.shape[1] % width.itemsize == 0))


class _ResidentFetch(Fetch):
    def __init__(self, fetcher: ResidentFetcher, index: np.ndarray, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes)
        self._fetcher = fetcher
        self._index = index

    def is_read(self, milliseconds: int) -> bool:
        return True

    def finish(self) -> Iterable[Tensors]:
        self._tensors = self._fetcher.gather(self._index)
        self._stream = streams.current_stream(self._fetcher.device)
        self._gathered = torch.Event(self._fetcher.device)
        self._gathered.record(self._stream)
        return _split(self._tensors, self.sizes)

    def follow(self) -> None:
        current = streams.current_stream(self._fetcher.device)
        if self._stream != current:
            current.wait_event(self._gathered)
            for tensor in self._tensors:
                tensor.record_stream(current)

    def cancel(self) -> None:
        pass
