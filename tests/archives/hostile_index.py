"""Block indexes that lie. An index that does not fit its entry is passed over; one that fits and lies is found out."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from archives import small
from archives.hostile import CASES, family, written
from archives.payloads import DEFLATE, SIDECAR, compress, deflate_blocks, deflated_zeros, index_body, index_extra
from archives.raw import Entry
from tdgpu.errors import ArchiveError, ChecksumError

__all__ = ["CASES", "PASSED_OVER", "indexed"]

A_NAME = "a.memmap"
BLOCK = 4096
BLOCKS = deflate_blocks(small.A, BLOCK)
SIZES = [len(block) for block in BLOCKS]
CRCS = [zlib.crc32(small.A[at : at + BLOCK]) for at in range(0, len(small.A), BLOCK)]
WRONG = [*CRCS[:4], CRCS[4] ^ 1, *CRCS[5:]]  # not that of the entry, when they are combined


def indexed(
    body: bytes | None = None,
    *,
    sidecar: bool = False,
    side: dict[str, Any] | None = None,
    payload: bytes | None = None,
    **fields: Any,
) -> Callable[[], list[Entry]]:
    """The small save, whose leaf ``a`` is in blocks, with this index.

    Args:
        body: the index; None for the true one.
        sidecar: it is an entry of its own.
        side: fields of that entry that lie.
        payload: other compressed bytes of the leaf.
        fields: fields of the leaf's entry that lie.
    """
    body = index_body(SIZES, CRCS, BLOCK) if body is None else body

    def make() -> list[Entry]:
        central = {} if sidecar else {"extra": index_extra(body)}
        a = {"payload": b"".join(BLOCKS) if payload is None else payload, "central": central, **fields}
        listed = small.entries(DEFLATE, a=a)
        if sidecar:
            listed.append(Entry(**{"name": A_NAME + SIDECAR, "data": body, **(side or {})}))
        return listed

    return make


def body(sizes: Sequence[int] = SIZES, crcs: Sequence[int] = CRCS, nbytes: int = BLOCK, **lies: int) -> bytes:
    """An index; without arguments, the true one."""
    return index_body(sizes, crcs, nbytes, **lies)


def shifted(*moves: tuple[int, int]) -> list[int]:
    """Sizes with the same sum: each move gives bytes of one block to the next."""
    sizes = list(SIZES)
    for block, count in moves:
        sizes[block] -= count
        sizes[block + 1] += count
    return sizes


def _shuffled() -> list[int]:
    sizes = list(SIZES)
    random.Random(0).shuffle(sizes)
    assert sizes != SIZES
    return sizes


def _extreme() -> list[int]:
    """The first block has all bytes but those that the others need at least."""
    return [sum(SIZES) - 2 * (len(SIZES) - 1), *([2] * (len(SIZES) - 1))]


def _one_stream() -> bytes:
    """Ordinary deflate: its parts depend on one another."""
    return compress(small.A, DEFLATE)


def _crcs(nbytes: int) -> list[int]:
    return [zlib.crc32(small.A[at : at + nbytes]) for at in range(0, len(small.A), nbytes)]


def _cancelling() -> list[int]:
    """Two wrong CRCs; combined with the others they give that of the entry."""
    behind = bytes(len(small.A) - 5 * BLOCK)
    wrong = CRCS[4] ^ 1
    return [*CRCS[:4], wrong, *CRCS[5:-1], CRCS[-1] ^ zlib.crc32(behind, CRCS[4]) ^ zlib.crc32(behind, wrong)]


def _even(total: int, count: int) -> list[int]:
    return [total // count] * (count - 1) + [total - total // count * (count - 1)]


def _ends_in_each() -> bytes:
    """Blocks of which each says that it is the last: any of them inflates, but the stream ends with the first."""
    return b"".join(compress(small.A[at : at + BLOCK], DEFLATE) for at in range(0, len(small.A), BLOCK))


def lies() -> None:
    whole = _one_stream()
    final = [len(compress(small.A[at : at + BLOCK], DEFLATE)) for at in range(0, len(small.A), BLOCK)]
    swapped = [BLOCKS[1], BLOCKS[0], *BLOCKS[2:]]
    family(
        "index",
        {
            "sizes in another order": indexed(body(_shuffled())),
            "wrong CRCs that make up for one another": indexed(body(crcs=_cancelling())),
            "boundaries of blocks of 8 KiB": indexed(body(_even(sum(SIZES), 5), _crcs(8192), 8192)),
            "one byte given to the next block": indexed(body(shifted((3, 1)))),
            "one byte taken from the next block": indexed(body(shifted((3, -1)))),
            "all boundaries off": indexed(body(shifted(*((i, 1 + i) for i in range(9))))),
            "nearly all bytes in the first block": indexed(body(_extreme())),
            "blocks in another order, the index too": indexed(
                body([len(b) for b in swapped], [CRCS[1], CRCS[0], *CRCS[2:]]), payload=b"".join(swapped)
            ),
            "of a stream without blocks": indexed(body(_even(len(whole), 10)), payload=whole),
            "right, the entry's CRC wrong": indexed(both={"crc": 1}),
            "right, a block damaged": indexed(payload=_damaged()),
            "in a sidecar, sizes in another order": indexed(body(_shuffled()), sidecar=True),
            "right, but every block ends the stream": indexed(body(final), payload=_ends_in_each()),
        },
        ChecksumError,
        "bytes",
        A_NAME,
    )
    family(
        "index",
        {"two sidecars": lambda: [*indexed(sidecar=True)(), Entry(A_NAME + SIDECAR, body())]},
        ArchiveError,
        "central",
    )


def _damaged() -> bytes:
    data = bytearray(b"".join(BLOCKS))
    data[sum(SIZES[:5]) + SIZES[5] // 2] ^= 0x10
    return bytes(data)


def _on_metadata() -> list[Entry]:
    listed = small.entries(DEFLATE, metadata=DEFLATE)
    listed[2].central = {"extra": index_extra(index_body([len(listed[2].packed)], [1], BLOCK))}
    return listed


#: Archives with an index that does not fit, or none: they load, since the leaf is an ordinary deflate stream.
PASSED_OVER: dict[str, Callable[[], bytes]] = {
    name: written(make)
    for name, make in {
        "right": indexed(),
        "right, in a sidecar": indexed(sidecar=True),
        "right, in a deflated sidecar": indexed(sidecar=True, side={"method": DEFLATE}),
        "right, in both": lambda: [*indexed()(), Entry(A_NAME + SIDECAR, body())],
        "no index, no sidecar": indexed(b"", sidecar=True, side={"name": "other"}),
        "a wrong CRC": indexed(body(crcs=WRONG)),
        "a wrong CRC, in a sidecar": indexed(body(crcs=WRONG), sidecar=True),
        "CRCs in another order": indexed(body(crcs=CRCS[::-1])),
        "blocks of 64 KiB, a wrong CRC": indexed(body([sum(SIZES)], [1], 1 << 16)),
        "blocks of 64 KiB": indexed(body([sum(SIZES)], [zlib.crc32(small.A)], 1 << 16)),
        "version 1": indexed(body(version=1)),
        "version 255": indexed(body(version=255)),
        "reserved bits": indexed(body(reserved=1)),
        "blocks of one byte": indexed(body(log2=0)),
        "blocks of 2 KiB": indexed(body(nbytes=2048)),
        "blocks of 2 GiB": indexed(body([sum(SIZES)], [zlib.crc32(small.A)], log2=31)),
        "blocks of 2^63 bytes": indexed(body(log2=63)),
        "blocks of 2^255 bytes": indexed(body(log2=255)),
        "a block too few": indexed(body(SIZES[:-1], CRCS[:-1])),
        "a block too many": indexed(body([*SIZES, 2], [*CRCS, 0])),
        "no blocks": indexed(body([], [])),
        "2^32-1 blocks": indexed(body(count=(1 << 32) - 1)),
        "an empty block": indexed(body([SIZES[0] + SIZES[1], 0, *SIZES[2:]])),
        "a block of 2^32-1 bytes": indexed(body([(1 << 32) - 1, *SIZES[1:]])),
        "sizes whose sum wraps around": indexed(body([(1 << 32) - 1, SIZES[0] + SIZES[1] + 1, *SIZES[2:]])),
        "a sum that is one short": indexed(body([*SIZES[:-1], SIZES[-1] - 1])),
        "half of it": indexed(body()[:40]),
        "its head only": indexed(body()[:8]),
        "half of its head": indexed(body()[:3]),
        "nothing in it": indexed(b""),
        "a byte too many": indexed(body() + b"x"),
        "half of it, in a sidecar": indexed(body()[:40], sidecar=True),
        "nothing in the sidecar": indexed(b"", sidecar=True),
        "a sidecar of 256 MiB": indexed(b"", sidecar=True, side={
            "method": DEFLATE, "payload": deflated_zeros(256 << 20), "both": {"usize": 256 << 20},
        }),
        "an index of an index": lambda: [*indexed(sidecar=True)(), Entry(A_NAME + SIDECAR * 2, body())],
        "a sidecar of nothing": lambda: [*small.entries(), Entry("b.memmap" + SIDECAR, body())],
        "on a stored leaf": lambda: small.entries(a={"central": {"extra": index_extra(body())}}),
        "on metadata": _on_metadata,
        "in the local header only": indexed(central={}, local={"extra": index_extra(body(_shuffled()))}),
        "other extra fields around": lambda: small.entries(DEFLATE, a={
            "payload": b"".join(BLOCKS),
            "central": {"extra": b"UT\x05\0\x01abcd" + index_extra(body()) + b"\xfe\xca\0\0"},
        }),
    }.items()
}  # fmt: skip

lies()
