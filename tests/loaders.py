"""What the tests of loaders share: rows that tell which ones they are, and counts of what must not leak."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

WIDE = 300


def rows(first: int, count: int) -> TensorDict:
    """Rows whose every element tells which row it is of."""
    number = torch.arange(first, first + count)
    return TensorDict(
        {
            "number": number,
            "byte": (number % 251).to(torch.uint8),
            "nested": {"wide": (number.view(-1, 1) * WIDE + torch.arange(WIDE)).to(torch.int32)},
        },
        batch_size=[count],
    )


def save_rows(path: Path, count: int = 1000) -> Path:
    rows(0, count).memmap(path)
    return path


def numbers(batch: Any) -> list[int]:
    """Which rows a batch has, if all of its bytes are right."""
    host = batch.cpu()
    number = host["number"]
    assert torch.equal(host["byte"], (number % 251).to(torch.uint8))
    assert torch.equal(host["nested", "wide"], (number.view(-1, 1) * WIDE + torch.arange(WIDE)).to(torch.int32))
    return number.tolist()


def all_numbers(batches: Iterable[Any]) -> list[int]:
    return [number for batch in batches for number in numbers(batch)]


def native_threads() -> list[str]:
    """The native threads of tdgpu that there are."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            name = Path("/proc/self/task", task, "comm").read_text().strip()
            if name.startswith("tdgpu"):
                found.append(name)
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Memory of this process that is nobody else's: what files are mapped to does not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.002)


def ahead(iterator: Any) -> int:
    """How many batches an iterator has or reads that nobody has asked for yet."""
    return len(iterator._waiting) + sum(len(run.sizes) for _, run in iterator._under_way)
