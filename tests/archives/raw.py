"""A zip writer that writes what it is told: every field of every record can be set, and is remembered by its place.

>>> archive = write([Entry("meta.json", b"{}"), Entry("a", b"x" * 100, method=8, central={"crc": 7})])
>>> archive.span("a", "local", "crc").size
4
>>> import io, zipfile
>>> zipfile.ZipFile(io.BytesIO(archive.data)).getinfo("a").CRC
7
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from archives.payloads import LZMA, compress

__all__ = ["Archive", "Entry", "Span", "local_header", "write", "zip64_field"]

# Fields of the records, in order, with their struct codes.
LOCAL = {"signature": "I", "version": "H", "flags": "H", "method": "H", "time": "H", "date": "H", "crc": "I",
         "csize": "I", "usize": "I", "name_size": "H", "extra_size": "H"}  # fmt: skip
CENTRAL = {"signature": "I", "made_by": "H", "version": "H", "flags": "H", "method": "H", "time": "H", "date": "H",
           "crc": "I", "csize": "I", "usize": "I", "name_size": "H", "extra_size": "H", "comment_size": "H",
           "disk": "H", "internal": "H", "external": "I", "offset": "I"}  # fmt: skip
END64 = {"signature": "I", "size": "Q", "made_by": "H", "version": "H", "disk": "I", "central_disk": "I",
         "entries_here": "Q", "entries": "Q", "central_size": "Q", "central_offset": "Q"}  # fmt: skip
LOCATOR64 = {"signature": "I", "disk": "I", "offset": "Q", "disks": "I"}
END = {"signature": "I", "disk": "H", "central_disk": "H", "entries_here": "H", "entries": "H", "central_size": "I",
       "central_offset": "I", "comment_size": "H"}  # fmt: skip
SIGNATURES = {"local": 0x04034B50, "central": 0x02014B50, "end64": 0x06064B50, "locator64": 0x07064B50,
              "end": 0x06054B50, "descriptor": 0x08074B50}  # fmt: skip

ALL_32, ALL_16 = 0xFFFFFFFF, 0xFFFF
UTF8, DESCRIPTOR, ENCRYPTED, STRONG, PATCH, MASKED, LZMA_END = 0x800, 0x8, 0x1, 0x40, 0x20, 0x2000, 0x2
SYMLINK, REGULAR, DIRECTORY = 0o120777 << 16, 0o100644 << 16, (0o040755 << 16) | 0x10


@dataclasses.dataclass
class Entry:
    """One entry.

    Attributes:
        name: its name; text is written as UTF-8 and flagged so, bytes as they are, without the flag.
        data: its bytes, inflated.
        method: how they are compressed.
        payload: the bytes that lie there; None compresses ``data``.
        descriptor: write the sizes behind the payload: "signed", "bare" (without signature), or None.
        zip64: write the sizes in a zip64 field, in both headers (in the descriptor, as 64-bit numbers).
        local, central: fields of the two headers that lie, by the names in LOCAL and CENTRAL; besides those, "name"
            (bytes), "extra" (bytes behind what is written anyhow) and "zip64" (the whole zip64 field).
        both: such fields of both headers.
        mode: external attributes, as a file mode shifted left by 16.
        comment: of the entry.
        gap: bytes before the local header.
        is_absent: write no local header and payload: only the central directory names the entry.
    """

    name: str | bytes
    data: bytes = b""
    method: int = 0
    payload: bytes | None = None
    descriptor: str | None = None
    zip64: bool = False
    local: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    central: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    both: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mode: int = REGULAR
    comment: bytes = b""
    gap: bytes = b""
    is_absent: bool = False

    @property
    def raw_name(self) -> bytes:
        """The name's bytes."""
        return self.name.encode() if isinstance(self.name, str) else self.name

    @property
    def packed(self) -> bytes:
        """The payload."""
        if self.payload is None:
            self.payload = compress(self.data, self.method)
        return self.payload


class Span(NamedTuple):
    """Where one field lies: of which entry ("" for the archive's own), in which record, and its bytes."""

    entry: str
    record: str
    field: str
    start: int
    size: int


@dataclasses.dataclass
class Archive:
    """What was written, and where everything in it lies."""

    data: bytes
    spans: list[Span]

    def span(self, entry: str, record: str, field: str) -> Span:
        """The place of a field."""
        return next(span for span in self.spans if (span.entry, span.record, span.field) == (entry, record, field))

    def patched(self, entry: str, record: str, field: str, value: int | bytes) -> Archive:
        """The same archive with one field changed."""
        span = self.span(entry, record, field)
        new = value if isinstance(value, bytes) else value.to_bytes(span.size, "little")
        assert len(new) == span.size
        return Archive(self.data[: span.start] + new + self.data[span.start + span.size :], self.spans)


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.spans: list[Span] = []
        self.at = 0

    def put(self, entry: str, record: str, field: str, data: bytes) -> None:
        if data:
            self.spans.append(Span(entry, record, field, self.at, len(data)))
            self.parts.append(data)
            self.at += len(data)

    def put_record(self, entry: str, record: str, form: Mapping[str, str], values: Mapping[str, Any]) -> None:
        for field, code in form.items():
            width = struct.calcsize("<" + code)
            self.put(entry, record, field, int(values[field]).to_bytes(width, "little"))


def zip64_field(*numbers: int, tail: bytes = b"") -> bytes:
    """The zip64 extra field with these 64-bit numbers."""
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers) + len(tail), *numbers) + tail


def _fields(entry: Entry, overrides: Mapping[str, Any]) -> dict[str, Any]:
    is_text = isinstance(entry.name, str) and not entry.name.isascii()
    values: dict[str, Any] = {
        "version": 45 if entry.zip64 else 20,
        "made_by": 3 << 8 | 45,
        "flags": (UTF8 if is_text else 0)
        | (DESCRIPTOR if entry.descriptor else 0)
        | (LZMA_END if entry.method == LZMA else 0),
        "method": entry.method,
        "time": 0,
        "date": 0x21,
        "crc": zlib.crc32(entry.data),
        "csize": len(entry.packed),
        "usize": len(entry.data),
        "name": entry.raw_name,
        "comment_size": len(entry.comment),
        "disk": 0,
        "internal": 0,
        "external": entry.mode,
        "extra": b"",
        "zip64": None,
    }
    values.update(entry.both)
    values.update(overrides)
    return values


def _put_local(writer: _Writer, entry: Entry, label: str) -> None:
    values = _fields(entry, {})
    if entry.descriptor:
        values.update(crc=0, csize=0, usize=0)
    if entry.zip64:
        values["zip64"] = zip64_field(values["usize"], values["csize"])
        values.update(csize=ALL_32, usize=ALL_32)
    values.update(entry.both)
    values.update(entry.local)
    extra = (values["zip64"] or b"") + values["extra"]
    values.setdefault("signature", SIGNATURES["local"])
    values.setdefault("name_size", len(values["name"]))
    values.setdefault("extra_size", len(extra))
    writer.put_record(label, "local", LOCAL, values)
    writer.put(label, "local", "name", values["name"])
    writer.put(label, "local", "extra", extra)


def local_header(entry: Entry) -> bytes:
    """The bytes of an entry's local header."""
    writer = _Writer()
    _put_local(writer, entry, "")
    return b"".join(writer.parts)


def _put_descriptor(writer: _Writer, entry: Entry, label: str) -> None:
    values = _fields(entry, {})
    if entry.descriptor == "signed":
        writer.put(label, "descriptor", "signature", struct.pack("<I", SIGNATURES["descriptor"]))
    width = 8 if entry.zip64 else 4
    writer.put(label, "descriptor", "crc", struct.pack("<I", values["crc"]))
    writer.put(label, "descriptor", "csize", int(values["csize"]).to_bytes(width, "little"))
    writer.put(label, "descriptor", "usize", int(values["usize"]).to_bytes(width, "little"))


def _put_central(writer: _Writer, entry: Entry, label: str, offset: int) -> None:
    values = {"offset": offset, **_fields(entry, {})}
    if entry.zip64 or offset >= ALL_32:
        values["zip64"] = zip64_field(values["usize"], values["csize"], offset)
        values.update(csize=ALL_32, usize=ALL_32, offset=ALL_32)
    values.update(entry.both)
    values.update(entry.central)
    extra = (values["zip64"] or b"") + values["extra"]
    values.setdefault("signature", SIGNATURES["central"])
    values.setdefault("name_size", len(values["name"]))
    values.setdefault("extra_size", len(extra))
    writer.put_record(label, "central", CENTRAL, values)
    writer.put(label, "central", "name", values["name"])
    writer.put(label, "central", "extra", extra)
    writer.put(label, "central", "comment", entry.comment)


def write(
    entries: Sequence[Entry],
    *,
    prepend: bytes = b"",
    shift: int = 0,
    gap: bytes = b"",
    comment: bytes = b"",
    end: Mapping[str, int] | None = None,
    end64: Mapping[str, int] | None = None,
    locator64: Mapping[str, int] | None = None,
) -> Archive:
    """Writes an archive.

    Args:
        entries: the entries, in the order of the central directory and of the file.
        prepend: bytes before the first entry. Offsets count from the first byte of the file, as after ``zip -A``...
        shift: ... unless this many bytes are taken off all of them: ``len(prepend)`` where a stub was put before a
            finished archive.
        gap: bytes between the last entry and the central directory.
        comment: of the archive.
        end: fields of the end record that lie.
        end64: with a zip64 end record, in which these fields lie.
        locator64: fields of its locator that lie.
    """
    writer = _Writer()
    writer.put("", "stub", "stub", prepend)
    labels = [entry.raw_name.decode("utf-8", "backslashreplace") for entry in entries]
    offsets = []
    for entry, label in zip(entries, labels, strict=True):
        writer.put(label, "gap", "gap", entry.gap)
        offsets.append(writer.at - shift)
        if entry.is_absent:
            continue
        _put_local(writer, entry, label)
        writer.put(label, "payload", "payload", entry.packed)
        if entry.descriptor:
            _put_descriptor(writer, entry, label)
    writer.put("", "gap", "gap", gap)
    start = writer.at
    for entry, label, offset in zip(entries, labels, offsets, strict=True):
        _put_central(writer, entry, label, offset)
    size = writer.at - start
    _put_end(writer, len(entries), size, start - shift, shift, comment, end, end64, locator64)
    return Archive(b"".join(writer.parts), writer.spans)


def _put_end(
    writer: _Writer,
    count: int,
    size: int,
    start: int,
    shift: int,
    comment: bytes,
    end: Mapping[str, int] | None,
    end64: Mapping[str, int] | None,
    locator64: Mapping[str, int] | None,
) -> None:
    zip64 = end64 is not None or locator64 is not None
    if zip64:
        at = writer.at - shift
        writer.put_record("", "end64", END64, {
            "signature": SIGNATURES["end64"], "size": 44, "made_by": 45, "version": 45, "disk": 0, "central_disk": 0,
            "entries_here": count, "entries": count, "central_size": size, "central_offset": start, **(end64 or {}),
        })  # fmt: skip
        writer.put_record("", "locator64", LOCATOR64, {
            "signature": SIGNATURES["locator64"], "disk": 0, "offset": at, "disks": 1, **(locator64 or {}),
        })  # fmt: skip
    count = ALL_16 if zip64 else count
    values = {
        "signature": SIGNATURES["end"], "disk": 0, "central_disk": 0, "entries_here": count, "entries": count,
        "central_size": ALL_32 if zip64 else size, "central_offset": ALL_32 if zip64 else start,
        "comment_size": len(comment), **(end or {}),
    }  # fmt: skip
    writer.put_record("", "end", END, values)
    writer.put("", "end", "comment", comment)
