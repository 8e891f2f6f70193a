"""Whether two tensor collections are the same: class, structure and every byte."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    TypedTensorDict,
    is_tensor_collection,
    is_tensorclass,
)
from torch._subclasses import FakeTensor

__all__ = ["assert_same"]


def assert_same(ours: Any, theirs: Any, *, devices: bool = False, at: str = "root") -> None:
    """Asserts that two collections are the same.

    Compared: classes, keys and their order, batch sizes, names, lock state, non-tensor fields, and of each tensor its
    dtype, shape, sizes if it is nested, and bytes (so that NaN is equal to the same NaN). A tensor without data, meta
    or fake, has no bytes to compare, and is only the same as another one without data.

    Args:
        ours, theirs: the collections.
        devices: also compare devices, the classes of tensors, and the directory that a level remembers as its own.
        at: where this is, for the message.
    """
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        _assert_same_tensor(ours, theirs, devices, at)
        return
    assert type(ours) is type(theirs), f"{at}: {type(ours)} is not {type(theirs)}"
    if not is_tensor_collection(ours):
        _assert_same_value(ours, theirs, at)
        return
    assert ours.batch_size == theirs.batch_size, f"{at}: {ours.batch_size} is not {theirs.batch_size}"
    assert ours.is_locked == theirs.is_locked, f"{at}: locked {ours.is_locked}, {theirs.is_locked}"
    if devices:
        assert ours.device == theirs.device, f"{at}: device {ours.device} is not {theirs.device}"
    if is_tensorclass(ours):
        _assert_same_value(ours._non_tensordict, theirs._non_tensordict, f"{at}: fields")
        assert_same(ours._tensordict, theirs._tensordict, devices=devices, at=at)
        return
    assert ours.names == theirs.names, f"{at}: names {ours.names} are not {theirs.names}"
    if isinstance(ours, LazyStackedTensorDict):
        assert ours.stack_dim == theirs.stack_dim, f"{at}: stack_dim {ours.stack_dim} is not {theirs.stack_dim}"
        assert ours._td_dim_name == theirs._td_dim_name, f"{at}: {ours._td_dim_name!r} is not {theirs._td_dim_name!r}"
        assert len(ours.tensordicts) == len(theirs.tensordicts), f"{at}: other number of members"
        pairs = zip(ours.tensordicts, theirs.tensordicts, strict=True)
        for i, (mine, other) in enumerate(pairs):
            assert_same(mine, other, devices=devices, at=f"{at}[{i}]")
        if isinstance(ours, NonTensorStack):
            _assert_same_value(ours.tolist(), theirs.tolist(), at)
        return
    if isinstance(ours, TypedTensorDict) or not isinstance(ours, TensorDict):  # a wrapper or a view
        for field in ("idx", "custom_op", "inv_op", "custom_op_kwargs", "inv_op_kwargs"):
            assert str(getattr(ours, field, None)) == str(getattr(theirs, field, None)), f"{at}: other {field}"
        inner = "_param_td" if isinstance(ours, TensorDictParams) else "_source"
        assert_same(getattr(ours, inner), getattr(theirs, inner), devices=devices, at=f"{at}: source")
        return
    assert list(ours.keys()) == list(theirs.keys()), f"{at}: keys {list(ours.keys())} are not {list(theirs.keys())}"
    if devices:
        assert ours._memmap_prefix == theirs._memmap_prefix, f"{at}: another prefix"
    for key, value in ours._tensordict.items():
        assert_same(value, theirs._tensordict[key], devices=devices, at=f"{at}/{key!r}")


def _assert_same_tensor(ours: torch.Tensor, theirs: torch.Tensor, devices: bool, at: str) -> None:
    assert ours.dtype == theirs.dtype, f"{at}: {ours.dtype} is not {theirs.dtype}"
    assert ours.is_nested == theirs.is_nested, f"{at}: nested {ours.is_nested}, {theirs.is_nested}"
    assert ours.requires_grad == theirs.requires_grad, f"{at}: requires_grad"
    if devices:
        assert type(ours) is type(theirs), f"{at}: {type(ours)} is not {type(theirs)}"
        assert ours.device == theirs.device, f"{at}: on {ours.device}, not on {theirs.device}"
        if isinstance(ours, MemoryMappedTensor) and isinstance(theirs, MemoryMappedTensor):
            assert str(ours.filename) == str(theirs.filename), f"{at}: {ours.filename} is not {theirs.filename}"
            assert ours._mode == theirs._mode, f"{at}: mode {ours._mode} is not {theirs._mode}"
    if ours.is_nested:
        sizes, other_sizes = ours._nested_tensor_size(), theirs._nested_tensor_size()
        assert torch.equal(sizes, other_sizes), f"{at}: sizes {sizes} are not {other_sizes}"
        for i, (mine, other) in enumerate(zip(ours.unbind(0), theirs.unbind(0), strict=True)):
            _assert_same_tensor(mine, other, devices, f"{at}[{i}]")
        return
    assert ours.shape == theirs.shape, f"{at}: shape {tuple(ours.shape)} is not {tuple(theirs.shape)}"
    dataless = _is_dataless(ours)
    assert dataless == _is_dataless(theirs), f"{at}: only one of the two has data"
    if dataless:
        assert ours.stride() == theirs.stride(), f"{at}: strides {ours.stride()} are not {theirs.stride()}"
    else:
        assert torch.equal(_bytes(ours), _bytes(theirs)), f"{at}: other bytes"


def _is_dataless(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().as_subclass(torch.Tensor).cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)


def _assert_same_value(ours: Any, theirs: Any, at: str) -> None:
    """Python values: as ``==``, but of the same classes, in the same order, and NaN is equal to NaN."""
    assert type(ours) is type(theirs), f"{at}: {type(ours)} is not {type(theirs)}"
    if isinstance(ours, dict):
        assert list(ours) == list(theirs), f"{at}: {list(ours)} are not {list(theirs)}"
        for key in ours:
            _assert_same_value(ours[key], theirs[key], f"{at}[{key!r}]")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), f"{at}: other length"
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            _assert_same_value(mine, other, f"{at}[{i}]")
    elif isinstance(ours, torch.Tensor) or is_tensor_collection(ours):
        assert_same(ours, theirs, at=at)
    else:
        assert ours == theirs or (ours != ours and theirs != theirs), f"{at}: {ours!r} is not {theirs!r}"
