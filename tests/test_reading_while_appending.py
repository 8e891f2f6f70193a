"""What readers see while rows are appended: one number of rows at every level, never an error, never a wait."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from compare import assert_same
from saves import SAVES
from tensordict import LazyStackedTensorDict, TensorDict
from test_commit import (
    KINDS,
    NEW,
    OLD,
    half_done,
    nested,
    read,
    read_levels,
    rows_in,
    state_of,
    tensorclass,
    write_rows,
)

import tdgpu
from tdgpu.errors import TdgpuError
from tdgpu.layout import files, reader
from tdgpu.layout.commit import TEMPORARY, advance, recover
from tdgpu.layout.growth import Growing
from tdgpu.layout.store import FileStore

# Of each kind: levels to load alone, with the part of the rows that they hold.
PARTS: dict[str, dict[Any, Callable[[int, int], Any]]] = {
    "nested": {
        "n": lambda first, count: nested(first, count)["n"],
        ("n", "m"): lambda first, count: nested(first, count)["n", "m"],
        "p": lambda first, count: nested(first, count)["p"],
    },
    "tensorclass": {
        "x": lambda first, count: tensorclass(first, count).x,
        ("_tensordict", "y"): lambda first, count: tensorclass(first, count).y,
    },
}


def part_rows(path: Path, subpath: Any, make: Callable[[int, int], Any]) -> int:
    return rows_in(path, make, lambda prefix: tdgpu.load_memmap(prefix, subpath=subpath))


# --- killed between the renames ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_after_an_append_that_was_killed(tmp_path: Path, kind: str) -> None:
    KINDS[kind](0, OLD).memmap(tmp_path / "base")
    write_rows(read(tmp_path / "base"), KINDS[kind](OLD, NEW - OLD))
    levels = len(read(tmp_path / "base").levels)
    for renamed in range(-1, levels):
        path = tmp_path / str(renamed)
        shutil.copytree(tmp_path / "base", path)
        half_done(path, kind, committed=renamed >= 0, renamed=max(renamed, 0))
        rows = NEW if renamed >= 0 else OLD
        before = state_of(path)
        if 0 <= renamed < levels - 1:
            with pytest.raises(RuntimeError):  # what it is about
                rows_in(path, KINDS[kind], tensordict.load_memmap)
        assert rows_in(path, KINDS[kind]) == rows
        for subpath, make in PARTS[kind].items():
            assert part_rows(path, subpath, make) == rows, (renamed, subpath)
        meta = tdgpu.load_memmap(path, device="meta")
        assert {meta.get(key).shape[0] for key in meta.keys(True, True)} == {rows}
        some = tdgpu.load_memmap(path, rows=slice(OLD - 1, None))
        assert_same(some.to_tensordict(), KINDS[kind](OLD - 1, rows - OLD + 1).to_tensordict().to("cpu"))
        assert state_of(path) == before  # readers write nothing


def test_members_of_a_stack_are_tops_of_their_own(tmp_path: Path) -> None:
    LazyStackedTensorDict(nested(0, OLD), nested(0, OLD)).memmap(tmp_path)
    write_rows(read(tmp_path / "1"), nested(OLD, NEW - OLD))
    half_done(tmp_path / "1", "nested", committed=True)
    loaded = tdgpu.load_memmap(tmp_path)
    for member, rows in zip(loaded.tensordicts, (OLD, NEW), strict=True):
        assert_same(member.to_tensordict(), nested(0, rows).to_tensordict().to("cpu"))
    assert part_rows(tmp_path, ("1", "n", "m"), PARTS["nested"]["n", "m"]) == NEW
    assert part_rows(tmp_path, ("0", "n", "m"), PARTS["nested"]["n", "m"]) == OLD


def test_below_a_level_without_rows_grows_what_has_them(tmp_path: Path) -> None:
    TensorDict({"buffer": nested(0, OLD), "w": torch.zeros(3)}).memmap(tmp_path)
    write_rows(read(tmp_path / "buffer"), nested(OLD, NEW - OLD))
    half_done(tmp_path / "buffer", "nested", committed=True)
    assert_same(tdgpu.load_memmap(tmp_path)["buffer"].to_tensordict(), nested(0, NEW).to_tensordict().to("cpu"))
    assert part_rows(tmp_path, ("buffer", "n"), PARTS["nested"]["n"]) == NEW
    assert part_rows(tmp_path, ("buffer", "n", "m"), PARTS["nested"]["n", "m"]) == NEW


@pytest.mark.parametrize("name", ["n/meta.json", "meta.json"])
@pytest.mark.parametrize("temporary", [None, b"", b"{", b"[]", b'{"shape": [9]}'])
def test_what_no_append_explains_is_an_error_as_ever(tmp_path: Path, name: str, temporary: bytes | None) -> None:
    nested(0, OLD).memmap(tmp_path)
    write_rows(read(tmp_path), nested(OLD, NEW - OLD))
    grows = read(tmp_path)
    level = next(level for level in grows.levels if Path(level.directory, "meta.json") == tmp_path / name)
    (tmp_path / name).write_bytes(level.metadata(NEW))
    for other in grows.levels[1:]:
        if temporary is not None:
            Path(other.directory, TEMPORARY).write_bytes(temporary)
    with pytest.raises((TdgpuError, RuntimeError)):
        tdgpu.load_memmap(tmp_path)


# --- every interleaving -----------------------------------------------------------------------------------------------


def steps(grows: Growing, top_rows: list[int], make: Callable[[int, int], Any]) -> Iterator[None]:
    """Appends without end, one change of a file after the other. ``top_rows`` gets each committed number of rows."""
    while True:
        rows = write_rows(grows, make(grows.rows, 2))
        yield
        for level in grows.levels:
            data = level.metadata(rows)
            path = Path(level.directory, TEMPORARY)
            for part in (b"", data[: len(data) // 2], data):
                path.write_bytes(part)
                yield
        for i, level in enumerate(grows.levels):
            if i == 0:
                top_rows.append(rows)
            os.replace(os.path.join(level.directory, TEMPORARY), os.path.join(level.directory, "meta.json"))
            yield
        grows.rows = rows


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("seed", range(3))
def test_interleavings(tmp_path: Path, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make = KINDS[kind]
    make(0, OLD).memmap(tmp_path)
    chance = random.Random(seed)
    top_rows = [OLD]
    appends = steps(read(tmp_path), top_rows, make)
    real, is_named = files.read_small, os.path.lexists
    mixed = 0

    def go_on() -> None:
        # Mostly a few changes between two looks of the reader, sometimes whole appends.
        for _ in range(chance.choice((0, 0, 1, 1, 2, 3, 5, 8, 13, 40))):
            next(appends)

    def read_small(*some: Any, **more: Any) -> bytes:
        go_on()
        return real(*some, **more)

    def lexists(path: str) -> bool:
        go_on()
        return is_named(path)

    monkeypatch.setattr(FileStore, "read_small", staticmethod(read_small))
    monkeypatch.setattr(FileStore, "is_named", staticmethod(lexists))
    for _ in range(60):
        least = top_rows[-1]
        rows = rows_in(tmp_path, make)
        assert least <= rows <= top_rows[-1]
        assert rows in top_rows
        counts = {json.loads((level / "meta.json").read_bytes())["shape"][0] for level in read_levels(tmp_path, kind)}
        mixed += len(counts) > 1
        for subpath, part in PARTS[kind].items():
            least = top_rows[-1]
            assert least <= part_rows(tmp_path, subpath, part) <= top_rows[-1], subpath
    assert len(top_rows) > 40
    assert mixed > 5  # so often a plain loader would have failed


@pytest.mark.parametrize("check", [True, False])
def test_a_reader_shows_what_the_top_level_said_first(
    tmp_path: Path, check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested(0, OLD).memmap(tmp_path)
    grows, seen = read(tmp_path), 0
    real = files.read_small

    def read_small(*some: Any, **more: Any) -> bytes:
        nonlocal seen
        data = real(*some, **more)
        seen += 1
        advance(grows, write_rows(grows, nested(grows.rows, 3)), durable=False)
        return data

    monkeypatch.setattr(FileStore, "read_small", staticmethod(read_small))
    save = reader.read(tmp_path, check=check)
    assert grows.rows > OLD + 9
    assert {leaf.shape[0] for leaf in save.leaves()} == {OLD}
    assert {level.meta["shape"][0] for level in save.root.walk() if "shape" in level.meta} == {OLD}


@pytest.mark.parametrize(
    "kind", ["nested", "names", "lazy_stack_named", "lazy_stack_dim1", "tensorclass", "non_tensor"]
)
def test_nothing_more_is_read_where_no_append_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    SAVES[kind](tmp_path)
    looks: list[str] = []
    real = files.read_small

    def read_small(where: files.Where, **more: Any) -> bytes:
        looks.append(where.file)
        return real(where, **more)

    monkeypatch.setattr(FileStore, "read_small", staticmethod(read_small))
    reader.read(tmp_path)
    assert sorted(looks) == sorted(map(str, tmp_path.rglob("meta.json")))


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_reader_loop_while_another_process_appends(tmp_path: Path, kind: str) -> None:
    make = KINDS[kind]
    make(0, OLD).memmap(tmp_path)
    grows = read(tmp_path)
    pid = os.fork()
    if pid == 0:
        try:
            while grows.rows < 2000:
                advance(grows, write_rows(grows, make(grows.rows, 1)), durable=False)
        finally:
            os._exit(0)
    try:
        seen = set()
        last = 0
        deadline = time.monotonic() + 4
        while last < 2000 and time.monotonic() < deadline:
            for read_rows in (
                lambda: rows_in(tmp_path, make),
                *(lambda s=s, m=m: part_rows(tmp_path, s, m) for s, m in PARTS[kind].items()),
            ):
                rows = read_rows()
                assert rows >= last
                last = rows
                seen.add(rows)
        assert len(seen) > 20
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert rows_in(tmp_path, make) >= last
    assert recover(str(tmp_path)).rows >= last
    assert rows_in(tmp_path, make, tensordict.load_memmap) >= last
