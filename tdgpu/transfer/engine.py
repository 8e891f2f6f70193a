"""One engine per device with a driver table: it streams chunks through the ring on the gated copy stream."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tdgpu.errors import DeviceError, TransferError
from tdgpu.layout.tree import Leaf
from tdgpu.options import get as get_options
from tdgpu.signals import finalizer
from tdgpu.transfer import library, native, streams
from tdgpu.transfer.base import Flight, Transfer
from tdgpu.transfer.plan import LoadPlan, make_plan
from tdgpu.transfer.watcher import Watcher


class DeviceEngine:
    """A device's native engine, and the lock for those who enqueue."""

    def __init__(self, driver: library.Driver, device: torch.device) -> None:
        settings = get_options()
        self.device = device
        self.settings = settings
        self.native = native.Engine(driver, device.index, settings.ring_bytes, settings.threads)
        self.watcher = Watcher(device)
        self._enqueuing = threading.Lock()
        self._enqueuing_thread: int | None = None
        self._kept: list[tuple[LoadPlan, DeviceFlight]] = []

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring."""
        return self.native.ring_bytes

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory that copies are staged in."""
        return self.native.pinned_bytes

    def road(self) -> str:
        """``"gated"`` or ``"host"``, as the options and the device allow.

        Raises:
            DeviceError: the options insist on what the device cannot do.
        """
        wanted = get_options().path
        if wanted == "gated" and self.native.why_host:
            raise DeviceError(f"TDGPU_PATH=gated, but {self.device} cannot: {self.native.why_host}.")
        return "host" if wanted == "host" or self.native.why_host else "gated"

    def make_plan(self, leaves: Sequence[Leaf], *, early: bool, verify: bool, most_threads: int) -> LoadPlan:
        """Allocates the destinations of leaves, and cuts them into chunks."""
        settings = get_options()
        return make_plan(
            leaves,
            self.device,
            chunk_bytes=settings.chunk_bytes,
            ring_bytes=self.native.ring_bytes,
            threads=self.native.threads,
            early=early,
            direct=settings.direct_io,
            verify=verify,
            most_threads=most_threads,
        )

    def start(self, save: str, plan: Callable[[], LoadPlan], *, early: bool, timed: bool = False) -> DeviceTransfer:
        """Enqueues everything, and returns while the bytes are still on their way.

        Args:
            save: the save's path, for messages.
            plan: allocates the destinations, on the current stream.
            early: here, the current stream waits for nothing in any case.
            timed: whether the copies are timed, which the flight's ``copy_times`` tells.
        """
        stream = streams.current_stream(self.device)
        road = self.road()
        if self._enqueuing_thread == threading.get_ident():
            raise DeviceError(
                f"A load to {self.device} was started while this thread was starting another one (from a signal"
                " handler or a finalizer)."
            )
        with self._enqueuing:
            self._enqueuing_thread = threading.get_ident()
            try:
                while not self.native.take_road(road):
                    pass
                made = plan()
                flight = DeviceFlight(save, made, road, native.Transfer(self.native))
                return self._enqueue(made, flight, stream, timed)
            finally:
                self._enqueuing_thread = None

    def _enqueue(self, plan: LoadPlan, flight: DeviceFlight, stream: torch.Stream, timed: bool) -> DeviceTransfer:
        try:
            flight.native.begin(plan.work, plan.events, streams.handle(stream))
            if timed:
                flight.copy_times = flight.native.time_copies()
            while not flight.native.pump():
                pass
            self.watcher.add(flight)
            return DeviceTransfer(plan, flight, self, stream)
        except BaseException as error:
            # The driver failed, or Ctrl-C came. Nothing may write to the destinations any more when they go.
            if flight.native.has_begun:
                self._take_back(plan, flight)
                failure = flight.failure()
                if isinstance(error, Exception) and failure is not None:
                    raise failure from error
            raise

    def _take_back(self, plan: LoadPlan, flight: DeviceFlight) -> None:
        try:
            flight.cancel()
            while not flight.native.abort() or not flight.wait():
                pass
        except BaseException:
            # Interrupted again, or the driver refuses this, too. Copies may still run, so their memory must stay.
            self._kept.append((plan, flight))
            raise

    def close(self, milliseconds: int) -> None:
        """Ends the threads and frees the ring. The engine is unusable afterwards."""
        self.native.close(milliseconds)
        self.watcher.stop()


class DeviceFlight(Flight):
    """A load that the native engine carries."""

    def __init__(self, save: str, plan: LoadPlan, path: str, transfer: native.Transfer) -> None:
        super().__init__(save, plan.names(), plan.nbytes, plan.work, path)
        self.native = transfer
        self.end = plan.events

    def wait(self, milliseconds: int = native.SLICE_MS) -> bool:
        return self.native.wait(self.end, milliseconds)

    def wait_filled(self, milliseconds: int = native.SLICE_MS) -> bool:
        return self.native.wait_filled(milliseconds)

    def cancel(self) -> None:
        self.native.cancel()

    def failure(self) -> Exception | None:
        return self.error_of(self.native.report())

    def gathered(self) -> tuple[float, float] | None:
        return self.native.gathered()

    @property
    def moved(self) -> int:
        return self.native.report().bytes_read


class DeviceTransfer(Transfer):
    """A load through the native engine, with its tensors.

    Their memory was allocated in the order of the stream that was current at the call, and the copy stream writes it.
    Until the first has been made to wait for the second, the memory must not go back to the allocator, which would hand
    it out again on that stream. So the tensors are held, and a transfer that is dropped early makes the stream wait.
    """

    def __init__(self, plan: LoadPlan, flight: DeviceFlight, engine: DeviceEngine, stream: torch.Stream) -> None:
        super().__init__(engine.device, flight, plan.tensors(), engine.watcher.watch)
        self.flight: DeviceFlight = flight
        self._last_chunk = dict(zip(plan.leaves, plan.last_chunk, strict=True))
        self._event_chunks = np.flatnonzero(plan.chunks["event"])
        self._stream = stream
        self._settled = weakref.finalize(self, _settle, flight, stream, plan.values, engine.watcher)
        self._settled.atexit = False

    def position(self, leaf: Leaf) -> int:
        return self._last_chunk[leaf]

    def _event(self, leaf: Leaf | None) -> int:
        """The first event behind the leaf's last chunk; for None the end."""
        if leaf is None:
            return len(self._event_chunks)
        return int(np.searchsorted(self._event_chunks, self._last_chunk[leaf]))

    def wait(self, leaf: Leaf | None = None) -> None:
        current = streams.current_stream(self.device)
        self.flight.native.order(self._event(leaf), streams.handle(current))
        if current == self._stream:
            if leaf is None:
                self._settled.detach()
        else:
            # Used on another stream than it was allocated on: the allocator must know.
            for tensor in self._tensors.values() if leaf is None else (self._tensors[leaf],):
                (tensor.values() if tensor.is_nested else tensor).record_stream(current)

    def cancel(self) -> None:
        super().cancel()
        self._settled()

    def synchronize(self, tell: Callable[[int], None] | None = None) -> None:
        super().synchronize(tell)
        self._settled.detach()


@finalizer
def _settle(flight: DeviceFlight, stream: torch.Stream, values: list[torch.Tensor], watcher: Watcher) -> None:
    """Makes the stream wait for a load that is dropped, so that the memory of `values` can go."""
    if os.getpid() == flight.native.process and not flight.native.wait(flight.end, 0):
        try:
            flight.native.order(flight.end, streams.handle(stream))
        except TransferError:
            # The stream is capturing a graph, or the device has broken down: the host waits, which ends in both cases.
            with contextlib.suppress(TransferError):
                while not flight.wait():
                    pass
        watcher.watch(flight)
    values.clear()
