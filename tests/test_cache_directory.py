"""The cache directory: built once, found again, never half of a result, never one that has changed since."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import pickle
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from caches import FILES, NBYTES, cache_at, contents, found, leftovers, logged, make, never, wanted
from forked import in_process
from reliability.diskfull import mounted
from reliability.processes import NOBODY, child, wait_for
from reliability.tracing import Shared

from tdgpu.cache import leaves, locks, record, remembered
from tdgpu.cache.directory import Entry, find, obtain
from tdgpu.cache.fingerprint import Fingerprint
from tdgpu.errors import CacheError, InvalidArgument


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with cache_at(tmp_path / "cache") as root:
        yield root


@pytest.fixture
def quick() -> Iterator[Path]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        yield Path(directory)


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


# --- built once -------------------------------------------------------------------------------------------------------


def test_a_result_is_built_and_then_found(root):
    assert find(wanted().digest) is None
    built = obtain(wanted(), make)
    assert contents(built.path) == FILES
    assert built.path.is_relative_to(root)
    again = obtain(wanted(), never)
    assert (again.digest, again.path) == (built.digest, built.path)
    assert found().path == built.path
    assert find(wanted(1).digest) is None
    assert leftovers(root) == []


def test_the_path_that_is_built_at_does_not_exist_and_lies_on_the_same_file_system(root):
    def build(path: Path) -> None:
        assert not path.exists()
        assert path.parent.stat().st_dev == root.stat().st_dev
        make(path)

    obtain(wanted(), build)


def test_another_process_finds_it(root):
    obtain(wanted(), make)
    with child(lambda: obtain(wanted(), never)):
        pass


def test_of_several_processes_at_once_one_builds_and_the_others_wait_for_it(root, tmp_path):
    log, begin = tmp_path / "log", Shared()

    def build(path: Path) -> None:
        logged(log)(path)
        time.sleep(0.2)

    def ask() -> None:
        wait_for(begin, 1)
        assert contents(obtain(wanted(), build).path) == FILES

    with child(ask), child(ask), child(ask):
        begin.value = 1
    assert len(lines(log)) == 1
    assert leftovers(root) == []


def test_of_several_threads_at_once_one_builds(root, tmp_path):
    log, found = tmp_path / "log", []

    def build(path: Path) -> None:
        logged(log)(path)
        time.sleep(0.1)

    def ask() -> None:
        with cache_at(root):
            found.append(obtain(wanted(), build))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(log)) == 1
    assert len({entry.path for entry in found}) == 1


def test_other_results_are_built_meanwhile(root):
    def build(path: Path) -> None:
        obtain(wanted(1), make)
        make(path)

    obtain(wanted(), build)
    obtain(wanted(1), never)


def test_a_result_that_is_needed_to_build_itself_is_an_error_and_not_a_wait_for_ever(root):
    def needs_itself(path: Path) -> None:
        obtain(wanted(), make)

    with pytest.raises(CacheError, match="needed to build itself"):
        obtain(wanted(), needs_itself)
    obtain(wanted(), make)


def test_whoever_waits_for_long_is_told_for_whom(root, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE_SECONDS", 0.05)
    building, told = Shared(), Shared()

    def build(path: Path) -> None:
        building.value = 1
        wait_for(told, 1)
        make(path)

    with child(lambda: obtain(wanted(), build)) as pid:
        wait_for(building, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            thread = threading.Timer(0.3, lambda: setattr(told, "value", 1))
            thread.start()
            obtain(wanted(), never)
    assert [str(one.message) for one in caught] == [
        f"Waiting for process {pid}, which builds the result {wanted().digest} of the cache."
    ]
    assert caught[0].category is locks.CacheWarning


@pytest.mark.parametrize("lock", ["shared", "exclusive"])
def test_a_lock_on_a_file_that_was_removed_just_before_is_none(tmp_path, monkeypatch, lock):
    file, flock = tmp_path / locks.USED, fcntl.flock

    def remove_first(descriptor: int, operation: int) -> None:
        file.unlink(missing_ok=True)
        flock(descriptor, operation)

    file.write_bytes(b"")
    monkeypatch.setattr(fcntl, "flock", remove_first)
    if lock == "shared":
        assert locks.Hold.take(tmp_path) is None
    else:
        assert not locks.Exclusive(file).acquire()


# --- a builder that fails, or is killed -------------------------------------------------------------------------------


def test_a_builder_that_fails_leaves_nothing_and_its_own_error_is_what_is_raised(root):
    problem = ZeroDivisionError("of the user's")

    def build(path: Path) -> None:
        make(path)
        raise problem

    with pytest.raises(ZeroDivisionError) as caught:
        obtain(wanted(), build)
    assert caught.value is problem
    assert find(wanted().digest) is None
    assert leftovers(root) == []
    obtain(wanted(), make)


def test_a_builder_that_makes_nothing_is_an_error(root):
    with pytest.raises(CacheError, match="no save"):
        obtain(wanted(), lambda _path: None)
    assert leftovers(root) == []


def test_when_a_builder_fails_or_is_killed_the_next_that_waits_builds(root):
    building = Shared()

    def hang(_path: Path) -> None:
        building.value = 1
        time.sleep(60)

    def fail(_path: Path) -> None:
        building.value += 1
        time.sleep(0.05)
        raise ZeroDivisionError

    def ask_in_vain() -> None:
        with pytest.raises(ZeroDivisionError):
            obtain(wanted(), fail)

    with child(lambda: obtain(wanted(), hang)) as pid:
        wait_for(building, 1)
        with child(ask_in_vain):
            time.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
            wait_for(building, 2)
            assert contents(obtain(wanted(), make).path) == FILES
    assert leftovers(root) == []


def test_a_builder_that_is_killed_at_any_moment_leaves_nothing_that_is_read(quick):
    code = """
    import sys
    from pathlib import Path
    from caches import cache_at, make, obtain, sweep_kills, wanted
    def act(root):
        with cache_at(root):
            obtain(wanted(), make)
    print(sweep_kills(Path(sys.argv[1]), act, lambda root: None, 24))
    """
    assert 0 < int(in_process(code, quick)) < 24


def test_a_replacement_that_is_killed_at_any_moment_leaves_the_old_result_or_the_new_one(quick):
    code = """
    import sys
    from pathlib import Path
    from caches import cache_at, make, obtain, sweep_kills, wanted
    def act(root):
        with cache_at(root):
            obtain(wanted(), make, rebuild=True)
    def prepare(root):
        with cache_at(root):
            obtain(wanted(), make)
    print(sweep_kills(Path(sys.argv[1]), act, prepare, 12))
    """
    assert int(in_process(code, quick)) > 3


def test_a_child_that_the_builder_forks_does_not_remove_what_is_being_built(root):
    parent = os.getpid()

    def build(path: Path) -> None:
        make(path)
        pid = os.fork()
        if pid == 0:
            raise SystemExit  # it runs through whatever the parent does at its end
        os.waitpid(pid, 0)
        assert contents(path) == FILES

    try:
        obtain(wanted(), build)
    except SystemExit:
        os._exit(0)
    assert os.getpid() == parent
    assert contents(obtain(wanted(), never).path) == FILES


def test_a_child_that_the_builder_forks_does_not_keep_its_lock(root):
    building, release = Shared(), Shared()

    def build(_path: Path) -> None:
        if os.fork() == 0:
            wait_for(release, 1)
            os._exit(0)
        building.value = 1
        time.sleep(60)

    with child(lambda: obtain(wanted(), build)) as pid:
        wait_for(building, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert locks.Exclusive(root / "locks" / f"{wanted().digest}.lock").acquire()
        release.value = 1


def test_a_place_that_somebody_removes_just_before_the_result_comes_there_is_made_again(root, monkeypatch):
    rename = os.rename
    removed: list[Path] = []

    def rename_later(old: Path, new: Path) -> None:
        if not removed:
            removed.append(new.parent)
            new.parent.rmdir()
        rename(old, new)

    monkeypatch.setattr(os, "rename", rename_later)
    assert contents(obtain(wanted(), make).path) == FILES
    assert removed == [root / "entries" / wanted().digest]


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def interrupted(act: Callable[[], object], after: float) -> bool:
    """Whether a Ctrl-C came into an act of this process, ``after`` seconds from its begin."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(after, signal.raise_signal, [signal.SIGINT])
    try:
        timer.start()
        act()
        timer.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGINT, previous)
    return False


def test_ctrl_c_while_it_waits_for_another_builder_ends_the_wait_and_nothing_else(root):
    building, release = Shared(), Shared()

    def build(path: Path) -> None:
        building.value = 1
        wait_for(release, 1)
        make(path)

    with child(lambda: obtain(wanted(), build)):
        wait_for(building, 1)
        assert interrupted(lambda: obtain(wanted(), never), 0.1)
        release.value = 1
        assert contents(obtain(wanted(), never).path) == FILES


def test_ctrl_c_while_it_builds_leaves_nothing_and_no_lock(quick):
    with cache_at(quick / "cache") as root:
        interrupt_builders(root)


def interrupt_builders(root: Path) -> None:
    def ask(number: int) -> None:
        obtain(wanted(number), make)

    results = []
    for number in range(30):
        kept = None
        try:
            results.append(interrupted(lambda number=number: ask(number), 0.0005 * number))  # type: ignore[misc]
        except KeyboardInterrupt as late:  # it came behind the act
            kept = late
        # What an exception holds is held here; nobody else waits for it.
        with child(lambda number=number: obtain(wanted(number), make)):  # type: ignore[misc]
            pass
        found = find(wanted(number).digest)
        assert found is not None and contents(found.path) == FILES
        del kept
    assert any(results)
    assert leftovers(root) == []


# --- never a stale result ---------------------------------------------------------------------------------------------


def longer(path: Path) -> None:
    with open(path / "a.memmap", "ab") as file:
        file.write(b"x")


def other_bytes_with_the_old_times(path: Path) -> None:
    file = path / "a.memmap"
    status = file.stat()
    with open(file, "r+b") as opened:
        opened.seek(3)
        opened.write(b"x")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def other_bytes_through_a_mapping(path: Path) -> None:
    with open(path / "inner" / "b.memmap", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[69_999] = ord("x")


def another_file_of_the_same_size(path: Path) -> None:
    (path / "other").write_bytes(b"x" * 5000)
    os.rename(path / "other", path / "a.memmap")


def other_metadata(path: Path) -> None:
    (path / "meta.json").write_bytes(b"[]")


def a_new_file(path: Path) -> None:
    (path / "c.memmap").write_bytes(b"")


def a_missing_file(path: Path) -> None:
    (path / "inner" / "b.memmap").unlink()


def a_link_instead(path: Path) -> None:
    os.rename(path / "a.memmap", path.parent / "elsewhere")
    os.symlink(path.parent / "elsewhere", path / "a.memmap")


def a_pipe(path: Path) -> None:
    os.unlink(path / "a.memmap")
    os.mkfifo(path / "a.memmap")


def no_save(path: Path) -> None:
    os.rename(path, path.parent / "away")


def half_of_the_list(path: Path) -> None:
    file = path.parent / "files.json"
    file.write_bytes(file.read_bytes()[:50])


def no_list(path: Path) -> None:
    (path.parent / "files.json").unlink()


def a_list_of_something_else(path: Path) -> None:
    (path.parent / "files.json").write_text(json.dumps(dict.fromkeys(FILES, 3)))


def half_of_the_record(path: Path) -> None:
    file = path.parent / "entry.json"
    file.write_bytes(file.read_bytes()[:50])


def a_record_of_something_else(path: Path) -> None:
    (path.parent / "entry.json").write_text("[]")


def another_version(path: Path) -> None:
    file = path.parent / "entry.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 2}))


def the_record_of_another_result(path: Path) -> None:
    file = path.parent / "entry.json"
    stored = json.loads(file.read_text())
    stored["fingerprint"]["digest"] = "f" * 16
    file.write_text(json.dumps(stored))


def no_record(path: Path) -> None:
    (path.parent / "entry.json").unlink()


CHANGES = [
    longer, other_bytes_with_the_old_times, other_bytes_through_a_mapping, another_file_of_the_same_size,
    other_metadata, a_new_file, a_missing_file, a_link_instead, a_pipe, no_save, half_of_the_list, no_list,
    a_list_of_something_else, half_of_the_record, a_record_of_something_else, another_version,
    the_record_of_another_result, no_record,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_since_it_was_built_is_built_again(root, change):
    path = obtain(wanted(), make).path
    change(path)
    assert find(wanted().digest) is None
    again = obtain(wanted(), make)
    assert contents(again.path) == FILES
    assert obtain(wanted(), never).path == again.path
    assert not path.parent.exists()
    known = record.read(again.path.parent)
    assert isinstance(known, record.Record)
    assert (known.reason is None) == (change is no_record)
    assert leftovers(root) == []


def test_what_has_not_changed_is_hashed_once_and_a_change_through_a_mapping_is_seen_then_too(root, monkeypatch):
    monkeypatch.setattr(remembered, "SETTLED_NS", 20_000_000)
    read = []
    hash_block = leaves._hash_block

    def noted(*block: Any) -> bytes:
        read.append(block)
        return hash_block(*block)

    monkeypatch.setattr(leaves, "_hash_block", noted)
    path = obtain(wanted(), make).path
    time.sleep(0.1)
    obtain(wanted(), never)
    if remembered.magic_of(str(path)) in remembered.TRUSTED:
        read.clear()
        obtain(wanted(), never)
        assert read == []
    other_bytes_through_a_mapping(path)
    assert find(wanted().digest) is None


def test_the_times_of_an_unchanged_result_may_change(root):
    path = obtain(wanted(), make).path
    os.utime(path / "a.memmap", (1, 1))
    os.chmod(path / "a.memmap", 0o600)
    assert obtain(wanted(), never).path == path


def test_what_is_found_may_be_changed_while_it_is_in_use_and_is_not_found_any_more(root):
    used = obtain(wanted(), make)
    longer(used.path)
    again = obtain(wanted(), make)
    assert again.path != used.path
    assert len(contents(used.path)["a.memmap"]) == 5001, "what is in use stays"
    assert contents(again.path) == FILES


def test_a_result_that_is_asked_for_anew_replaces_the_old_one(root):
    old = obtain(wanted(), make)

    def make_another(path: Path) -> None:
        make(path)
        (path / "new").write_bytes(b"new")

    new = obtain(wanted(), make_another, rebuild=True)
    assert contents(old.path) == FILES, "it is in use"
    assert contents(new.path) == {**FILES, "new": b"new"}
    path = old.path
    del old
    assert found().path == new.path
    newest = obtain(wanted(), make, rebuild=True)
    assert not path.exists()
    del new
    assert found().path == newest.path


def test_an_old_result_that_is_in_use_does_not_come_back_when_the_new_one_goes(root):
    old = obtain(wanted(), make)
    new = obtain(wanted(), make, rebuild=True).path
    longer(new)
    assert find(wanted().digest) is None
    assert obtain(wanted(), make).path not in (old.path, new)


def test_if_the_new_one_cannot_be_built_the_old_one_stays(root):
    obtain(wanted(), make)

    def fail(_path: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        obtain(wanted(), fail, rebuild=True)
    obtain(wanted(), never)


# --- entries ----------------------------------------------------------------------------------------------------------


def test_an_entry_can_be_sent_to_another_process(root):
    entries = [obtain(wanted(), make)]
    path, data = entries[0].path, pickle.dumps(entries[0])

    def receive() -> None:
        again = pickle.loads(data)
        assert (again.digest, again.path) == (wanted().digest, path)

    with child(receive):
        pass
    entries = [pickle.loads(data)]
    assert entries[0].path == path
    entries.clear()
    obtain(wanted(), make, rebuild=True)
    with pytest.raises(CacheError, match="has been removed") as caught:
        pickle.loads(data)
    assert caught.value.save == str(path)


def test_errors_survive_pickling(root):
    with pytest.raises(CacheError) as caught:
        obtain(wanted(), lambda _path: None)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.save in str(again)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "a.b", "-x", "a" * 65, "a\n", None])
def test_names_that_no_result_can_have_are_refused(root, name):
    for act in (lambda: obtain(Fingerprint(name), never), lambda: find(name)):
        with pytest.raises(InvalidArgument, match="cannot be the name"):
            act()
    assert not root.exists()


def test_a_result_says_how_large_it_is(root):
    known = record.read(obtain(wanted(), make).path.parent)
    assert isinstance(known, record.Record)
    assert (known.nbytes, known.transform, known.fingerprint.parts) == (NBYTES, "map", wanted().parts)
    assert time.time() - 60 < known.built <= time.time()


# --- where it lies ----------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_nothing_and_the_error_names_the_result(tmp_path):
    def build(path: Path) -> None:
        make(path)
        (path / "large").write_bytes(b"x" * (2 << 20))

    def fail() -> str:
        with pytest.raises(CacheError) as caught:
            obtain(wanted(), build)
        return str(caught.value)

    with mounted(tmp_path / "disk", "size=1M") as disk, cache_at(disk / "cache") as root:
        message = fail()
        assert message.startswith("The disk is full (No space left on device)")
        assert f"{root}/entries/{wanted().digest}" in message
        assert leftovers(root) == []
        assert find(wanted().digest) is None
        assert contents(obtain(wanted(), make).path) == FILES


@pytest.mark.parametrize("function", ["sync_file", "_dump", "sync_directory"])
def test_a_disk_that_is_full_or_fails_when_the_result_is_complete_leaves_nothing(root, monkeypatch, function):
    def fail(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(record, function, fail)
        with pytest.raises(CacheError, match=r"No space left.*Nothing of the result is kept") as caught:
            obtain(wanted(), make)
    assert caught.value.save == f"{root}/entries/{wanted().digest}"
    assert leftovers(root) == []
    assert find(wanted().digest) is None


def test_in_a_directory_that_cannot_be_written_to_results_are_found_and_a_new_one_is_an_error(root, tmp_path):
    obtain(wanted(), make)
    for directory in (root, *root.parents):
        if directory.stat().st_uid == os.getuid():
            os.chmod(directory, 0o755)

    def ask() -> None:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        assert contents(obtain(wanted(), never).path) == FILES
        with pytest.raises(CacheError, match=r"Permission denied.*TDGPU_CACHE.*disable_caching") as caught:
            obtain(wanted(1), never)
        assert f"{root}/entries/{wanted(1).digest}" in str(caught.value)

    assert os.getuid() == 0 or os.access(root, os.W_OK)
    with child(ask):
        pass


def test_on_a_file_system_that_is_mounted_read_only_results_are_found_and_a_new_one_is_an_error(tmp_path):
    with mounted(tmp_path / "disk", "size=4M") as disk, cache_at(disk / "cache"):
        obtain(wanted(), make)
        assert os.system(f"mount -o remount,ro {disk}") == 0
        assert contents(obtain(wanted(), never).path) == FILES
        with pytest.raises(CacheError, match="Read-only file system"):
            obtain(wanted(1), never)


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with cache_at(tmp_path / "file"), pytest.raises(CacheError, match="cannot be used"):
        obtain(wanted(), never)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file system that has no locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    locks._told.clear()
    yield
    locks._told.clear()


def test_without_locks_that_is_said_once_and_results_are_built_and_found(root, no_locks):
    with pytest.warns(locks.CacheWarning, match="has no locks") as caught:
        built = obtain(wanted(), make)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert obtain(wanted(), never).path == built.path
        again = obtain(wanted(), make, rebuild=True)
    assert contents(built.path) == FILES, "nobody knows that it is not in use"
    assert found().path == again.path


@pytest.mark.filterwarnings("ignore::tdgpu.cache.locks.CacheWarning")
def test_without_locks_two_builders_do_not_get_in_each_others_way(root, no_locks):
    inner: list[Entry] = []

    def build(path: Path) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        make(path)

    def other() -> None:
        with cache_at(root):
            inner.append(obtain(wanted(), make))

    outer = obtain(wanted(), build)
    assert contents(inner[0].path) == contents(outer.path) == FILES
    assert find(wanted().digest) is not None
