"""Driver calls from Python, for tests that need what torch does not offer: gates, several contexts, raw copies."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

NON_BLOCKING = 1
GEQ = 0
WAIT, WRITE = 1, 2


class MemOp(ctypes.Structure):
    """CUstreamBatchMemOpParams: six 64-bit words."""

    _fields_ = [
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    ]


class DriverError(RuntimeError):
    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned {code}")
        self.code = code


class Driver:
    """The driver in the context of one device, which `current()` makes the thread's. Errors raise `DriverError`."""

    def __init__(self, path: str, device: int = 0) -> None:
        self.library = ctypes.CDLL(path)
        self.call("cuInit", 0)
        self.context = self.made("cuDevicePrimaryCtxRetain", device)
        self.device = device

    def call(self, function: str, *arguments: Any) -> None:
        if code := self.code(function, *arguments):
            raise DriverError(function, code)

    def code(self, function: str, *arguments: Any) -> int:
        # Integers are addresses and sizes as often as flags: all of them are passed in 64 bits.
        wide = [ctypes.c_uint64(value) if isinstance(value, int) else value for value in arguments]
        return int(self.library[function](*wide))

    def made(self, function: str, *arguments: Any) -> int:
        """Calls a function whose first argument receives what it makes, and returns that."""
        value = ctypes.c_uint64(0)
        self.call(function, ctypes.byref(value), *arguments)
        return value.value

    @contextlib.contextmanager
    def current(self) -> Iterator[Driver]:
        before = self.made("cuCtxGetCurrent")
        self.call("cuCtxSetCurrent", self.context)
        try:
            yield self
        finally:
            self.call("cuCtxSetCurrent", before)

    def stream(self) -> int:
        return self.made("cuStreamCreate", NON_BLOCKING)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        self.call("cuStreamWaitValue32_v2", stream, address, value, GEQ)


class Pinned:
    """Pinned memory of its own; `words` are its 32-bit words."""

    def __init__(self, driver: Driver, size: int) -> None:
        self.driver = driver
        self.size = size
        self.address = driver.made("cuMemHostAlloc", size, 0)
        self.words = (ctypes.c_uint32 * (size // 4)).from_address(self.address)
        ctypes.memset(self.address, 0, size)

    def bytes(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def fill(self, value: int) -> None:
        ctypes.memset(self.address, value, self.size)

    def free(self) -> None:
        self.driver.call("cuMemFreeHost", self.address)


def in_thread(function: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread
