"""Keys as file names.

tensordict writes the leaf ``k`` to ``<encode(k)>.memmap`` and the child ``k`` to the directory ``<encode(k)>``. Older
saves, and those written with ``robust_key=False``, use the key as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tdgpu.errors import KeyEscapeError, SubpathError
from tdgpu.layout.files import Where
from tdgpu.layout.tree import Key

__all__ = ["all_plain", "encode", "legacy_name", "parts_of", "stay_inside"]

_UNSAFE = re.compile(r'[\x00-\x20/<>:"|?*\\%\x7f]')
_DRIVE = re.compile(r"[^\W\d_]:")


def encode(key: str) -> str:
    """The file name of ``key``: unsafe characters as ``%XX``; ``""`` as ``%``; ``.`` and ``..`` as ``%2E`` each.

    >>> encode("obs"), encode("a/b"), encode(""), encode("..")
    ('obs', 'a%2Fb', '%', '%2E%2E')
    """
    if _UNSAFE.search(key) is None:
        if key not in ("", ".", ".."):  # nearly every key
            return key
        return "%2E" * len(key) if key else "%"
    return _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", key)


def all_plain(all_keys: Iterable[str]) -> bool:
    """Whether every one of many keys is its own file name: one search instead of many."""
    return _UNSAFE.search("".join(all_keys)) is None and not {"", ".", ".."}.intersection(all_keys)


def legacy_name(key: str, *, child: bool) -> str | None:
    """The raw file name that an older writer may have used for ``key``, if it is safe to look there; else None."""
    if "/" in key or "\\" in key or _DRIVE.match(key) or (child and key in ("", ".", "..")):
        return None
    return key


def stay_inside(name: str, where: Where) -> str:
    """``name``, a raw key (or its file name) used as a path below its level, if it stays below that level.

    Args:
        name: the path, relative to the level.
        where: the level, for the error.

    Raises:
        KeyEscapeError: it is absolute, goes up, or names the level itself.
    """
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or not any(part not in ("", ".") for part in parts):
        raise where.error(
            KeyEscapeError, f"Used as a path (robust_key=False), the key {name!r} does not stay below its level."
        )
    return name


def parts_of(subpath: object) -> Key:
    """The keys of a ``subpath``: ``"a/b"``, ``("a", "b")`` and ``(("a",), "b")`` are the same, ``""`` is the root.

    Raises:
        SubpathError: it is neither a string nor a (nested) tuple of strings, or it is empty.
    """
    if isinstance(subpath, str):
        return tuple(part for part in subpath.split("/") if part)
    parts: list[str] = []

    def unravel(key: object) -> bool:
        if isinstance(key, str):
            parts.append(key)
            return True
        return isinstance(key, tuple) and bool(key) and all(unravel(part) for part in key)

    if not unravel(subpath) or not parts:
        raise SubpathError(f"subpath must be a string path or a (nested) tuple of strings, got {subpath!r}.")
    return tuple(parts)
