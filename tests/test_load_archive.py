"""Archives onto a device, and inflated on the CPU: right bytes on every road, named damage, and only what is wanted."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import shutil
import threading
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from saves import LEGACY, SAVES
from tensordict import TensorDict
from test_load_device import MACHINES, machine, same_values

import tdgpu
from tdgpu import errors
from tdgpu.layout.archive.central import Directory
from tdgpu.transfer import host

# How the archives of these tests are compressed.
PACKINGS: dict[str, dict[str, Any]] = {
    "stored": {},
    "stream": {"compression": "deflate", "block_size": None},
    "blocks": {"compression": "deflate", "block_size": 64 << 10},
    "small blocks": {"compression": "deflate", "block_size": 4 << 10},
    "bzip2": {"compression": "bzip2"},
    "lzma": {"compression": "lzma"},
}
PATHS = ["auto", "host", "generic"]


def compressible(n: int, seed: int = 0) -> torch.Tensor:
    """Floats of a few values: they are compressed to about a third."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (n,), generator=generator).float().sqrt()


def large_leaves() -> TensorDict:
    """One of several blocks of bzip2; more would take their time."""
    td = TensorDict({f"w{i}": compressible(n + 1000 * i, i) for i, n in enumerate((300_000, 90_000, 90_000, 90_000))})
    td["small"] = torch.arange(100)
    td["nested", "byte"] = torch.ones(1, dtype=torch.uint8)
    return td


def pack(td: TensorDict, path: Path, packing: str) -> Path:
    return tdgpu.save(td, path / f"{packing.replace(' ', '-')}.tdz", **PACKINGS[packing])


LARGE = large_leaves()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """LARGE in every packing; lzma takes its time. Not to be changed."""
    return {packing: pack(LARGE, tmp_path_factory.mktemp("packed"), packing) for packing in PACKINGS}


def damage(archive: Path, name: str) -> None:
    """Changes a byte in the middle of an entry's payload."""
    with zipfile.ZipFile(archive) as opened:
        info = opened.getinfo(name)
    with open(archive, "r+b") as file:
        file.seek(info.header_offset + 26)
        head = file.read(4)
        skip = 30 + int.from_bytes(head[:2], "little") + int.from_bytes(head[2:], "little")
        file.seek(info.header_offset + skip + info.compress_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x5A]))


@contextlib.contextmanager
def bytes_read():
    """Counts what the process reads, in any thread: the list's one number is set at the end."""

    def count() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("rchar")).split()[1])

    found = [0]
    begun = count()
    yield found
    found[0] = count() - begun


# --- right bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
def test_every_kind_of_save_arrives_from_blocks(sim, tmp_path, name):
    with machine(sim, name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pickles, and torch's opinion of complex32
        for kind, build in SAVES.items():
            robust = kind not in LEGACY
            build(tmp_path / kind)
            archive = tdgpu.pack_memmap(
                tmp_path / kind, tmp_path / f"{kind}.tdz", compression="deflate", block_size=4096
            )
            wanted = tdgpu.load_memmap(tmp_path / kind, robust_key=robust)
            assert_same(tdgpu.load_memmap(archive, device="simgpu", robust_key=robust), wanted)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", MACHINES)
def test_large_leaves_arrive(sim, packed, name, packing):
    td, archive = LARGE, packed[packing]
    with machine(sim, name):
        ways: list[dict[str, Any]] = [{}, {"non_blocking": True}, {"return_early": True}, {"num_threads": 1}]
        for arguments in ways:
            loaded = tdgpu.load_memmap(archive, device="simgpu", verify=True, **arguments)
            loaded = loaded.result() if arguments.get("return_early") else loaded
            assert same_values(loaded, td)


@pytest.mark.parametrize("packing", PACKINGS)
def test_several_loads_at_once(sim, packed, packing):
    """Runs hold on to their threads while they wait for the ring: nobody may wait for nobody."""
    td, archive = LARGE, packed[packing]
    with tdgpu.options(threads=3, ring_bytes=256 << 10, chunk_bytes=32 << 10):
        for limits in ((0, 0, 0), (1, 0, 2), (2, 1, 0)):
            loads = [tdgpu.load_memmap(archive, device="simgpu", non_blocking=True, num_threads=n) for n in limits]
            tdgpu.synchronize()
            assert all(same_values(one, td) for one in loads)


def test_idle_readers_hold_no_file(sim, packed):
    """Not even those that found the load behind theirs to have all the threads that it may have."""
    with tdgpu.options(threads=3):
        for limit in (0, 1, 0, 1):
            tdgpu.load_memmap(packed["stream"], device="simgpu", non_blocking=True, num_threads=limit)
        tdgpu.synchronize()
    deadline = time.monotonic() + 10
    while any(os.path.realpath(f"/proc/self/fd/{fd}") == str(packed["stream"]) for fd in os.listdir("/proc/self/fd")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
@pytest.mark.parametrize("packing", PACKINGS)
def test_cpu(packed, packing, threads):
    td, archive = LARGE, packed[packing]
    assert same_values(tdgpu.load_memmap(archive, num_threads=threads), td)
    future = tdgpu.load_memmap(archive, num_threads=threads, return_early=True)
    assert torch.equal(future.wait("small"), td["small"])
    assert same_values(future.result(), td) and future.done()
    assert future.progress.path == ("mapped" if packing == "stored" else "inflated")


def test_each_inflated_leaf_is_the_users_own(packed):
    loaded = tdgpu.load_memmap(packed["blocks"], num_threads=2)
    storages = {tensor.untyped_storage().data_ptr() for tensor in loaded.values(True, True)}
    assert len(storages) == len(list(loaded.values(True, True)))


@pytest.mark.parametrize("arguments", [{"non_blocking": True}, {"return_early": True}])
@pytest.mark.parametrize("packing", ["stream", "blocks", "bzip2", "lzma"])
def test_the_call_returns_while_the_device_still_waits(sim, packed, packing, arguments):
    td, archive = LARGE, packed[packing]
    tdgpu.load_memmap(archive, device="simgpu", subpath="nested")  # the engine is made, the libraries loaded
    sim.set(delay_us=60_000, fixed_delay=1)
    begin = time.perf_counter()
    loaded = tdgpu.load_memmap(archive, device="simgpu", **arguments)
    assert time.perf_counter() - begin < 0.2  # one copy alone takes 0.06 s, and there are five and more
    loaded = loaded.result() if arguments.get("return_early") else loaded
    assert same_values(loaded, td)


# --- rows -------------------------------------------------------------------------------------------------------------

ROWS = [slice(0, 5), slice(100, 140), slice(-3, None), slice(0, 0), slice(None), slice(37, 38)]


@pytest.fixture(scope="module")
def table() -> TensorDict:
    return TensorDict(
        {
            "wide": compressible(1000 * 700).view(1000, 700),
            "narrow": torch.arange(1000, dtype=torch.int16),
            "n": TensorDict({"cube": compressible(1000 * 12, 3).view(1000, 3, 4)}, [1000]),
        },
        [1000],
    )


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, table: TensorDict) -> dict[str, Path]:
    """The table as a directory and in every packing. Not to be changed."""
    base = tmp_path_factory.mktemp("tables")
    table.memmap(base / "directory")
    return {"directory": base / "directory"} | {packing: pack(table, base, packing) for packing in PACKINGS}


@pytest.mark.parametrize("packing", ["directory", *PACKINGS])
@pytest.mark.parametrize("place", ["cpu", "simgpu"])
def test_rows(sim, table, tables, place, packing):
    saved = tables[packing]
    for rows in ROWS:
        wanted = table[rows]
        loaded = tdgpu.load_memmap(saved, device=place, rows=rows, num_threads=2)
        assert loaded.batch_size == wanted.batch_size and loaded["n"].batch_size == wanted.batch_size
        assert {str(key): tensor.shape for key, tensor in loaded.items(True, True)} == {
            str(key): tensor.shape for key, tensor in wanted.items(True, True)
        }
        assert same_values(loaded, wanted)


@pytest.mark.parametrize("packing", ["directory", "stored", "blocks"])
def test_only_the_rows_bytes_are_read(sim, table, tables, packing):
    saved = tables[packing]
    tdgpu.load_memmap(saved, device="simgpu")  # the engine is made
    with bytes_read() as count:
        loaded = tdgpu.load_memmap(saved, device="simgpu", rows=slice(500, 520))
    assert same_values(loaded, table[500:520])
    rows_bytes = 20 * (700 * 4 + 2 + 12 * 4)
    block_bytes = 2 * (64 << 10) * 3  # at both ends of each leaf's range
    metadata = 48 << 10  # the archive's directory is looked for in its last 64 KiB, which this archive has not
    allowed = rows_bytes + metadata + (block_bytes if packing == "blocks" else 0)
    assert rows_bytes * (1 if packing != "blocks" else 0.1) <= count[0] <= allowed + (66 << 10)
    assert count[0] < table["wide"].nbytes / 4


@pytest.mark.parametrize("packing", ["stored", "blocks", "stream"])
def test_rows_of_a_damaged_archive(tmp_path, table, tables, packing):
    """What is read is checked: a block by itself, a stream as a whole."""
    archive = Path(shutil.copy(tables[packing], tmp_path))
    damage(archive, "wide.memmap")
    away, at = slice(0, 3), slice(0, 1000)
    if packing == "stream":
        with pytest.raises(errors.ChecksumError, match=r"wide\.memmap"):
            tdgpu.load_memmap(archive, rows=away)
    else:
        assert same_values(tdgpu.load_memmap(archive, rows=away), table[away])
    if packing != "stored":
        with pytest.raises(errors.ChecksumError, match=r"wide\.memmap"):
            tdgpu.load_memmap(archive, rows=at)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [name for name in PACKINGS if name != "stored"])
@pytest.mark.parametrize("path", PATHS)
def test_damage_is_named(sim, tmp_path, packed, path, packing):
    archive = Path(shutil.copy(packed[packing], tmp_path))
    damage(archive, "w2.memmap")
    with tdgpu.options(path=path):
        with pytest.raises(errors.ChecksumError, match=r"w2\.memmap") as caught:
            tdgpu.load_memmap(archive, device="simgpu")
        error = pickle.loads(pickle.dumps(caught.value))
        assert error.key == ("w2",) and error.file == str(archive) and error.save == str(archive)
        assert isinstance(error, zipfile.BadZipFile) and isinstance(error, OSError)
        future = tdgpu.load_memmap(archive, device="simgpu", return_early=True)
        with pytest.raises(errors.ChecksumError, match=r"w2\.memmap"):
            future.synchronize()
        assert same_values(tdgpu.load_memmap(packed[packing], device="simgpu"), LARGE)


@pytest.mark.parametrize("packing", [name for name in PACKINGS if name != "stored"])
def test_damage_is_named_on_the_cpu(tmp_path, packed, packing):
    archive = Path(shutil.copy(packed[packing], tmp_path))
    damage(archive, "w1.memmap")
    for threads in (0, 3):
        with pytest.raises(errors.ChecksumError, match=r"w1\.memmap") as caught:
            tdgpu.load_memmap(archive, num_threads=threads)
        assert caught.value.key == ("w1",)
    future = tdgpu.load_memmap(archive, num_threads=2, return_early=True)
    with pytest.raises(errors.ChecksumError, match=r"w1\.memmap"):
        future.result()
    out = TensorDict(w0=torch.zeros(3))
    with pytest.raises(errors.ChecksumError):
        tdgpu.load_memmap(archive, out=out)
    assert list(out.keys()) == ["w0"] and out["w0"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("place", ["cpu", "simgpu"])
def test_stored_entries_are_checked_on_request(sim, tmp_path, packed, place):
    archive = Path(shutil.copy(packed["stored"], tmp_path))
    assert same_values(tdgpu.load_memmap(archive, device=place, verify=True), LARGE)
    damage(archive, "w1.memmap")
    tdgpu.load_memmap(archive, device=place)  # as tensordict: unchecked
    with pytest.raises(errors.ChecksumError, match=r"w1\.memmap.*CRC-32"):
        tdgpu.load_memmap(archive, device=place, verify=True)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("path", PATHS)
def test_a_failing_disk(faulty, packed, path, packing):
    td, archive = LARGE, packed[packing]
    with tdgpu.options(path=path):
        assert same_values(tdgpu.load_memmap(archive, device="simgpu"), td)
        faulty.io.set(short_reads=1)
        assert same_values(tdgpu.load_memmap(archive, device="simgpu"), td)
        faulty.io.fail(3, errno.EIO, ".tdz")
        with pytest.raises(errors.LoadError, match="Input/output error") as caught:
            tdgpu.load_memmap(archive, device="simgpu")
        assert caught.value.file == str(archive) and caught.value.key is not None
        faulty.io.reset()
        assert same_values(tdgpu.load_memmap(archive, device="simgpu"), td)


@pytest.mark.parametrize("packing", ["stream", "blocks", "lzma"])
@pytest.mark.parametrize("path", PATHS)
def test_an_archive_that_is_cut_while_it_is_loaded(faulty, tmp_path, packed, path, packing):
    archive = Path(shutil.copy(packed[packing], tmp_path))
    with tdgpu.options(path=path):
        tdgpu.load_memmap(archive, device="simgpu")
        faulty.io.truncate_at(2, ".tdz")
        with pytest.raises(errors.LoadError, match="cut off by the archive's end"):
            tdgpu.load_memmap(archive, device="simgpu")


def test_a_load_that_nobody_waits_for_reports_its_damage(sim, tmp_path, packed, monkeypatch):
    seen: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    archive = Path(shutil.copy(packed["stream"], tmp_path))
    damage(archive, "w3.memmap")

    def load() -> None:
        tdgpu.load_memmap(archive, device="simgpu", non_blocking=True)  # raises itself, if it is found that early
        tdgpu.synchronize()

    with pytest.raises(errors.ChecksumError, match=r"w3\.memmap"):
        load()
    assert len(seen) <= 1


# --- giving up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["cpu", "simgpu"])
@pytest.mark.parametrize("packing", ["stream", "blocks"])
def test_a_dropped_future_leaves_nothing_behind(sim, packed, packing, place):
    td, archive = LARGE, packed[packing]
    tdgpu.load_memmap(archive, device=place)
    before = threading.active_count()
    for _ in range(3):
        future = tdgpu.load_memmap(archive, device=place, return_early=True, num_threads=2)
        del future
        gc.collect()
    assert threading.active_count() == before
    assert same_values(tdgpu.load_memmap(archive, device=place), td)


def test_a_future_in_a_forked_child(packed):
    future = tdgpu.load_memmap(packed["stream"], return_early=True, num_threads=2)
    pid = os.fork()
    if pid == 0:
        try:
            future.result()
        except errors.ForkError:
            del future
            gc.collect()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    future.synchronize()


# --- part by part -----------------------------------------------------------------------------------------------------


def wants_of(archive: Path) -> list[host.Want]:
    with Directory(archive) as directory:
        directory.locate_all()
        return [
            host.Want(directory.extent(entry), (name,), 0, entry.nbytes, 0) for name, entry in directory.entries.items()
        ]


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("packing", PACKINGS)
def test_parts_make_up_the_whole(packed, packing, threads):
    found: dict[str, bytearray] = {}
    for ring_bytes in (64 << 10, 1 << 20):
        found.clear()
        parts = host.stream("", wants_of(packed[packing]), threads=threads, verify=True, ring_bytes=ring_bytes)
        for want, first, data in parts:
            whole = found.setdefault(want.key[0], bytearray(want.nbytes))
            assert not any(whole[first : first + len(data)])
            whole[first : first + len(data)] = data
        with zipfile.ZipFile(packed[packing]) as archive:
            assert {name: bytes(data) for name, data in found.items()} == {
                info.filename: archive.read(info) for info in archive.infolist() if info.file_size
            }


@pytest.mark.parametrize("packing", ["stream", "blocks"])
def test_parts_that_nobody_wants_are_not_waited_for(packed, packing):
    for taken in (1, 3):
        parts = host.stream("", wants_of(packed[packing]), threads=2, verify=True, ring_bytes=64 << 10)
        for _ in range(taken):
            next(parts)
        parts.close()
