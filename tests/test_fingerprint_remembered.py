"""What is remembered of files is never wrong: every way to change a save without its knowing is tried."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdgpu
from tdgpu.cache import leaves, remembered
from tdgpu.cache.fingerprint import fingerprint
from tdgpu.cache.remembered import Identity, Remembered, began_ns, identity, magic_of, settled
from tdgpu.options import options

ROOT = Path(__file__).parents[1]
ROWS = 4096  # of 8 bytes: several pages


class Reads:
    """How many blocks were read and hashed."""

    def __init__(self) -> None:
        self.count = 0

    def since(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found = Reads()
    real = leaves._hash_block

    def counted(*arguments: Any) -> bytes:
        found.count += 1
        return real(*arguments)

    monkeypatch.setattr(leaves, "_hash_block", counted)
    return found


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path) -> Iterator[None]:
    with options(cache=str(tmp_path / "cache")):
        yield


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is a minute ahead: what has just been written has settled."""
    real = remembered.now_ns
    monkeypatch.setattr(remembered, "now_ns", lambda: real() + 60_000_000_000)


def save(path: Path, offset: int = 0) -> Path:
    TensorDict(a=torch.arange(offset, offset + ROWS), b=torch.ones(ROWS), batch_size=[ROWS]).memmap(path)
    tick()
    return path


def tick() -> None:
    """Waits until the clock of files' times has moved on."""
    time.sleep(0.05)


def of(path: Path) -> str:
    return fingerprint(tdgpu.MemmapDataset(path))


def without_memory(path: Path) -> str:
    with options(cache=str(path.parent / f"empty cache {time.monotonic_ns()}")):
        return of(path)


def is_trusted(path: Path) -> bool:
    return magic_of(str(path)) in remembered.TRUSTED


# --- what it is for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["directory", "archive"])
def test_a_save_that_has_settled_is_read_once(kind, tmp_path, later, reads):
    path = save(tmp_path / "save")
    if kind == "archive":
        path = Path(tdgpu.pack_memmap(path, tmp_path / "save.tdz"))
        tick()
    first = of(path)
    assert reads.since() == 2
    assert of(path) == first
    assert reads.since() == (0 if is_trusted(path) else 2)


def test_a_compressed_archive_that_has_settled_is_inflated_once(tmp_path, later, monkeypatch):
    path = Path(tdgpu.pack_memmap(save(tmp_path / "save"), tmp_path / "save.tdz", compression="deflate"))
    tick()
    first = of(path)
    if is_trusted(path):
        monkeypatch.setattr(leaves.host, "stream", None)
    assert of(path) == first


def test_only_what_has_changed_is_read_again(tmp_path, later, reads):
    path = save(tmp_path / "save")
    first = of(path)
    reads.since()
    with open(path / "a.memmap", "r+b") as file:
        file.write(b"1")
    tick()
    assert of(path) != first
    assert reads.since() == (1 if is_trusted(path) else 2)


def test_rows_of_the_same_file_are_not_taken_for_all_of_it(tmp_path, later):
    path = save(tmp_path / "save")
    dataset = tdgpu.MemmapDataset(path)
    first = fingerprint(dataset)
    tdgpu.append_memmap(path, TensorDict(a=torch.arange(3), b=torch.ones(3), batch_size=[3]))
    tick()
    assert of(path) == without_memory(path) != first
    assert fingerprint(dataset) == first


def test_a_moved_save_is_still_known(tmp_path, later, reads):
    path = save(tmp_path / "save")
    first = of(path)
    reads.since()
    path = path.rename(tmp_path / "moved")
    assert of(path) == first
    assert reads.since() == (2 if not is_trusted(path) else 0)


# --- changes ----------------------------------------------------------------------------------------------------------


def through_a_mapping(path: Path) -> Callable[[int], None]:
    """Maps the leaf, touches its first page, and keeps it mapped."""
    loaded = TensorDict.load_memmap(path, mode="r+")
    loaded["a"][0] = 0

    def change(value: int) -> None:
        loaded["a"][0] = value

    return change


def through_a_mapping_of_another_page(path: Path) -> Callable[[int], None]:
    loaded = TensorDict.load_memmap(path, mode="r+")
    loaded["a"][0] = 0

    def change(value: int) -> None:
        loaded["a"][-1] = value

    return change


def through_an_archive(path: Path) -> Callable[[int], None]:
    return through_a_mapping(path)


def through_a_mapping_of_numpy(path: Path) -> Callable[[int], None]:
    mapped = np.memmap(path / "a.memmap", np.int64, "r+")
    mapped[:] = mapped[:]

    def change(value: int) -> None:
        mapped[100] = value

    return change


def by_a_write_whose_time_is_set_back(path: Path) -> Callable[[int], None]:
    file = path / "a.memmap"

    def change(value: int) -> None:
        before = file.stat()
        fd = os.open(file, os.O_RDWR)
        os.pwrite(fd, value.to_bytes(8, "little"), 64)
        os.close(fd)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    return change


def by_another_file_of_the_same_size_and_times(path: Path) -> Callable[[int], None]:
    file = path / "a.memmap"

    def change(value: int) -> None:
        before = file.stat()
        other = path.parent / "other"
        shutil.copy(file, other)
        with open(other, "r+b") as opened:
            opened.write(value.to_bytes(8, "little"))
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(other, file)

    return change


def by_deleting_and_making_it_anew(path: Path) -> Callable[[int], None]:
    file = path / "a.memmap"

    def change(value: int) -> None:
        before = file.stat()
        data = bytearray(file.read_bytes())
        data[:8] = value.to_bytes(8, "little")
        file.unlink()
        file.write_bytes(data)  # it may get the inode of the one before
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    return change


def through_a_hard_link(path: Path) -> Callable[[int], None]:
    link = path.parent / "link"
    os.link(path / "a.memmap", link)
    with open(link, "r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 0)
    mapped[0:8] = bytes(8)

    def change(value: int) -> None:
        mapped[0:8] = value.to_bytes(8, "little")

    return change


def by_cutting_and_growing_it(path: Path) -> Callable[[int], None]:
    file = path / "a.memmap"

    def change(value: int) -> None:
        size = file.stat().st_size
        os.truncate(file, 8 * (ROWS - value))
        os.truncate(file, size)

    return change


DIRECTORY_CHANGES = [
    through_a_mapping,
    through_a_mapping_of_another_page,
    through_a_mapping_of_numpy,
    by_a_write_whose_time_is_set_back,
    by_another_file_of_the_same_size_and_times,
    by_deleting_and_making_it_anew,
    through_a_hard_link,
    by_cutting_and_growing_it,
]


def changes_are_seen(path: Path, change: Callable[[int], None]) -> None:
    tick()
    seen = [of(path)]
    assert of(path) == seen[0] == without_memory(path)
    for value in (3, 4, 5):  # the same page again and again, after it was written back each time
        change(value)
        tick()
        seen.append(of(path))
        assert of(path) == seen[-1] == without_memory(path)
    assert len(set(seen)) == 4


@pytest.mark.parametrize("way", DIRECTORY_CHANGES)
def test_a_change_is_seen(way, tmp_path, later):
    path = save(tmp_path / "save")
    changes_are_seen(path, way(path))


def test_a_change_through_an_archive_is_seen(tmp_path, later):
    path = Path(tdgpu.pack_memmap(save(tmp_path / "save"), tmp_path / "save.tdz"))
    changes_are_seen(path, through_an_archive(path))


def test_a_change_is_seen_where_mapped_writes_move_no_time(later):
    """On tmpfs."""
    shared = Path("/dev/shm")
    assert magic_of(str(shared)) == 0x01021994
    directory = shared / f"tdgpu-test-{os.getpid()}"
    try:
        path = save(directory / "save")
        change = through_a_mapping(path)
        before = (path / "a.memmap").stat()
        tick()
        change(7)
        assert (path / "a.memmap").stat().st_mtime_ns == before.st_mtime_ns  # what this is about
        changes_are_seen(path, change)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_a_change_by_another_process_is_seen(tmp_path, later):
    path = save(tmp_path / "save")
    program = (
        "import mmap, sys\nfile = open(sys.argv[1], 'r+b')\nmapped = mmap.mmap(file.fileno(), 0)\nmapped[0] = 0\n"
        "for line in sys.stdin:\n  mapped[0] = int(line)\n  print('done', flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(path / "a.memmap")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    orders, answers = child.stdin, child.stdout

    def change(value: int) -> None:
        orders.write(f"{value}\n")
        orders.flush()
        assert answers.readline() == "done\n"

    try:
        changes_are_seen(path, change)
    finally:
        child.kill()
        child.wait()


def test_a_change_while_the_file_is_hashed_is_not_remembered(tmp_path, later, monkeypatch):
    path = save(tmp_path / "save")
    change = through_a_mapping(path)
    tick()
    counted = leaves._hash_block

    def changing(*arguments: Any) -> bytes:
        digest = counted(*arguments)
        change(9)  # behind what has been read
        return digest

    with monkeypatch.context() as patch, options(threads=1, cache=str(tmp_path / "cache")):
        patch.setattr(leaves, "_hash_block", changing)
        before = of(path)
    tick()
    assert of(path) == without_memory(path) != before


def test_what_has_just_been_written_is_not_remembered(tmp_path, reads):
    path = save(tmp_path / "save")
    assert of(path) == of(path)
    assert reads.since() == 4


def test_a_write_under_way_is_waited_for(tmp_path, later):
    """The time of a write is that of its beginning: bytes that come later would move it no more."""
    file = tmp_path / "file"
    file.write_bytes(b"x")
    tick()
    if not is_trusted(file):
        assert settled(str(file)) is None
        return
    data = memoryview(bytearray(192 << 20))
    ended: list[float] = []

    def write() -> None:
        fd = os.open(file, os.O_RDWR)
        os.pwrite(fd, data, 0)  # one call
        ended.append(time.monotonic())
        os.close(fd)

    writer = threading.Thread(target=write)
    writer.start()
    while file.stat().st_size == 1 and writer.is_alive():
        pass
    found = settled(str(file))
    now = time.monotonic()
    writer.join()
    assert found is not None and found.size == len(data)
    assert ended[0] < now + 0.5  # it had ended, up to when its thread could say so


# --- clocks -----------------------------------------------------------------------------------------------------------

KNOWN = Identity(1, 2, 3, 4, 5_000_000_001, 6_000_000_001)


@pytest.mark.parametrize("step_seconds", [-3600, -20, -2, 2, 3600])
def test_nothing_is_known_after_the_clock_was_set(step_seconds, tmp_path, monkeypatch):
    memory = Remembered.load(tmp_path)
    memory.add(KNOWN, (1,), b"0" * 16)
    memory.save()
    assert Remembered.load(tmp_path).get(KNOWN, (1,)) == b"0" * 16
    real = remembered.now_ns
    monkeypatch.setattr(remembered, "now_ns", lambda: real() + step_seconds * 1_000_000_000)
    assert Remembered.load(tmp_path).get(KNOWN, (1,)) is None


def test_nothing_is_remembered_if_the_clock_was_set_meanwhile(tmp_path, monkeypatch):
    memory = Remembered.load(tmp_path)
    memory.add(KNOWN, (1,), b"0" * 16)
    real = remembered.now_ns
    with monkeypatch.context() as patch:
        patch.setattr(remembered, "now_ns", lambda: real() - 20_000_000_000)
        memory.save()
    assert Remembered.load(tmp_path).get(KNOWN, (1,)) is None


def test_when_the_system_began_does_not_depend_on_when_it_is_asked():
    first = began_ns()
    time.sleep(0.2)
    assert abs(began_ns() - first) < remembered.STEP_NS / 10


def test_nothing_is_known_after_a_restart(tmp_path, monkeypatch):
    memory = Remembered.load(tmp_path)
    memory.add(KNOWN, (1,), b"0" * 16)
    memory.save()
    monkeypatch.setattr(remembered, "_run", lambda: b"0" * 36)
    assert Remembered.load(tmp_path).get(KNOWN, (1,)) is None


def test_a_file_whose_times_lie_ahead_or_have_no_fractions_has_not_settled(tmp_path, monkeypatch):
    now = remembered.now_ns()
    old = now - 2 * remembered.SETTLED_NS
    assert remembered._is_old(KNOWN._replace(mtime_ns=old, ctime_ns=old | 1))
    assert not remembered._is_old(KNOWN._replace(mtime_ns=now + 1, ctime_ns=old | 1))
    assert not remembered._is_old(KNOWN._replace(mtime_ns=old, ctime_ns=now + 1))
    assert not remembered._is_old(KNOWN._replace(mtime_ns=old, ctime_ns=now - remembered.SETTLED_NS // 2))
    # A file system that counts seconds could give a later change the same time.
    assert not remembered._is_old(KNOWN._replace(mtime_ns=old, ctime_ns=old // 10**9 * 10**9))


def test_what_is_no_file_on_a_known_file_system_has_no_identity(tmp_path):
    assert identity("/proc/version") is None
    assert identity(str(tmp_path)) is None
    assert identity(str(tmp_path / "missing")) is None


# --- the file that remembers ------------------------------------------------------------------------------------------


def fill(directory: Path, count: int = 3) -> Remembered:
    memory = Remembered.load(directory)
    for number in range(count):
        memory.add(KNOWN._replace(inode=number), (number,), number.to_bytes(16, "little"))
    memory.save()
    return memory


def known(directory: Path, count: int = 3) -> list[bool]:
    memory = Remembered.load(directory)
    found = [memory.get(KNOWN._replace(inode=number), (number,)) for number in range(count)]
    assert all(digest in (None, number.to_bytes(16, "little")) for number, digest in enumerate(found))
    return [digest is not None for digest in found]


def test_what_is_saved_is_read_back_by_all_of_its_identity(tmp_path):
    fill(tmp_path)
    assert known(tmp_path) == [True] * 3
    memory = Remembered.load(tmp_path)
    for name in Identity._fields:
        value = 77 if name != "inode" else 1  # of another file that is known
        assert memory.get(KNOWN._replace(inode=0)._replace(**{name: value}), (0,)) is None
    assert memory.get(KNOWN._replace(inode=0), (1,)) is None
    assert memory.get(None, (0,)) is None


def test_a_damaged_file_is_an_empty_one(tmp_path):
    fill(tmp_path)
    file = tmp_path / "digests"
    whole = file.read_bytes()
    damaged = [whole[:i] for i in range(0, len(whole), 7)] + [whole + b"x", whole + b"x" * 32, b"\0" * len(whole)]
    damaged += [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
    for data in damaged:
        file.write_bytes(data)
        assert known(tmp_path) == [False] * 3
    fill(tmp_path)
    assert known(tmp_path) == [True] * 3


def test_a_place_that_cannot_be_written_to_is_no_error(tmp_path):
    (tmp_path / "file").write_text("no directory")
    fill(tmp_path / "file")
    assert known(tmp_path / "file") == [False] * 3
    (tmp_path / "digests").mkdir()
    fill(tmp_path)
    assert known(tmp_path) == [False] * 3


def test_it_keeps_the_latest_and_does_not_grow_without_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(remembered, "RECORDS", 10)
    fill(tmp_path, 8)
    fill(tmp_path, 3)  # again: they are the latest now
    memory = Remembered.load(tmp_path)
    for number in range(100, 105):
        memory.add(KNOWN._replace(inode=number), (number,), b"x" * 16)
    memory.save()
    assert known(tmp_path, 8) == [True] * 3 + [False] * 3 + [True] * 2
    assert (tmp_path / "digests").stat().st_size < 1000


def test_processes_that_save_at_once_lose_nothing_and_leave_nothing(tmp_path):
    program = (
        "import sys, pathlib\nfrom tdgpu.cache.remembered import Identity, Remembered\n"
        "for number in range(int(sys.argv[2]), int(sys.argv[2]) + 40):\n"
        "  memory = Remembered.load(pathlib.Path(sys.argv[1]))\n"
        "  file = Identity(1, 2, number, 4, 5_000_000_001, 6_000_000_001)\n"
        "  memory.add(file, (number,), number.to_bytes(16, 'little'))\n"
        "  memory.save()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "memory"), str(first)], env=environment)
        for first in (0, 40)
    ]
    assert [child.wait() for child in children] == [0, 0]
    assert known(tmp_path / "memory", 80) == [True] * 80
    assert sorted(path.name for path in (tmp_path / "memory").iterdir()) == ["digests", "digests.lock"]


def test_what_a_killed_writer_left_is_written_over(tmp_path):
    (tmp_path / "digests.new").write_bytes(b"half")
    fill(tmp_path)
    assert known(tmp_path) == [True] * 3
    assert not (tmp_path / "digests.new").exists()
