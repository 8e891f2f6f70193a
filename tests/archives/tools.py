"""Archives written by other tools: Info-ZIP's `zip`, 7-Zip, and libarchive, which is bsdtar's library.

A tool that this machine lacks has no maker here. What it writes is pinned all the same, by the archives in
`tests/fixtures/archives`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

__all__ = ["HAS_LIBARCHIVE", "NAMES", "TOOLS", "Maker", "files_below", "read_by_libarchive"]

Maker = Callable[[Path, Path], None]


def files_below(directory: Path) -> list[str]:
    """The relative paths of all files below ``directory``, sorted."""
    return sorted(
        os.path.relpath(os.path.join(top, name), directory) for top, _, names in os.walk(directory) for name in names
    )


def run(command: list[str], directory: Path) -> bytes:
    """Runs a tool in ``directory``, and returns what it wrote on its standard output."""
    done = subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    assert done.returncode == 0, (command, done.stdout[-1000:], done.stderr[-1000:])
    return done.stdout


def _zip(*options: str) -> Maker:
    def make(directory: Path, archive: Path) -> None:
        run(["zip", "-q", *options, str(archive), "."], directory)

    return make


def _zip_stream(*options: str) -> Maker:
    """To a pipe: sizes are known only afterwards, and stand behind the payload."""

    def make(directory: Path, archive: Path) -> None:
        archive.write_bytes(run(["zip", "-q", *options, "-", "."], directory))

    return make


def _7z(*options: str) -> Maker:
    def make(directory: Path, archive: Path) -> None:
        run(["7z", "a", "-tzip", "-bd", "-mmt=1", *options, str(archive), "."], directory)

    return make


def _libarchive(compression: str) -> Maker:
    def make(directory: Path, archive: Path) -> None:
        lib = ctypes.CDLL(ctypes.util.find_library("archive"))
        lib.archive_write_new.restype = lib.archive_entry_new.restype = ctypes.c_void_p
        lib.archive_write_data.restype = ctypes.c_ssize_t
        lib.archive_error_string.restype = ctypes.c_char_p
        writer = ctypes.c_void_p(lib.archive_write_new())

        def check(code: int) -> None:
            assert code == 0, lib.archive_error_string(writer)

        check(lib.archive_write_set_format_zip(writer))
        check(lib.archive_write_set_format_option(writer, b"zip", b"compression", compression.encode()))
        check(lib.archive_write_open_filename(writer, os.fsencode(archive)))
        for name in files_below(directory):
            data = (directory / name).read_bytes()
            entry = ctypes.c_void_p(lib.archive_entry_new())
            lib.archive_entry_update_pathname_utf8(entry, name.encode())
            lib.archive_entry_set_size(entry, ctypes.c_int64(len(data)))
            lib.archive_entry_set_filetype(entry, 0o100000)
            lib.archive_entry_set_perm(entry, 0o644)
            check(lib.archive_write_header(writer, entry))
            assert lib.archive_write_data(writer, data, ctypes.c_size_t(len(data))) == len(data)
            lib.archive_entry_free(entry)
        check(lib.archive_write_close(writer))
        check(lib.archive_write_free(writer))

    return make


_ZIP = {
    "zip -0": _zip("-0", "-r"),
    "zip -6": _zip("-6", "-r"),
    "zip -0 -X -D": _zip("-0", "-r", "-X", "-D"),
    "zip -fz": _zip("-fz", "-r"),  # zip64 everywhere
    "zip -Z bzip2": _zip("-Z", "bzip2", "-r"),
    "zip to a pipe": _zip_stream("-6", "-r"),
    "zip -0 -fd to a pipe": _zip_stream("-0", "-fd", "-r"),
}
_SEVEN = {
    "7z": _7z(),
    "7z -mx0": _7z("-mx=0"),
    "7z BZip2": _7z("-mm=BZip2"),
    "7z LZMA": _7z("-mm=LZMA"),
}
_LIBARCHIVE = {"libarchive deflate": _libarchive("deflate"), "libarchive store": _libarchive("store")}

HAS_LIBARCHIVE = ctypes.util.find_library("archive") is not None


def read_by_libarchive(archive: Path) -> dict[str, bytes]:
    """What libarchive finds in a zip file: names and contents, each checked by it."""
    lib = ctypes.CDLL(ctypes.util.find_library("archive"))
    lib.archive_read_new.restype = ctypes.c_void_p
    lib.archive_read_data.restype = ctypes.c_ssize_t
    lib.archive_entry_pathname_utf8.restype = lib.archive_error_string.restype = ctypes.c_char_p
    reader, entry = ctypes.c_void_p(lib.archive_read_new()), ctypes.c_void_p()
    lib.archive_read_support_format_zip(reader)
    assert lib.archive_read_open_filename(reader, os.fsencode(archive), ctypes.c_size_t(1 << 16)) == 0
    found: dict[str, bytes] = {}
    buffer = ctypes.create_string_buffer(1 << 16)
    while lib.archive_read_next_header(reader, ctypes.byref(entry)) == 0:
        name = lib.archive_entry_pathname_utf8(entry).decode()
        found[name] = b""
        while (count := lib.archive_read_data(reader, buffer, ctypes.c_size_t(len(buffer)))) > 0:
            found[name] += buffer.raw[:count]
        assert count == 0, (name, lib.archive_error_string(reader))
    assert not lib.archive_error_string(reader), lib.archive_error_string(reader)
    lib.archive_read_free(reader)
    return found


#: All names, also of tools that are not here.
NAMES = (*_ZIP, *_SEVEN, *_LIBARCHIVE)

#: By name, what writes ``directory`` as ``archive``: ``TOOLS[name](directory, archive)``.
TOOLS: dict[str, Maker] = {
    **(_ZIP if shutil.which("zip") else {}),
    **(_SEVEN if shutil.which("7z") else {}),
    **(_LIBARCHIVE if ctypes.util.find_library("archive") else {}),
}
