"""The ctypes face of the native core (``csrc/capi.cpp``): its functions, its structures, and its errors as exceptions.

ctypes releases the GIL for the length of every call, so that other Python threads run while the core waits. Waits in
the core are bounded; the loops around them are here in Python, where signals are seen.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import hashlib
import importlib.metadata
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tdgpu.errors import CaptureError, DeviceError, ForkError, InvalidArgument, NativeCoreError, TransferError
from tdgpu.options import get as get_options

LIBRARY = "_core/libtdgpu_core.so"
PACKAGE = Path(__file__).resolve().parents[1]

# Paths, and the inodes that they had when they were checked (0: any).
Files = list[tuple[str, int]]

# What one call of a wait may take. Ctrl-C is answered this late.
SLICE_MS = 50

# The structures Piece and Chunk of csrc/load.h.
PIECE = np.dtype(
    [("file_offset", "u8"), ("bytes", "u8"), ("chunk_offset", "u8"), ("file", "u4"), ("direct", "u4")], align=True
)
CHUNK = np.dtype(
    [
        ("destination", "u8"), ("bytes", "u8"), ("first_piece", "u4"), ("piece_count", "u4"), ("event", "u4"),
        ("reserved", "u4"),
    ],
    align=True,
)  # fmt: skip

# Cause of csrc/error.h.
CAUSES = (
    "none", "invalid", "library", "driver", "read", "truncated", "memory", "cancelled", "capturing", "exists_not",
)  # fmt: skip


class _Report(ctypes.Structure):
    _fields_ = (
        ("bytes_read", c_uint64), ("failed_piece", c_int64), ("wanted", c_uint64), ("found", c_uint64),
        ("cause", c_int32), ("code", c_int32), ("is_filled", c_int32), ("reserved", c_int32),
    )  # fmt: skip


@dataclass(frozen=True)
class Report:
    """How far a load is, and the first thing that went wrong with it (``cause`` is ``"none"`` where nothing did)."""

    bytes_read: int
    is_filled: bool
    cause: str
    code: int
    message: str
    piece: int
    wanted: int
    found: int


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


_PROTOTYPES = {
    "tdgpu_version": (c_char_p,),
    "tdgpu_source_id": (c_char_p,),
    "tdgpu_last_error": (c_int, c_char_p, c_size_t),
    "tdgpu_set_pread": (None, c_void_p),
    "tdgpu_driver_open": (c_int, c_char_p, POINTER(c_void_p)),
    "tdgpu_driver_facts": (c_int, c_void_p, POINTER(c_int), POINTER(c_int)),
    "tdgpu_driver_device_name": (c_int, c_void_p, c_int, c_char_p, c_size_t),
    "tdgpu_engine_create": (c_int, c_void_p, c_int, c_uint64, c_uint32, POINTER(c_void_p)),
    "tdgpu_engine_facts": (None, c_void_p, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint64), c_char_p, c_size_t),
    "tdgpu_engine_close": (c_int, c_void_p, c_int64),
    "tdgpu_transfer_begin": (
        c_int, c_void_p, c_void_p, c_uint32, c_void_p, c_uint32, c_void_p, c_uint32, c_uint32, c_uint64,
        POINTER(c_void_p),
    ),
    "tdgpu_engine_take_road": (c_int, c_void_p, c_int, c_int64, POINTER(c_int)),
    "tdgpu_transfer_pump": (c_int, c_void_p, c_void_p, c_int64, POINTER(c_int)),
    "tdgpu_transfer_abort": (c_int, c_void_p, c_void_p, c_int64, POINTER(c_int)),
    "tdgpu_transfer_order": (c_int, c_void_p, c_void_p, c_uint32, c_uint64),
    "tdgpu_transfer_wait": (c_int, c_void_p, c_void_p, c_uint32, c_int64, POINTER(c_int)),
    "tdgpu_transfer_load": (c_void_p, c_void_p),
    "tdgpu_transfer_release": (None, c_void_p),
    "tdgpu_load_cancel": (None, c_void_p),
    "tdgpu_load_wait_filled": (c_int, c_void_p, c_int64),
    "tdgpu_load_report": (None, c_void_p, POINTER(_Report), c_char_p, c_size_t),
    "tdgpu_readers_create": (c_int, c_uint32, POINTER(c_void_p)),
    "tdgpu_readers_cancel": (None, c_void_p),
    "tdgpu_readers_destroy": (None, c_void_p),
    "tdgpu_readers_post": (
        c_int, c_void_p, c_void_p, c_uint32, c_void_p, c_uint32, c_void_p, c_uint32, POINTER(c_void_p),
    ),
    "tdgpu_read_load": (c_void_p, c_void_p),
    "tdgpu_read_release": (None, c_void_p),
}  # fmt: skip


@functools.cache
def core() -> ctypes.CDLL:
    """The native core, loaded on first use.

    Raises:
        NativeCoreError: it is missing, cannot be loaded, or was built from other sources than those beside this one.
    """
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, *arguments) in _PROTOTYPES.items():
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


def set_pread(address: int | None) -> None:
    """Puts a C function with pread's signature in the place of pread, for tests; None puts the real one back."""
    core().tdgpu_set_pread(address)


def _check(cause: int, what: str) -> None:
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


class _CheckedFile(ctypes.Structure):
    _fields_ = (("path", c_char_p), ("inode", c_uint64))


def _plan_arguments(files: Files, pieces: np.ndarray, chunks: np.ndarray) -> tuple[object, ...]:
    assert pieces.dtype == PIECE and chunks.dtype == CHUNK
    names = (_CheckedFile * len(files))(*[_CheckedFile(os.fsencode(path), inode) for path, inode in files])
    return (names, len(files), pieces.ctypes.data, len(pieces), chunks.ctypes.data, len(chunks))


class Driver:
    """A driver library, open for the rest of the process.

    Raises:
        DeviceError: the library, or a function in it, is missing; or the driver does not start.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        handle = c_void_p()
        _check(core().tdgpu_driver_open(os.fsencode(path), byref(handle)), f"The driver {path} cannot be used")
        self.handle = handle

    def facts(self) -> tuple[int, int]:
        """The driver's version (13000 is 13.0) and the number of devices."""
        version, devices = c_int(), c_int()
        _check(
            core().tdgpu_driver_facts(self.handle, byref(version), byref(devices)),
            f"The driver {self.path} gives no facts",
        )
        return version.value, devices.value

    def device_name(self, index: int) -> str:
        """What the driver calls the device. Makes no context on it."""
        text = ctypes.create_string_buffer(256)
        _check(
            core().tdgpu_driver_device_name(self.handle, index, text, len(text)),
            f"The driver {self.path} has no device {index}",
        )
        return text.value.decode(errors="replace")


class Engine:
    """One device's ring, copy stream and readers (``csrc/engine.h``)."""

    def __init__(self, driver: Driver, index: int, ring_bytes: int, threads: int) -> None:
        handle = c_void_p()
        _check(
            core().tdgpu_engine_create(driver.handle, index, ring_bytes, threads, byref(handle)),
            f"Device {index} cannot be prepared for transfers",
        )
        self.handle = handle
        ring, pinned, largest, why = c_uint64(), c_uint64(), c_uint64(), ctypes.create_string_buffer(512)
        core().tdgpu_engine_facts(handle, byref(ring), byref(pinned), byref(largest), why, len(why))
        self.ring_bytes = ring.value
        self.pinned_bytes = pinned.value
        self.largest_chunk = largest.value
        self.why_host = why.value.decode(errors="replace")

    def take_road(self, road: str) -> bool:
        """Changes between the ``"gated"`` and the ``"host"`` road; False while loads on the other are under way."""
        taken = c_int()
        cause = core().tdgpu_engine_take_road(self.handle, ("gated", "host").index(road), SLICE_MS, byref(taken))
        _check(cause, f"The load cannot be {road}")
        return bool(taken.value)

    def close(self, milliseconds: int) -> None:
        """Ends the readers; frees the ring unless a copy may still be under way. The engine is unusable afterwards."""
        core().tdgpu_engine_close(self.handle, milliseconds)


class _Load(abc.ABC):
    """What can be asked of a load, wherever it goes."""

    @property
    @abc.abstractmethod
    def _load(self) -> int:
        """The core's object."""

    def cancel(self) -> None:
        """Bytes that are not read yet need not be."""
        core().tdgpu_load_cancel(self._load)

    def wait_filled(self, milliseconds: int = SLICE_MS) -> bool:
        """Whether the readers are through, waiting for up to `milliseconds`."""
        return bool(core().tdgpu_load_wait_filled(self._load, milliseconds))

    def report(self) -> Report:
        """How far it is."""
        raw, text = _Report(), ctypes.create_string_buffer(512)
        core().tdgpu_load_report(self._load, byref(raw), text, len(text))
        return Report(
            raw.bytes_read,
            bool(raw.is_filled),
            CAUSES[raw.cause],
            raw.code,
            text.value.decode(errors="replace"),
            raw.failed_piece,
            raw.wanted,
            raw.found,
        )


class Transfer(_Load):
    """A load on its way to a device. Owns the core's object, which lives on in the readers as long as they need it."""

    # An interrupt may come before __init__ is through.
    _handle = c_void_p()

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._handle = c_void_p()
        self.process = os.getpid()

    def __del__(self) -> None:
        # After a fork the core's locks may be held by threads that the child does not have.
        if self._handle.value is not None and os.getpid() == self.process:
            core().tdgpu_transfer_release(self._handle)

    @property
    def has_begun(self) -> bool:
        """Whether there is something to take back; true at once when the core has begun, whatever comes in between."""
        return self._handle.value is not None

    def begin(self, files: Files, pieces: np.ndarray, chunks: np.ndarray, events: int, stream: int) -> None:
        """Orders the copy stream behind `stream` (a driver's handle) and starts the readers."""
        arguments = _plan_arguments(files, pieces, chunks)
        cause = core().tdgpu_transfer_begin(self._engine.handle, *arguments, events, stream, byref(self._handle))
        _check(cause, "The load cannot begin")

    @property
    def _live(self) -> c_void_p:
        """The core's object; in a forked child it is not to be touched."""
        if os.getpid() != self.process:
            raise ForkError(
                "This load was started by the process from which this one was forked: only there it goes on."
            )
        return self._handle

    @property
    def _load(self) -> int:
        return int(core().tdgpu_transfer_load(self._live))

    def pump(self) -> bool:
        """Enqueues for up to SLICE_MS; True when everything is enqueued."""
        done = c_int()
        _check(core().tdgpu_transfer_pump(self._engine.handle, self._live, SLICE_MS, byref(done)), "The load failed")
        return bool(done.value)

    def abort(self) -> bool:
        """Takes the load back, for up to SLICE_MS; True when no copy of it is under way."""
        done = c_int()
        _check(
            core().tdgpu_transfer_abort(self._engine.handle, self._live, SLICE_MS, byref(done)),
            "The load cannot be taken back",
        )
        return bool(done.value)

    def order(self, event: int, stream: int) -> None:
        """Makes `stream` (a driver's handle) wait for the event."""
        _check(
            core().tdgpu_transfer_order(self._engine.handle, self._live, event, stream),
            "The stream cannot wait for the load",
        )

    def wait(self, event: int, milliseconds: int = SLICE_MS) -> bool:
        """Whether the event has passed, waiting on the host for up to `milliseconds`."""
        passed = c_int()
        _check(
            core().tdgpu_transfer_wait(self._engine.handle, self._live, event, milliseconds, byref(passed)),
            "Waiting for the load failed",
        )
        return bool(passed.value)


class Readers:
    """Reader threads that fill host memory, for devices without a driver table."""

    def __init__(self, threads: int) -> None:
        handle = c_void_p()
        _check(core().tdgpu_readers_create(threads, byref(handle)), "No reader threads")
        self._handle: c_void_p | None = handle

    def post(self, files: Files, pieces: np.ndarray, chunks: np.ndarray) -> Read:
        """Starts reading. The destinations in `chunks` are host addresses, valid until the read is over."""
        handle = c_void_p()
        _check(
            core().tdgpu_readers_post(self._handle, *_plan_arguments(files, pieces, chunks), byref(handle)),
            "The read cannot begin",
        )
        return Read(handle)

    def cancel(self) -> None:
        """Reads that are queued need not be read any more."""
        core().tdgpu_readers_cancel(self._handle)

    def close(self) -> None:
        """Joins the threads; reads that are queued end without being read."""
        if self._handle is not None:
            core().tdgpu_readers_destroy(self._handle)
            self._handle = None


class Read(_Load):
    """A read into host memory under way."""

    def __init__(self, handle: c_void_p) -> None:
        self._handle = handle

    def __del__(self) -> None:
        core().tdgpu_read_release(self._handle)

    @property
    def _load(self) -> int:
        return int(core().tdgpu_read_load(self._handle))
