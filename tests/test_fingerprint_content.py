"""The fingerprint of a dataset: what is in the save, however and wherever it lies."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from saves import BUILDERS, SAVES, Point
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

import tdgpu
from tdgpu.cache import leaves
from tdgpu.cache.content import contents
from tdgpu.cache.fingerprint import fingerprint
from tdgpu.cache.hasher import FingerprintWarning, Hasher
from tdgpu.errors import ChecksumError, InvalidArgument, LoadError, NotSupported
from tdgpu.options import options


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path) -> Iterator[None]:
    with options(cache=str(tmp_path / "cache")), warnings.catch_warnings():
        warnings.simplefilter("error", FingerprintWarning)
        yield


def of(path: Path, **arguments: Any) -> str:
    return fingerprint(tdgpu.MemmapDataset(path, allow_pickle=True, **arguments))


def saved(path: Path, **entries: Any) -> Path:
    TensorDict(entries, batch_size=[4]).memmap(path)
    return path


def datasets() -> list[str]:
    """The saves of all kinds that have rows that torch can take."""
    return [name for name in BUILDERS if name not in {"legacy_keys"}]


@pytest.mark.parametrize("name", datasets())
def test_a_directory_its_copy_and_its_archives_have_the_same_one(name, tmp_path):
    SAVES[name](tmp_path / "save")
    try:
        expected = of(tmp_path / "save")
    except (InvalidArgument, NotSupported):
        with pytest.raises((InvalidArgument, NotSupported)):
            tdgpu.MemmapDataset(tmp_path / "save", allow_pickle=True)
        return
    shutil.copytree(tmp_path / "save", tmp_path / "another place")
    assert of(tmp_path / "another place") == expected
    for compression in (None, "deflate", "bzip2"):
        archive = tdgpu.pack_memmap(tmp_path / "save", tmp_path / f"{compression}.tdz", compression=compression)
        assert of(archive) == expected
        assert of(archive) == expected  # by what is remembered, if it is


ROWS = torch.arange(8.0).view(4, 2)
DIFFERENT: dict[str, Callable[[Path], object]] = {
    "a save": lambda path: saved(path, a=ROWS, n={"b": ROWS}),
    "another value": lambda path: saved(path, a=ROWS + 1, n={"b": ROWS}),
    "another value below": lambda path: saved(path, a=ROWS, n={"b": ROWS + 1}),
    "another dtype": lambda path: saved(path, a=ROWS.double(), n={"b": ROWS}),
    "the same bytes": lambda path: saved(path, a=ROWS.view(torch.int32), n={"b": ROWS}),
    "another shape": lambda path: saved(path, a=ROWS.view(4, 2, 1), n={"b": ROWS}),
    "another key": lambda path: saved(path, c=ROWS, n={"b": ROWS}),
    "two leaves": lambda path: saved(path, a=ROWS, c=ROWS),
    "in another order": lambda path: saved(path, c=ROWS, a=ROWS),
    "no level below": lambda path: saved(path, a=ROWS, b=ROWS),
    "one row less": lambda path: TensorDict(
        a=ROWS[:3], n=TensorDict(b=ROWS[:3], batch_size=[3]), batch_size=[3]
    ).memmap(path),
    "more batch dimensions": lambda path: TensorDict(
        a=ROWS, n=TensorDict(b=ROWS, batch_size=[4]), batch_size=[4, 2]
    ).memmap(path),
    "names": lambda path: TensorDict(
        a=ROWS, n=TensorDict(b=ROWS, batch_size=[4]), batch_size=[4], names=["time"]
    ).memmap(path),
    "a class": lambda path: Point(x=ROWS, y=ROWS, batch_size=[4]).memmap(path),
    "no class": lambda path: saved(path, x=ROWS, y=ROWS),
    "a text": lambda path: saved(path, a=ROWS, t=NonTensorData("one", batch_size=[4])),
    "another text": lambda path: saved(path, a=ROWS, t=NonTensorData("two", batch_size=[4])),
    "texts": lambda path: saved(path, a=ROWS, t=NonTensorStack("a", "b", "c", "d")),
    "other texts": lambda path: saved(path, a=ROWS, t=NonTensorStack("a", "b", "d", "c")),
    "a stack": lambda path: LazyStackedTensorDict(*(TensorDict(a=ROWS[i]) for i in range(4)), stack_dim=0).memmap(path),
    "a stack in another order": lambda path: LazyStackedTensorDict(
        *(TensorDict(a=ROWS[i]) for i in (0, 1, 3, 2))
    ).memmap(path),
    "without elements": lambda path: saved(path, a=torch.empty(4, 0)),
    "without elements, otherwise": lambda path: saved(path, a=torch.empty(4, 0, 2)),
}


def test_what_is_different_has_another_one(tmp_path):
    found = {}
    for number, (name, make) in enumerate(DIFFERENT.items()):
        make(tmp_path / str(number))
        found[name] = of(tmp_path / str(number))
    assert len(set(found.values())) == len(DIFFERENT), sorted(found.items(), key=lambda item: item[1])


def test_it_is_of_the_keys_that_the_rows_have(tmp_path):
    saved(tmp_path / "save", a=ROWS, b=ROWS + 1)
    saved(tmp_path / "other", a=ROWS, b=ROWS + 2)
    assert of(tmp_path / "save", keys=["a"]) == of(tmp_path / "other", keys=["a"]) != of(tmp_path / "save")
    assert of(tmp_path / "save", keys=["b"]) != of(tmp_path / "other", keys=["b"])


def test_a_level_below_has_the_one_of_the_same_save_alone(tmp_path):
    saved(tmp_path / "save", n={"a": ROWS})
    saved(tmp_path / "alone", a=ROWS)
    assert of(tmp_path / "save", subpath="n") == of(tmp_path / "alone")


def test_rows_that_were_appended_change_it_when_the_dataset_sees_them(tmp_path):
    saved(tmp_path / "save", a=ROWS)
    dataset = tdgpu.MemmapDataset(tmp_path / "save")
    before = fingerprint(dataset)
    tdgpu.append_memmap(tmp_path / "save", TensorDict(a=ROWS, batch_size=[4]))
    assert fingerprint(dataset) == before  # its rows are what they were
    dataset.refresh()
    TensorDict(a=torch.cat([ROWS, ROWS]), batch_size=[8]).memmap(tmp_path / "at once")
    assert fingerprint(dataset) == of(tmp_path / "at once") != before


def test_the_methods_of_a_users_class_are_part_of_it(tmp_path, monkeypatch):
    Point(x=ROWS, y=ROWS, batch_size=[4]).memmap(tmp_path / "save")
    before = of(tmp_path / "save")
    monkeypatch.setattr(Point, "length", lambda self: self.x + 1, raising=False)
    one = of(tmp_path / "save")
    monkeypatch.setattr(Point, "length", lambda self: self.x + 2, raising=False)
    assert len({before, one, of(tmp_path / "save")}) == 3


def test_a_view_has_another_one_and_the_one_of_its_rows_of_an_equal_save(tmp_path):
    saved(tmp_path / "save", a=ROWS, b=ROWS + 1)
    saved(tmp_path / "copy", a=ROWS, b=ROWS + 1)
    one, other = tdgpu.MemmapDataset(tmp_path / "save"), tdgpu.MemmapDataset(tmp_path / "copy")
    views = {
        name: (Hasher.hash(view(one)), Hasher.hash(view(other)))
        for name, view in {
            "all": lambda dataset: dataset,
            "some": lambda dataset: dataset.select([0, 1]),
            "others": lambda dataset: dataset.select([1, 0]),
            "renamed": lambda dataset: dataset.rename_keys({"a": "c"}),
            "exchanged": lambda dataset: dataset.rename_keys({"a": "b", "b": "a"}),
        }.items()
    }
    assert all(first == second for first, second in views.values())
    assert len(set(views.values())) == len(views)


def test_a_dataset_can_be_hashed_wherever_it_is_found(tmp_path):
    saved(tmp_path / "save", a=ROWS)
    saved(tmp_path / "copy", a=ROWS)
    saved(tmp_path / "other", a=ROWS + 1)

    def function(row: Any) -> Any:
        return dataset[row]

    digests = []
    for name in ("save", "copy", "other"):
        dataset = tdgpu.MemmapDataset(tmp_path / name)
        digests.append((Hasher.hash(function), Hasher.hash([dataset])))
    assert digests[0] == digests[1]
    assert all(one != other for one, other in zip(digests[0], digests[2], strict=True))


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 8192, 20_000])
def test_blocks_and_threads_do_not_matter_and_every_byte_counts(threads, nbytes, tmp_path, monkeypatch):
    monkeypatch.setattr(leaves, "BLOCK", 4096)
    monkeypatch.setattr(leaves, "WINDOW", 1000)
    path = tmp_path / "save"
    values = torch.arange(4 * nbytes, dtype=torch.int64).to(torch.uint8).view(4, nbytes)
    saved(path, a=values, b=values[:, :1])
    with options(threads=threads):
        expected = of(path)
        archive = tdgpu.pack_memmap(path, tmp_path / "save.tdz", compression="deflate", block_size=65536)
        assert of(archive) == expected
    for position in {0, 4095, 4096, 2 * nbytes, 4 * nbytes - 1} & set(range(4 * nbytes)):
        with open(path / "a.memmap", "r+b") as file:
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 1]))
        assert of(path) != expected
        with open(path / "a.memmap", "r+b") as file:
            file.seek(position)
            file.write(bytes([byte]))
        assert of(path) == expected


def test_parts_that_come_in_any_order_are_hashed_in_theirs():
    data = bytes(range(256)) * 40
    expected = leaves._InOrder(len(data))
    expected.add(0, memoryview(data))
    cuts = [0, 100, 1000, 5000, len(data)]
    for order in ([3, 2, 1, 0], [0, 2, 1, 3], [1, 0, 3, 2]):
        found = leaves._InOrder(len(data))
        for i in order:
            found.add(cuts[i], memoryview(data)[cuts[i] : cuts[i + 1]])
        assert found.digest() == expected.digest()


def test_a_file_that_was_replaced_or_cut_short_is_named(tmp_path):
    saved(tmp_path / "save", a=ROWS)
    file = tmp_path / "save" / "a.memmap"
    dataset = tdgpu.MemmapDataset(tmp_path / "save")
    shutil.copy(file, tmp_path / "kept")
    os.truncate(file, 8)
    with pytest.raises(LoadError, match=r"shorter.*key 'a'.*a\.memmap; wanted 32 bytes, found 8"):
        fingerprint(dataset)
    os.replace(tmp_path / "kept", file)
    with pytest.raises(LoadError, match=r"taken the place.*a\.memmap"):
        fingerprint(dataset)
    file.unlink()
    with pytest.raises(LoadError, match=r"cannot be read.*a\.memmap"):
        fingerprint(dataset)
    os.mkfifo(file)
    with pytest.raises(LoadError, match="taken the place"):
        fingerprint(dataset)


def test_a_damaged_archive_is_an_error(tmp_path):
    saved(tmp_path / "save", a=torch.randn(4, 1000))
    archive = tdgpu.pack_memmap(tmp_path / "save", tmp_path / "save.tdz", compression="deflate")
    dataset = tdgpu.MemmapDataset(archive)
    extent = dataset._see().save.leaves()[0].extent
    assert extent is not None
    with open(archive, "r+b") as file:
        file.seek(extent.offset + extent.nbytes // 2)
        file.write(b"damaged")
    with pytest.raises(ChecksumError):
        fingerprint(dataset)


def test_no_thread_is_left_behind_and_an_error_in_one_ends_all(tmp_path, monkeypatch):
    monkeypatch.setattr(leaves, "BLOCK", 4096)
    saved(tmp_path / "save", a=torch.zeros(4, 100_000))
    dataset = tdgpu.MemmapDataset(tmp_path / "save")
    before = threading.active_count()
    fingerprint(dataset)
    calls = []

    def fail(*arguments: Any) -> bytes:
        calls.append(arguments)
        if len(calls) == 5:
            raise ZeroDivisionError
        return b""

    monkeypatch.setattr(leaves, "_hash_block", fail)
    with options(threads=4), pytest.raises(ZeroDivisionError):
        contents(tdgpu.MemmapDataset(tmp_path / "save"))
    assert threading.active_count() == before
    assert len(calls) < 20


def test_the_cache_directory_is_where_the_option_or_the_platform_says(monkeypatch, tmp_path):
    from tdgpu.cache.place import directory

    assert directory() == tmp_path / "cache"
    with options(cache=None):
        monkeypatch.setenv("TDGPU_CACHE", "")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert directory() == tmp_path / "xdg" / "tdgpu"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert directory() == tmp_path / ".cache" / "tdgpu"
        monkeypatch.setattr("sys.platform", "darwin")
        assert directory() == tmp_path / "Library" / "Caches" / "tdgpu"
