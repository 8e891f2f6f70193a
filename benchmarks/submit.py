"""A load onto a device with ``non_blocking=True``: when the call returns, and how much host memory the load takes.

Runs in a process of its own, so that the peak of its memory is the load's. Without a GPU the simulated device stands
in. Its memory is host memory too, but shared (RssShmem in /proc/self/status): every page of it belongs to a destination
or to the pinned ring. So the peak of the whole resident set, less what was resident before and less the destinations,
counts the ring, the threads and everything else that a load takes.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tdgpu
from benchmarks.measure import Row
from benchmarks.saves import MiB, large_leaves, wrong_leaves
from tdgpu.options import get

ALLOWANCE = 32 * MiB


def run(directory: Path, *, quick: bool) -> list[Row]:
    save = directory / "large"
    large_leaves(save, (128 if quick else 1024) * MiB)
    child = [sys.executable, "-m", "benchmarks.submit", str(save)]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the load failed:\n{done.stderr}")
    figures = json.loads(done.stdout.splitlines()[-1])
    size = f"{figures['nbytes'] / 2**30:.2f} GiB on {figures['device']} ({figures['path']})"
    return [
        Row(
            case=f"submit, {size}: call returns",
            unit="ms",
            ours=figures["returned"] * 1e3,
            reference=figures["loaded"] * 1e3,
            reference_is="the whole load",
            goal=0.1,
            at_least=False,
            checked="all bytes",
        ),
        Row(
            case=f"submit, {size}: host memory",
            unit="MiB",
            ours=figures["host_bytes"] / MiB,
            reference=(figures["ring_bytes"] + ALLOWANCE) / MiB,
            reference_is="ring + 32 MiB",
            goal=1.0,
            at_least=False,
            checked="all bytes",
        ),
    ]


def accelerator() -> str:
    """CUDA's device, or the simulated one in its place."""
    if torch.cuda.is_available():
        return "cuda"
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import simgpu

    simgpu.load().reset()
    return "simgpu"


def status(field: str) -> int:
    """A size from /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _measure(save: Path) -> dict[str, Any]:
    device = accelerator()
    before = status("VmRSS")
    # A first, small load makes the engine, whose ring counts as memory but whose start-up does not count as time.
    small = save.with_name("small")
    large_leaves(small, 0)
    future = tdgpu.load_memmap(small, device=device, return_early=True)
    future.synchronize()
    path = future.progress.path
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present
    # The first load takes the destinations from the driver, the second one from torch's allocator: that is the one to
    # time, since the driver's allocations take longer than all the rest (on the simulated device, by far).
    tdgpu.load_memmap(save, device=device)
    gc.collect()
    begun = time.perf_counter()
    loaded = tdgpu.load_memmap(save, device=device, non_blocking=True)
    returned = time.perf_counter() - begun
    torch.accelerator.synchronize(device)
    finished = time.perf_counter() - begun
    peak = status("VmHWM")
    nbytes = sum(tensor.nbytes for tensor in loaded.values())
    wrong = wrong_leaves(loaded, save)
    assert wrong == [], f"wrong bytes in {wrong}"
    return {
        "device": device,
        "path": path,
        "nbytes": nbytes,
        "returned": returned,
        "loaded": finished,
        "host_bytes": peak - before - (nbytes if device == "simgpu" else 0),
        "ring_bytes": get().ring_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]))))
