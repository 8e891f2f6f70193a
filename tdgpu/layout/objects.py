"""Non-tensor contents of a save, and the policy for those that were pickled."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import warnings
from typing import Any

from tdgpu.errors import FormatError, MissingLeafError, PickleRefused, UnknownClassError, user_level
from tdgpu.layout import metadata
from tdgpu.layout.classes import TENSORCLASS
from tdgpu.layout.files import Where
from tdgpu.layout.save import Save
from tdgpu.layout.store import Store
from tdgpu.layout.tree import Kind, Level

__all__ = ["build_stack", "resolve"]

_FIELDS = (Kind.TENSORCLASS, Kind.NON_TENSOR_DATA)


def resolve(save: Save, allow_pickle: bool | None) -> None:
    """Reads the non-tensor contents of every level into ``level.objects``, if that has not been done.

    Called before any tensor moves, so that a refusal comes first.

    Args:
        save: the save.
        allow_pickle: whether pickles may be loaded; None loads them and warns.

    Raises:
        PickleRefused: there is a pickle, and ``allow_pickle=False``.
        FormatError: the contents are malformed, or cannot be unpickled.

    Warns:
        FutureWarning: there is a pickle, and ``allow_pickle=None``.
    """
    for level in save.root.walk(into_foreign=allow_pickle is False):
        if level.objects is not None:
            continue
        if level.kind in _FIELDS:
            level.objects = _fields(level, save.prefix, save.store, allow_pickle)
        elif level.kind is Kind.NON_TENSOR_STACK:
            level.objects = _stack(level, save.prefix, save.store, allow_pickle)


def _fields(level: Level, save: str, store: Store, allow_pickle: bool | None) -> dict[str, Any]:
    """The non-tensor fields of a tensorclass."""
    fields = {key: value for key, value in level.meta.items() if key != "_type"}
    where = Where(save, level.key, os.path.join(level.path, "other.pickle"))
    if not store.exists(where.file):
        return fields
    pickled = store.read_small(where, missing=MissingLeafError)
    types = _json_types(level, save, store, pickled)
    more = _unpickle(pickled, where, allow_pickle) if types is None else types
    if not isinstance(more, dict):
        raise where.malformed(f"The pickled fields are not a dict but a {type(more).__name__}.")
    return {**fields, **more}


def _json_types(level: Level, save: str, store: Store, pickled: bytes) -> dict[str, type] | None:
    """The classes that a pickle of nothing but classes holds, without unpickling it; None if they are not recorded."""
    where = Where(save, level.key, os.path.join(level.path, "json_types.json"))
    if not store.exists(where.file):
        return None
    bound = max(1 << 20, len(pickled))  # it names what the pickle holds, and is about as long
    recorded = metadata.parse(store.read_small(where, missing=MissingLeafError, bound=bound), where)
    # A pickle that an older writer replaced no longer has this hash: then the record is stale.
    if recorded.get("pickle_sha256") != hashlib.sha256(pickled).hexdigest():
        return None
    names = recorded.get("types")
    if not isinstance(names, dict):
        raise where.malformed("The record of types is not an object.")
    unknown = [name for name in names.values() if not isinstance(name, str) or name not in TENSORCLASS._JSON_TYPES]
    if unknown:
        raise where.malformed(f"Unknown type name {json.dumps(unknown[0])}.")
    return {key: TENSORCLASS._JSON_TYPES[name] for key, name in names.items()}


def _stack(level: Level, save: str, store: Store, allow_pickle: bool | None) -> list[Any]:
    """The values of a NonTensorStack, which are saved together."""
    where = Where(save, level.key, os.path.join(level.path, "meta.json"))
    data = level.meta["data"]
    if isinstance(data, str):
        if data != "pickle.pkl":
            raise where.malformed(f"The values of a NonTensorStack are in 'pickle.pkl', not in {data!r}.")
        where = where._replace(file=os.path.join(level.path, data))
        data = _unpickle(store.read_small(where, missing=MissingLeafError), where, allow_pickle)
    if not isinstance(data, list):
        raise where.malformed(f"The values of a NonTensorStack are not a list but a {type(data).__name__}.")
    if _is_deep(data):
        raise where.malformed(f"The values of a NonTensorStack are nested more than {metadata.MAX_STACKED} deep.")
    return data


def _is_deep(data: list[Any]) -> bool:
    """Whether lists of equal length, which are dimensions of the stack, lie too deep in one another."""
    lists = [data]
    for _ in range(metadata.MAX_STACKED):
        lists = [item for items in lists for item in items if all(isinstance(other, list) for other in items)]
        if not lists:
            return False
    return True


def build_stack(level: Level, save: str) -> Any:
    """The NonTensorStack of a level whose values have been read; if none of them is wanted, it holds the first."""
    where = Where(save, level.key, os.path.join(level.path, "meta.json"))
    raw = level.meta.get("device", "None")
    device = None if raw is None else metadata.saved_device(raw, where)
    values = level.objects
    build = level.cls._from_list  # type: ignore[attr-defined]
    if level.rows is None:
        return build(values, device=device)
    # Only what is wanted is built. Lists of one length are a dimension of the stack, which all of the values decide.
    deep = all(isinstance(value, list) and len(value) == len(values[0]) for value in values)
    return build(values[level.rows] or values[:1], device=device, ndim=None if deep else 1)


def _unpickle(data: bytes, where: Where, allow_pickle: bool | None) -> Any:
    if allow_pickle is False:
        raise where.error(
            PickleRefused,
            "The save holds pickled data, which can run any code when it is loaded. Pass allow_pickle=True if you"
            " trust it.",
        )
    if allow_pickle is None:
        warnings.warn(
            f"Loading pickled non-tensor data from {where.file}. That can run any code: pass allow_pickle=True if you"
            " trust the save, or allow_pickle=False to refuse. A later version of tensordict will refuse by default.",
            FutureWarning,
            stacklevel=user_level(),
        )
    try:
        return pickle.loads(data)
    except (AttributeError, ImportError) as error:
        raise where.error(
            UnknownClassError, f"A pickled object needs what this process does not have ({error}): import it first."
        ) from error
    except Exception as error:
        raise where.error(FormatError, f"This cannot be unpickled: {type(error).__name__}: {error}.") from error
