"""Loads damaged archives, one after another, and compares with what tensordict and a second opinion say of them.

    python -m archives.fuzz SEED FIRST SECONDS DIRECTORY [DEVICE]

It prints one line of JSON in the end: how many there were, the outcomes, and what was wrong. The number of the archive
under way is kept in ``DIRECTORY/at``, for a process that does not live to say it.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import tdgpu
from archives import strict
from archives.mutate import mutated
from tdgpu.errors import TdgpuError

LEAVES = {"a.memmap": ("a",), "n/c.memmap": ("n", "c")}
ENTRIES = ("meta.json", "n/meta.json", *LEAVES)
# A case that takes longer hangs.
PATIENCE = 60
MOST_WRONGS = 10


class Verdict(Exception):
    """What a case did that it must not."""


def leaves(loaded: Any) -> dict[str, bytes]:
    """The bytes of every leaf, by the name of its entry."""
    found = {}
    for key, value in loaded.items(True, True):
        path = key if isinstance(key, tuple) else (key,)
        found["/".join(path) + ".memmap"] = value.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return found


def upstream(path: Path) -> dict[str, bytes] | None:
    """What tensordict loads; None if it does not."""
    try:
        return leaves(TensorDict.load_memmap(path))
    except Exception:
        return None


def case(path: Path, data: bytes, device: str | None) -> str:
    """Loads one archive in every way; returns a word for the outcome, or raises a Verdict."""
    path.write_bytes(data)
    theirs = upstream(path)
    ways: list[dict[str, Any]] = [{}, {"num_threads": 2}]
    if device is not None:
        ways.append({"device": device})
    outcomes: set[str] = set()
    ours: dict[str, bytes] | None = None
    for way in ways:
        try:
            found = leaves(tdgpu.load_memmap(path, **way))
        except TdgpuError as error:
            outcomes.add(type(error).__name__)
            message = str(error)
            if str(path) not in message:
                raise Verdict(f"the message does not name the file: {message}") from error
            continue
        outcomes.add("loads")
        if ours is not None and found != ours:
            raise Verdict(f"{way} gives other bytes")
        ours = found
    if len(outcomes) > 1:
        raise Verdict(f"the ways differ: {sorted(outcomes)}")
    outcome = outcomes.pop()
    structure(path, loads=ours is not None)
    if ours is None:
        if theirs is not None:
            reasons = strict.flaws(data, ENTRIES)
            if not reasons and set(theirs) == set(LEAVES):
                raise Verdict(f"{outcome}, but nothing is wrong with it, and tensordict loads it")
            return f"{outcome}, tensordict loads: {', '.join(sorted(reasons)) or 'other keys'}"
        return f"{outcome}, tensordict refuses"
    if theirs is not None:
        if ours != theirs:
            raise Verdict("tensordict loads other bytes")
        return "both load"
    entries = strict.read(data)
    for name, value in ours.items():
        if entries.get(name) != value:
            raise Verdict(f"it loads, tensordict does not, and {name} has other bytes: {strict.flaws(data, ENTRIES)}")
    return f"loads, tensordict refuses: {', '.join(sorted(strict.flaws(data, ENTRIES)))}"


def structure(path: Path, *, loads: bool) -> None:
    """What loads with its bytes loads without them too."""
    try:
        tdgpu.load_memmap(path, device="meta")
    except TdgpuError as error:
        if loads:
            raise Verdict(f"it loads, but not its structure: {error}") from error


def main(seed: int, first: int, seconds: float, directory: Path, device: str | None = None) -> dict[str, Any]:
    """Tries archives for so long, and returns what came of it."""
    warnings.simplefilter("ignore")
    if device is not None:
        import simgpu

        simgpu.load()
    counts: collections.Counter[str] = collections.Counter()
    wrongs: list[str] = []
    path = directory / "fuzz.tdz"
    deadline = time.monotonic() + seconds
    number, open_files = first, 0
    with open(directory / "at", "wb", buffering=0) as at:
        while time.monotonic() < deadline and len(wrongs) < MOST_WRONGS:
            at.seek(0)
            at.write(b"%d\n" % number)
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            title, data = mutated(seed, number)
            on = device if number % 4 == 0 else None
            try:
                counts[case(path, data, on)] += 1
            except Verdict as verdict:
                wrongs.append(f"{seed}/{number} ({title}): {verdict}")
            except Exception as error:
                wrongs.append(f"{seed}/{number} ({title}): {error!r} is no error of tdgpu")
            number += 1
            if number - first == 50:
                open_files = len(os.listdir("/proc/self/fd"))
    faulthandler.cancel_dump_traceback_later()
    if number - first > 50 and len(os.listdir("/proc/self/fd")) > open_files:
        wrongs.append("files stay open")
    if os.listdir(directory) not in (["at", "fuzz.tdz"], ["fuzz.tdz", "at"]):
        wrongs.append(f"files are left: {os.listdir(directory)}")
    return {"cases": number - first, "counts": dict(counts.most_common()), "wrongs": wrongs}


if __name__ == "__main__":
    result = main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:6])
    print(json.dumps(result))
