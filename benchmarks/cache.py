"""Fingerprints of saves: how fast their bytes are hashed, against how fast the page cache gives them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch
from tensordict import TensorDict

import tdgpu
from benchmarks.measure import Row, alternate, seconds
from benchmarks.saves import MiB
from tdgpu.cache.fingerprint import fingerprint
from tdgpu.cache.remembered import SETTLED_NS
from tdgpu.options import options

THREADS = 2
PIECE = MiB
ROW = 1024  # numbers of 4 bytes


def fingerprints(directory: Path, *, quick: bool) -> list[Row]:
    """The fingerprint of a save of large leaves; and once more, when it is remembered."""
    leaf = 64 * MiB
    count = 2 if quick else 16
    path = directory / "to-hash"
    files = _save(path, leaf, count)
    with options(threads=THREADS, cache=str(directory / "cache")):
        dataset = tdgpu.MemmapDataset(path)
        expected = fingerprint(dataset)

        def hash_all() -> None:
            # Away with what is remembered, so that all of it is read each time.
            (directory / "cache" / "digests").unlink(missing_ok=True)
            assert fingerprint(dataset) == expected, "another fingerprint"

        ours, theirs = alternate(hash_all, lambda: _read(files), 2 if quick else 7)
        # What was written lately is not remembered.
        time.sleep(max(0.0, SETTLED_NS / 1e9 + 1 - (time.time() - files[-1].stat().st_ctime)))
        hash_all()
        again = seconds(lambda: fingerprint(dataset))
        assert fingerprint(dataset) == expected
        _flip_the_last_bit(files[-1])
        assert fingerprint(dataset) != expected, "a flipped bit does not show"
    nbytes = leaf * count
    return [
        Row(
            case=f"fingerprint, {nbytes // MiB} MiB in {count} leaves, {THREADS} threads",
            unit="GB/s",
            ours=nbytes / ours / 1e9,
            reference=nbytes / theirs / 1e9,
            reference_is="preadv loop",
            goal=0.5,
            at_least=True,
            checked="a flipped bit shows",
        ),
        Row(
            case=f"fingerprint, {nbytes // MiB} MiB in {count} leaves, remembered",
            unit="ms",
            ours=again * 1e3,
            reference=ours * 1e3,
            reference_is="hashing it",
            goal=None,
            at_least=False,
            checked="the same",
        ),
    ]


def _save(path: Path, nbytes: int, count: int) -> list[Path]:
    """Saves `count` leaves, each different in every word, without holding them in memory at once."""
    rows = nbytes // 4 // ROW
    empty = torch.zeros((), dtype=torch.int32).expand(rows, ROW)
    saved = TensorDict({f"leaf{i}": empty for i in range(count)}, batch_size=[rows]).memmap_like(path)
    for i in range(count):
        torch.arange(i, i + rows * ROW, dtype=torch.int32, out=saved[f"leaf{i}"].view(-1))
    files = [path / f"leaf{i}.memmap" for i in range(count)]
    for file in files:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    return files


def _flip_the_last_bit(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)[0]
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last ^ 1]))


def _read(files: list[Path]) -> None:
    """The bytes of the files from the page cache, by as many threads, each into a piece of memory of its own."""
    waiting = list(files)

    def work() -> None:
        piece = memoryview(bytearray(PIECE))
        while waiting:
            fd = os.open(waiting.pop(), os.O_RDONLY)
            offset = 0
            while count := os.preadv(fd, [piece], offset):
                offset += count
            os.close(fd)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
