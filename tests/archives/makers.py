"""Honest archives of a saved directory, as many tools would write them: ``MAKERS[name](directory, archive)``."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tensordict import pack_memmap

from archives.payloads import BZIP2, DEFLATE, LZMA, STORED, ZSTD, deflate_blocks, index_body, index_extra
from archives.raw import ALL_16, Entry, write
from archives.tools import TOOLS, Maker, files_below

__all__ = ["MAKERS", "OWN", "blocked", "contents"]


def contents(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every file below ``directory``."""
    for name in files_below(directory):
        yield name, (directory / name).read_bytes()


# --- Python's zipfile -------------------------------------------------------------------------------------------------


class _Pipe(io.RawIOBase):
    """What can be written to, but not sought in."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "wb")  # noqa: SIM115

    def write(self, data: Any) -> int:
        return self.file.write(data)

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()


def _python(method: int, *, comment: bytes = b"", force_zip64: bool = False) -> Maker:
    def make(directory: Path, archive: Path) -> None:
        with zipfile.ZipFile(archive, "w", method) as file:
            file.comment = comment
            for name, data in contents(directory):
                info = zipfile.ZipInfo(name)
                info.compress_type = method
                with file.open(info, "w", force_zip64=force_zip64) as stream:
                    stream.write(data)

    return make


def _python_pipe(method: int) -> Maker:
    def make(directory: Path, archive: Path) -> None:
        with _Pipe(archive) as pipe, zipfile.ZipFile(pipe, "w", method) as file:
            for name, data in contents(directory):
                file.writestr(name, data)

    return make


def _python_directories(directory: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        for top, folders, files in os.walk(directory):
            for name in sorted([*folders, *files]):
                file.write(os.path.join(top, name), os.path.relpath(os.path.join(top, name), directory))


def _python_appended(directory: Path, archive: Path) -> None:
    """A stub before the archive: zipfile appends to a file that is none, and counts offsets from its first byte."""
    archive.write_bytes(b"#!/bin/sh\nexit 0\n" * 7)
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as file:
        for name, data in contents(directory):
            file.writestr(name, data)


def _python_rewritten(directory: Path, archive: Path) -> None:
    """What was deleted or written again before leaves gaps: bytes that no entry owns."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        file.writestr("meta.json", b'{"old": 1}' * 9)
        file.writestr("gone", b"x" * 77)
        file.filelist.clear()
        file.NameToInfo.clear()
        for name, data in contents(directory):
            file.writestr(name, data)


def _tensordict(compression: str) -> Maker:
    def make(directory: Path, archive: Path) -> None:
        pack_memmap(directory, archive, compression=compression)

    return make


# --- our own writer ---------------------------------------------------------------------------------------------------


def _raw(method: int, *, archive_options: dict[str, Any] | None = None, **fields: Any) -> Maker:
    def make(directory: Path, archive: Path) -> None:
        entries = [Entry(name, data, method=method, **fields) for name, data in contents(directory)]
        archive.write_bytes(write(entries, **(archive_options or {})).data)

    return make


def _raw_unaligned(directory: Path, archive: Path) -> None:
    """Every payload on an odd byte."""
    entries, at = [], 0
    for name, data in contents(directory):
        gap = b"\0" * ((at + 30 + len(name.encode())) % 2 == 0)
        entries.append(Entry(name, data, gap=gap))
        at += len(gap) + 30 + len(name.encode()) + len(data)
    archive.write_bytes(write(entries).data)


def _raw_cp437(directory: Path, archive: Path) -> None:
    """Names in the code page that zip had before UTF-8, where they can be."""
    entries = []
    for name, data in contents(directory):
        try:
            entries.append(Entry(name.encode("cp437"), data, central={"made_by": 20}))  # by DOS
        except UnicodeEncodeError:
            entries.append(Entry(name, data))
    archive.write_bytes(write(entries).data)


def _raw_mixed(directory: Path, archive: Path) -> None:
    """Another method for each entry, metadata too; the central directory in another order than the file."""
    methods = (STORED, DEFLATE, BZIP2, LZMA)
    entries = [Entry(name, data, method=methods[i % 4]) for i, (name, data) in enumerate(contents(directory))]
    archive.write_bytes(write(entries[::-1]).data)


def _raw_stub_before(directory: Path, archive: Path) -> None:
    """``cat stub archive``: all offsets are too small by the length of the stub."""
    stub = b"MZ" + bytes(range(256)) * 3
    archive.write_bytes(write([Entry(n, d) for n, d in contents(directory)], prepend=stub, shift=len(stub)).data)


def _raw_empty_last_block(directory: Path, archive: Path) -> None:
    """Deflate that ends in two empty blocks, a stored and a fixed one."""
    entries = []
    for name, data in contents(directory):
        deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
        payload = deflater.compress(data) + deflater.flush(zlib.Z_FULL_FLUSH) + deflater.flush(zlib.Z_FINISH)
        entries.append(Entry(name, data, method=DEFLATE, payload=payload))
    archive.write_bytes(write(entries).data)


def blocked(nbytes: int, *, sidecar: bool = False, zip64: bool = False) -> Maker:
    """Deflate in blocks with an index, as tdgpu writes it: in the central directory, or in a sidecar entry."""

    def make(directory: Path, archive: Path) -> None:
        entries = []
        for name, data in contents(directory):
            if not name.endswith(".memmap"):
                entries.append(Entry(name, data))
                continue
            blocks = deflate_blocks(data, nbytes)
            crcs = [zlib.crc32(data[at : at + nbytes]) for at in range(0, max(len(data), 1), nbytes)]
            body = index_body([len(block) for block in blocks], crcs, nbytes)
            central = {} if sidecar else {"extra": index_extra(body)}
            entries.append(Entry(name, data, DEFLATE, b"".join(blocks), central=central, zip64=zip64))
            if sidecar:
                entries.append(Entry(name + ".tdgpu-index", body))
        archive.write_bytes(write(entries).data)

    return make


EXTRAS = b"UT\x05\0\x01abcd" + b"ux\x0b\0\x01\x04\0\0\0\0\x04\0\0\0\0" + b"\xfe\xca\0\0"  # times, owner, a Java mark

#: Those that Python alone can make.
OWN: dict[str, Callable[[Path, Path], None]] = {
    "tensordict stored": _tensordict("stored"),
    "tensordict deflate": _tensordict("deflate"),
    "tensordict bzip2": _tensordict("bzip2"),
    "tensordict lzma": _tensordict("lzma"),
    "zipfile stored": _python(zipfile.ZIP_STORED),
    "zipfile deflate": _python(zipfile.ZIP_DEFLATED),
    "zipfile bzip2": _python(zipfile.ZIP_BZIP2),
    "zipfile lzma": _python(zipfile.ZIP_LZMA),
    "zipfile stored to a pipe": _python_pipe(zipfile.ZIP_STORED),
    "zipfile deflate to a pipe": _python_pipe(zipfile.ZIP_DEFLATED),
    "zipfile with a comment": _python(zipfile.ZIP_STORED, comment=b"made for a test " * 9),
    "zipfile with the longest comment": _python(zipfile.ZIP_STORED, comment=b"\0" * ALL_16),
    "zipfile with zip64 fields": _python(zipfile.ZIP_STORED, force_zip64=True),
    "zipfile with directories": _python_directories,
    "zipfile behind a stub": _python_appended,
    "zipfile with gaps": _python_rewritten,
    "raw unaligned": _raw_unaligned,
    "raw cp437": _raw_cp437,
    "raw all methods": _raw_mixed,
    "raw zstd": _raw(ZSTD),
    "raw behind a stub": _raw_stub_before,
    "raw signed descriptors": _raw(DEFLATE, descriptor="signed"),
    "raw bare descriptors": _raw(DEFLATE, descriptor="bare"),
    "raw stored, bare descriptors": _raw(STORED, descriptor="bare"),
    "raw zip64": _raw(STORED, zip64=True, archive_options={"end64": {}}),
    "raw zip64, bare descriptors": _raw(STORED, zip64=True, descriptor="bare", archive_options={"end64": {}}),
    "raw with extra fields": _raw(DEFLATE, local={"extra": EXTRAS}, central={"extra": EXTRAS[:9]}, comment=b"seen"),
    "raw with empty last blocks": _raw_empty_last_block,
    "blocks": blocked(4096),
    "blocks of 64 KiB": blocked(1 << 16),
    "blocks, zip64": blocked(4096, zip64=True),
    "blocks, sidecar": blocked(4096, sidecar=True),
}

#: All of them, those of the tools that are here too.
MAKERS: dict[str, Callable[[Path, Path], None]] = {**OWN, **TOOLS}
