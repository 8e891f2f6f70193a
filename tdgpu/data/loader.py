"""Batches that are already on the device: :class:`DeviceLoader`."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from tdgpu.data import arguments, schedule
from tdgpu.data.arguments import Sharding
from tdgpu.data.dataset import MemmapDataset
from tdgpu.data.fetch import DeviceFetcher, Fetcher, HostFetcher, ResidentFetcher
from tdgpu.data.form import BatchForm
from tdgpu.data.iterator import LoaderIterator, Progress
from tdgpu.data.orders import KeyedSampler
from tdgpu.data.samplers import Given, Samplers, of_rows
from tdgpu.data.source import Source
from tdgpu.data.stats import LoaderStats, Stopwatch
from tdgpu.errors import FormatError, InvalidArgument
from tdgpu.options import get as get_options
from tdgpu.transfer import streams

__all__ = ["DeviceLoader"]

STATE_VERSION = 1

# How long stats() waits for copies of a loop that is over.
LAST_COPIES_SECONDS = 1.0


class DeviceLoader:
    """Batches of a save's rows, on a device or on the CPU, for a training loop.

    The arguments are those of :class:`torch.utils.data.DataLoader`, in its order; ``docs/loading.md`` has the table of
    what each does here. Native threads take the place of worker processes: they gather every leaf of a batch straight
    into one piece of (pinned) memory, which one copy carries to the device while the program goes on. Batches are of
    the saved class; their tensors belong to who gets them, and are never written again.

    Args:
        dataset: a :class:`MemmapDataset`, a ``torch.utils.data.Subset`` of one (as ``random_split`` gives), or the path
            of a save.
        batch_size: rows of a batch. None: single rows, without the batch dimension; or whatever ``sampler`` gives lists
            of indices for.
        shuffle: True: another order in every epoch, uniform among all. It is DataLoader's for the same ``generator``;
            without one it follows from ``seed`` and the epoch. ``"permute"``: likewise, in O(1) memory, for saves of
            billions of rows; it can go on with another number of ranks.
        sampler: gives the index of each row.
        batch_sampler: gives the list of indices of each batch.
        num_workers: native threads that gather, up to 256; 0: as many as the option ``threads`` says.
        collate_fn: makes a batch of a list of rows, as in DataLoader. It is called for batches on the CPU, in the
            calling thread, and is slower than without.
        pin_memory: whether batches on the CPU are in pinned memory. What goes to a device is pinned in any case.
        drop_last: whether a last batch that is not full is left out.
        timeout: seconds to wait for a batch before BatchTimeout is raised; 0: as long as it takes.
        worker_init_fn, multiprocessing_context, pin_memory_device: refused, for there are no worker processes.
        generator: a ``torch.Generator`` that ``shuffle=True`` draws from.
        prefetch_factor: batches that are under way ahead of the one that is handed out, for each of ``num_workers``.
        persistent_workers: whether the threads stay until :meth:`close`; else they end with each iterator.
        in_order: batches always come in order.
        device: where batches go. None: they stay on the CPU.
        transform: called with each batch, on its device, in the calling thread; its result is handed out.
        seed: of ``shuffle`` and ``"permute"``; None: ``torch.initial_seed()`` as it is now, and 0 with several ranks,
            which must agree on it. No global generator is ever drawn from.
        resident: whether the whole save is kept on the device, and batches are gathered there. "auto": if it takes at
            most an eighth of the device's free memory.
        rank, world_size: this process's share of the rows, unless a sampler decides; None: as the running process group
            says.
        padding: how ranks get equally many rows if ``drop_last`` is not set. ``"repeat"``: some rows come twice, as
            with DistributedSampler. ``"mask"``: likewise, and each batch has an entry ``mask_key``, False for those.
        mask_key: the name of that entry; "mask" if none is given.

    Raises:
        InvalidArgument, InvalidArgumentType: arguments that contradict each other, or mean nothing here.
        NotSupported: the save has rows that do not lie one behind the other; it names the level.
        DeviceError: this machine does not have the device.
        TdgpuError: the save cannot be read: see :func:`tdgpu.load_memmap`.

    Iterating raises LoadError if a file cannot be read, BatchTimeout, DeviceError, and IndexError for what a sampler
    gives that is no row. They name the save.

    Example:
        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = TensorDict(x=torch.arange(10.0), y=torch.arange(10) % 2, batch_size=[10]).memmap(path)
        ...     loader = DeviceLoader(path, batch_size=4, shuffle=True, seed=0)
        ...     for epoch in range(2):
        ...         rows = torch.cat([batch["x"] for batch in loader])
        ...         print(len(loader), sorted(rows.tolist()) == list(range(10)))
        3 True
        3 True
    """

    def __init__(
        self,
        dataset: MemmapDataset | torch.utils.data.Subset[Any] | str | os.PathLike[str],
        batch_size: int | None = 1,
        shuffle: bool | str | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = True,
        pin_memory_device: str = "",
        in_order: bool = True,
        device: torch.device | str | int | None = None,
        transform: Callable[[Any], Any] | None = None,
        seed: int | None = None,
        resident: bool | str = "auto",
        rank: int | None = None,
        world_size: int | None = None,
        padding: str = "repeat",
        mask_key: str | None = None,
    ) -> None:
        arguments.refuse_processes(worker_init_fn, multiprocessing_context, pin_memory_device)
        arguments.check_callables(collate_fn=collate_fn, transform=transform)
        arguments.check_bools(pin_memory=pin_memory, persistent_workers=persistent_workers, in_order=in_order)
        arguments.check_batching(batch_size, shuffle, sampler, batch_sampler, drop_last, generator)
        arguments.check_samplers(sampler, batch_sampler, batch_size)
        self.batch_size = None if batch_sampler is not None else batch_size
        self.drop_last = drop_last
        self.sampler = sampler
        self.batch_sampler = batch_sampler
        self.generator = generator
        self._samplers = Samplers(sampler, batch_sampler, generator)
        self.collate_fn = collate_fn
        self.transform = transform
        self.num_workers = arguments.whole("num_workers", num_workers, 0, arguments.MOST_THREADS)
        self.prefetch_factor = arguments.whole("prefetch_factor", 2 if prefetch_factor is None else prefetch_factor, 1)
        self.persistent_workers = persistent_workers
        self.timeout = arguments.seconds("timeout", timeout)
        self.pin_memory = pin_memory
        self.device = arguments.place(device)
        self.resident = arguments.residence(resident, self.device, collate_fn)
        arguments.check_device(self.device)
        self._shuffle = shuffle or False
        self._source = Source(dataset)
        has_sampler = sampler is not None or batch_sampler is not None
        self._sharding = Sharding.checked(rank, world_size, padding, mask_key, has_sampler=has_sampler)
        if generator is not None and shuffle and self._sharding.world_size > 1:
            raise InvalidArgument(
                "With generator= every rank would draw an order of its own, and rows would be missing: say seed=, or"
                " give a DistributedSampler."
            )
        self._seed = arguments.seed(seed, self._sharding.world_size, generator)
        if self._sharding.mask_key is not None:
            self._source.check_mask(self._sharding.mask_key)
        self._fetcher: Fetcher | None = None
        self._fetcher_is_for: tuple[object, int] | None = None
        self._latest: Progress | None = None
        self._newest: weakref.ref[LoaderIterator] | None = None
        self._iterators: weakref.WeakSet[LoaderIterator] = weakref.WeakSet()
        self._next_epoch = 0
        self._resume_at = 0  # a position in the next epoch
        self._resume_given = 0  # the checksum of what a sampler gives before it
        self._given: Given | None = None
        self._watch = Stopwatch()

    @property
    def dataset(self) -> Any:
        """What was given."""
        return self._source.dataset

    # --- iterating ---

    def __iter__(self) -> LoaderIterator:
        """An iterator over the next epoch. Several may be alive, each with its own epoch."""
        arguments.refuse_fake_mode(self._source.prefix)
        epoch, position = self._next_epoch, self._resume_at
        begun = time.perf_counter()
        fetcher = self._take_fetcher()  # loads all of a resident save
        self._watch.waited(time.perf_counter() - begun)
        state = self._drawing_state()
        if self.generator is not None:
            schedule.draw_as_dataloader(self.generator)
        given = Given(position, self._resume_given, self._source.prefix) if self._is_listed() else None
        batches = self._batches(epoch, position, given)
        progress = Progress(epoch, self._source.length(), state, batches)
        if given is not None:
            given.progress = progress
        self._next_epoch, self._resume_at, self._resume_given = epoch + 1, 0, 0
        self._latest, self._given = progress, given
        iterator = LoaderIterator(self, fetcher, batches, progress)
        self._iterators.add(iterator)
        self._newest = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """Batches of an epoch, of this rank.

        Raises:
            TypeError: the sampler has no length.
        """
        length = self._batches(0, 0, None, draws=False).length
        if length is None:
            raise TypeError("The sampler has no length, so the loader has none.")
        return length

    def _batches(self, epoch: int, position: int, given: Given | None, *, draws: bool = True) -> schedule.Epoch:
        """The batches of an epoch from a position on. ``draws``: the generator and the sampler may be used."""
        if self._is_listed():
            return self._listed(position, given)
        if isinstance(self.sampler, KeyedSampler):
            # One of ours, which can be asked for any position.
            keyed, first = self.sampler.begin() if draws else (schedule.Sequential(0), 0)
            return schedule.Placed(
                lambda: keyed, len(self.sampler), self.batch_size, drop_last=self.drop_last, rank=0, world_size=1,
                position=max(position, first), is_checked=False,
            )  # fmt: skip
        rows, generator = self._source.length(), self.generator
        order: Callable[[], schedule.Order]
        at_end = None
        if self._shuffle == "permute":
            order = schedule.permutation(rows, self._seed, epoch)
        elif self._shuffle and generator is None:
            order = schedule.shuffled(rows, self._seed, epoch)
        elif self._shuffle and generator is not None and draws:
            order = drawn = schedule.Drawn(rows, generator)
            at_end = drawn.end
        else:
            order = lambda: schedule.Sequential(rows)  # noqa: E731
        return schedule.Placed(
            order, rows, self.batch_size, drop_last=self.drop_last, rank=self._sharding.rank,
            world_size=self._sharding.world_size, position=position, at_end=at_end,
        )  # fmt: skip

    def _listed(self, position: int, given: Given | None) -> schedule.Epoch:
        """Batches of what a sampler gives."""

        def checked(batches: Iterable[Any]) -> Iterator[Any]:
            return given.pass_on(batches) if given is not None else iter(batches)

        batch_sampler, size, drop_last = self.batch_sampler, self.batch_size, self.drop_last
        if batch_sampler is not None:
            return schedule.Listed(lambda: checked(batch_sampler), schedule.length_of(batch_sampler), position)
        sampler: Any = self.sampler
        length = schedule.length_of(sampler)
        if size is None:
            return schedule.Listed(lambda: checked(sampler), length, position, singles=True)
        if length is not None:
            length = length // size if drop_last else -(-length // size)
        return schedule.Listed(lambda: checked(of_rows(schedule.batched(sampler, size, drop_last))), length, position)

    def _take_fetcher(self) -> Fetcher:
        """What fetches batches of the save as it is seen now; made anew when that has changed, or after a fork."""
        wanted = (self._source.version(), os.getpid())
        fetcher = self._fetcher
        is_kept = self.persistent_workers or isinstance(fetcher, ResidentFetcher)
        if fetcher is None or self._fetcher_is_for != wanted or not is_kept:
            self._fetcher = fetcher = None  # first, for a save on the device is not to be there twice
            self._fetcher = fetcher = self._make_fetcher()
            self._fetcher_is_for = wanted
        return fetcher

    def _make_fetcher(self) -> Fetcher:
        settings = get_options()
        rows = self._source.open(settings.threads)
        if self.device is None or self.device.type == "cpu" or self.collate_fn is not None:
            depth = self.prefetch_factor * max(1, self.num_workers)
            return HostFetcher(
                rows, self.num_workers or settings.threads, pin=arguments.pins(self.pin_memory), depth=depth
            )
        device = (
            self.device
            if self.device.index is not None
            else torch.device(self.device.type, streams.current_index(self.device.type))
        )
        if self.resident is True or (self.resident == "auto" and _fits(rows.form, device)):
            return ResidentFetcher(rows, device)
        return DeviceFetcher(rows, device, self.num_workers)

    def _forget(self, fetcher: Fetcher) -> None:
        """A file could not be read: the next iterator opens it anew, in case it is whole again by then."""
        if self._fetcher is fetcher:
            self._fetcher = None

    def close(self) -> None:
        """Ends the threads and all iterators, and gives up what is under way. The loader can be used again.

        A loop that another thread is in ends where it is, as if there were no more batches.
        """
        for iterator in list(self._iterators):
            iterator.close()
        # In this order: an interrupt must not leave a fetcher that has ended.
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None and self._fetcher_is_for is not None and self._fetcher_is_for[1] == os.getpid():
            fetcher.close()

    def __enter__(self) -> DeviceLoader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Another process, or a copy, has threads and iterators of its own."""
        own = ("_fetcher", "_fetcher_is_for", "_iterators", "_newest", "_watch")
        return {**self.__dict__, **dict.fromkeys(own)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _iterators=weakref.WeakSet(), _watch=Stopwatch())

    # --- epochs and state ---

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iterator, which ``shuffle`` and the sampler depend on; by itself it counts on.

        A position that ``load_state_dict`` has set stays if it is in that epoch.
        """
        epoch = arguments.whole("epoch", epoch, 0)
        if epoch != self._next_epoch:
            self._next_epoch, self._resume_at, self._resume_given = epoch, 0, 0
        self._samplers.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the latest iterator is, by the batches that were handed out (not those under way).

        Within an epoch it is a position in it, also behind an early ``break``, an error or :meth:`close`; behind the
        last batch's StopIteration, the begin of the next epoch. It is as
        large as the state of ``generator``, if there is one, else a few numbers.
        """
        it = self._latest
        is_within = it is not None and not it.is_complete
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "epoch": it.epoch if it is not None and is_within else self._next_epoch,
            "position": it.position if it is not None and is_within else self._resume_at,
            "seed": self._seed,
            "order": self._order(),
            "rows": it.rows if it is not None and is_within else self._source.length(),
            "batch_size": self.batch_size,
            "world_size": self._world_size(),
        }
        if self._is_listed():
            state["given"] = self._given.checksum() if self._given is not None and is_within else self._resume_given
        return {**state, **(it.state if it is not None and is_within else self._drawing_state())}

    def _is_listed(self) -> bool:
        """Whether positions count batches that a sampler gives, not rows of an order that can be asked for any."""
        return self.batch_sampler is not None or not (self.sampler is None or isinstance(self.sampler, KeyedSampler))

    def _most_position(self) -> int:
        """The position at the end of an epoch, as far as it is known before."""
        if self._is_listed():
            return sys.maxsize
        return self._source.length() if self.sampler is None else schedule.length_of(self.sampler) or 0

    def _drawing_state(self) -> dict[str, Any]:
        """The state of the generator and the samplers now: that in which an epoch begins."""
        state = {} if self.generator is None else {"generator": self.generator.get_state()}
        return {**state, **self._samplers.state()}

    def _world_size(self) -> int:
        """Of how many ranks the positions of this loader are."""
        return self._samplers.world_size() or self._sharding.world_size

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iterator goes on behind the batches that had been handed out when ``state_dict`` was called.

        The numbers of batches under way and of threads may be others; with an order that this loader makes (not a
        sampler's) also the number of ranks, and then the batch size. A sampler goes on, too, if its order follows from
        its epoch, its ``generator``, or what its own ``state_dict`` tells at the begin of an epoch.

        Raises:
            FormatError: it is no state of a loader, or of one with another order or another number of rows.
        """
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise FormatError(
                f"This is no state of a DeviceLoader of version {STATE_VERSION}.", save=self._source.prefix
            )
        listed = self.sampler is not None or self.batch_sampler is not None
        same: dict[str, Any] = {"order": self._order()}
        if state.get("position"):
            same["rows"] = self._source.length()
        if listed:
            same.update(batch_size=self.batch_size, world_size=self._world_size())
        for name, here in same.items():
            if state.get(name) != here:
                raise FormatError(
                    f"The state is of a loader with {name} {state.get(name)!r}, and this one has {here!r}.",
                    save=self._source.prefix,
                )
        numbers: list[Any] = [state.get(name) for name in ("epoch", "position", "seed")]
        if not all(isinstance(number, int) for number in numbers) or min(numbers[:2]) < 0:
            raise FormatError(
                f"The state's epoch, position and seed are no numbers: {numbers!r:.200}.", save=self._source.prefix
            )
        most, checksum = self._most_position(), state.get("given", 0)
        if numbers[1] > most or not isinstance(checksum, int):
            raise FormatError(
                f"The state's position is {numbers[1]!r:.50}, and there are {most}.", save=self._source.prefix
            )
        self._samplers.check(state, self._source.prefix)
        self._samplers.load(state, self._source.prefix)
        if self.generator is not None and "generator" in state:
            self.generator.set_state(state["generator"])
        self._resume_given = checksum
        self._latest = self._given = None
        self._next_epoch, self._resume_at, self._seed = numbers

    def _order(self) -> str:
        if self.batch_sampler is not None:
            return "batch_sampler"
        if self.sampler is not None:
            return "sampler"
        if self._shuffle == "permute":
            return "permute"
        return ("generator" if self.generator is not None else "shuffle") if self._shuffle else "sequential"

    # --- what takes how long ---

    def stats(self) -> LoaderStats:
        """What all iterators of this loader have done, and where the time went.

        It does not wait while a loop runs. Right behind one it waits up to a second for the device's last copies.
        """
        newest = self._newest() if self._newest is not None else None
        is_running = newest is not None and not newest.is_over
        waiting = (iterator.waiting() for iterator in list(self._iterators))
        return self._watch.stats(waiting, 0 if is_running else LAST_COPIES_SECONDS)

    def __repr__(self) -> str:
        where = "the CPU" if self.device is None else self.device
        return f"DeviceLoader({self._source!r}, batch_size={self.batch_size}, {self._order()}, on {where})"


def _fits(form: BatchForm, device: torch.device) -> bool:
    """Whether a save takes at most an eighth of the device's free memory."""
    free = streams.free_memory(device)
    return free is not None and 8 * sum(form.row_nbytes) * form.rows <= free
