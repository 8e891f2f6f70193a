"""Epochs of batches, shuffled: against DataLoader, per row and per batch, and against a bare loop that copies rows.

All rows are in the page cache, except where the case says that they are cold.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset

import tdgpu
from benchmarks.measure import Row, seconds
from benchmarks.submit import accelerator

BATCH = 256
SHAPES = {  # rows and bytes of a row
    "64 B": (200_000, 64),
    "1 KiB": (20_000, 1 << 10),
    "64 KiB": (4_000, 64 << 10),
    "150 KiB": (2_000, 150 << 10),
}
NESTED = {"12 leaves": (20_000, 1 << 10)}  # as many bytes in all


def _save(path: Path, rows: int, nbytes: int, leaves: int) -> None:
    """A save whose every row begins with its number, eight bytes."""
    generator = torch.Generator().manual_seed(0)
    each = nbytes // leaves // 8 * 8
    numbers = torch.arange(rows).view(-1, 1).view(torch.uint8)
    made: dict[str, Any] = {}
    for i in range(leaves):
        leaf = torch.randint(0, 256, (rows, each), dtype=torch.uint8, generator=generator)
        leaf[:, :8] = numbers
        made[f"leaf{i}"] = leaf
    nested = {k: v for i, (k, v) in enumerate(made.items()) if i % 3 == 2}
    flat = {k: v for i, (k, v) in enumerate(made.items()) if i % 3 != 2}
    if nested:
        flat["nested"] = TensorDict(nested, [rows])
    TensorDict(flat, [rows]).memmap(path)


class _PerRow(Dataset[Any]):
    """tensordict's mapping, a row at a time, as DataLoader fetches by itself."""

    def __init__(self, path: Path) -> None:
        self._held = TensorDict.load_memmap(path)

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: int) -> Any:
        return self._held[index]


class _PerBatch(_PerRow):
    def __getitems__(self, indices: list[int]) -> Any:
        return self._held[torch.tensor(indices)]


def _same(batch: Any) -> Any:
    return batch


def _check(batch: Any, path: Path, whole: Any) -> None:
    """Asserts that a batch holds the bytes of its rows."""
    first = batch["leaf0"].cpu()
    numbers = first[:, :8].contiguous().view(torch.int64).view(-1)
    for key in whole.keys(True, True):
        assert torch.equal(batch[key].cpu(), whole[key][numbers]), f"wrong bytes in a batch of {path}: {key}"


def _epoch(batches: Iterable[Any], rows: int) -> None:
    """Goes through the batches as a training loop would, and counts their rows."""
    count = 0
    for batch in batches:
        count += batch.batch_size[0]
    assert count == rows, f"{count} of {rows} rows"
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def bare_library(directory: Path) -> ctypes.CDLL:
    """The bare loop, compiled."""
    library = directory / "libbare_gather.so"
    source = Path(__file__).with_name("bare_gather.cpp")
    subprocess.run(
        [os.environ.get("CXX", "c++"), "-std=c++17", "-O3", "-shared", "-fPIC", source, "-o", library, "-lpthread"],
        check=True,
    )
    return ctypes.CDLL(str(library))


class _Bare:
    """The bare loop over the leaves of a save."""

    def __init__(self, library: ctypes.CDLL, whole: Any, threads: int) -> None:
        self._library = library
        self._leaves = [whole[key] for key in whole.keys(True, True)]
        sizes = [leaf[0].nbytes for leaf in self._leaves]
        self._pointers = (ctypes.c_void_p * len(sizes))(*[leaf.data_ptr() for leaf in self._leaves])
        self._sizes = (ctypes.c_uint64 * len(sizes))(*sizes)
        self._threads = threads
        self._buffer = np.zeros(sum(sizes) * BATCH, np.uint8)
        self._rows = len(whole)

    def __call__(self) -> None:
        order = torch.randperm(self._rows)
        self._library.bare_gather(
            self._pointers, self._sizes, ctypes.c_uint32(len(self._sizes)), ctypes.c_void_p(order.data_ptr()),
            ctypes.c_uint64(self._rows), ctypes.c_uint64(BATCH), ctypes.c_uint32(self._threads),
            ctypes.c_void_p(self._buffer.ctypes.data),
        )  # fmt: skip


def _to(device: str) -> Callable[[Any], Any]:
    if device == "cpu":
        return _same
    return lambda batch: batch.to(device, non_blocking=True)


def _dataloaders(path: Path, device: str, rows: int) -> dict[str, Callable[[], Iterable[Any]]]:
    """The ways in which DataLoader can be fast, for an epoch of the first rows."""
    dataset = torch.utils.data.Subset(_PerBatch(path), range(rows))
    pinned = (False, True) if device != "cpu" else (False,)
    return {
        f"{workers} workers{', pinned' if pin else ''}": lambda workers=workers, pin=pin: DataLoader(  # type: ignore[misc]
            dataset, batch_size=BATCH, shuffle=True, num_workers=workers, collate_fn=_same, pin_memory=pin
        )
        for workers in (0, 2)
        for pin in pinned
    }


def run(directory: Path, *, quick: bool) -> list[Row]:
    """Rows per second of an epoch, shuffled exactly, to the CPU and to a device."""
    library = bare_library(directory)
    found: list[Row] = []
    for name, (rows, nbytes) in {**SHAPES, **NESTED}.items():
        rows = rows // 20 if quick else rows
        path = directory / "rows"
        _save(path, rows, nbytes, 12 if name == "12 leaves" else 1)
        for device in ("cpu", accelerator()):
            found += _compare(path, name, rows, device, library, times=2 if quick else 3)
        shutil.rmtree(path)
    return found


def _compare(path: Path, name: str, rows: int, device: str, library: ctypes.CDLL, times: int) -> list[Row]:
    whole = TensorDict.load_memmap(path)
    # Of narrow rows one thread gathers faster than Python goes through the batches, on the other core.
    threads = 1 if whole.bytes() < 32 * 1024 * len(whole) else 2
    loader = tdgpu.DeviceLoader(
        path, BATCH, shuffle=True, num_workers=threads, prefetch_factor=4, device=None if device == "cpu" else device,
        resident=False,
    )  # fmt: skip
    for batch in loader:
        _check(batch, path, whole)
    move = _to(device)
    bare = _Bare(library, whole, threads)
    few = min(rows, 8 * BATCH)  # a whole epoch row by row would take a quarter of a minute
    per_row = DataLoader(
        torch.utils.data.Subset(_PerRow(path), range(few)), batch_size=BATCH, shuffle=True, collate_fn=torch.stack
    )
    some = min(rows, max(rows // 4, 8 * BATCH))
    per_batch = _dataloaders(path, device, some)
    ways: dict[str, tuple[Callable[[], None], int]] = {
        "ours": (lambda: _epoch(loader, rows), rows),
        "per row": (lambda: _epoch(map(move, per_row), few), few),
        "bare": (bare, rows),
        **{
            way: (lambda make=make: _epoch(map(move, make()), some), some)  # type: ignore[misc]
            for way, make in per_batch.items()
        },
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for function, _ in ways.values():
        function()
    gc.collect()
    for _ in range(times):
        for way, (function, count) in ways.items():
            taken[way].append(count / seconds(function))
    speed = {way: statistics.median(figures) for way, figures in taken.items()}
    loader.close()
    fastest = max(per_batch, key=lambda way: speed[way])
    return [
        Row(
            case=f"loader, rows of {name} to {device}",
            unit="rows/s",
            ours=speed["ours"],
            reference=speed[way],
            reference_is=what,
            goal=goal,
            at_least=True,
            checked="all bytes",
        )
        for way, what, goal in (
            ("per row", "DataLoader, per row", 10.0),
            (fastest, f"DataLoader, __getitems__, {fastest}", 3.0),
            ("bare", f"bare loop, {threads} thread{'s' * (threads > 1)}", 0.8),
        )
    ]


# --- cold rows --------------------------------------------------------------------------------------------------------


def _evict(path: Path) -> float:
    """Drops a file from the page cache; the share of it that is still there."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
            pages = -(-size // mmap.PAGESIZE)
            present = (ctypes.c_ubyte * pages)()
            address = np.frombuffer(mapped, np.uint8)
            ctypes.CDLL(None, use_errno=True).mincore(
                ctypes.c_void_p(address.ctypes.data), ctypes.c_size_t(size), present
            )
            share = sum(byte & 1 for byte in present) / pages
            del address
    return share


def cold(directory: Path, *, quick: bool) -> list[Row]:
    """Rows that are not in the page cache, against a loop that touches them through a mapping."""
    rows, nbytes = (2_000, 4 << 10) if quick else (100_000, 4 << 10)
    path = directory / "cold"
    _save(path, rows, nbytes, 1)
    file = path / "leaf0.memmap"
    wanted = min(rows, 4_000)

    def ours(order: torch.Tensor, check: bool) -> None:
        subset = torch.utils.data.Subset(tdgpu.MemmapDataset(path), order.tolist())
        with tdgpu.DeviceLoader(subset, BATCH, num_workers=2, prefetch_factor=8) as loader:
            for batch in loader:
                if check:
                    _check(batch, path, TensorDict.load_memmap(path))

    def faults(order: torch.Tensor, check: bool) -> None:
        mapped = TensorDict.load_memmap(path)["leaf0"]
        for begin in range(0, wanted, BATCH):
            torch.index_select(mapped, 0, order[begin : begin + BATCH])

    figures: dict[str, list[float]] = {"ours": [], "page faults": []}
    for time in range(3 if quick else 6):  # the first one checks, and is not counted
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(time))[:wanted]
        for way, function in (("ours", ours), ("page faults", faults)):
            gc.collect()  # what is mapped is not dropped
            left = _evict(file)
            if left > 0.02:
                raise RuntimeError(f"{left:.0%} of {file} stayed in the page cache")
            taken = seconds(lambda: function(order, time == 0))  # noqa: B023 - called at once
            figures[way].append(wanted / taken)
    speed = {name: statistics.median(found[1:]) for name, found in figures.items()}
    return [
        Row(
            case="loader, cold rows of 4 KiB, 2 threads",
            unit="rows/s",
            ours=speed["ours"],
            reference=speed["page faults"],
            reference_is="page faults",
            goal=3.0,
            at_least=True,
            checked="all bytes",
        )
    ]


# --- memory -----------------------------------------------------------------------------------------------------------


def memory(directory: Path, *, quick: bool) -> list[Row]:
    """How much the memory of a process grows from its second epoch to its last, over rows that it has not touched."""
    path = directory / "memory"
    rows = 4_000 if quick else 100_000
    _save(path, rows, 16 << 10, 1)
    child = [sys.executable, "-m", "benchmarks.loaders", str(path), "3" if quick else "10"]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the loader failed:\n{done.stderr}")
    begun, ended = map(int, done.stdout.split())
    return [
        Row(
            case=f"loader, {rows * (16 << 10) >> 20} MiB, resident memory after the first epoch and the last",
            unit="MiB",
            ours=ended / 2**20,
            reference=begun / 2**20,
            reference_is="after the first",
            goal=1.05,
            at_least=False,
            checked="counted rows",
        )
    ]


def _measure(path: Path, epochs: int) -> tuple[int, int]:
    from benchmarks.submit import status

    resident = []
    with tdgpu.DeviceLoader(path, BATCH, shuffle=True) as loader:
        for _ in range(epochs):
            _epoch(loader, len(loader.dataset))
            gc.collect()
            resident.append(status("VmRSS"))
    return resident[0], resident[-1]


if __name__ == "__main__":
    print(*_measure(Path(sys.argv[1]), int(sys.argv[2])))
