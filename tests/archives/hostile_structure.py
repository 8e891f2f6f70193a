"""Hostile records: overlaps, numbers that overflow, lying counts, headers that contradict each other, names."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from archives import small
from archives.hostile import CASES, add, family, with_entry
from archives.payloads import DEFLATE, LZMA, STORED, compress
from archives.raw import (
    ALL_16,
    ALL_32,
    DESCRIPTOR,
    ENCRYPTED,
    MASKED,
    PATCH,
    STRONG,
    SYMLINK,
    UTF8,
    Entry,
    local_header,
    write,
    zip64_field,
)
from tdgpu.errors import ArchiveError, InvalidArgument, LeafSizeError, MissingLeafError, NotSupported

__all__ = ["CASES"]

A_NAME = "a.memmap"


def lying_a(methods: int = STORED, **lies: Any) -> Callable[[], Sequence[Entry]]:
    """The small save; the fields ``local``, ``central``, ``both`` of the entry of ``a`` lie."""
    return lambda: small.entries(methods, a=lies)


# --- numbers that lead astray -----------------------------------------------------------------------------------------


def numbers() -> None:
    nbytes = len(small.A)
    for bits, value in {"2^31": 1 << 31, "2^32-2": ALL_32 - 1}.items():
        family(
            "numbers",
            {
                f"payload of {bits} bytes": lying_a(central={"csize": value, "usize": value}),
                f"header at {bits}": lying_a(central={"offset": value}),
            },
            entry=A_NAME,
        )
    for bits, value in {"2^33": 1 << 33, "2^63": 1 << 63, "2^63-1": (1 << 63) - 1, "2^64-1": (1 << 64) - 1}.items():
        both = zip64_field(value, value)
        family(
            "numbers",
            {
                f"zip64 payload of {bits} bytes": lying_a(
                    central={"csize": ALL_32, "usize": ALL_32, "zip64": both},
                ),
                f"zip64 deflate payload of {bits} bytes": lying_a(
                    DEFLATE, central={"csize": ALL_32, "zip64": zip64_field(value)}
                ),
                f"zip64 header at {bits}": lying_a(central={"offset": ALL_32, "zip64": zip64_field(value)}),
                f"zip64 inflated size of {bits}": lying_a(
                    central={"usize": ALL_32, "zip64": zip64_field(value)},
                ),
            },
            entry=A_NAME,
        )
    family(
        "numbers",
        {
            "header before the file's end, payload behind it": lying_a(central={"csize": 50_000, "usize": 50_000}),
            "a zip64 field is announced and absent": lying_a(central={"csize": ALL_32, "usize": ALL_32}),
            "a zip64 field is too short": lying_a(
                central={"csize": ALL_32, "usize": ALL_32, "zip64": zip64_field(nbytes)}
            ),
            "an extra field is longer than all of them": lying_a(
                central={"extra": struct.pack("<HH", 1, 500) + bytes(8), "csize": ALL_32}
            ),
            "stored, but of another compressed size": lying_a(central={"csize": nbytes - 1}),
            "stored, but of another inflated size": lying_a(central={"usize": nbytes + 1}),
        },
        entry=A_NAME,
    )
    family(
        "numbers",
        {
            "a name that ends beyond the directory": lying_a(central={"name_size": ALL_16}),
            "extra fields that end beyond the directory": lying_a(central={"extra_size": ALL_16}),
            "a comment that ends beyond the directory": lying_a(central={"comment_size": ALL_16}),
            "a record without its signature": lying_a(central={"signature": 0x02014B51}),
        },
    )
    family(
        "numbers",
        {
            "a local name that ends beyond the file": lying_a(local={"name_size": ALL_16}),
            "local extra fields that push the payload over the next entry": lying_a(local={"extra_size": 9}),
            "local extra fields that push the payload off the file": lying_a(local={"extra_size": ALL_16}),
            "a local header without its signature": lying_a(local={"signature": 0x04034B51}),
        },
        stage="local",
        entry=A_NAME,
    )


def ends() -> None:
    def end(**fields: int) -> Callable[[], bytes]:
        return lambda: write(small.entries(), end=fields).data

    def end64(locator: dict[str, int] | None = None, **fields: int) -> Callable[[], bytes]:
        return lambda: write(small.entries(), end64=fields, locator64=locator).data

    damaged = (ArchiveError, InvalidArgument)
    for name, value in {"2^31": 1 << 31, "2^32-2": ALL_32 - 1, "the file's size": 45_000}.items():
        add(f"end: central directory at {name}", end(central_offset=value), damaged)
        add(f"end: central directory of {name} bytes", end(central_size=value), damaged)
    for name, value in {"2^63": 1 << 63, "2^64-1": (1 << 64) - 1, "the file's size": 45_000}.items():
        add(f"end: zip64 central directory at {name}", end64(central_offset=value), damaged)
        add(f"end: zip64 central directory of {name} bytes", end64(central_size=value), damaged)
        # Python looks before the locator, whatever it says: a stub that was put before the file makes it lie.
        add(f"end: zip64 end record at {name}", end64({"offset": value}), ())
    add("end: central directory one byte short", end(central_size=len(_central()) - 1), damaged)
    add("end: central directory one record short", end(central_size=len(_central()) - 46 - 10, entries=3), damaged)
    add("end: one entry too few", end(entries=3, entries_here=3), damaged)
    add("end: one entry too many", end(entries=5, entries_here=5), damaged)
    add("end: counts that differ", end(entries_here=3), damaged)
    add("end: no entries", end(entries=0, entries_here=0), damaged)
    add("end: zip64 count of 2^64-1", end64(entries=(1 << 64) - 1, entries_here=(1 << 64) - 1), damaged)
    add("end: zip64 announced and absent", end(central_offset=ALL_32, central_size=ALL_32), damaged)
    add("end: zip64 record without signature", end64(signature=7), damaged)
    add("end: on another disk", end(disk=1), damaged)
    add("end: central directory on another disk", end(central_disk=1), damaged)
    add("end: zip64 on another disk", end64(disk=1), damaged)
    add("end: zip64 of two disks", end64({"disks": 2}), damaged)
    add("end: entry on another disk", lambda: write(lying_a(central={"disk": 1})()).data, damaged)


def _central() -> bytes:
    archive = write(small.entries())
    first = archive.span("meta.json", "central", "signature").start
    return archive.data[first : archive.span("", "end", "signature").start]


# --- bytes that two entries claim -------------------------------------------------------------------------------------


def overlaps() -> None:
    def twins() -> Sequence[Entry]:
        """Two entries of other names and one payload."""
        at = write(small.entries()).span(A_NAME, "local", "signature").start
        twin = Entry("b.memmap", small.A, is_absent=True, central={"offset": at})
        return [*small.entries(), twin]

    def inside() -> Sequence[Entry]:
        """An entry whose header and payload lie within the bytes of a stored one."""
        hidden = Entry("b.memmap", b"x" * 8)
        quoted = local_header(hidden) + hidden.data
        data = quoted + small.A[len(quoted) :]
        listed = small.entries(a={"data": data})
        at = write(listed).span(A_NAME, "payload", "payload").start
        hidden.is_absent, hidden.central = True, {"offset": at}
        return [*listed, hidden]

    def directory() -> Sequence[Entry]:
        """The last entry's payload runs into the central directory."""
        listed = small.entries()
        listed[-1].both = {"csize": len(small.C) + 50, "usize": len(small.C) + 50}
        return listed

    family("overlap", {"two entries share one payload": twins, "an entry inside of another": inside})
    family("overlap", {"a payload that runs into the central directory": directory}, entry="n/c.memmap")
    family("overlap", {"a payload that runs over the next entry": lying_a(
        central={"csize": len(small.A) + 9, "usize": len(small.A) + 9}
    )}, entry=A_NAME)  # fmt: skip
    add("overlap: a bomb of quoted headers", quoted_bomb)


def quoted_bomb(count: int = 100, kernel: int = 1 << 20) -> bytes:
    """Every entry inflates to the next one's header and contents: few bytes that stand for very many.

    The trick is David Fifield's ("A better zip bomb", 2019): a stored deflate block quotes the next local header, so
    that each payload runs through all that follow it. Any reader that takes one entry at a time finds it sound.
    """
    contents = bytes(kernel)
    packed = compress(contents, DEFLATE, 9)
    chain = [Entry(f"w{count - 1:04}.memmap", contents, DEFLATE, packed)]
    for i in reversed(range(count - 1)):
        header = local_header(chain[0])
        quote = b"\0" + struct.pack("<HH", len(header), len(header) ^ ALL_16)
        contents, packed = header + contents, quote + header + packed
        # Only the quote lies between the two headers; the size says that the payload goes on to the end.
        chain.insert(0, Entry(f"w{i:04}.memmap", contents, DEFLATE, quote, both={"csize": len(packed)}))
    leaves = {f"w{i:04}": small.leaf_meta([len(entry.data)], "uint8") for i, entry in enumerate(chain)}
    return write([Entry("meta.json", small.level_meta([], [], **leaves)), *chain]).data


# --- two headers, two stories -----------------------------------------------------------------------------------------


def contradictions() -> None:
    nbytes = len(small.A)
    family(
        "local header",
        {
            "another name": lying_a(local={"name": b"b.memmap"}),
            "another method": lying_a(local={"method": DEFLATE}),
            "another method than deflate": lying_a(DEFLATE, local={"method": STORED}),
            "another CRC": lying_a(local={"crc": 1}),
            "another compressed size": lying_a(DEFLATE, local={"csize": 77}),
            "another inflated size": lying_a(DEFLATE, local={"usize": nbytes - 4}),
            "stored, of other sizes": lying_a(local={"csize": nbytes - 4, "usize": nbytes - 4}),
            "another zip64 size": lying_a(zip64=True, local={"zip64": zip64_field(nbytes - 4, nbytes - 4)}),
        },
        stage="local",
        entry=A_NAME,
    )
    family(
        "local header",
        {"encrypted": lying_a(local={"flags": ENCRYPTED}), "masked": lying_a(local={"flags": MASKED})},
        (ArchiveError, NotSupported),
        "local",
        A_NAME,
    )
    family(
        "local header",
        {
            "flags: a descriptor that the directory does not know": lying_a(local={"flags": DESCRIPTOR}),
            "flags: a name in another encoding": lying_a(local={"flags": UTF8}),
            "flags: patch data": lying_a(local={"flags": PATCH}),
        },
        (),
        "local",
    )


# --- what is not read -------------------------------------------------------------------------------------------------


def refused() -> None:
    closed = (ArchiveError, NotSupported)
    family(
        "refused",
        {
            "encrypted": lying_a(both={"flags": ENCRYPTED}),
            "strongly encrypted": lying_a(both={"flags": ENCRYPTED | STRONG}),
            "encrypted directory": lying_a(both={"flags": MASKED | ENCRYPTED}),
        },
        closed,
        "local",
        A_NAME,
    )
    others = {
        "shrink": 1, "reduce": 4, "implode": 6, "deflate64": 9, "dcl": 10, "lz77": 19, "zstd, the old number": 20,
        "mp3": 94, "xz": 95, "jpeg": 96, "wavpack": 97, "ppmd": 98, "aes": 99, "no method at all": 65535,
    }  # fmt: skip
    for name, method in others.items():
        lying = lying_a(STORED, method=method, payload=small.A[:9000])
        family("method", {name: lying}, NotSupported, "local", A_NAME)

    def closed_meta() -> Sequence[Entry]:
        listed = small.entries()
        listed[2].method, listed[2].payload = 98, listed[2].data
        return listed

    family("method", {"ppmd metadata": closed_meta}, NotSupported, "central", "n/meta.json")


# --- names ------------------------------------------------------------------------------------------------------------


def names() -> None:
    impossible: dict[str, str | bytes] = {
        "parent": "../x", "grandparent": "../../x", "root": "/x", "inner parent": "n/../x", "last parent": "n/..",
        "only a parent": "..", "only a dot": ".", "a dot": "./x", "inner dot": "n/./x", "two slashes": "n//x",
        "two slashes first": "//x", "empty": b"", "NUL": "x\0y", "NUL last": "x.memmap\0.jpg", "a slash": "/",
    }  # fmt: skip
    for title, name in impossible.items():
        label = "" if isinstance(name, bytes) or "\0" in name else name
        family("name", {title: with_entry(Entry(name, b"x" * 12))}, entry=label)
    family(
        "name",
        {
            "no UTF-8, though flagged so": with_entry(Entry(b"x\xff\xfe", b"x", both={"flags": UTF8})),
            "half a surrogate pair": with_entry(Entry(b"x\xed\xa0\x80", b"x", both={"flags": UTF8})),
            "twice": with_entry(Entry(A_NAME, small.A)),
            "metadata twice": with_entry(Entry("meta.json", small.level_meta())),
            "a file and a directory": with_entry(Entry("n", b"x")),
            "a file and a directory entry": with_entry(Entry("a.memmap/", b"")),
            "a file below a file": with_entry(Entry("a.memmap/x", b"x")),
            "other spelling of one": with_entry(Entry("n/./c.memmap", small.C)),
        },
    )
    # Ordinary letters where this runs, and what a save with raw keys may have.
    family(
        "name",
        {
            "an absolute drive": with_entry(Entry("C:/x", b"x")),
            "backslashes": with_entry(Entry("..\\x", b"x")),
            "a share": with_entry(Entry("\\\\host\\x", b"x")),
            "composed and decomposed": with_entry(Entry("\u00fc", b"x"), Entry("u\u0308", b"y")),
            "upper and lower case": with_entry(Entry("A.memmap", b"x")),
            "a line break": with_entry(Entry("x\ny", b"x")),
            "the longest": with_entry(Entry("x" * ALL_16, b"x")),
            "a directory twice": with_entry(Entry("n/", b""), Entry("n/", b"")),
            "a directory with contents": with_entry(Entry("d/", b"xyz")),
        },
        (),
    )
    family(
        "name",
        {
            "a symbolic link": lambda: small.entries(a={"mode": SYMLINK}),
            "a symbolic link beside": with_entry(Entry("x", b"/etc/passwd", mode=SYMLINK)),
        },
        entry="",
    )


# --- a sound archive of an unsound save -------------------------------------------------------------------------------


def leaves(method: int) -> None:
    sizes = {
        "too short": lambda: small.entries(method, a={"data": small.A[:-4]}),
        "too long": lambda: small.entries(method, a={"data": small.A + b"1234"}),
    }
    family(f"leaf, method {method}", sizes, LeafSizeError, "local", A_NAME, unpacks=True)


def absent_leaves() -> None:
    missing = {"missing": lambda: [entry for entry in small.entries() if entry.name != A_NAME]}
    family("leaf", missing, MissingLeafError, unpacks=True)
    folder = {"a directory": lambda: small.entries(a={"name": "a.memmap/x"})}
    family("leaf", folder, MissingLeafError, "local", unpacks=True)


numbers()
ends()
overlaps()
contradictions()
refused()
names()
for packing in (STORED, DEFLATE, LZMA):
    leaves(packing)
absent_leaves()
