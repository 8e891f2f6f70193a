"""``device="meta"``: the structure of a save of many leaves, against tensordict, without opening a leaf's file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from tensordict import TensorDict

import tdgpu
from benchmarks.measure import Row, alternate
from benchmarks.saves import many_leaves

META = torch.device("meta")

# In a process of its own: an audit hook cannot be taken back.
OPENED = """
import sys
import torch, tdgpu
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
tdgpu.load_memmap(sys.argv[1], device="meta")
print(sum(name.endswith(".memmap") for name in opened))
"""


def run(directory: Path, *, quick: bool) -> list[Row]:
    count = 1000 if quick else 10_000
    save = directory / "many"
    many_leaves(save, count)

    ours, theirs = (load(save, device=META) for load in (tdgpu.load_memmap, TensorDict.load_memmap))
    assert list(ours.keys()) == list(theirs.keys())
    assert all(
        (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        for a, b in zip(ours.values(), theirs.values(), strict=True)
    )
    opened = subprocess.run([sys.executable, "-c", OPENED, str(save)], capture_output=True, text=True, check=True)
    assert opened.stdout.strip() == "0", f"{opened.stdout.strip()} leaf files were opened"

    ours_s, theirs_s = alternate(
        lambda: tdgpu.load_memmap(save, device=META),
        lambda: TensorDict.load_memmap(save, device=META),
        3 if quick else 7,
    )
    return [
        Row(
            case=f"meta, {count:,} leaves",
            unit="leaves/s",
            ours=count / ours_s,
            reference=count / theirs_s,
            reference_is="tensordict",
            goal=6.0,
            at_least=True,
            checked="keys, shapes, dtypes; no leaf opened",
        )
    ]
