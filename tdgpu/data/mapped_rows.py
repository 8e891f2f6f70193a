"""Rows of saves of every kind, as tensordict itself indexes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tdgpu.errors import NotSupported
from tdgpu.layout.save import Save
from tdgpu.layout.tree import Kind
from tdgpu.load import Request, load_save

__all__ = ["MappedRows"]

# Indexed with a tensor, these give tensors of their own; the others may give views.
_COPIED = (Kind.TENSORDICT, Kind.TYPED, Kind.TENSORCLASS, Kind.NON_TENSOR_DATA, Kind.NON_TENSOR_STACK)


class MappedRows:
    """The leaves of a save, mapped or inflated in this process, of which any rows can be copied.

    Args:
        save: the save, its non-tensor contents read and its leaves' files checked.
        request: how it is loaded: on the CPU, all of its rows.

    Raises:
        TdgpuError: see :func:`tdgpu.load_memmap`.
    """

    def __init__(self, save: Save, request: Request) -> None:
        self._save = save
        self._held = load_save(save, request)
        self._is_dense = all(level.kind in _COPIED for level in save.root.walk())

    def one(self, index: int) -> Any:
        """A row, without the first batch dimension."""
        return _copy(self._held[index])

    def take(self, index: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        """A batch of rows.

        Args:
            index: int64, each at least 0 and below the number of rows.

        Raises:
            NotSupported: torch cannot index a leaf's dtype.
        """
        try:
            rows = self._held[torch.from_numpy(index)]
        except NotImplementedError as error:
            raise NotSupported(f"torch cannot index these rows: {error}.", save=self._save.prefix) from error
        return rows if self._is_dense else _copy(rows)


def _copy(rows: Any) -> Any:
    # Not by clone(): tensordict's adds 0 to each leaf, which makes 0.0 of -0.0, and not all dtypes can be added to.
    return rows.apply(_copy_leaf, filter_empty=False)


def _copy_leaf(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().as_subclass(torch.Tensor).clone()
