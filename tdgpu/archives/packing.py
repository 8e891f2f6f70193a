"""Writing archives: :func:`pack_memmap` from a directory, :func:`save` from memory or a device."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import is_tensor_collection

from tdgpu.archives.compression import Compression, resolve
from tdgpu.archives.pipeline import Packer, Workers, thread_count
from tdgpu.archives.sources import BytesSource, DeviceSource, FileSource, Source, TensorSource
from tdgpu.archives.target import LEFT_BEHIND, check_target, replacing
from tdgpu.archives.writer import ZipWriter
from tdgpu.errors import FormatError, InvalidArgument, InvalidArgumentType, LoadError, SaveExists, TdgpuError
from tdgpu.layout import reader
from tdgpu.layout.archive.index import SIDECAR
from tdgpu.layout.commit import TEMPORARY
from tdgpu.layout.describe import File, describe, in_order
from tdgpu.transfer.fetch import Fetcher
from tdgpu.transfer.progress import bar

__all__ = ["DEFAULT_BLOCK_BYTES", "SUFFIX", "pack_memmap", "save"]

#: What the name of an archive ends with.
SUFFIX = ".tdz"

DEFAULT_BLOCK_BYTES = 1 << 20


def pack_memmap(
    prefix: str | os.PathLike[str],
    archive_path: str | os.PathLike[str],
    *,
    compression: str | int | None = None,
    compresslevel: int | None = None,
    block_size: int | None = DEFAULT_BLOCK_BYTES,
    num_threads: int | None = None,
    progress: bool = False,
) -> Path:
    """Packs a saved directory into one archive, as ``tensordict.pack_memmap`` does, with all cores.

    The archive is an ordinary zip file whose entries are the directory's files. Leaves that are stored are aligned to
    64 bytes, so that a loader can map them. Leaves that are deflated consist of blocks: other tools see one ordinary
    stream, and tdgpu inflates the blocks of one leaf on many threads (see ``docs/archives.md``).

    It is written beside its place and takes it when it is complete: an error leaves what was there, and nothing else.

    Args:
        prefix: the directory. Everything in it is packed, but for the block indexes that unzipping may have left there.
        archive_path: the archive to write, outside of ``prefix``. An existing file is replaced, a symbolic link is
            followed, and the mode of what is replaced is kept.
        compression: of the leaves: None or ``"stored"``, ``"deflate"``, ``"bzip2"``, ``"lzma"``, or a constant of
            :mod:`zipfile`.
        compresslevel: -1 to 9 for deflate, 1 to 9 for bzip2; None is the method's default (6 and 9).
        block_size: bytes of a leaf that one block of deflate holds: a power of two from 4 KiB to 1 GiB. None writes one
            plain stream per leaf.
        num_threads: threads that compress; 0 or 1 is the calling thread alone, None one for each core that the process
            may use. Memory in use is a few blocks for each.
        progress: show a progress bar on stderr, if that is a terminal.

    Returns:
        The path of the archive.

    Raises:
        InvalidArgument: ``prefix`` is no saved directory, ``archive_path`` is in it or no regular file, an unknown
            method, level or block size (a ValueError).
        NotSupported: a method that cannot be written, such as zstd (a NotImplementedError).
        FormatError: an append to the save was killed, or is under way; or links in it form a loop (a RuntimeError).
        LoadError: a file changed its size meanwhile, or rows were appended (an OSError).
        OSError: a file cannot be read, or the archive not be written.

    Example:
        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = TensorDict(a=torch.zeros(1_000_000)).memmap(path + "/run")
        ...     archive = tdgpu.pack_memmap(path + "/run", path + "/run.tdz", compression="deflate")
        ...     print(archive.name, archive.stat().st_size < 100_000, TensorDict.load_memmap(archive)["a"].shape)
        run.tdz True torch.Size([1000000])
    """
    chosen = resolve(compression, compresslevel, block_size)
    threads = thread_count(num_threads)
    root, target = os.fspath(prefix), os.fspath(archive_path)
    if not os.path.isfile(os.path.join(root, "meta.json")):
        raise InvalidArgument("This is no saved directory: it has no meta.json.", save=root)
    files = _files_of(root)
    metadata = _metadata_of(files, root)
    counted = _counted(root)
    _check_outside(target, root, [path for path, _ in files.values()])
    with _packing(target, chosen, threads, sum(size for _, size in files.values()), show=progress) as packer:
        for name in sorted(files, key=in_order):
            path, size = files[name]
            packer.add(name, FileSource(path, min(size, counted.get(os.path.normpath(path), size)), root, size))
        packer.finish()
        if _metadata_of(files, root) != metadata:  # then what is packed may be of both states
            raise LoadError("Rows were appended to this save while it was packed: pack it again.", save=root)
    return Path(archive_path)


def save(
    td: Any,
    path: str | os.PathLike[str],
    *,
    compression: str | int | None = None,
    compresslevel: int | None = None,
    block_size: int | None = DEFAULT_BLOCK_BYTES,
    num_threads: int | None = None,
    progress: bool = False,
    existsok: bool = True,
    robust_key: bool | None = True,
) -> Path:
    """Saves a tensor collection as an archive, straight from where its leaves are: host memory or a device.

    What is written is what ``td.save("x.tdz")`` writes, without a directory in between. Leaves on the host are read in
    place. Those on a device pass through a few pinned buffers, on a side stream that waits for what the current stream
    holds now; so the values are those that the next kernel on the current stream would see. Host memory in use does not
    grow with the leaves. The call returns when the archive is complete; an error leaves what was there, and nothing
    else.

    A level whose format only its own class knows (a view of a tensordict, an HDF5 file, a third-party class) is written
    by that class into a temporary directory beside the archive first, that level alone.

    Args:
        td: a TensorDict, tensorclass, lazy stack, non-tensor data, ...
        path: the archive to write; its name ends with ``.tdz``. Missing directories are made.
        compression, compresslevel, block_size, num_threads, progress: as for :func:`pack_memmap`.
        existsok: whether an existing file is replaced.
        robust_key: whether keys are percent-encoded in file names (True, None), or used as they are (False).

    Returns:
        The path of the archive.

    Raises:
        InvalidArgumentType: ``td`` is no tensor collection (a TypeError).
        InvalidArgument: ``path`` does not end with ``.tdz`` or is no regular file, keys that lead to the same file, a
            field that cannot be pickled; an unknown method, level or block size (a ValueError).
        SaveExists: there is a file, and ``existsok=False`` (a RuntimeError).
        NotSupported: a leaf that has no plain bytes, a method that cannot be written (a NotImplementedError).
        CaptureError, TransferError: a leaf could not be copied from its device (a RuntimeError).
        OSError: the archive cannot be written.

    Example:
        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> td = TensorDict(obs=torch.arange(6.0).view(2, 3), batch_size=[2])
        >>> with tempfile.TemporaryDirectory() as path:
        ...     archive = tdgpu.save(td, path + "/run.tdz", compression="deflate")
        ...     print(TensorDict.load_memmap(archive)["obs"].sum().item())
        15.0
    """
    if not is_tensor_collection(td):
        raise InvalidArgumentType(f"Only a tensor collection can be saved, not a {type(td).__name__}.")
    chosen = resolve(compression, compresslevel, block_size)
    threads = thread_count(num_threads)
    target = os.fspath(path)
    if not target.endswith(SUFFIX):
        raise InvalidArgument(
            f"tdgpu.save writes archives, whose names end with {SUFFIX}. td.memmap(path) writes a directory.",
            file=target,
        )
    if not existsok and os.path.lexists(target):
        raise SaveExists("There is a file already, and existsok=False.", file=target)
    directory = os.path.dirname(check_target(target))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_directories(directory))

        def scratch() -> str:
            return stack.enter_context(tempfile.TemporaryDirectory(prefix=".tdz-", dir=directory))

        files = describe(td, target, robust_key=robust_key, scratch=scratch)
        fetchers: dict[torch.device, Fetcher] = {}
        sources = [_source(file, target, fetchers) for file in files]
        total = sum(source.nbytes for source in sources)
        with _packing(target, chosen, threads, total, show=progress) as packer:
            for file, source in zip(files, sources, strict=True):
                packer.add(file.name, source)
            packer.finish()
    return Path(path)


@contextlib.contextmanager
def _directories(path: str) -> Iterator[None]:
    """Makes a directory and those above it; those that it made are gone again if the block fails."""
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    try:
        for directory in reversed(missing):
            os.makedirs(directory, exist_ok=True)
        yield
    except BaseException:
        for directory in missing:
            with contextlib.suppress(OSError):  # somebody else may use it by now
                os.rmdir(directory)
        raise


@contextlib.contextmanager
def _packing(target: str, compression: Compression, threads: int, nbytes: int, *, show: bool) -> Iterator[Packer]:
    """A packer whose archive, once finished, takes its place when the block ends without an error."""
    with (
        replacing(target) as fd,
        Workers(threads) as workers,
        bar(f"writing {os.path.basename(target)}", nbytes, enabled=show) as tell,
    ):
        yield Packer(ZipWriter(fd), compression, workers, target, tell)


# --- a directory ------------------------------------------------------------------------------------------------------


def _files_of(root: str) -> dict[str, tuple[str, int]]:
    """The regular files below a directory, links followed: name in the archive -> path, size."""
    found: dict[str, tuple[str, int]] = {}
    directories: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [(root, "", ())]
    while directories:
        directory, name, ancestors = directories.pop()
        status = os.stat(directory)
        identity = (status.st_dev, status.st_ino)
        if identity in ancestors:
            raise FormatError("The symbolic links of this directory form a loop.", save=root, file=directory)
        with os.scandir(directory) as entries:
            for entry in entries:
                if LEFT_BEHIND.fullmatch(entry.name):
                    continue  # of a process that was killed while it unpacked here
                if entry.is_dir():
                    directories.append((entry.path, f"{name}{entry.name}/", (*ancestors, identity)))
                elif entry.is_file():
                    if entry.name == TEMPORARY:
                        raise _pending(root, entry.path)
                    found[name + entry.name] = entry.path, entry.stat().st_size
    # An index that other tools unzipped as a file: it is written anew, if at all.
    return {
        name: file
        for name, file in found.items()
        if not (name.endswith(SIDECAR) and name.removesuffix(SIDECAR) in found)
    }


def _counted(root: str) -> dict[str, int]:
    """Of the leaves' files, the bytes that the metadata counts. Behind them may lie what a killed append left, and in
    an archive sizes must agree."""
    try:
        leaves = reader.read(root, check=False).leaves()
    except TdgpuError:
        return {}  # it cannot be loaded here, for want of a class perhaps: it is packed as it lies
    return {leaf.extent.file: leaf.extent.nbytes for leaf in leaves if leaf.extent is not None}


def _pending(root: str, file: str) -> FormatError:
    return FormatError(
        "An append to this save was killed, or is under way: call recover_memmap first, or wait.", save=root, file=file
    )


def _metadata_of(files: dict[str, tuple[str, int]], root: str) -> dict[str, tuple[int, int]]:
    """What identifies the metadata of each level: an append replaces it, level by level."""
    found = {}
    for path, _ in files.values():
        directory, name = os.path.split(path)
        if name == "meta.json":
            temporary = os.path.join(directory, TEMPORARY)
            if os.path.lexists(temporary):
                raise _pending(root, temporary)
            status = os.stat(path)
            found[path] = status.st_ino, status.st_mtime_ns
    return found


def _check_outside(target: str, root: str, paths: Sequence[str]) -> None:
    """Raises InvalidArgument if the archive would lie in the directory, or is one of its files."""
    real, real_root = os.path.realpath(target), os.path.realpath(root)
    inside = os.path.commonpath([real, real_root]) == real_root
    if not inside and os.path.exists(real):
        status = os.stat(real)
        inside = any(os.path.samestat(os.stat(path), status) for path in paths)
    if inside:
        raise InvalidArgument("The archive must lie outside of the directory that is packed.", save=root, file=target)


# --- an object --------------------------------------------------------------------------------------------------------


def _source(file: File, save: str, fetchers: dict[torch.device, Fetcher]) -> Source:
    if isinstance(file.data, bytes):
        return BytesSource(file.data)
    if not isinstance(file.data, tuple):
        return FileSource(os.fspath(file.data), os.stat(file.data).st_size, save)
    device = file.data[0].device
    if device.type == "cpu":
        return TensorSource(file.data)
    if device not in fetchers:
        fetchers[device] = Fetcher(device)
    return DeviceSource(file.data, fetchers[device], save, file.key)
