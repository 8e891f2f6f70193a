"""Host memory for large leaves of batches, used again when nobody holds them any more.

Memory that is fresh from the system is zeroed page by page as it is first written, which takes longer than gathering
the rows. The C library keeps small blocks, but gives large ones back.
"""

from __future__ import annotations

import collections
import weakref

import numpy as np
import torch

__all__ = ["BatchMemory"]

#: Smaller leaves are left to the C library.
LARGE = 32 << 10
_ALIGNMENT = 64


class BatchMemory:
    """Blocks of host memory. A block comes back when the last tensor on it is gone, whoever held it.

    Args:
        most: bytes of the blocks that are kept for later, together.
    """

    def __init__(self, most: int = 0) -> None:
        self._most = [most]  # shared with those that are out
        self._idle: collections.deque[np.ndarray] = collections.deque()
        self._out: dict[int, weakref.ref[np.ndarray]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """Bytes that are not initialised, as a tensor of uint8, of whose storage tensors can be made."""
        block = self._block(nbytes + _ALIGNMENT)
        skipped = -block.ctypes.data % _ALIGNMENT
        lent = block[skipped : skipped + nbytes]
        memory = torch.from_numpy(lent)
        # The storage holds `lent`; that it is gone is told, whichever thread drops the last tensor.
        idle, out, most, key = self._idle, self._out, self._most, id(lent)

        def give_back(_: object) -> None:
            out.pop(key, None)
            if sum(map(len, idle.copy())) + len(block) <= most[0]:
                idle.append(block)

        self._out[key] = weakref.ref(lent, give_back)
        return memory

    def allow(self, most: int) -> None:
        """Keeps so many bytes from now on, if that is more than before."""
        if self._most[0] < most:
            self._most[0] = most

    def close(self) -> None:
        """Keeps nothing any more, and what comes back neither."""
        self._most[0] = 0
        self._idle.clear()

    def _block(self, nbytes: int) -> np.ndarray:
        """An idle block that fits, if there is one, and is not so large that it would be a waste."""
        passed_over: list[np.ndarray] = []
        found = None
        while found is None:
            try:
                block = self._idle.pop()  # the latest, which the caches may still have
            except IndexError:  # others may take and bring blocks meanwhile
                break
            if nbytes <= len(block) <= 4 * nbytes:
                found = block
            else:
                passed_over.append(block)
        if found is None and sum(map(len, passed_over)) + nbytes > self._most[0]:
            del passed_over[-1:]  # what nobody has wanted for longest makes room for what is
        if passed_over:
            self._idle.extend(reversed(passed_over))
        return np.empty(nbytes, np.uint8) if found is None else found
