"""Reads and checks whole entries of an archive, in windows of bounded size."""

from __future__ import annotations

import lzma
import os
import threading
import zipfile
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from tdgpu.archives.compression import crc32
from tdgpu.archives.pipeline import Workers
from tdgpu.errors import ChecksumError, LoadError, NotSupported, TdgpuError
from tdgpu.layout.archive.central import Directory
from tdgpu.layout.archive.index import SIDECAR
from tdgpu.layout.archive.records import Entry
from tdgpu.layout.tree import Extent
from tdgpu.transfer import host, runs

__all__ = ["WINDOW_BYTES", "contents", "is_sidecar"]

# What is read at a time, of one large entry or of many small ones.
WINDOW_BYTES = 32 << 20
_PIECE_BYTES = 1 << 20
_STORED, _LZMA = 0, 14

# Takes the entry, the first byte and the bytes.
Sink = Callable[[Entry, int, memoryview], None]


def is_sidecar(directory: Directory, entry: Entry) -> bool:
    """Whether an entry is the block index of another one."""
    return entry.name.endswith(SIDECAR) and entry.name.removesuffix(SIDECAR) in directory.entries


def contents(
    directory: Directory,
    entries: Sequence[Entry],
    sink: Sink,
    *,
    threads: int,
    verify: bool,
    tell: Callable[[int], None],
) -> None:
    """Reads entries, and gives their bytes to `sink`, each entry's in order.

    An entry without bytes is given once, empty. Size and CRC-32 of everything that is inflated are checked. Those of an
    entry that is larger than a window are known only when its last bytes have been given.

    Args:
        directory: the archive.
        entries: the entries.
        sink: gets the bytes, valid during the call. Different entries may come at the same time.
        threads: threads that inflate.
        verify: whether the CRC-32 of stored entries is checked, too.
        tell: is told the bytes that are done.

    Raises:
        ChecksumError: an entry is not what the archive promises.
        LoadError: the archive cannot be read.
    """
    progress = _Progress(tell)
    windows = _Windows(directory, sink, threads, verify, progress)
    streams: list[Entry] = []
    for entry in entries:
        extent = directory.extent(entry)
        if entry.nbytes > WINDOW_BYTES and not _has_parts(extent):
            streams.append(entry)
        else:
            windows.add(entry, extent)
    windows.read()
    # What can only be inflated from its beginning to its end: a thread for each.
    with Workers(threads) as workers:
        for wait in [workers.submit(_stream, directory, entry, sink, workers, progress) for entry in streams]:
            wait()


class _Progress:
    def __init__(self, tell: Callable[[int], None]) -> None:
        self.tell = tell
        self._done = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self.tell(self._done)

    def ahead(self, nbytes: int) -> None:
        """Tells of bytes that will be added when all of their window are done."""
        self.tell(self._done + nbytes)


class _Windows:
    """Fills a window with whole small entries and parts of large ones, on native threads."""

    def __init__(self, directory: Directory, sink: Sink, threads: int, verify: bool, progress: _Progress) -> None:
        self._directory = directory
        self._sink = sink
        self._threads = threads
        self._verify = verify
        self._progress = progress
        self._window = np.empty(WINDOW_BYTES, np.uint8)
        self._filled = 0
        self._parts: list[tuple[Entry, host.Want]] = []
        self._crc = 0

    def add(self, entry: Entry, extent: Extent) -> None:
        if self._filled + entry.nbytes > WINDOW_BYTES:
            self.read()
        if entry.nbytes <= WINDOW_BYTES:
            self._add(entry, extent, 0, entry.nbytes)
            return
        for first in range(0, entry.nbytes, WINDOW_BYTES):
            self.read()
            self._add(entry, extent, first, min(WINDOW_BYTES, entry.nbytes - first))

    def _add(self, entry: Entry, extent: Extent, first: int, nbytes: int) -> None:
        address = self._window.ctypes.data + self._filled
        self._parts.append((entry, host.Want(extent, (), first, nbytes, address)))
        self._filled += nbytes

    def read(self) -> None:
        """Reads what was added, and gives it to the sink."""
        wants = [want for _, want in self._parts]
        try:
            host.read(self._directory.path, wants, threads=self._threads, tell=self._progress.ahead)
        except TdgpuError as error:
            error.key = None  # entries have none; the message names the entry
            raise
        at = 0
        for entry, want in self._parts:
            data = self._window[at : at + want.nbytes].data
            at += want.nbytes
            if self._verify and entry.method == _STORED:
                # Here, and not by the native threads: they check whole entries, and this may be a part of one.
                self._crc = crc32(data, self._crc if want.first else 0)
                if want.first + want.nbytes == entry.nbytes and self._crc != entry.crc:
                    what = f"The entry is damaged: its bytes have the CRC-32 {self._crc:#010x}, not {entry.crc:#010x}"
                    raise self._directory.refuse(entry.name, what, ChecksumError)
            self._sink(entry, want.first, data)
        self._progress.add(self._filled)
        self._parts.clear()
        self._filled = 0


def _has_parts(extent: Extent) -> bool:
    """Whether a window of an entry can be read without reading much more than that."""
    packed = extent.packed
    assert packed is not None
    if packed.method == _STORED:
        return True
    blocks = packed.blocks
    return blocks is not None and blocks.nbytes <= WINDOW_BYTES // 8 and runs.belongs(blocks, packed)


def _stream(directory: Directory, entry: Entry, sink: Sink, workers: Workers, progress: _Progress) -> None:
    """Inflates one entry from its beginning to its end, as the standard library does."""
    first = 0
    try:
        with open(directory.path, "rb") as file, zipfile.ZipFile(file) as archive:
            if os.fstat(file.fileno()).st_ino != directory.inode:
                raise directory.refuse(entry.name, "The archive was replaced while it was read", LoadError)
            # By its place: zipfile may spell the name in another way.
            [info] = [info for info in archive.infolist() if info.header_offset == entry.header]
            with archive.open(info) as payload:
                while (piece := payload.read(_PIECE_BYTES)) and not workers.stop.is_set():
                    sink(entry, first, memoryview(piece))
                    first += len(piece)
                    progress.add(len(piece))
    except NotImplementedError as error:
        raise directory.refuse(
            entry.name, f"This Python cannot inflate an entry of this size: {error}", NotSupported
        ) from error
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        if isinstance(error, OSError) and (error.errno is not None or isinstance(error, TdgpuError)):
            raise  # of the file system, not of bzip2, which raises this class, too
        raise directory.refuse(entry.name, f"The entry is damaged: {error}", ChecksumError) from error
    if first != entry.nbytes and not workers.stop.is_set():
        what = f"The entry is damaged: it inflates to {first} bytes; {entry.nbytes} were packed"
        raise directory.refuse(entry.name, what, ChecksumError)
