"""From extents to pieces: which bytes of a file, plain or inflated, make up a leaf.

What was compressed together can only be inflated from its start: it is a *run*. A block of an entry with a block index
is a run, and any other compressed entry is one run as a whole. A piece takes its bytes from one run, or plainly from
the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from tdgpu.errors import NotSupported
from tdgpu.layout.tree import Blocks, Extent, Packed
from tdgpu.transfer import codecs, native
from tdgpu.transfer.native import RUN, Files

# Columns of a table of pieces; AT is where the piece goes, in bytes from the first wanted one.
OFFSET, BYTES, AT, FILE, DIRECT, PIECE_RUN, LEAF = range(7)
COLUMNS = ("offset", "bytes", "chunk_offset", "file", "direct", "run", "leaf")


class Sources:
    """The files and runs of a plan."""

    def __init__(self) -> None:
        self.files: Files = []
        self._methods: set[int] = set()
        self._runs: list[np.ndarray] = []
        self._run_count = 0
        self._last_file: tuple[str, int] | None = None

    def cut(self, extent: Extent, first: int, nbytes: int, leaf: int, *, verify: bool) -> np.ndarray:
        """Pieces that make up bytes `first` to `first + nbytes` of what the extent holds (inflated, if compressed).

        Args:
            verify: whether the CRC-32 of a stored entry is to be checked, too, which takes a run.

        Returns:
            A table (pieces, 7) of uint64, in order.

        Raises:
            NotSupported: a library to inflate it with is missing.
        """
        file = self._file(extent)
        packed = extent.packed
        if packed is None or (packed.method == codecs.STORED and not verify):
            return np.array([[extent.offset + first, nbytes, 0, file, 0, 0, leaf]], np.uint64)
        self._require(extent, packed)
        if packed.blocks is not None and belongs(packed.blocks, packed):
            return self._cut_blocks(extent, packed, packed.blocks, first, nbytes, file, leaf)
        flags = native.END_MARKER if packed.has_end_marker else 0
        self._add_runs(
            np.array([(extent.offset, extent.nbytes, packed.nbytes, file, packed.method, packed.crc, flags)], RUN)
        )
        return np.array([[first, nbytes, 0, file, 0, self._run_count, leaf]], np.uint64)

    def _cut_blocks(
        self, extent: Extent, packed: Packed, blocks: Blocks, first: int, nbytes: int, file: int, leaf: int
    ) -> np.ndarray:
        begin, end = first // blocks.nbytes, -(-(first + nbytes) // blocks.nbytes)
        begin, end = (begin, end) if nbytes else (0, len(blocks.sizes))  # an empty entry is checked, too
        offsets = np.cumsum(blocks.sizes, dtype=np.uint64) - blocks.sizes + np.uint64(extent.offset)
        starts = np.arange(len(blocks.sizes), dtype=np.uint64) * np.uint64(blocks.nbytes)
        sizes = _block_sizes(blocks, packed)
        runs = np.zeros(end - begin, RUN)
        chosen = slice(begin, end)
        runs["file_offset"], runs["stored"], runs["bytes"] = offsets[chosen], blocks.sizes[chosen], sizes[chosen]
        runs["file"], runs["method"], runs["crc"] = file, packed.method, blocks.crcs[chosen]
        runs["flags"] = native.OPEN_END
        if end == len(blocks.sizes):
            runs["flags"][-1] = 0
        number = self._run_count + 1
        self._add_runs(runs)

        pieces = np.zeros((end - begin, len(COLUMNS)), np.uint64)
        wanted_from = np.maximum(starts[chosen], np.uint64(first))
        wanted_to = np.minimum(starts[chosen] + sizes[chosen], np.uint64(first + nbytes))
        pieces[:, OFFSET] = wanted_from - starts[chosen]
        pieces[:, BYTES] = wanted_to - wanted_from
        pieces[:, AT] = wanted_from - np.uint64(first)
        pieces[:, FILE] = file
        pieces[:, PIECE_RUN] = np.arange(number, number + end - begin)
        pieces[:, LEAF] = leaf
        return pieces

    def _add_runs(self, runs: np.ndarray) -> None:
        self._runs.append(runs)
        self._run_count += len(runs)

    def _file(self, extent: Extent) -> int:
        # Leaves of one archive follow each other: they share its number, and a reader keeps it open between them.
        name = (extent.file, extent.inode)
        if name != self._last_file:
            self._last_file = name
            # Absolute, since the readers may come to it after the program has changed its directory.
            file = extent.file
            self.files.append((file if file[:1] == "/" else os.path.abspath(file), extent.inode))
        return len(self.files) - 1

    def _require(self, extent: Extent, packed: Packed) -> None:
        if packed.method in self._methods:
            return
        try:
            codecs.require((packed.method,))
        except NotSupported as error:
            error.file = f"{extent.file}::/{packed.name}"
            raise
        self._methods.add(packed.method)

    def runs(self) -> np.ndarray:
        """The runs, in the order of their numbers."""
        return np.concatenate(self._runs) if self._runs else np.empty(0, RUN)


def _block_sizes(blocks: Blocks, packed: Packed) -> np.ndarray:
    """Inflated bytes of each block."""
    sizes = np.full(len(blocks.sizes), blocks.nbytes, np.uint64)
    sizes[-1] = packed.nbytes - (len(sizes) - 1) * blocks.nbytes
    return sizes


def belongs(blocks: Blocks, packed: Packed) -> bool:
    """Whether the index is this entry's: the CRC-32 of its blocks make up that of the entry.

    An index that was left behind, by a tool that compressed the entry anew, does not matter: what it is an index of can
    be read without.
    """
    codecs.require((codecs.DEFLATE,))
    return native.combine_crc32(blocks.crcs, _block_sizes(blocks, packed)) == packed.crc


def split(pieces: np.ndarray, size: int) -> np.ndarray:
    """The same bytes in pieces of at most `size` bytes."""
    if not len(pieces) or int(pieces[:, BYTES].max()) <= size:
        return pieces
    counts = np.maximum(-(-pieces[:, BYTES].astype(np.int64) // size), 1)
    parts = np.repeat(pieces, counts, axis=0)
    firsts = np.cumsum(counts) - counts
    skipped = ((np.arange(len(parts)) - np.repeat(firsts, counts)) * size).astype(np.uint64)
    parts[:, OFFSET] += skipped
    parts[:, AT] += skipped
    parts[:, BYTES] = np.minimum(parts[:, BYTES] - skipped, np.uint64(size))
    return parts


def structures(dtype: np.dtype, names: Sequence[str], tables: Sequence[np.ndarray]) -> np.ndarray:
    """Tables of columns as one array of structures; what is no column is zero."""
    found = np.zeros(sum(len(table) for table in tables), dtype)
    if len(found):
        whole = np.concatenate(tables)
        for column, name in enumerate(names):
            found[name] = whole[:, column]
    return found
