"""Appends that do as they are told: in tensordict's order, or in a wrong one that the instruments have to notice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from .bed import TEMPORARY, Bed

ORDERS = ("right", "children first", "in place", "rows last", "top alone")


def append(prefix: Path, bed: Bed, first: int, count: int, order: str = "right") -> None:
    """Appends rows without a lock, a sync, or a look at what is there.

    Args:
        order: ``"right"``, as tensordict. ``"children first"``: renames the top's metadata last. ``"in place"``:
            overwrites the metadata. ``"rows last"``: commits before the rows are there. ``"top alone"``: a commit of
            the top, without a temporary file for the others.
    """
    if order != "rows last":
        _write_rows(prefix, bed, first, count)
    levels = [prefix / directory for directory in bed.levels.values()]
    new = {level: _metadata(level / "meta.json", first + count) for level in levels}
    if order in ("in place", "top alone"):
        for level in levels if order == "in place" else reversed(levels):
            name = "meta.json" if order == "in place" or level != levels[0] else TEMPORARY
            (level / name).write_bytes(new[level])
        if order == "top alone":
            os.replace(levels[0] / TEMPORARY, levels[0] / "meta.json")
    else:
        for level in levels:
            (level / TEMPORARY).write_bytes(new[level])
        for level in reversed(levels) if order == "children first" else levels:
            os.replace(level / TEMPORARY, level / "meta.json")
    if order == "rows last":
        _write_rows(prefix, bed, first, count)


def _write_rows(prefix: Path, bed: Bed, first: int, count: int) -> None:
    rows = bed.rows(first, count)
    for leaf, name in zip(bed.leaves, bed.files(), strict=True):
        data = rows.get(leaf.key).contiguous().view(torch.uint8).numpy().tobytes()
        file = os.open(prefix / name, os.O_WRONLY | os.O_CREAT)
        os.pwrite(file, data, len(data) // count * first)
        os.close(file)


def _metadata(path: Path, rows: int) -> bytes:
    content = json.loads(path.read_bytes())
    for entry in (content, *content.values()):
        if isinstance(entry, dict) and "shape" in entry:
            entry["shape"][0] = rows
    return json.dumps(content).encode()
