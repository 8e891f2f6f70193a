"""What a function returns of rows, made into rows."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
)

from tdgpu.cache.failed import named
from tdgpu.errors import TransformError
from tdgpu.layout.growth import _is_same
from tdgpu.layout.tree import Key

__all__ = ["VALUES", "count_of", "is_class", "is_entries", "is_equal", "merged", "of_batch", "of_rows", "stacked"]

#: Entries of rows, by key: what a level of them is made of.
Entries = dict[str, Any]
#: What tensordict wraps values in that are no tensors.
VALUES = (NonTensorData, NonTensorStack)


def is_entries(value: object) -> bool:
    """Whether a value is entries by key: a mapping or a TensorDict, but no tensorclass, which is a value itself."""
    return isinstance(value, Mapping) or (isinstance(value, TensorDictBase) and not isinstance(value, VALUES))


def is_class(value: object) -> bool:
    """Whether a value is a tensorclass of rows."""
    return is_tensorclass(value) and not isinstance(value, (type, *VALUES))


def _items(value: Any, rows: str) -> list[tuple[str, Any]]:
    items = list(value.items())
    for key, _ in items:
        if not isinstance(key, str):
            raise TransformError(f"The function has returned a key that is no string for {rows}: {key!r}.")
    return items


# --- of a batch -------------------------------------------------------------------------------------------------------


def of_batch(value: Any, rows: str, key: Key = ()) -> Any:
    """What a function has returned for a batch, with one value per row in each entry.

    Args:
        value: entries, or the value of one.
        rows: which rows, for messages.
        key: of what ``value`` is the value.

    Returns:
        Of entries a dict. Else a tensor or tensorclass; non-tensor values as a NonTensorStack, or as a NonTensorData
        where all rows have the same.

    Raises:
        TransformError: there is not one value per row; it names the key.
    """
    if is_entries(value):
        return {name: of_batch(item, rows, (*key, name)) for name, item in _items(value, rows)}
    if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and _is_numbers(value)):
        result = _tensor(value, rows, key)
    elif isinstance(value, VALUES) or is_class(value):
        return value
    elif isinstance(value, (list, tuple, np.ndarray)):
        return _of_list(list(value), rows, key)
    else:
        raise TransformError(
            f"A batched function returns one value per row in each entry, as a tensor, an array or a list, not a"
            f" {type(value).__name__} ({rows}).",
            key=key,
        )
    if not result.ndim:
        raise TransformError(f"A batched function has returned a single number for {rows}.", key=key)
    return result


def _of_list(values: list[Any], rows: str, key: Key) -> Any:
    arrays = (torch.Tensor, np.ndarray, np.generic)
    if values and all(isinstance(value, arrays) and _is_numbers(value) for value in values):
        return _stacked([_tensor(value, rows, key) for value in values], rows, key)
    if values and _is_numeric(values):
        try:
            return torch.tensor(values)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise TransformError(f"This is no tensor ({rows}): {error}.", key=key) from error
    return _non_tensors(values)


def _is_numeric(values: Sequence[Any]) -> bool:
    """Whether these are numbers, or lists of such."""
    return all(
        isinstance(value, numbers.Number)
        or (isinstance(value, (list, tuple)) and len(value) > 0 and _is_numeric(value))
        for value in values
    )


def _non_tensors(values: list[Any]) -> Any:
    if all(is_equal(value, values[0]) for value in values[1:]):
        return NonTensorData(values[0] if values else None, batch_size=[len(values)])
    return NonTensorStack(*(NonTensorData(value) for value in values))


def is_equal(one: Any, other: Any) -> bool:
    """Whether two non-tensor values are the same to whoever reads them: 1, 1.0 and True are not."""
    try:
        return type(one) is type(other) and repr(one) == repr(other) and _is_same(one, other)
    except Exception:  # what cannot be compared is another
        return False


def count_of(entries: Any, rows: str, at: Key = ()) -> int | None:
    """How many rows the entries have, which all must have as many; None if there are none that tell.

    Raises:
        TransformError: two have different numbers; it names one.
    """
    found: int | None = None
    for name, value in entries.items():
        key = (*at, name)
        count: int | None
        if isinstance(value, dict):
            count = count_of(value, rows, key)
        elif isinstance(value, NonTensorData) and not value.batch_size:
            continue  # one value, for however many rows
        elif isinstance(value, torch.Tensor):
            count = len(value)
        elif not value.batch_size:
            raise TransformError(f"This {type(value).__name__} of {rows} has no batch dimension.", key=key)
        else:
            count = int(value.batch_size[0])
        if None not in (found, count) and found != count:
            raise TransformError(f"{count} rows were returned here, and {found} in other entries ({rows}).", key=key)
        found = count if found is None else found
    return found


# --- of rows ----------------------------------------------------------------------------------------------------------


def of_rows(values: list[Any], first: int, key: Key = ()) -> Any:
    """What a function has returned for each of some rows, as of a batch.

    Args:
        values: of each row entries, or the value of one.
        first: which row the first one is, for messages.
        key: of what these are the values.

    Returns:
        As of :func:`of_batch`.

    Raises:
        TransformError: the rows have different keys, dtypes or shapes; it names the key and the row.
    """
    if is_entries(values[0]):
        return _entries_of_rows(values, first, key)
    kinds = {type(value) for value in values}
    if kinds <= {bool} or kinds <= {int} or kinds <= {float} or kinds <= {complex}:
        try:
            return torch.tensor(values)
        except (RuntimeError, ValueError, OverflowError) as error:  # an int of more than 64 bits
            raise TransformError(f"This is no tensor ({named(first, len(values))}): {error}.", key=key) from error
    if all(map(_is_numbers, values)):
        tensors = [_tensor(value, named(first + i, 1), key) for i, value in enumerate(values)]
        return _stacked(tensors, first, key)
    for i, value in enumerate(values):
        if _is_numbers(value) != _is_numbers(values[0]) or is_entries(value):
            raise TransformError(
                f"The function has returned a {type(value).__name__} for row {first + i}, and a"
                f" {type(values[0]).__name__} for row {first}.",
                key=key,
            )
    if is_class(values[0]):
        return stacked(values, first, key)
    return _non_tensors([value.data if isinstance(value, NonTensorData) else value for value in values])


def stacked(values: list[Any], first: int, key: Key = ()) -> Any:
    """A tensorclass of rows, of one tensorclass for each row.

    Raises:
        TransformError: they do not fit each other; it names the key and the row.
    """
    like = values[0]
    for i, value in enumerate(values):
        if type(value) is not type(like):
            raise TransformError(
                f"The function has returned a {type(value).__name__} for row {first + i}, and a"
                f" {type(like).__name__} for row {first}.",
                key=key or None,
            )
        for name, field in value._non_tensordict.items():
            if not is_equal(field, like._non_tensordict.get(name)):
                raise TransformError(
                    f"A field that is no tensor has one value in all rows: {field!r:.100} of row {first + i} is not"
                    f" {like._non_tensordict.get(name)!r:.100} of row {first}.",
                    key=(*key, name),
                )
    entries = of_rows([value._tensordict for value in values], first, key)
    batch_size = torch.Size((len(values), *like.batch_size))
    held = merged(None, entries, batch_size, named(first, len(values)))
    return type(like)._from_tensordict(held, dict(like._non_tensordict))


def _entries_of_rows(values: list[Any], first: int, key: Key) -> Entries:
    keys = [name for name, _ in _items(values[0], named(first, 1))]
    for i, value in enumerate(values):
        if not is_entries(value) or set(value.keys()) != set(keys):
            raise TransformError(
                f"The function has returned other keys for row {first + i} than for row {first}: {_shown(value)}"
                f" instead of {keys}.",
                key=key or None,
            )
    # One look-up per value: `items` of a TensorDict costs more than all of its values.
    return {name: of_rows([value[name] for value in values], first, (*key, name)) for name in keys}


def _shown(value: Any) -> str:
    return str(list(value.keys())) if is_entries(value) else f"a {type(value).__name__}"


def _is_numbers(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "OSUVMm"
    if isinstance(value, (list, tuple)):
        return bool(value) and _is_numeric(value)
    return isinstance(value, (torch.Tensor, numbers.Number, np.bool_)) and not isinstance(value, np.timedelta64)


def _tensor(value: Any, rows: str, key: Key) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested or value.is_meta:
            kind = (
                "nested" if value.is_nested else "meta" if value.is_meta else str(value.layout).removeprefix("torch.")
            )
            raise TransformError(f"A tensor that is {kind} has no rows that can be stored ({rows}).", key=key)
        return value.detach()
    try:
        return torch.as_tensor(value if not isinstance(value, np.ndarray) or value.flags.writeable else value.copy())
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise TransformError(f"This is no tensor ({rows}): {error}.", key=key) from error


def _stacked(tensors: list[torch.Tensor], first: int | str, key: Key) -> torch.Tensor:
    like = tensors[0]
    for i, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype or tensor.shape != like.shape:
            which = f"row {first + i}" if isinstance(first, int) else f"one of {first}"
            raise TransformError(
                f"The function has returned {tensor.dtype} of shape {list(tensor.shape)} for {which}, and {like.dtype}"
                f" of shape {list(like.shape)} before: each key has one dtype and shape.",
                key=key,
            )
    return torch.stack(tensors)


# --- the rows that come of it -----------------------------------------------------------------------------------------


def merged(given: Any, entries: Entries, batch_size: torch.Size, rows: str) -> Any:
    """A batch with new entries, which take the place of those of the same keys.

    Args:
        given: a TensorDict or tensorclass, which is not changed; None: only the entries.
        entries: of :func:`of_batch` or :func:`of_rows`, of as many rows.
        batch_size: of what has only new entries.
        rows: which ones, for messages.

    Raises:
        TransformError: an entry that the tensorclass has no field for.
    """
    if given is None:
        result: Any = TensorDict({}, batch_size=batch_size)
    elif is_class(given):
        unknown = [key for key in entries if key not in type(given).__dataclass_fields__]
        if unknown:
            raise TransformError(
                f"A {type(given).__name__} has no field for what the function has returned for {rows}: return a"
                " tensorclass, which is the new row.",
                key=(unknown[0],),
            )
        result = given.clone(recurse=False)
    elif isinstance(given, LazyStackedTensorDict):
        result = given.contiguous()
    else:
        result = given.copy()
    rest = result.batch_size
    if len(rest) > 1 and not _fits(entries, rest):
        rest = result.batch_size = rest[:1]
    for key, value in entries.items():
        if isinstance(value, dict):
            below = result.get(key, None)
            value = merged(below if is_entries(below) or is_class(below) else None, value, rest, rows)
        elif isinstance(value, NonTensorData) and value.batch_size != rest:
            value = NonTensorData(value.data, batch_size=rest)
        result.set(key, value)
    return result


def _fits(entries: Entries, batch_size: torch.Size) -> bool:
    return all(
        _fits(value, batch_size)
        if isinstance(value, dict)
        else isinstance(value, VALUES) or tuple(value.shape[: len(batch_size)]) == tuple(batch_size)
        for value in entries.values()
    )
