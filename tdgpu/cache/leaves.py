"""Digests of leaves' bytes, as fast as the page cache gives them, and remembered where that is safe."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from tdgpu.cache import place
from tdgpu.cache.remembered import Remembered, identity, settled
from tdgpu.errors import LoadError
from tdgpu.layout.files import Where
from tdgpu.layout.tree import Extent, Key
from tdgpu.options import get as get_options
from tdgpu.transfer import host
from tdgpu.transfer.host import Want

__all__ = ["Source", "digests"]

#: A leaf is hashed in blocks, by several threads; its digest is that of the digests of its blocks.
BLOCK = 4 << 20
#: What is read at a time: it is still in the core's own cache when it is hashed.
WINDOW = 256 << 10


class Source(NamedTuple):
    """Some bytes to hash: of what an extent holds (inflated, if it is compressed), those from ``first`` on."""

    extent: Extent
    key: Key
    first: int
    nbytes: int


class _Block(NamedTuple):
    source: Source
    start: int
    nbytes: int


def digests(save: str, sources: Sequence[Source]) -> list[bytes]:
    """The digest of each source's bytes; the same whether they lie in a file or a compressed archive.

    Args:
        save: the save, for messages.
        sources: what to hash.

    Raises:
        LoadError: a file cannot be read, or is not the one that was looked at (an OSError).
        ChecksumError: an archive's entry does not inflate to what the archive promises.
    """
    memory = Remembered.load(place.directory())
    found: dict[int, bytes] = {}
    # First by what is known of the files; opening and syncing comes only for what must be read.
    now = {file: identity(file) for file in dict.fromkeys(source.extent.file for source in sources)}
    for number, source in enumerate(sources):
        known = memory.get(now[source.extent.file], _range(source))
        if known is not None:
            found[number] = known
    missing = {number: source for number, source in enumerate(sources) if number not in found}
    before = {file: settled(file) for file in dict.fromkeys(source.extent.file for source in missing.values())}
    hashed = _hash(save, missing)
    for number, digest in hashed.items():
        # By what the file was before: if it was written to meanwhile, it will never be that again.
        memory.add(before[sources[number].extent.file], _range(sources[number]), digest)
    memory.save()
    found |= hashed
    return [found[number] for number in range(len(sources))]


def _range(source: Source) -> tuple[int, ...]:
    packed = source.extent.packed
    method = (0, 0, 0) if packed is None else (packed.method, packed.nbytes, packed.crc if packed.method else 0)
    return (source.extent.offset, source.extent.nbytes, source.first, source.nbytes, *method)


def _hash(save: str, sources: dict[int, Source]) -> dict[int, bytes]:
    threads = get_options().threads
    found = _hash_plain(save, {n: source for n, source in sources.items() if not source.extent.is_compressed}, threads)
    return found | _inflated(save, {n: source for n, source in sources.items() if source.extent.is_compressed}, threads)


def _whole(nbytes: int, blocks: Iterable[bytes]) -> bytes:
    return xxhash.xxh3_128_digest(nbytes.to_bytes(8, "little") + b"".join(blocks))


# --- plain bytes ------------------------------------------------------------------------------------------------------


def _hash_plain(save: str, sources: dict[int, Source], threads: int) -> dict[int, bytes]:
    results: dict[int, list[bytes]] = {
        number: [b""] * max(1, -(-source.nbytes // BLOCK)) for number, source in sources.items()
    }
    jobs = ((number, i) for number in sources for i in range(len(results[number])))

    def hash_block(job: tuple[int, int], window: memoryview) -> None:
        number, i = job
        source = sources[number]
        block = _Block(source, i * BLOCK, min(BLOCK, source.nbytes - i * BLOCK))
        results[number][i] = _hash_block(save, block, window)

    _in_threads(jobs, hash_block, min(threads, sum(map(len, results.values()))))
    return {number: _whole(sources[number].nbytes, blocks) for number, blocks in results.items()}


def _hash_block(save: str, block: _Block, window: memoryview) -> bytes:
    source = block.source
    where = Where(save, source.key, source.extent.file)
    state = xxhash.xxh3_128()
    # O_NONBLOCK: a pipe may have taken the file's place, whose open would wait.
    try:
        fd = os.open(source.extent.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise where.error(LoadError, f"A leaf's file cannot be read: {error.strerror}.") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or source.extent.inode not in (0, status.st_ino):
            raise where.error(LoadError, "Another file has taken the place of this leaf's.")
        begin = source.extent.offset + source.first + block.start
        done = 0
        while done < block.nbytes:
            wanted = window[: min(len(window), block.nbytes - done)]
            count = os.preadv(fd, [wanted], begin + done)
            if count == 0:
                raise where.error(
                    LoadError, "The leaf's file has become shorter.", wanted=begin + block.nbytes, found=begin + done
                )
            state.update(wanted[:count])
            done += count
    except LoadError:
        raise
    except OSError as error:
        raise where.error(LoadError, f"A leaf's file cannot be read: {error.strerror}.") from error
    finally:
        os.close(fd)
    return state.digest()


def _in_threads(
    jobs: Iterator[tuple[int, int]], do: Callable[[tuple[int, int], memoryview], None], threads: int
) -> None:
    """Does the jobs, and raises the first error. Reading and hashing need no GIL, so the threads run side by side."""
    lock = threading.Lock()
    errors: list[BaseException] = []
    stopped = threading.Event()

    def work() -> None:
        window = memoryview(bytearray(WINDOW))
        try:
            while not stopped.is_set():
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                do(job, window)
        except BaseException as error:
            errors.append(error)
            stopped.set()

    if threads <= 1:
        work()
    else:
        workers = [threading.Thread(target=work, name="tdgpu-hash", daemon=True) for _ in range(threads)]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        except BaseException:
            stopped.set()
            for worker in workers:
                if worker.ident is not None:
                    worker.join()
            raise
    if errors:
        raise errors[0]


# --- compressed bytes -------------------------------------------------------------------------------------------------


class _InOrder:
    """Hashes the bytes of one source, whose parts come in any order."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._at = 0
        self._early: dict[int, bytes] = {}
        self._blocks: list[bytes] = []
        self._state = xxhash.xxh3_128()

    def add(self, first: int, data: memoryview) -> None:
        if first != self._at:
            self._early[first] = bytes(data)
            return
        self._take(data)
        while (early := self._early.pop(self._at, None)) is not None:
            self._take(memoryview(early))

    def _take(self, data: memoryview) -> None:
        while len(data):
            room = BLOCK - self._at % BLOCK
            self._state.update(data[:room])
            self._at += min(room, len(data))
            data = data[room:]
            if self._at % BLOCK == 0 or self._at == self._nbytes:
                self._blocks.append(self._state.digest())
                self._state = xxhash.xxh3_128()

    def digest(self) -> bytes:
        assert self._at == self._nbytes
        return _whole(self._nbytes, self._blocks or [xxhash.xxh3_128_digest(b"")])


def _inflated(save: str, sources: dict[int, Source], threads: int) -> dict[int, bytes]:
    if not sources:
        return {}
    wants = {n: Want(source.extent, source.key, source.first, source.nbytes, 0) for n, source in sources.items()}
    numbers = {id(want): number for number, want in wants.items()}
    states = {number: _InOrder(source.nbytes) for number, source in sources.items()}
    for want, first, data in host.stream(save, list(wants.values()), threads=threads, verify=False):
        states[numbers[id(want)]].add(first, data)
    return {number: state.digest() for number, state in states.items()}
