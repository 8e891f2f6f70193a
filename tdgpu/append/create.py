"""The save that an appender begins with: the structure of some rows, without rows."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from typing import Any

import torch
from tensordict import is_tensor_collection

from tdgpu.errors import InvalidArgumentType, SaveExists
from tdgpu.layout import objects, reader
from tdgpu.layout.commit import sync_directory
from tdgpu.layout.growth import growing, match

__all__ = ["create_empty"]


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
    rows = example_row if example_row.batch_dims else example_row.unsqueeze(0)
    if not os.path.exists(os.path.join(path, "meta.json")):
        if os.path.lexists(path) and (not os.path.isdir(path) or os.listdir(path)):
            raise SaveExists("There is something else than a saved directory already.", file=path)
        parent = os.path.dirname(path)
        above = [parent]
        while not os.path.isdir(above[-1]):
            above.append(os.path.dirname(above[-1]))
        os.makedirs(parent, exist_ok=True)
        directory = tempfile.mkdtemp(prefix=".tdgpu-", dir=parent)
        try:
            save = os.path.join(directory, "save")
            # Of the structure alone: a device has nothing to do with it.
            with torch.no_grad():
                rows[:0].detach().cpu().memmap(save)
            _check(save, rows)
            if durable:
                _sync(save)
            try:
                os.rename(save, path)
            except OSError as error:
                # Another process was faster; what it has made is looked at below.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            for directory_above in above if durable else ():
                sync_directory(directory_above)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    _check(path, rows)


def _check(path: str, rows: Any) -> None:
    save = reader.read(path)
    with contextlib.closing(save):
        objects.resolve(save, True)
        match(growing(save), rows)


def _sync(directory: str) -> None:
    for parent, _, files in os.walk(directory):
        for name in files:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(parent)
