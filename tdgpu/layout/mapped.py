"""Leaves as memory-mapped CPU tensors: what ``device=None`` and ``device="cpu"`` give."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from tensordict import MemoryMappedTensor

from tdgpu.errors import LoadError
from tdgpu.layout.tree import Leaf

__all__ = ["mapped", "nested_view"]


def mapped(leaf: Leaf, mode: str | None = None) -> torch.Tensor:
    """The leaf as a :class:`tensordict.MemoryMappedTensor`.

    Args:
        leaf: a leaf with elements, of a directory, whose size has been checked: mapping a file shorter than its tensor
            would grow it.
        mode: ``"r"``: writes stay in memory. ``"r+"``: they reach the file. None: ``"r+"`` where the file is writable,
            else ``"r"``.

    Raises:
        LoadError: the file cannot be opened or mapped.
        PermissionError: ``mode="r+"``, and the file is not writable.
    """
    extent = leaf.extent
    assert extent is not None
    try:
        return _mapped(leaf, extent.file, mode)
    except PermissionError:
        raise
    except (RuntimeError, OSError) as error:  # torch's own words name the file at best
        raise LoadError(f"A leaf's file cannot be mapped: {error}", key=leaf.key, file=extent.file) from error


def _mapped(leaf: Leaf, file: str, mode: str | None) -> torch.Tensor:
    if leaf.nested_sizes is None:
        return MemoryMappedTensor.from_filename(file, leaf.dtype, torch.Size(leaf.shape), mode=mode)
    # tensordict computes the number of values as an int32, which wraps around: build the same object here.
    writable = mode != "r" and os.access(file, os.W_OK)
    if mode == "r+" and not writable:
        raise PermissionError(f"Cannot open {file} with mode='r+': the file is not writable.")
    values = torch.from_file(
        file,
        shared=writable,
        size=leaf.nbytes // leaf.dtype.itemsize,
        dtype=leaf.dtype,
        device=torch.device("cpu"),  # whatever the default device is
    )
    tensor: Any = MemoryMappedTensor(nested_view(values, leaf.nested_sizes))
    tensor.filename = file
    tensor._handler = None
    tensor._mode = mode
    tensor._index = None
    tensor._index_chain = ()
    tensor._parent_shape = leaf.nested_sizes
    return cast(torch.Tensor, tensor)


def nested_view(values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """The strided nested tensor over ``values``, as tensordict builds it.

    Args:
        values: all elements of all components, one-dimensional and contiguous, at the beginning of a storage: torch
            counts the offsets of a nested tensor from there, not from where ``values`` begins.
        sizes: int64 on the host, one row per component.

    Raises:
        ValueError: ``values`` begins inside its storage.

    >>> nested = nested_view(torch.arange(5), torch.tensor([[2], [3]]))
    >>> [part.tolist() for part in nested.unbind()]
    [[0, 1], [2, 3, 4]]
    """
    if values.storage_offset():
        raise ValueError("The values of a nested tensor must lie at the beginning of their storage.")
    strides, offsets = torch._nested_compute_contiguous_strides_offsets(sizes)
    return torch._nested_view_from_buffer(values, sizes, strides, offsets)
