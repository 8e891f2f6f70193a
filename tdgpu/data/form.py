"""What a batch is: which leaves it has rows of, where those lie in its memory, and the object that is handed out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from tensordict import TensorDict

from tdgpu.errors import NotSupported
from tdgpu.layout.files import Where
from tdgpu.layout.save import Save
from tdgpu.layout.tree import Kind, Leaf, Level, Shape
from tdgpu.transfer.plan import ALIGNMENT

__all__ = ["BatchForm"]

# Builds a level around the tensors of all leaves: those, the number of rows, and the device.
_Maker = Callable[[Sequence[torch.Tensor], int, "torch.device | None"], Any]


class _Layout(NamedTuple):
    """Where the leaves of a batch lie in its memory.

    Attributes:
        offsets: of each the first byte.
        nbytes: of all of it.
        views: of each the first element, the shape and the strides.
    """

    offsets: list[int]
    nbytes: int
    views: list[tuple[int, Shape, Shape]]


K = TypeVar("K")
T = TypeVar("T")


def remember(known: dict[K, T], count: K, what: T) -> None:
    """Keeps what is known of batches of so many rows: nearly all have the same number, but a sampler may do as it
    likes."""
    if len(known) >= 16:
        known.clear()
    known[count] = what


class BatchForm:
    """Batches of a save's rows: of the saved class, with as many rows as are asked for.

    Attributes:
        save: the save.
        rows: how many it has.
        leaves: the leaves whose rows have bytes, in the order of the tree.
        row_shapes: of each the shape of a row.
        row_nbytes: of each the bytes of a row.
        row_total: bytes of a row in all leaves.
    """

    def __init__(self, save: Save) -> None:
        """
        Args:
            save: the tree, its non-tensor contents read (:func:`tdgpu.layout.objects.resolve`). It has a batch
                dimension.

        Raises:
            NotSupported: rows of a level or leaf do not lie one behind the other: a lazy stack, a stack of non-tensors,
                a strided nested tensor, or a class with a format of its own.
        """
        self.save = save
        self.leaves: list[Leaf] = []
        self.row_shapes: list[Shape] = []
        self.row_nbytes: list[int] = []
        root = save.root.children["_tensordict"] if save.root.kind is Kind.TENSORCLASS else save.root
        if not root.batch_size:
            raise self._refuse(save.root, "It has no batch dimension, and so no rows.")
        self.rows = root.batch_size[0]
        self._make = self._level(save.root)
        self.row_total = sum(self.row_nbytes)
        self._layouts: dict[int, _Layout] = {}

    def build(self, tensors: Sequence[torch.Tensor], count: int, device: torch.device | None) -> Any:
        """The object that holds these tensors.

        Args:
            tensors: of each leaf, of shape ``(count, *row_shape)``.
            count: rows.
            device: that of the tensors, if the object is to say so; None: as the save says.
        """
        return self._make(tensors, count, device)

    def empty(self, count: int, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Memory on a device for so many rows: all of it, and the tensor of each leaf, which are not filled.

        The tensors share that memory, but nothing else: one may be changed in place without autograd minding the rest.
        """
        # The device is always given: torch.set_default_device is not meant for this.
        if len(self.leaves) == 1:
            only = torch.empty((count, *self.row_shapes[0]), dtype=self.leaves[0].dtype, device=device)
            return only, [only]
        memory = torch.empty(self.layout(count).nbytes, dtype=torch.uint8, device=device)
        storage = memory.untyped_storage()
        return memory, [
            torch.empty(0, dtype=leaf.dtype, device=device).set_(storage, offset, shape, strides)
            for leaf, (offset, shape, strides) in zip(self.leaves, self.layout(count).views, strict=True)
        ]

    def layout(self, count: int) -> _Layout:
        """Where the leaves lie in the memory of a batch of so many rows."""
        found = self._layouts.get(count)
        if found is None:
            offsets, end = [], 0
            for nbytes in self.row_nbytes:
                offsets.append(end)
                end += -(-nbytes * count // ALIGNMENT) * ALIGNMENT
            views = []
            for leaf, offset, row_shape in zip(self.leaves, offsets, self.row_shapes, strict=True):
                steps = [math.prod(row_shape[i:]) for i in range(len(row_shape) + 1)]
                views.append((offset // leaf.dtype.itemsize, (count, *row_shape), tuple(steps)))
            found = _Layout(offsets, end, views)
            remember(self._layouts, count, found)
        return found

    # --- the tree ---

    def _refuse(self, what: Level | Leaf, message: str) -> NotSupported:
        file = what.path if isinstance(what, Level) else None
        return NotSupported(message, save=self.save.prefix, key=what.key, file=file)

    def _level(self, level: Level, holder: Shape = ()) -> _Maker:
        """What makes a level. ``holder``: the batch size of the level that holds it."""
        if level.kind in (Kind.TENSORDICT, Kind.TYPED):
            return self._tensordict(level)
        if level.kind in (Kind.TENSORCLASS, Kind.NON_TENSOR_DATA):
            return self._tensorclass(level, holder)
        raise self._refuse(
            level,
            f"The rows of a saved {level.kind.value} ({level.cls.__qualname__}) do not lie one behind the other: they"
            " cannot be gathered by native threads: use MemmapDataset with torch.utils.data.DataLoader.",
        )

    def _tensorclass(self, level: Level, holder: Shape) -> _Maker:
        cls, objects = level.cls, level.objects
        has_rows, rest = bool(holder), holder[1:]
        inner = level.children.get("_tensordict")
        make = None if inner is None else self._level(inner)

        def build(tensors: Sequence[torch.Tensor], count: int, device: torch.device | None) -> Any:
            if make is not None:
                held = make(tensors, count, device)
            else:
                # Without a tensor it was saved without a batch size, and has that of what holds it.
                held = TensorDict(batch_size=(count, *rest) if has_rows else (), device=device or "cpu")
            result = cls._from_tensordict(held, dict(objects), rebuild=False)  # type: ignore[attr-defined]
            if level.kind is Kind.NON_TENSOR_DATA and "data" in objects:
                # In the order that indexing leaves the fields in.
                fields = result._non_tensordict
                fields.update({key: fields.pop(key) for key in ("data", *(key for key in fields if key != "data"))})
            return result

        return build

    def _tensordict(self, level: Level) -> _Maker:
        has_rows = bool(level.batch_size)
        if has_rows and level.batch_size[:1] != (self.rows,):  # type: ignore[index]
            where = Where(self.save.prefix, level.key, level.path)
            raise where.malformed(
                f"A level of batch size {list(level.batch_size or ())} does not have the {self.rows} rows of the save."
            )
        if not has_rows and (level.leaves or level.children):
            raise self._refuse(level, "A level without the batch dimension of the save has no rows.")
        entries = [(key, self._leaf(leaf)) for key, leaf in level.leaves.items()]
        children = [(key, self._level(child, level.batch_size or ())) for key, child in level.children.items()]
        rest, cls, names = (level.batch_size or ())[1:], level.cls, level.names
        saved = None if level.saved_device is None else torch.device("cpu")
        is_plain = cls is TensorDict or not issubclass(cls, TensorDict)

        def build(tensors: Sequence[torch.Tensor], count: int, device: torch.device | None) -> Any:
            device = saved if device is None else device
            batch_size = torch.Size((count, *rest) if has_rows else ())
            held: dict[str, Any] = {}
            for key, leaf in entries:
                held[key] = tensors[leaf] if isinstance(leaf, int) else leaf(count, device)
            result: Any
            if is_plain and names is None:
                for key, make in children:
                    held[key] = make(tensors, count, device)
                result = TensorDict._new_unsafe(cast(Any, held), batch_size=batch_size, device=device, nested=False)
            else:
                # Its own way: a child takes over names from its parent.
                result = TensorDict({}, batch_size, device=device) if is_plain else cls({}, batch_size, device=device)
                for key, tensor in held.items():
                    result._set_str(key, tensor, validated=True, inplace=False, non_blocking=False)
                if names is not None:
                    result._set_names(names)
                for key, make in children:
                    result._set_str(key, make(tensors, count, device), inplace=False, validated=False)
            return result if level.kind is Kind.TENSORDICT else cls._wrap_td(result)  # type: ignore[attr-defined]

        return build

    def _leaf(self, leaf: Leaf) -> int | Callable[[int, torch.device | None], torch.Tensor]:
        """The number of a leaf; of one without bytes in its rows, what makes it."""
        if leaf.is_nested:
            raise self._refuse(leaf, "The components of a strided nested tensor cannot be gathered.")
        if leaf.shape[:1] != (self.rows,):
            raise self._refuse(
                leaf, f"A leaf of shape {list(leaf.shape)} does not have the {self.rows} rows of its level."
            )
        row_shape, dtype = leaf.shape[1:], leaf.dtype
        row_nbytes = math.prod(row_shape) * dtype.itemsize
        if not row_nbytes:
            return lambda count, device: torch.empty((count, *row_shape), dtype=dtype, device=device or "cpu")
        self.leaves.append(leaf)
        self.row_shapes.append(row_shape)
        self.row_nbytes.append(row_nbytes)
        return len(self.leaves) - 1
