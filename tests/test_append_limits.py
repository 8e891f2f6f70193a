"""``append_memmap`` with names, files and rows of unusual kinds, at its limits, and with each option and argument."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from appends import expect, flat, is_free, load, ours, state, theirs
from forked import in_process
from saves import BUILDERS, SAVES, Thing
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode

import tdgpu
from tdgpu import errors
from tdgpu.layout import commit
from tdgpu.transfer import outgoing

MiB = 1 << 20

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*allow_pickle.*:FutureWarning"),
]


# --- names, modes, limits ---------------------------------------------------------------------------------------------


class Named(os.PathLike):
    def __init__(self, path: Any) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return os.fspath(self.path)


@pytest.mark.parametrize("kind", [str, Path, Named, os.fsencode])
def test_a_prefix_of_any_kind(tmp_path, kind):
    flat(0, 3).memmap(tmp_path)
    if kind is os.fsencode:
        # As with load_memmap: an error or rows, but nothing in between.
        with contextlib.suppress(TypeError):
            tdgpu.append_memmap(kind(tmp_path), flat(3, 1))  # type: ignore[arg-type]
        assert load(tmp_path).batch_size[0] in (3, 4)
        return
    tdgpu.append_memmap(kind(tmp_path), flat(3, 1))
    expect(tmp_path, 4)


def test_a_relative_prefix(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    for name in ("save", "elsewhere/save"):
        flat(0, 3).memmap(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    tdgpu.append_memmap("save", flat(3, 1))
    appender = tdgpu.MemmapAppender("save")
    appender.append(flat(4, 1))
    monkeypatch.chdir("elsewhere")  # it means what it meant
    appender.append(flat(5, 1))
    appender.flush()
    appender.append(flat(6, 1))
    appender.close()
    expect(tmp_path / "save", 7)
    expect(tmp_path / "elsewhere" / "save", 3)


def test_a_prefix_may_be_a_link(tmp_path):
    flat(0, 3).memmap(tmp_path / "save")
    os.symlink("save", tmp_path / "link")
    tdgpu.append_memmap(tmp_path / "link", flat(3, 1))
    with tdgpu.MemmapAppender(tmp_path / "link") as appender, tdgpu.options(lock_timeout=0):
        appender.append(flat(4, 1))
        with pytest.raises(errors.SaveLocked):
            tdgpu.append_memmap(tmp_path / "save", flat(0, 1))
    expect(tmp_path / "save", 5)
    assert os.readlink(tmp_path / "link") == "save"


@pytest.mark.parametrize("how", ["link", "directory"])
def test_a_save_that_took_the_place_of_the_locked_one_gets_no_metadata(tmp_path, how):
    """Its rows are in the files that were opened: metadata must not go to another save that looks the same."""
    first, second = tmp_path / "first", tmp_path / "second"
    flat(0, 3).memmap(first)
    flat(0, 3).memmap(second)
    name = first
    if how == "link":
        name = tmp_path / "link"
        name.symlink_to(first)
    appender = tdgpu.MemmapAppender(name)
    appender.append(flat(3, 1))
    if how == "link":
        name.unlink()
        name.symlink_to(second)
    else:
        first.rename(tmp_path / "away")
        second.rename(first)
    with contextlib.suppress(errors.AppendError):
        appender.close()
    for path in tmp_path.iterdir():
        expect(path, len(load(path)))
        assert tdgpu.load_memmap(path).batch_size[0] in (3, 4)


@pytest.mark.parametrize("what", ["a.memmap", "n", "n/m/meta.json"])
def test_links_within_a_save_are_refused(tmp_path, what):
    path = tmp_path / "save"
    flat(0, 3).memmap(path)
    (path / what).rename(tmp_path / "moved")
    (path / what).symlink_to(tmp_path / "moved")
    before = state(tmp_path)
    with pytest.raises(errors.InvalidArgument, match="symbolic link"):
        tdgpu.append_memmap(path, flat(3, 1))
    assert state(tmp_path) == before


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, make):
    flat(0, 3).memmap(tmp_path)
    (tmp_path / "a.memmap").unlink()
    make(tmp_path / "a.memmap")
    before = os.listdir(tmp_path)
    with pytest.raises((errors.InvalidArgument, errors.LeafSizeError, errors.MissingLeafError)):
        tdgpu.append_memmap(tmp_path, flat(3, 1))
    assert os.listdir(tmp_path) == before


@pytest.mark.parametrize("kind", ["nested", "tensorclass"])
def test_modes_stay(tmp_path, kind):
    path = tmp_path / "save"
    SAVES[kind](path)
    modes = {}
    for i, file in enumerate(sorted(file for file in path.rglob("*") if file.is_file())):
        modes[file] = (0o640, 0o600, 0o664, 0o666)[i % 4]
        os.chmod(file, modes[file])
    tdgpu.append_memmap(path, BUILDERS[kind](), allow_pickle=True)
    assert {file: stat.S_IMODE(file.stat().st_mode) for file in modes} == modes


def test_ten_thousand_rows_in_one_call(tmp_path):
    flat(0, 1).memmap(tmp_path)
    tdgpu.append_memmap(tmp_path, flat(1, 10_000))
    expect(tmp_path, 10_001)


def test_more_leaves_than_files_may_be_open(tmp_path):
    done = in_process(
        """
        import resource, sys, torch, tdgpu
        from tensordict import TensorDict
        def rows(first, count):
            return TensorDict({f"k{i}": torch.arange(first, first + count) + i for i in range(5000)}, [count])
        rows(0, 1).memmap(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with tdgpu.options(durable=False):
            tdgpu.append_memmap(sys.argv[1], rows(1, 2))
            with tdgpu.MemmapAppender(sys.argv[1]) as appender:
                appender.append(rows(3, 1))
                appender.append(rows(4, 40))
        print("done")
        """,
        tmp_path,
    )
    assert done == "done\n"
    for i in range(0, 5000, 501):
        data = np.fromfile(tmp_path / f"k{i}.memmap", np.int64)
        assert (data == np.arange(44) + i).all()
    assert load(tmp_path).batch_size == (44,)


def test_host_memory_in_use_does_not_grow_with_the_rows(tmp_path):
    """96 MiB that must be put in order on the way: only the ring, and not the leaf, is on the host in addition."""
    peak = in_process(
        """
        import sys, torch, tdgpu
        from tensordict import TensorDict
        def status(name):
            return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))
        rows = TensorDict({"x": torch.ones(96, 1 << 18).t().contiguous().t()}, [96])
        assert not rows["x"].is_contiguous()
        rows[:1].contiguous().memmap(sys.argv[1])
        with tdgpu.options(durable=False):
            tdgpu.append_memmap(sys.argv[1], rows[:1])
            open("/proc/self/clear_refs", "w").write("5")
            before = status("VmRSS")
            tdgpu.append_memmap(sys.argv[1], rows)
            print(status("VmHWM") - before)
        """,
        tmp_path,
    )
    assert int(peak) <= (16 + 32) * MiB
    assert (tmp_path / "x.memmap").stat().st_size == 98 * MiB


def test_nothing_stays_open_or_locked(tmp_path):
    flat(0, 1).memmap(tmp_path)
    tdgpu.append_memmap(tmp_path, flat(1, 1))
    before = len(os.listdir("/proc/self/fd"))
    for first in range(2, 12):
        tdgpu.append_memmap(tmp_path, flat(first, 1))
        assert ours(tmp_path, flat(0, 1).exclude("a")) is ValueError
    assert len(os.listdir("/proc/self/fd")) == before
    assert is_free(tmp_path)


# --- options and arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
def test_only_durable_appends_sync(tmp_path, monkeypatch, durable):
    flat(0, 3).memmap(tmp_path)
    syncs: list[str] = []
    fsync, sync = os.fsync, outgoing.Files.sync

    def counted_fsync(descriptor: int) -> None:
        syncs.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def counted_sync(files: outgoing.Files) -> None:
        syncs.append("leaves")
        sync(files)

    monkeypatch.setattr(os, "fsync", counted_fsync)
    monkeypatch.setattr(outgoing.Files, "sync", counted_sync)
    with tdgpu.options(durable=durable):
        tdgpu.append_memmap(tmp_path, flat(3, 1))
    expect(tmp_path, 4)
    if not durable:
        assert syncs == []
        return
    assert syncs[0] == "leaves"  # before any metadata
    for directory in (tmp_path, tmp_path / "n", tmp_path / "n" / "m"):
        assert syncs.count(str(directory)) == 2  # the temporary file is there; it is renamed
        assert syncs.count(str(directory / commit.TEMPORARY)) == 1


def test_pickles_as_with_tensordict(tmp_path):
    path, copy = tmp_path / "save", tmp_path / "copy"
    rows = BUILDERS["non_tensor_pickle"]()
    rows.memmap(path)
    shutil.copytree(path, copy)
    for allowed in (None, True, False):
        before = state(path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mine = ours(path, rows, allowed)
        with warnings.catch_warnings(record=True) as expected:
            warnings.simplefilter("always")
            other = theirs(copy, rows, allowed)
        assert mine is other
        assert {w.category for w in caught} == {w.category for w in expected}
        assert state(path) == state(copy)
        assert (mine is RuntimeError) == (allowed is False) == (state(path) == before)
    with pytest.raises(TypeError):
        tdgpu.append_memmap(path, rows, allow_pickle=1)  # type: ignore[arg-type]
    other_thing = rows.clone()
    other_thing.set_non_tensor("thing", Thing(6))
    assert ours(path, other_thing) is ValueError


@pytest.mark.parametrize("width", [3, 100_000])
@pytest.mark.parametrize("where", ["meta", "fake", "fake, outside of the mode"])
def test_rows_without_bytes_are_refused(tmp_path, where, width):
    TensorDict({"x": torch.zeros(2, width), "y": torch.zeros(2)}, [2]).memmap(tmp_path)
    before = state(tmp_path)
    mode = FakeTensorMode()
    with mode if "fake" in where else contextlib.nullcontext():
        rows = TensorDict({"x": torch.zeros(2, width, device="meta" if where == "meta" else "cpu")}, [2])
        if where == "fake":
            rows["y"] = torch.zeros(2)
            with pytest.raises((errors.InvalidArgument, errors.NotSupported)):
                tdgpu.append_memmap(tmp_path, rows)
    if where != "fake":
        rows["y"] = torch.zeros(2)
        with pytest.raises((errors.InvalidArgument, errors.NotSupported)):
            tdgpu.append_memmap(tmp_path, rows)
    assert state(tmp_path) == before
    assert is_free(tmp_path)
