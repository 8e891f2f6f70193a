"""What a loader takes rows from: a dataset, or a subset of one."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from tdgpu.data.dataset import MemmapDataset
from tdgpu.data.form import BatchForm
from tdgpu.data.indexing import rows_at
from tdgpu.data.rows import Rows
from tdgpu.errors import InvalidArgument, InvalidArgumentType, TdgpuError
from tdgpu.layout.tree import Kind

__all__ = ["Source"]


class Source:
    """A dataset, and which of its rows count.

    Args:
        dataset: a :class:`MemmapDataset`; a ``torch.utils.data.Subset`` of one, or of such a subset; or a path.

    Raises:
        InvalidArgumentType: it is something else.
        TdgpuError: see :class:`MemmapDataset`.
    """

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, (str, os.PathLike)):
            dataset = MemmapDataset(dataset)
        self.dataset = dataset
        # From the outermost subset to the dataset: the index of each row in what it is a subset of.
        self._subsets: list[torch.utils.data.Subset[Any]] = []
        inner = dataset
        while isinstance(inner, torch.utils.data.Subset):
            _refuse_overridden(inner, torch.utils.data.Subset)
            self._subsets.append(inner)
            inner = inner.dataset
        if not isinstance(inner, MemmapDataset):
            raise InvalidArgumentType(
                f"DeviceLoader takes a MemmapDataset, a Subset of one, or a path, not a {type(inner).__name__}. Other"
                " datasets: torch.utils.data.DataLoader."
            )
        _refuse_overridden(inner, MemmapDataset)
        self._memmap = inner

    @property
    def prefix(self) -> str:
        """The save."""
        return str(self._memmap.prefix)

    def __repr__(self) -> str:
        return repr(self.dataset)

    def length(self) -> int:
        """How many rows count."""
        return len(self.dataset)

    def version(self) -> object:
        """Something else when the save has been looked at again, and has other rows."""
        return self._memmap._see()

    def open(self, threads: int) -> Rows:
        """The save's leaves, opened. Raises NotSupported if its rows cannot be gathered."""
        seen = self._memmap._see()
        return Rows(BatchForm(seen.save), threads)

    def check_mask(self, key: str) -> None:
        """Raises InvalidArgument if batches cannot have a mask as an entry of that name."""
        save = self._memmap._see().save
        root = save.root
        if root.kind is not Kind.TENSORDICT:
            raise InvalidArgument(
                f'padding="mask" adds an entry, and a {root.cls.__qualname__} has the fields that it has: save a'
                " TensorDict that holds it.",
                save=save.prefix,
            )
        if key in root.leaves or key in root.children:
            raise InvalidArgument(f"The save has an entry {key!r}: give the mask another mask_key.", save=save.prefix)

    def mapping(self) -> np.ndarray | None:
        """Of each row that counts, now, the row of the save; None if all count.

        Raises:
            IndexError: a subset has a row that is not there.
        """
        mapping: np.ndarray | None = None
        inner: Any
        for subset in self._subsets:
            inner = subset.dataset
            try:
                indices = rows_at(subset.indices, len(inner))
            except TdgpuError as error:
                error.save = self.prefix
                raise
            mapping = indices if mapping is None else indices[mapping]
        index = self._memmap._index
        if index is not None:
            mapping = index if mapping is None else index[mapping]
        return mapping


def _refuse_overridden(dataset: Any, base: type) -> None:
    """Raises InvalidArgumentType if rows are not what the dataset's own class gives."""
    for name in ("__getitem__", "__getitems__", "__len__"):
        if getattr(type(dataset), name, None) is not getattr(base, name, None):
            raise InvalidArgumentType(
                f"{type(dataset).__name__}.{name} would not be called, since native threads fetch the rows: give what"
                " it does to rows as transform=, or use torch.utils.data.DataLoader."
            )
