"""The block index: what lets one deflate entry be inflated by many threads.

tdgpu writes a deflate entry as blocks that can each be inflated alone, one after another in one ordinary deflate
stream, and notes each block's compressed size and CRC-32. Other zip tools see the stream and pass over the note. It is
an extra block of the entry's record in the central directory, or, where it would not fit there, a stored entry of its
own beside it:

    offset  bytes  meaning (little endian)
    0       1      version, 2
    1       1      log2 of a block's bytes when it is inflated, 12 to 30
    2       2      reserved, 0
    4       4      n: blocks, one per started block of the entry, and one for an entry without bytes
    8       4 n    compressed bytes of each block; together the entry's compressed size
    8+4n    4 n    CRC-32 of each block when it is inflated

An index whose numbers do not fit its entry is passed over: the entry is still a deflate stream. Whether its CRC-32s
make up that of the entry is for the reader to see; one that fits and lies is found out when the blocks are inflated.

>>> import numpy as np
>>> body = encode(Blocks(4096, np.array([9, 3], np.uint32), np.array([1, 2], np.uint32)))
>>> decode(body, stored=12, nbytes=5000).crcs.tolist()
[1, 2]
>>> decode(body, stored=13, nbytes=5000) is None
True
"""

from __future__ import annotations

import struct

import numpy as np

from tdgpu.layout.tree import Blocks

__all__ = [
    "EXTRA_ID",
    "LARGEST_BLOCK",
    "SIDECAR",
    "SMALLEST_BLOCK",
    "blocks_of",
    "decode",
    "encode",
    "is_index",
    "largest",
]

# Private id of the extra block: b"TD" in little endian.
EXTRA_ID = 0x4454
# What is added to an entry's name for the entry that holds its index.
SIDECAR = ".tdgpu-index"

SMALLEST_BLOCK = 1 << 12
LARGEST_BLOCK = 1 << 30

_VERSION = 2
_HEAD = struct.Struct("<BBHI")


def blocks_of(nbytes: int, block_bytes: int) -> int:
    """How many blocks an entry of ``nbytes`` inflated bytes has: at least one, as a deflate stream is never empty."""
    return max(1, -(-nbytes // block_bytes))


def largest(nbytes: int) -> int:
    """Bytes of the largest index that an entry of ``nbytes`` inflated bytes can have."""
    return _HEAD.size + 8 * blocks_of(nbytes, SMALLEST_BLOCK)


def encode(blocks: Blocks) -> bytes:
    """The bytes of an index, without the header of the extra block.

    Args:
        blocks: the index; ``blocks.nbytes`` is a power of two from 4 KiB to 1 GiB, and there are as many CRCs as sizes.
    """
    head = _HEAD.pack(_VERSION, blocks.nbytes.bit_length() - 1, 0, len(blocks.sizes))
    return head + blocks.sizes.astype("<u4").tobytes() + blocks.crcs.astype("<u4").tobytes()


def decode(body: bytes, stored: int, nbytes: int) -> Blocks | None:
    """Reads an index, if it is one and fits its entry.

    Args:
        body: what :func:`encode` gave, from wherever it was kept; may be any bytes at all.
        stored: compressed bytes of the entry.
        nbytes: inflated bytes of the entry.

    Returns:
        The index, or None if it has another version or does not fit the entry.
    """
    if len(body) < _HEAD.size:
        return None
    version, log2, reserved, count = _HEAD.unpack_from(body)
    block_bytes = 1 << log2
    fits = (
        version == _VERSION
        and reserved == 0
        and SMALLEST_BLOCK <= block_bytes <= LARGEST_BLOCK
        and count == blocks_of(nbytes, block_bytes)
        and len(body) == _HEAD.size + 8 * count
    )
    if not fits:
        return None
    table = np.frombuffer(body, "<u4", 2 * count, _HEAD.size).astype(np.uint32)
    sizes, crcs = table[:count], table[count:]
    # A block of deflate has at least two bytes; one without any would make the reader wait for bytes that never come.
    if not sizes.all() or int(sizes.sum(dtype=np.uint64)) != stored:
        return None
    return Blocks(block_bytes, sizes, crcs)


def is_index(body: bytes) -> bool:
    """Whether this claims to be an index of the version that is known here, fitting or not."""
    return body[:1] == bytes([_VERSION])
