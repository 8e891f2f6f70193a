"""Why a result was found in the cache, or was not: which part of its fingerprint is another one.

A fingerprint keeps the parts that it is made of. Of a result that is not there, they are compared with those of the
closest one that is: the one of the same transform with which it has most parts in common.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tdgpu.cache import budget, place, switch
from tdgpu.cache.directory import Entry, look
from tdgpu.cache.fingerprint import Fingerprint, changed
from tdgpu.cache.record import Record

__all__ = ["Explanation", "explain"]

_DIGEST = re.compile(r"[0-9a-f]{16}")
_KINDS = frozenset({"argument", "closure", "global", "default", "import", "leaf"})
_SHOWN = 12


@dataclass(frozen=True)
class Explanation:
    """Why a lookup finds a result, or finds none.

    Attributes:
        digest: the name of the result.
        is_hit: whether it is in the cache.
        reason: why, in words. Of one that is there: why it was built.
        closest: the name of the result that it was compared with; None if there was none.
        changes: what is another one, the parts of the fingerprint, in words.
    """

    digest: str
    is_hit: bool
    reason: str
    closest: str | None = None
    changes: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = len(self.changes) - _SHOWN
        lines = [f"{self.digest}: {'hit' if self.is_hit else 'miss'}; {self.reason}", *self.changes[:_SHOWN]]
        return "\n    ".join([*lines, f"and {more} more"] if more > 0 else lines)

    def as_dict(self) -> dict[str, Any]:
        """The same, as JSON can hold it."""
        return asdict(self)


def explain(fingerprint: Fingerprint | str) -> Explanation:
    """Why a result is found in the cache, or is not. Nothing is built.

    Args:
        fingerprint: the fingerprint, of which the parts tell what has changed; or the name of a result alone: why it
            was built, if it is there.

    >>> import tempfile
    >>> from tdgpu.cache.directory import obtain
    >>> from tdgpu.cache.fingerprint import combine
    >>> from tdgpu.options import options
    >>> with tempfile.TemporaryDirectory() as directory, options(cache=directory):
    ...     for threshold in (10, 20):
    ...         wanted = combine("d19493523d95e2dc", "filter", {"threshold": threshold})
    ...         if threshold == 10:
    ...             entry = obtain(wanted, lambda path: path.mkdir())
    ...     print(explain(wanted).reason, explain(wanted).changes)
    ...     del entry
    compared with the closest result, other are: ('argument `threshold`: 20 instead of 10',)
    """
    if isinstance(fingerprint, str):
        fingerprint = Fingerprint(fingerprint)
    digest, root = fingerprint.digest, place.directory()
    if fingerprint.unhashable is not None:
        return Explanation(digest, False, f"built anew each time, because {fingerprint.unhashable}")
    if not switch.is_caching_enabled():
        return Explanation(digest, False, "built anew each time, because caching is disabled")
    records = [one.record for one in budget.stored(root) if isinstance(one.record, Record)]
    found = look(root, digest)
    if isinstance(found, Entry):
        return _of_record(next((one for one in records if one.digest == digest), None), records, digest)
    if isinstance(found, str):
        return Explanation(digest, False, f"there is a result of that name, but {found}")
    return _compared(digest, False, fingerprint, records)


def _of_record(known: Record | None, records: list[Record], digest: str) -> Explanation:
    if known is None:  # it came in between
        return Explanation(digest, True, "it has just been built")
    age = f"built {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(known.built))}"
    if known.reason is not None:
        return Explanation(digest, True, f"{age}, because of what was there before: {known.reason}")
    earlier = [one for one in records if one.built < known.built]
    why = _compared(digest, True, known.fingerprint, earlier)
    return replace(why, reason=f"{age}; {why.reason}")


def _compared(digest: str, is_hit: bool, wanted: Fingerprint, records: Iterable[Record]) -> Explanation:
    transform = wanted.parts.get("transform")
    if transform is None:
        return Explanation(digest, is_hit, "there is none of that name")
    others = [one for one in records if one.transform == transform and one.digest != digest]
    if not others:
        before = " before it" if is_hit else ""
        return Explanation(digest, is_hit, f"there is no other result of {transform}{before}")
    closest = max(others, key=lambda one: (_common(one.fingerprint, wanted), one.built))
    changes = _changes(closest.fingerprint, wanted)
    reason = "compared with the closest result, other are:"
    if not changes:
        reason = "the closest result differs in what is not kept of a fingerprint: it has very many parts"
    return Explanation(digest, is_hit, reason, closest.digest, changes)


def _common(one: Fingerprint, other: Fingerprint) -> int:
    return len(one.parts.items() & other.parts.items())


def _changes(before: Fingerprint, after: Fingerprint) -> tuple[str, ...]:
    # What comes of another origin is said of the source, too.
    names = [name for name in changed(before, after) if name != "origin"]
    found = (_worded(name, before.parts.get(name), after.parts.get(name)) for name in names)
    return tuple(dict.fromkeys(found))


# --- words ------------------------------------------------------------------------------------------------------------


def _worded(part: str, before: str | None, after: str | None) -> str:
    """A part that has changed, in words.

    >>> _worded("argument function: closure scale", "0" * 16, "1" * 16)
    'closure `scale`'
    >>> _worded("argument batch_size", "10", "20")
    'argument `batch_size`: 20 instead of 10'
    """
    text = _name(part)
    if before is None or after is None:
        return f"{text}: {'new' if before is None else 'not there any more'}"
    is_told = _DIGEST.fullmatch(before) is None and _DIGEST.fullmatch(after) is None
    return f"{text}: {after} instead of {before}" if is_told else text


def _name(part: str) -> str:
    """The name of a part, as a user would say it.

    >>> _name("argument function: global helper: code"), _name("source: leaf a"), _name("source")
    ('code of global `helper`', 'source: content of leaf `a`', 'source: its content')
    """
    if part == "source":
        return "source: its content"
    first, _, rest = part.partition(": ")
    if first == "source":
        return f"source: {_name(rest)}"
    *owners, last = part.split(": ")
    kind, _, name = last.partition(" ")
    if kind == "leaf":
        return f"content of leaf `{name}`"
    text = f"{kind} `{name}`" if kind in _KINDS and name else last
    # Which function of the user's is meant goes without saying, if it is but one; its code has no name by itself.
    return f"{text} of {_name(owners[-1])}" if owners and (len(owners) > 1 or last == "code") else text
