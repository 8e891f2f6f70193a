"""Archives: inflated to the CPU and packed, against tensordict with as many threads; and the host memory that a load of
one to a device takes.

The leaves are random floats, which are nearly incompressible, as weights are: that is when inflating is slowest, and
when one inflater differs least from another. One case has token ids instead.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tensordict import pack_memmap as their_pack

import tdgpu
from benchmarks.measure import Row, alternate, seconds
from benchmarks.saves import MiB
from benchmarks.submit import ALLOWANCE, accelerator, status
from tdgpu.options import get

THREADS = 2
BLOCK = MiB


def _leaves(count: int, nbytes: int) -> TensorDict:
    generator = torch.Generator().manual_seed(count)
    return TensorDict({f"w{i}": torch.randn(nbytes // 4, generator=generator) for i in range(count)})


def _tokens(count: int, nbytes: int) -> TensorDict:
    generator = torch.Generator().manual_seed(count)
    return TensorDict({f"t{i}": torch.randint(0, 50_000, (nbytes // 8,), generator=generator) for i in range(count)})


def _same(a: TensorDict, b: TensorDict) -> bool:
    return list(a.keys()) == list(b.keys()) and all(torch.equal(a[key], b[key]) for key in list(a.keys()))


def inflate(directory: Path, *, quick: bool) -> list[Row]:
    size = (8 if quick else 128) * MiB
    one, many = _leaves(1, size), _leaves(16, size // 16)
    tokens = _tokens(16, size // 16)
    for saved, name in ((one, "one"), (many, "many"), (tokens, "tokens")):
        saved.memmap(directory / name)
    blocks = tdgpu.pack_memmap(directory / "one", directory / "blocks.tdz", compression="deflate", block_size=BLOCK)
    stream = their_pack(directory / "one", directory / "stream.tdz", compression="deflate")
    streams = their_pack(directory / "many", directory / "streams.tdz", compression="deflate")
    token_streams = their_pack(directory / "tokens", directory / "token-streams.tdz", compression="deflate")
    cases: list[tuple[str, Path, TensorDict, int, float]] = [
        (f"1 leaf of {size // MiB} MiB in blocks", blocks, one, THREADS, 3.0),
        (f"16 leaves of {size // 16 // MiB or 0.5} MiB", streams, many, THREADS, 2.0),
        (f"16 leaves of {size // 16 // MiB or 0.5} MiB, tokens", token_streams, tokens, THREADS, 2.0),
        (f"1 leaf of {size // MiB} MiB, one stream", stream, one, 1, 1.3),
    ]
    rows = []
    for name, archive, saved, threads, goal in cases:

        def load(by: Callable[..., Any], archive: Path = archive, threads: int = threads) -> Any:
            return by(archive, num_threads=threads)

        assert _same(load(tdgpu.load_memmap), saved)
        assert _same(load(TensorDict.load_memmap), saved)
        ours, theirs = alternate(
            lambda load=load: load(tdgpu.load_memmap),  # type: ignore[misc]
            lambda load=load: load(TensorDict.load_memmap),  # type: ignore[misc]
            2 if quick else 7,
        )
        rows.append(
            Row(
                case=f"inflate, {name}, {threads} thread{'s' * (threads > 1)}",
                unit="MB/s",
                ours=size / ours / 1e6,
                reference=size / theirs / 1e6,
                reference_is="tensordict",
                goal=goal,
                at_least=True,
                checked="all bytes",
            )
        )
    return rows


def pack(directory: Path, *, quick: bool) -> list[Row]:
    size = (4 if quick else 64) * MiB
    saved = _leaves(1, size)
    saved.memmap(directory / "to-pack")
    ours_to, theirs_to = directory / "ours.tdz", directory / "theirs.tdz"
    ours, theirs = alternate(
        lambda: tdgpu.pack_memmap(
            directory / "to-pack", ours_to, compression="deflate", block_size=BLOCK, num_threads=THREADS
        ),
        lambda: their_pack(directory / "to-pack", theirs_to, compression="deflate"),
        1 if quick else 3,
    )
    assert _same(TensorDict.load_memmap(ours_to), saved)
    larger = ours_to.stat().st_size / theirs_to.stat().st_size
    return [
        Row(
            case=f"pack, 1 leaf of {size // MiB} MiB, deflate, {THREADS} threads ({larger - 1:+.2%} bytes)",
            unit="MB/s",
            ours=size / ours / 1e6,
            reference=size / theirs / 1e6,
            reference_is="tensordict",
            goal=1.8,
            at_least=True,
            checked="all bytes",
        )
    ]


def memory(directory: Path, *, quick: bool) -> list[Row]:
    """The peak of the host's memory during loads to a device, in a process of its own (as in benchmarks.submit)."""
    rows = []
    for name, block in (("blocks", BLOCK), ("streams", None)):
        archive = directory / f"memory-{name}.tdz"
        tdgpu.save(_leaves(4, (8 if quick else 64) * MiB), archive, compression="deflate", block_size=block)
        child = [sys.executable, "-m", "benchmarks.archives", str(archive)]
        done = subprocess.run(child, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the load failed:\n{done.stderr}")
        figures = json.loads(done.stdout.splitlines()[-1])
        bound = figures["ring_bytes"] + figures["threads"] * BLOCK + ALLOWANCE
        rows.append(
            Row(
                case=f"archive of {figures['nbytes'] / MiB:.0f} MiB in {name} to {figures['device']}: host memory",
                unit="MiB",
                ours=figures["host_bytes"] / MiB,
                reference=bound / MiB,
                reference_is="ring + a block a thread + 32 MiB",
                goal=1.0,
                at_least=False,
                checked="all bytes",
            )
        )
    return rows


def _measure(archive: Path) -> dict[str, Any]:
    device = accelerator()
    before = status("VmRSS")
    small = archive.with_name("small.tdz")
    shutil.rmtree(small, ignore_errors=True)
    tdgpu.save(TensorDict(a=torch.ones(1)), small, compression="deflate")
    tdgpu.load_memmap(small, device=device)  # makes the engine: its ring counts, too
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present
    taken = seconds(lambda: tdgpu.load_memmap(archive, device=device))
    loaded = tdgpu.load_memmap(archive, device=device)
    peak = status("VmHWM")
    nbytes = sum(tensor.nbytes for tensor in loaded.values())
    expected = _leaves(len(list(loaded.keys())), nbytes // len(list(loaded.keys())))
    assert all(torch.equal(loaded[key].cpu(), expected[key]) for key in list(expected.keys())), "wrong bytes"
    gc.collect()
    return {
        "device": device,
        "nbytes": nbytes,
        "seconds": taken,
        "host_bytes": peak - before - (nbytes if device == "simgpu" else 0),
        "ring_bytes": get().ring_bytes,
        "threads": get().threads,
    }


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]))))
