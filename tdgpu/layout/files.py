"""Looking at small files, exactly and without surprises: no device or pipe is opened, nothing is read unbounded."""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple

from tdgpu.errors import FormatError, MissingLeafError, TdgpuError
from tdgpu.layout.tree import Key
from tdgpu.signals import Descriptor

__all__ = ["Where", "exists", "read_small", "size_of"]

# What says "there is no such file" rather than "it cannot be read".
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})


class Where(NamedTuple):
    """The place that an error is about: its save, key and file."""

    save: str
    key: Key
    file: str

    def error(
        self, cause: type[TdgpuError], message: str, *, wanted: int | None = None, found: int | None = None
    ) -> TdgpuError:
        """The error ``cause``, with this place in it."""
        return cause(message, save=self.save, key=self.key, file=self.file, wanted=wanted, found=found)

    def malformed(self, message: str) -> TdgpuError:
        """A :class:`FormatError`."""
        return self.error(FormatError, message)

    def from_os(self, error: OSError | ValueError) -> Exception | None:
        """What an ``open`` or ``stat`` failed with: None if there is no such file, else the exception to raise."""
        if not isinstance(error, OSError):
            return None  # a name that no file can have: it holds a NUL, or half of a surrogate pair
        if error.errno in _ABSENT:
            return None
        if error.errno == errno.ELOOP:
            return self.malformed("The symbolic links of this path form a loop.")
        return error  # it names the file already


def exists(path: str) -> bool:
    """``os.path.exists``, also for names that no file can have."""
    try:
        return os.path.exists(path)
    except ValueError:
        return False


def size_of(file: str, save: str, key: Key) -> tuple[int, int]:
    """Bytes in the regular file of a leaf, and its inode; -1 and 0 where there is no such file.

    Raises:
        MissingLeafError: there is something else than a regular file.
        FormatError: symbolic links that form a loop.
    """
    try:
        status = os.stat(file)
    except (OSError, ValueError) as error:
        failure = Where(save, key, file).from_os(error)
        if failure is None:
            return -1, 0
        raise failure from error
    if not stat.S_ISREG(status.st_mode):
        what = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise Where(save, key, file).error(MissingLeafError, f"A file is expected here, but this is {what}.")
    return status.st_size, status.st_ino


def read_small(
    where: Where, *, missing: type[TdgpuError], bound: int | None = None, exactly: int | None = None
) -> bytes:
    """The contents of the file ``where.file``; symbolic links are followed.

    Args:
        where: the file, and the save and key for the errors.
        missing: what to raise where there is no such regular file.
        bound: largest size that is read, in bytes.
        exactly: read that many bytes, no more.

    Raises:
        missing: there is no such regular file, or it is shorter than ``exactly``.
        FormatError: it is larger than ``bound``.
    """
    opened = Descriptor()
    try:
        try:
            # O_NONBLOCK: the open of a pipe that nobody writes to must not wait. It means nothing to a regular file.
            fd = opened.open(where.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise where.from_os(error) or where.error(missing, "There is no such file.") from None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise where.error(missing, "A file is expected here, but this is none.")
        wanted = status.st_size if exactly is None else exactly
        if bound is not None and wanted > bound:
            raise where.malformed(
                f"The file holds {wanted} bytes of metadata; at most {bound} are read (option max_metadata_bytes)."
            )
        chunks: list[bytes] = []
        found = 0
        while found < wanted:
            chunk = os.read(fd, min(wanted - found, 1 << 24))
            if not chunk:
                break
            chunks.append(chunk)
            found += len(chunk)
    finally:
        opened.close()
    if exactly is not None and found < exactly:
        raise where.error(missing, "The file is too short.", wanted=exactly, found=found)
    return b"".join(chunks)
