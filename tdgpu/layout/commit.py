"""How a save changes: new metadata, level by level, so that at every moment all of it is old or all of it is new.

Each level counts its rows in its own ``meta.json``. An append writes the metadata of every level beside it first, under
the name :data:`TEMPORARY`, the top level's before the others'. Renaming the top one over its ``meta.json`` is the
commit: before it, whatever lies around counts for nothing; after it, every level that still shows the old number of
rows has its new metadata beside it. Names and order are those of tensordict, whose documented recovery works here, too.

With ``durable``, the disk keeps that order: everything that the commit relies on is synced before it, and the commit
before anything that follows from it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from tdgpu.errors import AppendError, FormatError, SaveNotFound, TdgpuError
from tdgpu.layout import keys, metadata
from tdgpu.layout.files import Where, read_small
from tdgpu.options import get as get_options

if TYPE_CHECKING:
    from tdgpu.layout.growth import Growing, GrowingLevel

__all__ = [
    "TEMPORARY",
    "RecoveryReport",
    "Top",
    "advance",
    "check_writable",
    "recover",
    "sync_directory",
    "top_above",
]

#: The file beside ``meta.json`` that holds what an append is about to put there.
TEMPORARY = ".meta.json.append.tmp"

Meta = dict[str, Any]


def _temporary(directory: str) -> str:
    return os.path.join(directory, TEMPORARY)


def _meta_file(directory: str) -> str:
    return os.path.join(directory, "meta.json")


def _batch_size(meta: Meta) -> list[int] | None:
    """The batch size of a level, as it is saved; None if this is no level of tensors, or a view of one."""
    shape = meta.get("shape")
    if type(shape) is not list or type(meta.get("custom_op")) is str:
        return None
    return shape if all(type(size) is int for size in shape) else None


# --- writing ----------------------------------------------------------------------------------------------------------


def check_writable(growing: Growing) -> None:
    """Raises PermissionError if metadata cannot be replaced in one of the directories, naming it."""
    for level in growing.levels:
        if not os.access(level.directory, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            is_read_only = os.statvfs(level.directory).f_flag & os.ST_RDONLY
            raise PermissionError(
                errno.EROFS if is_read_only else errno.EACCES,
                "Rows cannot be appended: no files can be made here"
                + (" (the file system is mounted read-only)" if is_read_only else ""),
                level.directory,
            )


def advance(growing: Growing, rows: int, *, durable: bool) -> None:
    """Commits that the save has ``rows`` rows.

    The lock is held, nothing is left of an earlier append, and the rows are in the leaves' files; with ``durable``,
    those are synced, and so are the directories in which they are new. The thread gets no signals.

    Args:
        growing: the save. Its ``rows`` are set.
        rows: how many rows it has from now on, in all.
        durable: whether it survives a power failure once this has returned.

    Raises:
        AppendError: before the commit: nothing has changed, and the message does not say that the rows are committed.
            After it: the rows are committed, and the message says so; what is not done yet is done by the next append
            or by :func:`recover`, and readers see the rows at once.
    """
    if growing.is_unfinished:
        _finish(growing)
    top, *others = growing.levels
    check_unchanged(growing)
    written: list[GrowingLevel] = []
    file = ""
    try:
        for level in growing.levels:
            file = _temporary(level.directory)
            _write_temporary(level, level.metadata(rows), written, durable=durable)
        file = _meta_file(top.directory)
        os.replace(_temporary(top.directory), file)
    except BaseException as error:
        left = _take_back(written, durable=durable)
        growing.is_unfinished = left is not None
        if isinstance(error, OSError):
            raise AppendError(
                f"The metadata for {rows} rows could not be written ({error.strerror or error}); the {growing.rows}"
                f" committed rows stay as they are.{left or ''}",
                code=error.errno,
                save=growing.prefix,
                file=file,
            ) from error
        raise
    growing.rows = rows
    growing.is_unfinished = True
    try:
        growing.seen = _identity(file)
        if durable:
            # Before any other rename: no disk may show the others in their new state and this one in its old.
            sync_directory(top.directory)
        for level in others:
            file = _meta_file(level.directory)
            os.replace(_temporary(level.directory), file)
        if durable:
            for level in others:
                file = level.directory
                sync_directory(file)
    except OSError as error:
        raise AppendError(
            f"All {rows} rows are committed, and readers see them, but the metadata of a level could not be put in its"
            f" place ({error.strerror or error}). The next append does it, or recover_memmap.",
            code=error.errno,
            save=growing.prefix,
            file=file,
        ) from error
    growing.is_unfinished = False


def _finish(growing: Growing) -> None:
    try:
        recover(growing.prefix)
    except (OSError, TdgpuError) as error:
        raise AppendError(
            f"The {growing.rows} committed rows stay, but what an earlier append left in the metadata still cannot be"
            f" put in order: {error}",
            code=getattr(error, "errno", None),
            save=growing.prefix,
            file=getattr(error, "file", None) or getattr(error, "filename", None),
        ) from error
    growing.is_unfinished = False


def check_unchanged(growing: Growing) -> None:
    """Raises AppendError if somebody who did not ask for the lock has changed the number of rows."""
    top = growing.levels[0]
    where = Where(growing.prefix, top.key, _meta_file(top.directory))
    try:
        identity = _identity(where.file)
        if identity == growing.seen:
            return
        size = _batch_size(metadata.parse(read_small(where, missing=SaveNotFound), where))
    except (OSError, TdgpuError) as error:
        raise where.error(AppendError, f"The save can no longer be read: {error}") from error
    if size is None or size[:1] != [growing.rows]:
        raise where.error(
            AppendError,
            f"A writer that did not ask for the lock has changed this save: it had {growing.rows} rows, and has"
            f" {size[0] if size else 'none'} now. Nothing was committed.",
        )
    growing.seen = identity


def _identity(file: str) -> tuple[int, int, int]:
    status = os.lstat(file)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _write_temporary(level: GrowingLevel, data: bytes, written: list[GrowingLevel], *, durable: bool) -> None:
    """Writes the new metadata of a level beside the old, with its mode and owner, and notes that in ``written``."""
    old = os.lstat(_meta_file(level.directory))
    if not stat.S_ISREG(old.st_mode):
        raise OSError(errno.ELOOP, "meta.json is no regular file: nothing is written through a symbolic link")
    # O_EXCL follows no link either. There is no such file: the lock is held, and what was left is recovered.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(_temporary(level.directory), flags, 0o600)
    written.append(level)
    try:
        new = os.fstat(descriptor)
        if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, old.st_uid, old.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if durable:
        sync_directory(level.directory)


def _take_back(written: list[GrowingLevel], *, durable: bool) -> str | None:
    """Removes temporary metadata, the top level's last: that it is gone means "committed". Tells what is left."""
    for level in reversed(written):
        file = _temporary(level.directory)
        try:
            os.unlink(file)
            if durable:
                sync_directory(level.directory)
        except OSError as error:
            return f" {file} could not be removed ({error.strerror}); the next append does that, or recover_memmap."
    return None


def sync_directory(path: str) -> None:
    """Makes durable which names there are in a directory.

    Raises:
        OSError: that failed, or there is no such directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network file systems have no such notion
            raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(descriptor)


def sync_file(path: str) -> None:
    """Makes durable what is in a file.

    Raises:
        OSError: that failed, or there is no such file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(descriptor)


def sync_tree(directory: str) -> None:
    """Makes durable a directory with all that is in it.

    Raises:
        OSError: that failed.
    """
    for parent, _, files in os.walk(directory):
        for name in files:
            sync_file(os.path.join(parent, name))
        sync_directory(parent)


# --- reading ----------------------------------------------------------------------------------------------------------


class Top:
    """The top level of what grows, as a reader met it: every level below shows as many rows.

    So what a reader shows is what was committed at one moment, while appends go on, and after one that was killed. It
    never waits: nobody changes a level below to anything else than what the top level says, or has said.

    Args:
        where: its ``meta.json``.
        rows: the rows that it had.
        read: gives the metadata in a file; None if there is no such file, or none that is complete.
    """

    __slots__ = ("_latest", "_read", "_where", "rows")

    def __init__(self, where: Where, rows: int, read: Callable[[Where], Meta | None]) -> None:
        self.rows = rows
        self._where = where
        self._latest = rows  # what it is known to have had since
        self._read = read

    def settled(self, meta: Meta, where: Where) -> Meta:
        """The metadata of a level below, for :attr:`rows` rows.

        Args:
            meta: what its ``meta.json`` holds, which is another number of rows. It is not changed.
            where: that file.

        Returns:
            The metadata to go by; or ``meta`` itself if no append explains the difference.
        """
        size = _batch_size(meta)
        assert size
        if size[0] < self.rows:
            # The rename is still to come, or it came since; then what lies there may belong to a later append.
            for file in (_temporary(os.path.dirname(where.file)), where.file):
                newer = self._read(where._replace(file=file))
                if newer is not None and _grown(meta, newer) >= self.rows:
                    return _cut(newer, self.rows)
        elif self._is_later(size[0]):
            return _cut(meta, self.rows)
        return meta

    def _is_later(self, rows: int) -> bool:
        """Whether so many rows have been committed since the top level was met."""
        if rows > self._latest:
            newer = _batch_size(self._read(self._where) or {})
            self._latest = max(self._latest, newer[0] if newer else 0)
        return rows <= self._latest


def top_above(
    path: str, root: Where, is_named: Callable[[str], bool], read: Callable[[Where], Meta | None]
) -> Top | None:
    """The top level that decides about a level which is read alone, if an append to that one is pending.

    Args:
        path: directory of the level, below that of the save.
        root: the save's own directory.
        is_named: whether there is anything of that name.
        read: as for :class:`Top`.

    Returns:
        The highest of the levels above that has rows, like all those between; None if there is none, or nothing is
        pending: then what the level's own metadata says has been committed.
    """
    if not any(is_named(_temporary(os.path.join(path, inner))) for inner in ("", "_tensordict")):
        return None
    top = None
    directory = root.file
    for part in os.path.relpath(path, directory).split("/"):
        where = root._replace(file=_meta_file(directory))
        meta = read(where)
        directory = os.path.join(directory, part)
        if meta is None:
            continue  # the directory of a key that was used as a path
        size = _batch_size(meta)
        if size is None and part == "_tensordict":
            continue  # a tensorclass, which keeps its tensors there
        top = (top or Top(where, size[0], read)) if size else None
    return top


def _grown(meta: Meta, newer: Meta) -> int:
    """The rows in ``newer``, if it is the metadata of the same level; else -1."""
    size, other = _batch_size(meta), _batch_size(newer)
    if not size or not other or size[1:] != other[1:] or meta.get("_type") != newer.get("_type"):
        return -1
    return other[0] if meta.keys() == newer.keys() else -1


def _cut(meta: Meta, rows: int) -> Meta:
    """Metadata for ``rows`` rows: of the level, and of each leaf that has as many as the level."""
    size = _batch_size(meta)
    assert size
    cut: dict[int, Any] = {}  # entries that say the same are one object, and stay one
    result = dict(meta)
    for key, entry in meta.items():
        if type(entry) is dict and type(shape := entry.get("shape")) is list and shape[:1] == size[:1]:
            if id(entry) not in cut:
                cut[id(entry)] = {**entry, "shape": [rows, *shape[1:]]}
            result[key] = cut[id(entry)]
    result["shape"] = [rows, *size[1:]]
    return result


# --- recovering -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecoveryReport:
    """What :func:`tdgpu.recover_memmap` found and did.

    Attributes:
        path: the save.
        state: ``"clean"``, there was nothing to do; ``"undone"``, an append had not been committed, and what it left
            was removed; ``"completed"``, one had been committed, and is complete now.
        rows: the rows of the save: all that were ever committed. 0 for a save that cannot grow.
        completed: the ``meta.json`` files that were put in place.
        removed: the temporary files that were removed.
        surplus: bytes in the files of leaves that belong to no row. They do no harm, and the next append overwrites
            them.
    """

    path: Path
    state: str
    rows: int
    completed: tuple[str, ...]
    removed: tuple[str, ...]
    surplus: int


class _Found(NamedTuple):
    """A level on disk, below the top that it grows with."""

    where: Where
    meta: Meta
    names: frozenset[str]

    @property
    def directory(self) -> str:
        return os.path.dirname(self.where.file)

    @property
    def rows(self) -> int:
        size = _batch_size(self.meta)
        assert size
        return size[0]

    @property
    def is_pending(self) -> bool:
        return TEMPORARY in self.names


def recover(prefix: str) -> RecoveryReport:
    """Brings the levels of a save to one state, if an append was killed. The lock is held.

    No class has to be known for that, and no pickle is read.

    Raises:
        SaveNotFound: there is no save.
        FormatError: a level cannot be brought to the rows of the top level, or it is not for this directory to decide:
            then nothing was changed. Or metadata is malformed.
        OSError: what an append left cannot be removed, or not be put in its place.
    """
    levels, apart = _levels(prefix)
    if apart:
        raise FormatError(
            "An append to a part of this save is under way, or was killed. That part grows by itself: recover it by"
            " itself.",
            save=prefix,
            file=apart[0],
        )
    if not levels:
        return RecoveryReport(Path(prefix), "clean", 0, (), (), 0)
    top = levels[0]
    behind = [level for level in levels if level.rows != top.rows]
    for level in behind:
        # While the top level's is pending, nothing has been committed, and no level can be ahead.
        if top.is_pending or not _can_complete(level, top.rows):
            raise level.where.malformed(
                f"This level has {level.rows} rows, the one at the top has {top.rows}, and no append has left what"
                " would make them agree. Nothing was changed."
            )
    completed, removed = [], []
    if behind:
        sync_directory(top.directory)  # the commit itself, in case that its writer did not come to that
    for level in behind:
        sync_file(_temporary(level.directory))
        os.replace(_temporary(level.directory), level.where.file)
        sync_directory(level.directory)
        completed.append(level.where.file)
    for level in reversed(levels):
        if level.is_pending and level.rows == top.rows:
            os.unlink(_temporary(level.directory))
            sync_directory(level.directory)
            removed.append(_temporary(level.directory))
    state = "completed" if completed else "undone" if removed else "clean"
    surplus = sum(_surplus(level, _cut(level.meta, top.rows)) for level in levels)
    return RecoveryReport(Path(prefix), state, top.rows, tuple(completed), tuple(removed), surplus)


def _can_complete(level: _Found, rows: int) -> bool:
    """Whether the temporary metadata of a level is complete, and the level's own but for the number of rows."""
    file = _temporary(level.directory)
    if not level.is_pending or os.path.islink(file):
        return False
    try:
        newer = _parsed(level.where._replace(file=file))
    except TdgpuError:
        return False
    return _grown(level.meta, newer) == rows and _cut(newer, level.rows) == level.meta


def _parsed(where: Where) -> Meta:
    return metadata.parse(read_small(where, missing=SaveNotFound, bound=get_options().max_metadata_bytes), where)


def _surplus(level: _Found, meta: Meta) -> int:
    """Bytes in the files of a level's leaves that belong to no row of those that ``meta`` counts."""
    surplus = 0
    directory = level.directory
    checker = metadata.ShapeChecker(level.where)
    for key, entry in meta.items():
        if type(entry) is not dict or not {"shape", "dtype"} <= entry.keys() or entry.get("is_nested"):
            continue
        name = f"{keys.encode(key)}.memmap"
        if name not in level.names:
            name = f"{keys.legacy_name(key, child=False)}.memmap"
        if name in level.names:
            nbytes = checker.leaf(key, entry["shape"], entry["dtype"])[2]
            surplus += max(0, os.lstat(f"{directory}/{name}").st_size - nbytes)
    return surplus


def _levels(prefix: str) -> tuple[list[_Found], list[str]]:
    """The levels that grow with the one at the top of a save, that one first, parents before children.

    Told by their metadata alone. None if the save cannot grow.

    Returns:
        The levels; and the temporary files in parts that are no such levels: members of a stack, what lies below a save
        without a batch dimension.

    Raises:
        SaveNotFound: there is no save.
        FormatError: malformed metadata, or something is pending behind a symbolic link.
    """
    levels: list[_Found] = []
    apart: list[str] = []
    waiting: list[tuple[str, tuple[str, ...], bool]] = [(prefix, (), True)]
    while waiting:
        directory, key, with_top = waiting.pop()
        names, directories = _listed(Where(prefix, key, directory))
        where = Where(prefix, key, _meta_file(directory))
        below, is_level = list(directories), False
        if with_top and ("meta.json" in names or directory == prefix):
            meta = _parsed(where)
            size = _batch_size(meta)
            if size:
                is_level = True
            elif size is None and "_tensordict" in directories and "NonTensor" not in str(meta.get("_type")):
                below = ["_tensordict"]  # a tensorclass, which keeps its tensors there
            else:
                with_top = False  # what lies below has no rows, or other ones: members of a stack, views, values
            if is_level:
                levels.append(_Found(where, meta, names))
        if TEMPORARY in names and not with_top:
            apart.append(_temporary(directory))
        for name in reversed(below):
            inner = key if name == "_tensordict" and not is_level else (*key, unquote(name))
            waiting.append((os.path.join(directory, name), inner, with_top))
    return levels, apart


def _listed(where: Where) -> tuple[frozenset[str], list[str]]:
    """What a directory holds: its names, and those of the directories among them, links left out."""
    names, directories = set(), []
    try:
        with os.scandir(where.file) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.name)
                    continue
                names.add(entry.name)
                if entry.is_symlink() and os.path.lexists(_temporary(entry.path)):
                    raise where.malformed(
                        f"An append is pending behind the symbolic link {entry.path}. Only tensordict appends through"
                        " links: recover it as its documentation says."
                    )
    except (FileNotFoundError, NotADirectoryError):
        raise where.error(SaveNotFound, "There is no save in a directory here.") from None
    return frozenset(names), sorted(directories)
