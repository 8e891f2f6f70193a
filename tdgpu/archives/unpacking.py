"""Taking an archive apart: :func:`unpack_memmap`."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from tdgpu.archives.pipeline import thread_count
from tdgpu.archives.reading import contents, is_sidecar
from tdgpu.archives.target import hidden_name
from tdgpu.errors import InvalidArgument, TransferError
from tdgpu.layout.archive.central import Directory
from tdgpu.layout.archive.records import Entry
from tdgpu.transfer.progress import bar

__all__ = ["unpack_memmap"]


def unpack_memmap(
    archive_path: str | os.PathLike[str],
    prefix: str | os.PathLike[str],
    *,
    num_threads: int | None = None,
    progress: bool = False,
    verify: bool = True,
) -> Path:
    """Unpacks an archive into a directory, the inverse of :func:`pack_memmap`.

    The whole archive is checked before anything appears: its names, sizes and headers, the room on the disk, then every
    entry's size and CRC-32 as it is inflated into a hidden directory. Only when all is there is it moved to its place,
    ``meta.json`` files last. If ``prefix`` does not exist, it appears whole or not at all.

    As with ``unzip``, a file that exists is replaced (what is mapped from it stays as it was), and files that the
    archive does not have stay.

    Args:
        archive_path: the archive, written by tdgpu, tensordict, or any zip tool.
        prefix: the directory. It is made if it does not exist.
        num_threads: threads that inflate; 0 or 1 is one after the other, None one for each core that the process may
            use.
        progress: show a progress bar on stderr, if that is a terminal.
        verify: whether the CRC-32 of entries that are not compressed is checked, too. (An archive that was written to
            in place with ``mode="r+"`` has stale ones: see ``tensordict.refresh_archive_checksums``.)

    Returns:
        The path of the directory.

    Raises:
        SaveNotFound: there is no archive (a FileNotFoundError).
        InvalidArgument: it is no archive of a save; or ``prefix`` has a file where the archive has a directory, or the
            other way round, or is on two file systems (a ValueError).
        ArchiveError: the archive is damaged, or has a name that leads elsewhere (a zipfile.BadZipFile).
        ChecksumError: an entry is not what the archive promises (an OSError and a zipfile.BadZipFile).
        NotSupported: an entry of an unknown method (a NotImplementedError).
        TransferError: there is not enough room on the disk (a RuntimeError).
        OSError: a file cannot be written.

    Example:
        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path:
        ...     archive = tdgpu.save(TensorDict(a=torch.zeros(3)), path + "/run.tdz", compression="deflate")
        ...     directory = tdgpu.unpack_memmap(archive, path + "/run")
        ...     print(sorted(file.name for file in directory.iterdir()))
        ['a.memmap', 'meta.json']
    """
    threads = thread_count(num_threads)
    if not os.fspath(prefix):
        raise InvalidArgument("The directory to unpack into has an empty name: '.' is the working directory.")
    target = os.path.realpath(prefix)
    with Directory(archive_path) as archive:
        archive.locate_all()
        entries = [entry for entry in archive.entries.values() if not is_sidecar(archive, entry)]
        directories = _directories(archive)
        is_new = _check_target(target, entries, directories)
        _check_room(target, entries, archive.path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        # In the target, if it is there: what is mounted there is the file system that must have the files.
        with _hidden(os.path.dirname(target) if is_new else target) as hidden:
            for name in directories:
                os.makedirs(os.path.join(hidden, name), exist_ok=True)
            nbytes = sum(entry.nbytes for entry in entries)
            with (
                bar(f"unpacking {os.path.basename(archive.path)}", nbytes, enabled=progress) as tell,
                contextlib.closing(_Files(hidden)) as files,
            ):
                contents(archive, entries, files.write, threads=threads, verify=verify, tell=tell)
            if is_new:
                os.rename(hidden, target)
            else:
                _move(hidden, target, entries, directories)
    return Path(prefix)


def _directories(archive: Directory) -> list[str]:
    """The directories in an archive, with an entry of their own or not; parents first."""
    found: list[str] = []
    below = [""]
    while below:
        parent = below.pop()
        for name in archive.names.members(parent):
            path = f"{parent}/{name}" if parent else name
            if path not in archive.entries:
                found.append(path)
                below.append(path)
    return found


# --- before anything is written ---------------------------------------------------------------------------------------


def _check_target(target: str, entries: Sequence[Entry], directories: Sequence[str]) -> bool:
    """Looks for what is in the way. Returns whether there is nothing at the target yet."""
    if not os.path.lexists(target):
        return True
    device = os.stat(target).st_dev
    for path in ("", *directories):
        place = os.path.join(target, path) if path else target
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(place)
            if not stat.S_ISDIR(status.st_mode):
                raise InvalidArgument("A directory must go here, but this is none.", file=place)
            if status.st_dev != device:
                raise InvalidArgument("This lies on another file system than the rest.", file=place)
            if not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
    for entry in entries:
        place = os.path.join(target, entry.name)
        if os.path.isdir(place) and not os.path.islink(place):
            raise InvalidArgument("A file must go here, but this is a directory.", file=place)
    return False


def _check_room(target: str, entries: Sequence[Entry], archive: str) -> None:
    place = target
    while not os.path.exists(place):
        place = os.path.dirname(place)
    disk = os.statvfs(place)
    unit = disk.f_frsize
    wanted = sum(-(-entry.nbytes // unit) * unit for entry in entries)
    if disk.f_bavail * unit < wanted:
        raise TransferError(
            "There is not enough room on the disk for what the archive holds.",
            save=archive, file=target, wanted=wanted, found=disk.f_bavail * unit,
        )  # fmt: skip


# --- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hidden(parent: str) -> Iterator[str]:
    """A new directory, which is gone at the end if nobody has moved it."""
    path = os.path.join(parent, hidden_name())
    try:
        os.mkdir(path)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class _Files:
    """Writes new files, whose parts may come in any order."""

    def __init__(self, root: str) -> None:
        self._root = root
        # Of each file that is not complete: its descriptor, and the bytes that are still to come.
        self._open: dict[str, tuple[int, int]] = {}

    def write(self, entry: Entry, first: int, data: memoryview) -> None:
        path = os.path.join(self._root, entry.name)
        if entry.name not in self._open:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            self._open[entry.name] = os.open(path, flags, 0o666), entry.nbytes
        fd, missing = self._open[entry.name]
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(fd, data[done:], first + done)
        except OSError as error:
            error.filename = error.filename or path
            raise
        self._open[entry.name] = fd, missing - done
        if missing == done:
            del self._open[entry.name]
            os.close(fd)

    def close(self) -> None:
        for fd, _ in self._open.values():
            os.close(fd)
        self._open.clear()


def _move(hidden: str, target: str, entries: Sequence[Entry], directories: Sequence[str]) -> None:
    for name in directories:
        os.makedirs(os.path.join(target, name), exist_ok=True)
    # The root's meta.json is the very last: with it the new save is there.
    names = sorted((entry.name for entry in entries), key=lambda name: (name.endswith("meta.json"), -name.count("/")))
    for name in names:
        os.replace(os.path.join(hidden, name), os.path.join(target, name))
