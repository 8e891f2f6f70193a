"""Damage for archives: bits, bytes and runs of them anywhere, and values where a parser looks; all from one seed."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

from archives import small
from archives.payloads import (
    BZIP2,
    DEFLATE,
    LZMA,
    SIDECAR,
    STORED,
    deflate_blocks,
    index_body,
    index_extra,
)
from archives.raw import Archive, Entry, Span, write

__all__ = ["SEEDS", "mutated"]

BLOCK = 4096
DATA = small.A[:20_000]  # five blocks
CRCS = [zlib.crc32(DATA[at : at + BLOCK]) for at in range(0, len(DATA), BLOCK)]


def _entries(method: int, *, index: str = "", metadata: int = STORED, **fields: object) -> list[Entry]:
    blocks = deflate_blocks(DATA, BLOCK)
    body = index_body([len(block) for block in blocks], CRCS, BLOCK)
    leaf = Entry("a.memmap", DATA, method, **fields)  # type: ignore[arg-type]
    if index:
        leaf.payload = b"".join(blocks)
    if index == "extra":
        leaf.central = {"extra": index_extra(body)}
    meta = small.level_meta(["n"], [], a=small.leaf_meta([5_000]))
    inner = small.level_meta([], [], c=small.leaf_meta([200], "int64"))
    entries = [Entry("meta.json", meta, metadata), leaf]
    if index == "sidecar":
        entries.append(Entry("a.memmap" + SIDECAR, body))
    return [*entries, Entry("n/meta.json", inner, metadata), Entry("n/c.memmap", small.C, method)]


#: What is damaged: small archives of one save.
SEEDS: dict[str, Archive] = {
    "stored": write(_entries(STORED)),
    "stored, zip64": write(_entries(STORED, zip64=True), end64={}),
    "stored, descriptors, comment": write(_entries(STORED, descriptor="signed"), comment=b"PK or not"),
    "deflate": write(_entries(DEFLATE)),
    "deflate, all of it": write(_entries(DEFLATE, metadata=DEFLATE, descriptor="bare")),
    "bzip2": write(_entries(BZIP2, metadata=BZIP2)),
    "lzma": write(_entries(LZMA, metadata=LZMA)),
    "blocks": write(_entries(DEFLATE, index="extra")),
    "blocks, zip64": write(_entries(DEFLATE, index="extra", zip64=True), end64={}),
    "blocks, sidecar": write(_entries(DEFLATE, index="sidecar")),
    "stub": write(_entries(STORED), prepend=b"#!stub", shift=6),
}

Change = Callable[[random.Random, bytearray, Archive], None]


def _place(rng: random.Random, data: bytearray, archive: Archive) -> int:
    """A byte to damage: of a record or a payload, each as likely as the other, however large it is."""
    span = rng.choice(archive.spans)
    return min(span.start + rng.randrange(span.size), max(len(data) - 1, 0))


def _bit(rng: random.Random, data: bytearray, archive: Archive) -> None:
    data[_place(rng, data, archive)] ^= 1 << rng.randrange(8)


def _byte(rng: random.Random, data: bytearray, archive: Archive) -> None:
    data[_place(rng, data, archive)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _noise(rng: random.Random, data: bytearray, archive: Archive) -> None:
    at = _place(rng, data, archive)
    size = min(rng.randrange(1, 64), len(data) - at)
    data[at : at + size] = rng.randbytes(size)


def _truncate(rng: random.Random, data: bytearray, archive: Archive) -> None:
    del data[_place(rng, data, archive) :]


def _delete(rng: random.Random, data: bytearray, archive: Archive) -> None:
    at = _place(rng, data, archive)
    del data[at : at + rng.choice((1, 2, 4, 8, 30, 46, rng.randrange(1, 500)))]


def _repeat(rng: random.Random, data: bytearray, archive: Archive) -> None:
    at = _place(rng, data, archive)
    data[at:at] = data[at : at + rng.choice((1, 2, 4, 8, 30, 46, rng.randrange(1, 500)))]


def _swap(rng: random.Random, data: bytearray, archive: Archive) -> None:
    size = rng.randrange(1, 100)
    a, b = sorted((_place(rng, data, archive), _place(rng, data, archive)))
    if a + size <= b and b + size <= len(data):
        data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def _splice(rng: random.Random, data: bytearray, archive: Archive) -> None:
    """The beginning of this, the end of another."""
    other = rng.choice(list(SEEDS.values()))
    data[_place(rng, data, archive) :] = other.data[rng.choice(other.spans).start :]


def _number(rng: random.Random, data: bytearray, archive: Archive) -> None:
    """Another value for one field of a record."""
    span = rng.choice([span for span in archive.spans if span.field not in ("payload", "name", "extra")])
    if span.start + span.size > len(data):
        return
    top = 1 << 8 * span.size
    value = int.from_bytes(data[span.start : span.start + span.size], "little")
    near = (value + 1, value - 1, value * 2, value ^ 1 << rng.randrange(8 * span.size))
    values = (*near, 0, 1, top - 1, top - 2, top // 2, len(data), rng.randrange(top))
    data[span.start : span.start + span.size] = (rng.choice(values) % top).to_bytes(span.size, "little")


def _copied_field(rng: random.Random, data: bytearray, archive: Archive) -> None:
    """The value that the same field has elsewhere."""
    span = rng.choice(archive.spans)
    other = rng.choice([other for other in archive.spans if other.field == span.field and other.size == span.size])
    if max(span.start, other.start) + span.size <= len(data):
        data[span.start : span.start + span.size] = data[other.start : other.start + span.size]


def _both_headers(rng: random.Random, data: bytearray, archive: Archive) -> None:
    """The same change in the local header and in the central directory, so that they agree."""
    entry = rng.choice([span.entry for span in archive.spans if span.record == "central"])
    field = rng.choice(("flags", "method", "crc", "csize", "usize", "version", "name"))
    spans = [span for span in archive.spans if (span.entry, span.field) == (entry, field)]
    value = rng.choice((0, 1, 8, 12, 14, 93, rng.randrange(1 << 32), len(DATA), len(DATA) * 2))
    flip = rng.randrange(8 * spans[0].size) if rng.random() < 0.5 else -1
    for span in spans:
        if span.start + span.size <= len(data):
            old = int.from_bytes(data[span.start : span.start + span.size], "little")
            new = old ^ 1 << flip if flip >= 0 else value % (1 << 8 * span.size)
            data[span.start : span.start + span.size] = new.to_bytes(span.size, "little")


def _index(rng: random.Random, data: bytearray, archive: Archive) -> None:
    """Damage in a block index, if there is one; half of the time the sum of the sizes stays what it was."""
    span = _index_span(archive)
    if span is None or span.start + span.size > len(data):
        _number(rng, data, archive)
        return
    body = span.start
    count = (span.size - 8) // 8
    change = rng.randrange(5)
    if change == 0:
        data[body + rng.randrange(8)] ^= 1 << rng.randrange(8)
    elif change == 1:
        at = body + 8 + rng.randrange(8 * count)
        data[at] ^= 1 << rng.randrange(8)
    else:
        first = body + 8 + 4 * rng.randrange(count)
        second = body + 8 + 4 * rng.randrange(count)
        a, b = (int.from_bytes(data[at : at + 4], "little") for at in (first, second))
        moved = rng.choice((1, 2, a - 1, a, rng.randrange(max(a, 1)))) if change < 4 else a - b
        for at, value in ((first, a - moved), (second, b + moved)):
            data[at : at + 4] = (value % (1 << 32)).to_bytes(4, "little")


def _index_span(archive: Archive) -> Span | None:
    for span in archive.spans:
        if span.entry == "a.memmap" + SIDECAR and span.field == "payload":
            return span
        if span.entry == "a.memmap" and (span.record, span.field) == ("central", "extra"):
            skipped = span.size - (8 + 8 * len(CRCS))  # headers of extra fields before it
            return Span(span.entry, "index", "body", span.start + skipped, span.size - skipped)
    return None


CHANGES: tuple[Change, ...] = (
    _bit, _bit, _byte, _byte, _noise, _truncate, _delete, _repeat, _swap, _splice, _number, _number, _number,
    _copied_field, _both_headers, _both_headers, _index, _index,
)  # fmt: skip


def mutated(seed: int, number: int) -> tuple[str, bytes]:
    """The damaged archive of this number: what was done, and its bytes."""
    rng = random.Random(f"{seed}/{number}")
    name = rng.choice(list(SEEDS))
    archive = SEEDS[name]
    data = bytearray(archive.data)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        if not data:
            break
        change = rng.choice(CHANGES)
        change(rng, data, archive)
        done.append(change.__name__.lstrip("_"))
    return f"{name}: {', '.join(done)}", bytes(data)
