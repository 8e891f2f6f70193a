"""Orders in which rows are taken: a shuffle in O(1) memory, and draws by weight for any number of rows.

An order is a function of a seed, an epoch and a position. So it is the same on every machine and whatever else draws
random numbers, it can be entered at any position without a walk to it, and any number of processes can each take their
positions of it. No global generator is touched, torch's, numpy's or Python's.

Seeds and epochs are Python integers of any size and sign. Their hash (128 bits of BLAKE2b) is the key of the order, so
orders of neighbouring seeds or epochs have nothing in common.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from tdgpu.data import randomness
from tdgpu.errors import InvalidArgument, InvalidArgumentType

__all__ = ["Permutation", "PermutationSampler", "WeightedSampler"]

# Rows that an iteration asks for at a time. A short permutation is shuffled anew for every call.
_BLOCK = 4096

_MOST = 2**63 - 1


class Permutation:
    """The rows 0, ..., n - 1 in a random order, without a list of them: each is computed when it is asked for.

    Up to 4096 rows it is a shuffle, in which all n! orders are as likely as each other; beyond, a keyed network
    (``csrc/permutation.h`` says which, and what was tested). Integer arithmetic only.

    Args:
        n: how many rows, from 0 to 2**63 - 1.
        seed: any integer.
        epoch: any integer; every epoch has an order of its own.

    Raises:
        InvalidArgument: n is out of range.
        InvalidArgumentType: an argument is no integer.

    >>> order = Permutation(10, seed=0)
    >>> order.take(0, 10)
    array([5, 1, 2, 9, 6, 4, 7, 3, 8, 0])
    >>> order[0], order[-1], len(order)
    (5, 0, 10)
    >>> Permutation(10**18, seed=0, epoch=1).take(10**17, 2, stride=50).tolist()
    [51932219522551633, 888293090131136763]
    """

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        self.seed, self.epoch = _integer(seed, "seed"), _integer(epoch, "epoch")
        self._n = _checked_length(_integer(n, "n"))
        self._key = randomness.key_of("permutation", self.seed, self.epoch)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, position: int) -> int:
        """The row at a position; negative ones count from the end. Raises IndexError beyond the ends."""
        index = operator.index(position)
        if not -self._n <= index < self._n:
            raise IndexError(f"position {index} of a permutation of {self._n} rows")
        return int(self.take(index % self._n, 1)[0])

    def __iter__(self) -> Iterator[int]:
        for position in range(0, self._n, _BLOCK):
            yield from self.take(position, min(_BLOCK, self._n - position)).tolist()

    def take(self, first: int, count: int, stride: int = 1) -> np.ndarray:
        """The rows at the positions first, first + stride, ....

        A call costs 10 to 30 ns a row; up to 4096 rows it shuffles all of them first, which takes some 40 us at most.

        Args:
            first: the first position.
            count: how many.
            stride: from one position to the next, at least 1. Of ``world_size`` processes, each takes
                ``take(rank, ..., stride=world_size)``.

        Returns:
            int64, [count].

        Raises:
            InvalidArgument: a position is not in [0, n).
        """
        randomness.check_positions(first, count, stride, self._n)
        return randomness.permuted(self._n, self._key, first, count, stride)

    def __repr__(self) -> str:
        return f"Permutation({self._n}, seed={self.seed}, epoch={self.epoch})"


class _Draws:
    """Independent draws from an alias table."""

    def __init__(self, table: np.ndarray, count: int, key: np.ndarray) -> None:
        self._table, self._count, self._key = table, count, key

    def __len__(self) -> int:
        return self._count

    def take(self, first: int, count: int, stride: int = 1) -> np.ndarray:
        randomness.check_positions(first, count, stride, self._count)
        return randomness.drawn(self._table, self._key, first, count, stride)


class _Ranked:
    """Draws without replacement: the rows of the smallest ranks."""

    def __init__(self, weights: np.ndarray, count: int, key: np.ndarray) -> None:
        ranks = randomness.ranks(weights, key)
        # Only these are sorted. They are in rising order, and equal ranks stay so: numpy's choice does not show.
        candidates = np.flatnonzero(ranks <= np.partition(ranks, count - 1)[count - 1])
        self._rows = candidates[np.argsort(ranks[candidates], kind="stable")[:count]].astype(np.int64, copy=False)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, first: int, count: int, stride: int = 1) -> np.ndarray:
        randomness.check_positions(first, count, stride, len(self._rows))
        return self._rows[first::stride][:count].copy()


class KeyedSampler(Sampler[int]):
    """What both samplers share: a seed, epochs that count by themselves, iteration in blocks, and a state."""

    def __init__(self, seed: int) -> None:
        self.seed = _integer(seed, "seed")
        self.epoch = self.first = 0  # of the next iteration, and where that begins
        self._told = self._position = 0  # epoch and position of the state
        self._run = object()  # the latest iteration: others do not count

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def order(self) -> Permutation | _Draws | _Ranked:
        """The order of this seed and epoch."""

    @abstractmethod
    def _facts(self) -> dict[str, int]:
        """What else the order depends on: a state fits only where this is the same."""

    def __iter__(self) -> Iterator[int]:
        """The rows of the next epoch."""
        return self._iterate(*self.begin(), self._run)

    def _iterate(self, order: Permutation | _Draws | _Ranked, first: int, run: object) -> Iterator[int]:
        for start in range(first, len(order), _BLOCK):
            for row in order.take(start, min(_BLOCK, len(order) - start)).tolist():
                if self._run is run:
                    self._position += 1
                yield row
        if self._run is run:
            self._tell()

    def begin(self) -> tuple[Permutation | _Draws | _Ranked, int]:
        """Begins an iteration: its order, and its first position, behind what a state that was loaded had given."""
        order, first = self.order(), self.first
        self._tell()
        self.epoch, self.first = self.epoch + 1, 0
        return order, first

    def _tell(self) -> None:
        """The state is that in which the next iteration begins; one that is under way does not count any more."""
        self._told, self._position = self.epoch, self.first
        self._run = object()

    def take(self, first: int, count: int, stride: int = 1) -> np.ndarray:
        """The rows at the positions first, first + stride, ... of ``epoch``; iterations are not moved by it.

        That is the epoch of the next iteration: ``set_epoch`` says which.

        Args:
            first: the first position.
            count: how many.
            stride: from one position to the next, at least 1.

        Returns:
            int64, [count].

        Raises:
            InvalidArgument: a position is not in [0, len(self)).
        """
        return self.order().take(first, count, stride)

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration has. Another one than by itself begins at its start."""
        epoch = _integer(epoch, "epoch")
        if epoch != self.epoch:
            self.epoch, self.first = epoch, 0
        self._tell()

    def state_dict(self) -> dict[str, int]:
        """Where the latest iteration is: plain integers, of which ``position`` counts the rows that it gave.

        Behind its StopIteration, and after ``set_epoch``, it is where the next one begins. A ``DataLoader`` with
        workers asks for rows before it hands them out, and they count.
        """
        return {"seed": self.seed, "epoch": self._told, "position": self._position, **self._facts()}

    def begin_state(self) -> dict[str, int]:
        """The state in which the next iteration begins, wherever the latest one is."""
        return {**self.state_dict(), "epoch": self.epoch, "position": self.first}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes the seed and epoch of a state; the next iteration gives what the one that was saved had not given.

        That may be nothing, if the state was saved behind the last row, but before StopIteration. Iterations after the
        next are whole again.

        Raises:
            InvalidArgument: the state is not of such a sampler, or of another number of rows.
        """
        facts = self._facts()
        if not isinstance(state, dict) or set(state) != {"seed", "epoch", "position", *facts}:
            raise InvalidArgument(f"This is no state of a {type(self).__name__}: {state!r:.200}.")
        for name, now in facts.items():
            if state[name] != now:
                raise InvalidArgument(f"The state is of another order: its {name} is {state[name]}, and here {now}.")
        seed, epoch = _integer(state["seed"], "seed"), _integer(state["epoch"], "epoch")
        position = _integer(state["position"], "position")
        if not 0 <= position <= len(self):
            raise InvalidArgument(f"The state's position is {position}, of {len(self)}.")
        self.seed, self.epoch, self.first = seed, epoch, position
        self._tell()


class PermutationSampler(KeyedSampler):
    """Every row once, in a random order that takes no memory: ``RandomSampler`` for saves of any size.

    Each iteration gives the order of the next epoch, the first that of epoch 0, unless ``set_epoch`` says which. The
    number of rows is asked of ``data_source`` at the start of an iteration, so a dataset may grow between epochs.

    Args:
        data_source: a dataset, or how many rows it has.
        seed: any integer.

    Raises:
        InvalidArgumentType: ``data_source`` has no length, or ``seed`` is no integer.
        InvalidArgument: fewer than 0 or more than 2**63 - 1 rows.

    >>> from torch.utils.data import DataLoader
    >>> dataset = range(6)
    >>> sampler = PermutationSampler(dataset, seed=3)
    >>> loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    >>> [batch.tolist() for batch in loader]
    [[1, 0, 2, 3], [5, 4]]
    >>> rows = iter(sampler)  # epoch 1
    >>> next(rows), next(rows)
    (0, 3)
    >>> resumed = PermutationSampler(dataset)
    >>> resumed.load_state_dict(sampler.state_dict())
    >>> list(resumed) == list(rows)
    True
    """

    def __init__(self, data_source: Sized | int, seed: int = 0) -> None:
        if not isinstance(data_source, Sized):
            data_source = _checked_length(_integer(data_source, "data_source"))
        self.data_source = data_source
        super().__init__(seed)

    def __len__(self) -> int:
        return len(self.data_source) if isinstance(self.data_source, Sized) else self.data_source

    def order(self) -> Permutation:
        return Permutation(len(self), self.seed, self.epoch)

    def _facts(self) -> dict[str, int]:
        return {"rows": len(self)}


class WeightedSampler(KeyedSampler):
    """Rows drawn by weight, for any number of rows (torch's own draws from 2**24 at most).

    With replacement, rows come from an alias table with integer thresholds: up to 2**31 rows, each row's probability is
    within 2**-62 of its weight divided by the sum of all, and a weight of zero is never drawn. The table takes 16 bytes
    a row and O(n) time, once. A draw depends on its position only, so an iteration can begin anywhere at no cost.

    Without replacement, each draw is by weight among the rows that are left, as ``torch.multinomial`` does it: the rows
    with the smallest exponential random number divided by their weight, in that order. That takes O(n) time and
    some 24 bytes a row when an epoch's rows are first asked for, and keeps 8 bytes a row and 8 bytes a draw.

    Each iteration gives the draws of the next epoch, the first those of epoch 0, unless ``set_epoch`` says which. The
    weights are copied; a state does not hold them, so load it into a sampler of the same weights.

    Args:
        weights: [rows], zero or more each: a tensor, an array, or a sequence. Used as float64.
        num_samples: how many draws make an epoch.
        replacement: whether a row can be drawn again in the same epoch.
        seed: any integer.

    Raises:
        InvalidArgument: a weight is negative, infinite or not a number (the message names the row); all are zero; they
            are not 1-D; ``num_samples`` is not positive, or without replacement more than the rows that can be drawn.
        InvalidArgumentType: the weights are no real numbers; another argument has the wrong type.

    >>> sampler = WeightedSampler([0.0, 1.0, 3.0], num_samples=8, seed=5)
    >>> sampler.take(6, 2)
    array([2, 1])
    >>> list(sampler)
    [2, 2, 1, 2, 2, 2, 2, 1]
    >>> list(WeightedSampler([0.0, 1.0, 3.0, 1.0], num_samples=3, replacement=False))
    [2, 3, 1]
    """

    def __init__(
        self,
        weights: torch.Tensor | np.ndarray | Sequence[float],
        num_samples: int,
        replacement: bool = True,
        seed: int = 0,
    ) -> None:
        if not isinstance(replacement, bool):
            raise InvalidArgumentType(f"replacement must be a bool, not {type(replacement).__name__}.")
        if isinstance(num_samples, bool) or not 0 < (num_samples := _integer(num_samples, "num_samples")) <= _MOST:
            raise InvalidArgument(f"num_samples must be from 1 to 2**63 - 1, not {num_samples}.")
        array = _weights(weights)
        positive = randomness.check_weights(array)
        if not replacement and num_samples > positive:
            raise InvalidArgument(
                f"Without replacement, {positive} of {len(array)} rows can be drawn, not {num_samples}."
            )
        self.num_samples = num_samples
        self.replacement = replacement
        self._rows = len(array)
        self._table = randomness.make_table(array) if replacement else None
        self._weights = None if replacement else array.copy()
        self._ranked: tuple[tuple[int, int], _Ranked] | None = None
        super().__init__(seed)

    def __len__(self) -> int:
        return self.num_samples

    def order(self) -> _Draws | _Ranked:
        if self._table is not None:
            return _Draws(self._table, self.num_samples, randomness.key_of("draws", self.seed, self.epoch))
        assert self._weights is not None
        of = (self.seed, self.epoch)
        if self._ranked is None or self._ranked[0] != of:
            self._ranked = None  # gives its memory back first
            self._ranked = (of, _Ranked(self._weights, self.num_samples, randomness.key_of("ranks", *of)))
        return self._ranked[1]

    def _facts(self) -> dict[str, int]:
        return {"rows": self._rows, "num_samples": self.num_samples, "replacement": self.replacement}


def _integer(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentType(f"{name} must be an integer, not {type(value).__name__}.") from None


def _checked_length(n: int) -> int:
    if not 0 <= n <= _MOST:
        raise InvalidArgument(f"A permutation has from 0 to 2**63 - 1 rows, not {n}.")
    return n


def _weights(weights: Any) -> np.ndarray:
    """As float64, contiguous; not a copy if they are that already."""
    try:
        if isinstance(weights, torch.Tensor):
            if weights.is_complex():
                raise TypeError("they are complex")
            array = weights.detach().to("cpu", torch.float64).numpy()
        else:
            array = np.asarray(weights)
            if not np.can_cast(array.dtype, np.float64, "same_kind"):
                raise TypeError(f"they are {array.dtype}")
    except (TypeError, ValueError) as error:
        raise InvalidArgumentType(f"The weights are no real numbers: {error}.") from None
    if array.ndim != 1:
        raise InvalidArgument(f"The weights must have one dimension, not the shape {array.shape}.")
    if not len(array):
        raise InvalidArgument("There are no weights: no row can be drawn.")
    return np.ascontiguousarray(array, np.float64)
