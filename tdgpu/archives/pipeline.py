"""Compresses on several threads, and writes in order.

Work is handed out in small units, a block of a leaf or a small leaf, so that one large leaf keeps every thread as busy
as many small ones do. A bounded number of units is under way at a time: memory does not grow with what is packed.
"""

from __future__ import annotations

import collections
import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import IO, Any, TypeVar

import numpy as np

from tdgpu.archives.compression import Compression, crc32, crc32_combine, deflate_block, stream
from tdgpu.archives.sources import Source
from tdgpu.archives.writer import DEFLATE, STORED, ZipWriter
from tdgpu.errors import InvalidArgument, InvalidArgumentType, LoadError
from tdgpu.layout.archive.index import SIDECAR, encode
from tdgpu.layout.tree import Blocks

__all__ = ["Packer", "Workers", "thread_count"]

T = TypeVar("T")

# A compressed stream up to this size waits for its turn in memory, a longer one in a nameless file.
SPOOL_BYTES = 4 << 20


def thread_count(num_threads: object) -> int:
    """The threads that ``num_threads`` asks for; None is one for each core that this process may use.

    Raises:
        InvalidArgument, InvalidArgumentType: it is negative, or no whole number.
    """
    if num_threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if isinstance(num_threads, bool) or not isinstance(num_threads, int):
        raise InvalidArgumentType(f"num_threads is a whole number or None, not {num_threads!r}.")
    if num_threads < 0:
        raise InvalidArgument(f"num_threads cannot be negative, got {num_threads}.")
    return num_threads


class Workers:
    """Threads for a block of code; none, if there would be only one: then the caller's thread does the work."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "tdgpu-archive") if threads > 1 else None
        #: Units that may be under way at a time.
        self.window = 2 * threads if self._pool else 0
        #: Set when the rest of the work is not wanted any more.
        self.stop = threading.Event()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, work: Callable[..., T], *arguments: Any, **keywords: Any) -> Callable[[], T]:
        """Begins a unit of work; what is returned waits for its result."""
        if self._pool is not None:
            return self._pool.submit(work, *arguments, **keywords).result
        result = work(*arguments, **keywords)
        return lambda: result


class Packer:
    """Adds entries to an archive; :meth:`finish` completes it."""

    def __init__(
        self,
        archive: ZipWriter,
        compression: Compression,
        workers: Workers,
        path: str,
        tell: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """
        Args:
            archive: where entries go.
            compression: how leaves are compressed.
            workers: who compresses.
            path: the archive's path, for messages, and for what must wait on its disk.
            tell: is told how many bytes have been packed so far.
        """
        self._archive = archive
        self._compression = compression
        self._workers = workers
        self._path = path
        self._tell = tell
        self._done = 0
        # What is still to be written, in order. Each waits for its own result.
        self._steps: collections.deque[Callable[[], None]] = collections.deque()

    def add(self, name: str, source: Source) -> None:
        """Adds an entry: a leaf (``.memmap``) as the compression says, anything else stored.

        Entries are written in the order in which they are added, but later: an error may come with a later one.
        """
        compression = self._compression
        is_leaf = name.endswith(".memmap")
        if not is_leaf or compression.method == STORED:
            self._then(partial(self._write_stored, name, source, aligned=is_leaf))
        elif compression.in_blocks:
            assert compression.block_bytes is not None
            entry = _BlockEntry(name, source.nbytes, compression.block_bytes)
            rest = source.nbytes
            for block in source.blocks(compression.block_bytes) if rest else (memoryview(b""),):
                rest -= len(block)
                result = self._workers.submit(deflate_block, block, compression.level, last=rest == 0)
                self._then(partial(self._write_block, entry, len(block), result, last=rest == 0))
            self._expect(name, source.nbytes, source.nbytes - rest)
        elif self._workers.window and source.for_any_thread:
            spooled = self._workers.submit(self._spooled_stream, name, source)
            self._then(partial(self._write_spooled, name, source.nbytes, spooled))
        else:
            self._then(partial(self._write_stream, name, source))

    def finish(self) -> None:
        """Writes what is left, and the central directory."""
        while self._steps:
            self._steps.popleft()()
        self._archive.finish()

    def _then(self, step: Callable[[], None]) -> None:
        self._steps.append(step)
        while len(self._steps) > self._workers.window:
            self._steps.popleft()()

    def _moved(self, nbytes: int) -> None:
        self._done += nbytes
        self._tell(self._done)

    def _expect(self, name: str, wanted: int, found: int) -> None:
        if wanted != found:
            raise LoadError(
                "A leaf changed its size while it was packed.",
                save=self._path, file=f"{self._path}::/{name}", wanted=wanted, found=found,
            )  # fmt: skip

    # --- steps, on the caller's thread ---

    def _write_stored(self, name: str, source: Source, *, aligned: bool) -> None:
        self._archive.begin(name, STORED, aligned=aligned)
        crc = nbytes = 0
        for piece in source.pieces():
            crc = crc32(piece, crc)
            nbytes += len(piece)
            self._archive.write(piece)
            self._moved(len(piece))
        self._expect(name, source.nbytes, nbytes)
        self._archive.end(nbytes, crc)

    def _write_block(
        self, entry: _BlockEntry, nbytes: int, result: Callable[[], tuple[bytes, bytes, int]], *, last: bool
    ) -> None:
        body, tail, crc = result()
        if not entry.sizes:
            self._archive.begin(entry.name, DEFLATE)
        self._archive.write(body)
        self._archive.write(tail)
        entry.add(len(body) + len(tail), crc, nbytes)
        self._moved(nbytes)
        if last:
            index = entry.index()
            if not self._archive.end(entry.nbytes, entry.crc, index):
                self._archive.begin(entry.name + SIDECAR, STORED)
                self._archive.write(index)
                self._archive.end(len(index), crc32(index))

    def _write_spooled(self, name: str, nbytes: int, spooled: Callable[[], tuple[IO[bytes], int]]) -> None:
        compressed, crc = spooled()
        with compressed:
            self._archive.begin(name, self._compression.method)
            compressed.seek(0)
            while data := compressed.read(SPOOL_BYTES):
                self._archive.write(data)
        self._archive.end(nbytes, crc)
        self._moved(nbytes)

    def _write_stream(self, name: str, source: Source) -> None:
        self._archive.begin(name, self._compression.method)
        read = _Read(source, self._workers.stop, self._moved)
        for data in stream(read.pieces(), self._compression, self._workers.stop):
            self._archive.write(data)
        self._expect(name, source.nbytes, read.nbytes)
        self._archive.end(source.nbytes, read.crc)

    # --- on the workers' threads ---

    def _spooled_stream(self, name: str, source: Source) -> tuple[IO[bytes], int]:
        directory = os.path.dirname(os.path.realpath(self._path))
        with contextlib.ExitStack() as on_error:
            spool = on_error.enter_context(tempfile.SpooledTemporaryFile(SPOOL_BYTES, dir=directory))
            read = _Read(source, self._workers.stop)
            for data in stream(read.pieces(), self._compression, self._workers.stop):
                spool.write(data)
            self._expect(name, source.nbytes, read.nbytes)
            on_error.pop_all()
        return spool, read.crc


class _BlockEntry:
    """An entry that is written block by block."""

    def __init__(self, name: str, nbytes: int, block_bytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.block_bytes = block_bytes
        self.sizes: list[int] = []
        self.crcs: list[int] = []
        self.crc = 0

    def add(self, stored: int, crc: int, nbytes: int) -> None:
        self.sizes.append(stored)
        self.crcs.append(crc)
        self.crc = crc32_combine(self.crc, crc, nbytes)

    def index(self) -> bytes:
        """The block index. One block needs none: it is the entry."""
        if len(self.sizes) == 1:
            return b""
        return encode(Blocks(self.block_bytes, np.array(self.sizes, np.uint32), np.array(self.crcs, np.uint32)))


class _Read:
    """Passes a source's pieces on, and notes their CRC and length."""

    def __init__(
        self, source: Source, stop: threading.Event, tell: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        self._source = source
        self._stop = stop
        self._tell = tell
        self.crc = 0
        self.nbytes = 0

    def pieces(self) -> Iterator[memoryview]:
        for piece in self._source.pieces():
            if self._stop.is_set():
                return
            self.crc = crc32(piece, self.crc)
            self.nbytes += len(piece)
            yield piece
            self._tell(len(piece))
