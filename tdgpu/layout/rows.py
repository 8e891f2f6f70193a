"""Some rows of a save: its tree, narrowed along the first batch dimension, so that only their bytes are read."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sized

from torch._subclasses.fake_tensor import unset_fake_temporarily

from tdgpu.errors import InvalidArgument, InvalidArgumentType, NotSupported, TdgpuError
from tdgpu.layout import collector
from tdgpu.layout.files import Where
from tdgpu.layout.save import Save
from tdgpu.layout.tree import Extent, Kind, Leaf, Level, Shape

__all__ = ["check", "narrow"]


def check(rows: object) -> slice:
    """``rows`` as a slice without a step, its bounds as ints or None.

    Raises:
        InvalidArgumentType: it is no slice, or a bound is no integer.
        InvalidArgument: it has a step.

    >>> check(slice(-2, None, 1))
    slice(-2, None, None)
    """
    if not isinstance(rows, slice):
        hint = f" For one row: slice({rows}, {rows + 1 or None})." if isinstance(rows, int) else ""
        raise InvalidArgumentType(f"rows must be a slice, got {rows!r}.{hint}")
    try:
        start, stop, step = (
            None if bound is None else operator.index(bound) for bound in (rows.start, rows.stop, rows.step)
        )
    except TypeError:
        raise InvalidArgumentType(f"rows must have integers or None as its bounds, got {rows!r}.") from None
    if step not in (None, 1):
        raise InvalidArgument(f"rows must not have a step, got {rows!r}: load the rows between, and index the result.")
    return slice(start, stop)


def narrow(save: Save, rows: slice) -> Save:
    """The rows ``rows`` of a save, along the first batch dimension of its root.

    What is assembled from the returned tree is what indexing the whole loaded object with ``rows`` gives. Two things
    differ: some components of a strided nested leaf can be taken, which torch itself cannot index; and of levels that
    contradict each other nothing is taken.

    Args:
        save: a save whose non-tensor contents have been read (:func:`tdgpu.layout.objects.resolve`). It is not changed.
        rows: a slice without a step. Its bounds mean what they mean for a list: negative ones count from the end, and
            those past the end are the end.

    Returns:
        ``save`` itself if ``rows`` is ``slice(None)`` and its root is no stack; otherwise a new one, which shares with
        it what is the same. Then ``leaf.first`` and ``leaf.nbytes`` are the bytes to read of each leaf, and
        ``leaf.extent`` is still all of it. Members of a lazy stack keep the number that they have in the save.

    Raises:
        InvalidArgumentType, InvalidArgument: see :func:`check`.
        InvalidArgument: the root has no batch dimension.
        FormatError: a leaf or a level below the root has another number of rows.
        NotSupported: a level is of a class with a format of its own; or no member is taken of a lazy stack of nested
            tensors, which torch cannot make.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict
    >>> from tdgpu.layout import objects, reader
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = TensorDict(a=torch.zeros(10, 3), batch_size=[10]).memmap(path)
    ...     save = reader.read(path)
    ...     objects.resolve(save, None)
    ...     (leaf,) = narrow(save, slice(4, 6)).leaves()
    >>> leaf.shape, leaf.first, leaf.nbytes
    ((2, 3), 48, 24)
    """
    narrower = _Narrower(save.prefix, check(rows))
    root = save.root
    if root.kind is not Kind.FOREIGN and not narrower.batch_size(root):
        raise narrower.where(root).error(InvalidArgument, "This save has no batch dimension to take rows of.")
    if narrower.rows == slice(None) and _is_its_own_whole(root):
        return save
    narrowed = copy.copy(save)
    with collector.paused():
        narrowed.root = narrower.level(root, None)
    return narrowed


def _is_its_own_whole(level: Level) -> bool:
    """Whether tensordict gives, for ``[:]``, the very object that was loaded."""
    if level.kind in (Kind.TENSORCLASS, Kind.NON_TENSOR_DATA):
        return all(_is_its_own_whole(child) for child in level.children.values())
    return level.kind in (Kind.TENSORDICT, Kind.TYPED)


class _Narrower:
    """One narrowing of one save."""

    def __init__(self, save: str, rows: slice) -> None:
        self.save = save
        self.rows = rows

    def where(self, level: Level) -> Where:
        return Where(self.save, level.key, level.path)

    def foreign(self, level: Level) -> TdgpuError:
        return self.where(level).error(
            NotSupported,
            f"Only the loader of {level.cls.__qualname__} can read this level, and it cannot read some rows of it: load"
            " all of them, and index the result.",
        )

    # --- what is there ---

    def batch_size(self, level: Level) -> Shape:
        """The batch size that the rebuilt level will have, also where ``level.batch_size`` is None."""
        if level.batch_size is not None:
            return level.batch_size
        if level.kind is Kind.FOREIGN:
            raise self.foreign(level)
        if level.kind is Kind.NON_TENSOR_STACK:
            return (_count(level, level.objects),)  # at least: its values may be lists
        if level.kind is Kind.LAZY_STACK:
            dim, member = self.stack_dim(level)
            return (*member[:dim], _count(level, level.children), *member[dim:])
        inner = level.children.get("_tensordict")
        return () if inner is None else self.batch_size(inner)

    def stack_dim(self, level: Level) -> tuple[int, Shape]:
        """The dimension, not negative, that a lazy stack stacks along, and the batch size of its first member."""
        member = self.batch_size(next(iter(level.children.values())))
        dim: int = level.meta["stack_dim"]
        if not -len(member) - 1 <= dim <= len(member):
            raise self.where(level).malformed(
                f"The stack_dim {dim} does not fit members of {len(member)} batch dimensions."
            )
        return dim if dim >= 0 else dim + len(member) + 1, member

    # --- what is wanted of it ---

    def level(self, level: Level, expected: int | None) -> Level:
        """The rows of one level and all below it. The level above has ``expected`` rows; None: there is none."""
        if level.kind is Kind.FOREIGN:
            raise self.foreign(level)
        size = self.batch_size(level)
        if level.kind is Kind.NON_TENSOR_DATA and not size:
            return level  # one value, for however many rows
        if not size or expected not in (None, size[0]):
            raise self.where(level).malformed(
                f"A level of batch size {list(size)} has no rows in common with the {expected} rows of what holds it."
            )
        first, last, _ = self.rows.indices(size[0])
        last = max(first, last)
        result = _copy(level)
        if level.batch_size is not None:
            result.batch_size = (last - first, *size[1:])
        if level.kind in (Kind.TENSORDICT, Kind.TYPED):
            result.leaves = {key: self.leaf(level, leaf, size[0], first, last) for key, leaf in level.leaves.items()}
            result.children = {key: self.level(child, size[0]) for key, child in level.children.items()}
        elif level.kind is Kind.NON_TENSOR_STACK:
            skipped = 0 if level.rows is None else level.rows.start
            result.rows = slice(skipped + first, skipped + last)
        elif level.kind is Kind.LAZY_STACK:
            self.lazy_stack(level, result, expected, first, last)
        else:
            result.children = {key: self.level(child, expected) for key, child in level.children.items()}
        return result

    def lazy_stack(self, level: Level, result: Level, expected: int | None, first: int, last: int) -> None:
        members = list(level.children.items())
        result.rows = slice(0, len(members))
        if self.stack_dim(level)[0] != 0:
            # Members may be of different lengths: the bounds that were asked for are counted in each by itself.
            result.children = {key: self.level(member, expected) for key, member in members}
        elif first < last:
            result.children = dict(members[first:last])
            result.rows = slice(0, last - first)
        else:
            # tensordict makes a tensordict without rows, of what all members have in common.
            result.children = {key: self.without_elements(member) for key, member in members}
            result.rows = slice(0, 0)

    def without_elements(self, level: Level) -> Level:
        """A level of full shape of which nothing is read."""
        if level.kind is Kind.FOREIGN:
            raise self.foreign(level)
        result = _copy(level)
        for key, leaf in level.leaves.items():
            if leaf.is_nested:
                raise Where(self.save, leaf.key, level.path).error(
                    NotSupported, "torch cannot make a stack of no members of a strided nested tensor."
                )
            result.leaves[key] = Leaf(leaf.key, leaf.shape, leaf.dtype, None)
        result.children = {key: self.without_elements(child) for key, child in level.children.items()}
        return result

    def leaf(self, level: Level, leaf: Leaf, rows: int, first: int, last: int) -> Leaf:
        """The rows ``first`` to ``last`` of a leaf, which must have ``rows``."""
        if leaf.shape[:1] != (rows,):
            raise Where(self.save, leaf.key, level.path).malformed(
                f"A leaf of shape {list(leaf.shape)} does not have the {rows} rows of its level."
            )
        shape = (last - first, *leaf.shape[1:])
        if leaf.nested_sizes is not None:
            with unset_fake_temporarily():
                # Of a tensor on the host, so that a FakeTensorMode has nothing to do with it.
                before, wanted = (
                    int(leaf.nested_sizes[begin:end].prod(dim=1).sum()) * leaf.dtype.itemsize
                    for begin, end in ((0, first), (first, last))
                )
                nested_sizes = leaf.nested_sizes[first:last].clone()
            result = _narrowed(leaf, shape, before, wanted, leaf.sizes)
            result.nested_sizes = nested_sizes
            return result
        row = leaf.nbytes // rows if rows else 0
        return _narrowed(leaf, shape, row * first, row * (last - first), None)


def _count(level: Level, stacked: Sized) -> int:
    """How many members or values a stack is made of, which may have been narrowed before."""
    return len(stacked) if level.rows is None else int(level.rows.stop - level.rows.start)


def _narrowed(leaf: Leaf, shape: Shape, first: int, nbytes: int, sizes: Extent | None) -> Leaf:
    result = Leaf(leaf.key, shape, leaf.dtype, leaf.extent if nbytes else None, sizes, nbytes)
    result.first = leaf.first + first if nbytes else 0
    return result


def _copy(level: Level) -> Level:
    """A level like ``level``, so far without leaves and children."""
    result = Level(
        level.key, level.path, level.kind, level.cls, level.meta, level.batch_size, level.saved_device, level.names
    )
    result.objects = level.objects
    return result
