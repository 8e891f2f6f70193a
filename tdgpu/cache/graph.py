"""The digest of an object and of all that it refers to, however deep, shared or cyclic.

Every object is a node: a label, and references to others. Its digest is that of its label and of the digests of what
it refers to. Objects that refer to each other in a circle (functions that call each other; a class and its methods)
have no order in which this could be computed. They are told apart step by step, each by its label, by its neighbours'
labels, by those of their neighbours and so on, until another step tells none more apart; then what is told apart, as a
whole, names the circle. (This is how finite automata are minimised: two circles have the same digest exactly if no way
through them sees a difference.)

Nothing here recurses, so the depth of what is hashed has no limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from xxhash import xxh3_128_digest

from tdgpu.cache.encode import digest, frame, scalar
from tdgpu.errors import TdgpuError

__all__ = ["Description", "Ref", "Step", "Unhashable", "Walk"]

#: Names of what a node refers to are kept for `Walk.parts` if there are not more of them than this.
_NAMED = 512


class Ref(NamedTuple):
    """A reference to an object.

    Attributes:
        value: the object.
        edge: how it is reached: ``".attribute"`` and ``"[item]"`` continue a path, any other text begins one.
        ordered: whether the order of dicts in it counts.
    """

    value: Any
    edge: str
    ordered: bool = True


class Description(NamedTuple):
    """What an object is, to be hashed.

    Attributes:
        label: what tells it from others by itself.
        items: what it consists of: bytes of :func:`encode.scalar` and :func:`encode.raw`, and references.
        group: 0: the order of the items counts. n: items come in groups of n, whose order does not count.
    """

    label: bytes
    items: list[bytes | Ref]
    group: int = 0


class Step(NamedTuple):
    """One step of the way to an object: from which, and how."""

    owner: Any
    edge: str


class Unhashable(Exception):
    """An object has no digest.

    Attributes:
        reason: why.
        value: the object.
        path: the way to it, from the value that was to be hashed.
    """

    def __init__(self, reason: str, value: Any) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value
        self.path: list[Step] = []


@dataclass(eq=False, slots=True)
class _Node:
    value: Any  # held, so that nothing else gets its id
    label: bytes
    items: list[bytes | Ref]
    group: int
    index: int
    low: int
    edge: str
    names: list[Ref]
    position: int = 0
    is_circle: bool = False  # it refers to itself
    digest: bytes | None = None


class Walk:
    """One walk over objects. What it has met it does not hash again.

    Args:
        describe: what an object is, and whether dicts in it are ordered. Raises :class:`Unhashable`.
        plain: the types for which ``ordered`` makes a difference.
    """

    def __init__(self, describe: Callable[[Any, bool], Description], plain: frozenset[type]) -> None:
        self._describe = describe
        self._plain = plain
        self._nodes: dict[tuple[int, bool], _Node] = {}

    def digest(self, value: Any, *, ordered: bool) -> bytes:
        """The digest of a value.

        Raises:
            Unhashable: something in it cannot be hashed.
        """
        token = scalar(value)
        if token is not None:
            return digest(token)
        node = self._find(value, ordered)
        if node is None:
            node = self._visit(value, ordered)
        assert node.digest is not None
        return node.digest

    def parts(self, value: Any, *, ordered: bool) -> Iterator[tuple[Ref, bytes]]:
        """What a value that has been hashed refers to, and the digests of that."""
        node = self._find(value, ordered)
        for ref in [] if node is None else node.names:
            yield ref, self.digest(ref.value, ordered=ref.ordered)

    def _key(self, value: Any, ordered: bool) -> tuple[int, bool]:
        return id(value), ordered or type(value) not in self._plain

    def _find(self, value: Any, ordered: bool) -> _Node | None:
        return self._nodes.get(self._key(value, ordered))

    def _enter(self, value: Any, ordered: bool, edge: str) -> _Node:
        try:
            label, items, group = self._describe(value, ordered)
        except (Unhashable, TdgpuError, MemoryError):
            raise
        except Exception as error:
            raise Unhashable(f"{type(error).__name__}: {error}", value) from error
        index = len(self._nodes)
        # A few names are kept, to say what it was made of.
        names = [item for item in items if type(item) is Ref] if len(items) <= _NAMED else []
        items = [(scalar(item.value) or item) if type(item) is Ref else item for item in items]
        node = _Node(value, label, items, group, index, index, edge, names)
        self._nodes[self._key(value, ordered)] = node
        return node

    def _visit(self, value: Any, ordered: bool) -> _Node:
        """Tarjan's algorithm: circles come out together, each after all that it refers to."""
        root = self._enter(value, ordered, "")
        path, open_nodes = [root], [root]
        try:
            while path:
                node = path[-1]
                child = self._next(node)
                if child is not None:
                    path.append(child)
                    open_nodes.append(child)
                    continue
                path.pop()
                if path:
                    path[-1].low = min(path[-1].low, node.low)
                if node.low == node.index:
                    circle: list[_Node] = []
                    while not circle or circle[-1] is not node:
                        circle.append(open_nodes.pop())
                    self._finish(circle)
        except Unhashable as error:
            error.path = [Step(node.value, below.edge) for node, below in itertools.pairwise(path)]
            error.path.append(Step(path[-1].value, self._edge_at(path[-1])))
            raise
        finally:
            if path:  # not at its end: what has no digest yet must not be taken for an open part of the next walk
                self._nodes = {key: node for key, node in self._nodes.items() if node.digest is not None}
        return root

    def _next(self, node: _Node) -> _Node | None:
        """The next object that a node refers to and that has not been met."""
        items = node.items
        while node.position < len(items):
            item = items[node.position]
            if type(item) is Ref:
                known = self._find(item.value, item.ordered)
                if known is None:
                    child = self._enter(item.value, item.ordered, item.edge)
                    node.position += 1
                    return child
                node.is_circle |= known is node
                if known.digest is None:
                    node.low = min(node.low, known.index)
            node.position += 1
        return None

    def _edge_at(self, node: _Node) -> str:
        item = node.items[node.position] if node.position < len(node.items) else b""
        return item.edge if isinstance(item, Ref) else ""

    # --- digests ---

    def _finish(self, circle: list[_Node]) -> None:
        if len(circle) == 1 and not circle[0].is_circle:
            circle[0].digest = xxh3_128_digest(self._content(circle[0], {}))
        else:
            colours = {id(node): digest(node.label) for node in circle}
            count = 0
            while len(set(colours.values())) > count:
                count = len(set(colours.values()))
                colours = {
                    id(node): xxh3_128_digest(colours[id(node)] + self._content(node, colours)) for node in circle
                }
            whole = digest(b"circle", *sorted(set(colours.values())))
            for node in circle:
                node.digest = digest(colours[id(node)], whole)
        for node in circle:
            node.items = []  # what has a digest needs them no more

    def _content(self, node: _Node, colours: dict[int, bytes]) -> bytes:
        tokens = [self._token(item, colours) if isinstance(item, Ref) else item for item in node.items]
        if node.group:
            tokens = sorted(b"".join(tokens[i : i + node.group]) for i in range(0, len(tokens), node.group))
        # Every token says where it ends.
        return frame(node.label) + bytes([node.group]) + b"".join(tokens)

    def _token(self, ref: Ref, colours: dict[int, bytes]) -> bytes:
        node = self._find(ref.value, ref.ordered)
        assert node is not None
        return b"R" + (node.digest or colours[id(node)])
