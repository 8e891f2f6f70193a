"""An open zip archive: its entries, with nothing in it believed before it is checked.

Python's ``zipfile`` reads the same archives, but believes more: entries that share bytes, names that lead elsewhere,
two entries of one name. Every entry here has bytes of its own, inside the file and outside the central directory.
"""

from __future__ import annotations

import os
import stat
import zlib
from types import TracebackType

from tdgpu.errors import ArchiveError, ChecksumError, InvalidArgument, LoadError, NotSupported, SaveNotFound, TdgpuError
from tdgpu.layout import collector
from tdgpu.layout.archive import ends, index
from tdgpu.layout.archive.inflate import METHODS, Damaged, Unavailable, inflate
from tdgpu.layout.archive.names import Names
from tdgpu.layout.archive.records import LOCAL_BYTES, LOCAL_SIGNATURE, Central, Entry, check_local, encoded
from tdgpu.layout.tree import Blocks, Extent, Packed
from tdgpu.options import get as get_options
from tdgpu.signals import Descriptor

__all__ = ["Directory", "Entry", "is_archive"]


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is an archive of a save: a zip file with an entry ``meta.json``.

    A directory, another file, and a zip file that is cut off give False, as they do with
    ``tensordict.is_memmap_archive``; what is wrong with them is said by a load.

    Raises:
        ArchiveError: it is a zip file whose directory is damaged, or refused.
        PermissionError: it cannot be read.
    """
    if not os.path.isfile(path):
        return False
    try:
        Directory(path).close()
    except InvalidArgument:
        return False
    return True


class Directory:
    """An open archive. It holds a file descriptor: close it, or use it as a context manager.

    Args:
        path: the archive.

    Attributes:
        path: the archive.
        entries: its files, by name, in the order of the central directory.
        names: the names of all entries.
        size, inode: of the file.

    Raises:
        SaveNotFound: there is no such file.
        InvalidArgument: it is no zip file with an entry ``meta.json``.
        ArchiveError: its central directory is damaged, or refused.
        NotSupported: it needs a later version of zip.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = TensorDict(a=torch.arange(3)).save(path + "/a.tdz")
    ...     with Directory(path + "/a.tdz") as directory:
    ...         entry = directory.entries["a.memmap"]
    ...         print(entry, directory.locate(entry) % 64)
    Entry('a.memmap', stored, 24, 24) 0
    """

    _fd = -1

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._opened = Descriptor()
        try:
            # O_NONBLOCK: the open of a pipe that nobody writes to must not wait. It means nothing to a regular file.
            self._fd = self._opened.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError, ValueError) as error:
            raise SaveNotFound("There is no archive here.", save=self.path) from error
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument("An archive is a regular file, but this is none.", file=self.path)
            self.size, self.inode = status.st_size, status.st_ino
            with collector.paused():
                self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file. May be called again."""
        self._fd = -1
        self._opened.close()

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self, cause: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        end = ends.find(self._fd, self.size, lambda what: self.refuse(None, what))
        if end is None:
            raise InvalidArgument(self._no_archive(), file=self.path)
        bound = get_options().max_metadata_bytes
        if end.nbytes > bound:
            raise self.refuse(
                None, f"Its directory has {end.nbytes} bytes; at most {bound} are read (option max_metadata_bytes)"
            )
        central = Central(self._pread(None, end.start, end.nbytes), end, self.refuse)
        self.entries = central.entries
        if "meta.json" not in self.entries:
            raise InvalidArgument(self._no_meta(), file=self.path)
        if central.refused is not None:
            raise central.refused
        self.names = Names(central.names, self.refuse)
        central.bound(end.start)

    # --- entries ---

    def locate(self, entry: Entry) -> int:
        """The first byte of an entry's bytes in the file, once its local header is found to say what the central
        directory says.

        Raises:
            ArchiveError: it does not, or is not there.
        """
        if entry.payload < 0:
            nbytes = LOCAL_BYTES + len(encoded(entry.name, entry.flags))
            header = self._pread(entry.name, entry.header, nbytes)
            entry.payload = check_local(
                header, lambda at, count: self._pread(entry.name, at, count), entry, self.refuse
            )
        return entry.payload

    def locate_all(self) -> None:
        """Reads and compares every local header. Raises as :meth:`locate`."""
        with collector.paused():
            for entry in self.entries.values():
                self.locate(entry)

    def read(self, entry: Entry, bound: int | None = None) -> bytes:
        """The inflated bytes of a small entry, whose size and CRC-32 are checked.

        Args:
            entry: one of ``entries``.
            bound: largest size that is read, in bytes; by default the option ``max_metadata_bytes`` for a compressed
                entry, and none for a stored one, which cannot be larger than the archive.

        Raises:
            ArchiveError: it is larger than ``bound``, or its local header differs.
            ChecksumError: its bytes do not inflate to what the central directory promises.
            NotSupported: its method cannot be inflated here.
        """
        self.check_method(entry)
        if bound is None and entry.method:
            bound = get_options().max_metadata_bytes
        largest = max(entry.stored, entry.nbytes)
        if bound is not None and largest > bound:
            what = f"It holds {largest} bytes of metadata; at most {bound} are read (option max_metadata_bytes)"
            raise self.refuse(entry.name, what)
        data = self._pread(entry.name, self.locate(entry), entry.stored)
        try:
            found = inflate(entry.method, data, entry.nbytes)
        except Damaged as error:
            what = f"The entry is damaged: {error}; {entry.nbytes} bytes were packed"
            raise self.refuse(entry.name, what, ChecksumError) from error
        except Unavailable as error:
            raise self.refuse(entry.name, f"The entry cannot be inflated: {error}", NotSupported) from error
        crc = zlib.crc32(found)
        if crc != entry.crc:
            what = f"The entry is damaged: its bytes have the CRC-32 {crc:#010x}, not {entry.crc:#010x}"
            raise self.refuse(entry.name, what, ChecksumError)
        return found

    def blocks(self, entry: Entry) -> Blocks | None:
        """The block index of an entry, if it has one that fits. Raises as :meth:`read`, for a sidecar."""
        if entry.method != 8:
            return None
        body = entry.index
        if body is None:
            sidecar = self.entries.get(entry.name + index.SIDECAR)
            if sidecar is None:
                return None
            if max(sidecar.nbytes, sidecar.stored) > index.largest(entry.nbytes):
                return None  # no index of this entry, whatever it is
            body = self.read(sidecar)
        return index.decode(body, entry.stored, entry.nbytes)

    def extent(self, entry: Entry, *, locate: bool = True) -> Extent:
        """Where an entry's bytes are, and what they inflate to.

        Args:
            entry: one of ``entries``.
            locate: whether to look at its local header and its block index; else its offset is -1.

        Raises:
            NotSupported: its method is unknown.
            ArchiveError, ChecksumError: see :meth:`locate` and :meth:`blocks`.
        """
        blocks = None
        if locate:
            self.check_method(entry)
            blocks = self.blocks(entry)
        packed = Packed(entry.name, entry.method, entry.nbytes, entry.crc, blocks, bool(entry.flags & 2))
        return Extent(self.path, self.locate(entry) if locate else -1, entry.stored, packed, self.inode)

    def check_method(self, entry: Entry) -> None:
        """Raises :class:`NotSupported` for an entry of a method that tdgpu does not know."""
        if entry.method not in METHODS:
            known = ", ".join(f"{name} ({method})" for method, name in METHODS.items())
            what = f"The entry is compressed by method {entry.method}; known are {known}"
            raise self.refuse(entry.name, what, NotSupported)

    def _pread(self, name: str | None, at: int, nbytes: int) -> bytes:
        chunks: list[bytes] = []
        missing = nbytes
        while missing:
            try:
                chunk = os.pread(self._fd, min(missing, 1 << 30), at + nbytes - missing)
            except (OSError, OverflowError) as error:
                raise self.refuse(name, f"The archive cannot be read: {error}", LoadError) from error
            if not chunk:
                raise self.refuse(name, f"The archive is truncated: it ends {missing} bytes short of what it says")
            chunks.append(chunk)
            missing -= len(chunk)
        return b"".join(chunks)

    # --- errors ---

    def refuse(self, name: str | None, what: str, cause: type[TdgpuError] = ArchiveError) -> TdgpuError:
        """The error about the archive, or its entry ``name``."""
        return cause(f"{what}.", save=self.path, file=None if name is None else f"{self.path}::/{name}")

    def _no_archive(self) -> str:
        if self._pread(None, 0, min(self.size, 4)) == LOCAL_SIGNATURE:
            return "This zip archive is truncated or damaged: the directory at its end is missing."
        return "This is a file, but not a saved directory or an archive of one."

    def _no_meta(self) -> str:
        message = "This zip archive is no archive of a save: it has no entry meta.json."
        inner = next((name for name in self.entries if name.endswith("/meta.json")), None)
        if inner is not None:
            message += f" It has {inner!r}: pack what is in the directory, not the directory."
        return message
