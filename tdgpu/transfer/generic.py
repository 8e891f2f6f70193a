"""The same contract with torch alone, for accelerators without the driver table (ROCm, XPU, MPS, ...).

Native readers fill a few host buffers, pinned where torch can; a side stream copies them to the device; an event behind
the last copy orders the caller's stream. Who enqueues is the calling thread, or, for an early future, a thread.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from tdgpu.errors import TdgpuError, TransferError
from tdgpu.layout.tree import Leaf
from tdgpu.options import get as get_options
from tdgpu.transfer import native, streams
from tdgpu.transfer.base import Flight, Transfer
from tdgpu.transfer.plan import LoadPlan, make_plan
from tdgpu.transfer.watcher import Watcher

BUFFERS = 4


class GenericEngine:
    """A device's host buffers, side stream and readers."""

    def __init__(self, device: torch.device) -> None:
        settings = get_options()
        self.device = device
        self.settings = settings
        self.ring_bytes = settings.ring_bytes
        self.watcher = Watcher(device)
        self.readers = native.Readers(settings.threads)
        # One load at a time uses the buffers; a thread of an early future may be the one.
        self.lock = threading.Lock()
        self.buffers, self.are_pinned = self._make_buffers()
        self.free = collections.deque(range(BUFFERS))
        self.copies: collections.deque[tuple[int, torch.Event]] = collections.deque()
        self.stream = self._side_stream()
        self.threads: list[threading.Thread] = []
        self.is_closing = False

    def _make_buffers(self) -> tuple[list[torch.Tensor], bool]:
        wanted = size = max(self.ring_bytes // BUFFERS, 4096)
        while size >= 16 << 10 and streams.is_default_accelerator(self.device):
            try:
                buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
            except (RuntimeError, NotImplementedError):
                size //= 2
                continue
            if all(buffer.is_pinned() for buffer in buffers):
                return buffers, True
            break
        return [torch.empty(wanted, dtype=torch.uint8) for _ in range(BUFFERS)], False

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory that copies are staged in."""
        return sum(len(buffer) for buffer in self.buffers) if self.are_pinned else 0

    def _side_stream(self) -> torch.Stream | None:
        if not streams.is_default_accelerator(self.device):
            return None
        try:
            return torch.Stream(self.device)
        except (RuntimeError, NotImplementedError):
            return None  # a device with one stream only: its order is all the order there is

    def start(self, save: str, leaves: Sequence[Leaf], *, early: bool) -> GenericTransfer:
        """Allocates and begins; all is enqueued when it returns, unless `early`."""
        settings = get_options()
        chunk = min(settings.chunk_bytes, len(self.buffers[0]))
        plan = make_plan(
            leaves, self.device, chunk_bytes=chunk, ring_bytes=chunk * 4, early=False, direct=settings.direct_io
        )
        flight = GenericFlight(save, plan)
        allocated = streams.current_stream(self.device)
        before = torch.Event(self.device)
        before.record(allocated)
        work = _Work(self, plan, flight, before, allocated)
        transfer = GenericTransfer(plan, flight, self, allocated)
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

    def take_buffer(self, *, wait: bool) -> int | None:
        """A buffer that no copy reads any more; None if there is none and `wait` is false. Needs the lock."""
        while self.copies and (self.copies[0][1].query() or (wait and not self.free)):
            buffer, copied = self.copies.popleft()
            copied.synchronize()
            self.free.append(buffer)
        return self.free.popleft() if self.free else None

    def put_buffer(self, buffer: int, copied: torch.Event | None) -> None:
        """Gives a buffer back, to be used again after the event. Needs the lock."""
        if copied is None:
            self.free.append(buffer)
        else:
            self.copies.append((buffer, copied))

    def close(self, milliseconds: int) -> None:
        """Ends loads under way, and the readers."""
        self.is_closing = True
        self.readers.cancel()
        # An interpreter that ends under a thread in the middle of torch's C++ code aborts the process: wait for it, as
        # long as it takes the device to give back a buffer.
        for thread in self.threads:
            thread.join(timeout=milliseconds / 1000)
        self.readers.close()
        self.watcher.stop()


class GenericFlight(Flight):
    """A load that torch carries."""

    def __init__(self, save: str, plan: LoadPlan) -> None:
        super().__init__(save, plan, "generic")
        self.enqueued = threading.Event()
        self.end: torch.Event | None = None
        self.thread_error: Exception | None = None
        self.is_cancelled = False
        self.read_bytes = 0
        self.reads_failed: Exception | None = None

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
        super().__init__(plan, flight, engine.device, engine.watcher.watch)
        self.flight: GenericFlight = flight
        self._settled = weakref.finalize(self, _settle, flight, stream, plan.values, engine.watcher)
        self._settled.atexit = False

    def wait(self, leaf: Leaf | None = None) -> None:
        while not self.flight.enqueued.wait(native.SLICE_MS / 1000):
            pass
        self.flight.raise_failure()
        if self.flight.end is not None:
            streams.current_stream(self.device).wait_event(self.flight.end)


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
            self.flight.enqueued.set()
        if self.transfer is not None and self.transfer() is None and self.flight.end is not None:
            self.allocated.wait_event(self.flight.end)  # dropped meanwhile: nobody else will
        self.values.clear()

    def _move(self) -> None:
        engine = self.engine
        if engine.stream is not None:
            engine.stream.wait_event(self.before)
        reading: collections.deque[tuple[int, int, native.Read]] = collections.deque()
        next_chunk = 0
        try:
            while next_chunk < len(self.plan.chunks) or reading:
                while (
                    next_chunk < len(self.plan.chunks) and (buffer := engine.take_buffer(wait=not reading)) is not None
                ):
                    reading.append((next_chunk, buffer, self._read(next_chunk, buffer)))
                    next_chunk += 1
                chunk, buffer, read = reading[0]
                self._wait(read, chunk)
                if engine.is_closing:
                    raise TransferError("The process ended before the load did.", save=self.flight.save)
                copied = self._copy(chunk, buffer)
                reading.popleft()
                engine.put_buffer(buffer, copied)
        finally:
            for _, buffer, read in reading:  # only after an error: the readers still write to these buffers
                read.cancel()
                while not read.wait_filled():
                    pass
                engine.put_buffer(buffer, None)
            self.flight.end = torch.Event(engine.device)
            self.flight.end.record(engine.stream or self.allocated)

    def _read(self, chunk: int, buffer: int) -> native.Read:
        row = self.plan.chunks[chunk : chunk + 1].copy()
        first = int(row["first_piece"][0])
        pieces = self.plan.pieces[first : first + int(row["piece_count"][0])].copy()
        files = [self.plan.files[file] for file in pieces["file"]]
        pieces["file"] = np.arange(len(files))
        row["first_piece"] = 0
        row["destination"] = self.engine.buffers[buffer].data_ptr()
        return self.engine.readers.post(files, pieces, row)

    def _wait(self, read: native.Read, chunk: int) -> None:
        if self.flight.is_cancelled:
            read.cancel()
        while not read.wait_filled():
            pass
        report = read.report()
        self.flight.read_bytes += report.bytes_read
        if report.cause != "none" and self.flight.reads_failed is None:
            first = int(self.plan.chunks["first_piece"][chunk])
            self.flight.reads_failed = self.flight.error_of(dataclasses.replace(report, piece=report.piece + first))

    def _copy(self, chunk: int, buffer: int) -> torch.Event:
        storage, offset = self.plan.targets[chunk]
        size = int(self.plan.chunks["bytes"][chunk])
        target = torch.empty(0, dtype=torch.uint8, device=self.engine.device).set_(storage, offset, (size,), (1,))
        # From pageable memory torch may still read the source after a non-blocking copy has returned.
        target.copy_(self.engine.buffers[buffer][:size], non_blocking=self.engine.are_pinned)
        copied = torch.Event(self.engine.device)
        copied.record(streams.current_stream(self.engine.device))
        return copied
