"""The save that an appender begins with: the structure of some rows, without rows."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from typing import Any

import torch
from tensordict import is_tensor_collection

from tdgpu.errors import AppendError, InvalidArgument, InvalidArgumentType, SaveExists, TdgpuError
from tdgpu.layout import objects, reader
from tdgpu.layout.commit import sync_directory, sync_tree
from tdgpu.layout.growth import Growing, growing, match
from tdgpu.layout.tree import Kind

__all__ = ["create_empty"]

_CPU = torch.device("cpu")


def create_empty(prefix: str | os.PathLike[str], example_row: Any, *, durable: bool) -> None:
    """Makes a save without rows, unless there is one: whole or not at all, also if another process does the same.

    Args:
        prefix: the directory; missing ones above it are made.
        example_row: rows as they will be appended; or one row without the dimension of rows (batch size ``[]``). Only
            its structure is used.
        durable: whether it survives a power failure once this has returned.

    Raises:
        InvalidArgumentType: ``example_row`` is no tensor collection.
        InvalidArgument: its save could not grow, or the save that is there is of another structure.
        SaveExists: there is something else.
    """
    if not is_tensor_collection(example_row):
        raise InvalidArgumentType(f"example_row must be a tensor collection, not a {type(example_row).__name__}.")
    path = os.path.abspath(os.fspath(prefix))
    like = example_row[:1] if example_row.batch_dims else example_row
    if not os.path.exists(os.path.join(path, "meta.json")):
        if os.path.lexists(path) and (not os.path.isdir(path) or os.listdir(path)):
            raise SaveExists("There is something else than a saved directory already.", file=path)
        parent = os.path.dirname(path)
        above = [parent]
        while not os.path.isdir(above[-1]):
            above.append(os.path.dirname(above[-1]))
        try:
            os.makedirs(parent, exist_ok=True)
            directory = tempfile.mkdtemp(prefix=".tdgpu-", dir=parent)
        except OSError as error:
            raise _refused(error, path) from error
        try:
            save = os.path.join(directory, "save")
            # Of the structure alone: a device, or whether there are bytes, has nothing to do with it.
            hollow = like.apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU), device=_CPU)
            hollow.memmap(save)
            _take_rows_away(save, has_rows=bool(example_row.batch_dims))
            _check(save)
            if durable:
                sync_tree(save)
            try:
                os.rename(save, path)
            except OSError as error:
                # Another process was faster; what it has made is looked at below.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            for directory_above in above if durable else ():
                sync_directory(directory_above)
        except OSError as error:
            if isinstance(error, TdgpuError):
                raise
            raise _refused(error, path) from error
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    found = _check(path)
    if example_row.batch_dims:
        match(found, example_row)


def _refused(error: OSError, path: str) -> OSError:
    """The error for the save that could not be made, rather than for the hidden directory that it was made in."""
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return PermissionError(error.errno, f"The save cannot be made here: {error.strerror}", path)
    return AppendError(f"The save cannot be made: {error.strerror or error}.", code=error.errno, save=path)


def _take_rows_away(save: str, *, has_rows: bool) -> None:
    """Makes a save of one row one of none: with the dimension of rows if it has it, or before the dimensions it has."""

    def emptied(shape: list[int]) -> list[int]:
        return [0, *shape[1:]] if has_rows else [0, *shape]

    for level in reader.read(save).root.walk():
        for leaf in level.leaves.values():
            if leaf.is_nested:
                raise InvalidArgument("A nested tensor cannot grow.", save=save, key=leaf.key)
            if leaf.extent is not None:
                os.unlink(leaf.extent.file)
        if level.kind is not Kind.TENSORDICT:
            continue
        meta = {
            key: {**entry, "shape": emptied(entry["shape"])} if key in level.leaves else entry
            for key, entry in level.meta.items()
        }
        meta["shape"] = emptied(level.meta["shape"])
        if not has_rows and isinstance(meta.get("_names"), list):
            meta["_names"] = [None, *meta["_names"]]
        with open(os.path.join(level.path, "meta.json"), "w", encoding="utf-8") as file:
            json.dump(meta, file)


def _check(path: str) -> Growing:
    save = reader.read(path)
    with contextlib.closing(save):
        objects.resolve(save, True)
        return growing(save)
