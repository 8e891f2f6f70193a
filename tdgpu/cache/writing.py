"""The save that a transform's rows are written to, as they come."""

from __future__ import annotations

import json
import os
from typing import Any

from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack

from tdgpu.append.appender import MemmapAppender
from tdgpu.cache.failed import writing
from tdgpu.cache.results import VALUES, is_class, is_entries, is_equal
from tdgpu.errors import TransformError
from tdgpu.layout import keys
from tdgpu.layout.tree import Key

__all__ = ["Writer"]


class Writer:
    """A new save that rows are added to.

    Tensors go to the disk as they come. Non-tensor values of a TensorDict are kept in memory until the end, for
    tensordict saves them in one piece; those that are the same in all rows are one value.

    Args:
        path: the directory, which is not there.

    Attributes:
        rows: how many were added.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._appender: MemmapAppender | None = None
        self._columns: dict[Key, _Column] = {}
        self._order: dict[Key, list[str]] = {}  # of the keys of each level that has columns
        self.rows = 0

    def append(self, rows: Any, which: str) -> None:
        """Adds rows.

        Args:
            rows: a TensorDict or tensorclass, on any device, with the structure of those before.
            which: for messages.

        Raises:
            TransformError: they do not fit those before, or cannot be stored.
            AppendError: there is no room.
        """
        with writing(which):
            values: dict[Key, Any] = {}
            order: dict[Key, list[str]] = {}
            rows = _without_values(rows, (), values, order)
            if self._appender is None:
                # Whether all of it survives a power failure is for who moves it to where it belongs.
                self._appender = MemmapAppender.create(self._path, rows, durable=False)
                self._columns = {key: _Column() for key in values}
                self._order = order
            elif values.keys() != self._columns.keys():
                other = next(iter(values.keys() ^ self._columns.keys()))
                raise TransformError(f"Not all rows have a value here that is no tensor ({which}).", key=other)
            self._appender.append(rows)
            count = int(rows.batch_size[0])
            for key, value in values.items():
                self._columns[key].add(value, count)
            self.rows += count

    def finish(self) -> None:
        """Completes the save. There must have been a batch, if only of no rows."""
        assert self._appender is not None
        self._appender.close()
        for level, order in self._order.items():
            directory = os.path.join(self._path, *map(keys.encode, level))
            added = {}
            for name in order:
                column = self._columns.get((*level, name))
                if column is not None:
                    held = column.held(self.rows)
                    held.memmap(os.path.join(directory, keys.encode(name)))
                    added[name] = {"type": type(held).__name__}
            _add(os.path.join(directory, "meta.json"), added, order)

    def give_up(self) -> None:
        """Ends what is under way; what has been written is for others to remove."""
        if self._appender is not None:
            self._appender.close()


def _without_values(rows: Any, at: Key, values: dict[Key, Any], order: dict[Key, list[str]]) -> Any:
    """The rows without the non-tensor values of their TensorDicts, which are added to ``values``; and to ``order``, of
    each level that has some, the order of its keys."""
    if is_class(rows):
        held = rows._tensordict
        if not isinstance(held, LazyStackedTensorDict):
            return rows
        return type(rows)._from_tensordict(held.contiguous(), dict(rows._non_tensordict))
    if isinstance(rows, LazyStackedTensorDict):
        rows = rows.contiguous()
    found: dict[str, Any] = {}
    for key, value in list(rows.items()):
        if isinstance(value, VALUES):
            full = (*at, key)
            values[full] = value
            found[key] = None
            order[at] = list(rows.keys())
        elif is_entries(value):
            below = _without_values(value, (*at, key), values, order)
            if below is not value:
                found[key] = below
    if not found:
        return rows
    rows = rows.copy()
    for key, value in found.items():
        if value is None:
            rows.del_(key)
        else:
            rows._set_str(key, value, inplace=False, validated=True)
    return rows


class _Column:
    """The non-tensor values of all rows under one key, those that repeat as one."""

    def __init__(self) -> None:
        self._runs: list[tuple[Any, int]] = []
        self._kind: type = NonTensorData

    def add(self, values: Any, count: int) -> None:
        if isinstance(values, NonTensorStack):
            for value in values.tolist():
                self._add(value, 1)
        else:
            self._kind = type(values)
            self._add(values.data, count)

    def _add(self, value: Any, count: int) -> None:
        if self._runs and is_equal(self._runs[-1][0], value):
            self._runs[-1] = self._runs[-1][0], self._runs[-1][1] + count
        elif count or not self._runs:
            self._runs.append((value, count))

    def held(self, rows: int) -> Any:
        """All of them, as tensordict holds them."""
        runs = [run for run in self._runs if run[1]] or self._runs or [(None, 0)]
        if len(runs) == 1:
            return self._kind(data=runs[0][0], batch_size=[rows])
        return NonTensorStack(*(NonTensorData(value) for value, count in runs for _ in range(count)))


def _add(file: str, added: dict[str, Any], order: list[str]) -> None:
    """Adds entries to the metadata of a level, so that its keys are in order."""
    with open(file, encoding="utf-8") as stream:
        meta = json.load(stream)
    meta |= added
    with open(file, "w", encoding="utf-8") as stream:
        json.dump({**{key: meta[key] for key in order}, **meta}, stream)
