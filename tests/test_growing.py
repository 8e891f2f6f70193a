"""Readers of a save that grows: what they see, when, and that what they gave stays as it was."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import threading
import warnings
from pathlib import Path

import pytest
import tensordict
import torch
from compare import assert_same
from saves import BUILDERS, Point
from tensordict import TensorDict

import tdgpu
from tdgpu.errors import (
    FormatError,
    InvalidArgument,
    InvalidArgumentType,
    LoadError,
    NotSupported,
    SaveNotFound,
    SubpathError,
)
from tdgpu.growing import MemmapReader

# What tensordict can append to.
GROWING = ("flat", "nested", "names", "zero_size", "dtypes", "keys", "point", "tensorclass", "tensorclass_pickle",
           "non_tensor", "non_tensor_pickle", "typed")  # fmt: skip


def rows_of(*values: int) -> TensorDict:
    numbers = torch.tensor(values, dtype=torch.int64)
    return TensorDict({"a": numbers, "n": {"b": numbers.reshape(len(values), 1).repeat(1, 3)}}, [len(values)])


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Rows 0, 1, 2."""
    rows_of(0, 1, 2).memmap(tmp_path / "save")
    return tmp_path / "save"


def append(save: Path, *values: int) -> None:
    tensordict.append_memmap(save, rows_of(*values))


def numbers(loaded: TensorDict) -> list[int]:
    """The numbers in the rows, which all leaves agree on."""
    values = loaded["a"].tolist()
    assert loaded["n", "b"].tolist() == [[value] * 3 for value in values]
    return values


# --- growing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.filterwarnings("ignore")
def test_rows_that_tensordict_appends_are_seen_after_a_refresh(name, tmp_path):
    value = BUILDERS[name]()
    value.memmap(tmp_path / "save")
    reader = MemmapReader(tmp_path / "save", allow_pickle=True)
    before = len(reader)
    for _ in range(2):
        try:
            tensordict.append_memmap(tmp_path / "save", value, allow_pickle=True)
        except ValueError:
            assert name in ("non_tensor", "non_tensor_pickle")  # NaN is not NaN to it; nor one Thing another
            break
        assert len(reader) == before
        assert reader.refresh() == value.batch_size[0]
        before += value.batch_size[0]
        assert len(reader) == before
        assert_same(reader.load(), TensorDict.load_memmap(tmp_path / "save", allow_pickle=True))
    assert_same(reader[:1], tdgpu.load_memmap(tmp_path / "save", rows=slice(1), allow_pickle=True))
    assert reader.refresh() == 0


def test_what_was_loaded_and_what_was_seen_stay_as_they_were(save):
    reader = MemmapReader(save)
    early = reader.load()
    append(save, 3, 4)
    assert numbers(early) == numbers(reader.load()) == numbers(reader[-9:9]) == [0, 1, 2]
    assert numbers(reader[-1:]) == [2]
    assert reader.refresh() == 2
    append(save, 5)
    assert numbers(early) == [0, 1, 2]
    assert numbers(reader.load()) == [0, 1, 2, 3, 4]
    assert numbers(reader[2:4]) == [2, 3]
    assert numbers(reader.load(rows=slice(-2, None))) == [3, 4]


def test_on_a_device_too(save, device):
    reader = MemmapReader(save)
    append(save, 3, 4)
    early = reader.load(device)
    future = reader.load(device, return_early=True)
    assert reader.refresh() == 2
    later = reader.load(device, non_blocking=True, rows=slice(1, None))
    assert {str(loaded["a"].device) for loaded in (early, later, future.result())} == {str(device)}
    assert [numbers(loaded.cpu()) for loaded in (early, later, future.result())] == [
        [0, 1, 2],
        [1, 2, 3, 4],
        [0, 1, 2],
    ]


def test_the_structure_is_of_the_rows_that_were_seen(save):
    reader = MemmapReader(save)
    append(save, 3, 4)
    assert reader.load("meta")["n", "b"].shape == (3, 3)
    shutil.rmtree(save)
    assert reader.load("meta", rows=slice(1))["n", "b"].shape == (1, 3)


def test_a_result_does_not_know_the_directory_as_its_own(save):
    assert MemmapReader(save).load()._memmap_prefix is None
    assert tdgpu.load_memmap(save)._memmap_prefix == save


def test_out_is_filled(save):
    reader = MemmapReader(save)
    out = TensorDict()
    out.batch_size = [3]
    assert reader.load(out=out) is out
    assert numbers(out) == [0, 1, 2]


def test_a_save_without_rows_gets_its_first(tmp_path):
    rows_of().memmap(tmp_path / "save")
    reader = MemmapReader(tmp_path / "save")
    assert (len(reader), numbers(reader.load())) == (0, [])
    append(tmp_path / "save", 7)
    assert reader.refresh() == 1
    assert numbers(reader.load()) == [7]


@pytest.mark.parametrize("name", ["nested", "point"])
def test_nothing_new_costs_one_stat(name, tmp_path, monkeypatch):
    BUILDERS[name]().memmap(tmp_path / "save")
    reader = MemmapReader(tmp_path / "save")
    asked: list[str] = []
    stat = os.stat

    def count(path: str) -> os.stat_result:
        asked.append(path)
        return stat(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", count)
        patch.setattr(os, "open", None)
        assert reader.refresh() == 0
    assert len(asked) == 1


def test_appends_within_one_tick_of_the_clock_are_seen(save):
    # A file system may give the second metadata the inode number that the first had, and the same time.
    reader = MemmapReader(save)
    meta = save / "meta.json"
    for i in range(20):
        time = os.stat(meta).st_mtime_ns
        append(save, 2 * i)
        append(save, 2 * i + 1)
        os.utime(meta, ns=(time, time))
        assert reader.refresh() == 2


def test_a_child_sees_the_rows_of_its_save(save):
    reader = MemmapReader(save, subpath="n")
    append(save, 3)
    assert reader.refresh() == 1
    assert reader.refresh() == 0
    assert reader[2:]["b"].tolist() == [[2] * 3, [3] * 3]


def test_a_child_of_a_tensorclass_sees_the_rows_of_its_save(tmp_path):
    value = BUILDERS["tensorclass"]()
    value.memmap(tmp_path)
    reader = MemmapReader(tmp_path, subpath="at")
    tensordict.append_memmap(tmp_path, value)
    assert reader.refresh() == 3
    assert_same(reader.load(), torch.cat([value.at, value.at]))


def pending(save: Path, rows: int, *renamed: str) -> None:
    """Grows a save by ``rows`` and stops between the renames: only ``renamed`` levels have their new metadata."""
    old = {path: path.read_bytes() for path in save.rglob("meta.json")}
    append(save, *range(3, 3 + rows))
    for path, text in old.items():
        if str(path.parent.relative_to(save)) not in renamed:
            os.replace(path, path.with_name(".meta.json.append.tmp"))
            path.write_bytes(text)


@pytest.mark.parametrize("subpath", [None, "n"])
def test_an_append_that_was_killed_between_its_renames_is_seen_whole(save, subpath):
    reader = MemmapReader(save, subpath=subpath)
    pending(save, 2, ".")
    assert reader.refresh() == 2
    assert reader.refresh() == 0
    loaded = reader.load()
    assert (loaded if subpath else loaded["n"])["b"].tolist() == [[i] * 3 for i in range(5)]


@pytest.mark.parametrize("subpath", [None, "n"])
def test_an_append_that_was_killed_before_its_renames_is_not_seen(save, subpath):
    reader = MemmapReader(save, subpath=subpath)
    pending(save, 2)
    assert reader.refresh() == 0
    assert reader.load().batch_size == (3,)


def test_a_reader_follows_while_rows_are_appended(save):
    """What is seen are always whole rows, in order, never fewer than before."""
    count = 150
    stop = threading.Event()

    def write() -> None:
        try:
            for i in range(count):
                append(save, 3 + i)
        finally:
            stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    reader = MemmapReader(save)
    seen, early = len(reader), reader.load()
    looks = 0
    while not (stop.is_set() and seen == 3 + count):
        over = stop.is_set()
        added = reader.refresh()
        assert added >= 0
        seen += added
        assert len(reader) == seen
        assert numbers(reader[-5:]) == list(range(max(0, seen - 5), seen))
        looks += added > 0
        assert not over or seen == 3 + count
    writer.join()
    assert looks > 1
    assert numbers(early) == list(range(len(early)))
    assert numbers(reader.load()) == list(range(3 + count))


def test_pickles_are_read_once(tmp_path):
    BUILDERS["tensorclass_pickle"]().memmap(tmp_path)
    with pytest.warns(FutureWarning, match="pickled"):
        reader = MemmapReader(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader.load()
        os.utime(tmp_path / "meta.json", ns=(1, 1))
        assert reader.refresh() == 0
        assert reader[:1]["f"].extra.number == 3


def test_a_working_directory_that_changes_does_not_matter(save, tmp_path, monkeypatch):
    monkeypatch.chdir(save)
    reader = MemmapReader(".")
    monkeypatch.chdir(tmp_path)
    append(save, 3)
    assert reader.refresh() == 1
    assert numbers(reader.load()) == [0, 1, 2, 3]


def test_a_reader_that_is_dropped_leaves_nothing_open(save):
    def opened() -> int:
        gc.collect()
        return sum(1 for fd in os.listdir("/proc/self/fd") if _target(fd).startswith(str(save)))

    reader = MemmapReader(save)
    for i in range(3):
        append(save, i)
        reader.refresh()
        assert opened() == 2
    del reader
    assert opened() == 0


def _target(fd: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def test_it_says_what_it_is(save):
    assert repr(MemmapReader(save, subpath="n")) == f"MemmapReader('{save}', subpath='n', 3 rows)"
    assert MemmapReader(save).prefix == save


# --- another save -----------------------------------------------------------------------------------------------------


def _change(save: Path, change) -> None:
    """Changes the parsed metadata of the save, as another writer would: by a rename."""
    meta = json.loads((save / "meta.json").read_text())
    change(meta)
    (save / "new").write_text(json.dumps(meta))
    os.replace(save / "new", save / "meta.json")


def _fewer_rows(meta) -> None:
    meta["shape"][0] = meta["a"]["shape"][0] = 2


CHANGES = {
    "fewer rows": (_fewer_rows, "2 rows, fewer than the 3"),
    "a leaf with fewer rows": (lambda meta: meta["a"].update(shape=[1]), "1 rows, fewer than the 3"),
    "no rows": (lambda meta: meta.update(shape=[]), "no rows, fewer than the 3"),
    "a leaf less": (lambda meta: meta.pop("a"), r"keys \['n'\], and had \['a', 'n'\]"),
    "a child less": (lambda meta: meta.pop("n"), r"keys \['a'\], and had \['a', 'n'\]"),
    "another dtype": (lambda meta: meta["a"].update(dtype="torch.uint64"), r"is torch\.uint64, and was torch\.int64"),
    "another trailing shape": (lambda meta: meta["a"].update(shape=[3, 1]), r"shape is \[3, 1\], and was \[3\]"),
    "another batch size": (lambda meta: meta.update(shape=[3, 1]), r"shape is \[3, 1\], and was \[3\]"),
    "other names": (lambda meta: meta.update(_names=["time"]), "non-tensor contents differ"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_save_is_an_error_and_the_reader_serves_what_it_had(save, change):
    reader = MemmapReader(save)
    meta = (save / "meta.json").read_bytes()
    edit, message = CHANGES[change]
    _change(save, edit)
    for _ in range(2):
        with pytest.raises(FormatError, match=message) as error:
            reader.refresh()
        assert error.value.save == str(save)
        assert len(reader) == 3
        assert numbers(reader.load()) == [0, 1, 2]
    (save / "meta.json").write_bytes(meta)
    append(save, 3)
    assert reader.refresh() == 1


def test_another_class_is_an_error(tmp_path):
    class Other(tensordict.TensorClass):
        x: torch.Tensor
        y: torch.Tensor

    Point(x=torch.zeros(2), y=torch.zeros(2), batch_size=[2]).memmap(tmp_path)
    reader = MemmapReader(tmp_path)
    assert reader.refresh() == 0
    for file in ("meta.json", "_tensordict/meta.json"):  # the second so that it is looked at
        (tmp_path / file).rename(tmp_path / "old")
        text = (tmp_path / "old").read_text()
        (tmp_path / file).write_text(text.replace(str(Point), str(Other)))
    with pytest.raises(FormatError, match="class, names or non-tensor"):
        reader.refresh()


def test_malformed_metadata_is_an_error_and_the_reader_serves_what_it_had(save):
    reader = MemmapReader(save)
    (save / "meta.json").write_text("{")
    with pytest.raises(FormatError, match=r"meta\.json"):
        reader.refresh()
    assert numbers(reader.load()) == [0, 1, 2]


def test_a_save_that_is_gone(save):
    reader = MemmapReader(save)
    early = reader.load()
    shutil.rmtree(save)
    with pytest.raises(SaveNotFound, match="gone") as error:
        reader.refresh()
    assert str(save) in str(error.value)
    with pytest.raises(LoadError, match="gone"):
        reader.load()
    assert len(reader) == 3
    assert numbers(early) == [0, 1, 2]


def test_a_subpath_that_is_gone(save):
    reader = MemmapReader(save, subpath="n")
    shutil.rmtree(save / "n")
    with pytest.raises(FormatError, match="level of the subpath is gone"):
        reader.refresh()


def test_a_save_in_its_place_is_another_one_even_if_it_looks_the_same(save):
    # Its files may get the very inode numbers of those that are deleted.
    for _ in range(5):
        reader = MemmapReader(save)
        shutil.rmtree(save)
        rows_of(7, 8, 9, 10).memmap(save)
        with pytest.raises(FormatError, match="has been replaced"):
            reader.refresh()
        with pytest.raises(LoadError, match="another one has taken its place"):
            reader.load()


def test_a_save_over_it_with_other_leaves_does_not_show_as_more_rows(save):
    reader = MemmapReader(save)
    (save / "a.memmap").rename(save.parent / "kept")
    rows_of(7, 8, 9, 10).memmap(save)
    with pytest.raises(FormatError, match="another file has taken the place"):
        reader.refresh()
    with pytest.raises(LoadError, match="Another file") as error:
        reader.load()
    assert (error.value.key, error.value.file) == (("a",), str(save / "a.memmap"))


def test_a_file_that_became_shorter_is_an_error_and_does_not_grow(save):
    reader = MemmapReader(save)
    os.truncate(save / "n" / "b.memmap", 8)
    with pytest.raises(LoadError, match=r"shorter.*wanted 72 bytes, found 8"):
        reader.load()
    assert (save / "n" / "b.memmap").stat().st_size == 8


def test_a_link_that_leads_to_another_save_now(save, tmp_path):
    link = tmp_path / "latest"
    link.symlink_to(save)
    reader = MemmapReader(link)
    append(save, 3)
    assert reader.refresh() == 1
    shutil.copytree(save, tmp_path / "copy")
    link.unlink()
    link.symlink_to(tmp_path / "copy")
    with pytest.raises(FormatError, match="has been replaced"):
        reader.refresh()


# --- archives, and what has no rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "deflate"])
def test_an_archive_never_grows(save, tmp_path, compression):
    archive = tmp_path / "save.tdz"
    tdgpu.pack_memmap(save, archive, compression=compression)
    reader = MemmapReader(archive)
    assert (len(reader), reader.refresh(), numbers(reader[1:])) == (3, 0, [1, 2])
    append(save, 3)
    tdgpu.pack_memmap(save, archive, compression=compression)
    with pytest.raises(FormatError, match="has been replaced"):
        reader.refresh()
    with pytest.raises(LoadError):
        reader.load()
    archive.unlink()
    with pytest.raises(SaveNotFound):
        reader.refresh()


def test_writes_through_a_mapping_do_not_replace_an_archive(save, tmp_path):
    archive = tmp_path / "save.tdz"
    tdgpu.pack_memmap(save, archive)
    reader = MemmapReader(archive)
    tdgpu.load_memmap(archive, mode="r+")["a"][0] = 5
    os.utime(archive, ns=(1, 1))
    assert reader.refresh() == 0
    assert reader.load()["a"].tolist() == [5, 1, 2]


@pytest.mark.parametrize("name", ["lazy_stack", "non_tensor_stack"])
def test_what_cannot_grow_can_be_read(name, tmp_path):
    value = BUILDERS[name]()
    value.memmap(tmp_path)
    reader = MemmapReader(tmp_path)
    os.utime(tmp_path / "meta.json", ns=(1, 1))
    assert (len(reader), reader.refresh()) == (3, 0)
    assert_same(reader.load(), tdgpu.load_memmap(tmp_path))


@pytest.mark.parametrize(("name", "error"), [("scalars", InvalidArgument), ("lazy_permute", NotSupported)])
def test_what_has_no_rows_is_refused(name, error, tmp_path):
    BUILDERS[name]().memmap(tmp_path)
    with pytest.raises(error) as refused:
        MemmapReader(tmp_path)
    assert refused.value.save == str(tmp_path)


def test_arguments_are_checked(save, tmp_path):
    with pytest.raises(SaveNotFound):
        MemmapReader(tmp_path / "nowhere")
    with pytest.raises(SubpathError):
        MemmapReader(save, subpath="nope")
    with pytest.raises(InvalidArgumentType, match="allow_pickle"):
        MemmapReader(save, allow_pickle="yes")  # type: ignore[arg-type]
    reader = MemmapReader(save)
    with pytest.raises(InvalidArgumentType, match=r"slice\(1, 2\)"):
        reader[1]  # type: ignore[index]
    with pytest.raises(InvalidArgument, match="step"):
        reader[::2]
    with pytest.raises(InvalidArgument, match="mode"):
        reader.load(mode="w")
