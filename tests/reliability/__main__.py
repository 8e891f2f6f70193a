"""Kills, breaks and cuts the power of appends as often as one likes, and prints what came of it.

    python -m tests.reliability --runs 10000

Exits with 1 if a row was lost, or a save was ever seen torn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from . import faults, powerloss
from .kinds import KINDS
from .sweep import Tally, sweep

PARTS = ("kill", "faults", "power")
# Those that promise something, once, at the end of their log.
POWER = ("append_memmap, durable", "append_memmap, tensorclass", "append_memmap, first rows", "MemmapAppender.flush")


def tallies(parts: list[str], runs: int, seed: int, directory: Path | None) -> Iterator[Tally]:
    """Does it, piece by piece."""
    appends = [kind for kind in KINDS if kind.name.startswith(("append_memmap", "MemmapAppender,"))]
    if "kill" in parts:
        for index, kind in enumerate(KINDS):
            share = runs * (index + 1) // len(KINDS) - runs * index // len(KINDS)
            yield sweep(kind, share, seed=seed, directory=directory)
    if "faults" in parts:
        for kind in appends:
            for error in faults.ERRORS:
                yield faults.every_call(kind, error, directory=directory)
            yield faults.from_here_on(kind, directory=directory)
            yield faults.without_fallocate(kind, directory=directory)
    if "power" in parts:
        for kind in KINDS:
            if kind.name in POWER:
                yield powerloss.power_loss(kind, seed=seed, directory=directory)
                yield powerloss.after_recovery(kind, seed=seed, directory=directory)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="how many processes are killed, of all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="of the points at which they are killed")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be given more than once")
    parser.add_argument("--dir", type=Path, help="where the saves are made; default: the temporary directory")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    torch.set_num_threads(1)  # a child that is forked hangs in OpenMP once its parent has used it
    begun = time.monotonic()
    done: list[Tally] = []
    for tally in tallies(given.part or list(PARTS), given.runs, given.seed, given.dir):
        done.append(tally)
        for failure in tally.failures:
            print(failure, file=sys.stderr, flush=True)
        print(f"{time.monotonic() - begun:6.0f} s  {tally.runs:6}  {tally.name}", file=sys.stderr, flush=True)
    done.append(total(done))
    print(f"{platform.platform()}, Python {platform.python_version()}, torch {torch.__version__}; seed {given.seed}\n")
    print("| what | points | runs | old | new | lost | torn |\n|---|---|---|---|---|---|---|")
    for t in done:
        print(f"| {t.name} | {t.points} | {t.runs} | {t.old} | {t.new} | {t.lost} | {t.torn} |")
    if given.json:
        given.json.write_text(json.dumps([dataclasses.asdict(tally) for tally in done], indent=2))
    return 1 if done[-1].lost or done[-1].torn else 0


def total(tallies: list[Tally]) -> Tally:
    """The sum of all."""
    names = ("points", "runs", "old", "new", "lost", "torn")
    return Tally("all", **{name: sum(getattr(tally, name) for tally in tallies) for name in names})


if __name__ == "__main__":
    sys.exit(main())
