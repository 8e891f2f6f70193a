"""A save as it was read: its tree, and the place that it was read from."""

from __future__ import annotations

from tdgpu.layout.store import Store
from tdgpu.layout.tree import Key, Kind, Leaf, Level

__all__ = ["Save"]


class Save:
    """A save, or the part of one below a subpath.

    Attributes:
        prefix: what the caller named: the directory or archive.
        root: its top level.
        store: where its contents are read from.
    """

    __slots__ = ("prefix", "root", "store")

    def __init__(self, prefix: str, root: Level, store: Store) -> None:
        self.prefix = prefix
        self.root = root
        self.store = store

    @property
    def is_archive(self) -> bool:
        """Whether it is an archive."""
        return self.store.is_archive

    def close(self) -> None:
        """Ends what reading it has opened: needed no more once its non-tensor contents have been read."""
        self.store.close()

    def leaves(self) -> list[Leaf]:
        """Every leaf that tdgpu loads, all of a level before those of its children."""
        return [leaf for level in self.root.walk() for leaf in level.leaves.values()]

    def foreign(self) -> list[Level]:
        """The levels that tensordict, or the class's own code, must load."""
        return [level for level in self.root.walk() if level.kind is Kind.FOREIGN]

    def select(self, key: Key) -> list[Leaf] | None:
        """The leaves that the rebuilt object shows at a nested key; None if there is nothing of that key.

        A lazy stack shows what its members have in common: the key then names a leaf of each.
        """
        return _select(self.root, key)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves in memory."""
        return sum(leaf.nbytes for leaf in self.leaves())

    def __repr__(self) -> str:
        return f"Save({self.prefix!r}, {self.root!r})"


def _select(level: Level, key: Key) -> list[Leaf] | None:
    if not key:
        return [leaf for below in level.walk() for leaf in below.leaves.values()]
    if level.kind is Kind.FOREIGN:
        return []  # its own loader has filled it
    if level.kind is Kind.LAZY_STACK:
        found = [_select(member, key) for member in level.children.values()]
        return None if None in found else [leaf for leaves in found for leaf in leaves or ()]
    if level.kind is Kind.TENSORCLASS and key[0] not in level.children:
        inner = level.children.get("_tensordict")
        shown = None if inner is None else _select(inner, key)
        return [] if shown is None and len(key) == 1 and key[0] in level.meta else shown
    if len(key) == 1 and key[0] in level.leaves:
        return [level.leaves[key[0]]]
    child = level.children.get(key[0])
    return None if child is None else _select(child, key[1:])
