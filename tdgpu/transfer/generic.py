"""The same contract with torch alone, for accelerators without the driver table (ROCm, XPU, MPS, ...).

Native readers fill a ring of host memory, pinned where torch can; a side stream copies its chunks to the device; an
event behind the last copy orders the caller's stream. Who enqueues is the calling thread, or, for an early future, a
thread.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from tdgpu.errors import TdgpuError, TransferError
from tdgpu.layout.tree import Leaf
from tdgpu.options import get as get_options
from tdgpu.signals import finalizer
from tdgpu.transfer import native, streams
from tdgpu.transfer.base import Flight, Transfer
from tdgpu.transfer.plan import LoadPlan, make_plan
from tdgpu.transfer.watcher import Watcher


class GenericEngine:
    """A device's ring of host memory, its side stream and its readers."""

    def __init__(self, device: torch.device) -> None:
        settings = get_options()
        self.device = device
        self.settings = settings
        self.watcher = Watcher(device)
        # One load at a time uses the ring; a thread of an early future may be the one.
        self.lock = threading.Lock()
        self.ring, self.is_pinned = streams.host_buffer(device, settings.ring_bytes, 64 << 10)
        self.stage = native.Stage(self.ring.data_ptr(), len(self.ring), settings.threads, self.ring)
        self.stream = streams.side_stream(device)
        # Copies under way, oldest first: their events tell when a place in the ring may be filled again.
        self.copies: collections.deque[tuple[native.StagedRead, int, torch.Event]] = collections.deque()
        # A load that was given up, with its last chunk: its places in the ring are claimed until it is settled.
        self.unsettled: list[tuple[native.StagedRead, int]] = []
        self.threads: list[threading.Thread] = []
        self.is_closing = False

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring."""
        return self.stage.ring_bytes

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory that copies are staged in."""
        return len(self.ring) if self.is_pinned else 0

    def make_plan(self, leaves: Sequence[Leaf], *, early: bool, verify: bool, most_threads: int) -> LoadPlan:
        """Allocates the destinations of leaves, and cuts them into chunks."""
        settings = get_options()
        return make_plan(
            leaves,
            self.device,
            chunk_bytes=settings.chunk_bytes,
            ring_bytes=self.stage.ring_bytes,
            threads=self.stage.threads,
            direct=settings.direct_io,
            verify=verify,
            most_threads=most_threads,
        )

    def start(self, save: str, plan: Callable[[], LoadPlan], *, early: bool, timed: bool = False) -> GenericTransfer:
        """Begins; all is enqueued when it returns, unless `early`. Arguments as of :meth:`DeviceEngine.start`."""
        made = plan()
        flight = GenericFlight(save, made)
        if timed:
            flight.copy_times = flight.events = _CopyEvents()
        allocated = streams.current_stream(self.device)
        before = torch.Event(self.device)
        before.record(allocated)
        work = _Work(self, made, flight, before, allocated)
        transfer = GenericTransfer(made, flight, self, allocated)
        work.transfer = weakref.ref(transfer)
        self.watcher.add(flight)
        if early:
            thread = threading.Thread(target=work.run, name=f"tdgpu-load-{self.device}", daemon=True)
            self.threads = [*filter(threading.Thread.is_alive, self.threads), thread]
            thread.start()
        else:
            work.run()
            if flight.thread_error is not None:
                transfer.cancel()
                raise flight.thread_error
        return transfer

    def retire_copies(self, *, wait: bool = False) -> None:
        """Frees the places of the copies that are over; of all, if it may wait. Needs the lock."""
        while self.copies and (wait or self.copies[0][2].query()):
            read, chunk, copied = self.copies.popleft()
            if wait:
                copied.synchronize()
            read.set_copied(chunk)

    def settle(self) -> None:
        """Frees the places of a load that was given up, once nobody writes or reads them. Needs the lock.

        It may be interrupted: then the next load does it first, or it would wait for those places for ever.
        """
        for read, last in self.unsettled:
            while read.has_begun and not read.wait_filled():
                pass
            self.retire_copies(wait=True)
            if read.has_begun:
                read.set_copied(last)
        self.unsettled.clear()

    def close(self, milliseconds: int) -> None:
        """Ends loads under way, and the readers."""
        self.is_closing = True
        self.stage.cancel()
        # An interpreter that ends under a thread in the middle of torch's C++ code aborts the process: wait for it, as
        # long as it takes the device to give back a place.
        for thread in self.threads:
            thread.join(timeout=milliseconds / 1000)
        self.stage.close()
        self.watcher.stop()


class _CopyEvents:
    """The events around the copies of a load: its ``copy_times``."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Event, torch.Event]] = []
        self._seconds: float | None = None
        self.is_complete = False  # no copy will follow

    def add(self, begin: torch.Event, end: torch.Event) -> None:
        self._pairs.append((begin, end))

    def seconds(self) -> float | None:
        pairs = self._pairs
        if self._seconds is None and self.is_complete:
            try:
                if all(end.query() for _, end in pairs[-1:]):
                    self._seconds = sum(begin.elapsed_time(end) for begin, end in pairs) / 1000
            except (RuntimeError, NotImplementedError):  # a device without a clock, or one that has broken down
                self._seconds = 0.0
        if self._seconds is not None:
            self._pairs = []
        return self._seconds


class GenericFlight(Flight):
    """A load that torch carries."""

    def __init__(self, save: str, plan: LoadPlan) -> None:
        super().__init__(save, plan.names(), plan.nbytes, plan.work, "generic")
        self.enqueued = threading.Event()
        self.end: torch.Event | None = None
        self.thread_error: Exception | None = None
        self.is_cancelled = False
        self.read_bytes = 0
        self.reads_failed: Exception | None = None
        self.events: _CopyEvents | None = None

    def wait(self, milliseconds: int = native.SLICE_MS) -> bool:
        if not self.enqueued.wait(milliseconds / 1000):
            return False
        if self.end is None:
            return True
        # torch has no bounded wait for an event.
        pause = threading.Event()
        for _ in range(max(milliseconds, 1)):
            if self.end.query():
                return True
            pause.wait(0.001)
        return bool(self.end.query())

    def wait_filled(self, milliseconds: int = native.SLICE_MS) -> bool:
        return self.enqueued.wait(milliseconds / 1000)

    def cancel(self) -> None:
        self.is_cancelled = True

    def failure(self) -> Exception | None:
        return self.thread_error or self.reads_failed

    @property
    def moved(self) -> int:
        return self.read_bytes


class GenericTransfer(Transfer):
    """A load by torch, with its tensors. As a ``DeviceTransfer``, it holds them until a stream waits for the load."""

    def __init__(self, plan: LoadPlan, flight: GenericFlight, engine: GenericEngine, stream: torch.Stream) -> None:
        super().__init__(engine.device, flight, plan.tensors(), engine.watcher.watch)
        self.flight: GenericFlight = flight
        self._stream = stream
        self._settled = weakref.finalize(self, _settle, flight, stream, plan.values, engine.watcher)
        self._settled.atexit = False

    def wait(self, leaf: Leaf | None = None) -> None:
        while not self.flight.enqueued.wait(native.SLICE_MS / 1000):
            pass
        self.flight.raise_failure()
        current = streams.current_stream(self.device)
        if self.flight.end is not None:
            current.wait_event(self.flight.end)
        if current != self._stream:
            # Used on another stream than it was allocated on: the allocator must know.
            for tensor in self._tensors.values() if leaf is None else (self._tensors[leaf],):
                (tensor.values() if tensor.is_nested else tensor).record_stream(current)


@finalizer
def _settle(flight: GenericFlight, stream: torch.Stream, values: list[torch.Tensor], watcher: Watcher) -> None:
    """Makes the stream wait for a load that is dropped, so that the memory of `values` can go.

    Work that is still under way does it at its end.
    """
    if not flight.was_raised:
        watcher.watch(flight)
    if flight.enqueued.is_set() and flight.end is not None and not flight.end.query():
        try:
            stream.wait_event(flight.end)
        except RuntimeError:  # as it does while it captures a graph
            flight.end.synchronize()
    values.clear()


class _Work:
    """Reads and enqueues one load. Holds the destinations meanwhile."""

    def __init__(
        self, engine: GenericEngine, plan: LoadPlan, flight: GenericFlight, before: torch.Event, allocated: torch.Stream
    ) -> None:
        self.engine = engine
        self.plan = plan
        self.values = list(plan.values)
        self.flight = flight
        self.before = before
        self.allocated = allocated
        self.transfer: weakref.ref[GenericTransfer] | None = None

    def run(self) -> None:
        """Moves everything. Errors end up in the flight, interrupts go on."""
        try:
            with self.engine.lock, streams.on(self.engine.stream, self.engine.device):
                self._move()
        except Exception as error:
            wrapped = TransferError(f"A copy to {self.engine.device} failed: {error}", save=self.flight.save)
            wrapped.__cause__ = error
            self.flight.thread_error = error if isinstance(error, TdgpuError) else wrapped
        finally:
            if self.flight.events is not None:
                self.flight.events.is_complete = True
            self.flight.enqueued.set()
        if self.transfer is not None and self.transfer() is None and self.flight.end is not None:
            self.allocated.wait_event(self.flight.end)  # dropped meanwhile: nobody else will
        self.values.clear()

    def _move(self) -> None:
        engine = self.engine
        if engine.stream is not None:
            engine.stream.wait_event(self.before)
        engine.settle()
        read = native.StagedRead(engine.stage)
        engine.unsettled.append((read, len(self.plan.chunks) - 1))
        taken = 0
        try:
            engine.stage.post(self.plan.work, read)
            for chunk in range(len(self.plan.chunks)):
                offset = self._wait_ready(read, chunk)
                engine.copies.append((read, chunk, self._copy(chunk, offset)))
                taken += 1
            engine.unsettled.clear()
        except BaseException:
            if read.has_begun:
                read.strand(taken)
            engine.settle()
            raise
        finally:
            if read.has_begun:
                self._report(read)
            self.flight.end = torch.Event(engine.device)
            self.flight.end.record(engine.stream or self.allocated)

    def _wait_ready(self, read: native.StagedRead, chunk: int) -> int:
        while True:
            self.engine.retire_copies()
            if self.flight.is_cancelled:
                read.cancel()
            if self.engine.is_closing:
                raise TransferError("The process ended before the load did.", save=self.flight.save)
            # Not for long: copies end meanwhile, and nobody else says that their places are free.
            offset = read.wait_ready(chunk, 1)
            if offset is not None:
                self._report(read)
                return offset

    def _report(self, read: native.StagedRead) -> None:
        report = read.report()
        self.flight.read_bytes = report.bytes_read
        self.flight.reads_failed = self.flight.error_of(report)

    def _copy(self, chunk: int, offset: int) -> torch.Event:
        storage, start = self.plan.targets[chunk]
        size = int(self.plan.chunks["bytes"][chunk])
        target = torch.empty(0, dtype=torch.uint8, device=self.engine.device).set_(storage, start, (size,), (1,))
        events = self.flight.events
        begin = self._event() if events is not None else None
        # From pageable memory torch may still read the source after a non-blocking copy has returned.
        target.copy_(self.engine.ring[offset : offset + size], non_blocking=self.engine.is_pinned)
        copied = self._event()
        if events is not None and begin is not None:
            events.add(begin, copied)
        return copied

    def _event(self) -> torch.Event:
        event = torch.Event(self.engine.device, enable_timing=self.flight.events is not None)
        event.record(streams.current_stream(self.engine.device))
        return event
