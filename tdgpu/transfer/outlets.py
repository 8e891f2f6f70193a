"""The way out: rows of tensors, staged in host memory, from which the writers take them.

One outlet per place that rows come from: the host, a device with gates (``csrc/outlet.h``), or another accelerator,
with torch's own copies. An outlet belongs to one save that grows at a time; one of each kind is kept for the next.
"""

from __future__ import annotations

import abc
import atexit
import collections
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tdgpu.errors import DeviceError, TransferError
from tdgpu.options import get as get_options
from tdgpu.transfer import registry, streams
from tdgpu.transfer.fetch import copy_errors, raw_bytes, refuse_capture, windows
from tdgpu.transfer.outgoing import NativeOutlet, Writers

__all__ = ["Outlet", "Staged", "close_idle", "give_back", "give_up", "is_plain", "take", "writers"]

CLOSE_MS = 2000


class Staged(NamedTuple):
    """Bytes that are, or will be, in a chunk of an outlet's ring."""

    address: int
    nbytes: int
    outlet: NativeOutlet
    chunk: int


def bytewise(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Elements of one byte as what they are: torch cannot copy all of them by their dtype."""
    dtype = tensors[0].dtype
    if dtype.itemsize > 1 or dtype in (torch.uint8, torch.int8, torch.bool):
        return tensors
    return [tensor.view(torch.uint8) for tensor in tensors]


def _settings() -> tuple[object, ...]:
    """The options that an outlet depends on."""
    settings = get_options()
    return settings.path, settings.ring_bytes, settings.chunk_bytes


def _packed(groups: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The bytes of all tensors, on their device: one or two kernels, however many tensors there are."""
    packed = [torch.stack(list(bytewise(group))).view(-1).view(torch.uint8) for group in groups]
    return packed[0] if len(packed) == 1 else torch.cat(packed)


class Outlet(abc.ABC):
    """A ring for rows. Between ``begin`` and ``end`` tensors are staged; at ``end`` they may be overwritten.

    Chunks that no store has been posted for must take at most ``budget`` bytes of the ring (each as many as
    :meth:`cost` says): then no chunk waits for the place of one that nobody writes yet.
    """

    def __init__(self, device: torch.device, native: NativeOutlet) -> None:
        self.device = device
        self.native = native
        self.first = native.last_chunk()
        self.made_for = _settings()
        self.budget = native.ring_bytes // 4
        self.largest = max(4096, min(get_options().chunk_bytes, self.budget) // 4096 * 4096)
        # Tensors that copies still read, with the chunk of the last one.
        self._held: collections.deque[tuple[int, object]] = collections.deque()

    @staticmethod
    def cost(nbytes: int) -> int:
        """Bytes of the ring that a chunk takes."""
        return -(-nbytes // 4096) * 4096

    def begin(self) -> None:  # noqa: B027 - nothing to do on the host
        """Tensors have from now on the values that the device's current stream will have given them."""

    @abc.abstractmethod
    def pack(self, groups: Sequence[Sequence[torch.Tensor]], nbytes: int) -> Staged:
        """Stages tensors in one chunk, one behind the other, each in row-major order.

        Args:
            groups: tensors of one shape and dtype each.
            nbytes: of all of them; at most ``largest``.
        """

    @abc.abstractmethod
    def stage(self, window: torch.Tensor, nbytes: int) -> Staged:
        """Stages one tensor of at most ``largest`` bytes in a chunk of its own."""

    def windows(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Parts of a tensor that fit a chunk, in row-major order."""
        return windows(tensor, self.largest)

    def end(self) -> None:  # noqa: B027 - nothing to do on the host
        """What is queued on the device's current stream from now on may overwrite the tensors."""

    def check(self) -> None:
        """Raises DeviceError if the device has broken down and copies will not end."""
        self.native.check()

    def take_back(self, chunk: int) -> None:
        """Chunks after this one will not be written. Copies to them may go on; what they read is held."""
        self.native.discard(chunk)

    def is_at_rest(self) -> bool:
        """Whether nothing is being copied, waiting for a while."""
        at_rest = not self._held or self.native.wait_copied(self._held[-1][0], CLOSE_MS)
        if at_rest:
            self._held.clear()
        return at_rest

    def release(self) -> None:
        """Lets go of the tensors whose copies are over."""
        while self._held and self.native.wait_copied(self._held[0][0], 0):
            self._held.popleft()

    def _place(self, nbytes: int) -> tuple[int, int]:
        """A place that the caller may write to: the chunk's number and the address."""
        chunk, address = self.native.claim(nbytes)
        while not self.native.wait_free(chunk):
            pass
        return chunk, address


class HostOutlet(Outlet):
    """Rows on the host: copied by the calling thread."""

    def __init__(self, ring_bytes: int) -> None:
        self._ring = np.empty(ring_bytes, np.uint8)  # touched only as far as it is used
        address = self._ring.ctypes.data
        skipped = -address % 64  # so that every dtype is aligned in every chunk
        super().__init__(torch.device("cpu"), NativeOutlet(address + skipped, ring_bytes - skipped, self._ring))
        self._base = address

    def pack(self, groups: Sequence[Sequence[torch.Tensor]], nbytes: int) -> Staged:
        chunk, address = self._place(nbytes)
        first = address - self._base
        for group in groups:
            tensors = bytewise(group)
            like = tensors[0]
            size = len(tensors) * like.numel() * like.dtype.itemsize
            place = torch.from_numpy(self._ring[first : first + size]).view(like.dtype)
            torch.stack(list(tensors), out=place.view(len(tensors), *like.shape))
            first += size
        self.native.set_copied(chunk)
        return Staged(address, nbytes, self.native, chunk)

    def stage(self, window: torch.Tensor, nbytes: int) -> Staged:
        chunk, address = self._place(nbytes)
        first = address - self._base
        (window,) = bytewise([window])
        place = torch.from_numpy(self._ring[first : first + nbytes]).view(window.dtype).view(window.shape)
        place.copy_(window)
        self.native.set_copied(chunk)
        return Staged(address, nbytes, self.native, chunk)

    def put(self, data: memoryview) -> Staged:
        """Stages bytes."""
        chunk, address = self._place(len(data))
        first = address - self._base
        self._ring[first : first + len(data)] = np.frombuffer(data, np.uint8)
        self.native.set_copied(chunk)
        return Staged(address, len(data), self.native, chunk)


class GatedOutlet(Outlet):
    """Rows on a device with a driver table: copied by the outlet's own stream, which waits for gates."""

    def __init__(self, device: torch.device, native: NativeOutlet) -> None:
        super().__init__(device, native)
        self._stream = 0
        self._follows = False

    def begin(self) -> None:
        self.release()
        self._stream = streams.handle(streams.current_stream(self.device))
        self._follows = False

    def pack(self, groups: Sequence[Sequence[torch.Tensor]], nbytes: int) -> Staged:
        return self._copy(_packed(groups), groups)

    def stage(self, window: torch.Tensor, nbytes: int) -> Staged:
        if is_plain(window):
            return self._copy(window, window, is_new=not self._follows)
        window = raw_bytes(bytewise([window])[0])
        staged = self._copy(window, window)
        # Packed for the copy: once this is queued, the memory may be used for the next one.
        self.native.order(self._stream)
        return staged

    def _copy(self, source: torch.Tensor, keep: object, *, is_new: bool = True) -> Staged:
        """Enqueues the copy of contiguous memory, and holds it and ``keep`` until the copy is over.

        ``is_new``: it is written by what the current stream has just been given.
        """
        if is_new:
            self.native.follow(self._stream)
            self._follows = True
        nbytes = source.numel() * source.dtype.itemsize
        chunk, address = self.native.claim(nbytes)
        self._held.append((chunk, (source, keep)))
        self.native.copy(chunk, address, source.data_ptr(), nbytes)
        return Staged(address, nbytes, self.native, chunk)

    def end(self) -> None:
        self.native.order(self._stream)

    def take_back(self, chunk: int) -> None:
        with contextlib.suppress(TransferError):  # a device that refuses this, too, is found out at the next call
            self.native.settle()
        super().take_back(chunk)


class TorchOutlet(Outlet):
    """Rows on any accelerator: torch copies them on a side stream; the host waits for the copies at the end.

    For where no gates can be had: another accelerator than CUDA, an old driver, no pinned memory.
    """

    def __init__(self, device: torch.device, ring_bytes: int) -> None:
        self._memory, self.is_pinned = streams.host_buffer(device, ring_bytes, 64 << 10)
        super().__init__(device, NativeOutlet(self._memory.data_ptr(), len(self._memory), self._memory))
        self._side = streams.side_stream(device)
        self._copies: collections.deque[tuple[int, torch.Event, torch.Tensor]] = collections.deque()

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory of the ring."""
        return len(self._memory) if self.is_pinned else 0

    def begin(self) -> None:
        refuse_capture(self.device)
        with copy_errors(self.device), streams.current_device_kept():
            before = torch.Event(self.device)
            before.record(streams.current_stream(self.device))
            if self._side is not None:
                self._side.wait_event(before)

    def pack(self, groups: Sequence[Sequence[torch.Tensor]], nbytes: int) -> Staged:
        return self._copy(lambda: _packed(groups), nbytes)

    def stage(self, window: torch.Tensor, nbytes: int) -> Staged:
        return self._copy(lambda: raw_bytes(bytewise([window])[0]), nbytes)

    def _copy(self, source: Callable[[], torch.Tensor], nbytes: int) -> Staged:
        chunk, address = self.native.claim(nbytes)
        while not self.native.wait_free(chunk, 1):
            with copy_errors(self.device):
                self._retire()
        first = address - self._memory.data_ptr()
        with copy_errors(self.device), streams.current_device_kept(), streams.on(self._side, self.device):
            made = source()
            self._memory[first : first + nbytes].copy_(made, non_blocking=self.is_pinned)
            copied = torch.Event(self.device)
            copied.record(streams.current_stream(self.device))
        self._copies.append((chunk, copied, made))
        return Staged(address, nbytes, self.native, chunk)

    def _retire(self, *, wait: bool = False) -> None:
        while self._copies and (wait or self._copies[0][1].query()):
            chunk, copied, _ = self._copies[0]
            if wait:
                copied.synchronize()
            self.native.set_copied(chunk)
            self._copies.popleft()

    def end(self) -> None:
        with copy_errors(self.device):
            self._retire(wait=True)

    def take_back(self, chunk: int) -> None:
        try:
            self.end()
        except TransferError:
            self._copies.clear()  # the device is broken: nothing moves any more
        super().take_back(chunk)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its bytes in row-major order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


# --- which there are --------------------------------------------------------------------------------------------------


class _Pool:
    """Outlets that wait for their next save, and the writers of this process.

    Saves may be closed by the garbage collector, in any thread, also while a lock is held: nothing here takes one.
    """

    def __init__(self) -> None:
        self.idle: dict[torch.device, collections.deque[Outlet]] = collections.defaultdict(collections.deque)
        self.writers: dict[int, Writers] = {}  # at most one
        self.process = os.getpid()


_pool = _Pool()


def writers() -> Writers:
    """The writer threads of this process, as many as the option ``threads`` said when they were first needed."""
    if _pool.writers:
        return _pool.writers[0]
    made = Writers(get_options().threads)
    found = _pool.writers.setdefault(0, made)
    if found is not made:  # another thread was faster
        made.stop()
    return found


def take(device: torch.device) -> Outlet:
    """An outlet for rows of a device (with its index, unless it is the host's).

    Raises:
        ForkError, DeviceError: as :func:`tdgpu.transfer.registry.chosen_driver`; the device cannot be used.
    """
    settings = get_options()
    try:
        kept = _pool.idle[device].pop()
    except IndexError:
        pass
    else:
        if kept.made_for == _settings():
            kept.first = kept.native.last_chunk()
            return kept
        kept.native.close(CLOSE_MS)
    if device.type == "cpu":
        return HostOutlet(settings.ring_bytes)
    path = registry.chosen_driver(device)
    streams.check_usable(device)
    if path is not None and settings.path != "host":
        try:
            native = NativeOutlet((registry.driver(path), device.index), settings.ring_bytes)
        except DeviceError as error:
            if settings.path == "gated":
                raise DeviceError(f"TDGPU_PATH=gated, but {device} cannot: {error.message}") from error
        except TransferError as error:  # no pinned memory
            if settings.path == "gated":
                raise DeviceError(f"TDGPU_PATH=gated, but {device} cannot: {error.message}") from error
        else:
            registry.warn_about_pinned(native.pinned_bytes, settings.ring_bytes, device)
            return GatedOutlet(device, native)
    other = TorchOutlet(device, settings.ring_bytes)
    registry.warn_about_pinned(other.pinned_bytes, settings.ring_bytes, device)
    return other


def give_back(outlet: Outlet) -> None:
    """Keeps an outlet for the next save, if none of its kind is kept. Nothing of it may be under way."""
    idle = _pool.idle[outlet.device]
    if idle or os.getpid() != _pool.process:
        outlet.native.close(CLOSE_MS)
    else:
        idle.append(outlet)


def give_up(outlet: Outlet) -> None:
    """Ends an outlet after an error. All stores of its chunks are over."""
    with contextlib.suppress(TransferError):
        outlet.native.close(CLOSE_MS)


def close_idle() -> None:
    """Ends the outlets that nobody uses; the next save that grows makes new ones."""
    for idle in list(_pool.idle.values()):
        while idle:
            idle.pop().native.close(CLOSE_MS)


def _close_all() -> None:
    close_idle()
    while _pool.writers:
        _pool.writers.popitem()[1].stop()


def _after_fork_in_child() -> None:
    # The threads do not exist here. Nothing of theirs is touched or freed.
    global _pool
    _kept.append(_pool)
    _pool = _Pool()


_kept: list[_Pool] = []

os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_close_all)
