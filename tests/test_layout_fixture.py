"""Saves that tensordict 0.15.3 wrote, kept in the repository: what they mean must not change.

Loaded in mode "r" throughout, so that a test can never write to them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from saves import Frame, Point
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict
from test_load_host import snapshot
from torch._subclasses import FakeTensorMode

from tdgpu.layout import reader
from tdgpu.load import load_memmap

HERE = Path(__file__).parent / "fixtures" / "tensordict-0.15.3"
EVERYTHING = HERE / "everything"


@pytest.fixture(scope="module")
def loaded() -> Any:
    before = snapshot(HERE)
    result = load_memmap(EVERYTHING, mode="r", allow_pickle=True)
    assert snapshot(HERE) == before
    return result


def test_order_of_keys(loaded: Any) -> None:
    assert list(loaded.keys()) == [
        "bool", "uint8", "uint64", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "float8",
        "without elements", "ragged", "keys", "named", "empty level", "frame", "typed", "objects", "alone", "values",
        "lazy", "view",
    ]  # fmt: skip
    assert loaded.batch_size == (2,)


def test_plain_tensors(loaded: Any) -> None:
    values = {
        "bool": (torch.bool, [True, False]),
        "uint8": (torch.uint8, [1, 255]),
        "uint64": (torch.uint64, [1, 2**63 + 5]),
        "int64": (torch.int64, [[1, -2], [3, -(2**62)]]),
        "float16": (torch.float16, [0.5, -1.5]),
        "bfloat16": (torch.bfloat16, [0.5, math.inf]),
        "float64": (torch.float64, [0.1, 0.0]),
        "complex64": (torch.complex64, [1 + 2j, -3j]),
    }
    for key, (dtype, value) in values.items():
        assert (loaded[key].dtype, loaded[key].tolist()) == (dtype, value)
    assert math.copysign(1, loaded["float64"][1].item()) == -1
    assert loaded["float32"][0].item() == 1.5
    assert math.isnan(loaded["float32"][1].item())
    assert loaded["float8"].dtype == torch.float8_e4m3fn
    assert loaded["float8"].to(torch.float32).tolist() == [1.0, -2.0]
    assert loaded["without elements"].shape == (2, 0, 3)


def test_keys(loaded: Any) -> None:
    keys = ["", ".", "..", "a/b", "100%", "\u00fc", "x.shape"]
    assert {key: loaded["keys"].get(key).tolist() for key in loaded["keys"].keys()} == {  # noqa: SIM118
        key: [i, i] for i, key in enumerate(keys)
    }


def test_levels(loaded: Any) -> None:
    assert loaded["named"].names == [None, "time"]
    assert loaded["named"].batch_size == (2, 3)
    assert list(loaded["empty level"].keys()) == []
    assert type(loaded["typed"]) is TensorDict  # the class of a typed tensordict is not saved
    assert loaded["typed", "a"].tolist() == [7, 8]


def test_tensorclass(loaded: Any) -> None:
    frame = loaded["frame"]
    assert type(frame) is Frame
    assert type(frame.at) is Point
    assert (frame.label, frame.extra) == ("cat", {"k": 1})
    assert (frame.image.tolist(), frame.at.x.tolist(), frame.at.y.tolist()) == ([[1], [2]], [1.0, 2.0], [3, 4])


def test_objects(loaded: Any) -> None:
    objects = loaded["objects"]
    assert {key: objects.get(key).data if objects.get(key) is not None else None for key in objects.keys()} == {  # noqa: SIM118
        "text": "hi", "int": 2**70, "float": 0.1, "none": None, "dict": {"k": [1, True]}, "pickled": {1, 2},
    }  # fmt: skip
    assert loaded.get("alone").data == "alone"
    assert isinstance(loaded.get("values"), NonTensorStack)
    assert loaded.get("values").tolist() == ["a", "b"]


def test_lazy_stack(loaded: Any) -> None:
    lazy = loaded["lazy"]
    assert isinstance(lazy, LazyStackedTensorDict)
    assert (lazy.stack_dim, lazy.names) == (0, ["member"])
    assert [member["a"].tolist() for member in lazy.tensordicts] == [[0], [0, 1, 2]]


def test_nested_tensor_and_view(loaded: Any) -> None:
    assert [part.tolist() for part in loaded["ragged"].unbind(0)] == [[[1, 2]], [[3, 4], [5, 6]]]
    assert loaded["view", "a"].tolist() == [1, 2]
    assert loaded.get("view")._source["a"].tolist() == [0, 1, 2, 3]


def test_raw_names() -> None:
    for robust_key in (False, True):
        loaded = load_memmap(HERE / "legacy", mode="r", robust_key=robust_key)
        assert (loaded["a b"].tolist(), loaded["n n", "c?"].tolist()) == ([1, 2], [3.0])


def test_structure() -> None:
    save = reader.read(EVERYTHING, check=False)
    shapes = {leaf.key: (leaf.shape, leaf.nbytes) for leaf in save.leaves()}
    assert len(shapes) == 26
    assert shapes["int64",] == ((2, 2), 32)
    assert shapes["ragged",] == ((2, 2), 24)
    assert shapes["frame", "at", "x"] == ((2,), 8)
    assert shapes["lazy", "1", "a"] == ((3,), 24)
    with FakeTensorMode():
        assert load_memmap(EVERYTHING, subpath="keys")["a/b"].shape == (2,)
