"""Transforms of a dataset that copy no rows: which rows there are, in which order, and what their keys are."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from tdgpu.data import arguments
from tdgpu.data.indexing import row_at
from tdgpu.data.renaming import Names, check_names
from tdgpu.data.selection import check_keys
from tdgpu.errors import InvalidArgument, InvalidArgumentType, NotSupported

__all__ = ["Index", "Step", "Views", "digest_of"]

Index = np.ndarray[Any, np.dtype[np.int64]]
#: A transform that copies nothing, and all that its result depends on: what its fingerprint is made of.
Step = tuple[str, dict[str, Any]]

_V = TypeVar("_V", bound="Views")
# Bytes of a column that are read at a time.
_COLUMN_BYTES = 8 << 20
_FLOATS = (torch.float32, torch.float64)


class Views(Dataset[Any]):
    """The transforms of :class:`tdgpu.MemmapDataset` that give a view: of the same save, with an index of its rows.

    Views of views have one index, too, of eight bytes per row. A view works wherever its dataset does. It has the rows
    that there were when it was made.
    """

    if TYPE_CHECKING:  # what the dataset has

        def __len__(self) -> int: ...

        def _viewed(self: _V, step: Step, *, rows: Index | None = None, names: Names | None = None) -> _V: ...

        def _only(self: _V, keys: list[Any]) -> _V: ...

    def select(self: _V, indices: Any) -> _V:
        """A view of some rows, in the order of ``indices``; a row may come more than once.

        Args:
            indices: a slice, a range, a list (or another iterable) of ints, a one-dimensional tensor or array of them,
                or a mask of ``len(dataset)`` bools. Negative ones count from the end.

        Raises:
            IndexError: there is no such row.
            InvalidArgumentType: these are no indices of rows (a TypeError).

        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = TensorDict(x=torch.arange(10), batch_size=[10]).memmap(path)
        ...     view = tdgpu.MemmapDataset(path).select(range(0, 10, 2))
        ...     print(len(view), view[:]["x"].tolist(), view.select([-1, 0])[:]["x"].tolist())
        5 [0, 2, 4, 6, 8] [8, 0]
        """
        is_index = isinstance(indices, (slice, list, range, np.ndarray, torch.Tensor))
        if not is_index and isinstance(indices, Iterable) and not isinstance(indices, (str, bytes, Mapping)):
            indices = list(indices)
        rows = row_at(indices, len(self))
        if isinstance(rows, int):
            raise InvalidArgumentType(f"select takes the indices of rows, not {indices!r}: dataset[i] is one row.")
        return self._viewed(("select", {"indices": digest_of(rows)}), rows=rows)

    def shuffle(self: _V, seed: int | None = None) -> _V:
        """A view of all rows in another order, uniform among all orders.

        Args:
            seed: what the order follows from, with the number of rows. None: ``torch.initial_seed()`` as it is now. No
                global random generator is drawn from.

        For another order in every epoch, a loader's ``shuffle`` is the thing.
        """
        seed = _seed(seed)
        return self._viewed(("shuffle", {"seed": seed}), rows=_shuffled(len(self), seed))

    def sort(self: _V, key: str | tuple[Any, ...], descending: bool = False, *, stable: bool = True) -> _V:
        """A view of all rows, ordered by the values of one leaf, which are read for it.

        Args:
            key: the nested key of a leaf with one number per row. NaN counts as larger than all numbers.
            descending: from the largest to the smallest.
            stable: whether rows of equal values stay in their order; else they may come in any.

        Raises:
            UnknownKeyError: there is no such key (a KeyError).
            InvalidArgument: there is more than one number per row (a ValueError).
            NotSupported: what has no order: complex numbers, what is no tensor (a NotImplementedError).
        """
        parts = check_keys([key])
        assert parts is not None
        for name, value in (("descending", descending), ("stable", stable)):
            if not isinstance(value, bool):
                raise InvalidArgumentType(f"{name} must be a bool, got {value!r}.")
        column = self._column(parts[0])
        if descending:  # backwards twice: then those that are equal still come in their order
            rows = len(self) - 1 - np.argsort(column[::-1], kind="stable" if stable else None)[::-1]
        else:
            rows = np.argsort(column, kind="stable" if stable else None)
        step = "sort", {"key": parts[0], "descending": descending, "stable": stable}
        return self._viewed(step, rows=rows.astype(np.int64, copy=False))

    def shard(self: _V, num_shards: int, index: int, contiguous: bool = True) -> _V:
        """A view of one of ``num_shards`` parts, which differ by at most one row and have all rows together.

        Args:
            num_shards: how many parts.
            index: which one, from 0 on.
            contiguous: whether a part has rows that follow each other, so that the parts one after the other are the
                dataset; else it has the rows ``index``, ``index + num_shards``, ...

        Raises:
            InvalidArgument: there is no such part (a ValueError).
        """
        num_shards = arguments.whole("num_shards", num_shards, 1)
        index = arguments.whole("index", index, 0)
        if index >= num_shards:
            raise InvalidArgument(f"index must be below num_shards, got {index} of {num_shards}.")
        rows = len(self)
        if contiguous:
            each, more = divmod(rows, num_shards)
            first = each * index + min(index, more)
            part = np.arange(first, first + each + (index < more), dtype=np.int64)
        else:
            part = np.arange(index, rows, num_shards, dtype=np.int64)
        step = "shard", {"num_shards": num_shards, "index": index, "contiguous": bool(contiguous)}
        return self._viewed(step, rows=part)

    def train_test_split(
        self: _V,
        test_size: float | int | None = None,
        train_size: float | int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> dict[str, _V]:
        """Two views that have no row in common: to train with, and to test with.

        Args:
            test_size: how many rows the second one has: an int, or the share of all rows as a float between 0 and 1
                (rounded up). None: what ``train_size`` leaves; a quarter if that is None, too.
            train_size: likewise of the first one (rounded down). None: what ``test_size`` leaves.
            shuffle: whether rows are dealt out at random; else the first ones are for training.
            seed: as in :meth:`shuffle`.

        Returns:
            ``{"train": ..., "test": ...}``.

        Raises:
            InvalidArgument: more rows than there are, or none to train with (a ValueError).
            InvalidArgumentType: a size that is no number (a TypeError).

        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = TensorDict(x=torch.arange(10), batch_size=[10]).memmap(path)
        ...     parts = tdgpu.MemmapDataset(path).train_test_split(0.2, seed=0)
        ...     print({name: len(part) for name, part in parts.items()})
        {'train': 8, 'test': 2}
        """
        train, test = _sizes(len(self), train_size, test_size)
        seed = _seed(seed) if shuffle else None
        order = np.arange(len(self), dtype=np.int64) if seed is None else _shuffled(len(self), seed)
        parts = {"train": order[:train], "test": order[train : train + test]}
        said = {"train": train, "test": test, "seed": seed}
        return {
            name: self._viewed(("train_test_split", {**said, "part": name}), rows=rows.copy())
            for name, rows in parts.items()
        }

    def rename_keys(self: _V, mapping: Mapping[Any, Any]) -> _V:
        """The same rows under other keys.

        Args:
            mapping: of each key that is renamed the new one: strings, or tuples of strings for nested ones, of leaves
                or of subtrees. All are renamed at once, so two can be exchanged.

        Raises:
            UnknownKeyError: there is nothing of an old key (a KeyError).
            InvalidArgument: there is something of a new key already (a ValueError).
            NotSupported: a key within a tensorclass or a stack (a NotImplementedError).

        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = TensorDict(x=torch.arange(3), y=torch.zeros(3), batch_size=[3]).memmap(path)
        ...     print(tdgpu.MemmapDataset(path).rename_keys({"x": ("in", "number")})[1]["in", "number"])
        tensor(1)
        """
        names = check_names(mapping)
        return self._viewed(("rename_keys", {"mapping": list(names.items())}), names=names)

    def _column(self, key: Any) -> np.ndarray[Any, Any]:
        """The values of a leaf, one of each row, as what numpy can order."""
        only: Any = self._only([key])
        parts: list[torch.Tensor] = []
        rows, per_read = len(self), 1
        at = 0
        while at < rows or not parts:
            value = only[at : at + per_read].get(key)
            if not isinstance(value, torch.Tensor) or value.is_nested or value.is_complex():
                raise NotSupported("Rows can be ordered by a leaf of real numbers only.", save=only.prefix, key=key)
            if value.numel() != len(value):
                raise InvalidArgument(
                    f"Rows are ordered by one number each, and this leaf has rows of shape {list(value.shape[1:])}.",
                    save=only.prefix, key=key,
                )  # fmt: skip
            parts.append(value.reshape(-1))
            at += per_read
            per_read = max(1, _COLUMN_BYTES // max(1, value.element_size()))
        column = torch.cat(parts)
        # numpy has no bfloat16, nor floats of eight bits; every one of them is a float32, too.
        return (column if column.dtype in _FLOATS or not column.is_floating_point() else column.float()).numpy()


def digest_of(rows: Index) -> str:
    """A digest of which rows there are."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(rows).data)


def _seed(seed: int | None) -> int:
    if isinstance(seed, bool):
        raise InvalidArgumentType(f"seed must be a whole number or None, got {seed!r}.")
    try:
        return torch.initial_seed() if seed is None else operator.index(seed)
    except TypeError:
        raise InvalidArgumentType(f"seed must be a whole number or None, got {seed!r}.") from None


def _shuffled(rows: int, seed: int) -> Index:
    generator = torch.Generator(device="cpu").manual_seed(seed % (1 << 64))
    order: Index = torch.randperm(rows, generator=generator, device="cpu").numpy()
    return order


def _sizes(rows: int, train_size: Any, test_size: Any) -> tuple[int, int]:
    """How many rows are for training and how many for testing."""
    wanted: dict[str, int | None] = {}
    for name, size, rounded in (("train_size", train_size, math.floor), ("test_size", test_size, math.ceil)):
        if size is None:
            wanted[name] = None
        elif isinstance(size, bool) or not isinstance(size, (int, float)):
            raise InvalidArgumentType(f"{name} must be an int, a float or None, got {size!r}.")
        elif isinstance(size, int):
            wanted[name] = size
        elif 0 < size < 1:
            wanted[name] = rounded(size * rows)
        else:
            raise InvalidArgument(f"{name} as a float must be between 0 and 1, got {size!r}.")
    train, test = wanted["train_size"], wanted["test_size"]
    if train is None and test is None:
        test = math.ceil(rows / 4)
    if train is None:
        assert test is not None
        train = rows - test
    elif test is None:
        test = rows - train
    if min(train, test) < 0 or train + test > rows or (rows and not train):
        raise InvalidArgument(f"{rows} rows cannot be split into {train} to train with and {test} to test with.")
    return train, test
