"""Rows copied into saves of their own: ``flatten``, ``concatenate``, ``save_to_disk``."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tdgpu.cache import lineage
from tdgpu.cache.batching import batches, rows_per_copy
from tdgpu.cache.failed import named
from tdgpu.cache.writing import Writer
from tdgpu.data.dataset import MemmapDataset
from tdgpu.errors import InvalidArgumentType, SaveExists
from tdgpu.layout.commit import sync_directory, sync_tree
from tdgpu.options import get as get_options

__all__ = ["concatenate", "flatten", "save_to_disk"]


def flatten(dataset: Any, *, progress: bool) -> MemmapDataset:
    """See :meth:`tdgpu.MemmapDataset.flatten`."""
    if not dataset._steps:
        return dataset
    plan = lineage.plan(dataset, "flatten", {})
    return plan.dataset_of(plan.obtain(lambda path: _copy([dataset], path, "flatten" if progress else None)))


def concatenate(dataset: Any, others: tuple[Any, ...], *, progress: bool) -> MemmapDataset:
    """See :meth:`tdgpu.MemmapDataset.concatenate`."""
    for other in others:
        if not isinstance(other, MemmapDataset):
            raise InvalidArgumentType(f"concatenate takes MemmapDatasets, not a {type(other).__name__}.")
    found = [lineage.look(other) for other in others]
    plan = lineage.plan(dataset, "concatenate", {"others": [other.digest for other in found]})
    bar = "concatenate" if progress else None

    def build(path: Path) -> None:
        _copy([dataset, *others], path, bar)
        for other, was in zip(others, found, strict=True):
            lineage.check_unchanged(other, was)

    return plan.dataset_of(plan.obtain(build))


def save_to_disk(dataset: Any, path: str | os.PathLike[str], *, progress: bool) -> None:
    """See :meth:`tdgpu.MemmapDataset.save_to_disk`."""
    target = os.path.abspath(os.fspath(path))
    if os.path.lexists(target):
        raise SaveExists("There is something at this path already.", file=target)
    parent = os.path.dirname(target)
    os.makedirs(parent, exist_ok=True)
    directory = tempfile.mkdtemp(prefix=".tdgpu-", dir=parent)
    try:
        save = os.path.join(directory, "save")
        _copy([dataset], save, "saving" if progress else None)
        if get_options().durable:
            sync_tree(save)
        try:
            os.rename(save, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise SaveExists("There is something at this path by now.", file=target) from None
            raise
        if get_options().durable:
            sync_directory(parent)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _copy(datasets: Iterable[Any], path: str | os.PathLike[str], bar: str | None) -> None:
    """Writes the rows of all datasets one after the other."""
    writer = Writer(path)
    try:
        for number, dataset in enumerate(datasets):
            of = f" of dataset {number}, {dataset!r}" if number else ""
            for first, rows in batches(dataset, rows_per_copy(dataset), bar=bar):
                writer.append(rows, named(first, len(rows)) + of)
            if not len(dataset):
                writer.append(dataset[0:0], "no rows" + of)
        writer.finish()
    except BaseException:
        writer.give_up()
        raise
