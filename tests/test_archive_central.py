"""The entries of an archive: the same as ``zipfile`` finds in honest ones, and refused in others."""

from __future__ import annotations

import os
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from archives.makers import MAKERS
from archives.payloads import BZIP2, DEFLATE, LZMA, METHODS, STORED, ZSTD, deflate_blocks, index_body, index_extra
from archives.raw import ALL_32, ENCRYPTED, PATCH, SYMLINK, UTF8, Entry, write, zip64_field
from hypothesis import given, settings
from hypothesis import strategies as st
from saves import BUILDERS, SAVES
from tensordict import is_memmap_archive

from tdgpu import options
from tdgpu.errors import (
    ArchiveError,
    ChecksumError,
    InvalidArgument,
    NotSupported,
    SaveNotFound,
    TdgpuError,
)
from tdgpu.layout.archive.central import Directory, is_archive
from tdgpu.layout.archive.names import Names

META = Entry("meta.json", b'{"shape": []}' * 3)
DATA = bytes(range(256)) * 40


def _archive(path: Path, *entries: Entry, **how: Any) -> Path:
    archive = path / "a.tdz"
    archive.write_bytes(write([META, *entries], **how).data)
    return archive


def _read(archive: Path) -> dict[str, bytes]:
    """Every entry's bytes, and that no descriptor stays open."""
    before = len(os.listdir("/proc/self/fd"))
    try:
        with Directory(archive) as directory:
            directory.locate_all()
            return {name: directory.read(entry) for name, entry in directory.entries.items()}
    finally:
        assert len(os.listdir("/proc/self/fd")) == before


def _refused(archive: Path, *words: str, cause: type[TdgpuError] = ArchiveError) -> None:
    with pytest.raises(cause) as caught:
        _read(archive)
    assert type(caught.value) is cause
    assert caught.value.save == str(archive) or caught.value.file == str(archive)
    for word in words:
        assert word in str(caught.value)


# --- honest archives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", sorted(MAKERS))
def test_entries_are_those_of_zipfile(tmp_path: Path, maker: str) -> None:
    SAVES["nested"](tmp_path / "save")
    archive = tmp_path / "a.zip"
    MAKERS[maker](tmp_path / "save", archive)
    with zipfile.ZipFile(archive) as file, Directory(archive) as directory:
        infos = [info for info in file.infolist() if not info.is_dir()]
        assert list(directory.entries) == [info.filename for info in infos]
        for info in infos:
            entry = directory.entries[info.filename]
            assert (entry.method, entry.crc, entry.stored) == (info.compress_type, info.CRC, info.compress_size)
            assert entry.nbytes == info.file_size
            assert entry.header == info.header_offset
            if info.compress_type != ZSTD:  # which this zipfile may not know
                assert directory.read(entry) == file.read(info)
            elif not info.filename.endswith(".tdgpu-index"):
                assert directory.read(entry) == (tmp_path / "save" / info.filename).read_bytes()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("descriptor", [None, "signed", "bare"])
@pytest.mark.parametrize("zip64", [False, True])
def test_every_form_of_an_entry_is_read(tmp_path: Path, method: int, descriptor: str | None, zip64: bool) -> None:
    entry = Entry("x.memmap", DATA, method, descriptor=descriptor, zip64=zip64, comment=b"why")
    empty = Entry("e", b"", method, descriptor=descriptor, zip64=zip64)
    archive = _archive(tmp_path, entry, empty, prepend=b"stub", shift=4, comment=b"c" * 300, end64={})
    assert _read(archive) == {"meta.json": META.data, "x.memmap": DATA, "e": b""}


@pytest.mark.parametrize(("name", "flags"), [("\u00fc\u4e16", UTF8), (b"\x81", 0), (b"\xc3\xbc", 0)])
def test_names_are_decoded_as_by_zipfile(tmp_path: Path, name: str | bytes, flags: int) -> None:
    archive = _archive(tmp_path, Entry(name, b"1"))
    with zipfile.ZipFile(archive) as file:
        assert list(_read(archive)) == file.namelist()


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.text("ab\u00fc.- ", min_size=1, max_size=6).filter(lambda name: name.strip(".")), st.binary()),
    st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]),
    st.binary(max_size=40),
)
def test_whatever_zipfile_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes], method: int, comment: bytes
) -> None:
    archive = tmp_path_factory.mktemp("any") / "a.zip"
    contents = {"meta.json": b"{}", **contents}
    with zipfile.ZipFile(archive, "w", method) as file:
        file.comment = comment
        for name, data in contents.items():
            file.writestr(name, data)
    if b"PK\x05\x06" not in comment:
        assert _read(archive) == contents


def test_a_block_index_is_found_in_the_entry_and_beside_it(tmp_path: Path) -> None:
    blocks = deflate_blocks(DATA, 4096)
    crcs = [zlib.crc32(DATA[at : at + 4096]) for at in range(0, len(DATA), 4096)]
    body = index_body([len(block) for block in blocks], crcs, 4096)
    payload = b"".join(blocks)
    archive = _archive(
        tmp_path,
        Entry("in", DATA, DEFLATE, payload, central={"extra": index_extra(body)}, zip64=True),
        Entry("beside", DATA, DEFLATE, payload),
        Entry("beside.tdgpu-index", body),
        Entry("without", DATA, DEFLATE),
        Entry("stored", DATA, central={"extra": index_extra(body)}),
        Entry("other", DATA[:-1], DEFLATE, central={"extra": index_extra(body)}),
    )
    with Directory(archive) as directory:
        found = {name: directory.blocks(entry) for name, entry in directory.entries.items()}
    for name in ("in", "beside"):
        index = found[name]
        assert index is not None
        assert (index.nbytes, index.sizes.tolist(), index.crcs.tolist()) == (4096, [len(b) for b in blocks], crcs)
    assert [found[name] for name in ("without", "stored", "other", "meta.json")] == [None] * 4


def test_a_damaged_sidecar_is_told(tmp_path: Path) -> None:
    archive = _archive(tmp_path, Entry("x", DATA, DEFLATE), Entry("x.tdgpu-index", b"12345678", both={"crc": 1}))
    with Directory(archive) as directory, pytest.raises(ChecksumError, match=r"x\.tdgpu-index"):
        directory.blocks(directory.entries["x"])


def test_many_entries_take_linear_time(tmp_path: Path) -> None:
    """A name in many directories, or many names in one: neither may cost the square of the file."""
    deep = "/".join(["d" * 100] * 400)
    for names in ([f"{i:05}/{deep}" for i in range(60)], [f"{i:06}" for i in range(10_000)]):
        archive = _archive(tmp_path, *(Entry(name, b"") for name in names))
        started = time.perf_counter()
        with Directory(archive) as directory:
            directory.locate_all()
            assert len(directory.entries) == len(names) + 1
            assert len(directory.names.members("")) == len(names) + 1
        assert time.perf_counter() - started < 10


# --- what is an archive -----------------------------------------------------------------------------------------------


def test_is_archive_agrees_with_tensordict(tmp_path: Path) -> None:
    BUILDERS["flat"]().save(tmp_path / "yes.tdz")
    SAVES["flat"](tmp_path / "directory")
    whole = (tmp_path / "yes.tdz").read_bytes()
    (tmp_path / "file").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "cut").write_bytes(whole[:-1])
    (tmp_path / "half").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "other.zip").write_bytes(write([Entry("n/meta.json", b"{}"), Entry("../x", b"")]).data)
    (tmp_path / "trailed").write_bytes(whole + bytes(1000))
    (tmp_path / "doubled").write_bytes(whole + whole)
    os.mkfifo(tmp_path / "pipe")
    found = {}
    for path in [*tmp_path.iterdir(), tmp_path / "absent"]:
        found[path.name] = is_archive(path)
        assert found[path.name] == is_memmap_archive(path), path
    assert sorted(name for name, is_one in found.items() if is_one) == ["doubled", "trailed", "yes.tdz"]


def test_what_is_no_archive_is_told_apart(tmp_path: Path) -> None:
    def check(data: bytes, *words: str) -> None:
        (tmp_path / "a").write_bytes(data)
        _refused(tmp_path / "a", *words, cause=InvalidArgument)

    whole = write([META, Entry("x", DATA)]).data
    check(b"hello", "not a saved directory")
    check(b"", "not a saved directory")
    check(whole[:-30], "truncated")
    check(write([Entry("x", b"")]).data, "no entry meta.json")
    check(write([Entry("./meta.json", b"")]).data, "'./meta.json'", "pack what is in the directory")
    # Of a zip file that is no save, nothing else is said.
    check(write([Entry("x", b"", both={"flags": ENCRYPTED}), Entry("/y", b"")]).data, "no entry meta.json")
    with pytest.raises(SaveNotFound):
        Directory(tmp_path / "absent")
    with pytest.raises(InvalidArgument):
        Directory(tmp_path)


# --- refused archives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/x", "relative"),
        ("c:/x", "relative"),
        ("C:\\x", "relative"),
        ("\\x", "relative"),
        ("a\\..\\x", "'..'"),
        ("/".join("a" * 514), "deep"),
        ("", "relative"),
        ("..", "'..'"),
        ("../x", "'..'"),
        ("a/../x", "'..'"),
        ("a/..", "'..'"),
        (".", "'.'"),
        ("./x", "'.'"),
        ("a/./x", "'.'"),
        ("a//x", "''"),
        ("a//", "''"),
        ("/", "relative"),
        ("a\0x", "NUL"),
    ],
)
def test_names_that_lead_elsewhere(tmp_path: Path, name: str, words: str) -> None:
    _refused(_archive(tmp_path, Entry("fine", b""), Entry(name, b""), Entry("fine too", b"")), words)


def test_names_that_are_unusual_but_fine(tmp_path: Path) -> None:
    names = [
        "...",
        "a/...",
        ".a",
        "..a",
        "a..",
        "ab:c",
        "a b",
        "%2E%2E",
        "\x7f",
        "-",
        "C:x",
        "a\\b",
        "a/",
        "a/b.c/",
        "b/c/d",
        "\t\n",
    ]
    with Directory(_archive(tmp_path, *(Entry(name, b"") for name in names))) as directory:
        directory.locate_all()
        assert set(directory.entries) == {"meta.json", *(name for name in names if not name.endswith("/"))}
        assert directory.names.members("a") == ["...", "b.c"]
        assert directory.names.members("b") == ["c"]
        assert directory.names.members("a/b.c") == []
        assert [directory.names.is_dir(name) for name in ("", "a", "a/b.c", "b/c", "b/c/d", "ab:c", "abs")] == [
            *[True] * 4, *[False] * 3,
        ]  # fmt: skip


@given(st.lists(st.text("ab/\u00fc", min_size=1, max_size=8), max_size=12, unique=True))
def test_names_are_a_tree(some: list[str]) -> None:
    def refuse(name: str, reason: str) -> TdgpuError:
        return ArchiveError(reason, file=name)

    bad = any(not part for name in some for part in name.removesuffix("/").split("/"))
    folders = {name[:i] for name in some for i, char in enumerate(name) if char == "/"}
    files = {name for name in some if not name.endswith("/")}
    if bad or folders & files:
        with pytest.raises(ArchiveError):
            Names(some, refuse)
        return
    names = Names(some, refuse)
    for folder in {"", *folders, *files, "a", "b/a"}:
        assert names.is_dir(folder) == (folder in folders or not folder)
        below = [f"{folder}/"] if folder else [""]
        inner = {name[len(below[0]) :].split("/")[0] for name in some if name.startswith(below[0])} - {""}
        assert names.members(folder) == sorted(inner)


@pytest.mark.parametrize(
    "names", [("x", "x"), ("x/", "x/"), ("x", "x/"), ("x", "x/y"), ("x/y", "x/y/z/"), ("x!", "x", "x/y")]
)
def test_two_of_one_name(tmp_path: Path, names: tuple[str, ...]) -> None:
    for order in (names, names[::-1]):
        _refused(_archive(tmp_path, *(Entry(name, b"") for name in order)), "x")


X = "a.tdz::/x"
LIES: dict[str, tuple[Callable[[], Entry], tuple[str, ...]]] = {
    "encrypted": (lambda: Entry("x", DATA, both={"flags": ENCRYPTED}), (X, "encrypted")),
    "encrypted, says its own header": (lambda: Entry("x", DATA, local={"flags": ENCRYPTED}), (X, "flags")),
    "a link": (lambda: Entry("x", b"/etc/passwd", mode=SYMLINK), (X, "symbolic link")),
    "on another disk": (lambda: Entry("x", DATA, central={"disk": 1}), (X, "disk 1")),
    "another name": (lambda: Entry("x", DATA, local={"name": b"y"}), (X, "another name", "b'y'")),
    "another method": (lambda: Entry("x", DATA, local={"method": 8}), (X, "methods", "8, not 0")),
    "another CRC": (lambda: Entry("x", DATA, local={"crc": 5}), (X, "CRC-32: 5")),
    "another size": (lambda: Entry("x", DATA, DEFLATE, local={"usize": 5}), (X, "sizes", ", 5)")),
    "another packed size": (lambda: Entry("x", DATA, local={"csize": 5}), (X, "sizes", "(5, ")),
    "another zip64 size": (lambda: Entry("x", DATA, zip64=True, local={"zip64": zip64_field(1, 2)}), (X, "(2, 1)")),
    "a short zip64 block": (lambda: Entry("x", DATA, zip64=True, central={"zip64": zip64_field(1)}), (X, "8 bytes")),
    "two zip64 blocks": (lambda: Entry("x", DATA, zip64=True, central={"extra": zip64_field(1, 1)}), (X, "two zip64")),
    "no header": (lambda: Entry("x", DATA, local={"signature": 5}), (X, "no local header")),
    "an extra field too long": (lambda: Entry("x", DATA, central={"extra": b"ab\xff\0"}), (X, "goes past")),
    "sizes that differ though stored": (lambda: Entry("x", DATA, central={"usize": 5}), (X, "cannot be 5")),
    "inflates too much": (lambda: Entry("x", DATA, DEFLATE, central={"usize": 1 << 31}), (X, "cannot be")),
    "behind the file": (lambda: Entry("x", DATA, central={"offset": 1 << 30}), (X, "overlaps")),
    "on the one before": (lambda: Entry("x", DATA, central={"offset": 0}), ("overlaps",)),
    "into the one behind": (lambda: Entry("x", DATA, central={"csize": 1 << 14, "usize": 1 << 14}), (X, "overlaps")),
    "pushed by its header": (lambda: Entry("x", DATA, local={"extra_size": 60_000}), (X, "overlaps")),
    "a name that is not UTF-8": (lambda: Entry(b"\xff", DATA, both={"flags": UTF8}), ("UTF-8",)),
    "no bytes": (lambda: Entry("x", DATA, is_absent=True), ("overlaps",)),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(tmp_path: Path, lie: str) -> None:
    make, words = LIES[lie]
    _refused(_archive(tmp_path, make(), Entry("z", b"last" * 3000)), *words)


def test_what_other_versions_of_zip_need(tmp_path: Path) -> None:
    _refused(_archive(tmp_path, Entry("x", b"", central={"version": 99})), X, "9.9", cause=NotSupported)
    _refused(_archive(tmp_path, Entry("x", b"", both={"flags": PATCH})), X, "patched", cause=NotSupported)
    deflate64 = Entry("x", DATA, 9, DATA)
    _refused(_archive(tmp_path, deflate64), X, "method 9", "deflate (8)", cause=NotSupported)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"end": {"entries": 7, "entries_here": 7}}, "3 entries, not 7"),
        ({"end": {"entries": 2}}, "several disks"),
        ({"end": {"disk": 1}}, "several disks"),
        ({"end": {"central_disk": 1}}, "several disks"),
        ({"end": {"central_size": 1 << 30}}, "does not end before"),
        ({"end": {"central_size": 50}}, "record of entry"),
        ({"end": {"central_offset": 1 << 30}}, "does not end before"),
        ({"end": {"comment_size": 5}}, "truncated"),
        ({"end64": {"entries": 4, "entries_here": 4}, "end": {"entries": ALL_32 & 0xFFFF}}, "contradict"),
        ({"end64": {"size": 45}}, "45 bytes"),
        ({"end64": {"signature": 0}}, "not where it must be"),
        ({"end64": {}, "locator64": {"disks": 2}}, "several disks"),
        ({"end64": {}, "locator64": {"offset": 3}}, "as its locator says"),
        ({"prepend": b"x" * 9, "shift": -9}, "does not end before"),
    ],
    ids=lambda how: str(how)[:60],
)
def test_ends_that_contradict_themselves(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    _refused(_archive(tmp_path, Entry("x", DATA), Entry("y", DATA), **how), words)


@pytest.mark.parametrize("method", [STORED, DEFLATE, BZIP2, LZMA, ZSTD])
def test_small_entries_are_checked(tmp_path: Path, method: int) -> None:
    for changed, word in (
        ({"both": {"crc": 7}}, "0x00000007"),
        ({"both": {"usize": len(DATA) - 1}, "data": DATA}, "more"),
        ({"both": {"usize": len(DATA) + 1}, "data": DATA}, f"inflates to {len(DATA)};"),
        ({"payload": b"\xff" * 50}, "damaged"),
        ({"payload": b""}, "damaged"),
    ):
        if method == STORED and "crc" not in str(changed):
            continue
        entry = Entry(**{"name": "x", "data": DATA, "method": method, **changed})  # type: ignore[arg-type]
        _refused(_archive(tmp_path, entry, Entry("z", b"")), X, word, cause=ChecksumError)


def test_metadata_is_bounded(tmp_path: Path) -> None:
    zeros = bytes(1 << 16)
    archive = _archive(tmp_path, Entry("x", zeros, DEFLATE), Entry("y", zeros))
    with options(max_metadata_bytes=60_000), Directory(archive) as directory:
        with pytest.raises(ArchiveError, match="max_metadata_bytes"):
            directory.read(directory.entries["x"])
        assert directory.read(directory.entries["y"]) == zeros  # what is stored cannot grow
        with pytest.raises(ArchiveError, match="max_metadata_bytes"):
            directory.read(directory.entries["y"], 60_000)
    with options(max_metadata_bytes=100):
        _refused(archive, "max_metadata_bytes")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = write([META, Entry("x", b"abc" * 9, DEFLATE)], comment=b"end").data
    for nbytes in range(len(whole)):
        (tmp_path / "a.tdz").write_bytes(whole[:nbytes])
        with pytest.raises((ArchiveError, InvalidArgument)):
            _read(tmp_path / "a.tdz")


def test_every_changed_byte_is_noticed_or_harmless(tmp_path: Path) -> None:
    entries = [META, Entry("x", b"abc" * 9, DEFLATE), Entry("n/y", b"xyz", zip64=True)]
    whole = write(entries, end64={}).data
    wanted = {entry.raw_name.decode(): entry.data for entry in entries}
    archive = tmp_path / "a.tdz"
    for at in range(len(whole)):
        for bit in (1, 128):
            archive.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            try:
                found = _read(archive)
            except TdgpuError:
                continue
            # A time, a version or a comment; or the name, as the load will notice.
            assert list(found.values()) == list(wanted.values()), (at, bit)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    archive = _archive(tmp_path, Entry("x", DATA))
    with Directory(archive) as directory:
        os.truncate(archive, 200)
        with pytest.raises(ArchiveError, match="truncated"):
            directory.read(directory.entries["x"])
