"""One writer at a time, whoever dies."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tdgpu.errors import SaveLocked
from tdgpu.layout.lock import WriterLock


def fork(work: Callable[[int], None]) -> tuple[int, int]:
    """A child that calls ``work`` with a pipe to write to; its pid, and the pipe's other end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            work(writing)
        finally:
            os._exit(0)
    os.close(writing)
    return pid, reading


def holder(path: Path) -> Callable[[int], None]:
    def hold(pipe: int) -> None:
        lock = WriterLock(str(path), 0)
        os.write(pipe, b"locked")
        time.sleep(60)
        lock.release()

    return hold


def end(pid: int, pipe: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(pipe)


def is_free(path: Path) -> bool:
    try:
        WriterLock(str(path), 0).release()
    except SaveLocked:
        return False
    return True


def test_a_second_lock_of_this_process_is_refused_and_says_so(tmp_path: Path) -> None:
    lock = WriterLock(str(tmp_path), 0)
    with pytest.raises(SaveLocked, match="This very process") as caught:
        WriterLock(str(tmp_path), 0)
    assert caught.value.pid == os.getpid()
    assert caught.value.save == str(tmp_path)
    assert isinstance(caught.value, TimeoutError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.pid, str(again)) == (os.getpid(), str(caught.value))
    lock.release()
    lock.release()
    assert is_free(tmp_path)


def test_another_process_is_named(tmp_path: Path) -> None:
    pid, pipe = fork(holder(tmp_path))
    try:
        assert os.read(pipe, 6) == b"locked"
        with pytest.raises(SaveLocked, match=f"Another process \\({pid}\\).* did not end within 0.1 s") as caught:
            WriterLock(str(tmp_path), 0.1)
        assert caught.value.pid == pid
    finally:
        end(pid, pipe)


def test_a_killed_holder_leaves_it_to_the_next(tmp_path: Path) -> None:
    pid, pipe = fork(holder(tmp_path))
    assert os.read(pipe, 6) == b"locked"
    assert not is_free(tmp_path)
    end(pid, pipe)
    assert is_free(tmp_path)


def test_it_waits_for_the_holder(tmp_path: Path) -> None:
    lock = WriterLock(str(tmp_path), 0)
    timer = threading.Timer(0.3, lock.release)
    timer.start()
    begin = time.monotonic()
    WriterLock(str(tmp_path), 30).release()
    assert 0.2 < time.monotonic() - begin < 10
    timer.join()


def test_it_gives_up_in_time(tmp_path: Path) -> None:
    lock = WriterLock(str(tmp_path), 0)
    begin = time.monotonic()
    with pytest.raises(SaveLocked):
        WriterLock(str(tmp_path), 0.3)
    assert 0.3 <= time.monotonic() - begin < 5
    lock.release()


def test_a_forked_child_does_not_keep_it(tmp_path: Path) -> None:
    def lock_and_fork(pipe: int) -> None:
        lock = WriterLock(str(tmp_path), 0)
        child = os.fork()
        if child == 0:
            lock.release()  # which is not its own
            os.write(pipe, b"%10d" % os.getpid())
            time.sleep(60)
        time.sleep(60)

    pid, pipe = fork(lock_and_fork)
    grandchild = int(os.read(pipe, 10))
    try:
        assert not is_free(tmp_path)  # the child has not released what is its parent's
        end(pid, pipe)
        assert is_free(tmp_path)
        os.kill(grandchild, 0)  # which still runs
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_forked_child_can_lock_for_itself(tmp_path: Path) -> None:
    mine = WriterLock(str(tmp_path), 0)
    other = tmp_path / "other"
    other.mkdir()

    def lock_other(pipe: int) -> None:
        taken = WriterLock(str(other), 0)
        mine.release()  # must not close the descriptor that the child may have got the same number for
        os.write(pipe, b"%d%d" % (is_free(other), is_free(tmp_path)))
        taken.release()

    pid, pipe = fork(lock_other)
    assert os.read(pipe, 2) == b"00"
    os.waitpid(pid, 0)
    os.close(pipe)
    mine.release()
    assert is_free(other)


def test_what_is_dropped_is_released(tmp_path: Path) -> None:
    lock = WriterLock(str(tmp_path), 0)
    assert not is_free(tmp_path)
    del lock
    assert is_free(tmp_path)


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        lock = WriterLock(str(tmp_path), 0)
        assert not is_free(tmp_path)
        lock.release()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_directory_that_is_locked_is_the_one_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "save"
    path.mkdir()
    first = WriterLock(str(path), 0)
    got: list[WriterLock] = []
    waiter = threading.Thread(target=lambda: got.append(WriterLock(str(path), 30)))
    waiter.start()
    time.sleep(0.05)
    path.rename(tmp_path / "moved")
    path.mkdir()
    first.release()
    waiter.join(30)
    assert len(got) == 1
    assert not is_free(path)
    assert is_free(tmp_path / "moved")
    got[0].release()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(RuntimeWarning, match="has no locks") as warned:
        lock = WriterLock(str(tmp_path), 0)
    assert len(warned) == 1
    assert str(tmp_path) in str(warned[0].message)
    lock.release()


def test_other_errors_name_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match=str(tmp_path)):
        WriterLock(str(tmp_path), 0)
    with pytest.raises(FileNotFoundError):
        WriterLock(str(tmp_path / "none"), 0)
    assert len(os.listdir("/proc/self/fd")) == before
