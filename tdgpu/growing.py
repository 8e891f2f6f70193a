"""A save that somebody else appends to: :class:`MemmapReader`."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tdgpu.errors import FormatError, InvalidArgument, LoadError, NotSupported, SaveNotFound, SubpathError
from tdgpu.layout import objects, reader
from tdgpu.layout.files import Where
from tdgpu.layout.save import Save
from tdgpu.layout.tree import Kind, Leaf, Level, Shape
from tdgpu.load import Request, check_allow_pickle, load_save
from tdgpu.signals import Descriptor

__all__ = ["MemmapReader"]

_META = "meta.json"


class MemmapReader:
    """A save that may grow, as it was last looked at.

    It takes no lock and never writes, so any number of readers, in any process, can follow a save while
    :class:`tdgpu.MemmapAppender`, :func:`tdgpu.append_memmap` or tensordict appends to it. What it has loaded stays
    valid when the save grows: rows are only ever added behind those that are there.

    Args:
        prefix: the saved directory, or an archive (which never grows).
        robust_key, subpath, allow_pickle: as in :func:`tdgpu.load_memmap`. Non-tensor contents are read once.

    Raises:
        InvalidArgumentType: an ``allow_pickle`` that is no bool (a TypeError).
        InvalidArgument: what is read has no batch dimension, and so no rows (a ValueError).
        NotSupported: only the rebuilt object knows whether it has rows (a NotImplementedError).
        TdgpuError: the save cannot be read: see :func:`tdgpu.load_memmap`.

    One thread may call :meth:`refresh` while others load.

    >>> import tempfile, tensordict, torch
    >>> from tensordict import TensorDict
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = TensorDict(a=torch.arange(3), batch_size=[3]).memmap(path)
    ...     rows = MemmapReader(path)
    ...     tensordict.append_memmap(path, TensorDict(a=torch.arange(2), batch_size=[2]))
    ...     print(len(rows), rows.refresh(), len(rows), rows[1:4]["a"].tolist())
    3 2 5 [1, 2, 0]
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        robust_key: bool | None = True,
        subpath: Any = None,
        allow_pickle: bool | None = None,
    ) -> None:
        # A working directory that changes later does not matter.
        self._prefix = str(Path(prefix).absolute())
        self._robust_key = robust_key
        self._subpath = subpath
        self._allow_pickle = check_allow_pickle(allow_pickle)
        # Where the level lies says what to watch.
        with contextlib.closing(self._read(check=False)) as structure:
            path = structure.root.path
        self._seen = self._look(path, None)

    @property
    def prefix(self) -> Path:
        """The directory or archive."""
        return Path(self._prefix)

    def __len__(self) -> int:
        """Rows that were committed when the save was last looked at."""
        return self._seen.rows

    def __repr__(self) -> str:
        below = "" if self._subpath is None else f", subpath={self._subpath!r}"
        return f"MemmapReader({self._prefix!r}{below}, {len(self)} rows)"

    def refresh(self) -> int:
        """Looks at the save again. If nothing was committed since, that costs one ``stat``.

        Returns:
            How many rows were added since.

        Raises:
            FormatError: another save stands there now: an archive or directory that was replaced, other keys, classes,
                dtypes or trailing shapes, other files, fewer rows (a RuntimeError).
            SaveNotFound: it is gone (a FileNotFoundError).
            TdgpuError: it cannot be read: see :func:`tdgpu.load_memmap`.

        After an error the reader is what it was before: it has the same rows, and loads them as long as their files
        are there.
        """
        old = self._seen
        if all(mark.holds() for mark in old.marks):
            return 0
        if not old.place.holds():
            if not os.path.exists(self._prefix):
                raise SaveNotFound("The save is gone.", save=self._prefix)
            raise _another("what is at its path has been replaced", old.save, old.save.root)
        try:
            new = self._look(old.save.root.path, old)
        except SubpathError as error:
            raise _another("the level of the subpath is gone", old.save, old.save.root) from error
        self._seen = new
        return new.rows - old.rows

    def load(
        self,
        device: torch.device | str | int | None = None,
        non_blocking: bool = False,
        *,
        out: Any = None,
        mode: str | None = None,
        num_threads: int = 0,
        return_early: bool = False,
        rows: slice | None = None,
        verify: bool = False,
        progress: bool = False,
    ) -> Any:
        """Loads the rows that this reader has seen, also when the save has grown since.

        Args:
            device, non_blocking, out, mode, num_threads, return_early, verify, progress: as in
                :func:`tdgpu.load_memmap`.
            rows: a slice without a step, of the ``len(self)`` rows; None: all of them.

        Returns:
            What :func:`tdgpu.load_memmap` returned for the save of that size. It does not know the directory as its own
            (a later ``memmap_()`` does not write there), since that belongs to who appends.

        Raises:
            LoadError: a leaf's file is no longer the one that was checked, or is shorter (an OSError).
            TdgpuError: see :func:`tdgpu.load_memmap`.
        """
        request = Request.checked(
            device, non_blocking, out=out, robust_key=self._robust_key, mode=mode, num_threads=num_threads,
            allow_pickle=self._allow_pickle, return_early=return_early, rows=rows, verify=verify, progress=progress,
            keep_prefix=False,
        )  # fmt: skip
        seen = self._seen
        if not request.structure_only:
            seen.check()
        return load_save(seen.save, request)

    def __getitem__(self, rows: slice) -> Any:
        """``reader[a:b]`` is ``reader.load(rows=slice(a, b))``: these rows on the CPU, mapped."""
        return self.load(rows=rows)

    def _read(self, *, check: bool) -> Save:
        return reader.read(self._prefix, subpath=self._subpath, robust_key=self._robust_key, check=check)

    def _look(self, path: str, old: _Seen | None) -> _Seen:
        """Reads the save, whose level lies at ``path``, and compares it with what was seen before."""
        # The marks come first: a commit during the reading then shows in them, and at worst is read twice.
        place = _Mark(self._prefix, exactly=False)
        files = [self._prefix] if os.path.isfile(self._prefix) else _commits(self._prefix, path)
        marks = [_Mark(file, exactly=True) for file in files]
        with contextlib.closing(self._read(check=True)) as save:
            if old is not None:
                _compare(old.save, old.save.root, save.root)
            objects.resolve(save, self._allow_pickle)
        if not save.is_archive:
            # A tensorclass has its rows in the level below; its own meta.json never changes.
            is_class = save.root.kind in (Kind.TENSORCLASS, Kind.NON_TENSOR_DATA)
            marks.pop(-2 if is_class else -1)
        return _Seen(save, _rows(save), place, marks)


@dataclass(frozen=True)
class _Seen:
    """What a look at the save has found.

    Attributes:
        save: its tree, with the rows that were committed.
        rows: how many these are.
        place: the directory or archive.
        marks: the files of which one changes when rows are committed.
    """

    save: Save
    rows: int
    place: _Mark
    marks: list[_Mark]

    def check(self) -> None:
        """Checks that every leaf's file is still the one that was looked at, and holds what is in it by the metadata.

        Mapping another file would show its bytes; mapping a shorter one would grow it.

        Raises:
            LoadError: one is not.
        """
        if not self.place.holds():
            raise LoadError("The save is gone, or another one has taken its place.", save=self.save.prefix)
        if self.save.is_archive:
            return  # whose size is checked when it is mapped or read
        for leaf in self.save.leaves():
            extent = leaf.extent
            if extent is None:
                continue
            where = Where(self.save.prefix, leaf.key, extent.file)
            try:
                status = os.stat(extent.file)
            except OSError as error:
                raise where.error(LoadError, f"A leaf's file cannot be looked at: {error.strerror}.") from error
            if status.st_ino != extent.inode:
                raise where.error(LoadError, "Another file has taken the place of this leaf's.")
            if status.st_size < extent.nbytes:
                raise where.error(
                    LoadError, "The leaf's file has become shorter.", wanted=extent.nbytes, found=status.st_size
                )


class _Mark:
    """A file or directory as it was: tells whether the same one is still at its path.

    It is kept open (without access to its contents), so that the system gives its inode's number to no other file.

    Args:
        path: the file, which may be missing.
        exactly: whether its time of modification and size count, too.
    """

    __slots__ = ("_exactly", "_held", "_identity", "path")

    def __init__(self, path: str, *, exactly: bool) -> None:
        self.path = path
        self._exactly = exactly
        self._identity: tuple[int, ...] | None = None
        self._held = Descriptor()
        try:
            fd = self._held.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        self._identity = self._of(os.fstat(fd))

    def holds(self) -> bool:
        """Whether nothing has changed."""
        try:
            return self._of(os.stat(self.path)) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            return self._identity is None

    def _of(self, status: os.stat_result) -> tuple[int, ...]:
        identity = (status.st_dev, status.st_ino)
        return (*identity, status.st_mtime_ns, status.st_size) if self._exactly else identity


def _commits(prefix: str, path: str) -> list[str]:
    """The ``meta.json`` files whose replacement may commit rows of the level at ``path``.

    The topmost level that grows commits for all below it: any of those above, its own, or, of a tensorclass, the one of
    its tensors, which is the last in the list.
    """
    directories = [prefix]
    for part in filter(None, path[len(prefix) :].split("/")):
        directories.append(f"{directories[-1]}/{part}")
    return [f"{directory}/{_META}" for directory in (*directories, f"{path}/_tensordict")]


def _rows(save: Save) -> int:
    size = save.root.batch_size
    where = Where(save.prefix, save.root.key, save.root.path)
    if size is None:
        raise where.error(NotSupported, f"Whether a {save.root.cls.__name__} has rows, only the rebuilt object knows.")
    if not size:
        raise where.error(InvalidArgument, "This has no batch dimension, and so no rows.")
    return size[0]


def _compare(old_save: Save, old: Level, new: Level) -> None:
    """Checks that a level, and all below it, is ``old`` with more rows or as many; and lets it have its non-tensor
    contents, which an append never changes.

    Raises:
        FormatError: it is not.
    """
    if (old.leaves.keys(), old.children.keys()) != (new.leaves.keys(), new.children.keys()):
        raise _another(f"it has the keys {_keys(new)}, and had {_keys(old)}", old_save, old)
    if (old.kind, str(old.cls), _rest(old)) != (new.kind, str(new.cls), _rest(new)):
        raise _another("its class, names or non-tensor contents differ", old_save, old)
    can_grow = old.kind in (Kind.TENSORDICT, Kind.TYPED, Kind.TENSORCLASS, Kind.NON_TENSOR_DATA)
    _compare_shapes(old_save, old, old.batch_size or (), new.batch_size or (), can_grow=can_grow)
    for was, now in zip(old.leaves.values(), (new.leaves[key] for key in old.leaves), strict=True):
        if (was.dtype, was.is_nested) != (now.dtype, now.is_nested):
            raise _another(f"its dtype is {now.dtype}, and was {was.dtype}", old_save, was)
        _compare_shapes(old_save, was, was.shape, now.shape, can_grow=not was.is_nested)
        if was.extent is not None and (now.extent is None or was.extent.inode != now.extent.inode):
            raise _another("another file has taken the place of the leaf's", old_save, was)
    new.objects = old.objects
    for key, child in old.children.items():
        _compare(old_save, child, new.children[key])


def _compare_shapes(save: Save, what: Level | Leaf, was: Shape, now: Shape, *, can_grow: bool) -> None:
    if now[:1] < was[:1]:
        raise _another(f"it has {now[0] if now else 'no'} rows, fewer than the {was[0]} that were seen", save, what)
    if was[1:] != now[1:] or (was != now and not can_grow):
        raise _another(f"its shape is {list(now)}, and was {list(was)}", save, what)


def _rest(level: Level) -> str:
    """What ``meta.json`` says besides the shapes, as text: NaN is itself there."""
    if level.kind not in (Kind.TENSORDICT, Kind.TYPED):
        return json.dumps(level.meta)
    return json.dumps({key: value for key, value in level.meta.items() if key != "shape" and key not in level.leaves})


def _keys(level: Level) -> list[str]:
    return [*level.leaves, *level.children]


def _another(how: str, save: Save, what: Level | Leaf) -> FormatError:
    file: str | None
    if isinstance(what, Level):
        file = what.path
    else:
        file = None if what.extent is None else what.extent.file
    return FormatError(
        f"This is no longer the save that was opened: {how}. Open it anew.", save=save.prefix, key=what.key, file=file
    )
