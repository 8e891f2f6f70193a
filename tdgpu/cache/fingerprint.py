"""Fingerprints: what a computed result depends on, as 16 hexadecimal digits, and as the named parts of them.

>>> halved = combine("d19493523d95e2dc", "map", {"function": lambda row: row / 2, "batched": False})
>>> same = combine("d19493523d95e2dc", "map", {"batched": False, "function": lambda row: row / 2})
>>> other = combine("d19493523d95e2dc", "map", {"function": lambda row: row / 3, "batched": False})
>>> halved == same, changed(halved, other)
(True, ['argument function: code'])
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from tdgpu.cache.encode import digest, scalar
from tdgpu.cache.graph import Unhashable, Walk
from tdgpu.cache.hasher import Hasher, explained, random_digest, short, warn
from tdgpu.cache.values import walk

__all__ = ["Fingerprint", "changed", "combine", "fingerprint"]

#: Goes into every fingerprint: another one where the same parts no longer give the same result.
FORMAT = 1
#: How many parts are kept, and how deep they lie in an argument.
MAX_PARTS = 1000
MAX_DEPTH = 8


@dataclass(frozen=True)
class Fingerprint:
    """What a result depends on.

    Attributes:
        digest: 16 hexadecimal digits, which name the result.
        parts: what they are made of: a name, and a digest or, of numbers, the value. The name of a part of a part
            begins with that of the whole: ``argument function: closure model.lock``.
        unhashable: what could not be hashed, in words: the digest is random then. None: everything could be.
    """

    digest: str
    parts: dict[str, str] = field(default_factory=dict, compare=False)
    unhashable: str | None = None

    def __str__(self) -> str:
        return self.digest

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold, of which :meth:`from_dict` makes the fingerprint again."""
        return {"digest": self.digest, "parts": dict(self.parts), "unhashable": self.unhashable}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Fingerprint:
        """The fingerprint of which :meth:`as_dict` made ``stored``."""
        return cls(stored["digest"], dict(stored["parts"]), stored["unhashable"])


def fingerprint(obj: Any) -> str:
    """The fingerprint of an object: 16 hexadecimal digits, the same in every process and on every machine.

    Args:
        obj: a :class:`tdgpu.MemmapDataset`: its initial fingerprint, of what its rows are and not of where they lie. A
            directory and an archive of the same content have the same one. Anything else: ``Hasher.hash(obj)``.

    Raises:
        LoadError: a leaf of the dataset cannot be read, or another file has taken its place (an OSError).
        ChecksumError: a compressed leaf is damaged.

    Warns:
        FingerprintWarning: something in it cannot be hashed: it is named, and the fingerprint is random.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict
    >>> from tdgpu import MemmapDataset
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = TensorDict(a=torch.arange(3), batch_size=[3]).memmap(path + "/directory")
    ...     _ = TensorDict(a=torch.arange(3), batch_size=[3]).save(path + "/archive.tdz")
    ...     print(fingerprint(MemmapDataset(path + "/directory")) == fingerprint(MemmapDataset(path + "/archive.tdz")))
    True
    """
    return Hasher.hash(obj)


def combine(previous: str, transform: str, arguments: Mapping[str, object]) -> Fingerprint:
    """The fingerprint of what a transform makes of a dataset.

    Args:
        previous: the fingerprint of the dataset.
        transform: the transform's name.
        arguments: every argument that its result depends on, by name; their order does not count. The order of a dict
            among them does, since a function may go through it.

    Returns:
        The fingerprint. If something in an argument cannot be hashed, its digest is random.

    Warns:
        FingerprintWarning: once, with all that cannot be hashed.

    The versions of torch and of tensordict, torch's default dtype and device, and autocast count too: a function finds
    them in its rows, and in the tensors that it makes, without naming them.
    """
    parts = {"source": previous, "transform": transform, **_surroundings()}
    digests = [str(FORMAT).encode(), *(text.encode() for item in parts.items() for text in item)]
    one = walk()
    roots: list[tuple[str, Any]] = []
    problems: list[str] = []
    for name in sorted(arguments):
        part = f"argument {name}"
        try:
            found = one.digest(arguments[name], ordered=True)
        except Unhashable as error:
            problems.append(explained(error, name))
            parts[part] = "cannot be hashed"
            continue
        parts[part] = _shown(arguments[name], found)
        digests += [part.encode(), found]
        roots.append((part, arguments[name]))
    parts.update(itertools.islice(_parts(one, roots), MAX_PARTS))
    if problems:
        unhashable = "; ".join(problems)
        warn(unhashable)
        return Fingerprint(random_digest(), parts, unhashable)
    return Fingerprint(short(digest(*digests)), parts)


def _surroundings() -> dict[str, str]:
    return {
        "torch": torch.__version__.partition("+")[0],  # what follows is the build: for a CPU, for a version of CUDA
        "tensordict": version("tensordict"),
        "torch's default dtype": str(torch.get_default_dtype()),
        "torch's default device": str(torch.get_default_device()),
        "autocast": ", ".join(_autocast()),
    }


def _autocast() -> Iterator[str]:
    """The types of device that autocast is on for, with the dtype: operations compute in another one then."""
    accelerator = torch.accelerator.current_accelerator()
    for kind in ("cpu", *(() if accelerator is None else (accelerator.type,))):
        try:
            if torch.is_autocast_enabled(kind):
                yield f"{kind} {torch.get_autocast_dtype(kind)}"
        except RuntimeError:  # a device that has none
            continue


def _parts(one: Walk, roots: list[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """The parts of what has been hashed, the nearest first, each once."""
    waiting = collections.deque((name, value, 0) for name, value in roots)
    met = {id(value) for _, value in roots}
    while waiting:
        name, value, depth = waiting.popleft()
        for ref, found in one.parts(value, ordered=True):
            continues = not ref.edge or ref.edge[0] in ".["
            below = name + ref.edge if continues else f"{name}: {ref.edge}"
            if ref.edge:
                yield below, _shown(ref.value, found)
            if depth < MAX_DEPTH and scalar(ref.value) is None and id(ref.value) not in met:
                met.add(id(ref.value))
                waiting.append((below, ref.value, depth + 1))


def _shown(value: Any, found: bytes) -> str:
    """A part's value, if it is a number; else its digest. (No texts: they are stored, and can be secrets.)"""
    return repr(value) if type(value) in (bool, int, float, type(None)) and len(repr(value)) < 40 else short(found)


def changed(before: Fingerprint, after: Fingerprint) -> list[str]:
    """The names of the parts that differ between two fingerprints, and of those that only one of them has.

    Of a part and what it is made of, only the innermost are named: a change inside shows in all around it.
    """
    names = [*before.parts, *(name for name in after.parts if name not in before.parts)]
    differing = [name for name in names if before.parts.get(name) != after.parts.get(name)]
    return [name for name in differing if not any(_is_inside(other, name) for other in differing)]


def _is_inside(inner: str, outer: str) -> bool:
    return len(inner) > len(outer) and inner.startswith(outer) and inner[len(outer)] in ":.["
