"""Transforms: a map's first run and its result found again, against Hugging Face ``datasets`` on the same rows and with
the same function; and what is computed again when a function is edited.

Without ``datasets`` (which is no part of the extra ``bench``), the rows that need it are left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import tdgpu
from benchmarks.measure import Row, alternate, seconds
from benchmarks.saves import MiB
from tdgpu.cache.remembered import SETTLED_NS
from tdgpu.options import options

WIDTH = 1024  # numbers of 4 bytes in a row
BATCH = 1000
SHARE = 50.0  # milliseconds
SHAPES = ((65_536, WIDTH, True), (200_000, 16, True), (20_000, 16, False))  # rows, their numbers, whether in batches


def _function(rows: Any) -> dict[str, Any]:
    return {"y": rows["x"] * 2 + 1}


def _save(path: Path, rows: int, width: int = WIDTH) -> None:
    """Rows whose every number tells which row it is of, a few at a time."""
    empty = TensorDict({"x": torch.zeros(()).expand(rows, width), "label": torch.arange(rows)}, [rows])
    saved = empty.memmap_like(path)
    saved["label"].copy_(torch.arange(rows))
    for first in range(0, rows, 4096):
        part = saved["x"][first : first + 4096]
        part.copy_((torch.arange(first, first + len(part)) % 9973).float().view(-1, 1).expand(part.shape))


def _check(result: Any, rows: int, width: int = WIDTH) -> None:
    """Asserts that a result has the right bytes, here and there."""
    assert len(result) == rows, f"{len(result)} rows, not {rows}"
    for row in (0, rows // 2 + 7, rows - 1):
        found = result[row]
        assert int(found["label"]) == row and len(found["x"]) == width, f"a wrong row {row}"
        assert bool((torch.as_tensor(found["y"]) == row % 9973 * 2 + 1).all()), f"wrong bytes in row {row}"


def _settle(path: Path) -> None:
    """Waits until what was written last is old enough for its digests to be remembered."""
    last = max(file.stat().st_ctime for file in path.rglob("*") if file.is_file())
    time.sleep(max(0.0, SETTLED_NS / 1e9 + 1 - (time.time() - last)))


def hit(directory: Path, *, quick: bool) -> list[Row]:
    """A cached map whose result has 1 GB: how long it takes until it is open, beyond hashing."""
    rows = 2_000 if quick else 125_000  # of 8 KiB
    _save(directory / "rows", rows)
    with options(cache=str(directory / "cache")):

        def opened() -> Any:
            return tdgpu.MemmapDataset(directory / "rows").map(_function, batched=True, batch_size=BATCH)

        _check(opened(), rows)
        _settle(directory / "cache" / "entries")
        opened()  # hashes, and remembers it
        taken = sorted(seconds(opened) for _ in range(9))[4]
        _check(opened(), rows)
        nbytes = sum(file.stat().st_size for file in opened().prefix.rglob("*.memmap"))
    shutil.rmtree(directory / "cache")
    return [
        Row(
            case=f"map found again, {nbytes / 1e9:.2f} GB, its bytes remembered",
            unit="ms",
            ours=taken * 1e3,
            reference=SHARE,
            reference_is="bound",
            goal=1.0,
            at_least=False,
            checked="rows of the result",
        )
    ]


def against_datasets(directory: Path, *, quick: bool) -> list[Row]:
    """The first run of a map, and its result found again: of batches of large and of small rows, and row by row."""
    if importlib.util.find_spec("datasets") is None:
        return []
    shapes = ((2_000, WIDTH, True), (2_000, 16, False)) if quick else SHAPES
    return [row for number, shape in enumerate(shapes) for row in _compare(directory / str(number), quick, *shape)]


def _compare(directory: Path, quick: bool, rows: int, width: int, batched: bool) -> list[Row]:
    _save(directory / "ours", rows, width)
    runs = [
        _Theirs(directory / "theirs", directory / "ours", rows, width, batched, name) for name in ("torch", "numpy")
    ]
    fastest = min(runs, key=lambda run: seconds(run.first))
    with options(cache=str(directory / "cache")):

        def first() -> Any:
            shutil.rmtree(directory / "cache" / "entries", ignore_errors=True)
            return found()

        def found() -> Any:
            return tdgpu.MemmapDataset(directory / "ours").map(_function, batched, BATCH)

        _settle(directory / "ours")
        once = alternate(first, fastest.first, 1 if quick else 3)
        _settle(directory / "cache" / "entries")
        again = alternate(found, fastest.found, 2 if quick else 7)
        _check(found(), rows, width)
        _check(fastest.found(), rows, width)
    how = f"{rows} rows of {width * 4} B, {f'batches of {BATCH}' if batched else 'one by one'}"
    shared: dict[str, Any] = {"reference_is": f"datasets, format {fastest.name}", "checked": "rows of both"}
    return [
        Row(f"map, first run, {how}", "rows/s", rows / once[0], rows / once[1], goal=3.0, at_least=True, **shared),
        Row(f"map, found again, {how}", "ms", again[0] * 1e3, again[1] * 1e3, goal=1.0, at_least=False, **shared),
    ]


class _Theirs:
    """The same rows and function in ``datasets``."""

    def __init__(self, place: Path, ours: Path, rows: int, width: int, batched: bool, name: str) -> None:
        datasets: Any = importlib.import_module("datasets")

        self._datasets: Any = datasets
        datasets.disable_progress_bars()
        self.name = name
        self._batched = batched
        self._path = str(place / name)
        held = TensorDict.load_memmap(ours)

        def made() -> Any:
            for row in range(rows):
                yield {"x": held["x"][row].numpy(), "label": row}

        features = datasets.Features({
            "x": datasets.Sequence(datasets.Value("float32"), length=width), "label": datasets.Value("int64"),
        })  # fmt: skip
        whole: Any = datasets.Dataset.from_generator(made, features=features, cache_dir=str(place / "made" / name))
        whole.save_to_disk(self._path)

    def first(self) -> Any:
        return self._map(load_from_cache_file=False)

    def found(self) -> Any:
        return self._map(load_from_cache_file=True)

    def _map(self, **arguments: Any) -> Any:
        rows = self._datasets.load_from_disk(self._path).with_format(self.name)
        return rows.map(_function, batched=self._batched, batch_size=BATCH, **arguments)


def edited(directory: Path, *, quick: bool) -> list[Row]:
    """Three transforms one after the other: all of them, and when the last function has been edited."""
    rows = 2_000 if quick else 65_536
    _save(directory / "steps", rows)
    called: list[str] = []

    def run(last: Callable[[Any], Any]) -> Any:
        made: Any = tdgpu.MemmapDataset(directory / "steps")
        for name, function in (("first", _function), ("second", lambda batch: {"z": batch["y"] * 3}), ("third", last)):
            before = set(entries.iterdir()) if entries.exists() else set()
            made = made.map(function, batched=True, batch_size=BATCH, remove_keys=["x"] if name == "first" else None)
            called.extend([name] * len(set(entries.iterdir()) - before))
        return made

    with options(cache=str(directory / "cache")):
        entries = directory / "cache" / "entries"
        whole = seconds(lambda: run(lambda batch: {"n": batch["label"]}))
        assert called == ["first", "second", "third"], called
        _settle(entries)
        run(lambda batch: {"n": batch["label"]})  # hashes, and remembers it
        assert len(called) == 3, called
        again = seconds(lambda: run(lambda batch: {"n": batch["label"] + 1}))
        assert called[3:] == ["third"], called
    return [
        Row(
            case=f"three maps of {rows * WIDTH * 4 // MiB} MiB, the last function edited",
            unit="s",
            ours=again,
            reference=whole,
            reference_is="all three",
            goal=0.6,
            at_least=False,
            checked="one is computed",
        )
    ]
