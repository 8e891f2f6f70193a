"""The comparison that the other tests rely on can fail."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same
from saves import BUILDERS, Point
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, is_tensor_collection


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_a_thing_is_the_same_as_itself_built_again(name: str) -> None:
    assert_same(BUILDERS[name](), BUILDERS[name](), devices=True)


def _with(name: str, change: Callable[[Any], Any]) -> Any:
    built = BUILDERS[name]()
    changed = change(built)
    return changed if is_tensor_collection(changed) else built


def _nan(payload: int) -> TensorDict:
    bits = struct.unpack("<i", struct.pack("<I", 0x7FC00000 | payload))[0]
    return TensorDict({"a": torch.tensor([bits], dtype=torch.int32).view(torch.float32)})


def _renamed(td: TensorDict) -> None:
    td.names = ["other", None]


CHANGES: dict[str, tuple[Any, Any]] = {
    "one byte": (BUILDERS["flat"](), _with("flat", lambda td: td["obs"].add_(1e-7))),
    "one byte of bool": (BUILDERS["flat"](), _with("flat", lambda td: td["done"].logical_not_())),
    "a NaN's payload": (_nan(1), _nan(2)),
    "a zero's sign": (TensorDict({"a": torch.tensor(0.0)}), TensorDict({"a": torch.tensor(-0.0)})),
    "a dtype": (TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.zeros(2, dtype=torch.int32)})),
    "a shape": (TensorDict({"a": torch.zeros(2, 3)}), TensorDict({"a": torch.zeros(3, 2)})),
    "a shape without elements": (TensorDict({"a": torch.zeros(0, 3)}), TensorDict({"a": torch.zeros(0, 2)})),
    "the batch size": (BUILDERS["flat"](), _with("flat", lambda td: setattr(td, "batch_size", []))),
    "the order of keys": (BUILDERS["nested"](), _with("nested", lambda td: td.select("a", "inner", "z"))),
    "a missing key": (BUILDERS["nested"](), _with("nested", lambda td: td.exclude(("inner", "b")))),
    "the names": (BUILDERS["names"](), _with("names", _renamed)),
    "the lock": (BUILDERS["flat"](), _with("flat", lambda td: td.lock_())),
    "the class": (BUILDERS["point"](), BUILDERS["point"]()._tensordict),
    "another tensorclass": (BUILDERS["point"](), BUILDERS["tensorclass"]()),
    "a field": (BUILDERS["tensorclass"](), _with("tensorclass", lambda tc: setattr(tc, "label", "dog"))),
    "a field's class": (NonTensorData((1,)), NonTensorData([1])),
    "an int for a bool": (NonTensorData(1), NonTensorData(True)),
    "a stack's member": (BUILDERS["lazy_stack"](), _with("lazy_stack", lambda s: s[1]["a"].zero_())),
    "a stack's length": (BUILDERS["lazy_stack"](), LazyStackedTensorDict(*BUILDERS["lazy_stack"]().tensordicts[:2])),
    "a value in a stack": (BUILDERS["non_tensor_stack"](), _with("non_tensor_stack", lambda td: td[[0, 2, 1]])),
    "nested sizes": (
        TensorDict({"r": torch.nested.nested_tensor([torch.zeros(1, 6), torch.zeros(2, 3)])}),
        TensorDict({"r": torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 6)])}),
    ),
    "nested bytes": (BUILDERS["nested_tensor"](), _with("nested_tensor", lambda td: td["ragged"].mul_(2))),
    "meta for data": (TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.zeros(2, device="meta")})),
    "a view's index": (
        BUILDERS["sub_tensordict"](),
        _with("sub_tensordict", lambda td: td._source._get_sub_tensordict(slice(2, 4))),
    ),
    "a view for its source": (BUILDERS["sub_tensordict"](), BUILDERS["sub_tensordict"]().to_tensordict()),
}  # fmt: skip


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_change_is_seen(change: str) -> None:
    ours, theirs = CHANGES[change]
    with pytest.raises(AssertionError):
        assert_same(ours, theirs)
    with pytest.raises(AssertionError):
        assert_same(theirs, ours)


def test_devices_are_compared_only_if_asked() -> None:
    ours = TensorDict({"a": torch.zeros(2)}, device="cpu")
    theirs = TensorDict({"a": torch.zeros(2)})
    assert_same(ours, theirs)
    with pytest.raises(AssertionError, match="device"):
        assert_same(ours, theirs, devices=True)
    mapped = TensorDict({"a": torch.zeros(2)}).memmap().unlock_()
    mapped._device = None
    assert_same(mapped, theirs)
    with pytest.raises(AssertionError, match="MemoryMappedTensor"):
        assert_same(mapped, theirs, devices=True)


def test_a_nan_is_the_same_as_itself() -> None:
    assert_same(NonTensorData(math.nan), NonTensorData(math.nan))
    assert_same(_nan(3), _nan(3))
    assert_same(Point(x=torch.tensor(math.nan), y=torch.zeros(1)), Point(x=torch.tensor(math.nan), y=torch.zeros(1)))
