"""Digests of any objects: :class:`Hasher`, and what is done about those that have none."""

from __future__ import annotations

import os
import types
import warnings
from typing import Any

import xxhash

from tdgpu.cache.graph import Unhashable
from tdgpu.cache.values import walk
from tdgpu.errors import user_level

__all__ = ["FingerprintWarning", "Hasher", "explained", "random_digest", "short"]

#: The edges that begin a path, as a user reads it.
_BEGINNINGS = ("closure ", "global ", "default ", "import ")


class FingerprintWarning(UserWarning):
    """Something cannot be hashed, so what depends on it is never found in the cache."""


class Hasher:
    """Digests of Python objects, by value: 16 hexadecimal digits that are the same in every process.

    What counts, and what does not, is on the page about the cache. A dict is what it is equal to, whatever its order,
    unless a function, an object or a module has it: that could go through it in its order.

    >>> Hasher.hash({"a": 1, "b": 2}) == Hasher.hash({"b": 2, "a": 1}), Hasher.hash([1]) == Hasher.hash([1.0])
    (True, False)
    >>> hasher = Hasher()
    >>> hasher.update([1, 2])
    >>> hasher.update("three")
    >>> len(hasher.hexdigest())
    16
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    @classmethod
    def hash(cls, value: Any) -> str:
        """The digest of a value: a random one, with one warning, if something in it cannot be hashed.

        Warns:
            FingerprintWarning: it names the object and how it is reached.
        """
        try:
            return short(walk().digest(value, ordered=False))
        except Unhashable as error:
            warn(explained(error, "value"))
            return random_digest()

    def update(self, value: Any) -> None:
        """Adds a value to what has been added before."""
        self._state.update(self.hash(value).encode())

    def hexdigest(self) -> str:
        """The digest of the values that were added, in their order."""
        return self._state.hexdigest()


def short(digest: bytes) -> str:
    """A digest as 16 hexadecimal digits."""
    return digest[:8].hex()


def random_digest() -> str:
    """16 hexadecimal digits that nobody else has. No generator of random numbers moves on for it."""
    return os.urandom(8).hex()


def warn(what: str) -> None:
    """Warns that what depends on something has a random fingerprint."""
    warnings.warn(
        f"{what}. Its fingerprint is random, so what is computed with it will not be found in the cache again.",
        FingerprintWarning,
        stacklevel=user_level(),
    )


def explained(error: Unhashable, root: str) -> str:
    """What cannot be hashed and why, as in "closure `self.lock` of <function f at data.py:12> cannot be hashed: ...".

    Args:
        error: the error.
        root: what the hashed value is called, where no function is on the way.
    """
    begin = max((i for i, step in enumerate(error.path) if step.edge.startswith(_BEGINNINGS)), default=None)
    if begin is None:
        expression, owner = root + "".join(step.edge for step in error.path), error.value
        return f"`{expression}`, {_name(owner)}, cannot be hashed: {error.reason}"
    kind, _, name = error.path[begin].edge.partition(" ")
    expression = name + "".join(step.edge for step in error.path[begin + 1 :])
    owner = error.path[begin].owner
    return f"{kind} `{expression}` of {_name(owner)} cannot be hashed: {error.reason}"


def _name(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        code = value.__code__
        return f"<function {value.__name__} at {os.path.basename(code.co_filename)}:{code.co_firstlineno}>"
    if isinstance(value, type):
        return f"<class {value.__name__}>"
    return f"<a {type(value).__name__}>"
