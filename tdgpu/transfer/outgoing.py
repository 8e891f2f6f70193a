"""The ctypes face of what the native core (``csrc/capi.cpp``) writes: files that grow, outlets, and stores."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from tdgpu.signals import until_exit
from tdgpu.transfer.library import SLICE_MS, Driver, check, check_process, core, declare

# The structures Part and StoredChunk of csrc/store.h.
PART = np.dtype([("address", "u8"), ("bytes", "u8"), ("offset", "u8"), ("file", "u4"), ("chunk", "u4")], align=True)
_STORED_CHUNK = np.dtype([("outlet", "u8"), ("chunk", "u4"), ("reserved", "u4")], align=True)


class _StoreReport(ctypes.Structure):
    _fields_ = (
        ("bytes_written", c_uint64), ("wanted", c_uint64), ("found", c_uint64), ("file", c_uint32), ("error", c_int32),
    )  # fmt: skip


declare(
    {
        "tdgpu_set_pwritev": (None, c_void_p),
        "tdgpu_files_create": (c_int, c_char_p, c_void_p, c_uint32, c_uint32, c_uint32, POINTER(c_void_p)),
        "tdgpu_files_open_all": (c_int, c_void_p, c_uint64, POINTER(c_uint32), POINTER(c_uint64)),
        "tdgpu_files_reserve": (c_int, c_void_p, c_uint64, c_uint64, POINTER(c_uint32)),
        "tdgpu_files_sync": (c_int, c_void_p, POINTER(c_uint32)),
        "tdgpu_files_cut_back": (c_int, c_void_p, c_uint64, POINTER(c_uint32)),
        "tdgpu_files_release": (None, POINTER(c_void_p)),
        "tdgpu_outlet_create": (c_int, c_void_p, c_int, c_uint64, POINTER(c_void_p)),
        "tdgpu_outlet_create_over": (c_int, c_void_p, c_uint64, POINTER(c_void_p)),
        "tdgpu_outlet_facts": (None, c_void_p, POINTER(c_uint64), POINTER(c_uint64)),
        "tdgpu_outlet_claim": (c_int, c_void_p, c_uint64, POINTER(c_uint32), POINTER(c_uint64)),
        "tdgpu_outlet_follow": (c_int, c_void_p, c_uint64),
        "tdgpu_outlet_copy": (c_int, c_void_p, c_uint32, c_uint64, c_uint64, c_uint64),
        "tdgpu_outlet_order": (c_int, c_void_p, c_uint64),
        "tdgpu_outlet_settle": (c_int, c_void_p),
        "tdgpu_outlet_wait_copied": (c_int, c_void_p, c_uint32, c_int64),
        "tdgpu_outlet_check": (c_int, c_void_p),
        "tdgpu_outlet_wait_free": (c_int, c_void_p, c_uint32, c_int64),
        "tdgpu_outlet_set_copied": (None, c_void_p, c_uint32),
        "tdgpu_outlet_last_chunk": (c_uint32, c_void_p),
        "tdgpu_outlet_discard": (None, c_void_p, c_uint32),
        "tdgpu_outlet_close": (c_int, POINTER(c_void_p), c_int64),
        "tdgpu_writers_create": (c_int, c_uint32, POINTER(c_void_p)),
        "tdgpu_writers_stop": (None, c_void_p),
        "tdgpu_writers_post": (
            c_int, c_void_p, c_void_p, c_void_p, c_uint32, c_void_p, c_uint32, POINTER(c_void_p),
        ),
        "tdgpu_store_wait": (c_int, c_void_p, c_int64),
        "tdgpu_store_cancel": (None, c_void_p),
        "tdgpu_store_report": (None, c_void_p, POINTER(_StoreReport)),
        "tdgpu_store_release": (None, c_void_p),
    }
)  # fmt: skip


def set_pwritev(address: int | None) -> None:
    """Puts a C function with pwritev's signature in its place, for tests; None puts the real one back."""
    core().tdgpu_set_pwritev(address)


class FileError(Exception):
    """A file could not be handled.

    Attributes:
        file: its number.
        code: errno.
        found: bytes in it, where that matters.
    """

    def __init__(self, file: int, code: int, found: int = 0) -> None:
        super().__init__(os.strerror(code))
        self.file = file
        self.code = code
        self.found = found

    @property
    def is_full(self) -> bool:
        """Whether there is no space left."""
        return self.code in (errno.ENOSPC, errno.EDQUOT)


class Files:
    """The leaf files of a save that grows (``csrc/growing.h``).

    Args:
        paths: of each file.
        row_nbytes: of each the bytes of a row, uint64.
        most_open: how many may be kept open.
        threads: how many open and close many of them.
    """

    _handle = c_void_p()

    def __init__(self, paths: Sequence[str], row_nbytes: np.ndarray, most_open: int, threads: int) -> None:
        self._process = os.getpid()
        self._handle = c_void_p()
        names = os.fsencode("".join([path + "\0" for path in paths]))
        cause = core().tdgpu_files_create(
            names, row_nbytes.ctypes.data, len(paths), most_open, threads, byref(self._handle)
        )
        check(cause, "No files")

    @until_exit
    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files, once no store writes to them."""
        # In a forked child the descriptors are closed by nobody: it may be in the middle of anything.
        if self._handle.value is not None and os.getpid() == self._process:
            core().tdgpu_files_release(byref(self._handle))

    def open_all(self, rows: int) -> None:
        """Opens all files, and looks at them. Without rows they may be missing.

        Raises:
            FileError: one cannot be opened; is a link (ELOOP) or no regular file (ENOTSUP); is too short (EINVAL), with
                ``found`` bytes; or has another name, too (EMLINK).
        """
        file, found = c_uint32(), c_uint64()
        code = core().tdgpu_files_open_all(self.handle, rows, byref(file), byref(found))
        if code:
            raise FileError(file.value, code, found.value)

    def reserve(self, first: int, last: int) -> None:
        """Extends all files to hold the rows from `first` to `last`, with space on the disk where that can be promised.

        Raises:
            FileError: a file cannot be opened, made or extended.
        """
        self._try(core().tdgpu_files_reserve, c_uint64(first), c_uint64(last))

    def sync(self) -> None:
        """Brings what was written to the disk. Raises FileError."""
        self._try(core().tdgpu_files_sync)

    def cut_back(self, rows: int) -> None:
        """Cuts all files to so many rows, or to the size that they were found with if that is more. Raises FileError,
        once all that can be cut are."""
        self._try(core().tdgpu_files_cut_back, c_uint64(rows))

    def _try(self, function: Any, *arguments: c_uint64) -> None:
        file = c_uint32()
        code = function(self.handle, *arguments, byref(file))
        if code:
            raise FileError(file.value, code)

    @property
    def handle(self) -> c_void_p:
        """The core's object."""
        check_process(self._process)
        return self._handle


class NativeOutlet:
    """A ring that chunks are copied to, and from which the writers take them (``csrc/outlet.h``).

    Args:
        source: a driver and the index of its device, whose copy stream then copies; or the address of memory into which
            the caller copies, to which `keep` belongs.
        nbytes: of the ring.
        keep: whose memory it is.

    Raises:
        DeviceError: the device's stream cannot wait for gates.
        TransferError: no memory can be pinned.
    """

    _handle = c_void_p()

    def __init__(self, source: tuple[Driver, int] | int, nbytes: int, keep: object = None) -> None:
        self._process = os.getpid()
        self._handle = c_void_p()
        self._keep = keep
        if isinstance(source, int):
            cause = core().tdgpu_outlet_create_over(source, nbytes, byref(self._handle))
        else:
            driver, index = source
            cause = core().tdgpu_outlet_create(driver.handle, index, nbytes, byref(self._handle))
        check(cause, "Rows cannot be staged")
        ring, pinned = c_uint64(), c_uint64()
        core().tdgpu_outlet_facts(self._handle, byref(ring), byref(pinned))
        self.ring_bytes = ring.value
        self.pinned_bytes = pinned.value

    @property
    def handle(self) -> c_void_p:
        """The core's object."""
        check_process(self._process)
        return self._handle

    def claim(self, nbytes: int) -> tuple[int, int]:
        """A place for a chunk, which may still be in use: the chunk's number, and the address."""
        chunk, address = c_uint32(), c_uint64()
        check(core().tdgpu_outlet_claim(self.handle, nbytes, byref(chunk), byref(address)), "No place for rows")
        return chunk.value, address.value

    def follow(self, stream: int) -> None:
        """What is copied from now on is copied behind what `stream` (a driver's handle) has queued."""
        check(core().tdgpu_outlet_follow(self.handle, stream), "Rows cannot be copied")

    def copy(self, chunk: int, to: int, source: int, nbytes: int) -> None:
        """Enqueues a copy from the device into the place of the last chunk that was claimed."""
        check(core().tdgpu_outlet_copy(self.handle, chunk, to, source, nbytes), "Rows cannot be copied")

    def order(self, stream: int) -> None:
        """What is enqueued on `stream` from now on comes behind all copies so far."""
        check(core().tdgpu_outlet_order(self.handle, stream), "The stream cannot wait for the copies of rows")

    def settle(self) -> None:
        """All chunks so far count as copied when the copies that are enqueued are over, also after an error."""
        check(core().tdgpu_outlet_settle(self.handle), "Rows cannot be copied")

    def wait_copied(self, chunk: int, milliseconds: int = SLICE_MS) -> bool:
        """Whether the copies up to this chunk's are over."""
        return bool(core().tdgpu_outlet_wait_copied(self.handle, chunk, milliseconds))

    def check(self) -> None:
        """Raises DeviceError if copies are under way and will not end, because the device has broken down."""
        check(core().tdgpu_outlet_check(self.handle), "Waiting for the copies of rows failed")

    def wait_free(self, chunk: int, milliseconds: int = SLICE_MS) -> bool:
        """Whether the chunk's place may be written by the caller."""
        return bool(core().tdgpu_outlet_wait_free(self.handle, chunk, milliseconds))

    def set_copied(self, chunk: int) -> None:
        """The caller's copies of all chunks up to this one are over."""
        core().tdgpu_outlet_set_copied(self.handle, chunk)

    def last_chunk(self) -> int:
        """The number of the last chunk that was claimed."""
        return int(core().tdgpu_outlet_last_chunk(self.handle))

    def discard(self, chunk: int) -> None:
        """Chunks after this one that are not written will not be: their places are free once their copies are over."""
        core().tdgpu_outlet_discard(self.handle, chunk)

    def close(self, milliseconds: int) -> None:
        """Frees the ring, once all stores of its chunks are over; not if copies do not end within `milliseconds`."""
        if self._handle.value is not None and os.getpid() == self._process:
            check(core().tdgpu_outlet_close(byref(self._handle), milliseconds), "An outlet cannot be closed")
            self._keep = None


@dataclass(frozen=True)
class StoreReport:
    """How far a store is, and the first thing that went wrong with it (``code`` is errno; 0 where nothing did)."""

    written: int
    wanted: int
    found: int
    file: int
    code: int


class Store:
    """A batch of rows on its way to disk. Holds what it is written from until it is dropped."""

    handle = c_void_p()  # an interrupt may come before __init__ is through

    def __init__(self, keep: object) -> None:
        self.handle = c_void_p()
        self._keep = keep
        self._process = os.getpid()

    @until_exit
    def __del__(self) -> None:
        if self.handle.value is not None and os.getpid() == self._process:
            core().tdgpu_store_release(self.handle)

    @property
    def has_begun(self) -> bool:
        """Whether the writers have it; true at once when they do, whatever comes in between."""
        return self.handle.value is not None

    def is_over_and_well(self) -> bool:
        """Whether all of it is written."""
        return self.wait(0) and not self.report().code

    def wait(self, milliseconds: int = SLICE_MS) -> bool:
        """Whether nothing of it is under way, waiting for up to `milliseconds`."""
        check_process(self._process)
        return bool(core().tdgpu_store_wait(self.handle, milliseconds))

    def cancel(self) -> None:
        """What is not written yet need not be."""
        check_process(self._process)
        core().tdgpu_store_cancel(self.handle)

    def report(self) -> StoreReport:
        """How far it is."""
        check_process(self._process)
        raw = _StoreReport()
        core().tdgpu_store_report(self.handle, byref(raw))
        return StoreReport(raw.bytes_written, raw.wanted, raw.found, raw.file, raw.error)


class Writers:
    """The writer threads of the process (``csrc/writers.h``). They stay until ``stop``."""

    def __init__(self, threads: int) -> None:
        self._handle = c_void_p()
        check(core().tdgpu_writers_create(threads, byref(self._handle)), "No writer threads")

    def post(self, files: Files, parts: np.ndarray, chunks: Sequence[tuple[NativeOutlet, int]], store: Store) -> None:
        """Starts writing.

        Args:
            files: the files.
            parts: an array of PART; those of one file by their place in it.
            chunks: those that ``parts["chunk"]`` counts from 1.
            store: is under way from then on.
        """
        assert parts.dtype == PART and parts.flags.c_contiguous
        taken = np.array([(outlet.handle.value, chunk, 0) for outlet, chunk in chunks], _STORED_CHUNK)
        cause = core().tdgpu_writers_post(
            self._handle, files.handle, parts.ctypes.data, len(parts), taken.ctypes.data, len(taken),
            byref(store.handle),
        )  # fmt: skip
        check(cause, "Rows cannot be written")

    def stop(self) -> None:
        """Joins the threads; what is queued ends unwritten."""
        core().tdgpu_writers_stop(self._handle)
