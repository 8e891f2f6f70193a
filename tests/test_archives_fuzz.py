"""Damaged archives by the thousand: never a wrong byte, never a crash or a hang, never an error of another kind.

What tdgpu loads has the bytes that tensordict loads or, where that refuses, that lie in the archive. What it refuses
and tensordict loads has a flaw that a reading of our own (`archives.strict`) finds, too. ``TDGPU_FUZZ_SECONDS`` says
for how long, ``TDGPU_FUZZ_SEED`` with which damage; ``archives.mutate.mutated(seed, number)`` makes a case again.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import simgpu
import torch
from archives import fuzz, hostile_payload, hostile_structure, strict
from archives.hostile import CASES
from archives.hostile_index import PASSED_OVER
from archives.mutate import DATA, SEEDS, mutated
from forked import run_process

import tdgpu
from tdgpu.errors import ArchiveError
from tdgpu.load import load_memmap

assert CASES is hostile_structure.CASES is hostile_payload.CASES

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("TDGPU_FUZZ_SECONDS", "20"))
SEED = int(os.environ.get("TDGPU_FUZZ_SEED", "0"))


def test_damaged_archives(tmp_path: Path) -> None:
    simgpu.require()
    code = 'import runpy; runpy.run_module("archives.fuzz", run_name="__main__", alter_sys=True)'
    arguments = (SEED, 0, SECONDS, tmp_path, "simgpu")
    status, out, err = run_process(code, *arguments, timeout=SECONDS + 200, simulated=True)
    at = (tmp_path / "at").read_text().strip() if (tmp_path / "at").exists() else "the start"
    assert status == 0, f"case {SEED}/{at}: {status}\n{err[-5000:]}"
    result = json.loads(out.splitlines()[-1])
    assert result["wrongs"] == [], json.dumps(result, indent=1)
    counts = result["counts"]
    assert result["cases"] >= 50, result
    assert counts.get("both load", 0) > 0, counts
    assert any(name.endswith("tensordict refuses") for name in counts), counts


@pytest.mark.parametrize("name", SEEDS)
def test_what_is_damaged_is_sound(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.tdz"
    path.write_bytes(SEEDS[name].data)
    assert tdgpu.load_memmap(path)["a"].view(torch.uint8).numpy().tobytes() == DATA
    assert strict.flaws(SEEDS[name].data, ("a.memmap",)) == set()
    with zipfile.ZipFile(path) as file:
        assert {entry: file.read(entry) for entry in file.namelist()} == strict.read(SEEDS[name].data)


def test_a_case_is_always_the_same() -> None:
    assert mutated(7, 3) == mutated(7, 3)
    assert len({mutated(7, number) for number in range(50)}) > 45


class Wrong:
    """A loader with a bug of one kind."""

    def __init__(self, bug: str) -> None:
        self.bug = bug

    def __call__(self, path: Path, **arguments: Any) -> Any:
        loaded = load_memmap(path, **arguments)
        threads = arguments.get("num_threads")
        if self.bug == "a wrong byte":
            loaded["a"] = loaded["a"].clone()
            loaded["a"][1234] = 0
        elif self.bug == "a leaf less":
            del loaded["n", "c"]
        elif self.bug == "a wrong byte with threads" and threads:
            loaded["a"] = loaded["a"] + 1
        elif self.bug == "a message that says nothing":
            raise ArchiveError("No.")
        elif (
            self.bug == "a refusal without reason"
            or (self.bug == "a refusal with threads" and threads)
            or (self.bug == "a refusal of the structure" and arguments.get("device") == "meta")
        ):
            raise ArchiveError("I do not like it.", save=path)
        return loaded


BUGS = [
    "a wrong byte", "a leaf less", "a wrong byte with threads", "a refusal without reason", "a refusal with threads",
    "a refusal of the structure", "a message that says nothing",
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("name", SEEDS)
def test_a_bug_would_be_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, bug: str) -> None:
    assert fuzz.case(tmp_path / "x.tdz", SEEDS[name].data, None) == "both load"
    monkeypatch.setattr(tdgpu, "load_memmap", Wrong(bug))
    with pytest.raises(fuzz.Verdict):
        fuzz.case(tmp_path / "x.tdz", SEEDS[name].data, None)


# What is about metadata, or leaves and their sizes, no reading of the archive alone can tell. Large ones take too long.
OF_THE_SAVE = ("leaf", "metadata: ")
LARGE = ("far more", "2^", "quoted")
HOSTILE = [
    name for name, case in CASES.items()
    if case.cause and not name.startswith(OF_THE_SAVE) and not any(word in name for word in LARGE)
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_the_second_opinion_sees_what_is_hostile(name: str) -> None:
    assert strict.flaws(CASES[name].make())


# A wrong CRC in an index is a flaw, though one that no load minds.
@pytest.mark.parametrize("name", [name for name in PASSED_OVER if "256 MiB" not in name and "CRC" not in name])
def test_the_second_opinion_does_not_mind_what_is_passed_over(name: str) -> None:
    assert not strict.flaws(PASSED_OVER[name]())
