"""Unpacking and verifying: what appears, what is found, and that nothing half-written stays."""

from __future__ import annotations

import json
import lzma
import os
import signal
import struct
import sys
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from archives.raw import Entry, write
from forked import in_process
from saves import SAVES
from tensordict import TensorDict
from test_pack import COMPRESSIONS, blocks_of, files_of, payload_offset

import tdgpu
from tdgpu import cli
from tdgpu.archives import unpacking
from tdgpu.errors import (
    ArchiveError,
    ChecksumError,
    InvalidArgument,
    LeafSizeError,
    MissingLeafError,
    NotSupported,
    SaveNotFound,
    TransferError,
)  # fmt: skip
from tdgpu.layout.archive import index
from tdgpu.layout.archive.central import Directory
from tdgpu.layout.tree import Blocks
from tdgpu.transfer import host


@pytest.fixture
def run(tmp_path) -> Path:
    generator = torch.Generator().manual_seed(0)
    td = TensorDict(
        {
            "big": torch.randint(0, 50, (1 << 16,), dtype=torch.int32, generator=generator),
            "none": torch.empty(0, 3),
            "n": {"small": torch.arange(5), "e": {}},
        }
    )
    td.memmap(tmp_path / "run")
    return tmp_path / "run"


def damage(archive: Path, offset: int, data: bytes) -> None:
    with archive.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# --- unpacking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_kind_of_save_comes_back(tmp_path, compression):
    for kind, build in SAVES.items():
        build(tmp_path / kind)
        archive = tdgpu.pack_memmap(tmp_path / kind, tmp_path / "a.tdz", num_threads=2, **COMPRESSIONS[compression])
        assert tdgpu.unpack_memmap(archive, tmp_path / "new" / kind) == tmp_path / "new" / kind
        assert files_of(tmp_path / "new" / kind) == files_of(tmp_path / kind), kind
        report = tdgpu.verify_memmap(archive)
        assert report.is_sound and not report.notes, report
        report = tdgpu.verify_memmap(tmp_path / kind)
        assert report.is_sound and not report.notes and report.kind == "directory", report


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_entries_larger_than_the_ring(run, tmp_path, monkeypatch, compression, threads):
    monkeypatch.setattr(host, "RING_BYTES", 64 << 10)
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz", **COMPRESSIONS[compression])
    tdgpu.unpack_memmap(archive, tmp_path / "new", num_threads=threads)
    assert files_of(tmp_path / "new") == files_of(run)
    offset = payload_offset(archive, "big.memmap")
    with zipfile.ZipFile(archive) as zip_file:
        stored = zip_file.getinfo("big.memmap").compress_size
    raw = archive.read_bytes()
    # An lzma stream ends with a marker, which says nothing about the bytes.
    for at in (offset + 20, offset + stored // 2, *([] if compression == "lzma" else [offset + stored - 9])):
        damage(archive, at, bytes([raw[at] ^ 0x55]))
        with pytest.raises(ChecksumError, match=r"big\.memmap"):
            tdgpu.unpack_memmap(archive, tmp_path / "bad", num_threads=threads)
        damage(archive, at, raw[at : at + 1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tdz", "new", "run"]


def test_a_foreign_archive_with_directories(run, tmp_path):
    """With entries of directories, data descriptors, and compressed metadata."""
    with zipfile.ZipFile(tmp_path / "a.tdz", "w", zipfile.ZIP_DEFLATED) as zip_file:
        zip_file.mkdir("empty") if hasattr(zip_file, "mkdir") else zip_file.writestr("empty/", b"")
        for name, data in files_of(run).items():
            zip_file.writestr(name, data)
        zip_file.writestr("lonely.memmap.tdgpu-index", b"not an index: there is no entry lonely.memmap")
    tdgpu.unpack_memmap(tmp_path / "a.tdz", tmp_path / "new")
    assert (tmp_path / "new" / "empty").is_dir()
    assert files_of(tmp_path / "new").keys() == files_of(run).keys() | {"lonely.memmap.tdgpu-index"}


def test_the_index_is_not_unpacked(tmp_path):
    TensorDict(a=torch.zeros(9000 << 12, dtype=torch.uint8)).memmap(tmp_path / "run")
    archive = tdgpu.pack_memmap(
        tmp_path / "run", tmp_path / "a.tdz", compression="deflate", block_size=4096, compresslevel=1
    )
    assert "a.memmap.tdgpu-index" in zipfile.ZipFile(archive).namelist()
    tdgpu.unpack_memmap(archive, tmp_path / "new")
    assert sorted(files_of(tmp_path / "new")) == ["a.memmap", "meta.json"]


def test_existing_files_are_replaced_and_others_stay(run, tmp_path):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz")
    new = tmp_path / "new"
    new.mkdir(mode=0o750)
    (new / "n").mkdir()
    (new / "big.memmap").write_bytes(b"old")
    (new / "other").write_bytes(b"stays")
    (tmp_path / "elsewhere").write_bytes(b"not touched")
    (new / "n" / "small.memmap").symlink_to(tmp_path / "elsewhere")
    held = (new / "big.memmap").open("rb")
    tdgpu.unpack_memmap(archive, new)
    assert files_of(new) == {**files_of(run), "other": b"stays"}
    assert held.read() == b"old"  # what was mapped stays what it was
    held.close()
    assert (tmp_path / "elsewhere").read_bytes() == b"not touched"
    assert new.stat().st_mode & 0o777 == 0o750
    tdgpu.unpack_memmap(archive, new)
    assert files_of(new) == {**files_of(run), "other": b"stays"}


def test_a_link_to_a_directory_is_followed(run, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    tdgpu.unpack_memmap(tdgpu.pack_memmap(run, tmp_path / "a.tdz"), tmp_path / "link")
    assert files_of(tmp_path / "real") == files_of(run)


def test_what_is_in_the_way_is_found_before_anything_is_written(run, tmp_path):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz")
    new = tmp_path / "new"
    new.write_bytes(b"a file")
    with pytest.raises(InvalidArgument, match="new"):
        tdgpu.unpack_memmap(archive, new)
    new.unlink()
    (new / "big.memmap").mkdir(parents=True)
    with pytest.raises(InvalidArgument, match=r"big\.memmap"):
        tdgpu.unpack_memmap(archive, new)
    (new / "big.memmap").rmdir()
    (new / "n").write_bytes(b"a file")
    with pytest.raises(InvalidArgument, match="n"):
        tdgpu.unpack_memmap(archive, new)
    assert [path.name for path in new.iterdir()] == ["n"]


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(run, tmp_path, monkeypatch):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz")
    real = os.statvfs

    def statvfs(path):
        values = list(real(path))
        values[4] = 10  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(unpacking.os, "statvfs", statvfs)
    with pytest.raises(TransferError, match="room on the disk") as caught:
        tdgpu.unpack_memmap(archive, tmp_path / "new" / "deep")
    wanted, found = caught.value.wanted, caught.value.found
    assert wanted is not None and found is not None and wanted > 1 << 18 > found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tdz", "run"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("exists", [False, True])
def test_an_error_in_the_middle_leaves_nothing(run, tmp_path, monkeypatch, exists, error):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz", compression="deflate")
    new = tmp_path / "new"
    if exists:
        new.mkdir()
        (new / "big.memmap").write_bytes(b"old")
    real, count = os.pwrite, 0

    def pwrite(*arguments):
        nonlocal count
        count += 1
        if count == 3:
            raise error(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(unpacking.os, "pwrite", pwrite)
    threads = threading.active_count()
    with pytest.raises(error) as caught:
        tdgpu.unpack_memmap(archive, new)
    if error is OSError:
        assert caught.value.filename.startswith(str(tmp_path))
    assert threading.active_count() == threads
    assert new.exists() == exists
    assert not exists or files_of(new) == {"big.memmap": b"old"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tdz", *(["new"] if exists else []), "run"]


def test_stale_checksums_of_stored_entries_can_be_accepted(run, tmp_path):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz")
    TensorDict.load_memmap(archive, mode="r+")["big"].add_(1)
    with pytest.raises(ChecksumError, match=r"big\.memmap"):
        tdgpu.unpack_memmap(archive, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    tdgpu.unpack_memmap(archive, tmp_path / "new", verify=False)
    assert torch.equal(TensorDict.load_memmap(tmp_path / "new")["big"], TensorDict.load_memmap(run)["big"] + 1)


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "..\\out"])
def test_names_that_lead_elsewhere_are_refused(run, tmp_path, name):
    with zipfile.ZipFile(tmp_path / "a.tdz", "w") as zip_file:
        zip_file.writestr("meta.json", (run / "meta.json").read_bytes())
        zip_file.writestr(name, b"x")
    with pytest.raises(ArchiveError):
        tdgpu.unpack_memmap(tmp_path / "a.tdz", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tdz", "run"]


def test_what_is_no_archive_is_refused(run, tmp_path):
    (tmp_path / "text").write_text("text")
    for path, error in (("text", InvalidArgument), ("nothing", SaveNotFound), ("run", InvalidArgument)):
        with pytest.raises(error):
            tdgpu.unpack_memmap(tmp_path / path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_memory_does_not_grow_with_the_entry(tmp_path):
    (tmp_path / "run").mkdir()
    TensorDict(a=torch.empty(0)).memmap(tmp_path / "run")
    (tmp_path / "run" / "big.memmap").touch()
    os.truncate(tmp_path / "run" / "big.memmap", 128 << 20)
    for name, block_size in (("blocks", 1 << 20), ("stream", None)):
        tdgpu.pack_memmap(
            tmp_path / "run", tmp_path / name, compression="deflate", compresslevel=1, block_size=block_size
        )
    code = """
        import resource, sys, tdgpu
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tdgpu.unpack_memmap(sys.argv[1], sys.argv[2], num_threads=2)
        assert tdgpu.verify_memmap(sys.argv[1], num_threads=2).is_sound
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    for name in ("blocks", "stream"):
        grown = in_process(code, tmp_path / name, tmp_path / f"{name} unpacked", timeout=240)
        assert int(grown) < 80 << 10, name


# --- verifying --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_changed_byte_is_found_wherever_it_is(run, tmp_path, compression):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz", **COMPRESSIONS[compression])
    for name in ("big.memmap", "n/small.memmap"):
        at = payload_offset(archive, name) + 10
        original = archive.read_bytes()[at : at + 1]
        damage(archive, at, bytes([original[0] ^ 0x10]))
        report = tdgpu.verify_memmap(archive)
        assert not report.is_sound
        assert [str(problem.file) for problem in report.problems] == [f"{archive}::/{name}"]
        damage(archive, at, original)
    assert tdgpu.verify_memmap(archive).is_sound


def test_all_that_is_wrong_is_listed(run, tmp_path):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz", compression="deflate")
    for name in ("big.memmap", "n/small.memmap"):
        damage(archive, payload_offset(archive, name) + 5, b"\xff\xff\xff")
    report = tdgpu.verify_memmap(archive)
    assert {Path(str(problem.file)).name for problem in report.problems} == {"big.memmap", "small.memmap"}
    assert report.entries == 5 and report.nbytes == sum(map(len, files_of(run).values()))


def test_an_index_that_does_not_fit_is_a_problem(run, tmp_path):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz", **COMPRESSIONS["small blocks"])
    raw = archive.read_bytes()
    at = raw.rindex(index.encode(blocks_of(archive, "big.memmap")))
    damage(archive, at + 8, struct.pack("<I", 1))
    report = tdgpu.verify_memmap(archive)
    assert [type(problem) for problem in report.problems] == [ArchiveError]
    assert "index" in str(report.problems[0])
    damage(archive, at, b"\x09")  # of a later version: passed over
    assert tdgpu.verify_memmap(archive).is_sound


def test_an_archive_that_is_cut_off(run, tmp_path):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz")
    os.truncate(archive, archive.stat().st_size - 30)
    report = tdgpu.verify_memmap(archive)
    assert not report.is_sound and "truncated" in str(report.problems[0])


def test_the_structure_of_an_archive_is_checked(run, tmp_path):
    files = files_of(run)
    with zipfile.ZipFile(tmp_path / "a.tdz", "w") as zip_file:
        for name in files.keys() - {"n/small.memmap"}:
            zip_file.writestr(name, files[name])
    assert [type(problem) for problem in tdgpu.verify_memmap(tmp_path / "a.tdz").problems] == [MissingLeafError]


def test_the_structure_of_a_directory_is_checked(run):
    report = tdgpu.verify_memmap(run)
    assert report.is_sound and (report.entries, report.nbytes) == (2, (4 << 16) + 40)
    os.truncate(run / "big.memmap", 100)
    report = tdgpu.verify_memmap(run)
    assert [type(problem) for problem in report.problems] == [LeafSizeError]
    (run / "big.memmap").unlink()
    assert [type(problem) for problem in tdgpu.verify_memmap(run).problems] == [MissingLeafError]


def test_a_class_that_is_not_there_is_a_note(run, tmp_path):
    meta = json.loads((run / "n" / "meta.json").read_text())
    meta.update({"_type": "<class 'nowhere.Gone'>", "_class": "nowhere:Gone"})
    (run / "n" / "meta.json").write_text(json.dumps(meta))
    for path in (run, tdgpu.pack_memmap(run, tmp_path / "a.tdz")):
        report = tdgpu.verify_memmap(path)
        assert report.is_sound and "nowhere.Gone" in report.notes[0]


def test_an_unknown_method_is_a_problem(run, tmp_path):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz", compression="deflate")
    raw = bytearray(archive.read_bytes())
    local, central = raw.index(b"big.memmap") - 30, raw.rindex(b"big.memmap") - 46
    struct.pack_into("<H", raw, local + 8, 97)
    struct.pack_into("<H", raw, central + 10, 97)
    archive.write_bytes(raw)
    assert NotSupported in {type(problem) for problem in tdgpu.verify_memmap(archive).problems}


def test_nothing_to_verify(tmp_path):
    with pytest.raises(SaveNotFound):
        tdgpu.verify_memmap(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert [type(problem) for problem in tdgpu.verify_memmap(tmp_path / "empty").problems] == [SaveNotFound]


def test_refreshed_checksums_are_right(run, tmp_path):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz")
    TensorDict.load_memmap(archive, mode="r+")["big"].add_(1)
    assert not tdgpu.verify_memmap(archive).is_sound
    tensordict.refresh_archive_checksums(archive)
    assert tdgpu.verify_memmap(archive).is_sound


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch, capsys):
    """The command line in this process: (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["tdgpu", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code or 0, *capsys.readouterr()

    return call


def test_there_and_back(run, tmp_path, call):
    archive = tmp_path / "a.tdz"
    code, out, err = call("pack", run, archive, "--compression", "deflate", "--level", 1, "--block-size", "4K")
    assert (code, err) == (0, "") and str(archive) in out
    assert len(blocks_of(archive, "big.memmap").sizes) == 64
    code, out, err = call("verify", archive)
    assert (code, err) == (0, "") and "sound" in out
    code, out, err = call("unpack", archive, tmp_path / "new", "--threads", 0)
    assert (code, err) == (0, "") and str(tmp_path / "new") in out
    assert files_of(tmp_path / "new") == files_of(run)


def test_json(run, tmp_path, call):
    archive = tmp_path / "a.tdz"
    reports: list[dict[str, Any]] = []
    for arguments in (["pack", run, archive], ["unpack", archive, tmp_path / "new"], ["verify", archive]):
        code, out, _ = call(*arguments, "--json")
        assert code == 0
        reports.append(json.loads(out))
    assert reports[0]["bytes"] == archive.stat().st_size
    assert reports[1]["directory"] == str(tmp_path / "new")
    assert reports[2]["is_sound"] and reports[2]["entries"] == 5


def test_damage_exits_with_1(run, tmp_path, call):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz")
    damage(archive, payload_offset(archive, "big.memmap"), b"\xff")
    code, out, err = call("verify", archive)
    assert (code, "damaged" in out) == (1, True) and err.startswith("problem: ") and "big.memmap" in err
    code, out, _ = call("verify", archive, "--json")
    assert code == 1 and json.loads(out)["problems"][0]["type"] == "ChecksumError"
    code, out, err = call("unpack", archive, tmp_path / "new")
    assert (code, out) == (1, "") and err.startswith("error: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["pack", "nothing", "a.tdz"],
        ["pack", "run", "run/a.tdz"],
        ["pack", "run", "nowhere/a.tdz"],
        ["pack", "run", "a.tdz", "--compression", "rar"],
        ["pack", "run", "a.tdz", "--block-size", "3"],
        ["unpack", "nothing", "new"],
        ["unpack", "run/meta.json", "new"],
        ["verify", "nothing"],
    ],
)
def test_mistakes_are_said_in_one_line(run, tmp_path, call, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and ".tdz-" not in err


@pytest.mark.parametrize("arguments", [["--block-size", "big"], ["--level", "high"], ["--threads", "-1"]])
def test_wrong_usage_exits_with_2(run, call, arguments):
    assert call("pack", run, "a.tdz", *arguments)[0] == 2


@pytest.mark.parametrize("command", ["pack", "unpack", "verify"])
def test_help_has_an_example(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0 and "Example: tdgpu " + command in out and "--json" in out


def test_plain_streams_on_request(run, tmp_path, call):
    assert call("pack", run, tmp_path / "a.tdz", "--compression", "deflate", "--block-size", "none")[0] == 0
    assert blocks_of(tmp_path / "a.tdz", "big.memmap") is None
    assert zlib.crc32(zipfile.ZipFile(tmp_path / "a.tdz").read("big.memmap"))


def test_what_a_killed_process_leaves_is_not_packed(run, tmp_path):
    """A process that is killed while it unpacks into a save leaves a hidden directory there."""
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz")
    pid = os.fork()
    if pid == 0:
        unpacking._move = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        tdgpu.unpack_memmap(archive, run)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert any(path.name.startswith(".tdz-") for path in Path(run).iterdir())
    again = tdgpu.pack_memmap(run, tmp_path / "b.tdz")
    with zipfile.ZipFile(archive) as one, zipfile.ZipFile(again) as other:
        assert one.namelist() == other.namelist()


def test_an_empty_name_is_no_directory(run, tmp_path):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz")
    with pytest.raises(InvalidArgument, match="empty name"):
        tdgpu.unpack_memmap(archive, "")


def test_what_cannot_be_inflated_here_is_not_called_damaged(tmp_path):
    """A dictionary larger than the core allows: another tool may well inflate it."""
    TensorDict(a=torch.zeros(44, dtype=torch.uint8)).memmap(tmp_path / "d")
    meta = (tmp_path / "d" / "meta.json").read_bytes().replace(b"[44]", b"[400000000]")
    # The core takes the smaller of dictionary and leaf, so the leaf must be that large, by its own word.
    properties = b"\x09\x04\x05\x00" + b"\x5d" + (1 << 30).to_bytes(4, "little")
    payload = properties + lzma.compress(bytes(44), lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA1}])
    leaf = Entry("a.memmap", bytes(44), method=14, payload=payload, both={"usize": 400_000_000})
    (tmp_path / "a.tdz").write_bytes(write([Entry("meta.json", meta), leaf]).data)
    with pytest.raises(NotSupported, match=r"a\.memmap.*dictionary is larger"):
        tdgpu.load_memmap(tmp_path / "a.tdz")


def test_an_index_of_other_bytes_is_named_and_passed_over(run, tmp_path):
    archive = tdgpu.pack_memmap(run, tmp_path / "a.tdz", compression="deflate", block_size=4096)
    with Directory(archive) as directory:
        blocks = directory.blocks(directory.entries["big.memmap"])
    assert blocks is not None
    other = Blocks(blocks.nbytes, blocks.sizes, blocks.crcs ^ 1)
    data = archive.read_bytes()
    assert data.count(index.encode(blocks)) == 1
    archive.write_bytes(data.replace(index.encode(blocks), index.encode(other)))
    report = tdgpu.verify_memmap(archive)
    assert [str(problem.file).endswith("big.memmap") for problem in report.problems] == [True]
    wanted = tdgpu.load_memmap(run)
    assert torch.equal(tdgpu.load_memmap(archive)["big"], wanted["big"])
