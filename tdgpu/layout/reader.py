"""Reads a save into a tree, and checks it: every file that the metadata names, its type and its size."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tdgpu.errors import (
    KeyEscapeError,
    LeafSizeError,
    MissingLeafError,
    SaveNotFound,
    SubpathError,
    TdgpuError,
)
from tdgpu.layout import classes, collector, keys, metadata
from tdgpu.layout.commit import Top, top_above
from tdgpu.layout.files import Where
from tdgpu.layout.save import Save
from tdgpu.layout.store import Store, open_store
from tdgpu.layout.tree import Extent, Key, Kind, Leaf, Level, Shape
from tdgpu.options import get as get_options

__all__ = ["MAX_DEPTH", "read"]

#: Levels below one another. tensordict's own recursion ends not far above.
MAX_DEPTH = 256


def read(
    prefix: str | os.PathLike[str],
    *,
    subpath: object = None,
    robust_key: bool | None = True,
    check: bool = True,
) -> Save:
    """Reads the structure of a saved directory or archive.

    Args:
        prefix: the directory or archive.
        subpath: the nested level to read instead of the root, as a nested key or a ``"/"``-separated path.
        robust_key: whether file names are percent-encoded keys, with a fallback to raw ones (True, None), or raw keys
            only (False).
        check: whether to look at every leaf's file: that it is there, is a file, and holds enough bytes. Without it,
            one listing per directory tells what is there; and an archive's local headers are not read, so that extents
            have no offset (-1). Sizes of nested leaves are read in both cases.

    Returns:
        The tree. No leaf file has been opened, except the sizes of nested leaves. An archive is open: close the save
        once its non-tensor contents have been read.

    Raises:
        SaveNotFound: there is no save at ``prefix``, or a level has no ``meta.json``.
        InvalidArgument: ``prefix`` is a file, but no archive of a save.
        ArchiveError, ChecksumError: the archive is damaged, or refused.
        NotSupported: a leaf is compressed by an unknown method.
        SubpathError: ``subpath`` names no saved level.
        MissingLeafError: a leaf, child or stack member is not there.
        LeafSizeError: a leaf's file is too short, or in an archive of another size.
        FormatError: malformed metadata, an unknown class, a key that leads out of the save.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = TensorDict(a=torch.zeros(3), b=TensorDict(c=torch.ones(2, 2))).memmap(path)
    ...     for leaf in read(path).leaves():
    ...         print(leaf.key, leaf.shape, leaf.dtype, leaf.nbytes)
    ('a',) (3,) torch.float32 12
    ('b', 'c') (2, 2) torch.float32 16
    """
    root = str(Path(prefix))
    parts = None if subpath is None else keys.parts_of(subpath)
    store = open_store(root, check=check)
    try:
        reader = _Reader(root, store, robust=robust_key is None or bool(robust_key), check=check)
        path = store.root if parts is None else reader.below(parts)
        if parts:
            reader.top = top_above(path, Where(root, (), store.root), store.is_named, reader.meta_if_complete)
        with collector.paused():
            return Save(root, reader.level(path, ()), store)
    except BaseException:
        store.close()
        raise


class _Reader:
    """One reading of one save."""

    def __init__(self, save: str, store: Store, *, robust: bool, check: bool) -> None:
        self.save = save
        self.store = store
        self.robust = robust
        self.check = check
        # Links can make a small save look endless: the bound on one meta.json also bounds all of them together.
        self.budget = get_options().max_metadata_bytes
        self.ancestors: list[Hashable] = []
        self.stacks = 0  # lazy stacks among them
        self.top: Top | None = None  # what the level that is read grows with

    # --- levels ---

    def level(self, path: str, key: Key) -> Level:
        """The level at ``path`` and all below it."""
        self.ancestors.append(self._directory(Where(self.save, key, path)))
        where = Where(self.save, key, os.path.join(path, "meta.json"))
        meta = self._meta(where)
        cls = classes.resolve(meta, where)
        level = Level(key, path, classes.kind_of(cls, meta), cls, meta)
        if level.kind in (Kind.TENSORDICT, Kind.TYPED):
            self._tensordict(level, where)
        elif level.kind in (Kind.TENSORCLASS, Kind.NON_TENSOR_DATA):
            self._tensorclass(level)
        elif level.kind is Kind.LAZY_STACK:
            self._lazy_stack(level, where)
        elif level.kind is Kind.FOREIGN and self.store.exists(os.path.join(path, "_source", "meta.json")):
            # Its own loader will read it; what lies there is checked all the same.
            level.children["_source"] = self._apart(os.path.join(path, "_source"), key)
        self.ancestors.pop()
        return level

    def _directory(self, where: Where) -> Hashable:
        """The identity of the directory of a level, once it is known to be one and not to lie in itself."""
        identity = self.store.directory(where)
        if identity is None:
            missing = (MissingLeafError, "The directory of this level is missing.")
            raise where.error(*missing if self.ancestors else (SaveNotFound, "There is no save here."))
        if len(self.ancestors) > MAX_DEPTH or identity in self.ancestors:
            raise where.malformed(f"The levels of this save form a loop, or lie more than {MAX_DEPTH} deep.")
        return identity

    def _apart(self, path: str, key: Key) -> Level:
        """A level below this one that does not grow with what is above it."""
        above, self.top = self.top, None
        level = self.level(path, key)
        self.top = above
        return level

    def _meta(self, where: Where) -> dict[str, Any]:
        data = self.store.read_small(where, missing=SaveNotFound, bound=self.budget)
        self.budget -= len(data)
        return metadata.parse(data, where)

    def meta_if_complete(self, where: Where) -> dict[str, Any] | None:
        """What :class:`Top` looks at once more, or beside what has been read: it may be gone, or half written."""
        try:
            return metadata.parse(self.store.read_small(where, missing=SaveNotFound, bound=self.budget), where)
        except TdgpuError:
            return None

    def _tensordict(self, level: Level, where: Where) -> None:
        checker = metadata.ShapeChecker(where)
        level.batch_size = checker.shape(None, level.meta.get("shape", []))
        above = self.top
        if level.batch_size:
            if above is None:
                self.top = Top(where, level.batch_size[0], self.meta_if_complete)
            elif level.batch_size[0] != above.rows:
                level.meta = above.settled(level.meta, where)
                level.batch_size = checker.shape(None, level.meta["shape"])
        level.saved_device = metadata.saved_device(level.meta.get("device", "None"), where)
        level.names = metadata.names(level.meta.get("_names"), len(level.batch_size), where)
        for key in self._leaves(level, checker):
            level.children[key] = self.level(self._child_path(level, key), (*level.key, key))
        self.top = above

    def _tensorclass(self, level: Level) -> None:
        path = os.path.join(level.path, "_tensordict")
        if self.store.is_named(path):
            # A non-tensor value is the same for all rows: it does not grow.
            read = self._apart if level.kind is Kind.NON_TENSOR_DATA else self.level
            child = level.children["_tensordict"] = read(path, level.key)
            level.batch_size = child.batch_size
        elif level.kind is Kind.TENSORCLASS:
            raise Where(self.save, level.key, path).error(
                MissingLeafError, "The directory of this tensorclass's tensors is missing."
            )

    def _lazy_stack(self, level: Level, where: Where) -> None:
        dim = metadata.stack_dim(level.meta.get("stack_dim"), where)
        self.stacks += 1
        if self.stacks > metadata.MAX_STACKED:
            raise where.malformed(f"Lazy stacks are nested more than {metadata.MAX_STACKED} deep.")
        found = [name for name in self.store.members(level.path) if name.isascii() and name.isdigit()]
        # No count is stored: the largest member that is there says how many there must be.
        present = {int(name) for name in found if len(name) < 10 and str(int(name)) == name}
        for i in range(max(present, default=0) + 1):
            if i not in present:
                raise Where(self.save, level.key, os.path.join(level.path, str(i))).error(
                    MissingLeafError, f"The member {i} of this lazy stack is missing."
                )
            level.children[str(i)] = self._apart(os.path.join(level.path, str(i)), (*level.key, str(i)))
        self.stacks -= 1
        sizes = [child.batch_size for child in level.children.values()]
        first = sizes[0]
        if first is None or None in sizes:
            return  # only the rebuilt members know
        if any(len(size) != len(first) for size in sizes if size is not None):
            raise where.malformed("The members of this lazy stack have different numbers of batch dimensions.")
        if not -len(first) - 1 <= dim <= len(first):
            raise where.malformed(f"The stack_dim {dim} does not fit members of {len(first)} batch dimensions.")
        dim += len(first) + 1 if dim < 0 else 0
        level.batch_size = (*first[:dim], len(sizes), *first[dim:])

    def _child_path(self, level: Level, key: str) -> str:
        if not self.robust:
            return os.path.join(level.path, keys.stay_inside(key, Where(self.save, (*level.key, key), level.path)))
        name = keys.encode(key)
        path = os.path.join(level.path, name)
        if name != key and not self.store.is_dir(path):
            legacy = keys.legacy_name(key, child=True)
            if legacy is not None and self.store.is_dir(os.path.join(level.path, legacy)):
                return os.path.join(level.path, legacy)
        return path

    # --- leaves ---

    def _leaves(self, level: Level, checker: metadata.ShapeChecker) -> list[str]:
        """Fills ``level.leaves``, and returns the keys of the children."""
        children: list[str] = []
        base, leaves = level.key, level.leaves
        directory = level.path + "/"
        listing = None if self.check else self.store.listing(directory)
        extent, is_exact = self.store.extent, self.store.is_archive
        plain = self.robust and keys.all_plain(level.meta)
        # Entries that say the same are one object (see scan), which is looked into once.
        seen: dict[int, tuple[Shape, torch.dtype, int]] = {}
        for key, entry in level.meta.items():
            known = seen.get(id(entry))
            if known is None:
                if type(entry) is not dict:
                    continue
                if entry.get("type") is not None:
                    children.append(key)
                    continue
                raw_dtype, raw_shape = entry.get("dtype"), entry.get("shape")
                if raw_dtype is None or raw_shape is None:
                    continue  # an incomplete entry, or one of a kind that is not known: tensordict ignores it too
                known = checker.leaf(key, raw_shape, raw_dtype)
                if entry.get("is_nested"):
                    leaves[key] = self._nested_leaf(directory, (*base, key), *known[:2])
                    continue
                seen[id(entry)] = known
            shape, dtype, nbytes = known
            full = (*base, key)
            if not nbytes:
                leaves[key] = Leaf(full, shape, dtype, None)
                continue
            name = key + ".memmap" if plain else self._name(directory, full)
            inode = 0
            if listing is None:
                path, found, inode = self._leaf_file(directory, full, name)
                if found < nbytes or (is_exact and found != nbytes):
                    raise self._wrong_size(Where(self.save, full, path), nbytes, found)
            elif name in listing:
                path = directory + name
            else:
                path = self._unlisted_file(directory, full, name, listing)
            leaves[key] = Leaf(full, shape, dtype, extent(path, nbytes, inode), None, nbytes)
        return children

    def _wrong_size(self, where: Where, wanted: int, found: int) -> TdgpuError:
        if found < 0:
            return where.error(MissingLeafError, "The leaf's file is missing.")
        what = "short" if found < wanted else "long"
        return where.error(LeafSizeError, f"The leaf's file is too {what}.", wanted=wanted, found=found)

    def _name(self, directory: str, key: Key) -> str:
        """The file name of a leaf."""
        if self.robust:
            return f"{keys.encode(key[-1])}.memmap"
        return keys.stay_inside(f"{key[-1]}.memmap", Where(self.save, key, directory))

    def _legacy_name(self, key: Key, name: str) -> str | None:
        """The name to look for where there is no file ``name``."""
        legacy = keys.legacy_name(key[-1], child=False) if self.robust else None
        return None if legacy is None or f"{legacy}.memmap" == name else f"{legacy}.memmap"

    def _leaf_file(self, directory: str, key: Key, name: str) -> tuple[str, int, int]:
        """The file of a leaf, its size in bytes (-1: missing) and its inode."""
        size_of = self.store.size_of
        size, inode = size_of(directory + name, self.save, key)
        if size < 0:
            legacy = self._legacy_name(key, name)
            legacy_size, legacy_inode = (-1, 0) if legacy is None else size_of(directory + legacy, self.save, key)
            if legacy is not None and legacy_size >= 0:
                return directory + legacy, legacy_size, legacy_inode
        return directory + name, size, inode

    def _unlisted_file(self, directory: str, key: Key, name: str, listing: set[str]) -> str:
        """The file of a leaf whose own name is not among those in its directory."""
        if "/" in name and self.store.exists(directory + name):
            return directory + name
        legacy = self._legacy_name(key, name)
        if legacy is not None and legacy in listing:
            return directory + legacy
        raise self._wrong_size(Where(self.save, key, directory + name), 0, -1)

    def _nested_leaf(self, directory: str, key: Key, shape: Shape, dtype: torch.dtype) -> Leaf:
        """A strided nested tensor: its sizes are read, and the file of its values is checked against them."""
        path, found, inode = self._leaf_file(directory, key, self._name(directory, key))
        where = Where(self.save, key, str(Path(path).with_suffix(".shape.memmap")))
        if len(shape) != 2:
            raise where.malformed(f"The sizes of a nested leaf have two dimensions, not the shape {list(shape)}.")
        nbytes = math.prod(shape) * 8
        data, at = b"", Extent(where.file, 0, 0)
        if nbytes:  # components without dimensions have sizes without elements, and no file
            on_disk, sizes_inode = self.store.size_of(where.file, self.save, key)
            if on_disk < nbytes or (self.store.is_archive and on_disk != nbytes):
                raise self._wrong_size(where, nbytes, on_disk)
            data = self.store.read_small(where, missing=MissingLeafError, bound=self.budget, exactly=nbytes)
            self.budget -= nbytes
            at = self.store.extent(where.file, nbytes, sizes_inode)
        sizes = np.frombuffer(data, dtype=np.int64).reshape(shape).copy()
        if (sizes < 0).any():
            raise where.malformed("A nested leaf has a negative size.")
        # In floating point first, where a product that int64 cannot hold does not wrap around.
        if np.prod(np.maximum(sizes, 1).astype(np.float64), axis=1).sum() * dtype.itemsize >= 2.0**62:
            raise where.malformed("The sizes of this nested leaf are too large.")
        values = int(np.prod(sizes, axis=1).sum()) * dtype.itemsize
        if values and (found < values or (self.store.is_archive and found != values)):
            raise self._wrong_size(Where(self.save, key, path), values, found)
        extent = self.store.extent(path, values, inode) if values else None
        leaf = Leaf(key, shape, dtype, extent, at, values)
        leaf.nested_sizes = _host_tensor(sizes)
        return leaf

    # --- subpath ---

    def below(self, parts: Key) -> str:
        """The directory of the level that ``parts`` names.

        Raises:
            SubpathError: there is none.
        """
        store = self.store
        path = store.root
        for part in parts:
            where = Where(self.save, (), os.path.join(path, "meta.json"))
            try:
                name = keys.encode(part) if self.robust else keys.stay_inside(part, where)
            except KeyEscapeError as error:
                raise SubpathError(
                    f"The subpath {'/'.join(parts)!r} leads outside the save.", save=self.save
                ) from error
            inner = os.path.join(path, "_tensordict")
            if (
                part != "_tensordict"
                and not store.exists(os.path.join(path, name))
                and store.exists(os.path.join(inner, "meta.json"))
                and store.exists(where.file)
                and classes.is_tensorclass_name(self._meta(where).get("_type"))
            ):
                path = inner  # a tensorclass keeps its tensors there: resolve the key as its own get() does
            candidate = os.path.join(path, name)
            legacy = keys.legacy_name(part, child=True) if self.robust else None
            if (
                legacy is not None
                and not store.exists(os.path.join(candidate, "meta.json"))
                and store.exists(os.path.join(path, legacy, "meta.json"))
            ):
                candidate = os.path.join(path, legacy)
            path = candidate
        if not store.exists(os.path.join(path, "meta.json")):
            raise SubpathError(
                f"There is no saved level under the subpath {'/'.join(parts)!r}.",
                save=self.save,
                file=os.path.join(path, "meta.json"),
            )
        return path


def _host_tensor(array: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
    """A real CPU tensor, also while a FakeTensorMode is active."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return torch.from_numpy(array)
