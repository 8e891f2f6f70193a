"""What rows add to a save: the files that grow, the metadata that counts, and whether given rows fit."""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from functools import cached_property
from numbers import Number
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)
from torch._subclasses import FakeTensor

from tdgpu.errors import InvalidArgument, InvalidArgumentType, TdgpuError
from tdgpu.layout import collector, keys
from tdgpu.layout.files import Where
from tdgpu.layout.save import Save
from tdgpu.layout.tree import Key, Kind, Leaf, Level, Shape

__all__ = ["Growing", "GrowingLeaf", "GrowingLevel", "growing", "match"]

_dtype, _layout, _shape = attrgetter("dtype"), attrgetter("layout"), attrgetter("shape")


class GrowingLeaf:
    """A leaf to whose file rows are added.

    Attributes:
        key: nested key, as in ``td[key]``.
        file: path of its file.
        dtype: dtype of the elements.
        row_shape: shape of one row.
        row_nbytes: bytes of one row, at least 1.
    """

    __slots__ = ("dtype", "file", "key", "row_nbytes", "row_shape")

    def __init__(self, leaf: Leaf, file: str, row_shape: Shape, row_nbytes: int) -> None:
        self.key = leaf.key
        self.file = file
        self.dtype = leaf.dtype
        self.row_shape = row_shape
        self.row_nbytes = row_nbytes

    def __repr__(self) -> str:
        return f"GrowingLeaf({'/'.join(self.key)!r}, {self.row_shape}, {self.dtype})"


class GrowingLevel:
    """A level whose metadata counts rows.

    Attributes:
        key: nested key of the level; a tensorclass's is that of its tensors, too.
        directory: where its ``meta.json`` is.
    """

    __slots__ = ("_pieces", "directory", "key")

    def __init__(self, key: Key, directory: str, meta: dict[str, Any]) -> None:
        self.key = key
        self.directory = directory
        self._pieces = _template(meta)

    def metadata(self, rows: int) -> bytes:
        """The contents of ``meta.json`` for ``rows`` rows in all: byte for byte what tensordict's append writes."""
        return str(rows).join(self._pieces).encode()

    def __repr__(self) -> str:
        return f"GrowingLevel({'/'.join(self.key)!r}, {self.directory!r})"


class Growing:
    """A save that rows can be added to.

    Attributes:
        prefix: the directory that the caller named.
        rows: committed rows.
        batch_shape: the batch dimensions after the first, which rows must have, too.
        levels: the levels with metadata, the top one first, parents before children.
        leaves: the leaves with bytes in their rows, all of a level before those of its children.
        is_unfinished: whether the last commit was cut short after it counted: it must be completed before the next.
        seen: what identifies the top level's metadata as last written (see :mod:`tdgpu.layout.commit`).
        is_plain: whether everything here follows from the ``meta.json`` of the levels: there are no classes, no
            non-tensor values, and no keys that files may be named after in two ways.
    """

    def __init__(self, prefix: str, rows: int, batch_shape: Shape) -> None:
        self.prefix = prefix
        self.rows = rows
        self.batch_shape = batch_shape
        self.levels: list[GrowingLevel] = []
        self.leaves: list[GrowingLeaf] = []
        self.plan: _Plan
        self.is_unfinished = False
        self.seen: tuple[int, int, int] | None = None
        self.is_plain = True

    @cached_property
    def row_sizes(self) -> np.ndarray:
        """Of each leaf the bytes of one row, uint64."""
        return np.array([leaf.row_nbytes for leaf in self.leaves], np.uint64)

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes of one row in all leaves."""
        return int(self.row_sizes.sum())

    @cached_property
    def groups(self) -> list[list[int]]:
        """The numbers of the leaves of one dtype and row shape, those of larger elements first."""
        groups: dict[tuple[torch.dtype, Shape], list[int]] = {}
        for number, leaf in enumerate(self.leaves):
            groups.setdefault((leaf.dtype, leaf.row_shape), []).append(number)
        return [groups[key] for key in sorted(groups, key=lambda key: -key[0].itemsize)]

    def __repr__(self) -> str:
        return f"Growing({self.prefix!r}, {self.rows} rows, {len(self.leaves)} leaves)"


def _template(meta: dict[str, Any]) -> list[str]:
    """The JSON text of a level's metadata, cut where the number of rows stands: a commit only joins it."""
    mark = 10**17
    while True:
        texts: dict[int, str] = {}  # entries that say the same may be one object: that is turned into text once
        parts, count = [], 0
        for key, entry in meta.items():
            counts = key == "shape" or (isinstance(entry, dict) and "dtype" in entry and "shape" in entry)
            if id(entry) not in texts:
                if key == "shape":
                    entry = [mark, *entry[1:]]
                elif counts:
                    entry = {**entry, "shape": [mark, *entry["shape"][1:]]}
                texts[id(meta[key])] = json.dumps(entry)
            parts.append(f"{json.dumps(key)}: {texts[id(meta[key])]}")
            count += counts
        pieces = f"{{{', '.join(parts)}}}".split(str(mark))
        if len(pieces) == count + 1:
            return pieces
        mark += 1  # a key looks like it


# --- a save ----------------------------------------------------------------------------------------------------------


def growing(save: Save) -> Growing:
    """What rows would add to ``save``.

    Args:
        save: the whole of a saved directory, as :func:`tdgpu.layout.reader.read` gives it, with its non-tensor contents
            read (:func:`tdgpu.layout.objects.resolve`). Its leaves' files need not have been checked.

    Returns:
        The files and metadata that grow. The leaves' files have not been looked at: who opens them to write does that.

    Raises:
        InvalidArgument: it cannot grow: an archive, a save without a batch dimension or of a class that does not grow;
            or a directory or ``meta.json`` of it is a symbolic link (a ValueError).
        FormatError: its levels or leaves have different numbers of rows.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict
    >>> from tdgpu.layout import objects, reader
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = TensorDict(a=torch.zeros(3, 2), batch_size=[3]).memmap(path)
    ...     save = reader.read(path)
    ...     objects.resolve(save, None)
    ...     grows = growing(save)
    >>> grows.rows, grows.leaves, grows.leaves[0].row_nbytes
    (3, [GrowingLeaf('a', (2,), torch.float32)], 8)
    """
    root = save.root
    where = Where(save.prefix, root.key, root.path)
    if save.is_archive:
        raise where.error(InvalidArgument, "An archive cannot grow: unpack it with unpack_memmap first.")
    top = root.children["_tensordict"] if root.kind is Kind.TENSORCLASS else root
    if top.kind is not Kind.TENSORDICT:
        raise where.error(InvalidArgument, f"A saved {_described(root)} cannot grow.")
    if not top.batch_size:
        raise where.error(
            InvalidArgument, "Rows are added along the first batch dimension, but this save has no batch dimension."
        )
    grower = _Grower(save.prefix, Growing(save.prefix, top.batch_size[0], top.batch_size[1:]))
    with collector.paused():
        grower.growing.plan = grower.level(root)
    return grower.growing


def _described(level: Level) -> str:
    return f"{level.kind.value} ({level.cls.__qualname__})"


class _Plan:
    """What the rows of one level must be.

    Attributes:
        where: the level, for errors.
        cls: the tensorclass that they must be instances of, or None.
        batch_shape: their batch dimensions after the first.
        shapes: the different shapes that one row has in the leaves.
        keys, dtypes, which: of each leaf with bytes in its rows: key, dtype and which of ``shapes``.
        hollow: the same of the leaves without, as triples.
        values: the non-tensor values that they must be equal to.
        children: the plans of the levels below.
        count: how many entries that makes.
    """

    __slots__ = ("batch_shape", "children", "cls", "count", "dtypes", "hollow", "keys", "shapes", "values", "where",
                 "which")  # fmt: skip

    def __init__(self, where: Where, cls: type | None, batch_shape: Shape) -> None:
        self.where = where
        self.cls = cls
        self.batch_shape = batch_shape
        self.shapes: list[Shape] = []
        self.keys: list[str] = []
        self.dtypes: list[torch.dtype] = []
        self.which: list[int] = []
        self.hollow: list[tuple[str, torch.dtype, int]] = []
        self.values: dict[str, Any] = {}
        self.children: dict[str, _Plan] = {}
        self.count = 0

    def error(self, key: str | None, message: str) -> TdgpuError:
        """The error for the entry ``key`` of this level, or for the level itself."""
        at = self.where.key if key is None else (*self.where.key, key)
        return InvalidArgument(message, save=self.where.save, key=at)


class _Grower:
    """One look at one save."""

    def __init__(self, save: str, found: Growing) -> None:
        self.save = save
        self.growing = found

    def level(self, level: Level, cls: type | None = None) -> _Plan:
        """The plan of a level, with what it and those below add to ``growing``."""
        self._refuse_link(level)
        if level.kind is Kind.TENSORCLASS:
            self.growing.is_plain = False
            return self.level(level.children["_tensordict"], level.cls)
        where = Where(self.save, level.key, os.path.join(level.path, "meta.json"))
        if level.kind is not Kind.TENSORDICT:
            raise where.error(InvalidArgument, f"A saved {_described(level)} cannot grow.")
        rows, batch_size = self.growing.rows, level.batch_size
        if not batch_size or batch_size[0] != rows:
            raise where.malformed(
                f"A level of batch size {list(batch_size or ())} does not have the {rows} rows of the level at the top."
            )
        if stat.S_ISLNK(os.lstat(where.file).st_mode):
            raise where.error(InvalidArgument, "This is a symbolic link: nothing is written through it.")
        plan = _Plan(where, cls, batch_size[1:])
        self.growing.levels.append(GrowingLevel(level.key, level.path, level.meta))
        self.growing.is_plain = self.growing.is_plain and keys.all_plain(level.meta)
        self._leaves(level, plan)
        for key, child in level.children.items():
            if child.kind is Kind.NON_TENSOR_DATA and issubclass(child.cls, NonTensorData):
                plan.values[key] = child.objects.get("data")
                self.growing.is_plain = False
            else:
                plan.children[key] = self.level(child)
        plan.count = len(level.leaves) + len(level.children)
        return plan

    def _refuse_link(self, level: Level) -> None:
        # The prefix itself may be a link: that is the caller's own way of naming it.
        if level.path != self.save and os.path.islink(level.path):
            raise Where(self.save, level.key, level.path).error(
                InvalidArgument, "The directory of this level is a symbolic link: nothing is written through it."
            )

    def _leaves(self, level: Level, plan: _Plan) -> None:
        which: dict[Shape, int] = {}
        # Most leaves share a few shapes and dtypes.
        known: dict[tuple[Shape, torch.dtype], tuple[Shape, int, int]] = {}
        for key, leaf in level.leaves.items():
            seen = known.get((leaf.shape, leaf.dtype))
            if seen is None or leaf.sizes is not None:
                row_shape = self._row_shape(level, leaf)
                row_nbytes = math.prod(row_shape) * leaf.dtype.itemsize
                seen = row_shape, row_nbytes, which.setdefault(row_shape, len(which))
                known[leaf.shape, leaf.dtype] = seen
            row_shape, row_nbytes, number = seen
            if row_nbytes:
                plan.keys.append(key)
                plan.dtypes.append(leaf.dtype)
                plan.which.append(number)
                # A leaf without elements has no file yet, or one that an append has left behind.
                file = f"{level.path}/{keys.encode(key)}.memmap" if leaf.extent is None else leaf.extent.file
                self.growing.leaves.append(GrowingLeaf(leaf, file, row_shape, row_nbytes))
            else:
                plan.hollow.append((key, leaf.dtype, number))
        plan.shapes = list(which)

    def _row_shape(self, level: Level, leaf: Leaf) -> Shape:
        where = Where(self.save, leaf.key, level.path)
        if leaf.is_nested:
            raise where.error(InvalidArgument, "A nested tensor cannot grow.")
        if leaf.shape[:1] != (self.growing.rows,):
            raise where.malformed(
                f"A leaf of shape {list(leaf.shape)} does not have the {self.growing.rows} rows of its level."
            )
        return leaf.shape[1:]


# --- rows ------------------------------------------------------------------------------------------------------------


def match(growing: Growing, rows: Any) -> tuple[int, list[torch.Tensor]]:
    """Checks that ``rows`` can be added to the save, as ``tensordict.append_memmap`` does.

    Nothing is read from the tensors, and no device is waited for.

    Args:
        growing: the save.
        rows: a tensor collection with the keys, classes, dtypes and trailing shapes of the save, on any devices. Its
            non-tensor values must be those of the save (NaN is NaN here). Where a tensor is saved, an array of another
            library that has ``__dlpack__`` (CuPy, NumPy) counts as one.

    Returns:
        How many rows there are; and their tensors of shape ``(count, *leaf.row_shape)``, one for each of
        ``growing.leaves``, in that order, each a plain ``torch.Tensor``.

    Raises:
        InvalidArgumentType: ``rows`` is no tensor collection (a TypeError).
        InvalidArgument: they do not fit; it names the entry (a ValueError).
    """
    if not is_tensor_collection(rows):
        raise InvalidArgumentType(
            f"rows must be a tensordict or a tensorclass, got a {type(rows).__name__}.", save=growing.prefix
        )
    if not rows.batch_dims:
        raise growing.plan.error(
            None,
            "Rows are added along the first batch dimension, but these rows have no batch dimension. A single row is"
            " rows.unsqueeze(0).",
        )
    count: int = rows.batch_size[0]
    tensors: list[torch.Tensor] = []
    _match(growing.plan, rows, count, tensors)
    return count, tensors


def _match(plan: _Plan, rows: Any, count: int, tensors: list[torch.Tensor]) -> None:
    """Checks the rows of one level and those below it, and appends their tensors to ``tensors``."""
    if rows.batch_size[1:] != plan.batch_shape:
        raise plan.error(
            None,
            f"Rows of batch size {list(rows.batch_size)} do not fit: beyond the first, the saved batch dimensions are"
            f" {list(plan.batch_shape)}.",
        )
    if plan.cls is not None:
        given: type = type(rows)
        if given is not plan.cls:
            raise plan.error(None, f"A {given.__name__} cannot be added to a saved {plan.cls.__name__}.")
        rows = rows._tensordict
    # The entries of the class that is nearly always used are at hand: a call for each would take most of the time.
    entries: dict[str, Any]
    if type(rows) is TensorDict:
        entries = rows._tensordict
    elif is_tensorclass(rows):
        raise plan.error(None, f"A {type(rows).__name__} cannot be added to a saved TensorDict.")
    else:
        entries = {key: rows._get_str(key, None) for key in rows.keys()}  # noqa: SIM118 - iterating gives rows
    if len(entries) != plan.count:
        raise _other_keys(plan, entries)
    shapes = [(count, *shape) for shape in plan.shapes]
    found: list[Any] = list(map(entries.get, plan.keys))
    if not _all_fit(plan, found, shapes):
        found = [
            _tensor(plan, entries, key, dtype, shapes[which])
            for key, dtype, which in zip(plan.keys, plan.dtypes, plan.which, strict=True)
        ]
    tensors += found
    for key, dtype, which in plan.hollow:
        _tensor(plan, entries, key, dtype, shapes[which])
    for key, saved in plan.values.items():
        if key not in entries:
            raise _other_keys(plan, entries)
        if not _holds(entries[key], saved):
            given = entries[key].data if isinstance(entries[key], NonTensorData) else entries[key]
            raise plan.error(
                key,
                f"The saved value {reprlib.repr(saved)} stays as it is, so the rows must hold the same, not"
                f" {reprlib.repr(given)}.",
            )
    for key, child in plan.children.items():
        if key not in entries:
            raise _other_keys(plan, entries)
        value = entries[key]
        if not is_tensor_collection(value) or is_non_tensor(value):
            raise plan.error(key, f"A {type(value).__name__} cannot be added to a saved tensor collection.")
        _match(child, value, count, tensors)


def _all_fit(plan: _Plan, found: list[Any], shapes: list[Shape]) -> bool:
    """Whether all are plain tensors of the dtypes and shapes of the level's leaves.

    Rows of a thousand leaves come here many times a second: one question to all tensors, instead of all to each.
    """
    if not found:
        return True
    if set(map(type, found)) != {torch.Tensor}:
        return False
    if list(map(_dtype, found)) != plan.dtypes or set(map(_layout, found)) != {torch.strided}:
        return False
    try:
        return list(map(_shape, found)) == list(map(shapes.__getitem__, plan.which))
    except RuntimeError:  # a nested tensor has no shape
        return False


def _other_keys(plan: _Plan, entries: dict[str, Any]) -> TdgpuError:
    saved = {*plan.keys, *(leaf[0] for leaf in plan.hollow), *plan.values, *plan.children}
    missing, unknown = sorted(saved - entries.keys()), sorted(entries.keys() - saved)
    return plan.error(
        None,
        "The rows have other keys than the save:"
        + (f" without {reprlib.repr(missing)}," if missing else "")
        + (f" with {reprlib.repr(unknown)}," if unknown else "")
        + f" {len(entries)} entries instead of {plan.count}.",
    )


def _tensor(plan: _Plan, entries: dict[str, Any], key: str, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """The tensor of an entry that is not obviously one that fits."""
    if key not in entries:
        raise _other_keys(plan, entries)
    value = entries[key]
    if isinstance(value, NonTensorData) and not isinstance(value.data, torch.Tensor):
        value = _from_array(plan, key, value.data)
    if not isinstance(value, torch.Tensor) or is_tensor_collection(value):
        raise plan.error(key, f"A {type(value).__name__} cannot be added to a saved tensor.")
    is_made_of_others = hasattr(value, "__tensor_flatten__") or hasattr(value, "full_tensor")
    if value.is_nested or value.layout is not torch.strided or is_made_of_others or isinstance(value, FakeTensor):
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        if is_made_of_others or isinstance(value, FakeTensor):
            kind = f"a {type(value).__name__}, without bytes of its own,"
        raise plan.error(key, f"A tensor that is {kind} cannot be added to a saved tensor.")
    if value.dtype is not dtype or value.shape != shape:
        raise plan.error(
            key,
            f"Rows of dtype {value.dtype} and shape {list(value.shape)} do not fit: {dtype} and {list(shape)} would.",
        )
    # Without its Python class, whose operations may be slow or of its own.
    return value if type(value) is torch.Tensor else value.detach().as_subclass(torch.Tensor)


def _from_array(plan: _Plan, key: str, array: Any) -> Any:
    """The tensor that looks at an array of another library; what is no array, as it is."""
    if not hasattr(array, "__dlpack__"):
        return array
    try:
        return torch.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise plan.error(key, f"This {type(array).__name__} cannot be taken as a tensor: {error}") from error


def _holds(new: Any, saved: Any) -> bool:
    """Whether ``new`` is the non-tensor value ``saved``, or a stack of nothing else."""
    if isinstance(new, NonTensorData):
        try:
            return _is_same(new.data, saved)
        except Exception:  # of values that cannot be compared, nobody can say that they are equal
            return False
    return isinstance(new, NonTensorStack) and all(_holds(member, saved) for member in new.tensordicts)


def _is_same(new: Any, saved: Any) -> bool:
    """``==``, but NaN is NaN, also inside of lists, tuples and dicts."""
    if isinstance(new, Number) and isinstance(saved, Number):
        return bool(new == saved or (new != new and saved != saved))
    if type(new) is type(saved) and type(new) in (list, tuple):
        return len(new) == len(saved) and all(map(_is_same, new, saved))
    if type(new) is type(saved) is dict:
        return new.keys() == saved.keys() and all(_is_same(new[key], saved[key]) for key in saved)
    return bool(new == saved)
