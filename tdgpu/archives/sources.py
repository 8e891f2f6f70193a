"""Where the bytes of an entry come from: memory, a file, a tensor on the host, a tensor on a device."""

from __future__ import annotations

import abc
import os
import stat
from collections.abc import Callable, Iterator, Sequence

import torch

from tdgpu.errors import LoadError, TransferError
from tdgpu.layout.tree import Key
from tdgpu.transfer.fetch import Fetcher, raw_bytes, windows

__all__ = ["BytesSource", "DeviceSource", "FileSource", "Source", "TensorSource"]

# What is read, or copied, at a time.
PIECE_BYTES = 4 << 20


class Source(abc.ABC):
    """The contents of an entry, which can be read once, from beginning to end.

    Attributes:
        nbytes: how many bytes there are.
        for_any_thread: whether a thread other than the caller's may read them.
    """

    for_any_thread = True

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @abc.abstractmethod
    def pieces(self) -> Iterator[memoryview]:
        """All bytes, in order; each view is valid until the next is asked for."""

    def blocks(self, nbytes: int) -> Iterator[memoryview]:
        """All bytes in views of exactly ``nbytes`` (the last may be shorter), which stay valid while they are held."""
        size = max(1, min(nbytes, self.nbytes))
        buffer, filled = bytearray(size), 0
        for piece in self.pieces():
            while piece:
                part = piece[: size - filled]
                buffer[filled : filled + len(part)] = part
                filled, piece = filled + len(part), piece[len(part) :]
                if filled == size:
                    yield memoryview(buffer)
                    buffer, filled = bytearray(size), 0
        if filled:
            yield memoryview(buffer)[:filled]


class BytesSource(Source):
    """Bytes that are there already."""

    def __init__(self, data: bytes) -> None:
        super().__init__(len(data))
        self._data = data

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self._data)


class FileSource(Source):
    """The first ``nbytes`` bytes of a file, which must keep the ``size`` that it had when it was listed."""

    def __init__(self, path: str, nbytes: int, save: str, size: int | None = None) -> None:
        super().__init__(nbytes)
        self._size = nbytes if size is None else size
        self._path = path
        self._save = save

    def pieces(self) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(PIECE_BYTES, self.nbytes)))
        return self._read(PIECE_BYTES, lambda nbytes: buffer[:nbytes])

    def blocks(self, nbytes: int) -> Iterator[memoryview]:
        return self._read(nbytes, lambda nbytes: memoryview(bytearray(nbytes)))

    def _read(self, nbytes: int, make_buffer: Callable[[int], memoryview]) -> Iterator[memoryview]:
        # O_NONBLOCK: if a pipe has taken the file's place, the open must not wait for its writer.
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise self._changed(0)
            first = 0
            while first < self.nbytes:
                buffer = make_buffer(min(nbytes, self.nbytes - first))
                filled = 0
                while filled < len(buffer):
                    count = os.preadv(fd, [buffer[filled:]], first + filled)
                    if not count:
                        raise self._changed(first + filled)
                    filled += count
                yield buffer
                first += len(buffer)
            size = os.fstat(fd).st_size
            if size != self._size:
                raise self._changed(size)
        finally:
            os.close(fd)

    def _changed(self, found: int) -> LoadError:
        return LoadError(
            "The file changed its size while it was packed.",
            save=self._save, file=self._path, wanted=self._size, found=found,
        )  # fmt: skip


class TensorSource(Source):
    """Tensors in host memory, one after another.

    What is given out is a copy: another thread may write to a leaf meanwhile, and the CRC-32 must be that of the bytes
    that are compressed or written after it was taken.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors))
        self._tensors = tensors

    def pieces(self) -> Iterator[memoryview]:
        buffer: torch.Tensor | None = None
        for tensor in self._tensors:
            for window in windows(tensor, PIECE_BYTES):
                # One buffer for all: new ones of this size would pile up in the allocator of each worker's thread.
                if buffer is None:
                    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
                raw = buffer[: window.numel() * window.itemsize]
                raw.view(window.dtype).view(window.shape).copy_(window)
                yield raw.numpy().data

    def blocks(self, nbytes: int) -> Iterator[memoryview]:
        if len(self._tensors) == 1 and _lies_plainly(self._tensors[0]):
            flat = raw_bytes(self._tensors[0]).numpy().data
            return (memoryview(bytearray(flat[first : first + nbytes])) for first in range(0, len(flat), nbytes))
        return super().blocks(nbytes)


def _lies_plainly(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class DeviceSource(Source):
    """Tensors on a device, one after another."""

    # The current stream belongs to a thread, and the fetcher's buffers to one reader at a time.
    for_any_thread = False

    def __init__(self, tensors: Sequence[torch.Tensor], fetcher: Fetcher, save: str, key: Key) -> None:
        super().__init__(sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors))
        self._tensors = tensors
        self._fetcher = fetcher
        self._save = save
        self._key = key

    def pieces(self) -> Iterator[memoryview]:
        try:
            yield from self._fetcher.pieces(self._tensors)
        except TransferError as error:
            error.save, error.key = self._save, self._key
            raise
