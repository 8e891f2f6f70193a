"""A small save, as the entries of an archive: what hostile and damaged archives are made from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from archives.payloads import STORED
from archives.raw import Entry

__all__ = ["A", "C", "NAMES", "entries", "leaf_meta", "level_meta", "write_directory"]

# 40 000 bytes, ten blocks of 4 KiB; and 1600 bytes, less than one.
A = np.arange(10_000, dtype="<f4").tobytes()
C = np.arange(200, dtype="<i8").tobytes()
NAMES = ("meta.json", "a.memmap", "n/meta.json", "n/c.memmap")


def leaf_meta(shape: list[int], dtype: str = "float32") -> dict[str, Any]:
    """How `meta.json` describes a leaf."""
    return {"device": "cpu", "shape": shape, "dtype": f"torch.{dtype}", "is_nested": False}


def level_meta(children: Sequence[str] = (), batch_size: Sequence[int] = (), **leaves: dict[str, Any]) -> bytes:
    """The `meta.json` of a level."""
    level: dict[str, Any] = {**leaves, **{name: {"type": "TensorDict"} for name in children}}
    level.update(
        shape=list(batch_size), device="None", _type="<class 'tensordict._td.TensorDict'>", _format_version=1,
        _class="tensordict:TensorDict",
    )  # fmt: skip
    return json.dumps(level).encode()


def entries(method: int = STORED, *, metadata: int = STORED, a: dict[str, Any] | None = None) -> list[Entry]:
    """The entries of the save ``{"a": float32[10000], "n": {"c": int64[200]}}``.

    Args:
        method: how the leaves are compressed.
        metadata: how the others are.
        a: fields of the entry of ``a`` that lie.
    """
    return [
        Entry("meta.json", level_meta(["n"], a=leaf_meta([10_000])), metadata),
        Entry(**{"name": "a.memmap", "data": A, "method": method, **(a or {})}),
        Entry("n/meta.json", level_meta(c=leaf_meta([200], "int64")), metadata),
        Entry("n/c.memmap", C, method),
    ]


def write_directory(directory: Path) -> None:
    """Writes the save that `tests/fixtures/archives` holds: bytes that compress, and names that tools may garble."""
    files = {
        "meta.json": level_meta(
            ["n", "d d"],
            [],
            a=leaf_meta([500], "int64"),
            **{"\u00fc\u4e16": leaf_meta([3]), "a b": leaf_meta([5], "uint8"), "empty": leaf_meta([0, 3])},
        ),
        "a.memmap": np.arange(500, dtype="<i8").tobytes(),
        "\u00fc\u4e16.memmap": np.arange(3, dtype="<f4").tobytes(),
        "a%20b.memmap": b"12345",
        "n/meta.json": level_meta(c=leaf_meta([200], "int64")),
        "n/c.memmap": C,
        "d%20d/meta.json": level_meta(["deep"]),
        "d%20d/deep/meta.json": level_meta(x=leaf_meta([4, 30])),
        "d%20d/deep/x.memmap": np.ones(120, dtype="<f4").tobytes(),
    }
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
