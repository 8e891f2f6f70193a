"""Failures of loads that nobody waits for.

A call with ``non_blocking=True`` has returned before its bytes are read. If a read fails then, the watcher says so at
once on stderr (through ``threading.excepthook``, as any thread's failure), and keeps the exception for the next tdgpu
call on the device or for ``tdgpu.synchronize()``.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref

import torch

from tdgpu.errors import TdgpuError
from tdgpu.transfer.base import Flight

# How often the watcher looks whether the copies of a load that is read are through.
LAST_COPIES_SECONDS = 0.002


class Watcher:
    """Looks after one device's flights. Its thread starts with the first flight that is left to it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._flights: weakref.WeakSet[Flight] = weakref.WeakSet()
        self._left: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._pending: list[Exception] = []
        self._thread: threading.Thread | None = None

    def add(self, flight: Flight) -> None:
        """Notes a flight, for ``synchronize``."""
        with self._lock:
            self._flights.add(flight)

    def watch(self, flight: Flight) -> None:
        """Takes over a flight that nobody waits for: reports what fails, and keeps it until it is over."""
        with self._lock:
            if flight.is_watched:
                return
            flight.is_watched = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"tdgpu-watch-{self._device}", daemon=True)
                self._thread.start()
        self._left.put(flight)

    def raise_pending(self) -> None:
        """Raises the oldest failure that no call has raised yet."""
        with self._lock:
            failure = self._pending.pop(0) if self._pending else None
        if failure is not None:
            raise failure

    def synchronize(self) -> None:
        """Waits on the host for every flight, and raises the first failure that no call has raised yet."""
        with self._lock:
            flights = list(self._flights)
        for flight in flights:
            while not flight.wait():
                pass
        for flight in flights:
            self._note(flight)
        self.raise_pending()

    def stop(self) -> None:
        """Ends the thread, once the flights left to it are read or cancelled."""
        if self._thread is not None:
            self._left.put(None)
            self._thread.join(timeout=1)

    def _note(self, flight: Flight) -> Exception | None:
        with self._lock:
            failure = None if flight.was_reported else flight.failure()
            if failure is not None:
                flight.was_reported = True
                self._pending.append(failure)
        return failure

    def _run(self) -> None:
        while (flight := self._left.get()) is not None:
            try:
                self._see_through(flight)
            except TdgpuError as error:  # the driver refuses even to say how far it is
                with self._lock:
                    self._pending.append(error)
                _tell(error)
            del flight  # not kept while waiting for the next one

    def _see_through(self, flight: Flight) -> None:
        is_read = is_over = False
        while not is_over:
            is_read = is_read or flight.wait_filled()
            is_over = is_read and flight.wait(0)
            failure = self._note(flight)
            if failure is not None:
                _tell(failure)
            if is_read and not is_over:
                time.sleep(LAST_COPIES_SECONDS)


def _tell(failure: Exception) -> None:
    """On stderr, or wherever the program sends what its threads die of."""
    thread = threading.current_thread()
    threading.excepthook(threading.ExceptHookArgs((type(failure), failure, failure.__traceback__, thread)))
