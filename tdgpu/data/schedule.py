"""Which rows each batch of an epoch has, for one rank of several: in O(1) from any batch on."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import RandomSampler

from tdgpu.data import randomness
from tdgpu.data.orders import Permutation
from tdgpu.errors import InvalidArgumentType

__all__ = ["Epoch", "Listed", "Order", "Placed", "Run", "Sequential", "Shuffle", "Shuffled"]


class Order(Protocol):
    """Which row is at which position of an epoch."""

    def __len__(self) -> int: ...

    def take(self, first: int, count: int, stride: int = 1) -> np.ndarray:
        """The rows at the positions first, first + stride, ... (int64)."""


class Sequential:
    """Rows as they are saved."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def take(self, first: int, count: int, stride: int = 1) -> np.ndarray:
        return np.arange(first, first + count * stride, stride, dtype=np.int64)


class Shuffle:
    """A uniform order, made as far as it is asked for: eight bytes per row.

    Args:
        length: how many rows.
        seed, epoch: what it follows from.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self._rows = np.arange(length, dtype=np.int64)
        self._key = randomness.key_of("shuffle", seed, epoch)
        self._settled = 0

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, first: int, count: int, stride: int = 1) -> np.ndarray:
        end = first + (count - 1) * stride + 1
        if count and end > self._settled:
            randomness.shuffle(self._rows, self._key, self._settled, end)
            self._settled = end
        return self._rows[first : first + count * stride : stride].copy()


class Shuffled:
    """An order that is drawn as a whole: eight bytes per row."""

    def __init__(self, order: torch.Tensor) -> None:
        self._order = order.numpy()

    def __len__(self) -> int:
        return len(self._order)

    def take(self, first: int, count: int, stride: int = 1) -> np.ndarray:
        return np.ascontiguousarray(self._order[first : first + count * stride : stride])


class Run(NamedTuple):
    """Batches that follow each other.

    Attributes:
        rows: row numbers of all of them, int64; if they are not checked, what a sampler has given.
        sizes: how many each batch has.
        real: how many of the rows count; those behind are there only because other ranks have as many.
        is_single: whether it is a row, without the batch dimension.
        is_checked: whether all of these rows are known to be there.
    """

    rows: Any
    sizes: list[int]
    real: int
    is_single: bool = False
    is_checked: bool = False


class Epoch(ABC):
    """The batches of an epoch, from some batch on.

    Attributes:
        length: how many batches there are in all, or None where nobody can tell.
        batch_size: rows of each but the last, or None where nobody can tell.
    """

    length: int | None = None
    batch_size: int | None = None

    @abstractmethod
    def take(self, most: int) -> Run | None:
        """The next batches, up to so many; None behind the last one."""

    def end(self) -> None:  # noqa: B027 - most have nothing to do
        """A batch is asked for behind the last one, and all have been handed out."""

    @abstractmethod
    def handed_out(self, batches: int) -> int:
        """The position after so many batches of this epoch were handed out: what ``position=`` takes to go on there."""


class Placed(Epoch):
    """Batches by position: those of rank ``r`` are at the positions ``r``, ``r + world_size``, ... of the order.

    So a step of all ranks takes a run of positions, whatever their number: an epoch can go on with another number.

    Args:
        order: the order. Called at the first batch, since it may draw random numbers.
        total: how many positions it has.
        batch_size: rows of a batch, of each rank; None: single rows.
        drop_last: whether a last batch that is not full is left out; and with several ranks, rows that are too few for
            all of them.
        rank, world_size: which ranks' rows.
        position: positions of the order that were taken already, by all ranks together.
        at_end: what :meth:`end` calls.
        is_checked: whether all rows of the order are known to be there.
    """

    def __init__(
        self,
        order: Callable[[], Order],
        total: int,
        batch_size: int | None,
        *,
        drop_last: bool,
        rank: int,
        world_size: int,
        position: int,
        at_end: Callable[[], None] | None = None,
        is_checked: bool = True,
    ) -> None:
        self._make = order
        self._is_checked = is_checked
        self._at_end = at_end
        self._order: Order | None = None
        self._total = total
        self._is_single = batch_size is None
        self._batch_size = self.batch_size = batch_size = batch_size or 1
        self._rank = rank
        self._world_size = world_size
        self._start = min(position, total)
        left = total - self._start
        per_rank = left // world_size if drop_last else -(-left // world_size)
        self._per_rank = per_rank // batch_size * batch_size if drop_last else per_rank
        self._next = 0
        self.length = -(-self._per_rank // batch_size)

    def take(self, most: int) -> Run | None:
        if self._order is None:
            self._order = self._make()
        size = self._batch_size
        begin = self._next * size
        count = min(most * size, self._per_rank - begin)
        if count <= 0:
            return None
        whole, rest = divmod(count, size)
        sizes = [size] * whole + [rest] * bool(rest)
        self._next += len(sizes)
        first = self._start + self._rank + begin * self._world_size
        # Positions behind the end are padding: rows from the beginning of the order, as DistributedSampler takes them.
        real = min(count, max(0, -(-(self._total - first) // self._world_size)))
        index = self._order.take(first, real, self._world_size)
        if real < count:
            behind = (first + np.arange(real, count) * self._world_size) % self._total
            index = np.concatenate([index, *(self._order.take(int(position), 1) for position in behind)])
        return Run(index, sizes, real, self._is_single, self._is_checked)

    def end(self) -> None:
        if self._at_end is not None:
            self._at_end()

    def handed_out(self, batches: int) -> int:
        rows = min(batches * self._batch_size, self._per_rank)
        return min(self._start + rows * self._world_size, self._total)


class Listed(Epoch):
    """Batches that a sampler gives, or a batch sampler.

    Args:
        batches: gives the lists of indices, from the first on.
        length: how many there are, if that is known.
        skip: batches that were handed out already.
        singles: whether some may be no list, but an index: a row without the batch dimension.
    """

    def __init__(
        self, batches: Callable[[], Iterator[Any]], length: int | None, skip: int, *, singles: bool = False
    ) -> None:
        self._make = batches
        self._singles = singles
        self._batches: Iterator[Any] | None = None
        self.length = None if length is None else max(0, length - skip)
        self._skip = skip

    def take(self, most: int) -> Run | None:
        """One batch: the sampler may go by what was learned meanwhile."""
        if self._batches is None:
            self._batches = itertools.islice(self._make(), self._skip, None)
        try:
            given = next(self._batches)
        except StopIteration:
            return None
        is_single = _is_row(given)
        if is_single and not self._singles:
            raise InvalidArgumentType(f"A batch sampler gives lists of indices, not {given!r}.")
        rows = [given] if is_single else given if hasattr(given, "__len__") else list(given)
        return Run(rows, [len(rows)], len(rows), is_single)

    def handed_out(self, batches: int) -> int:
        return self._skip + batches


def _is_row(given: Any) -> bool:
    """Whether a sampler's item is one index, and not a list of them."""
    return given.ndim == 0 if isinstance(given, (torch.Tensor, np.ndarray)) else not isinstance(given, Iterable)


def batched(sampler: Iterable[Any], batch_size: int, drop_last: bool) -> Iterator[list[Any]]:
    """Lists of ``batch_size`` of the sampler's indices."""
    indices = iter(sampler)
    while batch := list(itertools.islice(indices, batch_size)):
        if len(batch) < batch_size and drop_last:
            return
        yield batch


class Drawn:
    """The order that ``DataLoader(shuffle=True, generator=generator)`` has, drawn when it draws it.

    Called at the first batch; :meth:`end` draws what it draws when it is asked for a batch behind the last one.
    """

    def __init__(self, length: int, generator: torch.Generator) -> None:
        self._length = length
        self._indices = iter(RandomSampler(range(length), generator=generator)) if length else iter(())

    def __call__(self) -> Order:
        order = np.fromiter(itertools.islice(self._indices, self._length), np.int64, self._length)
        return Shuffled(torch.from_numpy(order))

    def end(self) -> None:
        """The sampler is asked for one more index, which it does not have."""
        next(self._indices, None)


def draw_as_dataloader(generator: torch.Generator) -> None:
    """What a DataLoader draws when it is iterated: a seed for its workers, whether it has any or not."""
    torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)


def length_of(sampler: Any) -> int | None:
    """The length of a sampler, if it has one."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def permutation(length: int, seed: int, epoch: int) -> Callable[[], Order]:
    """The order of ``shuffle="permute"``."""
    return lambda: Permutation(length, seed, epoch)


def shuffled(length: int, seed: int, epoch: int) -> Callable[[], Order]:
    """The order of ``shuffle=True`` without a generator."""
    return lambda: Shuffle(length, seed, epoch)
