"""Transforms and the cache, in processes of their own: found again, never found when it should not be, built once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import in_process, run_process
from loaders import numbers, save_rows
from tensordict import TensorDict

import tdgpu
from tdgpu import MemmapDataset
from tdgpu.cache import copying, switch
from tdgpu.cache.fingerprint import fingerprint
from tdgpu.cache.hasher import FingerprintWarning
from tdgpu.errors import TransformError
from tdgpu.options import options

ROOT = Path(__file__).parents[1]

SCRIPT = """
import json, os, sys
import torch
import tdgpu
from helper import scale

LOG, RATE = sys.argv[2], 2
shift = torch.zeros(4)

def double(rows):
    # one line per batch
    with open(LOG, "a") as log:
        log.write("double ")
    return {"y": scale(rows["x"]) * RATE + shift[0].int()}

def plus(rows, n=1):
    with open(LOG, "a") as log:
        log.write("plus ")
    return {"z": rows["y"] + n}

def small(rows):
    with open(LOG, "a") as log:
        log.write("small ")
    return rows["z"] < 15

rows = tdgpu.MemmapDataset(sys.argv[1])
result = rows.map(double, batched=True, batch_size=100).map(plus, batched=True, batch_size=100)
result = result.filter(small, batched=True, batch_size=100).shuffle(0).flatten()
print(json.dumps([result.fingerprint, sorted(result[:]["z"].tolist()), str(result.prefix)]))
"""
HELPER = "def scale(x):\n    return x\n"
RUN = "import runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv.pop()); runpy.run_path(sys.argv[0], run_name='__main__')"  # fmt: skip  # noqa: E501


class Program:
    """The script in a directory, over a save, with a cache."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.place = directory, directory / "program"
        self.save, self.cache, self.log = directory / "rows", directory / "cache", directory / "log"
        TensorDict({"x": torch.arange(20)}, [20]).memmap(self.save)
        self.place.mkdir()
        self.write(SCRIPT, HELPER)

    def write(self, script: str, helper: str = HELPER) -> None:
        (self.place / "script.py").write_text(script)
        (self.place / "helper.py").write_text(helper)

    def change(self, before: str, after: str) -> None:
        assert SCRIPT.count(before) == 1
        self.write(SCRIPT.replace(before, after))

    def run(self, save: Path | None = None) -> tuple[list[str], Any]:
        """What was called, and what came of it."""
        self.log.unlink(missing_ok=True)
        arguments = [self.place / "script.py", save or self.save, self.log, self.place]
        out = in_process(RUN, *arguments, TDGPU_CACHE=str(self.cache), PYTHONDONTWRITEBYTECODE="1")
        return (self.log.read_text().split() if self.log.exists() else []), json.loads(out.splitlines()[-1])


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


ALL = ["double", "plus", "small"]


def test_the_same_script_computes_once(program):
    called, first = program.run()
    assert called == ALL and first[1] == list(range(1, 15, 2))
    assert program.run() == ([], first)
    # Elsewhere, with a comment, another hash seed and working directory, and the save moved: still the same.
    moved = program.directory / "moved"
    shutil.copytree(program.place, moved)
    shutil.copytree(program.save, program.directory / "rows moved")
    (moved / "script.py").write_text(SCRIPT.replace("# one line", "\n    # some other line"))
    program.log.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, moved / "script.py", program.directory / "rows moved", program.log],
        capture_output=True, text=True, cwd="/",
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT), "TDGPU_CACHE": str(program.cache)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == first and not program.log.exists()


CHANGES = {
    "a constant": ("RATE = sys.argv[2], 2", "RATE = sys.argv[2], 3", ALL),
    "one bit of a tensor": ("shift = torch.zeros(4)", "shift = torch.tensor([0, 0, 0, -0.0])", ALL),
    "the second function": ('rows["y"] + n', 'rows["y"] + n + 0', ["plus", "small"]),
    "a default": ("n=1", "n=2", ["plus", "small"]),
    "the last function": ("< 15", "< 16", ["small"]),
    "an argument": ("plus, batched=True, batch_size=100", "plus, batched=True, batch_size=99", ["plus", "small"]),
}


def test_what_is_changed_is_computed_again_and_what_follows_from_it(program):
    _, first = program.run()
    for before, after, expected in CHANGES.values():
        program.change(before, after)
        called, result = program.run()
        assert called == expected, (before, called)
        assert (result[1] != first[1]) == (before in ("n=1", "RATE = sys.argv[2], 2", "< 15"))
    program.write(SCRIPT, HELPER.replace("return x", "return x * 1"))  # an imported helper is edited
    assert program.run()[0] == ALL
    program.change("shuffle(0)", "shuffle(1)")
    assert program.run()[0] == []
    program.write(SCRIPT)
    assert program.run() == ([], first)


def test_a_save_that_is_changed_in_place_is_another_one(program):
    _, first = program.run()
    held = TensorDict.load_memmap(program.save)
    held["x"][3] = 1000  # through the mapping: the file keeps its size, and maybe its time
    called, result = program.run()
    assert called == ALL and result[1] == [i for i in first[1] if i != 7]
    held["x"][3] = 3
    assert program.run() == ([], first)
    tdgpu.append_memmap(program.save, TensorDict({"x": torch.tensor([0])}, [1]))
    called, result = program.run()
    assert called == ALL and result[1] == sorted([1, *first[1]])


def test_a_write_to_an_archive_is_seen(program):
    archive = program.directory / "rows.tdz"
    tdgpu.pack_memmap(program.save, archive)
    _, first = program.run()
    assert program.run(archive) == ([], first)  # it holds the same rows
    tdgpu.load_memmap(archive, mode="r+")["x"][0] = 4
    called, result = program.run(archive)
    assert called == ALL and result[1] == sorted([9, *first[1][1:]])


def test_a_result_that_was_written_to_is_not_found(program):
    _, first = program.run()
    TensorDict.load_memmap(first[2])["z"][0] += 1
    called, again = program.run()
    assert called == [] and again[:2] == first[:2] and again[2] != first[2]  # copied again, from what was computed


AT_ONCE = """
import os, sys, time
import tdgpu

def slow(rows):
    with open(sys.argv[2], "a") as log:
        log.write(f"{os.getpid()}\\n")
    time.sleep(0.05)
    return {"y": rows["number"] * 2}

result = tdgpu.MemmapDataset(sys.argv[1]).map(slow, batched=True, batch_size=10)
assert result[:]["y"].tolist() == [2 * i for i in range(50)]
"""


def test_two_processes_at_once_compute_it_once(tmp_path):
    save_rows(tmp_path / "save", 50)
    # One process that forks: both begin at the same moment.
    code = f"import os\nchild = os.fork()\n{AT_ONCE}\nif child: assert os.waitpid(child, 0)[1] == 0"
    in_process(code, tmp_path / "save", tmp_path / "log", TDGPU_CACHE=str(tmp_path / "cache"))
    called = (tmp_path / "log").read_text().split()
    assert len(called) == 5 and len(set(called)) == 1


def test_a_process_that_is_killed_in_the_middle_leaves_nothing_that_is_found(tmp_path):
    save_rows(tmp_path / "save", 50)
    arguments = [tmp_path / "save", tmp_path / "log"]
    code = AT_ONCE.replace("time.sleep(0.05)", "os.kill(os.getpid(), 9) if int(rows['number'][0]) == 30 else None")
    status, _, _ = run_process(code, *arguments, TDGPU_CACHE=str(tmp_path / "cache"))
    assert status == -9 and len((tmp_path / "log").read_text().split()) == 4
    # The same function to the cache would be one without that line: here it is another, and so is what is built.
    in_process(AT_ONCE, *arguments, TDGPU_CACHE=str(tmp_path / "cache"))
    assert len((tmp_path / "log").read_text().split()) == 9
    assert len(os.listdir(tmp_path / "cache" / "entries")) == 1
    assert os.listdir(tmp_path / "cache" / "building") == []


# --- in this process --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> Any:
    with options(cache=str(tmp_path / "cache")):
        yield tmp_path / "cache"


@pytest.fixture
def dataset(tmp_path: Path, cache: Path) -> MemmapDataset:
    return MemmapDataset(save_rows(tmp_path / "save", 20))


def plus_one(rows: Any) -> dict[str, Any]:
    return {"one": rows["number"] + 1}


def test_every_view_has_a_fingerprint_that_follows_from_how_it_was_made(dataset, tmp_path):
    def all_of(rows: MemmapDataset) -> list[str]:
        parts = rows.train_test_split(5, seed=3)
        views = [
            rows, rows.select([1, 2]), rows.select([2, 1]), rows.shuffle(1), rows.shuffle(2), rows.sort("number"),
            rows.sort("number", True), rows.sort("byte"), rows.shard(4, 0), rows.shard(4, 1), rows.shard(4, 0, False),
            parts["train"], parts["test"], rows.rename_keys({"number": "n"}), rows.rename_keys({"number": "m"}),
            rows.shuffle(1).shuffle(1), rows.filter(lambda row: row["number"] > 3),
        ]  # fmt: skip
        return [view.fingerprint for view in views]

    found = all_of(dataset)
    assert len(set(found)) == len(found) and all(len(one) == 16 for one in found)
    shutil.copytree(dataset.prefix, tmp_path / "copy")
    assert all_of(MemmapDataset(tmp_path / "copy")) == found
    assert found[0] == fingerprint(dataset)


def test_a_function_that_holds_a_view_depends_on_its_rows(dataset):
    results = []
    for indices in ([1, 2], [2, 1], [1, 2]):
        other = dataset.select(indices)
        result = dataset.map(lambda row, other=other: {"first": row["number"] * 0 + other[0]["number"]})
        results.append((result.fingerprint, result[0]["first"].item()))
    assert results[0] == results[2] != results[1]
    assert [value for _, value in results] == [1, 2, 1]
    assert fingerprint(dataset.select([1])) != fingerprint(dataset.select([2])) != fingerprint(dataset)


def test_a_function_that_changes_itself_is_the_one_that_it_was(dataset):
    class Counter:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, row: Any) -> dict[str, Any]:
            self.calls += 1
            return {"calls": self.calls}

    first, second = Counter(), Counter()
    assert dataset.map(first).prefix == dataset.map(second).prefix
    assert (first.calls, second.calls) == (20, 0)
    assert dataset.map(first)[0]["calls"] == 21  # it is another one by now


def test_what_does_not_matter_does_not_count(dataset):
    assert dataset.map(plus_one).prefix == dataset.map(plus_one, batch_size=3, num_threads=1, progress=True).prefix
    assert dataset.map(plus_one, device="cpu").prefix == dataset.map(plus_one).prefix
    assert dataset.map(plus_one, batched=True).prefix != dataset.map(plus_one, batched=True, batch_size=3).prefix
    assert dataset.map(plus_one, input_keys=["number"]).prefix != dataset.map(plus_one).prefix


def test_a_result_is_computed_again_if_that_is_asked_for(dataset):
    count = 0

    def counted(row: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        return {"n": torch.tensor(count)}

    for begin, again in ((0, False), (100, True), (200, False)):
        count = begin
        result = dataset.map(counted, new_fingerprint="counted", load_from_cache=not again)
        assert result[0]["n"] == (1 if begin == 0 else 101) and result.fingerprint == "counted"
    assert dataset.map(lambda row: 1 / 0, new_fingerprint="counted")[0]["n"] == 101
    with pytest.raises(ValueError, match="of a result of map, not filter"):
        dataset.filter(lambda row: True, new_fingerprint="counted")
    kept = dataset.filter(lambda row: row["number"] == 19, new_fingerprint="last")
    assert numbers(kept[:]) == [19]
    with pytest.raises(ValueError, match="other rows"):
        dataset.select(range(5)).filter(lambda row: True, new_fingerprint="last")


def test_what_cannot_be_hashed_is_said_and_computed_each_time(dataset, cache):
    lock = threading.Lock()

    def locked(row: Any) -> dict[str, Any]:
        with lock:
            return {"a": row["number"]}

    found = []
    for _ in range(2):
        with pytest.warns(FingerprintWarning, match="lock"):
            found.append(dataset.map(locked))
    assert found[0].prefix != found[1].prefix and numbers(found[1][:]) == list(range(20))
    assert not cache.joinpath("entries").exists() or os.listdir(cache / "entries") == []
    # What is computed of it depends on its rows, which are the same.
    assert found[0].map(plus_one).prefix == found[1].map(plus_one).prefix


def test_without_caching_results_are_temporary_and_can_be_kept(dataset, cache, tmp_path):
    switch.disable_caching()
    try:
        first, second = dataset.map(plus_one), dataset.map(plus_one)
        assert first.prefix != second.prefix and cache not in first.prefix.parents
        first.shuffle(0).save_to_disk(tmp_path / "kept")
    finally:
        switch.enable_caching()
    assert numbers(MemmapDataset(tmp_path / "kept")[:]) == numbers(first.shuffle(0)[:])
    assert dataset.map(plus_one).prefix not in (first.prefix, second.prefix)


def test_rows_that_change_while_they_are_read_make_no_result(dataset, cache, monkeypatch):
    held = TensorDict.load_memmap(dataset.prefix)

    def meddling(row: Any) -> dict[str, Any]:
        held["byte"][0] += 1
        return {}

    with pytest.raises(TransformError, match="were changed while a transform read them"):
        dataset.map(meddling)
    real = copying.batches

    def meddled(rows: Any, *arguments: Any, **more: Any) -> Any:
        held["byte"][1] += 1
        return real(rows, *arguments, **more)

    flat = dataset.select([0]).flatten()
    monkeypatch.setattr(copying, "batches", meddled)
    with pytest.raises(TransformError, match="were changed"):
        flat.concatenate(dataset)
    assert os.listdir(cache / "entries") == [flat.fingerprint]


def test_cleaning_up_leaves_what_is_in_use_and_what_comes_from_elsewhere(dataset, cache, tmp_path):
    other = MemmapDataset(save_rows(tmp_path / "other", 5)).map(plus_one)
    kept = dataset.map(plus_one)
    dataset.shuffle(0).map(plus_one)
    kept.map(lambda row: {"two": row["one"] + 1})
    dataset.filter(lambda row: True)
    assert len(os.listdir(cache / "entries")) == 5
    assert kept.shuffle(1).cleanup_cache_files() == 3
    assert sorted(os.listdir(cache / "entries")) == sorted([other.fingerprint, kept.fingerprint])
    assert numbers(kept[:]) == list(range(20)) and numbers(other[:]) == list(range(5))
    del kept
    assert dataset.cleanup_cache_files() == 1


def test_a_view_of_a_result_keeps_it_in_use_in_a_worker_process_too(dataset, cache):
    view = dataset.map(plus_one).shuffle(0)
    entry = view.prefix.parents[1].name
    loader = torch.utils.data.DataLoader(view, batch_size=5, num_workers=1, persistent_workers=True)
    expected = view[:]["one"].tolist()
    assert torch.cat([batch["one"] for batch in loader]).tolist() == expected
    assert view.cleanup_cache_files() == 0
    assert os.listdir(cache / "entries") == [entry]
    del loader, view
    assert dataset.cleanup_cache_files() == 1
