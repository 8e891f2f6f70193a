"""The native core as a library: where it is, whether it fits, its errors as exceptions, and the drivers that it opens.

ctypes releases the GIL for the length of every call, so that other Python threads run while the core waits. Waits in
the core are bounded; the loops around them are in Python, where signals are seen. Each face of the core (``native`` for
what comes in, ``outgoing`` for what goes out) declares the functions that it calls.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from tdgpu.errors import CaptureError, DeviceError, ForkError, InvalidArgument, NativeCoreError, TransferError
from tdgpu.options import get as get_options

LIBRARY = "_core/libtdgpu_core.so"
PACKAGE = Path(__file__).resolve().parents[1]

# What one call of a wait may take. Ctrl-C is answered this late.
SLICE_MS = 50

# Cause of csrc/error.h.
CAUSES = (
    "none", "invalid", "library", "driver", "read", "truncated", "memory", "cancelled", "capturing", "exists_not",
    "damaged", "unsupported",
)  # fmt: skip


# What functions give and take, by name. Those of a face are added when it is imported.
_prototypes: dict[str, tuple[Any, ...]] = {
    "tdgpu_version": (c_char_p,),
    "tdgpu_source_id": (c_char_p,),
    "tdgpu_last_error": (c_int, c_char_p, c_size_t),
    "tdgpu_driver_open": (c_int, c_char_p, POINTER(c_void_p)),
    "tdgpu_driver_facts": (c_int, c_void_p, POINTER(c_int), POINTER(c_int)),
    "tdgpu_driver_device_name": (c_int, c_void_p, c_int, c_char_p, c_size_t),
}


def declare(prototypes: dict[str, tuple[Any, ...]]) -> None:
    """Says what functions of the core give and take: the result's type, then the arguments'."""
    assert not core.cache_info().currsize, "the core is loaded after all of its faces are imported"
    _prototypes.update(prototypes)


def library_path() -> Path:
    """Where the native core is.

    Raises:
        NativeCoreError: it was not built.
    """
    chosen = get_options().native_core
    if chosen is not None:
        return Path(chosen)
    own = PACKAGE / LIBRARY
    if own.is_file():
        return own
    # Python runs from a checkout (``python -m pytest`` puts it in front) or an editable install: the library is where
    # pip put it.
    try:
        installed = Path(str(importlib.metadata.distribution("tdgpu").locate_file(f"tdgpu/{LIBRARY}")))
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed is None or not installed.is_file():
        raise NativeCoreError("tdgpu's native core is not built. Run: pip install .", file=own)
    return installed


def source_id(csrc: Path) -> str:
    """The hash of the core's sources that the build compiles in (see CMakeLists.txt)."""
    files = sorted((file for file in csrc.iterdir() if file.suffix in (".cpp", ".h")), key=lambda file: file.name)
    listing = "".join(f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in files)
    return hashlib.sha256(listing.encode()).hexdigest()


@functools.cache
def core() -> ctypes.CDLL:
    """The native core, loaded on first use.

    Raises:
        NativeCoreError: it is missing, cannot be loaded, or was built from other sources than those beside this one.
    """
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, *arguments) in _prototypes.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        chosen = get_options().native_core is not None
        remedy = "TDGPU_NATIVE_CORE names this library: unset it" if chosen else "Run: pip install ."
        raise NativeCoreError(f"tdgpu's native core cannot be loaded ({error}). {remedy}", file=path) from None
    sources = PACKAGE.parent / "csrc"
    if (
        sources.is_dir()
        and get_options().native_core is None
        and library.tdgpu_source_id().decode() != source_id(sources)
    ):
        raise NativeCoreError(
            "The native core was built from other sources than those beside this package. Run: pip install .", file=path
        )
    return library


def check(cause: int, what: str) -> None:
    if cause == 0:
        return
    text = ctypes.create_string_buffer(1024)
    core().tdgpu_last_error(text, len(text))
    raise error_of(CAUSES[cause], text.value.decode(errors="replace"), what)


def error_of(cause: str, message: str, what: str) -> Exception:
    """The exception for a cause that no leaf is to blame for."""
    if cause == "capturing":
        return CaptureError(
            f"{what}: {message}. A load cannot be part of a graph: load before the capture, or on a stream outside it."
        )
    if cause == "invalid":
        return InvalidArgument(f"{what}: {message}.")
    if cause in ("driver", "library"):
        return DeviceError(f"{what}: {message}.")
    if cause == "memory":
        return TransferError(f"{what}: {message}. This is host memory, not the device's.")
    return TransferError(f"{what}: {message}.")


class Driver:
    """A driver library, open for the rest of the process.

    Raises:
        DeviceError: the library, or a function in it, is missing; or the driver does not start.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        handle = c_void_p()
        check(core().tdgpu_driver_open(os.fsencode(path), byref(handle)), f"The driver {path} cannot be used")
        self.handle = handle

    def facts(self) -> tuple[int, int]:
        """The driver's version (13000 is 13.0) and the number of devices."""
        version, devices = c_int(), c_int()
        check(
            core().tdgpu_driver_facts(self.handle, byref(version), byref(devices)),
            f"The driver {self.path} gives no facts",
        )
        return version.value, devices.value

    def device_name(self, index: int) -> str:
        """What the driver calls the device. Makes no context on it."""
        text = ctypes.create_string_buffer(256)
        check(
            core().tdgpu_driver_device_name(self.handle, index, text, len(text)),
            f"The driver {self.path} has no device {index}",
        )
        return text.value.decode(errors="replace")


def check_process(process: int) -> None:
    """Raises ForkError in a child of the process that started a load: the core's locks may be held there for ever."""
    if os.getpid() != process:
        raise ForkError("This load was started by the process from which this one was forked: only there it goes on.")
