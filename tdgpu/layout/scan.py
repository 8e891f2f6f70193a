"""JSON with one object for entries that say the same.

A level has one entry per leaf, and in a large save most of them are equal but for the key: parsing ten thousand of them
makes fifty thousand objects. ``loads`` gives what ``json.loads`` gives, but parses equal entries once and shares the
result, which later makes them recognisable by identity.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["loads"]

# How tensordict ends the entry of a leaf. Inside a string the quotes would have backslashes, so this is no part of one.
_END = '"is_nested": false}, '
_NOT_PLAIN = re.compile(r'[\x00-\x1f"\\]')


def loads(data: bytes) -> Any:
    """What ``json.loads(data)`` gives, with equal leaf entries at the front as one object. Do not change those.

    Raises:
        ValueError, RecursionError: as ``json.loads``.

    >>> entry = '{"device": "cpu", "shape": [2, 3], "dtype": "torch.int8", "is_nested": false}'
    >>> meta = loads(('{"a": %s, "b": %s, "shape": []}' % (entry, entry)).encode())
    >>> meta["a"] is meta["b"], meta == json.loads('{"a": %s, "b": %s, "shape": []}' % (entry, entry))
    (True, True)
    """
    shared = _shared(data)
    return json.loads(data) if shared is None else shared


def _shared(data: bytes) -> dict[str, Any] | None:
    """The object, if it begins with leaf entries that stand one after the other; else None.

    Between two ends there must be ``"key": {`` and the rest of one entry. If the key has no quote, backslash or control
    character, and the rest makes a complete object with the end, then the text can be read in this way only.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    *parts, rest = text[1:].split(_END)
    if text[:1] != "{" or any(part[:1] != '"' for part in (*parts, rest)):
        return None
    entries: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    try:
        for part in parts:
            key, _, body = part.partition('": {')
            if not key:  # the one quote would both open and close the key
                return None
            entry = entries.get(body)
            if entry is None:
                entry = entries[body] = json.loads("{" + body + _END[:-2])
            meta[key[1:]] = entry
        if _NOT_PLAIN.search("".join(meta)):
            return None
        meta.update(json.loads("{" + rest))
    except (ValueError, RecursionError):
        return None  # of another form, or malformed: then json.loads says where
    return meta
