"""From the page cache to host memory: the native readers, against a plain ``preadv`` loop in as many Python threads.

This is the host's half of a load; no device takes part. Both read a model's files, in pieces of up to 1 MiB, into one
buffer that is allocated beforehand. (``preadv`` releases the GIL, and in this process nothing else asks for it.)
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.measure import Row, alternate
from benchmarks.saves import MiB, weights
from tdgpu.options import get
from tdgpu.transfer import native

ALIGNMENT = 256


class Files:
    """The files of a save, where each one goes in the buffer, and the pieces (file, offset, bytes, place) to read."""

    def __init__(self, save: Path) -> None:
        self.paths = sorted(save.rglob("*.memmap"))
        self.places: list[int] = []
        self.pieces: list[tuple[int, int, int, int]] = []
        end = 0
        for index, path in enumerate(self.paths):
            size = path.stat().st_size
            self.places.append(end)
            self.pieces += [(index, offset, min(MiB, size - offset), end + offset) for offset in range(0, size, MiB)]
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.nbytes = sum(piece[2] for piece in self.pieces)
        self.buffer = np.empty(end, np.uint8)

    def check(self) -> None:
        for path, place in zip(self.paths, self.places, strict=True):
            data = path.read_bytes()
            assert self.buffer[place : place + len(data)].tobytes() == data, f"wrong bytes of {path}"
        self.buffer.fill(0xA5)


class NativeReaders:
    """The native core's reader threads."""

    def __init__(self, files: Files, threads: int) -> None:
        self._readers = native.Readers(threads)
        base = files.buffer.ctypes.data
        pieces = [(offset, size, 0, file, 0, 0, 0) for file, offset, size, _ in files.pieces]
        chunks = [(base + place, size, i, 1, 0, 0) for i, (_, _, size, place) in enumerate(files.pieces)]
        self._work = native.Work(
            [(str(path), 0) for path in files.paths],
            np.array(pieces, native.PIECE),
            np.array(chunks, native.CHUNK),
            np.empty(0, native.RUN),
        )

    def fill_slots(self) -> None:
        assert self._readers.post(self._work).wait_filled(60_000), "not filled within a minute"

    def close(self) -> None:
        self._readers.close()


def plain_loop(files: Files, threads: int) -> None:
    view = files.buffer.data

    def read(pieces: list[tuple[int, int, int, int]]) -> None:
        descriptor, opened = -1, -1
        for file, offset, size, place in pieces:
            if file != opened:
                if descriptor >= 0:
                    os.close(descriptor)
                descriptor, opened = os.open(files.paths[file], os.O_RDONLY), file
            while size:
                got = os.preadv(descriptor, [view[place : place + size]], offset)
                assert got > 0, f"{files.paths[file]} ends early"
                offset, place, size = offset + got, place + got, size - got
        os.close(descriptor)

    share = -(-len(files.pieces) // threads)
    workers = [
        threading.Thread(target=read, args=(files.pieces[i : i + share],)) for i in range(0, len(files.pieces), share)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def run(directory: Path, *, quick: bool) -> list[Row]:
    name, model = weights(directory / "weights", quick=quick)
    _check_saved(model, directory / "weights")
    files = Files(directory / "weights")
    threads = get().threads
    readers = NativeReaders(files, threads)
    try:
        for fill in (readers.fill_slots, lambda: plain_loop(files, threads)):
            fill()
            files.check()
        ours, plain = alternate(readers.fill_slots, lambda: plain_loop(files, threads), 5 if quick else 31)
        files.check()
    finally:
        readers.close()
    return [
        Row(
            case=f"fill, {name}, {threads} threads",
            unit="GB/s",
            ours=files.nbytes / ours / 1e9,
            reference=files.nbytes / plain / 1e9,
            reference_is="preadv loop",
            goal=0.85,
            at_least=True,
            checked="all bytes",
        )
    ]


def _check_saved(model: TensorDict, save: Path) -> None:
    saved = TensorDict.load_memmap(save)
    for key in model.keys(include_nested=True, leaves_only=True):
        assert torch.equal(saved[key].view(-1).view(torch.uint8), model[key].reshape(-1).view(torch.uint8)), key
