"""Packing directories: what other tools read, what is left behind, and how much memory it takes."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import threading
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from archives.tools import HAS_LIBARCHIVE, read_by_libarchive
from compare import assert_same
from forked import in_process, run_process
from saves import SAVES, UPSTREAM_CANNOT_LOAD
from tensordict import TensorDict

import tdgpu
from tdgpu.archives import pipeline, sources, target, writer
from tdgpu.errors import FormatError, InvalidArgument, InvalidArgumentType, LoadError, NotSupported
from tdgpu.layout.archive import index

COMPRESSIONS: dict[str, dict[str, Any]] = {
    "stored": {},
    "deflate": {"compression": "deflate"},
    "small blocks": {"compression": "deflate", "block_size": 4096},
    "plain deflate": {"compression": zipfile.ZIP_DEFLATED, "block_size": None, "compresslevel": 1},
    "bzip2": {"compression": "bzip2"},
    "lzma": {"compression": "lzma"},
}
# What tensordict writes into archives but cannot load from them: fp8, sizes without elements, a class with a loader of
# the signature that tensordict once had.
NOT_LOADED = UPSTREAM_CANNOT_LOAD | {"nested_of_scalars", "third_party"}


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def entries_of(archive: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(archive) as zip_file:
        assert zip_file.testzip() is None
        return {name: zip_file.read(name) for name in zip_file.namelist()}


def blocks_of(archive: Path, name: str) -> Any:
    """The block index of an entry, as any reader of zip files finds it."""
    with zipfile.ZipFile(archive) as zip_file:
        info = zip_file.getinfo(name)
        extra, body = info.extra, None
        while len(extra) >= 4:
            kind, size = struct.unpack_from("<HH", extra)
            if kind == index.EXTRA_ID:
                body = extra[4 : 4 + size]
            extra = extra[4 + size :]
        if body is None and name + index.SIDECAR in zip_file.namelist():
            body = zip_file.read(name + index.SIDECAR)
    return None if body is None else index.decode(body, info.compress_size, info.file_size)


def payload_offset(archive: Path, name: str) -> int:
    with zipfile.ZipFile(archive) as zip_file, archive.open("rb") as file:
        header = zip_file.getinfo(name).header_offset
        file.seek(header + 26)
        name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
    return header + 30 + name_bytes + extra_bytes


@pytest.fixture
def run(tmp_path) -> Path:
    """A save with one leaf of 1 MiB, small ones, and one without elements."""
    generator = torch.Generator().manual_seed(0)
    td = TensorDict(
        {
            "big": torch.randint(0, 50, (1 << 18,), dtype=torch.int32, generator=generator),
            "none": torch.empty(0, 3),
            "n": {"small": torch.arange(5), "byte": torch.ones(1, dtype=torch.uint8)},
        }
    )
    td.memmap(tmp_path / "run")
    return tmp_path / "run"


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compression", "threads"), [("small blocks", 0), *((name, 2) for name in COMPRESSIONS)])
def test_every_kind_of_save_packs(tmp_path, compression, threads):
    for kind, build in SAVES.items():
        build(tmp_path / kind)
        archive = tdgpu.pack_memmap(
            tmp_path / kind, tmp_path / f"{kind}.tdz", num_threads=threads, **COMPRESSIONS[compression]
        )
        assert entries_of(archive) == files_of(tmp_path / kind), kind
        tensordict.pack_memmap(tmp_path / kind, tmp_path / "theirs.tdz")
        assert list(entries_of(archive)) == list(entries_of(tmp_path / "theirs.tdz")), kind
        if kind not in NOT_LOADED:
            assert_same(
                TensorDict.load_memmap(archive, allow_pickle=True),
                TensorDict.load_memmap(tmp_path / kind, allow_pickle=True),
            )


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("tool", [["unzip", "-tq"], ["7z", "t", "-bd"]])
def test_other_tools_find_nothing_wrong(run, tmp_path, compression, tool):
    if shutil.which(tool[0]) is None:
        pytest.skip(f"{tool[0]} is not on this machine")
    archive = tdgpu.pack_memmap(run, tmp_path / "run.tdz", **COMPRESSIONS[compression])
    done = subprocess.run([*tool, str(archive)], capture_output=True, text=True, timeout=60, check=False)
    if "unsupported" in done.stdout + done.stderr or "need PK compat" in done.stdout + done.stderr:
        assert compression == "lzma" and tool[0] == "unzip"  # which does not know the method
        return
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not HAS_LIBARCHIVE, reason="libarchive is not on this machine")
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_libarchive_reads_the_same_bytes(run, tmp_path, compression):
    """The library of bsdtar; it checks sizes and CRC-32."""
    archive = tdgpu.pack_memmap(run, tmp_path / "run.tdz", **COMPRESSIONS[compression])
    found = read_by_libarchive(archive)
    assert {name: data for name, data in found.items() if not name.endswith(".tdgpu-index")} == files_of(run)


def test_stored_leaves_are_aligned_and_can_be_mapped(run, tmp_path):
    archive = tdgpu.pack_memmap(run, tmp_path / "run.tdz")
    for name in ("big", "n/small", "n/byte"):
        assert payload_offset(archive, f"{name}.memmap") % 64 == 0
    mapped = TensorDict.load_memmap(archive, mode="r+")
    mapped["n", "small"].zero_()
    assert TensorDict.load_memmap(archive)["n", "small"].sum() == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_are_streams_of_their_own(run, tmp_path, threads):
    archive = tdgpu.pack_memmap(
        run, tmp_path / "run.tdz", compression="deflate", block_size=1 << 16, num_threads=threads
    )
    blocks = blocks_of(archive, "big.memmap")
    data, raw, at = (run / "big.memmap").read_bytes(), archive.read_bytes(), payload_offset(archive, "big.memmap")
    assert blocks.nbytes == 1 << 16 and len(blocks.sizes) == len(data) >> 16
    for i in reversed(range(len(blocks.sizes))):  # in any order
        first = at + int(blocks.sizes[:i].sum())
        inflated = zlib.decompressobj(-15).decompress(raw[first : first + int(blocks.sizes[i])])
        assert inflated == data[i << 16 : (i + 1) << 16]
        assert zlib.crc32(inflated) == blocks.crcs[i]
    assert blocks_of(archive, "n/small.memmap") is None  # one block is the entry


def test_an_index_that_does_not_fit_goes_beside_the_entry(tmp_path):
    """10 000 blocks: 80 000 bytes of index, where the central directory takes less than 64 KiB."""
    TensorDict(a=torch.zeros(10_000 << 12, dtype=torch.uint8), b=torch.ones(9000)).memmap(tmp_path / "run")
    archive = tdgpu.pack_memmap(
        tmp_path / "run", tmp_path / "run.tdz", compression="deflate", block_size=4096, compresslevel=1
    )
    assert list(entries_of(archive)) == ["meta.json", "a.memmap", "a.memmap.tdgpu-index", "b.memmap"]
    assert len(blocks_of(archive, "a.memmap").sizes) == 10_000
    assert len(blocks_of(archive, "b.memmap").sizes) == 9
    assert TensorDict.load_memmap(archive)["a"].shape == (10_000 << 12,)
    assert tdgpu.verify_memmap(archive).is_sound
    # What unzip makes of the index is not packed again.
    with zipfile.ZipFile(archive) as zip_file:
        zip_file.extractall(tmp_path / "unzipped")
    again = tdgpu.pack_memmap(tmp_path / "unzipped", tmp_path / "again.tdz")
    assert list(entries_of(again)) == ["meta.json", "a.memmap", "b.memmap"]


def test_levels_differ(run, tmp_path):
    sizes = [
        tdgpu.pack_memmap(run, tmp_path / "run.tdz", compression="deflate", compresslevel=level).stat().st_size
        for level in (0, 1, 9)
    ]
    assert sizes[0] > sizes[1] > sizes[2]


def test_other_files_are_stored_and_links_followed(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.memmap").write_bytes(b"linked")
    (run / "note.txt").write_bytes(b"n" * 10_000)
    (run / "linked").symlink_to(tmp_path / "elsewhere")
    (run / "dangling").symlink_to(tmp_path / "nowhere")
    archive = tdgpu.pack_memmap(run, tmp_path / "run.tdz", compression="deflate")
    with zipfile.ZipFile(archive) as zip_file:
        assert zip_file.getinfo("note.txt").compress_type == zip_file.getinfo("meta.json").compress_type == 0
        assert zip_file.read("linked/x.memmap") == b"linked"
        assert "dangling" not in zip_file.namelist()


def test_sizes_beyond_32_bits(tmp_path):
    """A sparse archive of more than 4 GiB: the numbers go into the format's wide fields."""
    path = tmp_path / "wide.zip"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    archive = writer.ZipWriter(fd)
    archive.begin("meta.json", writer.STORED)
    archive.write(b"{}")
    archive.end(2, zlib.crc32(b"{}"))
    archive.begin("hole.memmap", writer.STORED, aligned=True)
    archive._flush()
    # As if that much had been written.
    os.lseek(fd, 5 << 30, os.SEEK_CUR)
    archive._flushed += 5 << 30
    archive.end(5 << 30, 0, b"i" * 100)
    archive.begin("last.memmap", writer.STORED, aligned=True)
    archive.write(b"last")
    archive.end(4, zlib.crc32(b"last"))
    archive.finish()
    os.close(fd)
    with zipfile.ZipFile(path) as zip_file:
        assert zip_file.getinfo("hole.memmap").file_size == 5 << 30
        assert zip_file.getinfo("last.memmap").header_offset > 5 << 30
        assert zip_file.read("last.memmap") == b"last"
        assert zip_file.read("meta.json") == b"{}"


def test_more_entries_than_16_bits_count(tmp_path):
    fd = os.open(tmp_path / "many.zip", os.O_CREAT | os.O_RDWR)
    archive = writer.ZipWriter(fd)
    for i in range(65_600):
        archive.begin(str(i), writer.STORED)
        archive.end(0, 0)
    archive.finish()
    os.close(fd)
    with zipfile.ZipFile(tmp_path / "many.zip") as zip_file:
        assert len(zip_file.namelist()) == 65_600
        assert zip_file.read("65599") == b""


# --- its place --------------------------------------------------------------------------------------------------------


def test_a_link_is_followed_and_the_mode_kept(run, tmp_path):
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "a.tdz"
    real.write_bytes(b"old")
    real.chmod(0o640)
    other = tmp_path / "other name"
    os.link(real, other)
    (tmp_path / "link.tdz").symlink_to(real)
    assert tdgpu.pack_memmap(run, tmp_path / "link.tdz") == tmp_path / "link.tdz"
    assert (tmp_path / "link.tdz").is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert other.read_bytes() == b"old"
    assert tensordict.is_memmap_archive(real)


def test_a_new_archive_has_the_mode_that_the_umask_gives(run, tmp_path):
    before = os.umask(0o027)
    try:
        archive = tdgpu.pack_memmap(run, tmp_path / "run.tdz")
    finally:
        os.umask(before)
    assert stat.S_IMODE(archive.stat().st_mode) == 0o640


def test_a_file_that_cannot_be_written_is_left(run, tmp_path, monkeypatch):
    archive = tmp_path / "run.tdz"
    archive.write_bytes(b"precious")
    monkeypatch.setattr(target.os, "access", lambda *_: False)  # root may write anything
    with pytest.raises(PermissionError, match=r"run\.tdz"):
        tdgpu.pack_memmap(run, archive)
    assert archive.read_bytes() == b"precious"


@pytest.mark.parametrize(
    "place", ["run/inside.tdz", "run/n/deep.tdz", "link/inside.tdz", "run/big.memmap", "hard link"]
)
def test_the_archive_must_lie_outside(run, tmp_path, place):
    (tmp_path / "link").symlink_to(run)
    os.link(run / "big.memmap", tmp_path / "hard link")
    before = files_of(run)
    with pytest.raises(InvalidArgument, match="outside"):
        tdgpu.pack_memmap(run, tmp_path / place)
    assert files_of(run) == before


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"compression": "zip"}, InvalidArgument, "deflate"),
        ({"compression": 8.0}, InvalidArgumentType, "compression"),
        ({"compression": "zstd"}, NotSupported, "zstd"),
        ({"compression": 93}, NotSupported, "93"),
        ({"compression": 1}, NotSupported, "1"),
        ({"compression": True}, InvalidArgumentType, "True"),
        ({"compression": "deflate", "compresslevel": 10}, InvalidArgument, "10"),
        ({"compression": "bzip2", "compresslevel": 0}, InvalidArgument, "0"),
        ({"compresslevel": "fast"}, InvalidArgumentType, "fast"),
        ({"block_size": 1000}, InvalidArgument, "1000"),
        ({"block_size": 1 << 31}, InvalidArgument, "power of two"),
        ({"block_size": 1e6}, InvalidArgumentType, "block_size"),
        ({"num_threads": -1}, InvalidArgument, "num_threads"),
        ({"num_threads": 1.5}, InvalidArgumentType, "num_threads"),
    ],
)
def test_arguments_are_checked_before_anything_is_written(run, tmp_path, arguments, error, match):
    with pytest.raises(error, match=match):
        tdgpu.pack_memmap(run, tmp_path / "run.tdz", **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_what_is_no_save_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=r"meta\.json"):
        tdgpu.pack_memmap(tmp_path, tmp_path.with_suffix(".tdz"))


def test_links_that_form_a_loop_are_refused(run, tmp_path):
    (run / "n" / "up").symlink_to(run)
    with pytest.raises(FormatError, match="loop"):
        tdgpu.pack_memmap(run, tmp_path / "run.tdz")


def test_a_name_that_is_not_unicode_is_refused(run, tmp_path):
    (run / os.fsdecode(b"\xff.memmap")).write_bytes(b"x")
    with pytest.raises(InvalidArgument, match="Unicode"):
        tdgpu.pack_memmap(run, tmp_path / "run.tdz")
    assert not (tmp_path / "run.tdz").exists()


# --- errors in the middle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_nameless_files", [True, False])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("compression", ["stored", "small blocks", "plain deflate"])
def test_nothing_is_left_behind(run, tmp_path, monkeypatch, error, compression, has_nameless_files):
    """Whatever stops the writing, at any write: no file is left, and the old archive stays."""
    archive = tmp_path / "out" / "run.tdz"
    archive.parent.mkdir()
    archive.write_bytes(b"old")
    if not has_nameless_files:
        monkeypatch.setattr(target, "_NO_NAMELESS_FILES", frozenset({95}))
        real_open = os.open

        def refuse(path, flags, *arguments, **keywords):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(95, "Operation not supported")
            return real_open(path, flags, *arguments, **keywords)

        monkeypatch.setattr(target.os, "open", refuse)
    real = writer.ZipWriter._write_out
    for nth in (1, 2, 3):
        count = 0

        def write_out(self, data):
            nonlocal count
            count += 1
            if count == nth:  # noqa: B023
                raise error(28, "No space left on device")
            real(self, data)

        monkeypatch.setattr(writer.ZipWriter, "_write_out", write_out)
        threads = threading.active_count()
        raised: BaseException | None = None
        try:
            tdgpu.pack_memmap(run, archive, num_threads=2, **COMPRESSIONS[compression])
        except error as caught:
            raised = caught
        assert (raised is None) == (count < nth)
        assert (archive.read_bytes() == b"old") == (raised is not None)
        assert getattr(raised, "filename", str(archive)) == str(archive)
        archive.write_bytes(b"old")
        assert [path.name for path in archive.parent.iterdir()] == ["run.tdz"]
        assert threading.active_count() == threads


def test_a_process_that_is_killed_leaves_nothing(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    code = (
        "import os, sys, tdgpu; from tdgpu.archives.writer import ZipWriter\n"
        "ZipWriter.finish = lambda self: (self._flush(), os.kill(os.getpid(), 9))\n"
        "tdgpu.pack_memmap(sys.argv[1], sys.argv[2], compression='deflate')"
    )
    assert run_process(code, run, out / "run.tdz")[0] == -9
    try:
        os.close(os.open(out, os.O_TMPFILE | os.O_RDWR))
    except OSError:
        pytest.skip("this file system has no nameless files")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("change", ["grows", "shrinks", "is gone", "is a pipe"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_file_that_changes_meanwhile_is_named(run, tmp_path, monkeypatch, compression, change):
    real = sources.FileSource._read

    def read(self, *arguments):
        if self._path.endswith("big.memmap"):
            if change == "is gone":
                os.unlink(self._path)
            elif change == "is a pipe":
                os.unlink(self._path)
                os.mkfifo(self._path)
            else:
                os.truncate(self._path, self.nbytes + (1 if change == "grows" else -1))
        return real(self, *arguments)

    monkeypatch.setattr(sources.FileSource, "_read", read)
    with pytest.raises((LoadError, FileNotFoundError), match=r"big\.memmap"):
        tdgpu.pack_memmap(run, tmp_path / "run.tdz", num_threads=2, **COMPRESSIONS[compression])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


# --- memory and threads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["stored", "deflate", "plain deflate"])
def test_memory_does_not_grow_with_the_leaf(tmp_path, compression):
    """128 MiB are packed with less than half of that."""
    (tmp_path / "run").mkdir()
    TensorDict(a=torch.empty(0)).memmap(tmp_path / "run")
    (tmp_path / "run" / "big.memmap").touch()
    os.truncate(tmp_path / "run" / "big.memmap", 128 << 20)
    code = """
        import resource, sys, tdgpu
        from tensordict import TensorDict
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        how = {"num_threads": 2, **eval(sys.argv[3])}
        TensorDict({}).memmap(sys.argv[2] + " small")
        tdgpu.pack_memmap(sys.argv[2] + " small", sys.argv[2], **how)  # what it needs for itself
        before = peak()
        tdgpu.pack_memmap(sys.argv[1], sys.argv[2], **how)
        print(peak() - before)
    """
    grown = in_process(code, tmp_path / "run", tmp_path / "run.tdz", repr(COMPRESSIONS[compression]), timeout=240)
    assert int(grown) < 56 << 10


def test_blocks_of_one_leaf_are_compressed_side_by_side(run, tmp_path, monkeypatch):
    real, running, most = pipeline.deflate_block, 0, 0
    lock = threading.Lock()

    def deflate_block(*arguments, **keywords):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        try:
            return real(*arguments, **keywords)
        finally:
            with lock:
                running -= 1

    monkeypatch.setattr(pipeline, "deflate_block", deflate_block)
    tdgpu.pack_memmap(run, tmp_path / "run.tdz", compression="deflate", block_size=1 << 16, num_threads=3)
    assert most == 3


def test_progress_ends_at_the_total(run, tmp_path, monkeypatch):
    from contextlib import contextmanager

    told: list[int] = []
    totals: list[int] = []

    @contextmanager
    def bar(what, nbytes, *, enabled):
        assert enabled
        totals.append(nbytes)
        yield told.append

    monkeypatch.setattr("tdgpu.archives.packing.bar", bar)
    for arguments in COMPRESSIONS.values():
        told.clear()
        tdgpu.pack_memmap(run, tmp_path / "run.tdz", progress=True, num_threads=2, **arguments)
        assert told == sorted(told) and told[-1] == totals[-1] == sum(map(len, files_of(run).values()))


@pytest.mark.parametrize("name", ["stored", "deflate", "bzip2"])
def test_what_a_killed_append_left_behind_the_rows_is_not_packed(tmp_path: Path, name: str) -> None:
    td = TensorDict({"a": torch.randn(100, 30), "n": {"b": torch.arange(100)}}, [100])
    td.memmap(tmp_path / "save")
    for file in (tmp_path / "save").rglob("*.memmap"):
        with file.open("ab") as stream:
            stream.write(b"surplus")
    prefix = f"{tmp_path}/./save/"
    archive = tdgpu.pack_memmap(prefix, tmp_path / "save.tdz", **COMPRESSIONS[name])
    assert_same(TensorDict.load_memmap(archive), td)
    assert tdgpu.verify_memmap(archive).is_sound
