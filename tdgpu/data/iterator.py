"""One pass through a loader's batches: how many are under way, who waits for whom, and how it ends."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from tdgpu.data.arguments import refuse_fake_mode
from tdgpu.data.fetch import Fetch, Fetcher, Tensors
from tdgpu.data.indexing import rows_at
from tdgpu.data.schedule import Epoch, Run
from tdgpu.data.stats import Stopwatch
from tdgpu.errors import BatchTimeout, ForkError, LoadError, TdgpuError
from tdgpu.signals import finalizer

if TYPE_CHECKING:
    from tdgpu.data.loader import DeviceLoader

__all__ = ["LoaderIterator", "Progress"]

# Batches that are fetched at a time, at most. Who keeps one keeps the memory of them all.
TOGETHER = 64


class _Built(NamedTuple):
    """A batch that waits to be finished and handed out.

    Attributes:
        batch: with its first batch dimension.
        fetch: what has fetched it.
        size: how many rows it has.
        real: how many of them count (it may be more).
        is_single: whether its row is handed out without the batch dimension.
    """

    batch: Any
    fetch: Fetch
    size: int
    real: int
    is_single: bool


class Progress:
    """How far an iterator is, which the loader tells when the iterator itself is gone.

    Attributes:
        epoch: its number.
        rows: how many the epoch's order is of.
        state: of the loader's generator and samplers, as this epoch began.
        is_complete: whether StopIteration was raised behind the last batch.
        built: batches that were ever built.
        waiting: those of them that are still to be handed out, or finished and handed out.
        held_back: batches in neither, which will not be handed out, or not yet.
    """

    def __init__(self, epoch: int, rows: int, state: dict[str, Any], batches: Epoch) -> None:
        self.epoch = epoch
        self.rows = rows
        self.state = state
        self.is_complete = False
        self.built = self.held_back = 0
        self.waiting: collections.deque[Any] = collections.deque()
        self._batches: Epoch | None = batches
        self._end = 0

    @property
    def handed_out(self) -> int:
        """Batches that the program has got."""
        return self.built - len(self.waiting) - self.held_back

    @property
    def position(self) -> int:
        """Where the next iterator would have to go on."""
        batches = self._batches
        return self._end if batches is None else batches.handed_out(self.handed_out)

    def settle(self) -> None:
        """Nothing more is handed out: the order is not needed any more, which may be large."""
        self._end, self._batches = self.position, None

    def __getstate__(self) -> dict[str, Any]:
        """Another process has no iterator that it could follow."""
        return {**self.__dict__, "_end": self.position, "_batches": None, "waiting": ()}


class LoaderIterator(Iterator[Any]):
    """An iterator over the batches of one epoch. Threads may share it: each batch goes to one of them.

    Attributes:
        progress: how far it is.
        is_over: whether no more batches come: all were handed out, there was an error, or it was closed.
    """

    is_over, _is_plain = True, False  # until it is made

    def __init__(self, loader: DeviceLoader, fetcher: Fetcher, batches: Epoch, progress: Progress) -> None:
        self._loader = loader
        self._fetcher = fetcher
        self._batches = batches
        self._process = os.getpid()
        self._depth = loader.prefetch_factor * max(1, loader.num_workers)
        # Small batches are fetched several at a time: what each costs by itself would be more than its rows.
        self._under_way: collections.deque[tuple[Fetch, Run]] = collections.deque()
        self._waiting = progress.waiting
        self._together = 1
        self._most_together = _most_together(fetcher, batches.batch_size)
        # Whether batches are handed out as they are built, whatever the current stream: then it needs no lock.
        self._hands_out_at_once = not (
            fetcher.has_streams
            or loader.collate_fn is not None
            or loader.transform is not None
            or loader._sharding.mask_key is not None
            or (loader.batch_size is None and loader.batch_sampler is None)
        )
        self._is_exhausted = False
        self._failure: Exception | None = None  # behind the batches that are under way
        self._answered: float | None = None
        self._watch: Stopwatch = loader._watch
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that has the lock
        self._length = loader._source.length()
        self._mapping = loader._source.mapping()
        self.progress = progress
        self._is_plain = self._hands_out_at_once  # and neither closed nor another process's
        self.is_over = False
        _iterators.add(self)

    def __len__(self) -> int:
        """Batches that were not handed out yet."""
        if self._batches.length is None:
            raise TypeError("The sampler has no length, so the iterator has none.")
        return self._batches.length - self.progress.handed_out

    def __next__(self) -> Any:
        # Nearly all batches of a loop over small ones come this way, which is why it does no more than this.
        if self._is_plain:
            try:
                return self._waiting.popleft()
            except IndexError:
                pass
        if self._process != os.getpid():
            raise ForkError("This iterator is the parent process's: make one of the loader here.")
        if self._holder == threading.get_ident():
            raise TdgpuError("A batch was asked for while this thread was asking for one (in a signal handler?).")
        ident = threading.get_ident()
        try:
            with self._lock:
                self._holder = ident
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
        if not self._waiting:
            refuse_fake_mode(self._loader._source.prefix)
        asked = time.perf_counter()
        if self._answered is not None:
            self._watch.worked(asked - self._answered)
        part = None
        try:
            with self._range("tdgpu.DeviceLoader.next"):
                part = self._next()
            came = self._answered = time.perf_counter()
            self._watch.waited(came - asked)
            if not isinstance(part, _Built):
                return part
            try:
                part.fetch.follow()
                finished = self._finished(part)
            except BaseException:
                self._watch.taken_back(part.size, self._fetcher.rows.form.row_total)
                raise
            self._watch.worked(time.perf_counter() - came)  # collate_fn and transform are the program's
            self._answered = time.perf_counter()
            self.progress.held_back -= 1
            return finished
        except BaseException as error:
            if isinstance(error, BatchTimeout) and part is None:
                self._answered = time.perf_counter()
                self._watch.waited(self._answered - asked)
                raise  # it may be asked for again
            if isinstance(error, LoadError):
                self._loader._forget(self._fetcher)
            self.close()
            raise

    def _next(self) -> Any:
        while True:
            # Of one that is to be finished first, nobody is to read that it was handed out, at whatever moment.
            self.progress.held_back += not self._hands_out_at_once
            try:
                return self._waiting.popleft()
            except IndexError:  # at last, or other threads took what was built
                self.progress.held_back -= not self._hands_out_at_once
                if self.is_over:  # closed meanwhile, by a signal handler or another thread
                    raise StopIteration from None
            if torch.is_inference_mode_enabled():
                # Batches that are started now may be handed out in a training step.
                with torch.inference_mode(False):
                    self._more()
            else:
                self._more()

    def _more(self) -> None:
        """Waits for what was started first, and builds its batches."""
        self._fill(1)
        if not self._under_way:
            if self._failure is not None and not self.is_over:
                raise self._failure
            if not self.is_over:
                self._batches.end()
                self.progress.is_complete = True
            raise StopIteration
        fetch, run = self._under_way[0]
        try:
            parts = fetch.result(self._loader.timeout)
        except TdgpuError:
            if self.is_over:  # closed meanwhile: it was given up half read
                raise StopIteration from None
            raise
        if self.is_over:
            raise StopIteration
        self._under_way.popleft()
        self._watch.fetched(fetch)
        # Before anything else is done with these, so that the threads have work meanwhile. Of batches that are fetched
        # together, two lots are to be under way while one is handed out: then the threads never run out of them.
        self._fill(self._depth if self._together == 1 else max(self._depth, 2 * self._together))
        self._build(fetch, run, parts)

    def _build(self, fetch: Fetch, run: Run, parts: Iterable[Tensors]) -> None:
        form, device = self._fetcher.rows.form, self._fetcher.says_device
        batches = len(run.sizes)
        is_plain, built, begin = self._hands_out_at_once, list[Any](), 0
        for size, part in zip(run.sizes, parts, strict=True):
            batch = form.build(part, size, device)
            built.append(batch if is_plain else _Built(batch, fetch, size, run.real - begin, run.is_single))
            begin += size
        self._watch.built(batches, begin, form.row_total)
        self.progress.held_back += batches
        self.progress.built += batches
        self._waiting += built
        self.progress.held_back -= batches

    def _finished(self, part: _Built) -> Any:
        """What is handed out: with the mask, collated, transformed."""
        loader, result = self._loader, part.batch
        mask_key = loader._sharding.mask_key
        if mask_key is not None:
            mask = torch.arange(part.size, device="cpu") < part.real
            mask = mask.view(-1, *[1] * (result.batch_dims - 1)).expand(result.batch_size).contiguous()
            result.set(mask_key, mask.to(self._fetcher.device))
        if part.is_single:
            result = result[0]
        if loader.collate_fn is not None:
            rows = result if part.is_single else [result[i] for i in range(part.size)]
            result = loader.collate_fn(rows)
            if loader.device is not None:
                result = _moved(result, loader.device)
        if loader.transform is not None:
            with self._range("tdgpu.DeviceLoader.transform"):
                result = loader.transform(result)
        return result

    def _fill(self, wanted: int) -> None:
        """Starts batches until so many are under way, or there are no more."""
        under_way = sum(len(run.sizes) for _, run in self._under_way)
        while under_way < wanted and not self._is_exhausted and not self.is_over:
            try:
                run = self._batches.take(self._together)
                if run is None:
                    self._is_exhausted = True
                    return
                self._start(run)
                under_way += len(run.sizes)
            except Exception as error:
                if isinstance(error, TdgpuError) and error.save is None:  # as of a sampler's index
                    error.save = self._loader._source.prefix
                # Raised when the batches before it are handed out, however many of them are under way.
                self._is_exhausted, self._failure = True, error
            self._together = min(4 * self._together, self._most_together)  # the first batch is not to wait for others

    def _start(self, run: Run) -> None:
        rows = self._fetcher.rows.form.rows
        index = run.rows if run.is_checked else rows_at(run.rows, self._length)
        if self._mapping is not None:
            index = self._mapping[index]
        # Whatever was refreshed since, this iterator has the rows that there were when it was made.
        if self._mapping is not None or self._length != rows:
            index = rows_at(index, rows)
        self._under_way.append((self._fetcher.start(index, tuple(run.sizes)), run))

    @staticmethod
    def _range(name: str) -> contextlib.AbstractContextManager[Any]:
        """A range in a profile, if there is one (NVTX, too, under ``torch.autograd.profiler.emit_nvtx``)."""
        if torch.autograd._profiler_enabled():
            return torch.profiler.record_function(name)
        return contextlib.nullcontext()

    def close(self) -> None:
        """Gives up what is under way: no more batches come. May be called again, and by any thread."""
        if self._process != os.getpid() or (self.is_over and not self._under_way and not self._waiting):
            return
        self.is_over, self._is_plain = True, False
        for fetch, _ in reversed(self._under_way.copy()):
            fetch.cancel()
        self._end()

    def _end(self) -> None:
        """Lets go of everything, unless a thread is in the middle of ``next``, which does it then."""
        ident = threading.get_ident()
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._holder = ident
            while self._under_way:
                self._under_way[-1][0].cancel()
                self._under_way.pop()
            self._drop()
            self.progress.settle()
            if not self._loader.persistent_workers:
                self._fetcher.close()
        finally:
            self._holder = None
            self._lock.release()

    def _drop(self) -> None:
        """Lets go of batches that wait to be handed out. Others may take some meanwhile, or ask how far it is."""
        while True:
            self.progress.held_back += 1
            try:
                part = self._waiting.popleft()
            except IndexError:
                self.progress.held_back -= 1
                return
            self._watch.taken_back(_size(part), self._fetcher.rows.form.row_total)

    def waiting(self) -> tuple[list[int], int]:
        """How many rows each batch has that waits to be handed out, and how many bytes a row has."""
        return [_size(part) for part in self._waiting.copy()], self._fetcher.rows.form.row_total

    @finalizer
    def __del__(self) -> None:
        self.close()


# Those of this process, for a child that is forked.
_iterators: weakref.WeakSet[LoaderIterator] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for iterator in list(_iterators):
        iterator._is_plain = False


os.register_at_fork(after_in_child=_after_fork_in_child)


def _size(part: Any) -> int:
    """The rows of a batch that waits to be handed out."""
    return part.size if isinstance(part, _Built) else int(part.batch_size[0])


def _most_together(fetcher: Fetcher, batch_size: int | None) -> int:
    """How many batches are fetched at a time. Not those of a sampler: it may go by what was learned meanwhile."""
    if batch_size is None:
        return 1
    return max(1, min(TOGETHER, fetcher.together_bytes // max(1, fetcher.rows.form.row_total * batch_size)))


def _moved(result: Any, device: torch.device) -> Any:
    """What a collate_fn has made, on the device: whatever it holds that can be there."""
    return tree_map(lambda item: item.to(device) if _can_move(item) else item, result, is_leaf=_can_move)


def _can_move(item: Any) -> bool:
    return hasattr(item, "to")
