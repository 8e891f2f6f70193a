"""A dataset's rows, batch by batch, for transforms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch

from tdgpu.data.dataset import MemmapDataset
from tdgpu.data.form import BatchForm
from tdgpu.data.loader import DeviceLoader
from tdgpu.data.progress import progress as with_bar
from tdgpu.errors import NotSupported

__all__ = ["COPIED_BYTES", "batches", "rows_per_copy"]

#: Bytes of rows that are copied at a time.
COPIED_BYTES = 4 << 20


def batches(
    dataset: Any, size: int, *, device: torch.device | None = None, threads: int | None = None, bar: str | None = None
) -> Iterator[tuple[int, Any]]:
    """The rows in batches: the position of the first one, and the batch.

    Args:
        dataset: a MemmapDataset.
        size: rows of a batch.
        device: where the batches go; None: the CPU.
        threads: native threads that gather; None: as the option ``threads`` says.
        bar: what a progress bar says; None: there is none.

    Raises:
        TdgpuError: see :class:`tdgpu.DeviceLoader`.
    """
    if _is_gathered(dataset):
        # One pass: it would not be worth it to have the whole save on the device.
        loader = DeviceLoader(dataset, batch_size=size, num_workers=threads or 0, device=device, resident=False)
        with loader, contextlib.closing(cast(Any, with_bar(loader, bar) if bar else iter(loader))) as rows:
            for number, batch in enumerate(rows):
                yield number * size, batch
        return
    for first in range(0, len(dataset), size):
        batch = dataset[first : first + size]
        yield first, batch if device is None else batch.to(device)


def _is_gathered(dataset: MemmapDataset) -> bool:
    """Whether native threads can gather its rows."""
    try:
        BatchForm(dataset._see().save)
    except NotSupported:
        return False
    return True


def rows_per_copy(dataset: MemmapDataset) -> int:
    """How many rows are copied at a time."""
    save = dataset._see().save
    row = save.nbytes // max(1, dataset._rows or 0)
    return max(1, min(1 << 16, COPIED_BYTES // max(1, row)))
