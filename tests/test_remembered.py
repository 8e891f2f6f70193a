"""What is remembered of a save between appends: used when nothing has changed, and never when anything has."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from forked import in_process
from saves import Point
from tensordict import TensorDict

import tdgpu
from tdgpu import errors
from tdgpu.layout import commit, reader, remembered


def rows(first: int, count: int = 1) -> TensorDict:
    x = torch.arange(first, first + count)
    return TensorDict({"x": x, "deep": TensorDict({"y": x.float(), "z": x.view(-1, 1).repeat(1, 3)}, [count])}, [count])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts how often a save is looked into."""
    monkeypatch.setattr(remembered, "_kept", {})
    found: list[str] = []
    read = reader.read

    def counted(prefix: str, **arguments: Any) -> Any:
        found.append(prefix)
        return read(prefix, **arguments)

    monkeypatch.setattr("tdgpu.append.session.reader.read", counted)
    return found


def expect(path: Path, count: int) -> None:
    saved = tensordict.load_memmap(path)
    assert saved.batch_size == saved["deep"].batch_size == torch.Size([count])
    for key in ("x", ("deep", "y"), ("deep", "z")):
        assert torch.equal(saved[key], rows(0, count)[key]), key


def test_a_save_is_looked_into_once(tmp_path, reads):
    rows(0).memmap(tmp_path)
    for i in range(1, 120):  # the numbers of rows get longer
        tdgpu.append_memmap(tmp_path, rows(i))
    with tdgpu.MemmapAppender(tmp_path, durable=False) as appender:
        appender.append(rows(120))
        appender.flush()
        appender.append(rows(121))
    assert len(appender) == 122
    tdgpu.append_memmap(tmp_path, rows(122))
    assert reads == [str(tmp_path)] and len(appender) == 122
    expect(tmp_path, 123)


def by_tensordict(path: Path) -> None:
    tensordict.append_memmap(path, rows(2))


def by_another_process(path: Path) -> None:
    code = (
        "import sys, tdgpu, tensordict; tdgpu.append_memmap(sys.argv[1], tensordict.load_memmap(sys.argv[1])[1:] + 1)"
    )
    in_process(code, path)


def by_another_save_in_its_place(path: Path) -> None:
    shutil.rmtree(path)
    rows(0, 3).memmap(path)


def by_a_killed_append(path: Path) -> None:
    """Committed at the top, not below."""
    copy = path.with_name("copy")
    shutil.copytree(path, copy)
    tensordict.append_memmap(copy, rows(2))
    for level in (path, path / "deep"):
        shutil.copy(copy / level.relative_to(path) / "meta.json", level / commit.TEMPORARY)
        for leaf in copy.joinpath(level.relative_to(path)).glob("*.memmap"):
            shutil.copy(leaf, level)
    os.replace(path / commit.TEMPORARY, path / "meta.json")


def within_one_tick(path: Path) -> None:
    """All that a file's status tells is the same."""
    before = os.stat(path / "meta.json")
    by_tensordict(path)
    data = (path / "meta.json").read_bytes()
    os.utime(path / "meta.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(data) == before.st_size


@pytest.mark.parametrize(
    "change", [by_tensordict, by_another_process, by_another_save_in_its_place, by_a_killed_append, within_one_tick]
)
def test_what_others_have_changed_is_seen(tmp_path, reads, change):
    path = tmp_path / "save"
    rows(0).memmap(path)
    tdgpu.append_memmap(path, rows(1))
    change(path)
    tdgpu.append_memmap(path, rows(3))
    assert len(reads) >= 2
    expect(path, 4)


@pytest.mark.parametrize("level", [".", "deep"])
def test_what_a_killed_append_has_left_is_removed(tmp_path, reads, level):
    rows(0).memmap(tmp_path)
    tdgpu.append_memmap(tmp_path, rows(1))
    (tmp_path / level / commit.TEMPORARY).write_text("{")
    tdgpu.append_memmap(tmp_path, rows(2))
    assert not list(tmp_path.rglob(".*"))
    expect(tmp_path, 3)


def test_only_a_level_below_has_changed(tmp_path, reads):
    rows(0).memmap(tmp_path)
    tdgpu.append_memmap(tmp_path, rows(1))
    meta = tmp_path / "deep" / "meta.json"
    meta.write_text(meta.read_text().replace("torch.float32", "torch.int32"))
    with pytest.raises(errors.InvalidArgument, match=r"float32 .* do not fit: torch\.int32"):
        tdgpu.append_memmap(tmp_path, rows(2))


@pytest.mark.parametrize("what", ["level", "metadata", "leaf", "missing", "short", "hard link"])
def test_what_a_first_append_refuses_is_refused(tmp_path, reads, what):
    path, other = tmp_path / "save", tmp_path / "other"
    rows(0).memmap(path)
    tdgpu.append_memmap(path, rows(1))
    victim = path / {"level": "deep", "metadata": "deep/meta.json"}.get(what, "deep/y.memmap")
    if what == "short":
        os.truncate(victim, 7)
    elif what == "hard link":
        os.link(victim, other)
    else:
        victim.rename(other)
        if what != "missing":
            victim.symlink_to(other)
    kept = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises((ValueError, errors.FormatError, errors.MissingLeafError, errors.LeafSizeError), match="deep"):
        tdgpu.append_memmap(path, rows(2))
    assert kept == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


def test_an_append_that_failed_is_forgotten(tmp_path, reads, monkeypatch):
    rows(0).memmap(tmp_path)
    tdgpu.append_memmap(tmp_path, rows(1))

    def failing(source: str, target: str) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(errors.AppendError):
            tdgpu.append_memmap(tmp_path, rows(2))
    with pytest.raises(errors.InvalidArgument):
        tdgpu.append_memmap(tmp_path, rows(2).exclude("x"))
    tdgpu.append_memmap(tmp_path, rows(2))
    expect(tmp_path, 3)


@pytest.mark.parametrize(
    "made",
    [
        lambda i: TensorDict({"a b": torch.full((1,), i)}, [1]),
        lambda i: TensorDict({"text": "same", "x": torch.full((1,), i)}, [1]),
        lambda i: Point(x=torch.full((1,), i), y=torch.zeros(1), batch_size=[1]),
        lambda i: TensorDict({"p": Point(x=torch.full((1,), i), y=torch.zeros(1), batch_size=[1])}, [1]),
    ],
    ids=["escaped", "value", "class", "class below"],
)
def test_what_depends_on_more_than_metadata_is_not_remembered(tmp_path, reads, made):
    made(0).memmap(tmp_path)
    for i in range(1, 4):
        tdgpu.append_memmap(tmp_path, made(i))
    assert len(reads) == 3
    assert tdgpu.load_memmap(tmp_path).batch_size == torch.Size([4])


def test_memory_is_bounded(tmp_path, reads, monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 12)  # each save has three leaves and two levels
    for i in range(4):
        rows(0).memmap(tmp_path / str(i))
        tdgpu.append_memmap(tmp_path / str(i), rows(1))
    assert list(remembered._kept) == [str(tmp_path / "2"), str(tmp_path / "3")]
    monkeypatch.setattr(remembered, "MOST", 4)
    tdgpu.append_memmap(tmp_path / "3", rows(2))
    assert not remembered._kept
    tdgpu.append_memmap(tmp_path / "3", rows(3))
    expect(tmp_path / "3", 4)


def test_threads_that_append_to_the_same_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 12)
    saves = [tmp_path / str(i) for i in range(3)]
    for save in saves:
        TensorDict(x=torch.zeros(1, dtype=torch.int64), batch_size=[1]).memmap(save)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with tdgpu.options(durable=False):
                for i in range(40):
                    row = TensorDict(x=torch.tensor([number * 100 + i + 1]), batch_size=[1])
                    tdgpu.append_memmap(saves[(i + number) % 3], row)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    found = torch.cat([tensordict.load_memmap(save)["x"][1:] for save in saves])
    assert sorted(found.tolist()) == [number * 100 + i + 1 for number in range(4) for i in range(40)]
