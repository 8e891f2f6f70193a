"""Appends: small ones against tensordict's, large ones against a plain ``pwrite`` loop, the host memory that they take,
and what it costs to wait for the disk.

Where tensordict or the loop is the reference, durability is off: neither waits for the disk.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensordict
import torch
from tensordict import TensorDict

import tdgpu
from benchmarks.measure import Row, alternate, seconds
from benchmarks.saves import MiB
from benchmarks.submit import ALLOWANCE, accelerator, status
from tdgpu.options import get

LEAVES = 1000


def _row(count: int, leaves: int = LEAVES) -> TensorDict:
    """``count`` rows of many small leaves, no two of which are the same."""
    numbers = torch.arange(count * 4, dtype=torch.float32).view(count, 4)
    return TensorDict({f"leaf{i}": numbers + i for i in range(leaves)}, [count])


def _assert_repeated(save: Path, rows: TensorDict, times: int) -> None:
    """Asserts that a save holds the rows so many times."""
    saved = TensorDict.load_memmap(save)
    count = rows.batch_size[0]
    assert saved.batch_size[0] == times * count, f"{saved.batch_size[0]} rows in {save}, not {times * count}"
    for key in list(rows.keys()):
        found = saved[key].view(times, *rows[key].shape)
        assert torch.equal(found, rows[key].expand_as(found)), f"wrong bytes in {save}: {key}"


def one(directory: Path, *, quick: bool) -> list[Row]:
    """One row, by a call of its own."""
    row = _row(1)
    saves = [directory / "one-ours", directory / "one-theirs"]
    for save in saves:
        row.memmap(save)
    times = 2 if quick else 15
    with tdgpu.options(durable=False):
        ours, theirs = alternate(
            lambda: tdgpu.append_memmap(saves[0], row), lambda: tensordict.append_memmap(saves[1], row), times
        )
    for save in saves:
        _assert_repeated(save, row, 1 + 1 + times)  # what was saved, the warm-up, the measured ones
    return [
        Row(
            case=f"append, one row to {LEAVES:,} leaves",
            unit="appends/s",
            ours=1 / ours,
            reference=1 / theirs,
            reference_is="tensordict",
            goal=8.0,
            at_least=True,
            checked="all bytes",
        )
    ]


def many(directory: Path, *, quick: bool) -> list[Row]:
    """A row at a time with an appender, opened before and closed within what is measured."""
    row = _row(1)
    appends, theirs_appends, times = (100, 2, 1) if quick else (1000, 10, 3)
    saves = [directory / "many-ours", directory / "many-theirs"]
    for save in saves:
        row.memmap(save)

    def ours_run() -> None:
        with tdgpu.MemmapAppender(saves[0], durable=False) as appender:
            for _ in range(appends):
                appender.append(row)

    def theirs_run() -> None:
        for _ in range(theirs_appends):
            tensordict.append_memmap(saves[1], row)

    ours, theirs = alternate(ours_run, theirs_run, times)
    _assert_repeated(saves[0], row, 1 + appends * (1 + times))
    _assert_repeated(saves[1], row, 1 + theirs_appends * (1 + times))
    return [
        Row(
            case=f"MemmapAppender, {appends:,} rows, one at a time, to {LEAVES:,} leaves, and close",
            unit="appends/s",
            ours=appends / ours,
            reference=theirs_appends / theirs,
            reference_is="tensordict",
            goal=100.0,
            at_least=True,
            checked="all bytes",
        )
    ]


# --- large rows -------------------------------------------------------------------------------------------------------


def _large(leaves: int, nbytes: int) -> TensorDict:
    """Rows of 4 KiB, whose values differ from word to word and from leaf to leaf."""
    rows = nbytes // 4096
    return TensorDict(
        {f"w{i}": torch.arange(i, i + nbytes // 4, dtype=torch.int32).view(rows, 1024) for i in range(leaves)}, [rows]
    )


def _plain_loop(save: Path, rows: TensorDict, threads: int) -> None:
    """Writes the rows behind the first one of each leaf's file, in pieces of 1 MiB."""
    pieces = [
        (save / f"{key}.memmap", memoryview(rows[key].numpy()).cast("B"), offset)
        for key in list(rows.keys())
        for offset in range(0, rows[key].nbytes, MiB)
    ]

    def write(share: list[tuple[Path, memoryview, int]]) -> None:
        descriptors = {path: os.open(path, os.O_WRONLY) for path in {path for path, _, _ in share}}
        for path, data, offset in share:
            piece = data[offset : offset + MiB]
            while piece:
                written = os.pwrite(descriptors[path], piece, 4096 + offset)
                piece, offset = piece[written:], offset + written
        for descriptor in descriptors.values():
            os.close(descriptor)

    share = -(-len(pieces) // threads)
    workers = [threading.Thread(target=write, args=(pieces[i : i + share],)) for i in range(0, len(pieces), share)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _assert_grown(save: Path, first: TensorDict, rows: TensorDict) -> None:
    """Asserts that the files of a save hold one row, and then these."""
    for key in list(rows.keys()):
        data = torch.from_file(
            str(save / f"{key}.memmap"), size=1024 + rows[key].numel(), dtype=torch.int32, shared=False
        ).view(-1, 1024)
        assert torch.equal(data[:1], first[key]) and torch.equal(data[1:], rows[key]), f"wrong bytes in {save}: {key}"


def large(directory: Path, *, quick: bool) -> list[Row]:
    leaves, nbytes, times = 4, (4 if quick else 64) * MiB, 2 if quick else 9
    rows = _large(leaves, nbytes)
    first = rows[-1:].clone()
    first.memmap(directory / "large")
    threads = get().threads
    device = accelerator()
    on_device = rows.to(device)
    torch.accelerator.synchronize(device)

    def fresh(write: Callable[[Path], object]) -> float:
        """Seconds that it takes to write to a new copy of the save, whose bytes are checked."""
        save = directory / "growing"
        shutil.copytree(directory / "large", save)
        try:
            taken = seconds(lambda: write(save))
            _assert_grown(save, first, rows)
            return taken
        finally:
            shutil.rmtree(save)

    ways: list[Callable[[Path], object]] = [
        lambda save: tdgpu.append_memmap(save, rows),
        lambda save: _plain_loop(save, rows, threads),
        lambda save: tdgpu.append_memmap(save, on_device),
    ]
    taken: list[list[float]] = [[], [], []]
    gc.collect()
    with tdgpu.options(durable=False):
        for way in ways:
            fresh(way)  # warms
        for _ in range(times):
            for way, figures in zip(ways, taken, strict=True):
                figures.append(fresh(way))
    ours, plain, from_device = (leaves * nbytes / statistics.median(figures) / 1e9 for figures in taken)
    name = f"{leaves * nbytes // MiB} MiB in {leaves} leaves"
    return [
        Row(
            case=f"append, {name}, from {where}, {threads} threads",
            unit="GB/s",
            ours=figure,
            reference=plain,
            reference_is="pwrite loop",
            goal=goal,
            at_least=True,
            checked="all bytes",
        )
        for where, figure, goal in (("the CPU", ours, 0.85), (device, from_device, None))
    ]


# --- host memory ------------------------------------------------------------------------------------------------------


def memory(directory: Path, *, quick: bool) -> list[Row]:
    """The peak of the host's memory while rows of one leaf go from a device to a save (as in benchmarks.submit)."""
    nbytes = (64 if quick else 1024) * MiB
    child = [sys.executable, "-m", "benchmarks.appends", str(directory / "memory"), str(nbytes)]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the append failed:\n{done.stderr}")
    figures = json.loads(done.stdout.splitlines()[-1])
    return [
        Row(
            case=f"append, {nbytes // MiB} MiB in 1 leaf from {figures['device']}: host memory",
            unit="MiB",
            ours=figures["host_bytes"] / MiB,
            reference=(figures["ring_bytes"] + ALLOWANCE) / MiB,
            reference_is="ring + 32 MiB",
            goal=1.0,
            at_least=False,
            checked="all bytes",
        )
    ]


def _measure(save: Path, nbytes: int) -> dict[str, Any]:
    device = accelerator()
    before = status("VmRSS")
    first = _large(1, 4096)
    first.memmap(save)
    with tdgpu.options(durable=False):
        tdgpu.append_memmap(save, first.to(device))  # makes the engine: its ring counts, too
    count = nbytes // 4
    values = torch.empty(count, dtype=torch.int32, device=device)
    for begin in range(0, count, MiB):  # piece by piece: the host never holds all of them
        end = min(begin + MiB, count)
        values[begin:end].copy_(torch.arange(begin, end, dtype=torch.int32))
    rows = TensorDict(w0=values.view(-1, 1024), batch_size=[count // 1024])
    torch.accelerator.synchronize(device)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present
    with tdgpu.options(durable=False):
        tdgpu.append_memmap(save, rows)
    peak = status("VmHWM")
    saved = TensorDict.load_memmap(save)["w0"]
    assert saved.shape[0] == 2 + count // 1024
    for begin in range(0, count // 1024, 1024):
        piece = saved[2 + begin : 2 + begin + 1024].reshape(-1)
        assert torch.equal(piece, torch.arange(begin * 1024, begin * 1024 + len(piece), dtype=torch.int32)), (
            "wrong bytes"
        )
    return {
        "device": device,
        # The simulated device's memory is host memory, all of it the rows'.
        "host_bytes": peak - before - (nbytes if device == "simgpu" else 0),
        "ring_bytes": get().ring_bytes,
    }


# --- the disk ---------------------------------------------------------------------------------------------------------


def fsync(directory: Path, *, quick: bool) -> list[Row]:
    """What waiting for the disk adds to an append of one row."""
    found = []
    for leaves in (1, 10, 100):
        row = _row(1, leaves)
        save = directory / f"fsync-{leaves}"
        row.memmap(save)

        def append(durable: bool, save: Path = save, row: TensorDict = row) -> None:
            with tdgpu.options(durable=durable):
                tdgpu.append_memmap(save, row)

        times = 2 if quick else 15
        waiting, not_waiting = alternate(
            lambda append=append: append(True),  # type: ignore[misc]
            lambda append=append: append(False),  # type: ignore[misc]
            times,
        )
        _assert_repeated(save, row, 1 + 2 * (1 + times))
        found.append(
            Row(
                case=f"append, one row to {leaves} lea{'f' if leaves == 1 else 'ves'}, durable",
                unit="ms",
                ours=waiting * 1e3,
                reference=not_waiting * 1e3,
                reference_is="not durable",
                goal=None,
                at_least=False,
                checked="all bytes",
            )
        )
    return found


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]), int(sys.argv[2]))))
