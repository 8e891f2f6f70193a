"""Saves whose every byte follows from the number of its row, so that a look at one tells what it went through."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensordict
import torch
from tensordict import TensorClass, TensorDict

import tdgpu

TEMPORARY = ".meta.json.append.tmp"
NOTE = "what no row changes"

Key = tuple[str, ...]


class Torn(Exception):
    """A save that is not what any number of appends makes; the message says in what."""


class Spot(TensorClass):
    """The innermost level."""

    x: torch.Tensor
    y: torch.Tensor


class View(TensorClass):
    """A level with a level in it."""

    image: torch.Tensor
    at: Spot


class Record(TensorClass):
    """A tensorclass at the top, with a plain level in it."""

    step: torch.Tensor
    score: torch.Tensor
    more: TensorDict


@dataclass(frozen=True)
class Leaf:
    """A tensor of the save: its key, dtype, and the shape of one row (behind the batch dimensions)."""

    key: Key
    dtype: torch.dtype
    row_shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bed:
    """A kind of save.

    Attributes:
        leaves: ``step``, int64, holds the number of the row; what the others hold follows from it.
        levels: the directory of each level that has a row count, the top first, parents before children.
        trailing: the batch dimensions behind the first.
    """

    name: str
    leaves: tuple[Leaf, ...]
    levels: dict[Key, str]
    trailing: tuple[int, ...] = ()

    @property
    def top(self) -> str:
        return self.levels[()]

    @property
    def is_class(self) -> bool:
        """Whether the top is a tensorclass."""
        return bool(self.top)

    def rows(self, first: int, count: int) -> Any:
        """The rows from number ``first`` on, as the class that is saved."""
        return self.numbered(np.arange(first, first + count))

    def numbered(self, numbers: np.ndarray) -> Any:
        """Rows of these numbers."""
        batch = [len(numbers), *self.trailing]
        values: dict[str, Any] = {"step": None}
        for index, leaf in enumerate(self.leaves):
            level = values
            for part in leaf.key[:-1]:
                level = level.setdefault(part, {})
            shape = (len(numbers), *self.trailing, *leaf.row_shape)
            level[leaf.key[-1]] = (
                torch.from_numpy(self._bytes(index, numbers).reshape(-1)).view(leaf.dtype).reshape(shape)
            )
        return self._assemble(values, batch)

    def _assemble(self, values: dict[str, Any], batch: list[int]) -> Any:
        if self.is_class:
            return Record(**{**values, "more": TensorDict(values["more"], batch)}, batch_size=batch)
        spot = Spot(**values["view"].pop("at"), batch_size=batch)
        values["view"] = View(**values["view"], at=spot, batch_size=batch)
        values["deep"]["deeper"] = TensorDict(values["deep"]["deeper"], batch)
        values["deep"] = TensorDict(values["deep"], batch)
        result = TensorDict({}, batch)
        for key, value in values.items():
            result[key] = value
        result.set_non_tensor("note", NOTE)
        return result

    def _bytes(self, index: int, numbers: np.ndarray) -> np.ndarray:
        """The bytes of a leaf, of shape (rows, bytes of a row)."""
        leaf = self.leaves[index]
        elements = int(np.prod((*self.trailing, *leaf.row_shape), dtype=np.int64))
        if leaf.key == ("step",):
            return np.repeat(numbers.astype("<i8"), elements).view(np.uint8).reshape(len(numbers), 8 * elements)
        mixed = numbers.astype(np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
        mixed = mixed + np.arange(elements * leaf.dtype.itemsize, dtype=np.uint64) * np.uint64(97 + 2 * index)
        result = ((mixed >> np.uint64(11)) ^ np.uint64(index)).astype(np.uint8)
        return result & 1 if leaf.dtype == torch.bool else result

    def save(self, prefix: Path, rows: int) -> None:
        """Saves so many rows as tensordict does."""
        self.rows(0, rows).memmap(prefix)

    def count(self, loaded: Any, *, ordered: bool = True) -> int:
        """How many rows a loaded save has, after a look at all of them.

        Args:
            ordered: whether they are numbered from 0; otherwise each only has to fit the number that it holds.

        Raises:
            Torn: levels that differ, or a byte that is not the row's.
        """
        rows = int(loaded.batch_size[0])
        for key in self.levels:
            level = loaded.get(key, None) if key else loaded
            found = None if level is None else tuple(level.batch_size)
            if found != (rows, *self.trailing):
                raise Torn(f"the top has {rows} rows, the level {'/'.join(key) or 'top'!r} the batch size {found}")
        numbers = np.arange(rows)
        if not ordered:
            numbers = np.array(self.numbers(loaded), dtype=np.int64)
        for index, leaf in enumerate(self.leaves):
            expected = self._bytes(index, numbers)
            wrong = (self._seen(loaded, index).reshape(expected.shape) != expected).any(1)
            if wrong.any():
                raise Torn(f"of {rows} rows, row {int(wrong.argmax())} of {'/'.join(leaf.key)!r} has wrong bytes")
        if not self.is_class and loaded["note"] != NOTE:
            raise Torn(f"the note is {loaded['note']!r}")
        return rows

    def numbers(self, loaded: Any) -> list[int]:
        """The numbers of the rows."""
        steps = loaded.get("step")
        return [int(number) for number in (steps.flatten(1)[:, 0] if self.trailing else steps)]

    def _seen(self, loaded: Any, index: int) -> np.ndarray:
        tensor = loaded.get(self.leaves[index].key).as_subclass(torch.Tensor)
        return np.asarray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())

    def files(self) -> list[str]:
        """Where the leaves are, below the prefix."""
        return [os.path.join(self.levels[leaf.key[:-1]], f"{leaf.key[-1]}.memmap") for leaf in self.leaves]


NESTED = Bed(
    "nested",
    (
        Leaf(("step",), torch.int64),
        Leaf(("obs",), torch.float32, (3,)),
        Leaf(("deep", "flag"), torch.bool),
        Leaf(("deep", "deeper", "half"), torch.bfloat16, (2,)),
        Leaf(("deep", "deeper", "byte"), torch.uint8, (5,)),
        Leaf(("view", "image"), torch.float16, (2, 2)),
        Leaf(("view", "at", "x"), torch.float64),
        Leaf(("view", "at", "y"), torch.complex64),
    ),
    {
        (): "",
        ("deep",): "deep",
        ("deep", "deeper"): "deep/deeper",
        ("view",): "view/_tensordict",
        ("view", "at"): "view/_tensordict/at/_tensordict",
    },
)

CLASS = Bed(
    "tensorclass",
    (
        Leaf(("step",), torch.int64),
        Leaf(("score",), torch.float32),
        Leaf(("more", "short"), torch.int16, (3,)),
        Leaf(("more", "wide"), torch.float64, (2,)),
    ),
    {(): "_tensordict", ("more",): "_tensordict/more"},
    trailing=(2,),
)


def temporaries(prefix: Path) -> list[Path]:
    """The temporary metadata that lies below the prefix."""
    return sorted(prefix.rglob(TEMPORARY))


def recover_by_hand(prefix: Path, bed: Bed) -> None:
    """What tensordict's documentation says to do after an append was killed."""
    pending = temporaries(prefix)
    if (prefix / bed.top / TEMPORARY) in pending:
        for path in pending:
            path.unlink()
    else:
        for path in pending:
            path.rename(path.with_name("meta.json"))


def halfway(prefix: Path, bed: Bed, old: int, new: int, renamed: int, *, cut: bool = False) -> None:
    """A save as an append from ``old`` to ``new`` rows leaves it if it is killed after so many renames.

    Args:
        renamed: how many levels have the new metadata; 0: nothing is committed.
        cut: with ``renamed=0``: the last temporary file is only half written.
    """
    bed.save(prefix, new)
    for index, directory in enumerate(bed.levels.values()):
        if index < renamed:
            continue
        meta = prefix / directory / "meta.json"
        content = json.loads(meta.read_text())
        half = cut and index == len(bed.levels) - 1
        meta.with_name(TEMPORARY).write_text(meta.read_text()[: 40 if half else None])
        for entry in (content, *content.values()):
            if isinstance(entry, dict) and "shape" in entry:
                entry["shape"][0] = old
        meta.write_text(json.dumps(content))


def look(prefix: Path, bed: Bed, *, plain: bool = False) -> int:
    """Loads a save and checks every byte: the number of its rows; -1 if there is no save.

    Args:
        plain: by tensordict itself instead of tdgpu.

    Raises:
        Torn: it doesn't load, or not as whole rows.
    """
    loader = "tensordict" if plain else "tdgpu"
    try:
        loaded = tensordict.load_memmap(prefix) if plain else tdgpu.load_memmap(prefix)
    except tdgpu.errors.SaveNotFound:
        return -1
    except Exception as error:
        if plain and not (prefix / "meta.json").exists():
            return -1
        raise Torn(f"{loader} does not load it: {error!r}") from error
    try:
        return bed.count(loaded)
    except Exception as error:  # a level or leaf that is not there, or of another size, among them
        raise Torn(f"as {loader} shows it: {error}") from error


def snapshot(prefix: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and bytes of every file and directory below the prefix."""
    return {
        str(path.relative_to(prefix)): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted((prefix, *prefix.rglob("*")))
    }
