"""The way back: a tensor's bytes in host memory, in order, in pieces of bounded size."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tdgpu.errors import CaptureError, TransferError
from tdgpu.options import get as get_options
from tdgpu.transfer import streams

__all__ = ["Fetcher", "copy_errors", "raw_bytes", "refuse_capture", "windows"]

BUFFERS = 4


def windows(tensor: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    """Parts of a tensor whose elements, one part after another, are the tensor's in row-major order.

    Args:
        tensor: any strided tensor.
        nbytes: the most that one part holds. (A part holds one element at least.)
    """
    size = tensor.numel() * tensor.dtype.itemsize
    if size <= nbytes or tensor.dim() == 0:
        if size:
            yield tensor
    elif tensor.is_contiguous():
        flat = tensor.view(-1)
        step = max(1, nbytes // tensor.dtype.itemsize)
        for first in range(0, len(flat), step):
            yield flat[first : first + step]
    else:
        row = size // len(tensor)
        step = max(1, nbytes // row)
        for first in range(0, len(tensor), step):
            if row <= nbytes:
                yield tensor[first : first + step]
            else:
                yield from windows(tensor[first], nbytes)


def raw_bytes(window: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as a tensor of bytes; a copy only if they do not lie one after another, or are lazily negated
    or conjugated."""
    return window.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


class Fetcher:
    """Reads tensors of one device through a few pinned buffers.

    Copies run on a side stream that has waited for what the current stream of the calling thread held when the fetcher
    was made. So the tensors have the values that they have for work issued on that stream now, and none of its later
    work is waited for.

    Attributes:
        pinned_bytes: pinned host memory in use.
    """

    def __init__(self, device: torch.device) -> None:
        """
        Raises:
            CaptureError: the current stream is capturing a graph.
            TransferError: the device refused.
        """
        self.device = device
        self._is_default = streams.is_default_accelerator(device)
        refuse_capture(device)
        memory, self._are_pinned = streams.host_buffer(device, get_options().ring_bytes, BUFFERS * 4096)
        self._buffers = memory.split(len(memory) // BUFFERS // 4096 * 4096)[:BUFFERS]
        self.pinned_bytes = len(memory) if self._are_pinned else 0
        self._stream: torch.Stream | None = None
        if self._is_default:
            with streams.current_device_kept(), copy_errors(self.device):
                before = torch.Event(device)
                before.record(streams.current_stream(device))
                self._stream = streams.side_stream(device)
                if self._stream is not None:
                    self._stream.wait_event(before)

    def pieces(self, tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
        """The bytes of tensors, one tensor after another, as :func:`windows` cuts them.

        Each view is valid until the next is asked for. While one is being used, the copies of the next few run.

        Raises:
            TransferError: a copy failed.
        """
        free = collections.deque(self._buffers)
        flying: collections.deque[tuple[torch.Tensor, torch.Tensor, torch.Event | None]] = collections.deque()
        limit = len(self._buffers[0])
        try:
            for tensor in tensors:
                for window in windows(tensor, limit):
                    if not free:
                        yield self._landed(*flying[0])
                        free.append(flying.popleft()[0])
                    flying.append(self._enqueue(window, free.popleft()))
            while flying:
                yield self._landed(*flying[0])
                flying.popleft()
        finally:
            # After an error, or if nobody wants the rest: copies still write to the buffers and read the tensors.
            self._drain()

    def _drain(self) -> None:
        if self._is_default:
            with copy_errors(self.device), streams.current_device_kept():
                last = torch.Event(self.device)
                last.record(self._stream or streams.current_stream(self.device))
                last.synchronize()

    def _enqueue(
        self, window: torch.Tensor, buffer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Event | None]:
        with copy_errors(self.device), streams.current_device_kept(), streams.on(self._stream, self.device):
            # Made on the side stream where it must be made, and held until the copy has passed.
            source = raw_bytes(window)
            buffer[: len(source)].copy_(source, non_blocking=self._are_pinned)
            copied = None
            if self._are_pinned:
                copied = torch.Event(self.device)
                copied.record(streams.current_stream(self.device))
        return buffer, source, copied

    def _landed(self, buffer: torch.Tensor, source: torch.Tensor, copied: torch.Event | None) -> memoryview:
        if copied is not None:
            with copy_errors(self.device):
                copied.synchronize()
        return buffer[: len(source)].numpy().data


@contextlib.contextmanager
def copy_errors(device: torch.device) -> Iterator[None]:
    """What torch says of a failed copy from a device, as a TransferError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, TransferError):
            raise
        raise TransferError(f"A copy from {device} failed: {error}") from error


def refuse_capture(device: torch.device) -> None:
    """Raises CaptureError if the device's current stream is capturing a graph."""
    module: Any = torch.get_device_module(device.type)
    is_capturing = getattr(module, "is_current_stream_capturing", None)
    if is_capturing is not None and is_capturing():
        raise CaptureError(f"The current stream of {device} is capturing a graph: copy from it outside of that.")
