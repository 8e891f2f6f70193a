"""Functions of rows, computed once: ``map`` and ``filter``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from tdgpu.cache import lineage, results
from tdgpu.cache.batching import batches
from tdgpu.cache.failed import named, writing
from tdgpu.cache.writing import Writer
from tdgpu.data import arguments
from tdgpu.data.dataset import MemmapDataset
from tdgpu.data.selection import check_keys
from tdgpu.data.views import digest_of
from tdgpu.errors import InvalidArgument, InvalidArgumentType, TransformError
from tdgpu.layout.tree import Key, Kind
from tdgpu.load import load_memmap

__all__ = ["filter_rows", "map_rows"]

#: The entry of a filter's result that has the numbers of the rows that are left.
ROWS = "rows"


class _Call(NamedTuple):
    """How a function is called.

    Attributes:
        function: it.
        batched, batch_size, with_indices, device, num_threads, progress: as of ``map``.
        input_keys: what it gets of the rows; None: all.
        name: of the transform.
    """

    function: Callable[..., Any]
    batched: bool
    batch_size: int
    with_indices: bool
    input_keys: list[Key] | None
    device: torch.device | None
    num_threads: int | None
    progress: bool
    name: str

    def facts(self) -> dict[str, Any]:
        """The arguments that the result depends on."""
        return {
            "function": self.function,
            "batched": self.batched,
            # What one row gives does not depend on how many are read at a time.
            "batch_size": self.batch_size if self.batched else None,
            "with_indices": self.with_indices,
            "input_keys": self.input_keys,
            "device": "cpu" if self.device is None else str(self.device),
        }


class _NothingReturned(Exception):
    """The function has returned None: it was called for what else it does."""


def _checked_call(
    dataset: Any,
    name: str,
    function: Any,
    *,
    batched: Any,
    batch_size: Any,
    with_indices: Any,
    input_keys: Any,
    device: Any,
    num_threads: Any,
    progress: Any,
) -> _Call:
    if not callable(function):
        raise InvalidArgumentType(f"{name} takes a function, not {function!r}.")
    for argument, value in (("batched", batched), ("with_indices", with_indices), ("progress", progress)):
        if not isinstance(value, bool):
            raise InvalidArgumentType(f"{argument} must be a bool, got {value!r}.")
    found = check_keys(input_keys)
    if found is not None:
        dataset._only(found)  # they are there
    place = arguments.place(device)
    return _Call(
        function, batched, arguments.whole("batch_size", batch_size, 1), with_indices, found,
        None if place is None or place.type == "cpu" else place,
        None if num_threads is None else arguments.whole("num_threads", num_threads, 1), progress, name,
    )  # fmt: skip


# --- map --------------------------------------------------------------------------------------------------------------


def map_rows(
    dataset: Any,
    function: Callable[..., Any],
    *,
    remove_keys: Iterable[Any] | None,
    new_fingerprint: str | None,
    load_from_cache: bool,
    **how: Any,
) -> MemmapDataset:
    """See :meth:`tdgpu.MemmapDataset.map`."""
    call = _checked_call(dataset, "map", function, **how)
    removed = check_keys(remove_keys) or []
    if removed:
        dataset._only(removed)  # they are there
        if dataset._see().save.root.kind is not Kind.TENSORDICT:
            raise InvalidArgument(
                "Only keys of a TensorDict can be removed: return the rows as they are to be.", save=dataset.prefix
            )
    # Before it is first called: it may change what it refers to.
    facts = {**call.facts(), "remove_keys": removed}
    plan = lineage.plan(dataset, "map", facts, new_fingerprint)

    def build(path: Path) -> None:
        writer = Writer(path)
        try:
            _map(dataset, call, removed, writer)
            writer.finish()
        except BaseException:
            writer.give_up()
            raise

    try:
        entry = plan.obtain(build, load_from_cache=load_from_cache)
    except _NothingReturned:
        return dataset
    return plan.dataset_of(entry)


def _map(dataset: Any, call: _Call, removed: list[Key], writer: Writer) -> None:
    is_silent: bool | None = None  # whether the function returns None
    for first, rows in _rows(dataset, call):
        count = len(rows)
        returned = _call_batch(call, rows, first) if call.batched else _call_rows(call, rows, first)
        silent = returned is None
        if is_silent not in (None, silent):
            raise TransformError(
                f"The function returns None for some rows, but not for all ({named(0, first)}, {named(first, count)})."
            )
        is_silent = silent
        if not silent:
            which = named(first, count)
            with writing(which):
                result = _result(rows, returned, removed, which)
            writer.append(result, which)
    if is_silent:
        raise _NothingReturned
    if is_silent is None:
        empty = dataset[0:0]
        writer.append(empty.exclude(*removed) if removed else empty, "no rows")


def _rows(dataset: Any, call: _Call) -> Any:
    bar = call.name if call.progress else None
    return batches(dataset, call.batch_size, device=call.device, threads=call.num_threads, bar=bar)


def _given(call: _Call, rows: Any) -> Any:
    """What the function gets of a batch, or of the rows of one: it may set and delete entries of it."""
    return rows.copy() if call.input_keys is None else rows.select(*call.input_keys)


def _call_batch(call: _Call, rows: Any, first: int) -> Any:
    count = len(rows)
    given = [_given(call, rows)]
    if call.with_indices:
        given.append(torch.arange(first, first + count, device=call.device or "cpu"))
    try:
        returned = call.function(*given)
    except Exception as error:
        raise _raised(call, named(first, count), error) from error
    if returned is None or results.is_class(returned):
        return returned
    if not results.is_entries(returned):
        raise _no_result(call, returned, named(first, count))
    return results.of_batch(returned, named(first, count))


def _call_rows(call: _Call, rows: Any, first: int) -> Any:
    found: list[Any] = []
    for i, row in enumerate(_given(call, rows).unbind(0)):
        try:
            returned = call.function(row, first + i) if call.with_indices else call.function(row)
        except Exception as error:
            raise _raised(call, named(first + i, 1), error) from error
        if not (returned is None or results.is_class(returned) or results.is_entries(returned)):
            raise _no_result(call, returned, named(first + i, 1))
        if found and (returned is None) != (found[0] is None):
            raise TransformError(f"The function returns None for some rows, but not for all ({named(first, i + 1)}).")
        found.append(returned)
    if found[0] is None:
        return None
    return results.stacked(found, first) if results.is_class(found[0]) else results.of_rows(found, first)


def _raised(call: _Call, rows: str, error: Exception) -> TransformError:
    name = getattr(call.function, "__name__", type(call.function).__name__)
    return TransformError(f"{name} has raised {type(error).__name__} in {call.name}, at {rows}: {error}")


def _no_result(call: _Call, returned: Any, rows: str) -> TransformError:
    return TransformError(
        f"A function for {call.name} returns a dict, a TensorDict, a tensorclass or None, not a"
        f" {type(returned).__name__} ({rows})."
    )


def _result(rows: Any, returned: Any, removed: list[Key], which: str) -> Any:
    """The rows of the result."""
    if results.is_class(returned):
        if not returned.batch_size:
            raise TransformError(f"The tensorclass that was returned for {which} has no batch dimension.")
        return returned
    count = results.count_of(returned, which)
    kept = rows.exclude(*removed) if removed else rows
    if count is None or count == len(rows):
        return results.merged(kept, returned, rows.batch_size, which)
    left = set(kept.keys(True, True)) - set(_leaves(returned))
    if left:
        first = min(left, key=str)
        raise TransformError(
            f"The function has returned {count} rows for {which}, so nothing of these {len(rows)} can stay: name it in"
            " remove_keys.",
            key=first if isinstance(first, tuple) else (first,),
        )
    return results.merged(None, returned, torch.Size((count, *rows.batch_size[1:])), which)


def _leaves(entries: dict[str, Any], at: Key = ()) -> Iterable[Any]:
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*at, name))
        else:
            yield (*at, name) if at else name


# --- filter -----------------------------------------------------------------------------------------------------------


def filter_rows(
    dataset: Any, function: Callable[..., Any], *, new_fingerprint: str | None, load_from_cache: bool, **how: Any
) -> Any:
    """See :meth:`tdgpu.MemmapDataset.filter`."""
    call = _checked_call(dataset, "filter", function, **how)
    plan = lineage.plan(dataset, "filter", call.facts(), new_fingerprint)

    def build(path: Path) -> None:
        writer = Writer(path)
        try:
            writer.append(TensorDict({ROWS: torch.empty(0, dtype=torch.int64)}, [0]), "no rows")
            for first, rows in _rows(dataset, call):
                kept = torch.from_numpy(np.flatnonzero(_mask(call, rows, first)) + first)
                writer.append(TensorDict({ROWS: kept}, [len(kept)]), named(first, len(rows)))
            writer.finish()
        except BaseException:
            writer.give_up()
            raise

    entry = plan.obtain(build, load_from_cache=load_from_cache)
    rows = load_memmap(entry.path)[ROWS].clone().numpy()
    if len(rows) and not 0 <= rows.min() <= rows.max() < len(dataset):
        raise InvalidArgument("The result of this fingerprint is of other rows.", save=entry.path)
    # Named by which rows they are, and not by how they were found: what follows does not depend on that.
    return dataset._viewed(("filter", {"rows": digest_of(rows)}), rows=rows)


def _mask(call: _Call, rows: Any, first: int) -> np.ndarray[Any, Any]:
    """Of each row whether the function is true."""
    given, count = _given(call, rows), len(rows)
    which = named(first, count)
    if not call.batched:
        found = []
        for i, row in enumerate(given.unbind(0)):
            try:
                found.append(bool(call.function(row, first + i) if call.with_indices else call.function(row)))
            except Exception as error:
                raise _raised(call, named(first + i, 1), error) from error
        return np.array(found, np.bool_)
    indices = [torch.arange(first, first + count, device=call.device or "cpu")] if call.with_indices else []
    try:
        returned = call.function(given, *indices)
        mask = torch.as_tensor(returned).detach().cpu().numpy()
    except Exception as error:
        raise _raised(call, which, error) from error
    if mask.dtype != np.bool_ or mask.shape != (count,):
        raise TransformError(
            f"A batched function for filter returns {count} bools for {which}, not {mask.dtype} of shape"
            f" {list(mask.shape)}."
        )
    return mask
