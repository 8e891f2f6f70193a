"""A save under other keys: its tree, with some of the entries elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

from tensordict import TensorDict

from tdgpu.data.selection import check_keys
from tdgpu.errors import InvalidArgument, InvalidArgumentType, NotSupported, UnknownKeyError
from tdgpu.layout.files import Where
from tdgpu.layout.save import Save
from tdgpu.layout.tree import Key, Kind, Leaf, Level

__all__ = ["Names", "check_names", "rename", "renamed"]

#: Of each key that is renamed, the new one.
Names = dict[Key, Key]

_Node = TypeVar("_Node", Leaf, Level)
_OPEN = (Kind.TENSORDICT, Kind.TYPED)


def check_names(mapping: object) -> Names:
    """The keys as tuples.

    Args:
        mapping: of each key that is renamed the new one: strings, or tuples of strings for nested ones.

    Raises:
        InvalidArgumentType: it is no mapping of keys.
        InvalidArgument: keys that lie within each other, or two new ones that are the same.

    >>> check_names({"a": "b", ("n", "x"): "y"})
    {('a',): ('b',), ('n', 'x'): ('y',)}
    """
    if not isinstance(mapping, Mapping):
        raise InvalidArgumentType(f"rename_keys takes a mapping of old keys to new ones, not {mapping!r}.")
    names: Names = {}
    for old, new in mapping.items():
        parts = (check_keys([old]) or []) + (check_keys([new]) or [])
        names[parts[0]] = parts[1]
    for keys in (list(names), list(names.values())):
        for i, key in enumerate(keys):
            for other in keys[i + 1 :]:
                shorter = min(len(key), len(other))
                if key[:shorter] == other[:shorter]:
                    raise InvalidArgument(f"{key!r} and {other!r} cannot be renamed together: one holds the other.")
    return names


def renamed(keys: list[Key], names: Names) -> list[Key]:
    """What a list of keys is after a renaming: each names a leaf or a subtree.

    >>> renamed([("a",), ("n",)], {("a",): ("b",), ("n", "x"): ("y",)})
    [('b',), ('n',), ('y',)]
    """
    found: list[Key] = []
    for key in keys:
        within = [old for old in names if key[: len(old)] == old]
        found.append(names[within[0]] + key[len(within[0]) :] if within else key)
        found += [new for old, new in names.items() if len(old) > len(key) and old[: len(key)] == key]
    return list(dict.fromkeys(found))


def rename(save: Save, names: Names) -> Save:
    """A save whose entries have other keys; where two levels would have to be one, it is refused.

    An entry that stays in its level keeps its place there; one that goes elsewhere comes last, in new levels if there
    are none of that key.

    Args:
        save: a save. It is not changed.
        names: as of :func:`check_names`.

    Raises:
        UnknownKeyError: there is nothing of an old key (a KeyError).
        InvalidArgument: there is something of a new key already.
        NotSupported: it lies in a tensorclass or a stack, or in a level with a format of its own.
    """
    result = copy.copy(save)
    renamer = _Renamer(save.prefix, _own(save.root))
    result.root = renamer.root
    elsewhere: list[tuple[Key, Leaf | Level]] = []
    stays: dict[Key, dict[str, str]] = {}
    for old, new in names.items():
        level = renamer.level(old)
        if old[:-1] == new[:-1]:
            stays.setdefault(old[:-1], {})[old[-1]] = new[-1]
        else:
            where = level.leaves if old[-1] in level.leaves else level.children
            elsewhere.append((new, where.pop(old[-1])))
    for at, within in stays.items():
        renamer.rename(renamer.level((*at, "")), within)
    for new, node in elsewhere:
        renamer.insert(new, node)
    return result


class _Renamer:
    """One renaming of one tree, whose levels are already copies."""

    def __init__(self, save: str, root: Level) -> None:
        self.save = save
        self.root = root

    def level(self, key: Key) -> Level:
        """The level that holds an entry, which is there; ``""`` as the last part stands for any entry."""
        level = self.root
        for depth in range(len(key)):
            if level.kind not in _OPEN:
                raise Where(self.save, level.key, level.path).error(
                    NotSupported,
                    f"What a {level.cls.__qualname__} holds has the names that it gives: only all of it can be"
                    " renamed.",
                )
            part, is_last = key[depth], depth == len(key) - 1
            if is_last and (part == "" or part in level.leaves):
                return level
            child = level.children.get(part)
            if child is None:
                raise UnknownKeyError("The save has no such key.", save=self.save, key=key)
            if is_last:
                return level
            level = child
        raise AssertionError(key)

    def rename(self, level: Level, names: dict[str, str]) -> None:
        kept = (level.leaves.keys() | level.children.keys()) - names.keys()
        for new in names.values():
            if new in kept:
                raise self.taken((*level.key, new))
        level.leaves = {
            names.get(key, key): _rekeyed(leaf, (*leaf.key[:-1], names[key])) if key in names else leaf
            for key, leaf in level.leaves.items()
        }
        level.children = {
            names.get(key, key): _rekeyed(child, (*child.key[:-1], names[key])) if key in names else child
            for key, child in level.children.items()
        }

    def insert(self, key: Key, node: Leaf | Level) -> None:
        level = self.root
        for part in key[:-1]:
            child = level.children.get(part)
            if child is None:
                if part in level.leaves:
                    raise self.taken((*level.key, part))
                child = Level((*level.key, part), level.path, Kind.TENSORDICT, TensorDict, {}, level.batch_size)
                child.saved_device = level.saved_device
                level.children[part] = child
            level = child
        if level.kind not in _OPEN or key[-1] in level.leaves or key[-1] in level.children:
            raise self.taken(key)
        if isinstance(node, Leaf):
            level.leaves[key[-1]] = _rekeyed(node, (*level.key, key[-1]))
        else:
            level.children[key[-1]] = _rekeyed(node, (*level.key, key[-1]))

    def taken(self, key: Key) -> InvalidArgument:
        return InvalidArgument("There is something of this key already.", save=self.save, key=key)


def _own(level: Level) -> Level:
    """A copy of a level and of those below, as far as entries of them can be renamed."""
    if level.kind not in _OPEN:
        return level
    result = copy.copy(level)
    result.leaves = dict(level.leaves)
    result.children = {key: _own(child) for key, child in level.children.items()}
    return result


def _rekeyed(node: _Node, key: Key) -> _Node:
    """A copy of a leaf, or of a level and all below it, that knows its new key."""
    result = copy.copy(node)
    result.key = key
    if isinstance(node, Level) and isinstance(result, Level):
        depth = len(node.key)
        result.leaves = {name: _rekeyed(leaf, key + leaf.key[depth:]) for name, leaf in node.leaves.items()}
        result.children = {name: _rekeyed(child, key + child.key[depth:]) for name, child in node.children.items()}
    return result
