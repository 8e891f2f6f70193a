"""From pieces to chunks: what goes through the ring together, and in which order."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from tdgpu.transfer import runs
from tdgpu.transfer.native import CHUNK, PIECE
from tdgpu.transfer.runs import AT, BYTES, PIECE_RUN

Target = TypeVar("Target")

PIECE_BYTES = 256 << 10  # small enough that all readers share one chunk, large enough that a read call costs nothing
PAGE = 4096

_CHUNKS = ("destination", "bytes", "first_piece", "piece_count")


class Chunker(Generic[Target]):
    """Puts pieces into chunks.

    Args:
        chunk_bytes: bytes that a chunk should have.
        ring_bytes: bytes of the ring; a block may make a chunk larger, up to a quarter of it.
        lanes: how many threads may work on the chunks.
        direct: whether plain pieces of what fills chunks by itself are read past the page cache.

    Attributes:
        targets: of each chunk, what it belongs to, and where it begins in that, in bytes.
        chunk_count: chunks so far; those of long runs are made at the end.
    """

    def __init__(self, chunk_bytes: int, ring_bytes: int, lanes: int, *, direct: bool = False) -> None:
        self.targets: list[tuple[Target, int]] = []
        self._chunk_bytes = chunk_bytes
        self._ring_bytes = ring_bytes
        self._lanes = lanes
        self._direct = direct
        # Rows of the arrays to come, with the columns of runs.COLUMNS and _CHUNKS.
        self._pieces: list[np.ndarray] = []
        self._chunks: list[np.ndarray] = []
        self._piece_count = 0
        # Runs of more than one chunk: what each belongs to, where that begins in memory, and its piece.
        self._streams: list[tuple[Target, int, np.ndarray]] = []

    def add(self, pieces: np.ndarray, target: Target, address: int) -> None:
        """Adds pieces that follow each other, in as many chunks as it takes.

        Args:
            pieces: a table as of :meth:`tdgpu.transfer.runs.Sources.cut`.
            target: what they belong to.
            address: where that begins in memory, on the host or on a device.
        """
        if not pieces[0, PIECE_RUN]:
            pieces = runs.split(pieces, min(self._chunk_bytes, PIECE_BYTES))
            pieces[:, runs.DIRECT] = self._direct
            self._add(pieces, pieces[:, AT] // np.uint64(self._chunk_bytes), target, address)
            return
        block = int(pieces[:, BYTES].max())
        if len(pieces) > 1 and block <= self._ring_bytes // 4:
            # Each chunk takes whole blocks, the first of which may be wanted in part only.
            per_chunk = max(self._chunk_bytes // block, 1)
            self._add(pieces, np.arange(len(pieces), dtype=np.uint64) // np.uint64(per_chunk), target, address)
        elif int(pieces[-1, AT] + pieces[-1, BYTES]) <= self._chunk_bytes:
            self.add_together(pieces, target, address)
        else:
            self._streams.extend((target, address, pieces[i : i + 1]) for i in range(len(pieces)))

    def add_together(self, pieces: np.ndarray, target: Target, address: int) -> None:
        """Adds pieces as one chunk. Arguments as of :meth:`add`."""
        self._add(pieces, np.zeros(len(pieces), np.uint64), target, address)

    def _add(self, pieces: np.ndarray, chunk_of: np.ndarray, target: Target, address: int) -> None:
        """Chunks of pieces that follow each other; `chunk_of` tells them apart."""
        first = np.flatnonzero(np.concatenate(([True], chunk_of[1:] != chunk_of[:-1])))
        last = np.append(first[1:], len(pieces)) - 1
        starts = pieces[first, AT]
        chunks = np.empty((len(first), len(_CHUNKS)), np.uint64)
        chunks[:, 0] = starts + np.uint64(address)
        chunks[:, 1] = pieces[last, AT] + pieces[last, BYTES] - starts
        chunks[:, 2] = first + self._piece_count
        chunks[:, 3] = last - first + 1
        pieces[:, AT] -= np.repeat(starts, last - first + 1)
        self.targets.extend((target, start) for start in starts.tolist())
        self._pieces.append(pieces)
        self._chunks.append(chunks)
        self._piece_count += len(pieces)

    def _add_streams(self) -> None:
        """The chunks of long runs, such that as many are inflated side by side as there are threads.

        Who inflates a run holds on to it until its end, and waits for places in the ring meanwhile. So no more of them
        may be under way at any point of the order of chunks than there are threads, or the chunk that all wait for
        would be nobody's. Every run belongs to one of as many lanes, and the lanes are merged by bytes.
        """
        if not self._streams:
            return
        lanes = min(self._lanes, len(self._streams))
        # Each lane wants a chunk in the ring that is copied and one that is filled.
        size = min(self._chunk_bytes, self._ring_bytes // (2 * lanes))
        size = max(size // PAGE * PAGE, PAGE)
        ends = [0] * lanes
        order: list[tuple[int, int, Target, int, np.ndarray]] = []
        for target, address, run in self._streams:
            lane = ends.index(min(ends))
            for piece in runs.split(run, size):
                ends[lane] += int(piece[BYTES])
                order.append((ends[lane], lane, target, address, piece[None].copy()))
        order.sort(key=lambda chunk: chunk[:2])
        for _, _, target, address, piece in order:
            self.add_together(piece, target, address)
        self._streams = []

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """All pieces and chunks, as the core's structures."""
        self._add_streams()
        return runs.structures(PIECE, runs.COLUMNS, self._pieces), runs.structures(CHUNK, _CHUNKS, self._chunks)
