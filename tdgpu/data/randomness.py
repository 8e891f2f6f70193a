"""The ctypes face of the native core's orders and draws (``csrc/permutation.h``, ``csrc/weighted.h``).

All of them are functions of a key and of positions: there is no state, and no generator of torch's, numpy's or Python's
is touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from ctypes import POINTER, byref, c_int, c_uint64, c_void_p

import numpy as np

from tdgpu.errors import InvalidArgument
from tdgpu.transfer.library import check, core, declare

# Rows for one call of the core: signals are seen between calls.
SLICE = 1 << 20

declare(
    {
        "tdgpu_philox": (None, c_void_p, c_uint64, c_uint64, c_void_p),
        "tdgpu_permute": (c_int, c_uint64, c_void_p, c_uint64, c_uint64, c_uint64, c_void_p),
        "tdgpu_shuffle_steps": (None, c_void_p, c_uint64, c_void_p, c_uint64, c_uint64),
        "tdgpu_check_weights": (c_int, c_void_p, c_uint64, POINTER(c_uint64)),
        "tdgpu_make_table": (None, c_void_p, c_uint64, c_void_p),
        "tdgpu_draw": (None, c_void_p, c_uint64, c_void_p, c_uint64, c_uint64, c_uint64, c_void_p),
        "tdgpu_make_ranks": (None, c_void_p, c_uint64, c_uint64, c_void_p, c_void_p),
    }
)


def key_of(purpose: str, seed: int, epoch: int) -> np.ndarray:
    """The key (uint64, [2]): all arguments as BLAKE2b mixes them. Integers of any size and sign differ."""
    digest = hashlib.blake2b(f"tdgpu {purpose} {seed:x} {epoch:x}".encode(), digest_size=16).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def check_positions(first: int, count: int, stride: int, length: int) -> None:
    """Raises InvalidArgument unless first, first + stride, ..., ``count`` positions, are all in [0, length)."""
    if first < 0 or count < 0 or stride < 1:
        raise InvalidArgument(
            f"Positions begin at 0 or later, and their stride at 1: first={first}, count={count}, stride={stride}."
        )
    if count and first + (count - 1) * stride >= length:
        raise InvalidArgument(
            f"There are {length} positions: first={first}, count={count}, stride={stride} would go beyond."
        )


def permuted(length: int, key: np.ndarray, first: int, count: int, stride: int) -> np.ndarray:
    """The rows (int64, [count]) at checked positions of the permutation of [0, length) that the key makes."""

    def fill(start: int, size: int, rows: int) -> None:
        check(core().tdgpu_permute(length, key.ctypes.data, start, stride, size, rows), "No permutation")

    return _filled(fill, first, count, stride)


def shuffle(rows: np.ndarray, key: np.ndarray, begin: int, end: int) -> None:
    """Settles the positions from begin to end of a list of rows (int64), in which those before it are settled."""
    for start, size in _slices(end - begin):
        core().tdgpu_shuffle_steps(rows.ctypes.data, len(rows), key.ctypes.data, begin + start, begin + start + size)


def words(key: np.ndarray, place: int, subplace: int) -> np.ndarray:
    """The four random words (uint64, [4]) of a place: everything else here is made of such."""
    result = np.empty(4, np.uint64)
    core().tdgpu_philox(key.ctypes.data, place, subplace, result.ctypes.data)
    return result


def check_weights(weights: np.ndarray) -> int:
    """How many of the weights (float64, [rows], contiguous) are above zero.

    Raises:
        InvalidArgument: a weight is negative, infinite or not a number; none is above zero.
    """
    positive = c_uint64()
    check(core().tdgpu_check_weights(weights.ctypes.data, len(weights), byref(positive)), "No row can be drawn")
    return positive.value


def make_table(weights: np.ndarray) -> np.ndarray:
    """The alias table (uint64, [rows, 2]) of checked weights."""
    table = np.empty((len(weights), 2), np.uint64)
    core().tdgpu_make_table(weights.ctypes.data, len(weights), table.ctypes.data)
    return table


def drawn(table: np.ndarray, key: np.ndarray, first: int, count: int, stride: int) -> np.ndarray:
    """The rows (int64, [count]) that the draws at these positions give."""

    def fill(start: int, size: int, rows: int) -> None:
        core().tdgpu_draw(table.ctypes.data, len(table), key.ctypes.data, start, stride, size, rows)

    return _filled(fill, first, count, stride)


def ranks(weights: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Numbers (float64, [rows]) whose rising order is that of draws without replacement; infinite: never drawn."""
    result = np.empty(len(weights), np.float64)
    for begin, size in _slices(len(weights)):
        core().tdgpu_make_ranks(weights[begin:].ctypes.data, begin, size, key.ctypes.data, result[begin:].ctypes.data)
    return result


def _filled(fill: Callable[[int, int, int], None], first: int, count: int, stride: int) -> np.ndarray:
    rows = np.empty(count, np.int64)
    for begin, size in _slices(count):
        fill(first + begin * stride, size, rows[begin:].ctypes.data)
    return rows


def _slices(count: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, count, SLICE):
        yield begin, min(SLICE, count - begin)
