"""Which rows an index names, by Python's rules."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tdgpu.errors import InvalidArgumentType, TdgpuError

__all__ = ["RowIndexError", "row_at", "rows_at"]

Index = np.ndarray[Any, np.dtype[np.int64]]


class RowIndexError(TdgpuError, IndexError):
    """There is no row of that index. The message names it, and how many rows there are."""

    __str__ = TdgpuError.__str__


def row_at(index: object, rows: int) -> int | Index:
    """The row, or rows, that ``dataset[index]`` means.

    Args:
        index: an int (also of numpy, or in a tensor or array without dimensions), a slice, a range, a list of ints or
            bools, or a one-dimensional tensor or array of them. Negative ones count from the end; bools are a mask of
            length ``rows``.
        rows: how many there are.

    Returns:
        The row, from 0 to ``rows - 1``; or an int64 array of shape ``(n,)`` of such.

    Raises:
        RowIndexError: there is no such row, or the mask has another length (an IndexError).
        InvalidArgumentType: it is no such index (a TypeError).

    >>> row_at(-1, 5), row_at(slice(1, None, 2), 5), row_at([True, False, False, False, True], 5)
    (4, array([1, 3]), array([0, 4]))
    """
    if isinstance(index, slice):
        try:
            return np.arange(*index.indices(rows), dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentType(f"{index!r} is no slice of rows: {error}.") from None
    if isinstance(index, (list, range, np.ndarray, torch.Tensor)):
        array = _array(index)
        if array.ndim:
            return _masked(array, rows) if array.dtype == np.bool_ else _checked(array, rows)
        index = array[()]
    return int(_checked(np.asarray(_integer(index), dtype=object), rows))


def rows_at(indices: Sequence[Any] | np.ndarray[Any, Any] | torch.Tensor, rows: int) -> Index:
    """The rows of a batch, each named by an integer: no mask.

    Args:
        indices: a sequence, or a one-dimensional tensor or array, of integers, which may be negative.
        rows: how many there are.

    Returns:
        An int64 array of shape ``(len(indices),)``, each from 0 to ``rows - 1``.

    Raises:
        RowIndexError: there is no such row (an IndexError).
        InvalidArgumentType: these are no integers (a TypeError).

    >>> rows_at([0, -1, 0], 5)
    array([0, 4, 0])
    """
    array = _array(indices if isinstance(indices, (np.ndarray, torch.Tensor)) else list(indices))
    if array.dtype == np.bool_ or not array.ndim:
        raise InvalidArgumentType(f"The rows of a batch are named by a list of integers, not by {indices!r}.")
    return _checked(array, rows)


def _array(index: list[Any] | range | np.ndarray[Any, Any] | torch.Tensor) -> np.ndarray[Any, Any]:
    """The index as an array of integers or bools."""
    array: np.ndarray[Any, Any]
    if isinstance(index, list):
        kinds = set(map(type, index))
        if kinds and kinds <= {bool, np.bool_}:
            array = np.array(index, dtype=np.bool_)
        else:
            # One by one if there is anything else among them: numpy would make a 1 of True, and a 2 of 2.5.
            whole = index if kinds <= {int} else [_integer(item) for item in index]
            array = _int_array(whole)
    elif isinstance(index, range):
        # One past the end of int64 is past the end of every save.
        array = _int_array(index) if len(index) < 2 else np.arange(index.start, index.stop, index.step)
    elif isinstance(index, torch.Tensor):
        if index.dtype == torch.uint8:
            raise InvalidArgumentType(
                "An index tensor of dtype uint8 is a mask to torch and integers to numpy: convert it to bool or int64."
            )
        if index.is_floating_point() or index.is_complex():
            raise InvalidArgumentType(f"An index tensor holds integers or bools, not {index.dtype}.")
        array = index.detach().cpu().numpy()
    else:
        array = index
    if array.ndim > 1:
        raise InvalidArgumentType(
            f"Rows are indexed along one dimension, not by an index of shape {list(array.shape)}."
        )
    if array.dtype.kind not in "iub" and array.dtype != object:
        raise InvalidArgumentType(f"An index array holds integers or bools, not {array.dtype}.")
    return array


def _int_array(whole: Sequence[int]) -> np.ndarray[Any, Any]:
    try:
        return np.array(whole, dtype=np.int64)
    except OverflowError:
        return np.array(whole, dtype=object)  # is refused, and named, when it is compared with the number of rows


def _integer(index: object) -> int:
    is_bool = isinstance(index, (bool, np.bool_)) or (isinstance(index, torch.Tensor) and index.dtype == torch.bool)
    if not is_bool and not isinstance(index, (tuple, str)) and hasattr(index, "__index__"):
        try:
            return operator.index(index)
        except TypeError:
            pass  # a tensor or array that is no integer
    raise InvalidArgumentType(
        "Rows are indexed by an integer, a slice, a range, a list, or a one-dimensional tensor or array of integers or"
        f" of bools; not by {'a bool' if is_bool else repr(index)}."
    )


def _masked(mask: np.ndarray[Any, Any], rows: int) -> Index:
    if len(mask) != rows:
        raise RowIndexError(f"A mask of {len(mask)} does not fit the {rows} rows.")
    return np.flatnonzero(mask).astype(np.int64, copy=False)


def _checked(array: np.ndarray[Any, Any], rows: int) -> Index:
    """As int64 from 0 to ``rows - 1``. Compared before it is converted, which could wrap around."""
    if not array.size:
        return np.empty(array.shape, np.int64)
    low, high = int(array.min()), int(array.max())
    if low < -rows or high >= rows:
        bad = int(array.reshape(-1)[int(np.argmax((array < -rows) | (array >= rows)))])
        raise RowIndexError(f"The row {bad} is out of range: there are {rows} rows.")
    result: Index = array.astype(np.int64)  # a copy: whoever gave it may change it
    if low < 0:
        result[result < 0] += rows
    return result
