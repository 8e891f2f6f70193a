"""One save of every kind that tensordict writes, for the tests.

``BUILDERS[name]()`` builds an object, the same one each time; ``SAVES[name](path)`` saves it at ``path``. The classes
that are saved are defined here, so importing this module is what makes them known to a loader.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictParams,
    TypedTensorDict,
    set_lazy_legacy,
)
from tensordict.base import _register_tensor_class

# What tensordict 0.15.3 writes but cannot load.
UPSTREAM_CANNOT_LOAD = frozenset({"float8"})
# Saves whose leaves torch has no meta or fake tensors for.
NESTED = frozenset({"nested_tensor", "nested_of_scalars"})
# Saves that hold pickled data.
PICKLED = frozenset({"tensorclass_pickle", "non_tensor_pickle", "non_tensor_stack_pickle"})
# Saves whose file names are raw keys.
LEGACY = frozenset({"legacy_keys"})


class Point(TensorClass):
    """Tensors only."""

    x: torch.Tensor
    y: torch.Tensor


class Frame(TensorClass):
    """Tensors, a nested tensorclass, and fields that are not tensors."""

    image: torch.Tensor
    at: Point
    label: str
    extra: Any = None


class Typed(TypedTensorDict):
    """A typed tensordict."""

    a: torch.Tensor


class Subclass(TensorDict):
    """A class of a user's own, stored as a TensorDict."""


class ThirdParty(TensorDict):
    """A class with a loader of its own, of the signature that tensordict had before ``mode`` and ``allow_pickle``."""

    @classmethod
    def _load_memmap(
        cls, prefix: Path, metadata: dict[str, Any], device: Any = None, out: Any = None, *, robust_key: Any
    ) -> ThirdParty:
        inner = TensorDict._load_memmap(prefix, metadata, device, out, robust_key=robust_key)
        result = cls({}, batch_size=inner.batch_size, device=inner.device)
        for key, value in inner.items():
            result._set_str(key, value, inplace=False, validated=True)
        return result


_register_tensor_class(Subclass)
_register_tensor_class(ThirdParty)


@dataclasses.dataclass
class Thing:
    """What JSON cannot hold."""

    number: int


DTYPES = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128,
)  # fmt: skip
FLOAT8 = tuple(
    value for name, value in sorted(vars(torch).items())
    if isinstance(value, torch.dtype) and name.startswith(("float8", "float4"))
)  # fmt: skip
KEYS = (
    "", ".", "..", "...", "a/b", "a b", "a.b", "a%2Fb", "100%", "\u00fc\u4e16", 'q"?*<>|:\\', "tab\t", "nul\0", "\x7f",
    "x", "x.shape", "_names", "_class", "_format_version", "_tensordict", "type", "dtype", "meta.json", "meta", "0",
)  # fmt: skip


def random_bytes(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor of random bytes: every bit pattern, NaN payloads included. (A bool byte is 0 or 1.)"""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).squeeze(-1)


def _values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flat() -> Any:
    return TensorDict(
        {"obs": _values(4, 3), "reward": _values(4, seed=1), "done": torch.tensor([True, False, False, True])},
        batch_size=[4],
    )


def nested() -> Any:
    return TensorDict(
        {
            "z": _values(4, 3),
            "inner": {"deep": {"a": torch.arange(8).view(4, 2)}, "b": _values(4, seed=2)},
            "a": torch.arange(4, dtype=torch.int16),
        },
        batch_size=[4],
    )


def names() -> Any:
    td = TensorDict({"a": _values(2, 3, 4), "n": {"b": _values(2, 3)}}, batch_size=[2, 3], names=["time", None])
    td["n"].batch_size = [2, 3]
    return td


def empty_levels() -> Any:
    return TensorDict({"e": TensorDict(batch_size=[2]), "n": {"e": TensorDict(batch_size=[2, 0])}}, batch_size=[2])


def zero_size() -> Any:
    return TensorDict({"z": torch.empty(0, 3), "y": torch.empty(0, 2, 0, dtype=torch.int8), "n": {"k": torch.empty(0)}},
                      batch_size=[0])  # fmt: skip


def scalars() -> Any:
    return TensorDict({"a": torch.tensor(1.5), "b": torch.tensor(True), "c": torch.tensor(7)})


def dtypes() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is called experimental
        return TensorDict({str(dtype): random_bytes(dtype, 5, 3, seed=i) for i, dtype in enumerate(DTYPES)}, [5])


def float8() -> Any:
    return TensorDict({str(dtype): random_bytes(dtype, 5, 4, seed=i) for i, dtype in enumerate(FLOAT8)}, [5])


def keys() -> Any:
    leaves: dict[str, Any] = {key: torch.full((2,), i) for i, key in enumerate(KEYS)}
    children = {f"n{key}": TensorDict({key: torch.full((2,), -i)}, [2]) for i, key in enumerate(KEYS)}
    dots = {"child of dots": TensorDict({"..": TensorDict({".": TensorDict({"": torch.ones(2)}, [2])}, [2])}, [2])}
    return TensorDict({**leaves, **children, **dots}, [2])


def legacy_keys() -> Any:
    return TensorDict(
        {"a b": _values(2), "ab:c": _values(2, seed=1), "n n": {"c?": _values(2, seed=2), "100%": _values(2, seed=3)}},
        [2],
    )


def point() -> Any:
    return Point(x=_values(3), y=_values(3, 2, seed=1), batch_size=[3])


def tensorclass() -> Any:
    return Frame(image=_values(3, 4), at=point(), label="cat", extra={"k": [1, 2.5, None, True]}, batch_size=[3])


def tensorclass_pickle() -> Any:
    return TensorDict({"f": Frame(image=_values(3, 4), at=point(), label="cat", extra=Thing(3), batch_size=[3])}, [3])


def tensorclass_types() -> Any:
    return Frame(image=_values(3, 4), at=point(), label="dog", extra=dict, batch_size=[3])


def tensorclass_stack() -> Any:
    members = [Point(x=_values(n), y=_values(n, 2, seed=n), batch_size=[]) for n in (1, 3)]
    return LazyStackedTensorDict.lazy_stack(members)


def non_tensor() -> Any:
    values = {"str": "text", "int": 2**70, "float": 0.1, "nan": float("nan"), "bool": True, "none": None,
              "list": [1, "a", [2]], "dict": {"a": {"b": 1}}, "tuple": (1, (2,)), "empty": ""}  # fmt: skip
    td = TensorDict({"t": _values(2)}, [2])
    for key, value in values.items():
        td.set_non_tensor(key, value)
    return td


def non_tensor_root() -> Any:
    return NonTensorData("alone", batch_size=[])


def non_tensor_pickle() -> Any:
    td = TensorDict({"t": _values(2)}, [2])
    td.set_non_tensor("thing", Thing(5))
    td.set_non_tensor("set", {1, 2})
    return td


def non_tensor_stack() -> Any:
    return TensorDict({"s": NonTensorStack("a", "b", "c"), "t": _values(3)}, [3])


def non_tensor_stack_deep() -> Any:
    rows = [NonTensorStack(str(i), str(i + 1)) for i in range(3)]
    return TensorDict({"s": NonTensorStack(*rows)}, [3, 2])


def non_tensor_stack_pickle() -> Any:
    return TensorDict({"s": NonTensorStack(Thing(1), Thing(2))}, [2])


def lazy_stack() -> Any:
    members = [TensorDict({"a": _values(n, seed=n), "n": {"b": _values(2, seed=n)}}) for n in (1, 3, 2)]
    return LazyStackedTensorDict(*members)


def lazy_stack_named() -> Any:
    members = [TensorDict({"a": _values(2, 3, seed=n)}, [2], names=["row"]) for n in range(3)]
    return TensorDict({"s": LazyStackedTensorDict(*members, stack_dim=0, stack_dim_name="member")}, [3])


def lazy_stack_dim1() -> Any:
    members = [TensorDict({"a": _values(2, n, seed=n), f"only{n}": _values(2)}, [2]) for n in (1, 2)]
    return LazyStackedTensorDict(*members, stack_dim=1)


def lazy_stack_of_stacks() -> Any:
    inner = [[TensorDict({"a": _values(2 + i + j)}) for j in range(2)] for i in range(2)]
    return LazyStackedTensorDict(*(LazyStackedTensorDict(*members) for members in inner))


def _nested_tensor(parts: list[torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are called a prototype
        return torch.nested.nested_tensor(parts)


def nested_tensor() -> Any:
    ragged = _nested_tensor([_values(3, 2), _values(1, 2, seed=1), _values(0, 2), _values(4, 2, seed=2)])
    return TensorDict({"plain": _values(2), "ragged": ragged, "n": {"r": _nested_tensor([_values(2), _values(5)])}})


def nested_of_scalars() -> Any:
    return TensorDict({"r": _nested_tensor([torch.tensor(1.0), torch.tensor(2.0)])})


def params() -> Any:
    return TensorDictParams(TensorDict({"weight": _values(3, 2), "n": {"bias": _values(3)}}))


def typed() -> Any:
    return TensorDict({"t": Typed(a=_values(3), batch_size=[3])}, [3])


def sub_tensordict() -> Any:
    source = TensorDict({"a": _values(4, 3), "n": {"b": torch.arange(4)}}, [4])
    return source._get_sub_tensordict(slice(1, 3))


def _lazily(make: Callable[[TensorDict], Any]) -> Any:
    td = TensorDict({"a": _values(2, 3, 4), "n": TensorDict({"b": _values(2, 3)}, [2, 3])}, [2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        with set_lazy_legacy(True):
            return make(td)


def lazy_permute() -> Any:
    return _lazily(lambda td: td.permute(1, 0))


def lazy_view() -> Any:
    return _lazily(lambda td: td.view(6))


def lazy_unsqueeze() -> Any:
    return _lazily(lambda td: td.unsqueeze(0))


def subclass() -> Any:
    return TensorDict({"s": Subclass({"a": _values(2)}, [2])}, [2])


def third_party() -> Any:
    return ThirdParty({"a": _values(2, 3), "b": torch.arange(2)}, [2])


def odd_sizes() -> Any:
    return TensorDict({"byte": torch.tensor([7], dtype=torch.uint8), "wide": torch.arange(5), "c": _values(1)}, [])


def large() -> Any:
    return TensorDict({"big": _values(300, 1000), "byte": torch.ones(1, dtype=torch.uint8)}, [])


def mixed() -> Any:
    small = {f"w{i}": _values(i % 7 + 1, 3, seed=i) for i in range(60)}
    return TensorDict({**small, "big": _values(512, 1024), "n": {"big": _values(1000, 333), **small}}, [])


BUILDERS: dict[str, Callable[[], Any]] = {
    builder.__name__: builder
    for builder in (
        flat, nested, names, empty_levels, zero_size, scalars, dtypes, float8, keys, legacy_keys, point, tensorclass,
        tensorclass_pickle, tensorclass_types, tensorclass_stack, non_tensor, non_tensor_root, non_tensor_pickle,
        non_tensor_stack, non_tensor_stack_deep, non_tensor_stack_pickle, lazy_stack, lazy_stack_named, lazy_stack_dim1,
        lazy_stack_of_stacks, nested_tensor, nested_of_scalars, params, typed, sub_tensordict, lazy_permute, lazy_view,
        lazy_unsqueeze, subclass, third_party, odd_sizes, large, mixed,
    )
}  # fmt: skip


def _saver(name: str) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        BUILDERS[name]().memmap(path, robust_key=name not in LEGACY)

    return save


SAVES: dict[str, Callable[[Path], None]] = {name: _saver(name) for name in BUILDERS}
