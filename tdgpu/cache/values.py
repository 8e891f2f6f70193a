"""What any object is, to be hashed: the one place that decides by type."""

from __future__ import annotations

import collections
import copyreg
import enum
import io
import logging
import operator
import re
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import dill
import numpy as np
import torch
import xxhash
from tensordict import is_tensor_collection

from tdgpu.cache import functions, tensors
from tdgpu.cache.encode import raw, scalar
from tdgpu.cache.functions import describe_class, described
from tdgpu.cache.graph import Description, Ref, Unhashable, Walk
from tdgpu.data.dataset import MemmapDataset

__all__ = ["walk"]

#: Items of a container that are references, so that its parts have names. Larger ones have plain values as bytes.
_NAMED = 256
_CONTAINERS = (dict, list, tuple, set, frozenset)


def walk() -> Walk:
    """A new walk over any objects."""
    return Walk(_describe, frozenset(_CONTAINERS))


def _describe(value: Any, ordered: bool) -> Description:
    cls = type(value)
    describe = _EXACT.get(cls)
    if describe is not None:
        return describe(value, ordered)
    if not isinstance(value, type) and is_tensor_collection(value):
        return tensors.describe_collection(value, ordered)
    for base, family in _FAMILIES:
        if isinstance(value, base):
            return family(value, ordered)
    return _by_pickling(value)


def _token(value: Any) -> bytes:
    token = scalar(value)
    assert token is not None
    return token


def _network(value: torch.nn.Module, ordered: bool) -> Description:
    cls = type(value)
    names = ("__reduce_ex__", "__reduce__", "__getstate__")
    if all(getattr(cls, name, None) is getattr(torch.nn.Module, name, None) for name in names):
        return tensors.describe_module(value, ordered)
    return _by_pickling(value)  # it says itself what it is


def _dataset(value: MemmapDataset, _ordered: bool) -> Description:
    from tdgpu.cache import content  # which hashes values itself

    cls = None if type(value) is MemmapDataset else type(value)
    return described("dataset", Ref(content.contents(value), ""), Ref(value._index, ""), Ref(cls, ".__class__"))


# --- containers -------------------------------------------------------------------------------------------------------


def _item(value: Any, key: Any, ordered: bool, *, named: bool = False) -> bytes | Ref:
    """What is found under a key: a reference, or the bytes of a plain value that needs no name."""
    token = None if named else scalar(value)
    return Ref(value, _edge(key), ordered) if token is None else token


def _edge(key: Any) -> str:
    return f"[{key!r}]" if type(key) in (str, int) and len(str(key)) < 100 else f"[a {type(key).__name__}]"


def _sequence(value: list[Any] | tuple[Any, ...], ordered: bool) -> Description:
    label = type(value).__name__.encode()
    kinds = set(map(type, value)) if len(value) > _NAMED else set()
    if kinds in ({int}, {float}):
        dtype: Any = np.int64 if kinds == {int} else np.float64
        try:
            return Description(label + b" of numbers", [raw(xxhash.xxh3_128_digest(np.array(value, dtype).data))])
        except OverflowError:
            pass
    named = len(value) <= _NAMED
    return Description(label, [_item(below, i, ordered, named=named) for i, below in enumerate(value)])


def _dict(value: dict[Any, Any], ordered: bool) -> Description:
    named = len(value) <= _NAMED
    items: list[bytes | Ref] = []
    for key, below in value.items():
        items += [_item(key, "a key", ordered), _item(below, key, ordered, named=named)]
    return Description(b"dict", items) if ordered else Description(b"unordered dict", items, 2)


def _ordered_dict(value: collections.OrderedDict[Any, Any], _ordered: bool) -> Description:
    return described("OrderedDict", *_dict(value, True).items)


def _set(value: set[Any] | frozenset[Any], ordered: bool) -> Description:
    items = [_item(element, "an element", ordered) for element in value]
    return Description(type(value).__name__.encode(), items, 1)


def _set_subclass(value: set[Any] | frozenset[Any], _ordered: bool) -> Description:
    elements = frozenset(frozenset.__iter__(value) if isinstance(value, frozenset) else set.__iter__(value))
    state = _state(getattr(value, "__dict__", {}))
    return described("set subclass", Ref(type(value), ".__class__"), Ref(elements, ""), *state)


def _dict_proxy(value: types.MappingProxyType[Any, Any], ordered: bool) -> Description:
    return described("mappingproxy", Ref(dict(value), "", ordered))


def _factory_dict(value: Any, ordered: bool) -> Description:
    factory = getattr(value, "default_factory", None)
    return described(type(value).__name__, Ref(factory, ".default_factory"), Ref(dict(value), "", ordered))


# --- small objects ----------------------------------------------------------------------------------------------------


def _enum(value: enum.Enum, _ordered: bool) -> Description:
    return described("enum", Ref(type(value), ".__class__"), Ref(value._name_, ".name"), Ref(value._value_, ".value"))


def _pattern(value: re.Pattern[Any], _ordered: bool) -> Description:
    return described("pattern", Ref(value.pattern, ".pattern"), _token(value.flags))


def _memoryview(value: memoryview, _ordered: bool) -> Description:
    return described("memoryview", Ref(np.asarray(value), ""))


# --- everything else --------------------------------------------------------------------------------------------------


def _logger(_value: logging.Logger, _ordered: bool) -> Description:
    return described("logger")  # its name is often that of the module, and what it does is not computed


class _Reduced(Exception):
    """What a pickler was about to write."""

    def __init__(self, value: tuple[Any, ...]) -> None:
        super().__init__()
        self.value = value


class _OneStep(dill.Pickler):
    """A pickler of dill that writes nothing, and says how it takes one object apart."""

    def save_reduce(self, *args: Any, obj: Any = None, **more: Any) -> None:
        raise _Reduced(args)


#: What dill takes apart and pickle does not. Of locks and open files it would take what says nothing about them.
_OF_DILL: tuple[type, ...] = (super, weakref.ref, type({}.keys()), type({}.values()), type({}.items()))


def _by_pickling(value: Any) -> Description:
    """An object by what pickle, or dill, makes of it: how it is built, and of what."""
    cls = type(value)
    try:
        reduced = _reduce(value, cls)
    except Unhashable:
        raise
    except Exception as error:
        raise Unhashable(f"it cannot be pickled: {type(error).__name__}: {error}", value) from error
    if isinstance(reduced, str):
        return _by_name(value, cls, reduced)
    function, args, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
    found = _state(state)
    if not (args and args[0] is cls and len(args) == 1):
        found.append(Ref(tuple(args or ()), ""))
    if items is not None:
        found.append(Ref(list(items), ""))
    if pairs is not None:
        found.append(Ref(dict(pairs), ""))
    # The class comes last: what cannot be hashed is better named by an attribute than by what its methods read.
    return described("object", *found, Ref(setter, ""), Ref(function, ""), Ref(cls, ".__class__"))


def _reduce(value: Any, cls: type) -> Any:
    registered = dill.Pickler.dispatch.get(cls)
    if registered is not None and not registered.__module__.startswith("dill"):
        return _with_dill(value)  # the user has told dill how
    reducer = copyreg.dispatch_table.get(cls)
    if reducer is not None:
        return reducer(value)
    if isinstance(value, _OF_DILL):
        return _with_dill(value)
    # As pickle: of the class, so that no instance can stand in its way.
    reduce_ex: Any = cls.__reduce_ex__
    return reduce_ex(value, 4)


def _with_dill(value: Any) -> Any:
    try:
        _OneStep(io.BytesIO(), recurse=True).save(value)
    except _Reduced as found:
        return found.value
    raise Unhashable("dill writes it in one piece", value)


def _by_name(value: Any, cls: type, name: str) -> Description:
    """An object that is pickled as the name that its module has for it: only if it is there."""
    module = getattr(value, "__module__", None) or cls.__module__
    for place in (module, cls.__module__):
        found: Any = sys.modules.get(place)
        try:
            found = operator.attrgetter(name)(found)
        except AttributeError:
            continue
        if found is value:
            return described("named", Ref(cls, ".__class__"), _token(name))
    raise Unhashable(f"it is pickled as {name!r}, and {module} has no such object", value)


def _state(state: Any) -> list[bytes | Ref]:
    """The attributes of an object, in the order of their names."""
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict) and state[0] in ({}, None):
        state = state[1]  # of a class with slots
    if type(state) is not dict or not all(type(name) is str for name in state):
        return [Ref(state, "")]
    items: list[bytes | Ref] = []
    for name, value in sorted(state.items()):
        items += [_token(name), Ref(value, f".{name}")]
    return [_token(len(items)), *items]


_EXACT: dict[type, Callable[[Any, bool], Description]] = {
    list: _sequence,
    tuple: _sequence,
    dict: _dict,
    set: _set,
    frozenset: _set,
    collections.OrderedDict: _ordered_dict,
    collections.defaultdict: _factory_dict,
    collections.Counter: _factory_dict,
    types.MappingProxyType: _dict_proxy,
    memoryview: _memoryview,
    re.Pattern: _pattern,
    type: describe_class,
    **functions.DESCRIBERS,
    **tensors.DESCRIBERS,
}

_FAMILIES: tuple[tuple[Any, Callable[[Any, bool], Description]], ...] = (
    (type, describe_class),
    (torch.Tensor, tensors.describe_tensor),
    (torch.nn.Module, _network),
    (MemmapDataset, _dataset),
    (np.ndarray, tensors.describe_array),
    (enum.Enum, _enum),
    (logging.Logger, _logger),
    (types.ModuleType, functions.DESCRIBERS[types.ModuleType]),
    ((set, frozenset), _set_subclass),
)
