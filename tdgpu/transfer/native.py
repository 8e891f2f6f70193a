"""The ctypes face of what the native core (``csrc/capi.cpp``) reads: plans, loads to a device, reads to the host."""

from __future__ import annotations

import abc
import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass, field

import numpy as np

from tdgpu.errors import TransferError
from tdgpu.signals import finalizer
from tdgpu.transfer.library import CAUSES, SLICE_MS, Driver, check, check_process, core, declare

# Paths, and the inodes that they had when they were checked (0: any).
Files = list[tuple[str, int]]

# The structures Piece and Chunk of csrc/load.h, and Run of csrc/inflate.h.
PIECE = np.dtype(
    [
        ("offset", "u8"), ("bytes", "u8"), ("chunk_offset", "u8"), ("file", "u4"), ("direct", "u4"), ("run", "u4"),
        ("leaf", "u4"),
    ],
    align=True,
)  # fmt: skip
CHUNK = np.dtype(
    [
        ("destination", "u8"), ("bytes", "u8"), ("first_piece", "u4"), ("piece_count", "u4"), ("event", "u4"),
        ("reserved", "u4"),
    ],
    align=True,
)  # fmt: skip
RUN = np.dtype(
    [
        ("file_offset", "u8"), ("stored", "u8"), ("bytes", "u8"), ("file", "u4"), ("method", "u4"), ("crc", "u4"),
        ("flags", "u4"),
    ],
    align=True,
)  # fmt: skip
OPEN_END = 1
END_MARKER = 2

# Codec of csrc/codecs.h.
CODECS = ("libdeflate", "zlib", "bzip2", "lzma", "zstd")


class LoadReport(ctypes.Structure):
    """The structure LoadReport of csrc/capi.h."""

    _fields_ = (
        ("bytes_read", c_uint64), ("failed_piece", c_int64), ("wanted", c_uint64), ("found", c_uint64),
        ("cause", c_int32), ("code", c_int32), ("is_filled", c_int32), ("reserved", c_int32),
        ("warm_ns", c_uint64), ("cold_ns", c_uint64),
    )  # fmt: skip


class _CheckedFile(ctypes.Structure):
    _fields_ = (("path", c_char_p), ("inode", c_uint64))


class PlanView(ctypes.Structure):
    """The structure PlanView of csrc/capi.h. It borrows what it points to."""

    _fields_ = (
        ("files", POINTER(_CheckedFile)), ("pieces", c_void_p), ("chunks", c_void_p), ("runs", c_void_p),
        ("sources", POINTER(c_void_p)), ("rows", c_void_p),
        ("file_count", c_uint32), ("piece_count", c_uint32), ("chunk_count", c_uint32), ("run_count", c_uint32),
        ("source_count", c_uint32), ("row_count", c_uint32), ("most_threads", c_uint32), ("reserved", c_uint32),
    )  # fmt: skip


class RowSource:
    """The rows of one leaf, of which any may be gathered (``csrc/rows.h``): in a file, or in memory.

    Args:
        place: path, inode (0: any) and offset in bytes of the first row in a file; or the address of memory, to which
            `keep` belongs.
        row_nbytes: bytes of a row.
        rows: how many there are.
        keep: whose memory it is.

    Raises:
        LoadError: the file cannot be opened, is another one, or is too short.
    """

    _handle = c_void_p()

    def __init__(self, place: tuple[str, int, int] | int, row_nbytes: int, rows: int, keep: object = None) -> None:
        self._process = os.getpid()
        self._handle = c_void_p()
        self._keep = keep
        if isinstance(place, int):
            cause = core().tdgpu_rows_create_over(place, row_nbytes, rows, byref(self._handle))
        else:
            path, inode, offset = place
            cause = core().tdgpu_rows_create(os.fsencode(path), inode, offset, row_nbytes, rows, byref(self._handle))
        check(cause, "A leaf cannot be opened")

    @finalizer
    def __del__(self) -> None:
        # A forked child has the mapping, too, and may let go of it.
        if self._handle.value is not None:
            core().tdgpu_rows_release(byref(self._handle))

    @property
    def handle(self) -> int:
        """The core's object."""
        assert self._handle.value is not None
        return self._handle.value


# What a piece of gathered rows has in the place of the number of a run.
GATHERED = (1 << 32) - 1
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Work:
    """What the readers are to do: the core's ``Plan``.

    Attributes:
        files: paths and inodes. (Of gathered rows, the core does not need them: they are for messages.)
        pieces, chunks, runs: arrays of the core's structures.
        most_threads: readers that may work on it at a time; 0 for all there are.
        sources: what rows are gathered from.
        rows: which, int64.
    """

    files: Files
    pieces: np.ndarray
    chunks: np.ndarray
    runs: np.ndarray
    most_threads: int = 0
    sources: Sequence[RowSource] = ()
    rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)

    def view(self) -> PlanView:
        """The core's structure, which borrows the arrays."""
        assert self.pieces.dtype == PIECE and self.chunks.dtype == CHUNK and self.runs.dtype == RUN
        assert self.rows.dtype == np.int64 and self.rows.flags.c_contiguous
        sources = (c_void_p * len(self.sources))(*[source.handle for source in self.sources])
        files = (_CheckedFile * len(self.files))(
            *[_CheckedFile(os.fsencode(path), inode) for path, inode in self.files]
        )
        return PlanView(
            files, self.pieces.ctypes.data, self.chunks.ctypes.data, self.runs.ctypes.data,
            sources, self.rows.ctypes.data,
            len(files), len(self.pieces), len(self.chunks), len(self.runs), len(sources), len(self.rows),
            self.most_threads, 0,
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


declare(
    {
    "tdgpu_set_pread": (None, c_void_p),
    "tdgpu_rows_create": (c_int, c_char_p, c_uint64, c_uint64, c_uint64, c_uint64, POINTER(c_void_p)),
    "tdgpu_rows_create_over": (c_int, c_void_p, c_uint64, c_uint64, POINTER(c_void_p)),
    "tdgpu_rows_release": (None, POINTER(c_void_p)),
    "tdgpu_engine_create": (c_int, c_void_p, c_int, c_uint64, c_uint32, POINTER(c_void_p)),
    "tdgpu_engine_facts": (
        None, c_void_p, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint32), c_char_p, c_size_t,
    ),
    "tdgpu_engine_close": (c_int, c_void_p, c_int64),
    "tdgpu_transfer_begin": (c_int, c_void_p, POINTER(PlanView), c_uint32, c_uint64, POINTER(c_void_p)),
    "tdgpu_engine_take_road": (c_int, c_void_p, c_int, c_int64, POINTER(c_int)),
    "tdgpu_transfer_pump": (c_int, c_void_p, c_void_p, c_int64, POINTER(c_int)),
    "tdgpu_transfer_abort": (c_int, c_void_p, c_void_p, c_int64, POINTER(c_int)),
    "tdgpu_transfer_order": (c_int, c_void_p, c_void_p, c_uint32, c_uint64),
    "tdgpu_transfer_wait": (c_int, c_void_p, c_void_p, c_uint32, c_int64, POINTER(c_int)),
    "tdgpu_transfer_time_copies": (c_int, c_void_p, c_void_p, POINTER(c_void_p)),
    "tdgpu_times_seconds": (c_int, c_void_p, POINTER(c_double)),
    "tdgpu_times_release": (None, POINTER(c_void_p)),
    "tdgpu_transfer_load": (c_void_p, c_void_p),
    "tdgpu_transfer_release": (None, POINTER(c_void_p)),
    "tdgpu_load_cancel": (None, c_void_p),
    "tdgpu_load_wait_filled": (c_int, c_void_p, c_int64),
    "tdgpu_load_report": (None, c_void_p, POINTER(LoadReport), c_char_p, c_size_t),
    "tdgpu_readers_create": (c_int, c_uint32, POINTER(c_void_p)),
    "tdgpu_readers_stop": (None, c_void_p),
    "tdgpu_readers_destroy": (None, POINTER(c_void_p)),
    "tdgpu_readers_post": (c_int, c_void_p, POINTER(PlanView), POINTER(c_void_p)),
    "tdgpu_read_load": (c_void_p, c_void_p),
    "tdgpu_read_release": (None, POINTER(c_void_p)),
    "tdgpu_stage_create": (c_int, c_void_p, c_uint64, c_uint32, POINTER(c_void_p)),
    "tdgpu_stage_facts": (None, c_void_p, POINTER(c_uint64), POINTER(c_uint32)),
    "tdgpu_stage_cancel": (None, c_void_p),
    "tdgpu_stage_stop": (None, c_void_p),
    "tdgpu_stage_destroy": (None, POINTER(c_void_p)),
    "tdgpu_stage_post": (c_int, c_void_p, POINTER(PlanView), POINTER(c_void_p)),
    "tdgpu_stage_wait_ready": (c_int, c_void_p, c_void_p, c_uint32, c_int64, POINTER(c_uint64)),
    "tdgpu_stage_set_copied": (None, c_void_p, c_void_p, c_uint32),
    "tdgpu_stage_strand": (None, c_void_p, c_uint32),
    "tdgpu_load_codec": (c_int, c_int, c_char_p),
    "tdgpu_combine_crc32": (c_int, c_void_p, c_void_p, c_uint64, POINTER(c_uint32)),
    }
)  # fmt: skip


def set_pread(address: int | None) -> None:
    """Puts a C function with pread's signature in the place of pread, for tests; None puts the real one back."""
    core().tdgpu_set_pread(address)


class Engine:
    """One device's ring, copy stream and readers (``csrc/engine.h``)."""

    def __init__(self, driver: Driver, index: int, ring_bytes: int, threads: int) -> None:
        handle = c_void_p()
        check(
            core().tdgpu_engine_create(driver.handle, index, ring_bytes, threads, byref(handle)),
            f"Device {index} cannot be prepared for transfers",
        )
        self.handle = handle
        ring, pinned, largest, count = c_uint64(), c_uint64(), c_uint64(), c_uint32()
        why = ctypes.create_string_buffer(512)
        core().tdgpu_engine_facts(handle, byref(ring), byref(pinned), byref(largest), byref(count), why, len(why))
        self.threads = count.value
        self.ring_bytes = ring.value
        self.pinned_bytes = pinned.value
        self.largest_chunk = largest.value
        self.why_host = why.value.decode(errors="replace")

    def take_road(self, road: str) -> bool:
        """Changes between the ``"gated"`` and the ``"host"`` road; False while loads on the other are under way."""
        taken = c_int()
        cause = core().tdgpu_engine_take_road(self.handle, ("gated", "host").index(road), SLICE_MS, byref(taken))
        check(cause, f"The load cannot be {road}")
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

    def gathered(self) -> tuple[float, float] | None:
        """How long threads gathered rows that were in memory, and rows for which a disk was read, in seconds; None if
        something went wrong."""
        raw = LoadReport()
        core().tdgpu_load_report(self._load, byref(raw), None, 0)
        return None if raw.cause else (raw.warm_ns * 1e-9, raw.cold_ns * 1e-9)

    def report(self) -> Report:
        """How far it is."""
        raw, text = LoadReport(), ctypes.create_string_buffer(512)
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


class CopyTimes:
    """How long the copies of a load take, by the device's events (``csrc/events.h``)."""

    _handle = c_void_p()

    def __init__(self) -> None:
        self._handle = c_void_p()
        self._process = os.getpid()

    @finalizer
    def __del__(self) -> None:
        if self._handle.value is not None and os.getpid() == self._process:
            core().tdgpu_times_release(byref(self._handle))

    def seconds(self) -> float | None:
        """See :class:`tdgpu.transfer.base.CopyTimes`. In a forked child, which cannot tell, none were measured."""
        if os.getpid() != self._process:
            return 0.0
        seconds = c_double()
        check(core().tdgpu_times_seconds(self._handle, byref(seconds)), "The copies cannot be timed")
        return seconds.value if seconds.value >= 0 else None


class Transfer(_Load):
    """A load on its way to a device. Owns the core's object, which lives on in the readers as long as they need it."""

    # An interrupt may come before __init__ is through.
    _handle = c_void_p()

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._handle = c_void_p()
        self.process = os.getpid()

    @finalizer
    def __del__(self) -> None:
        # After a fork the core's locks may be held by threads that the child does not have.
        if self._handle.value is not None and os.getpid() == self.process:
            core().tdgpu_transfer_release(byref(self._handle))

    @property
    def has_begun(self) -> bool:
        """Whether there is something to take back; true at once when the core has begun, whatever comes in between."""
        return self._handle.value is not None

    def begin(self, work: Work, events: int, stream: int) -> None:
        """Orders the copy stream behind `stream` (a driver's handle) and starts the readers."""
        view = work.view()
        cause = core().tdgpu_transfer_begin(self._engine.handle, view, events, stream, byref(self._handle))
        check(cause, "The load cannot begin")

    def time_copies(self) -> CopyTimes:
        """Has the copies timed. After :meth:`begin`, before :meth:`pump`."""
        times = CopyTimes()
        cause = core().tdgpu_transfer_time_copies(self._engine.handle, self._live, byref(times._handle))
        check(cause, "The copies cannot be timed")
        return times

    @property
    def _live(self) -> c_void_p:
        """The core's object; in a forked child it is not to be touched."""
        check_process(self.process)
        return self._handle

    @property
    def _load(self) -> int:
        return int(core().tdgpu_transfer_load(self._live))

    def pump(self) -> bool:
        """Enqueues for up to SLICE_MS; True when everything is enqueued."""
        done = c_int()
        check(core().tdgpu_transfer_pump(self._engine.handle, self._live, SLICE_MS, byref(done)), "The load failed")
        return bool(done.value)

    def abort(self) -> bool:
        """Takes the load back, for up to SLICE_MS; True when no copy of it is under way."""
        done = c_int()
        check(
            core().tdgpu_transfer_abort(self._engine.handle, self._live, SLICE_MS, byref(done)),
            "The load cannot be taken back",
        )
        return bool(done.value)

    def order(self, event: int, stream: int) -> None:
        """Makes `stream` (a driver's handle) wait for the event."""
        check(
            core().tdgpu_transfer_order(self._engine.handle, self._live, event, stream),
            "The stream cannot wait for the load",
        )

    def wait(self, event: int, milliseconds: int = SLICE_MS) -> bool:
        """Whether the event has passed, waiting on the host for up to `milliseconds`."""
        passed = c_int()
        check(
            core().tdgpu_transfer_wait(self._engine.handle, self._live, event, milliseconds, byref(passed)),
            "Waiting for the load failed",
        )
        return bool(passed.value)


class Readers:
    """Reader threads that fill host memory.

    Args:
        threads: how many.
        keep: whose memory they write to. It is held until they have ended, whoever else drops it.
    """

    # An interrupt may come before __init__ is through.
    _handle = c_void_p()
    _process = 0

    def __init__(self, threads: int, keep: object = None) -> None:
        self._handle = c_void_p()
        self._closing = threading.RLock()  # a signal handler may close them, too
        self._process = os.getpid()
        _open_readers.add(self)
        # Not in the object: its end may be interrupted, and then the memory must stay.
        _kept[id(self)] = keep
        check(core().tdgpu_readers_create(threads, byref(self._handle)), "No reader threads")

    @finalizer
    def __del__(self) -> None:
        # Only now: another thread may be about to post.
        if os.getpid() == self._process:
            self.close()
            if self._handle.value is not None:
                core().tdgpu_readers_destroy(byref(self._handle))

    @property
    def handle(self) -> c_void_p:
        """The core's object."""
        return self._handle

    def post(self, work: Work) -> Read:
        """Starts reading. The destinations are host addresses, valid until the read is over.

        Raises:
            TransferError: the threads have ended.
        """
        read = Read()
        check(core().tdgpu_readers_post(self._handle, work.view(), byref(read.handle)), "The read cannot begin")
        return read

    def close(self) -> None:
        """Joins the threads; reads that are queued, and what is left of those under way, end without being read."""
        if os.getpid() == self._process:
            with self._closing:
                if self._handle.value is not None:
                    core().tdgpu_readers_stop(self._handle)
                _kept.pop(id(self), None)


# Threads must not write to memory of an interpreter that is taken apart.
_open_readers: weakref.WeakSet[Readers] = weakref.WeakSet()
_kept: dict[int, object] = {}


@atexit.register
def _close_readers() -> None:
    for readers in list(_open_readers):
        readers.close()


class Stage:
    """A ring of host memory, and readers that fill it (``csrc/stage.h``).

    Args:
        address, nbytes: the memory.
        threads: how many readers.
        keep: whose memory it is. It is held until the readers have ended, whoever else drops it.
    """

    _handle = c_void_p()

    def __init__(self, address: int, nbytes: int, threads: int, keep: object) -> None:
        self._process = os.getpid()
        self._handle = c_void_p()
        self.is_closed = False
        # As for Readers: its end may be interrupted.
        _kept[id(self)] = keep
        check(core().tdgpu_stage_create(address, nbytes, threads, byref(self._handle)), "No reader threads")
        ring, count = c_uint64(), c_uint32()
        core().tdgpu_stage_facts(self._handle, byref(ring), byref(count))
        self.ring_bytes = ring.value
        self.threads = count.value

    @finalizer
    def __del__(self) -> None:
        # Only now: reads that are under way still ask for their places.
        if os.getpid() == self._process:
            if self._handle.value is not None:
                core().tdgpu_stage_destroy(byref(self._handle))
            _kept.pop(id(self), None)

    def post(self, work: Work, read: StagedRead) -> None:
        """Starts reading into the ring; from then on, `read` is the read.

        Raises:
            TransferError: the stage is closed.
        """
        if self.is_closed:
            raise TransferError("The process ended before the load began.")
        check(core().tdgpu_stage_post(self._handle, work.view(), byref(read.handle)), "The load cannot begin")

    def cancel(self) -> None:
        """Reads that are queued or under way need not be read any more."""
        core().tdgpu_stage_cancel(self._handle)

    def close(self) -> None:
        """Joins the threads; reads that are queued end without being read."""
        self.is_closed = True
        if os.getpid() == self._process:
            core().tdgpu_stage_stop(self._handle)


class Read(_Load):
    """A read into host memory. The core fills in its handle as it begins, so that no interrupt can come in between."""

    handle = c_void_p()  # an interrupt may come before __init__ is through

    def __init__(self) -> None:
        self.handle = c_void_p()
        self._process = os.getpid()

    @finalizer
    def __del__(self) -> None:
        if self.has_begun and os.getpid() == self._process:
            core().tdgpu_read_release(byref(self.handle))

    @property
    def has_begun(self) -> bool:
        """Whether the core knows of it."""
        return self.handle.value is not None

    @property
    def _load(self) -> int:
        check_process(self._process)
        return int(core().tdgpu_read_load(self.handle))


class StagedRead(Read):
    """A read into a stage's ring, whose chunks the caller copies on, in order."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def wait_ready(self, chunk: int, milliseconds: int = SLICE_MS) -> int | None:
        """Where the chunk begins in the ring's memory; None if it is not ready within `milliseconds`."""
        offset = c_uint64()
        is_ready = core().tdgpu_stage_wait_ready(self._stage._handle, self.handle, chunk, milliseconds, byref(offset))
        return offset.value if is_ready else None

    def set_copied(self, chunk: int) -> None:
        """The copies up to this chunk's are over."""
        core().tdgpu_stage_set_copied(self._stage._handle, self.handle, chunk)

    def strand(self, chunk: int) -> None:
        """Chunks from this one on will not be taken: nothing waits for their places, nothing is read into them."""
        core().tdgpu_stage_strand(self.handle, chunk)


def load_codec(codec: str, path: str) -> None:
    """Gives the core a library to inflate with; one that it has already stays.

    Raises:
        DeviceError: it cannot be opened, or lacks a function.
    """
    cause = core().tdgpu_load_codec(CODECS.index(codec), os.fsencode(path))
    check(cause, f"The library {path} cannot be used")


def combine_crc32(crcs: np.ndarray, sizes: np.ndarray) -> int:
    """The CRC-32 of consecutive parts, from the CRC-32 and the size in bytes of each. Needs the codec ``"zlib"``."""
    crcs, sizes = np.ascontiguousarray(crcs, np.uint32), np.ascontiguousarray(sizes, np.uint64)
    combined = c_uint32()
    cause = core().tdgpu_combine_crc32(crcs.ctypes.data, sizes.ctypes.data, len(crcs), byref(combined))
    check(cause, "CRC-32s cannot be combined")
    return combined.value
