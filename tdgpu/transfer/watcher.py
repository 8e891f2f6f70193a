"""Failures of loads that nobody waits for.

A call with ``non_blocking=True`` has returned before its bytes are read. If a read fails then, the watcher says so at
once on stderr (through ``threading.excepthook``, as any thread's failure), and keeps the exception for the next tdgpu
call on the device or for ``tdgpu.synchronize()``.
"""

from __future__ import annotations

import collections
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
    """Looks after one device's flights.

    Futures are dropped when the garbage collector likes, in any thread, also while a lock is held: what they call then
    (``watch``) takes no lock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._flights: weakref.WeakSet[Flight] = weakref.WeakSet()
        self._left: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._failed: collections.deque[Flight] = collections.deque()
        self._thread: threading.Thread | None = None

    def add(self, flight: Flight) -> None:
        """Notes a flight, for ``synchronize``, and starts the thread if it is the first."""
        with self._lock:
            self._flights.add(flight)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"tdgpu-watch-{self._device}", daemon=True)
                self._thread.start()

    def watch(self, flight: Flight) -> None:
        """Takes over a flight that nobody waits for: reports what fails, and keeps it until it is over."""
        if not flight.is_watched:
            flight.is_watched = True
            self._left.put(flight)

    def raise_pending(self) -> None:
        """Raises the oldest failure that no call has raised yet."""
        while self._failed:
            flight = self._failed.popleft()
            if not flight.was_raised:
                flight.raise_failure()

    def synchronize(self) -> None:
        """Waits on the host for every flight, and raises the first failure that no call has raised yet."""
        with self._lock:
            flights = list(self._flights)
        for flight in flights:
            while not flight.wait():
                pass
        self.raise_pending()
        for flight in flights:
            if not flight.was_raised:
                flight.raise_failure()

    def stop(self) -> None:
        """Ends the thread, once the flights left to it are read or cancelled."""
        if self._thread is not None:
            self._left.put(None)
            self._thread.join(timeout=1)

    def _run(self) -> None:
        while (flight := self._left.get()) is not None:
            failure = None
            while failure is None and not _is_over(flight):
                failure = _failure(flight)
            failure = failure or _failure(flight)
            if failure is not None and not flight.was_raised:
                self._failed.append(flight)
                _tell(failure)
            while not _is_over(flight):
                pass  # kept, for synchronize, until nothing of it is under way
            del flight, failure


def _is_over(flight: Flight) -> bool:
    """Whether nothing is under way, waiting for a moment."""
    try:
        if not flight.wait_filled():
            return False
        if not flight.wait(0):
            time.sleep(LAST_COPIES_SECONDS)
            return False
    except TdgpuError:  # the device refuses even to say how far it is
        return True
    return True


def _failure(flight: Flight) -> Exception | None:
    try:
        flight.wait(0)
        return flight.failure()
    except TdgpuError as error:
        return error


def _tell(failure: Exception) -> None:
    """On stderr, or wherever the program sends what its threads die of."""
    thread = threading.current_thread()
    threading.excepthook(threading.ExceptHookArgs((type(failure), failure, failure.__traceback__, thread)))
