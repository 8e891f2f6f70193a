"""The saves that were appended to last: the next append need not find out again what grows in them.

Looking into a save takes most of the time of an append to many small leaves. What was found is used again only if the
metadata of every level is, byte for byte, that which the last append wrote: so nothing depends on who else has changed
the save since, or on clocks.
"""

from __future__ import annotations

import copy
import os

from tdgpu.layout.commit import TEMPORARY
from tdgpu.layout.growth import Growing

__all__ = ["keep", "take"]

# Leaves and levels of all saves that are remembered, about half a kilobyte each.
MOST = 10_000

# By prefix, those that were kept first in front. Each step on it is one of the interpreter's: an append may end in a
# finalizer, where no lock can be had.
_kept: dict[str, Growing] = {}


def keep(growing: Growing) -> None:
    """Remembers a save. Its writer still holds the lock, or nobody has written since.

    Args:
        growing: what grows in it, as last committed.
    """
    if not growing.is_plain or growing.is_unfinished:
        return
    _kept[growing.prefix] = copy.copy(growing)  # the writer goes on counting in its own
    kept = list(_kept.values())
    sizes = [len(each.leaves) + len(each.levels) for each in kept]
    while sum(sizes) > MOST:
        _kept.pop(kept.pop(0).prefix, None)
        sizes.pop(0)


def take(prefix: str) -> Growing | None:
    """What is remembered of a save, if it is as it was; it is then forgotten. The lock is held.

    None also where an append has left something to recover, or a symbolic link has taken a directory's place.
    """
    growing = _kept.pop(prefix, None)
    return growing if growing is not None and _is_as_it_was(growing) else None


def _is_as_it_was(growing: Growing) -> bool:
    try:
        for level in growing.levels:
            directory = level.directory
            if directory != growing.prefix and os.path.islink(directory):
                return False
            if os.path.lexists(f"{directory}/{TEMPORARY}"):
                return False
            metadata = level.metadata(growing.rows)
            if _contents(f"{directory}/meta.json", len(metadata) + 1) != metadata:
                return False
    except OSError:
        return False
    return True


def _contents(file: str, most: int) -> bytes:
    # Neither through a link nor waiting for a pipe.
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:
        return stream.read(most)
