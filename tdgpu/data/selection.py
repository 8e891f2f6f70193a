"""Some keys of a save: its tree, pruned to the leaves that are wanted."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from tdgpu.errors import InvalidArgumentType, NotSupported, UnknownKeyError
from tdgpu.layout.files import Where
from tdgpu.layout.save import Save
from tdgpu.layout.tree import Key, Kind, Level

__all__ = ["check_keys", "select"]

# What is wanted of a level: None is all of it; else, by key, what is wanted below.
_Wanted = dict[str, "_Wanted | None"]


def check_keys(keys: object) -> list[Key] | None:
    """The nested keys as tuples, each once; None for all.

    Args:
        keys: a list (or another iterable) of keys: strings, and tuples of strings for nested ones. None: all.

    Raises:
        InvalidArgumentType: it is none.

    >>> check_keys(["obs", ("next", "obs"), "obs"])
    [('obs',), ('next', 'obs')]
    """
    if keys is None:
        return None
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise InvalidArgumentType(f"keys is a list of keys, not {keys!r}. For one key: keys=[{keys!r}].")
    return list(dict.fromkeys(_parts(key) for key in keys))


def _parts(key: object) -> Key:
    if isinstance(key, str):
        return (key,)
    if isinstance(key, tuple) and key:
        return tuple(part for item in key for part in _parts(item))
    raise InvalidArgumentType(f"A key is a string or a tuple of strings, not {key!r}.")


def select(save: Save, keys: list[Key]) -> Save:
    """The part of a save that some keys name, as ``select`` of the loaded object gives it, in the saved order.

    Args:
        save: a save whose non-tensor contents have been read (:func:`tdgpu.layout.objects.resolve`). It is not changed.
        keys: nested keys of leaves or of subtrees. Of a tensorclass what is not among them becomes None.

    Returns:
        A new save, which shares with ``save`` what is the same.

    Raises:
        UnknownKeyError: there is nothing of that key (a KeyError).
        NotSupported: it lies in a level of a class with a format of its own (a NotImplementedError).
    """
    wanted: _Wanted = {}
    for key in keys:
        level: _Wanted | None = wanted
        for part in key[:-1]:
            level = None if level is None else level.setdefault(part, {})
        if level is not None:  # else a subtree that holds it is wanted already
            level[key[-1]] = None
    result = copy.copy(save)
    result.root = _Selector(save.prefix).level(save.root, wanted, ())
    return result


class _Selector:
    def __init__(self, save: str) -> None:
        self.save = save

    def level(self, level: Level, wanted: _Wanted | None, at: Key) -> Level:
        """What is wanted of a level, which the user names ``at``."""
        if wanted is None:
            return level
        if level.kind is Kind.FOREIGN:
            raise Where(self.save, level.key, level.path).error(
                NotSupported,
                f"Only the loader of {level.cls.__qualname__} can read this level, and not some keys of it: select all"
                " of it.",
            )
        if level.kind in (Kind.NON_TENSOR_DATA, Kind.NON_TENSOR_STACK):
            raise self.unknown(at, wanted)
        result = copy.copy(level)
        if level.kind is Kind.LAZY_STACK:
            result.children = {name: self.level(member, wanted, at) for name, member in level.children.items()}
        elif level.kind is Kind.TENSORCLASS:
            self.tensorclass(level, result, wanted, at)
        else:
            for key in wanted:
                if key not in level.children and (key not in level.leaves or wanted[key] is not None):
                    raise self.unknown(at, {key: wanted[key]})
            result.leaves = {key: leaf for key, leaf in level.leaves.items() if key in wanted}
            result.children = {
                key: self.level(child, wanted[key], (*at, key))
                for key, child in level.children.items()
                if key in wanted
            }
        return result

    def tensorclass(self, level: Level, result: Level, wanted: _Wanted, at: Key) -> None:
        """Its tensors lie in a level of their own, its other fields beside it."""
        fields = {key: value for key, value in level.objects.items() if key in wanted and wanted[key] is None}
        result.objects = fields
        below = {key: what for key, what in wanted.items() if key not in fields}
        result.children = {name: self.level(child, below, at) for name, child in level.children.items()}

    def unknown(self, at: Key, wanted: _Wanted) -> UnknownKeyError:
        key = at
        below: _Wanted | None = wanted
        while below:
            part = next(iter(below))
            key, below = (*key, part), below[part]
        return UnknownKeyError("The save has no such key.", save=self.save, key=key)
