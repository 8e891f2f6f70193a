"""Tensors, arrays and generators by their bytes: never a second copy of all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, NonTensorData, TensorDict
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from tdgpu.cache.encode import raw, scalar
from tdgpu.cache.graph import Description, Ref, Unhashable

__all__ = ["DESCRIBERS", "describe_array", "describe_collection", "describe_module", "describe_tensor"]

_WINDOW = 4 << 20  # bytes that are made contiguous, or fetched from a device, at a time


def _token(value: Any) -> bytes:
    token = scalar(value)
    assert token is not None
    return token


def _attributes(values: dict[str, Any], skipped: frozenset[str] = frozenset()) -> list[bytes | Ref]:
    items: list[bytes | Ref] = []
    for name, value in sorted(values.items()):
        if name not in skipped:
            items += [_token(name), Ref(value, f".{name}")]
    return items


# --- tensors ----------------------------------------------------------------------------------------------------------


def describe_tensor(tensor: torch.Tensor, _ordered: bool) -> Description:
    """A tensor by class, dtype, shape, whether it requires a gradient, and bytes; whatever its device and strides."""
    cls = type(tensor)
    items: list[bytes | Ref] = [_token(str(tensor.dtype)), _token(tensor.requires_grad), _token(str(tensor.layout))]
    if isinstance(tensor, MemoryMappedTensor):
        cls = torch.Tensor  # where the file lies does not matter
    else:
        items += _attributes(getattr(tensor, "__dict__", {}))
    items.append(Ref(cls, ".__class__"))
    if isinstance(tensor, FakeTensor):
        raise Unhashable("a fake tensor has no values", tensor)
    with torch.no_grad(), unset_fake_temporarily():
        plain = tensor.detach()
        if plain.layout == torch.strided:
            plain = plain.as_subclass(torch.Tensor)
        if plain.is_nested:
            values, offsets = torch.Tensor.unbind(plain), "nested"
            return Description(
                b"tensor", [*items, _token(offsets), *(Ref(value, f"[{i}]") for i, value in enumerate(values))]
            )
        items.append(_token(repr(tuple(plain.shape))))
        parts = _SPARSE.get(plain.layout)
        if parts is not None:
            return Description(b"tensor", [*items, *(Ref(getattr(plain, name)(), f".{name}()") for name in parts)])
        if plain.layout != torch.strided or plain.is_quantized:
            raise Unhashable(f"a tensor of the layout {plain.layout} is not known by its bytes", tensor)
        if plain.device.type == "meta":
            return Description(b"meta tensor", items)
        return Description(b"tensor", [*items, _hash(_windows(plain))])


_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _hash(windows: Iterator[np.ndarray[Any, Any]]) -> bytes:
    state = xxhash.xxh3_128()
    for window in windows:
        state.update(window.data)
    return raw(state.digest())


def _windows(tensor: torch.Tensor) -> Iterator[np.ndarray[Any, Any]]:
    """The bytes of a tensor in order of its elements, window by window."""
    if tensor.numel() == 0:
        return
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    nbytes = tensor.numel() * tensor.element_size()
    if is_plain or nbytes <= _WINDOW or tensor.dim() == 0:
        tensor = tensor.resolve_conj().resolve_neg().contiguous().cpu()
        flat = tensor.reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(flat), _WINDOW):
            yield flat[start : start + _WINDOW]
        return
    rows = max(1, _WINDOW * len(tensor) // nbytes)
    for start in range(0, len(tensor), rows):
        yield from _windows(tensor[start : start + rows] if len(tensor) > 1 else tensor[start])


def _torch_generator(generator: torch.Generator, _ordered: bool) -> Description:
    return Description(b"torch generator", [_token(generator.device.type), _hash(_windows(generator.get_state()))])


# --- arrays -----------------------------------------------------------------------------------------------------------


def describe_array(array: np.ndarray[Any, Any], _ordered: bool) -> Description:
    """An array by class, dtype, shape and elements, whatever its strides."""
    cls = np.ndarray if isinstance(array, np.memmap) else type(array)
    plain = array.view(np.ndarray)
    items: list[bytes | Ref] = [Ref(cls, ".__class__"), _token(repr(plain.shape)), _token(_dtype_text(plain.dtype))]
    if not isinstance(array, np.memmap):
        items += _attributes(getattr(array, "__dict__", {}))
    if isinstance(array, np.ma.MaskedArray):
        items.append(Ref(np.ma.getmaskarray(array), ".mask"))
    if plain.dtype.names is not None:
        # Field by field: between them there may be bytes that mean nothing.
        items += [Ref(plain[name], f"[{name!r}]") for name in plain.dtype.names]
    elif plain.dtype.hasobject or plain.dtype.kind == "T":
        items.append(Ref(plain.reshape(-1).tolist(), ".tolist()"))
    else:
        items.append(_hash(_array_windows(plain)))
    return Description(b"array", items)


def _dtype_text(dtype: np.dtype[Any]) -> str:
    if dtype.names is None or dtype.fields is None:
        return dtype.str if dtype.subdtype is None else str(dtype)
    return f"({', '.join(f'{name!r}: {_dtype_text(dtype.fields[name][0])}' for name in dtype.names)})"


def _array_windows(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    if array.size == 0:
        return
    if array.flags.c_contiguous or array.nbytes <= _WINDOW or array.ndim == 0:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(flat), _WINDOW):
            yield flat[start : start + _WINDOW]
        return
    rows = max(1, _WINDOW * len(array) // array.nbytes)
    for start in range(0, len(array), rows):
        yield from _array_windows(array[start : start + rows] if len(array) > 1 else array[start])


def _numpy_generator(generator: Any, _ordered: bool) -> Description:
    state = generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else generator.state
    return Description(b"numpy generator", [_token(type(generator).__name__), Ref(state, ".state")])


def _numpy_generator_of_bits(generator: np.random.Generator, _ordered: bool) -> Description:
    return Description(b"numpy generator", [Ref(generator.bit_generator, ".bit_generator")])


def _python_generator(generator: random.Random, _ordered: bool) -> Description:
    return Description(b"python generator", [Ref(generator.getstate(), ".getstate()")])


# --- tensordicts and modules ------------------------------------------------------------------------------------------


def describe_collection(collection: Any, ordered: bool) -> Description:
    """A tensordict or tensorclass by class, batch size, names and contents, whatever its device and where it lies."""
    items: list[bytes | Ref] = [Ref(type(collection), ".__class__"), _token(repr(tuple(collection.batch_size)))]
    if isinstance(collection, LazyStackedTensorDict):
        members = collection.tensordicts
        items += [_token(collection.stack_dim), _token(repr(collection.names))]
        return Description(b"lazy stack", [*items, *(Ref(member, f"[{i}]") for i, member in enumerate(members))])
    if isinstance(collection, NonTensorData):
        return Description(b"non-tensor data", [*items, Ref(collection.data, ".data", ordered)])
    inner = collection.__dict__.get("_tensordict")
    if inner is not None and not isinstance(collection, TensorDict):
        fields = dict(collection.__dict__.get("_non_tensordict", {}))
        return Description(b"tensorclass", [*items, Ref(inner, ""), Ref(fields, "")])
    items.append(_token(repr(collection.names)))
    entries = inner.items() if isinstance(inner, dict) else collection.items()
    for key, value in entries:
        items += [_token(key), Ref(value, f"[{key!r}]", ordered)]
    return Description(b"tensordict", items)


#: What a module keeps besides its hooks is by name; hooks are numbered by a counter of the process.
_COMPILED = frozenset({"_compiled_call_impl"})  # a module does not pickle it either
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def describe_module(module: torch.nn.Module, _ordered: bool) -> Description:
    """A module by class and all that it has: weights, buffers, whether it trains, hooks."""
    inner = module.__dict__.get("_modules", {}).get("_orig_mod")
    if inner is not None and type(module).__name__ == "OptimizedModule":
        return Description(b"compiled module", [Ref(inner, "._orig_mod")])
    state: dict[str, Any] = {
        name: list(value.values()) if name.endswith(_HOOKS) and isinstance(value, dict) else value
        for name, value in module.__dict__.items()
    }
    names = [
        f"{name} {list(value)}" for name, value in state.items() if name in ("_parameters", "_buffers", "_modules")
    ]
    items: list[bytes | Ref] = [_token(" ".join(names))]
    for name in ("_parameters", "_buffers", "_modules"):  # as the user calls them
        items += [Ref(value, f".{key}") for key, value in state.pop(name, {}).items()]
    return Description(b"module", [*items, *_attributes(state, _COMPILED), Ref(type(module), ".__class__")])


DESCRIBERS: dict[type, Callable[[Any, bool], Description]] = {
    torch.Generator: _torch_generator,
    np.random.Generator: _numpy_generator_of_bits,
    np.random.RandomState: _numpy_generator,
    random.Random: _python_generator,
}
for _bits in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64):
    DESCRIBERS[_bits] = _numpy_generator
