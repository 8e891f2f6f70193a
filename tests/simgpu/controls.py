"""Loads the simulation and holds its controls."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
from pathlib import Path

import torch

from . import build
from .device_module import register_device_module


class SimIO:
    """Controls of `simio_pread` and `simio_pwritev`, a `pread` and a `pwritev` that misbehave on request.

    Attributes:
        path: the library's path, for C++ tests.
        pread_address: the address of `ssize_t simio_pread(int, void *, size_t, off_t)`.
        pwritev_address: the address of `ssize_t simio_pwritev(int, const iovec *, int, off_t)`.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.simio_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self._library.simio_fail.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p]
        self._library.simio_fail_write.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p]
        self._library.simio_truncate_at.argtypes = [ctypes.c_long, ctypes.c_char_p]
        self._library.simio_calls.restype = ctypes.c_long
        self.pread_address = self._address("simio_pread")
        self.pwritev_address = self._address("simio_pwritev")

    def _address(self, name: str) -> int:
        address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
        assert address is not None
        return address

    def set(self, **settings: int) -> None:
        """Sets `short_reads` (0 or 1), `eintr_every` (every nth call), `delay_us` (a maximum, in microseconds)."""
        for name, value in settings.items():
            if self._library.simio_set(name.encode(), int(value)):
                raise ValueError(f"simio has no setting {name!r}")

    def fail(self, nth: int, errno: int, path: str = "") -> None:
        """The nth read from now on (0: every one) of a file whose path contains `path` fails with `errno`."""
        self._library.simio_fail(nth, errno, path.encode())

    def fail_write(self, nth: int, errno: int, path: str = "") -> None:
        """Likewise the nth write."""
        self._library.simio_fail_write(nth, errno, path.encode())

    def truncate_at(self, nth: int, path: str = "") -> None:
        """At the nth such read (0: every one), the file loses its second half before it is read."""
        self._library.simio_truncate_at(nth, path.encode())

    def calls(self) -> int:
        """Reads and writes since the last reset."""
        return int(self._library.simio_calls())

    def reset(self) -> None:
        self._library.simio_reset()


class Sim:
    """Controls of the simulated driver.

    Functions are named as the driver exports them; `_v2` may be left out (`"cuMemFree"`).

    Attributes:
        driver_path: the simulated libcuda.so.
        io: controls of the faulty reads.
    """

    def __init__(self, folder: Path) -> None:
        self.driver_path = str(folder / build.DRIVER_LIBRARY)
        self.io = SimIO(folder / build.IO_LIBRARY)
        self._library = ctypes.CDLL(self.driver_path)
        self._library.tdsim_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self._library.tdsim_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
        self._library.tdsim_skip.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self._library.tdsim_stat.argtypes = [ctypes.c_char_p]
        self._library.tdsim_stat.restype = ctypes.c_long
        self._library.tdsim_violations.restype = ctypes.c_char_p

    def set(self, **settings: int) -> None:
        """Changes settings, until the next reset. `tests/simcuda/state.h` explains each one.

        Raises:
            ValueError: there is no such setting.
        """
        for name, value in settings.items():
            if self._library.tdsim_set(name.encode(), int(value)):
                raise ValueError(f"the simulated driver has no setting {name!r}")

    def fail(self, function: str, nth: int, code: int, sticky: bool = False) -> None:
        """The nth call of `function` from now on (1: the next; 0: every one) returns `code` and does nothing.

        With `sticky`, the context current at that call is broken from then on: every call in it returns `code`.
        """
        self._library.tdsim_fail(self._symbol(function), nth, code, int(sticky))

    def skip(self, function: str, nth: int = 0) -> None:
        """The nth call of `function` from now on (0: every one) returns success without doing anything."""
        self._library.tdsim_skip(self._symbol(function), nth)

    def stat(self, name: str) -> int:
        """A counter, such as "copies", "calls:cuMemFree" or "contexts:1"; `tests/simcuda/control.h` lists them."""
        kind, colon, function = name.partition(":")
        if function.startswith("cu"):
            return int(self._library.tdsim_stat(f"{kind}{colon}".encode() + self._symbol(function)))
        return int(self._library.tdsim_stat(name.encode()))

    def violations(self) -> list[str]:
        """What was found wrong since the last reset: hangs, reuse too early, frees in flight, wrong contexts."""
        return self._library.tdsim_violations().decode().splitlines()

    def device_count(self) -> int:
        """How many devices the driver has; 0 where it cannot be used, as in a forked child."""
        count = ctypes.c_int(0)
        if self._library.cuInit(0) or self._library.cuDeviceGetCount(ctypes.byref(count)):
            return 0
        return count.value

    def pinned_bytes(self) -> int:
        """Pinned host memory held now, in bytes: allocated and registered."""
        return int(self._library.tdsim_pinned())

    def reset(self) -> None:
        """Waits (bounded) for the queues, then clears faults, counters, violations, broken contexts and settings.

        The calling thread is back on device 0 and on the default streams.
        """
        self._library.tdsim_reset()
        self.io.reset()
        for index in reversed(range(self.device_count())):
            torch.accelerator.set_device_index(index)
            torch.accelerator.set_stream(torch.Stream(stream_id=0, device_index=index, device_type=_DEVICE_TYPE))

    def _symbol(self, function: str) -> bytes:
        for name in (function, f"{function}_v2"):
            if name.startswith("cu") and hasattr(self._library, name):
                return name.encode()
        raise ValueError(f"the simulated driver has no function {function!r}")


# What torch.Stream wants for a device type. torch's annotations do not say that it converts to int.
_DEVICE_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[call-overload]


@functools.cache
def load() -> Sim:
    """Builds the simulation (first use), registers the torch device "simgpu", and returns the controls.

    The same object every time. If tdgpu is installed and takes drivers, it is told to use this one for "simgpu".

    Raises:
        Unavailable: it cannot be built here.
    """
    folder = build.build()
    sim = Sim(folder)
    torch.utils.rename_privateuse1_backend("simgpu")
    ctypes.CDLL(str(folder / build.TORCH_LIBRARY))  # registers its operators as it is loaded
    register_device_module(sim.device_count)
    _tell_tdgpu(sim.driver_path)
    return sim


def _tell_tdgpu(driver_path: str) -> None:
    module = "tdgpu.transfer"
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if not module.startswith(error.name or "?"):
            raise  # tdgpu is there, but something that it needs is not
        found = None
    register_driver = getattr(importlib.import_module(module), "register_driver", None) if found else None
    if register_driver is not None:
        register_driver("simgpu", driver_path)
