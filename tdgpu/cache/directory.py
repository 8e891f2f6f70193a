"""The cache directory: results that are built once, found again, and not removed while somebody uses them.

What counts as a result appears by one renaming, when all of it is on the disk; before that it lies in a directory that
nobody reads, and after a kill that is removed by whoever builds next. One process builds, whoever else wants the same
waits. (:mod:`tdgpu.cache.record` says what is in a result's directory, :mod:`tdgpu.cache.locks` who holds what.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tdgpu.cache import budget, place, record, switch
from tdgpu.cache.fingerprint import Fingerprint
from tdgpu.cache.locks import Exclusive, Hold
from tdgpu.errors import CacheError, InvalidArgument, TdgpuError
from tdgpu.layout.commit import sync_directory
from tdgpu.options import get as get_options
from tdgpu.signals import uninterrupted

__all__ = ["Entry", "find", "look", "naming", "obtain"]

Build = Callable[[Path], None]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_READ_ONLY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})

_building: dict[str, int] = {}  # the locks that threads of this process build under


class Entry:
    """A result. It is not removed from the cache while this object, or a copy of it in any process, lives.

    Attributes:
        digest: its name.
        path: the save, which is complete and never changed.
    """

    __slots__ = ("__weakref__", "_hold", "digest", "path")

    def __init__(self, digest: str, hold: Hold, path: Path) -> None:
        self.digest = digest
        self.path = path
        self._hold = hold

    def __repr__(self) -> str:
        return f"Entry({self.digest!r}, {str(self.path)!r})"

    def __reduce__(self) -> tuple[Callable[..., Entry], tuple[str, str, str]]:
        return _entry, (self.digest, self._hold.directory, str(self.path))


def _entry(digest: str, directory: str, path: str) -> Entry:
    hold = Hold.take(directory)
    if hold is None:
        raise CacheError(
            f"The result {digest} has been removed while it was on its way to this process: keep the dataset in the"
            " process that sends it until it has arrived.",
            save=path,
        )
    return Entry(digest, hold, Path(path))


def obtain(fingerprint: Fingerprint, build: Build, *, rebuild: bool = False) -> Entry:
    """The result of a name: found, or built.

    Args:
        fingerprint: what it depends on, and its name.
        build: called with the path of a directory that does not exist yet, and makes a save of it. One process at a
            time builds a result, others wait for it; if it fails or dies, the next one builds.
        rebuild: not to look for it, but to build it and have it replace what there is.

    Returns:
        The result. With caching disabled, or if something that it depends on could not be hashed, it is built in any
        case, into the process's temporary directory.

    Raises:
        CacheError: the cache directory cannot be written to, or the disk is full (an OSError); nothing is kept.
        Exception: whatever ``build`` raises; nothing is kept.

    Warns:
        CacheWarning: it takes long until another process has built it, or the file system has no locks.
    """
    digest = _checked(fingerprint.digest)
    if fingerprint.unhashable is not None or not switch.is_caching_enabled():
        return _build_temporary(digest, build)
    root = place.directory()
    found = None if rebuild else look(root, digest)
    if isinstance(found, Entry):
        return found
    path = root / budget.LOCKS / f"{digest}.lock"
    if _building.get(str(path)) == threading.get_ident():
        raise CacheError(f"The result {digest} is needed to build itself.", save=root / budget.ENTRIES / digest)
    with naming(root, digest):
        for name in (budget.LOCKS, budget.ENTRIES, budget.BUILDING):
            (root / name).mkdir(parents=True, exist_ok=True)
        lock = Exclusive(path)

    def end() -> None:
        if _building.get(str(path)) == threading.get_ident():
            del _building[str(path)]
        lock.release()

    try:
        try:
            with naming(root, digest):
                lock.wait(f"builds the result {digest} of the cache")
            found = None if rebuild else look(root, digest)
            if isinstance(found, Entry):
                return found
            _building[str(path)] = threading.get_ident()
            entry = _build(root, fingerprint, build, "it was asked for anew" if rebuild else found)
        finally:
            end()
    finally:
        # Again, for an interrupt may have come just before the first: a lock that a traceback keeps has others wait.
        end()
    limit = get_options().cache_max_bytes
    if limit is not None:
        with naming(root, digest):
            budget.keep_within(root, limit)  # not this one: it is in use
    return entry


def find(digest: str) -> Entry | None:
    """The result of a name, if it is in the cache and as it was built. Nothing is built.

    Raises:
        InvalidArgument: there can be none of that name.
    """
    found = look(place.directory(), _checked(digest))
    return found if isinstance(found, Entry) else None


def look(root: Path, digest: str) -> Entry | str | None:
    """As :func:`find`, in a cache directory; a text says why what is there is not used."""
    reason = None
    with naming(root, digest):
        for directory in budget.results(root, digest):
            hold = Hold.take(directory)
            if hold is None:
                continue  # it is being removed
            known = record.read(directory)
            if known is None:
                continue  # another one has replaced it, for all who come from now on
            if isinstance(known, str):
                reason = known
            elif known.digest != digest:
                reason = f"its {record.ENTRY} is that of another result"
            else:
                reason = record.changed_file(directory)
                if reason is None:
                    hold.touch()
                    return Entry(digest, hold, directory / record.SAVE)
    return reason


def _checked(digest: str) -> str:
    if not budget.is_name(digest):
        raise InvalidArgument(
            f"{digest!r} cannot be the name of a result: it has 1 to 64 letters, digits, - and _, the first no -."
        )
    return digest


# --- building ---------------------------------------------------------------------------------------------------------


def _build(root: Path, fingerprint: Fingerprint, build: Build, reason: str | None) -> Entry:
    digest = fingerprint.digest
    budget.sweep(budget.leftovers(root))
    target = root / budget.ENTRIES / digest / secrets.token_hex(8)
    with naming(root, digest):
        while True:
            directory = budget.staged(root, digest)
            directory.mkdir()
            hold = Hold.begin(directory)
            if hold is not None:  # else somebody who sweeps has taken the new directory for one that is left
                break
    with _kept_only_if_complete(directory):
        _call(build, directory / record.SAVE, target / record.SAVE)
        with naming(root, digest):
            record.write(directory, fingerprint, reason)
            uninterrupted(lambda: _publish(root, directory, target, hold))
    return Entry(digest, hold, target / record.SAVE)


def _publish(root: Path, directory: Path, target: Path, hold: Hold) -> None:
    budget.retire(root, target.parent.name)
    while True:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(directory, target)
            break
        except FileNotFoundError:
            # Whoever has removed the last result of that name has removed the directory above, too.
            if not directory.exists():
                raise
    hold.directory = str(target)
    hold.touch()
    for changed in (target.parent, root / budget.ENTRIES, root / budget.BUILDING):
        sync_directory(str(changed))


def _build_temporary(digest: str, build: Build) -> Entry:
    hold = switch.temporary_directory()
    directory = Path(hold.directory, f"{digest}.{secrets.token_hex(4)}")
    path = directory / record.SAVE
    try:
        directory.mkdir()
    except OSError as error:
        raise CacheError(f"No temporary result can be made: {error.strerror}.", save=path) from error
    with _kept_only_if_complete(directory):
        _call(build, path, path)
    return Entry(digest, hold, path)


@contextlib.contextmanager
def _kept_only_if_complete(directory: Path) -> Iterator[None]:
    is_complete, owner = False, os.getpid()

    def discard() -> None:
        if not is_complete and owner == os.getpid():  # not if a child that the builder has forked comes by
            uninterrupted(lambda: budget.clear(directory), always=True)

    try:
        try:
            yield
            is_complete = True
        finally:
            discard()
    finally:
        discard()  # again, for an interrupt may have come just before the first


def _call(build: Build, path: Path, target: Path) -> None:
    try:
        build(path)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise CacheError(
            f"The disk is full ({error.strerror or error}): the result could not be made, and nothing of it is kept."
            " Remove what is not needed any more (tdgpu cache gc), or have TDGPU_CACHE name another directory.",
            save=target,
        ) from error
    if not path.is_dir():
        raise CacheError("Whoever builds the result has made no save.", save=target)


@contextlib.contextmanager
def naming(root: Path, digest: str | None = None) -> Iterator[None]:
    """Has errors of the system say which cache directory, and which result, they are about."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TdgpuError):
            raise
        what = f"The cache directory {root} cannot be used: {error.strerror or error}."
        if error.errno in _READ_ONLY:
            what += (
                " Have TDGPU_CACHE name a directory that can be written to, or call tdgpu.disable_caching(): then"
                " results are temporary."
            )
        elif error.errno in _FULL:
            what += " Nothing of the result is kept. Remove what is not needed any more (tdgpu cache gc)."
        save = None if digest is None else root / budget.ENTRIES / digest
        raise CacheError(what, save=save, file=error.filename) from error
