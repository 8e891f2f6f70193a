"""What lies in the cache: how large it is, when it was used last, and what of it can go.

Removing a result is one renaming, out of the place where results are found, and then as slow as it may be. What a
killed process has left, a result half built or half removed, is known by its lock, which nobody has any more.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tdgpu.cache import record
from tdgpu.cache.locks import USED, Exclusive, while_locked
from tdgpu.cache.record import Record

__all__ = [
    "Stored",
    "clear",
    "forget_locks",
    "in_use",
    "is_name",
    "keep_within",
    "leftovers",
    "remove",
    "results",
    "retire",
    "staged",
    "stored",
    "sweep",
]

ENTRIES, BUILDING, LOCKS = "entries", "building", "locks"

_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_-]{0,63}")


@dataclass(frozen=True)
class Stored:
    """A result in the cache.

    Attributes:
        digest: its name.
        directory: where it lies.
        record: what is written down about it; a text if that is damaged; None if another result has replaced it.
        nbytes: of its save.
        used: when it was used last, in seconds since 1970.
    """

    digest: str
    directory: Path
    record: Record | str | None
    nbytes: int
    used: float


def stored(root: Path, digest: str | None = None) -> list[Stored]:
    """The results in a cache directory, those first that were used last.

    Args:
        root: the cache directory, which need not exist.
        digest: only those of this name.
    """
    found = []
    for name in [digest] if digest is not None else _names(root / ENTRIES):
        for directory in results(root, name):
            known = record.read(directory)
            try:
                used = (directory / USED).stat().st_mtime
            except OSError:
                used = 0.0
            nbytes = known.nbytes if isinstance(known, Record) else _size(directory)
            found.append(Stored(name, directory, known, nbytes, used))
    return sorted(found, key=lambda one: (-one.used, one.digest))


def is_name(digest: object) -> bool:
    """Whether a result can be called that: names are names of directories."""
    return isinstance(digest, str) and _NAME.fullmatch(digest) is not None


def results(root: Path, digest: str) -> list[Path]:
    """The directories of all results of a name: one, and those that it has replaced, while they are in use."""
    return [root / ENTRIES / digest / name for name in _names(root / ENTRIES / digest)]


def staged(root: Path, digest: str) -> Path:
    """A new name for what is being built or removed."""
    return root / BUILDING / f"{digest}.{os.getpid()}.{secrets.token_hex(8)}"


def in_use(directory: Path) -> bool:
    """Whether somebody uses a result; where that cannot be told, somebody may."""
    try:
        return not while_locked(directory / USED, lambda: None)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def remove(root: Path, directory: Path) -> bool:
    """Removes a result unless it is in use: whether it is gone.

    Raises:
        OSError: the cache directory cannot be written to.
    """

    def discard() -> None:
        (root / BUILDING).mkdir(exist_ok=True)
        away = staged(root, directory.parent.name)
        os.rename(directory, away)
        with contextlib.suppress(OSError):  # there are others of that name, or somebody builds one
            os.rmdir(directory.parent)
        clear(away)

    try:
        return while_locked(directory / USED, discard)
    except FileNotFoundError:
        return True  # somebody else was faster


def clear(directory: Path) -> None:
    """Removes a directory whose lock the caller has: the file that is locked goes last, so the rest is never free."""
    with contextlib.suppress(OSError), os.scandir(directory) as members:
        for member in members:
            if member.is_dir(follow_symlinks=False):
                shutil.rmtree(member.path, ignore_errors=True)
            elif member.name != USED:
                with contextlib.suppress(OSError):
                    os.unlink(member.path)
    with contextlib.suppress(OSError):
        # Not if something is left: without its lock nobody would come for it again.
        if _names(directory) == [USED]:
            os.unlink(directory / USED)
        os.rmdir(directory)


def retire(root: Path, digest: str) -> None:
    """Has the results of a name count for nothing any more. What is in use of them stays until it is not.

    Raises:
        OSError: the cache directory cannot be written to.
    """
    for directory in results(root, digest):
        (directory / record.ENTRY).unlink(missing_ok=True)
        remove(root, directory)


def sweep(directories: Iterable[Path]) -> list[Path]:
    """Removes those directories whose processes have ended without doing so: which they were."""
    gone = []
    for directory in directories:
        with contextlib.suppress(OSError):
            if while_locked(directory / USED, lambda directory=directory: clear(directory)):  # type: ignore[misc]
                gone.append(directory)
    return gone


def leftovers(root: Path) -> list[Path]:
    """What lies where results are built and removed. Of living processes, too: those have its lock."""
    return [root / BUILDING / name for name in _names(root / BUILDING)]


def keep_within(root: Path, limit: int | None) -> list[Stored]:
    """Removes results until the others have no more than ``limit`` bytes: those first that were not used for longest.

    Args:
        root: the cache directory.
        limit: in bytes; None: only results go that others have replaced.

    Returns:
        What was removed. What is in use stays, and it may be too much.

    Raises:
        OSError: the cache directory cannot be written to.
    """
    lock = Exclusive(root / LOCKS / ".removal.lock")
    try:
        try:
            # Two that remove at once would both make room for what each of them sees.
            lock.wait("removes results from the cache")
            return _remove_unneeded(root, limit)
        finally:
            lock.release()
    finally:
        lock.release()  # again, for an interrupt may have come just before the first


def _remove_unneeded(root: Path, limit: int | None) -> list[Stored]:
    found = stored(root)
    left = sum(one.nbytes for one in found)
    gone = []
    for one in sorted(found, key=lambda one: (isinstance(one.record, Record), one.used)):
        is_wanted = isinstance(one.record, Record) and (limit is None or left <= limit)
        if not is_wanted and remove(root, one.directory):
            left -= one.nbytes
            gone.append(one)
    return gone


def forget_locks(root: Path) -> None:
    """Removes the lock files of results that are not there, unless somebody builds one."""
    for name in _names(root / LOCKS):
        digest, suffix = os.path.splitext(name)
        path = root / LOCKS / name
        if suffix == ".lock" and not digest.startswith(".") and not (root / ENTRIES / digest).exists():
            with contextlib.suppress(OSError):
                while_locked(path, path.unlink)


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _size(directory: Path) -> int:
    total = 0
    for parent, _, files in os.walk(directory / record.SAVE):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
