"""Where a dataset comes from: its fingerprint, and the results of transforms as datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tdgpu.cache import budget, directory, parts, place, record
from tdgpu.cache.fingerprint import Fingerprint, combine
from tdgpu.cache.record import Record
from tdgpu.data.dataset import MemmapDataset
from tdgpu.data.transforms import Made
from tdgpu.errors import InvalidArgument, InvalidArgumentType, TransformError

__all__ = ["Plan", "clean_up", "digest", "look", "plan"]

#: The part of a fingerprint that all have in common that come from one save.
ORIGIN = "origin"


class Look(NamedTuple):
    """A dataset as it is now.

    Attributes:
        digest: its fingerprint.
        origin: the fingerprint of the save that it comes from, in however many steps.
        source: the fingerprint of what it is a view of, with a part for each leaf and each step since.
    """

    digest: str
    origin: str
    source: Fingerprint

    @property
    def unhashable(self) -> str | None:
        """What of it cannot be hashed, in words; the digest is random then. None: all can be."""
        return self.source.unhashable


def look(dataset: Any) -> Look:
    """The fingerprint of a dataset: of what it is a view of, and of every transform since.

    Warns:
        FingerprintWarning: something in it cannot be hashed.
    """
    source = _whole(dataset)
    origin = source.digest if dataset._made is None else dataset._made.origin
    found = source.digest
    steps = {}
    for number, (transform, arguments) in enumerate(dataset._steps, 1):
        found = combine(found, transform, arguments).digest
        # By itself: a change before it is named there.
        steps[f"step {number}, {transform}"] = combine("", transform, arguments).digest
    return Look(found, origin, replace(source, parts={**source.parts, **steps}))


def digest(dataset: Any) -> str:
    """The fingerprint of a dataset, as :func:`look` has it."""
    return look(dataset).digest


def _whole(dataset: MemmapDataset) -> Fingerprint:
    """The fingerprint of what a dataset is a view of."""
    made = dataset._made
    if made is not None and _is_as_built(made):
        return Fingerprint(made.digest)
    # A save of the user's, or a result that was replaced or written to since: it is what its bytes are.
    return parts.of_dataset(dataset._whole())


def _is_as_built(made: Made) -> bool:
    """Whether what has the name of a result is still this one. (One that is not kept has no record, and no name.)"""
    place = made.entry.path.parent
    known = record.read(place)
    return isinstance(known, Record) and known.digest == made.digest and record.changed_file(place) is None


# --- what a transform makes of it -------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """A transform that is to be found, or done.

    Attributes:
        dataset: of what.
        before: the dataset as it was before any function was called.
        fingerprint: of the result.
    """

    dataset: Any
    before: Look
    fingerprint: Fingerprint

    def obtain(self, build: Callable[[Path], None], *, load_from_cache: bool = True) -> directory.Entry:
        """The entry of the result: found, or built.

        Args:
            build: makes the save.
            load_from_cache: whether one that is there is taken.

        Raises:
            TransformError: the rows were changed while they were read: the result belongs to no fingerprint.
            InvalidArgument: a given fingerprint is that of another transform's result.
        """

        def checked(path: Path) -> None:
            build(path)
            check_unchanged(self.dataset, self.before)

        entry = directory.obtain(self.fingerprint, checked, rebuild=not load_from_cache)
        known = record.read(entry.path.parent)
        wanted = self.fingerprint.parts["transform"]
        if isinstance(known, Record) and known.transform != wanted:
            raise InvalidArgument(
                f"new_fingerprint={self.fingerprint.digest!r} is that of a result of {known.transform}, not {wanted}.",
                save=entry.path,
            )
        return entry

    def dataset_of(self, entry: directory.Entry) -> MemmapDataset:
        """The result as a dataset, which keeps its entry in use."""
        result = MemmapDataset(entry.path, allow_pickle=self.dataset._arguments["allow_pickle"])
        result._made = Made(entry, self.fingerprint.digest, self.before.origin)
        return result


def plan(dataset: Any, transform: str, arguments: Mapping[str, Any], new_fingerprint: str | None = None) -> Plan:
    """What a transform of a dataset is called.

    Args:
        dataset: the dataset.
        transform: the transform's name.
        arguments: what its result depends on.
        new_fingerprint: what it is called instead; None: what follows from the others.

    Raises:
        InvalidArgumentType: ``new_fingerprint`` is no string.
    """
    before = look(dataset)
    if new_fingerprint is None:
        found = combine(before.digest, transform, arguments)
        found = parts.with_source(found, before.source)
        found = replace(found, unhashable=found.unhashable or before.unhashable)
    elif isinstance(new_fingerprint, str):
        found = Fingerprint(new_fingerprint, {"transform": transform, "new_fingerprint": new_fingerprint})
    else:
        raise InvalidArgumentType(f"new_fingerprint must be a string or None, got {new_fingerprint!r}.")
    return Plan(dataset, before, replace(found, parts={**found.parts, ORIGIN: before.origin}))


def check_unchanged(dataset: Any, before: Look) -> None:
    """Raises TransformError if a dataset is no longer what it was; what cannot be hashed could be anything."""
    if before.unhashable is None and digest(dataset) != before.digest:
        raise TransformError("The rows were changed while a transform read them.", save=dataset.prefix)


def clean_up(dataset: Any) -> int:
    """Removes what comes from the same save and is not in use; returns how many results that were."""
    origin, root = look(dataset).origin, place.directory()
    found = [one for one in budget.stored(root) if isinstance(one.record, Record)]
    comes_from_it = [one for one in found if one.record.fingerprint.parts.get(ORIGIN) == origin]  # type: ignore[union-attr]
    return sum(budget.remove(root, one.directory) for one in comes_from_it)
