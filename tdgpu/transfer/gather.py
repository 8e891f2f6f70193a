"""The ctypes face of what the core does for every batch of a loop (``csrc/gather.h``): rows into host memory."""

from __future__ import annotations

from ctypes import POINTER, byref, c_int, c_int64, c_uint32, c_void_p

import numpy as np

from tdgpu.signals import finalizer
from tdgpu.transfer.library import check, core, declare
from tdgpu.transfer.native import LoadReport, PlanView, Read, Readers, Work

__all__ = ["Gather", "GatheredRead"]

declare(
    {
        "tdgpu_gather_create": (c_int, POINTER(PlanView), c_uint32, POINTER(c_void_p)),
        "tdgpu_gather_destroy": (None, POINTER(c_void_p)),
        "tdgpu_gather_post": (c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_uint32, POINTER(c_void_p)),
        "tdgpu_gather_now": (c_int, c_void_p, c_void_p, c_void_p, c_uint32, POINTER(c_void_p)),
        "tdgpu_read_outcome": (c_int, c_void_p, c_int64, POINTER(LoadReport)),
    }
)


class GatheredRead(Read):
    """Rows on their way to host memory.

    Attributes:
        outcome: how it went, when it is over; None before.
    """

    outcome: LoadReport | None = None

    def is_over(self, milliseconds: int) -> bool:
        """Whether all is gathered, or given up, waiting for up to `milliseconds`."""
        if self.outcome is None:
            report = LoadReport()
            if core().tdgpu_read_outcome(self.handle, milliseconds, byref(report)):
                self.outcome = report
        return self.outcome is not None


class Gather:
    """Gathers as many rows again and again.

    Args:
        work: its sources, pieces and chunks, whose destinations are counted from 0; rows are passed over.
        row_count: how many rows.
    """

    _handle = c_void_p()

    def __init__(self, work: Work, row_count: int) -> None:
        self.work = work
        self._row_count = row_count
        self._handle = c_void_p()
        cause = core().tdgpu_gather_create(work.view(), row_count, byref(self._handle))
        check(cause, "Rows cannot be gathered")

    @finalizer
    def __del__(self) -> None:
        if self._handle.value is not None:
            core().tdgpu_gather_destroy(byref(self._handle))

    def post(self, readers: Readers, rows: np.ndarray, addresses: np.ndarray) -> GatheredRead:
        """Starts to gather rows (int64) into memory, which is valid until it is over: each chunk to where the
        destinations of all chunks would be counted from (uint64).

        Raises:
            TransferError: the threads have ended.
        """
        read = GatheredRead()
        where, places = self._address(rows), addresses.ctypes.data
        cause = core().tdgpu_gather_post(
            self._handle, readers.handle, where, places, len(addresses), byref(read.handle)
        )
        check(cause, "The read cannot begin")
        return read

    def now(self, rows: np.ndarray, addresses: np.ndarray) -> GatheredRead:
        """Likewise in the calling thread, which nothing interrupts."""
        read = GatheredRead()
        where = self._address(rows)
        cause = core().tdgpu_gather_now(self._handle, where, addresses.ctypes.data, len(addresses), byref(read.handle))
        check(cause, "The read cannot begin")
        return read

    def _address(self, rows: np.ndarray) -> int:
        assert rows.dtype == np.int64 and rows.shape == (self._row_count,) and rows.flags.c_contiguous
        return rows.ctypes.data
