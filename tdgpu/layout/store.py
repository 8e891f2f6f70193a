"""Where a save lies, a directory or an archive, as the reader of its tree sees it.

A path in an archive is written ``<archive>::/<name>``, its root ``<archive>::``: so paths are joined and shown alike.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Hashable
from typing import Protocol

from tdgpu.errors import MissingLeafError, TdgpuError
from tdgpu.layout import files
from tdgpu.layout.archive.central import Directory, Entry
from tdgpu.layout.files import Where
from tdgpu.layout.tree import Extent, Key

__all__ = ["ArchiveStore", "FileStore", "Store", "open_store"]


class Store(Protocol):
    """A place that holds a save.

    Attributes:
        root: path of its top level.
        is_archive: whether it is an archive. There, a leaf's size is known exactly.
    """

    @property
    def root(self) -> str: ...
    @property
    def is_archive(self) -> bool: ...

    def directory(self, where: Where) -> Hashable | None:
        """What identifies the directory ``where.file``, whatever path leads there; None if there is nothing.

        Raises:
            MissingLeafError: there is something else.
        """

    def exists(self, path: str) -> bool:
        """Whether there is a file or a directory."""

    def is_dir(self, path: str) -> bool:
        """Whether there is a directory."""

    def is_named(self, path: str) -> bool:
        """Whether there is anything of that name, even a link that leads nowhere."""

    def members(self, path: str) -> list[str]:
        """The names in a directory."""

    def listing(self, path: str) -> set[str] | None:
        """The names in a directory, where that is the cheapest way to tell which files are there; else None."""

    def size_of(self, file: str, save: str, key: Key) -> tuple[int, int]:
        """Bytes in the file of a leaf when inflated, and the inode; -1 and 0 where there is no such file.

        Raises:
            MissingLeafError: there is something else than a file.
        """

    def read_small(
        self, where: Where, *, missing: type[TdgpuError], bound: int | None = None, exactly: int | None = None
    ) -> bytes:
        """The contents of a file. Arguments and errors as of :func:`tdgpu.layout.files.read_small`."""

    def extent(self, path: str, nbytes: int, inode: int) -> Extent:
        """Where the ``nbytes`` bytes of a leaf's file are, for which ``size_of`` gave ``inode``."""

    def close(self) -> None:
        """Ends what is open. May be called again."""


def open_store(prefix: str, *, check: bool) -> Store:
    """The store of the save ``prefix``: an archive if that is a file, else a directory.

    Args:
        prefix: the save.
        check: whether the headers of an archive's leaves are looked at. Without, extents have no offset (-1).

    Raises:
        InvalidArgument: it is a file, but no archive of a save.
        ArchiveError: the archive is damaged, or refused.
    """
    return ArchiveStore(prefix, check=check) if os.path.isfile(prefix) else FileStore(prefix)


class FileStore:
    """A saved directory."""

    is_archive = False

    def __init__(self, root: str) -> None:
        self.root = root

    def directory(self, where: Where) -> Hashable | None:
        try:
            status = os.stat(where.file)
        except (OSError, ValueError) as error:
            failure = where.from_os(error)
            if failure is None:
                return None
            raise failure from error
        if not stat.S_ISDIR(status.st_mode):
            raise where.error(MissingLeafError, "A directory is expected here, but this is none.")
        return status.st_dev, status.st_ino

    exists = staticmethod(files.exists)
    is_dir = staticmethod(os.path.isdir)
    is_named = staticmethod(os.path.lexists)
    members = staticmethod(os.listdir)
    size_of = staticmethod(files.size_of)
    read_small = staticmethod(files.read_small)

    def listing(self, path: str) -> set[str] | None:
        return set(os.listdir(path))

    @staticmethod
    def extent(path: str, nbytes: int, inode: int) -> Extent:
        return Extent(path, 0, nbytes, None, inode)

    def close(self) -> None:
        pass


class ArchiveStore:
    """An archive of a save."""

    is_archive = True

    def __init__(self, path: str, *, check: bool) -> None:
        self._archive = Directory(path)
        self._check = check
        self.root = f"{path}::"
        self._skip = len(self.root) + 1
        self._entries = self._archive.entries
        if check:
            try:
                self._archive.locate_all()
            except BaseException:
                self.close()
                raise

    @property
    def size(self) -> int:
        """Bytes of the archive."""
        return self._archive.size

    @property
    def inode(self) -> int:
        """Inode of the archive."""
        return self._archive.inode

    def name(self, path: str) -> str:
        """The name in the archive of ``path``."""
        name = path[self._skip :]
        return _as_cp437(name) if not name.isascii() and not self._is_known(name) else name

    def _is_known(self, name: str) -> bool:
        return name in self._entries or self._archive.names.is_dir(name)

    def _entry(self, path: str) -> Entry | None:
        name = path[self._skip :]
        entry = self._entries.get(name)
        return self._entries.get(_as_cp437(name)) if entry is None and not name.isascii() else entry

    def directory(self, where: Where) -> Hashable | None:
        if f"{where.file}/meta.json"[self._skip :] in self._entries or self.is_dir(where.file):
            return where.file
        if self._entry(where.file) is not None:
            raise where.error(MissingLeafError, "A directory is expected here, but this is a file.")
        return None

    def exists(self, path: str) -> bool:
        return self._entry(path) is not None or self.is_dir(path)

    is_named = exists

    def is_dir(self, path: str) -> bool:
        return self._archive.names.is_dir(self.name(path))

    def members(self, path: str) -> list[str]:
        return self._archive.names.members(self.name(path))

    def listing(self, path: str) -> set[str] | None:
        return None

    def size_of(self, file: str, save: str, key: Key) -> tuple[int, int]:
        entry = self._entry(file)
        if entry is not None:
            return entry.nbytes, self._archive.inode
        if self.is_dir(file):
            raise Where(save, key, file).error(MissingLeafError, "A file is expected here, but this is a directory.")
        return -1, 0

    def read_small(
        self, where: Where, *, missing: type[TdgpuError], bound: int | None = None, exactly: int | None = None
    ) -> bytes:
        entry = self._entry(where.file)
        if entry is None:
            raise where.error(missing, "There is no such file.")
        if exactly is not None and entry.nbytes != exactly:
            raise where.error(missing, "The file has another size.", wanted=exactly, found=entry.nbytes)
        return self._archive.read(entry, bound)

    def extent(self, path: str, nbytes: int, inode: int) -> Extent:
        entry = self._entry(path)
        assert entry is not None
        return self._archive.extent(entry, locate=self._check)

    def close(self) -> None:
        self._archive.close()


def _as_cp437(name: str) -> str:
    """What ``zipfile`` reads of a name that was written in UTF-8 but not marked so, as Info-ZIP's ``zip`` may do."""
    return name.encode("utf-8", "surrogatepass").decode("cp437")
