"""Parts of fingerprints that tell which leaf, or which earlier transform, makes a dataset another one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tdgpu.cache.fingerprint import MAX_PARTS, Fingerprint
from tdgpu.cache.graph import Unhashable
from tdgpu.cache.hasher import explained, random_digest, short, warn
from tdgpu.cache.values import walk
from tdgpu.data.dataset import MemmapDataset

__all__ = ["of_dataset", "with_source"]


def of_dataset(dataset: MemmapDataset) -> Fingerprint:
    """The fingerprint of a dataset's content, with a part for each leaf: ``leaf obs/pixels``.

    Raises:
        LoadError: a leaf cannot be read (an OSError).
        ChecksumError: a compressed leaf is damaged.

    Warns:
        FingerprintWarning: a non-tensor value cannot be hashed: the fingerprint is random.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict
    >>> from tdgpu.cache.fingerprint import fingerprint
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = TensorDict(a=torch.arange(3), n=dict(b=torch.zeros(3)), batch_size=[3]).memmap(path)
    ...     found = of_dataset(MemmapDataset(path))
    ...     print(list(found.parts), found.digest == fingerprint(MemmapDataset(path)))
    ['leaf a', 'leaf n/b'] True
    """
    one = walk()
    try:
        digest = one.digest(dataset, ordered=False)
    except Unhashable as error:
        unhashable = explained(error, "value")
        warn(unhashable)
        return Fingerprint(random_digest(), {}, unhashable)
    # What has been hashed is at hand: nothing is read again.
    content, _ = next(one.parts(dataset, ordered=False))
    return Fingerprint(short(digest), dict(itertools.islice(_leaves(content.value, ()), MAX_PARTS)))


def _leaves(level: tuple[Any, ...], key: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The leaves in what :func:`tdgpu.cache.content.contents` gives of a level."""
    if len(level) < 8:  # one that only the loader of its class can read: files
        *_, files = level
        for name, found in files:
            yield f"leaf {'/'.join((*key, name))}", short(found)
        return
    *_, leaves, _, children = level
    for name, found in zip(leaves[::3], leaves[2::3], strict=True):
        if found is not None:
            yield f"leaf {'/'.join((*key, name))}", short(found)
    for name, child in children:
        yield from _leaves(child, (*key, str(name)))


def with_source(fingerprint: Fingerprint, source: Fingerprint) -> Fingerprint:
    """The fingerprint of what a transform makes of a dataset, with the parts of that of the dataset among its own.

    Args:
        fingerprint: of the result.
        source: of the dataset.

    >>> before = Fingerprint("d19493523d95e2dc", {"leaf a": "81b6f2a0c4d3e95f"})
    >>> with_source(Fingerprint("0a1b2c3d4e5f6071", {"source": before.digest}), before).parts
    {'source': 'd19493523d95e2dc', 'source: leaf a': '81b6f2a0c4d3e95f'}
    """
    more = ((f"source: {name}", value) for name, value in source.parts.items())
    return replace(fingerprint, parts={**fingerprint.parts, **dict(itertools.islice(more, MAX_PARTS))})
