"""A save as a stream of its rows, shared out among ranks and workers: :class:`IterableMemmapDataset`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from tdgpu.data.dataset import MemmapDataset
from tdgpu.errors import InvalidArgument, InvalidArgumentType
from tdgpu.layout.tree import Key

__all__ = ["IterableMemmapDataset"]


class IterableMemmapDataset(IterableDataset[Any]):
    """The rows of a save, in its order, as an iterable-style dataset that shares them out by itself.

    Over all ranks, and all workers of a :class:`torch.utils.data.DataLoader`, every row comes exactly once. A rank has
    consecutive rows; one rank may have a row more than another. Its workers take turns, so that a DataLoader with
    ``batch_size=None`` gives the order of the save, with however many workers. For shuffled rows use
    :class:`tdgpu.MemmapDataset` with a sampler.

    Args:
        prefix, keys, subpath, robust_key, allow_pickle: as of :class:`tdgpu.MemmapDataset`.
        batch_size: rows of a batch, each of which is read at once, the last one of a rank being shorter if there are
            not enough. Give the DataLoader ``batch_size=None`` then. None: single rows.
        rank, world_size: this process's share, from 0 to ``world_size - 1``. None: that of the running
            ``torch.distributed`` process group, or all if there is none. When the dataset is pickled, for a worker, the
            group's is kept.

    Raises:
        InvalidArgument: ``batch_size`` is not positive, ``rank`` is not below ``world_size``, or only one of these two
            is given (a ValueError).
        InvalidArgumentType: they are no integers (a TypeError).
        TdgpuError: see :class:`tdgpu.MemmapDataset`.

    ``len`` is what a DataLoader expects: the rows of this rank, or its batches; over all workers. Iterating gives the
    rows that the dataset has then: :meth:`refresh` in between is for the next time. Workers that are persistent keep to
    the rows that the dataset had when they started, for all of them must share out the same number.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict
    >>> from torch.utils.data import DataLoader
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = TensorDict(x=torch.arange(10), batch_size=[10]).memmap(path)
    ...     for rank in range(2):
    ...         dataset = IterableMemmapDataset(path, batch_size=2, rank=rank, world_size=2)
    ...         print(len(dataset), [batch["x"].tolist() for batch in DataLoader(dataset, batch_size=None)])
    3 [[0, 1], [2, 3], [4]]
    3 [[5, 6], [7, 8], [9]]
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        keys: Iterable[str | tuple[Any, ...]] | None = None,
        batch_size: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        subpath: Any = None,
        robust_key: bool | None = True,
        allow_pickle: bool | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("rank", rank), ("world_size", world_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InvalidArgumentType(f"{name} must be an integer or None, got {value!r}.")
        if batch_size is not None and batch_size < 1:
            raise InvalidArgument(f"batch_size must be positive, got {batch_size}.")
        self._share: tuple[int, int] | None = None
        if rank is not None and world_size is not None:
            if not 0 <= rank < world_size:
                raise InvalidArgument(f"rank must be from 0 to world_size - 1, got {rank} of {world_size}.")
            self._share = rank, world_size
        elif rank is not None or world_size is not None:
            raise InvalidArgument(f"Pass rank and world_size, or neither; got {rank} and {world_size}.")
        self._batch_size = batch_size
        self._rows = MemmapDataset(prefix, keys, subpath=subpath, robust_key=robust_key, allow_pickle=allow_pickle)

    @property
    def prefix(self) -> Path:
        """The directory or archive."""
        return self._rows.prefix

    @property
    def keys(self) -> list[Key] | None:
        """The nested keys that the rows have, as tuples; None: all."""
        return self._rows.keys

    def __len__(self) -> int:
        first, last = self._range()
        return -(-(last - first) // (self._batch_size or 1))

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        turn, turns = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return self._items(*self._range(), turn, turns)

    def __repr__(self) -> str:
        rank, world_size = self._share or _group() or (0, 1)
        share = "" if world_size == 1 else f", rank {rank} of {world_size}"
        batches = "" if self._batch_size is None else f", batch_size={self._batch_size}"
        return f"{type(self).__name__}({str(self.prefix)!r}{batches}, {len(self._rows)} rows{share})"

    def refresh(self) -> int:
        """Looks at the save again, as :meth:`tdgpu.MemmapDataset.refresh`. All ranks must see the same rows.

        Returns:
            How many rows were added, to all ranks together.
        """
        return self._rows.refresh()

    def _range(self) -> tuple[int, int]:
        """The rows of this rank: the first, and the one behind the last."""
        rank, world_size = self._share or _group() or (0, 1)
        rows = len(self._rows)
        return rows * rank // world_size, rows * (rank + 1) // world_size

    def _items(self, first: int, last: int, turn: int, turns: int) -> Iterator[Any]:
        size = self._batch_size
        step = size or 1
        for row in range(first + turn * step, last, turns * step):
            yield self._rows[row] if size is None else self._rows[row : min(row + size, last)]

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned is in no process group. A rank that is yet to join one has no share so far.
        return {**self.__dict__, "_share": self._share or _group()}


def _group() -> tuple[int, int] | None:
    """The rank in the running process group, and its size."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None
