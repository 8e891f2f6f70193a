"""One pass through a loader's batches: how many are under way, who waits for whom, and how it ends."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from tdgpu.data.fetch import Fetch, Fetcher
from tdgpu.data.indexing import rows_at
from tdgpu.data.schedule import Batch, Epoch, Placed
from tdgpu.data.stats import Stopwatch
from tdgpu.errors import BatchTimeout, ForkError, LoadError, TdgpuError

if TYPE_CHECKING:
    from tdgpu.data.loader import DeviceLoader

__all__ = ["LoaderIterator", "Progress"]

# Batches that are fetched at a time, if they have fewer bytes together. Who keeps one keeps the memory of all of them.
TOGETHER = 16
TOGETHER_BYTES = 256 << 10


@dataclass
class Progress:
    """How far an iterator is, which the loader tells when the iterator itself is gone.

    Attributes:
        epoch: its number.
        position: where the next iterator would have to go on, by the batches that were handed out.
        rows: how many the epoch's order is of.
        state: of the loader's generator and samplers, as this epoch began.
        is_complete: whether StopIteration was raised behind the last batch.
    """

    epoch: int
    position: int
    rows: int
    state: dict[str, Any]
    is_complete: bool = False


class LoaderIterator(Iterator[Any]):
    """An iterator over the batches of one epoch. Threads may share it: each batch goes to one of them.

    Attributes:
        progress: how far it is.
        is_over: whether no more batches come: all were handed out, there was an error, or it was closed.
    """

    is_over = True  # until it is made

    def __init__(self, loader: DeviceLoader, fetcher: Fetcher, batches: Epoch, progress: Progress) -> None:
        self._loader = loader
        self._fetcher = fetcher
        self._batches = batches
        self._process = os.getpid()
        self._depth = loader.prefetch_factor * max(1, loader.num_workers)
        # Small batches are fetched several at a time: what each costs by itself would be more than its rows.
        self._under_way: collections.deque[tuple[Fetch, list[Batch]]] = collections.deque()
        # Of what has come, and from which.
        self._parts: collections.deque[tuple[Fetch, list[torch.Tensor], Batch]] = collections.deque()
        self._together = 1
        self._most_together = _most_together(fetcher.rows.form.row_total, batches)
        self._is_exhausted = False
        self._failure: Exception | None = None  # behind the batches that are under way
        self._handed_out = 0
        self._answered: float | None = None
        self._watch: Stopwatch = loader._watch
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that has the lock
        self._length = loader._source.length()
        self._mapping = loader._source.mapping()
        self.progress = progress
        self.is_over = False

    def __len__(self) -> int:
        """Batches that were not handed out yet."""
        if self._batches.length is None:
            raise TypeError("The sampler has no length, so the iterator has none.")
        return self._batches.length - self._handed_out

    def __next__(self) -> Any:
        if self._process != os.getpid():
            raise ForkError("This iterator is the parent process's: make one of the loader here.")
        if self._holder == threading.get_ident():
            raise TdgpuError("A batch was asked for while this thread was asking for one (in a signal handler?).")
        try:
            with self._lock:
                self._holder = threading.get_ident()
                try:
                    return self._asked()
                finally:
                    self._holder = None
        finally:
            if self.is_over:
                self._end()  # who closed it could not

    def _asked(self) -> Any:
        if self.is_over:
            raise StopIteration
        asked = time.perf_counter()
        if self._answered is not None:
            self._watch.worked(asked - self._answered)
        try:
            with self._range("tdgpu.DeviceLoader.next"):
                result, batch = self._next_for_any_mode()
            came = time.perf_counter()
            self._watch.waited(came - asked)
            finished = self._finished(result, batch)
            self._watch.worked(time.perf_counter() - came)  # collate_fn and transform are the program's
            self._handed_out += 1
            self._watch.handed_out(len(batch.rows), self._fetcher.rows.form.row_total)
            self.progress.position = self._batches.handed_out(self._handed_out)
            return finished
        except BatchTimeout:
            self._watch.waited(time.perf_counter() - asked)
            raise  # it may be asked for again
        except BaseException as error:
            if isinstance(error, LoadError):
                self._loader._forget(self._fetcher)
            self.close()
            raise
        finally:
            self._answered = time.perf_counter()

    def _next_for_any_mode(self) -> tuple[Any, Batch]:
        if not torch.is_inference_mode_enabled():
            return self._next()
        # Batches that are started now may be handed out in a training step.
        with torch.inference_mode(False):
            return self._next()

    def _next(self) -> tuple[Any, Batch]:
        if not self._parts:
            self._fill(1)
            self._take()
            # Before anything else is done with these, so that the threads have work meanwhile.
            self._fill(max(self._depth, self._together))
        try:
            fetch, tensors, batch = self._parts.popleft()
        except IndexError:  # closed meanwhile, by a signal handler or another thread
            raise StopIteration from None
        fetch.follow()
        return self._fetcher.rows.form.build(tensors, len(batch.rows), self._fetcher.says_device), batch

    def _take(self) -> None:
        """Waits for what was started first."""
        if not self._under_way:
            if self._failure is not None and not self.is_over:
                raise self._failure
            self.progress.is_complete = not self.is_over
            raise StopIteration
        fetch, batches = self._under_way[0]
        try:
            tensors = fetch.result(self._loader.timeout)
        except TdgpuError:
            if self.is_over:  # closed meanwhile: it was given up half read
                raise StopIteration from None
            raise
        if self.is_over:
            raise StopIteration
        self._under_way.popleft()
        self._watch.fetched(fetch)
        if len(batches) == 1:
            self._parts.append((fetch, tensors, batches[0]))
        else:
            sizes = [len(batch.rows) for batch in batches]
            # Of each leaf its rows of each batch. With .data, a change in place of one is none of the others'.
            cut = [[part.data for part in tensor.split(sizes)] for tensor in tensors]
            self._parts += [(fetch, [parts[i] for parts in cut], batch) for i, batch in enumerate(batches)]

    def _finished(self, result: Any, batch: Batch) -> Any:
        """What is handed out: with the mask, collated, transformed."""
        loader = self._loader
        mask_key = loader._sharding.mask_key
        if mask_key is not None:
            mask = torch.arange(len(batch.rows), device="cpu") < batch.real
            mask = mask.view(-1, *[1] * (result.batch_dims - 1)).expand(result.batch_size).contiguous()
            result.set(mask_key, mask.to(self._fetcher.device))
        if batch.is_single:
            result = result[0]
        if loader.collate_fn is not None:
            rows = result if batch.is_single else [result[i] for i in range(len(batch.rows))]
            result = loader.collate_fn(rows)
            if loader.device is not None:
                result = _moved(result, loader.device)
        if loader.transform is not None:
            with self._range("tdgpu.DeviceLoader.transform"):
                result = loader.transform(result)
        return result

    def _fill(self, wanted: int) -> None:
        """Starts batches until so many are under way, or there are no more."""
        under_way = sum(len(batches) for _, batches in self._under_way)
        while under_way < wanted and not self._is_exhausted and not self.is_over:
            together: list[Batch] = []
            try:
                while len(together) < self._together and (batch := next(self._batches, None)) is not None:
                    together.append(batch)
                self._is_exhausted = len(together) < self._together
                if together:
                    self._start(together)
            except Exception as error:
                # Raised when the batches before it are handed out, however many of them are under way.
                self._is_exhausted, self._failure = True, error
            under_way += len(together)
            self._together = min(2 * self._together, self._most_together)  # the first batch is not to wait for others

    def _start(self, together: list[Batch]) -> None:
        index: Any = together[0].rows if len(together) == 1 else np.concatenate([batch.rows for batch in together])
        if not all(batch.is_checked for batch in together):
            index = rows_at(index, self._length)
        if self._mapping is not None:
            index = self._mapping[index]
        # Whatever was refreshed since, this iterator has the rows that there were when it was made.
        rows = self._fetcher.rows.form.rows
        if len(index) and not (index.min() >= 0 and index.max() < rows):
            index = rows_at(index, rows)
        self._under_way.append((self._fetcher.start(index), together))

    @staticmethod
    def _range(name: str) -> contextlib.AbstractContextManager[Any]:
        """A range in a profile, if there is one (NVTX, too, under ``torch.autograd.profiler.emit_nvtx``)."""
        if torch.autograd._profiler_enabled():
            return torch.profiler.record_function(name)
        return contextlib.nullcontext()

    def close(self) -> None:
        """Gives up what is under way: no more batches come. May be called again, and by any thread."""
        if self._process != os.getpid() or (self.is_over and not self._under_way and not self._parts):
            return
        self.is_over = True
        for fetch, _ in reversed(self._under_way.copy()):
            fetch.cancel()
        self._end()

    def _end(self) -> None:
        """Lets go of everything, unless a thread is in the middle of ``next``, which does it then."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            while self._under_way:
                self._under_way[-1][0].cancel()
                self._under_way.pop()
            self._parts.clear()
            if not self._loader.persistent_workers:
                self._fetcher.close()
        finally:
            self._lock.release()

    def __del__(self) -> None:
        self.close()


def _most_together(row_nbytes: int, batches: Epoch) -> int:
    """How many batches are fetched at a time. Those that a sampler gives are not: it may go by what was learned."""
    if not isinstance(batches, Placed):
        return 1
    return max(1, min(TOGETHER, TOGETHER_BYTES // max(1, row_nbytes * batches.batch_size)))


def _moved(result: Any, device: torch.device) -> Any:
    """What a collate_fn has made, on the device: whatever it holds that can be there."""
    return tree_map(lambda item: item.to(device) if _can_move(item) else item, result, is_leaf=_can_move)


def _can_move(item: Any) -> bool:
    return hasattr(item, "to")
