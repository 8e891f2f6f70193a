"""The tree of a save: levels that hold leaves, and where each leaf's bytes are.

Plain classes with slots, because a save of ten thousand leaves makes twenty thousand of these objects before anything
else can begin.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

Key = tuple[str, ...]
Shape = tuple[int, ...]

__all__ = ["Blocks", "Extent", "Key", "Kind", "Leaf", "Level", "Packed", "Shape"]


class Blocks:
    """The block index of a deflate entry that tdgpu packed: blocks that can be inflated each by itself.

    Attributes:
        nbytes: bytes of a block when it is inflated; the last one may be shorter.
        sizes: compressed bytes of each block, uint32.
        crcs: CRC-32 of each inflated block, uint32.
    """

    __slots__ = ("crcs", "nbytes", "sizes")

    def __init__(self, nbytes: int, sizes: np.ndarray[Any, Any], crcs: np.ndarray[Any, Any]) -> None:
        self.nbytes = nbytes
        self.sizes = sizes
        self.crcs = crcs


class Packed:
    """What an archive says of one of its entries.

    Attributes:
        name: the entry's name in the archive.
        method: how it is compressed, as zip numbers the methods: 0 stored, 8 deflate, 12 bzip2, 14 lzma, 93 zstd.
        nbytes: bytes when it is inflated.
        crc: their CRC-32.
        blocks: its block index, or None.
        has_end_marker: whether an lzma stream ends with a marker (bit 1 of the entry's flags).
    """

    __slots__ = ("blocks", "crc", "has_end_marker", "method", "name", "nbytes")

    def __init__(
        self,
        name: str,
        method: int,
        nbytes: int,
        crc: int,
        blocks: Blocks | None = None,
        has_end_marker: bool = False,
    ) -> None:
        self.name = name
        self.method = method
        self.nbytes = nbytes
        self.crc = crc
        self.blocks = blocks
        self.has_end_marker = has_end_marker


class Extent:
    """A run of bytes in a file.

    Attributes:
        file: path of the file; of an archive, for one of its entries.
        offset: first byte.
        nbytes: bytes that lie there: compressed ones, if they are compressed.
        packed: what the archive says of them; None in a directory.
        inode: the file's inode when it was checked; 0 if it was not.
    """

    __slots__ = ("file", "inode", "nbytes", "offset", "packed")

    def __init__(self, file: str, offset: int, nbytes: int, packed: Packed | None = None, inode: int = 0) -> None:
        self.file = file
        self.offset = offset
        self.nbytes = nbytes
        self.packed = packed
        self.inode = inode

    @property
    def is_compressed(self) -> bool:
        """Whether the bytes must be inflated."""
        return self.packed is not None and self.packed.method != 0

    def __repr__(self) -> str:
        return f"Extent({self.file!r}, {self.offset}, {self.nbytes})"


class Leaf:
    """One saved tensor.

    Attributes:
        key: nested key from the loaded root, as in ``td[key]``; members of a stack are ``"0"``, ``"1"``, ...
        shape: shape of the tensor, or of its tensor of sizes if the leaf is nested.
        dtype: dtype of the elements.
        extent: where the saved leaf is, the whole of it; None if there are no elements.
        first: where the elements begin in the saved leaf's bytes: not 0 if some rows only are loaded.
        sizes: where the sizes of a nested leaf are (int64); None if the leaf is not nested.
        nested_sizes: the int64 host tensor of those sizes, one row per component; None if the leaf is not nested.
        nbytes: bytes of the elements in memory.
    """

    __slots__ = ("dtype", "extent", "first", "key", "nbytes", "nested_sizes", "shape", "sizes")

    def __init__(
        self,
        key: Key,
        shape: Shape,
        dtype: torch.dtype,
        extent: Extent | None,
        sizes: Extent | None = None,
        nbytes: int = 0,
    ) -> None:
        self.key = key
        self.shape = shape
        self.dtype = dtype
        self.extent = extent
        self.sizes = sizes
        self.nbytes = nbytes
        self.nested_sizes: torch.Tensor | None = None
        self.first = 0

    @property
    def is_nested(self) -> bool:
        """Whether the leaf is a strided nested tensor."""
        return self.sizes is not None

    def __repr__(self) -> str:
        return f"Leaf({'/'.join(self.key)!r}, {self.shape}, {self.dtype}, {self.nbytes} bytes)"


class Kind(enum.Enum):
    """How a level is stored and rebuilt. ``classes.kind_of`` tells it from the saved class."""

    TENSORDICT = "tensordict"
    TYPED = "typed"
    TENSORCLASS = "tensorclass"
    NON_TENSOR_DATA = "non-tensor data"
    NON_TENSOR_STACK = "non-tensor stack"
    LAZY_STACK = "lazy stack"
    FOREIGN = "foreign"


class Level:
    """One directory of a save (or what mirrors it in an archive).

    Attributes:
        key: nested key from the loaded root.
        path: the directory.
        kind: how it is stored.
        cls: the class that was saved, as tensordict resolves it.
        meta: its ``meta.json``, parsed.
        batch_size: batch size, or None where only the rebuilt object knows it.
        saved_device: the device in ``meta.json``, or None.
        names: names of the batch dimensions, or None.
        leaves: the tensors at this level, by key, in saved order.
        children: the levels below, in saved order: by key; by ``"0"``, ``"1"``, ... in a lazy stack; a tensorclass
            keeps its tensors in the child ``"_tensordict"``, a foreign view what it looks at in ``"_source"``.
        objects: non-tensor contents, once ``objects.resolve`` has read them.
        rows: which of its members or values a stack is made of, if ``rows.narrow`` chose them; None: all.
    """

    __slots__ = (
        "batch_size", "children", "cls", "key", "kind", "leaves", "meta", "names", "objects", "path", "rows",
        "saved_device",
    )  # fmt: skip

    def __init__(
        self,
        key: Key,
        path: str,
        kind: Kind,
        cls: type,
        meta: dict[str, Any],
        batch_size: Shape | None = None,
        saved_device: torch.device | None = None,
        names: list[str | None] | None = None,
    ) -> None:
        self.key = key
        self.path = path
        self.kind = kind
        self.cls = cls
        self.meta = meta
        self.batch_size = batch_size
        self.saved_device = saved_device
        self.names = names
        self.leaves: dict[str, Leaf] = {}
        self.children: dict[str, Level] = {}
        self.objects: Any = None
        self.rows: slice | None = None

    def walk(self, *, into_foreign: bool = False) -> Iterator[Level]:
        """This level and those below it, parents first; what lies below a foreign level only if asked."""
        yield self
        if self.kind is not Kind.FOREIGN or into_foreign:
            for child in self.children.values():
                yield from child.walk(into_foreign=into_foreign)

    def __repr__(self) -> str:
        return f"Level({'/'.join(self.key)!r}, {self.kind.value}, {len(self.leaves)} leaves, {list(self.children)})"
