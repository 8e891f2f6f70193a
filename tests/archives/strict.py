"""A second opinion of an archive: what a strict reader may hold against it, and the bytes of its entries.

Plain and slow, it shares nothing with the product or with zipfile: the fuzz test asks it whether a refusal has a
reason.
"""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib

from archives.payloads import BZIP2, DEFLATE, INDEX_ID, LZMA, SIDECAR, STORED, ZSTD
from archives.raw import ALL_16, ALL_32, CENTRAL, END, END64, LOCAL, LOCATOR64, SIGNATURES

__all__ = ["flaws", "read"]

Record = dict[str, int]


def _unpack(data: bytes, at: int, form: dict[str, str]) -> Record | None:
    code = "<" + "".join(form.values())
    if at < 0 or at + struct.calcsize(code) > len(data):
        return None
    return dict(zip(form, struct.unpack_from(code, data, at), strict=True))


def _size(form: dict[str, str]) -> int:
    return struct.calcsize("<" + "".join(form.values()))


class _Listed:
    """One entry as the central directory has it."""

    def __init__(self, record: Record, name: bytes, extra: bytes, shift: int) -> None:
        self.record, self.name, self.extra = record, name, extra
        self.usize, self.csize, self.offset = record["usize"], record["csize"], record["offset"]
        self.flaws: set[str] = set()
        wide = _block(extra, 1, self.flaws)
        at = 0
        for field in ("usize", "csize", "offset"):
            if record[field] == ALL_32:
                if wide is None or at + 8 > len(wide):
                    self.flaws.add("zip64 field")
                    break
                setattr(self, field, int.from_bytes(wide[at : at + 8], "little"))
                at += 8
        self.offset += shift
        self.payload = -1


def _block(extra: bytes, wanted: int, flaws: set[str]) -> bytes | None:
    """A block of an extra field."""
    at, found = 0, None
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if at + 4 + size > len(extra):
            flaws.add("extra field")
            break
        if kind == wanted:
            if found is not None and wanted == 1:
                flaws.add("extra field twice")
            found = extra[at + 4 : at + 4 + size]
        at += 4 + size
    return found


def _directory(data: bytes, flaws: set[str]) -> list[_Listed]:
    """The entries; what is wrong with the end and the central directory goes to ``flaws``."""
    at = data.rfind(struct.pack("<I", SIGNATURES["end"]), max(0, len(data) - ALL_16 - _size(END)))
    end = _unpack(data, at, END)
    if end is None:
        flaws.add("no end")
        return []
    if at + _size(END) + end["comment_size"] != len(data):
        flaws.add("comment")
    if data.count(struct.pack("<I", SIGNATURES["end"]), max(0, len(data) - ALL_16 - _size(END))) > 1:
        flaws.add("two ends")
    if end["disk"] or end["central_disk"] or end["entries_here"] != end["entries"]:
        flaws.add("disks")
    size, start, count = end["central_size"], end["central_offset"], end["entries"]
    locator = _unpack(data, at - _size(LOCATOR64), LOCATOR64)
    if locator is not None and locator["signature"] == SIGNATURES["locator64"]:
        at -= _size(LOCATOR64) + _size(END64)
        end64 = _unpack(data, at, END64)
        if end64 is None or end64["signature"] != SIGNATURES["end64"]:
            flaws.add("no zip64 end")
            return []
        if locator["disk"] or locator["disks"] > 1 or end64["disk"] or end64["central_disk"]:
            flaws.add("disks")
        if end64["entries_here"] != end64["entries"] or end64["size"] != _size(END64) - 12 or end64["version"] > 63:
            flaws.add("zip64 end")
        if locator["offset"] != at:
            flaws.add("zip64 locator")
        for field, short, mark in (
            ("central_size", size, ALL_32),
            ("central_offset", start, ALL_32),
            ("entries", count, ALL_16),
        ):
            if short not in (mark, end64[field]):
                flaws.add("two ends that differ")
        size, start, count = end64["central_size"], end64["central_offset"], end64["entries"]
    elif ALL_32 in (size, start):
        flaws.add("no zip64 end")
    shift = at - size - start
    if shift < 0 or size > at:
        flaws.add("directory out of place")
        return []
    found, at, stop = [], at - size, at
    while at < stop:
        record = _unpack(data, at, CENTRAL)
        if record is None or record["signature"] != SIGNATURES["central"]:
            flaws.add("central record")
            break
        at += _size(CENTRAL)
        name, extra = data[at : at + record["name_size"]], data[at + record["name_size"] :][: record["extra_size"]]
        at += record["name_size"] + record["extra_size"] + record["comment_size"]
        found.append(_Listed(record, name, extra, shift))
    if at != stop:
        flaws.add("central record")
    if len(found) != count:
        flaws.add("count")
    return found


def _check_local(data: bytes, entry: _Listed) -> None:
    """Compares with the local header, and finds the payload."""
    local = _unpack(data, entry.offset, LOCAL)
    if local is None or local["signature"] != SIGNATURES["local"]:
        entry.flaws.add("no local header")
        return
    at = entry.offset + _size(LOCAL)
    name, extra = data[at : at + local["name_size"]], data[at + local["name_size"] :][: local["extra_size"]]
    entry.payload = at + local["name_size"] + local["extra_size"]
    if name != entry.name:
        entry.flaws.add("local name")
    if (local["flags"] ^ entry.record["flags"]) & 0x800 and not name.isascii():
        entry.flaws.add("local name")
    if (local["flags"] ^ entry.record["flags"]) & ~0x806:
        entry.flaws.add("local flags")
    if local["method"] != entry.record["method"]:
        entry.flaws.add("local method")
    wide = _block(extra, 1, entry.flaws)
    usize, csize = local["usize"], local["csize"]
    if ALL_32 in (usize, csize):
        numbers = [wide[i : i + 8] for i in range(0, len(wide or b""), 8)] if wide else []
        if usize == ALL_32 and numbers:
            usize = int.from_bytes(numbers.pop(0), "little")
        if csize == ALL_32 and numbers:
            csize = int.from_bytes(numbers.pop(0), "little")
    wanted = (entry.record["crc"], entry.csize, entry.usize)
    if (local["crc"], csize, usize) != wanted and not local["flags"] & 8:
        entry.flaws.add("local sizes or CRC")


def _check_name(name: bytes, flags: int) -> bool:
    if flags & 0x800:
        try:
            name.decode()
        except UnicodeDecodeError:
            return False
    if b"\0" in name or b"\\" in name or name[1:2] == b":":
        return False
    return all(part not in (b"", b".", b"..") for part in name.removesuffix(b"/").split(b"/"))


def inflate(method: int, payload: bytes, size: int) -> bytes | None:
    """All bytes of a payload; None if it is not sound. At most one more than ``size``."""
    try:
        if method == STORED:
            return payload
        if method == DEFLATE:
            deflate = zlib.decompressobj(-15)
            data = deflate.decompress(payload, size + 1)
            return None if (len(data) <= size and not deflate.eof) or deflate.unused_data else data
        if method == BZIP2:
            bzip2 = bz2.BZ2Decompressor()
            data = bzip2.decompress(payload, size + 1)
            return None if (len(data) <= size and not bzip2.eof) or bzip2.unused_data else data
        if method == LZMA:
            _, _, length, packed, dictionary = struct.unpack_from("<BBHBI", payload)
            spec = {"id": lzma.FILTER_LZMA1, "dict_size": max(4096, min(dictionary, 1 << 24)), "lc": packed % 9,
                    "lp": packed // 9 % 5, "pb": packed // 45}  # fmt: skip
            if length != 5:
                return None
            stream = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[spec])
            data = stream.decompress(payload[9:], size + 1)
            return None if stream.unused_data else data
        if method == ZSTD:
            return _inflate_zstd(payload)
    except (zlib.error, OSError, EOFError, ValueError, lzma.LZMAError, struct.error):
        return None
    return None


def _inflate_zstd(payload: bytes) -> bytes | None:
    import zstandard

    try:
        return zstandard.ZstdDecompressor().decompressobj().decompress(payload)
    except zstandard.ZstdError:
        return None


def _check_index(body: bytes, entry: _Listed, payload: bytes) -> bool:
    """Whether each block inflates to its part; or the index does not fit, and is passed over."""
    if len(body) < 8:
        return True
    version, log2, reserved, count = struct.unpack_from("<BBHI", body)
    if version != 2 or reserved or not 12 <= log2 <= 30 or len(body) != 8 + 8 * count:
        return True
    sizes, crcs = struct.unpack_from(f"<{count}I", body, 8), struct.unpack_from(f"<{count}I", body, 8 + 4 * count)
    if count != max(1, -(-entry.usize // (1 << log2))) or sum(sizes) != len(payload) or 0 in sizes:
        return True
    at = 0
    for i, size in enumerate(sizes):
        wanted = min(1 << log2, entry.usize - (i << log2))
        inflater = zlib.decompressobj(-15)
        try:
            data = inflater.decompress(payload[at : at + size], wanted + 1)
        except zlib.error:
            return False
        if len(data) != wanted or zlib.crc32(data) != crcs[i]:
            return False
        at += size
    return True


def read(data: bytes) -> dict[str, bytes]:
    """The bytes of every entry that can be had, whatever speaks against the archive."""
    found = {}
    for entry in _directory(data, set()):
        _check_local(data, entry)
        payload = data[entry.payload : entry.payload + entry.csize]
        inflated = inflate(entry.record["method"], payload, min(entry.usize, 1 << 24))
        if entry.payload >= 0 and inflated is not None:
            found[entry.name.decode("utf-8", "backslashreplace")] = inflated
    return found


def flaws(data: bytes, wanted: tuple[str, ...] = ()) -> set[str]:
    """What speaks against an archive, each in a few words; empty if it is sound and has the entries ``wanted``."""
    found: set[str] = set()
    entries = _directory(data, found)
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        found.add("name twice")
    folders = {name[:i] for name in names for i, byte in enumerate(name) if byte == 0x2F}
    if folders & set(names):
        found.add("file and directory")
    if {name.encode() for name in wanted} - set(names):
        found.add("missing entry")
    spans: list[tuple[int, int]] = []
    by_name = {entry.name: entry for entry in entries}
    for entry in entries:
        _check_local(data, entry)
    for entry in entries:
        record, method = entry.record, entry.record["method"]
        if not _check_name(entry.name, record["flags"]):
            entry.flaws.add("name")
        if record["flags"] & 0x2061 or record["disk"] or record["external"] >> 28 == 0o12:
            entry.flaws.add("kind")
        if record["version"] & 0xFF > 63 or record["version"] > 255:
            entry.flaws.add("version")
        if method not in (STORED, DEFLATE, BZIP2, LZMA, ZSTD):
            entry.flaws.add("method")
        if method == STORED and entry.csize != entry.usize:
            entry.flaws.add("stored sizes")
        if entry.payload >= 0:
            spans.append((entry.offset, entry.payload + entry.csize))
            payload = data[entry.payload : entry.payload + entry.csize]
            inflated = inflate(method, payload, min(entry.usize, 1 << 24))
            if inflated is None or len(inflated) != entry.usize:
                entry.flaws.add("payload")
            elif zlib.crc32(inflated) != record["crc"]:
                entry.flaws.add("CRC")
            sidecar = by_name.get(entry.name + SIDECAR.encode())
            body = _block(entry.extra, INDEX_ID, entry.flaws)
            if body is None and sidecar is not None and sidecar.payload >= 0:
                body = data[sidecar.payload : sidecar.payload + sidecar.csize]
            is_read = method == DEFLATE and entry.name.endswith(b".memmap")
            if body is not None and is_read and not _check_index(body, entry, payload):
                entry.flaws.add("index")
        found |= entry.flaws
    spans.sort()
    if any(stop > start for (_, stop), (start, _) in zip(spans, [*spans[1:], (len(data), 0)], strict=False)):
        found.add("overlap")
    return found
