"""What a dataset's rows are, as something to hash: their structure, and the digest of every leaf's bytes.

Where the save lies, whether it is a directory or an archive, and how an archive is compressed makes no difference.
"""

from __future__ import annotations

import os
from typing import Any

from tdgpu.cache.functions import is_users
from tdgpu.cache.leaves import Source, digests
from tdgpu.data.dataset import MemmapDataset
from tdgpu.layout import reader
from tdgpu.layout.save import Save
from tdgpu.layout.store import Store, open_store
from tdgpu.layout.tree import Kind, Leaf, Level

__all__ = ["contents"]

#: What each kind of level has in its ``meta.json`` besides what the tree has of it.
_META = ("stack_dim", "stack_dim_name")


def contents(dataset: MemmapDataset) -> tuple[Any, ...]:
    """The rows of a dataset, as nested tuples of what can be hashed.

    Classes of the user are in it themselves: their methods are what a function may call on a row.

    Raises:
        LoadError: a leaf cannot be read, or another file has taken its place (an OSError).
        ChecksumError: a compressed leaf is damaged.
    """
    save = dataset._see().save
    sources = {
        id(leaf): Source(leaf.extent, leaf.key, leaf.first, leaf.nbytes) for leaf in save.leaves() if leaf.extent
    }
    foreign: dict[str, list[tuple[str, Source]]] = {}
    if save.foreign():
        store = open_store(save.prefix, check=True)
        try:
            foreign = {level.path: _files(store, level, save) for level in save.foreign()}
        finally:
            store.close()
    every = [*sources.values(), *(source for files in foreign.values() for _, source in files)]
    found = dict(zip(map(id, every), digests(save.prefix, every), strict=True))
    of_leaves = {leaf: found[id(source)] for leaf, source in sources.items()}
    of_files = {path: tuple((name, found[id(source)]) for name, source in files) for path, files in foreign.items()}
    return _level(save.root, of_leaves, of_files)


def _level(level: Level, leaves: dict[int, bytes], files: dict[str, tuple[tuple[str, bytes], ...]]) -> tuple[Any, ...]:
    cls = level.cls if is_users(level.cls) else f"{level.cls.__module__}.{level.cls.__qualname__}"
    facts: list[Any] = [level.kind.value, cls, level.batch_size, level.names]
    if level.kind is Kind.FOREIGN:
        return (*facts, files[level.path])
    facts.append([(name, level.meta[name]) for name in _META if name in level.meta and level.kind is Kind.LAZY_STACK])
    # Three plain values per leaf: ten thousand tuples would take longer to hash than to find out that nothing changed.
    facts.append([value for key, leaf in level.leaves.items() for value in _leaf(key, leaf, leaves)])
    values = level.objects
    facts.append(values[level.rows] if level.kind is Kind.NON_TENSOR_STACK and level.rows is not None else values)
    children = level.children.items()
    if level.kind is Kind.LAZY_STACK:  # its members are numbered, and may be some of those that are saved
        children = enumerate(level.children.values())  # type: ignore[assignment]
    facts.append([(key, _level(child, leaves, files)) for key, child in children])
    return tuple(facts)


def _leaf(key: str, leaf: Leaf, leaves: dict[int, bytes]) -> tuple[str, str, bytes | None]:
    return key, f"{leaf.shape} {leaf.dtype}", leaves.get(id(leaf))


def _files(store: Store, level: Level, save: Save) -> list[tuple[str, Source]]:
    """The files of a level that only the loader of its class can read."""
    found: list[tuple[str, Source]] = []
    waiting = [level.path]
    while waiting:
        directory = waiting.pop()
        for name in sorted(store.members(directory)):
            path = os.path.join(directory, name)
            if store.is_dir(path):
                if len(waiting) > reader.MAX_DEPTH:
                    continue
                waiting.append(path)
                continue
            size, inode = store.size_of(path, save.prefix, level.key)
            extent = store.extent(path, size, inode)
            found.append((os.path.relpath(path, level.path), Source(extent, level.key, 0, size)))
    return found
