"""Several processes: two writers, a writer that is killed, a reader while rows are appended, a user without rights."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tensordict

import tdgpu
from tdgpu.layout.lock import WriterLock

from .bed import NESTED, Bed, look, snapshot
from .tracing import Shared

NOBODY = 65534
PATIENCE = 60


@contextlib.contextmanager
def child(function: Callable[[], object]) -> Iterator[int]:
    """A process that runs a function, while the block runs; then it has to end well, unless it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = None
    try:
        yield pid
        deadline = time.monotonic() + PATIENCE
        while status is None:
            done, value = os.waitpid(pid, os.WNOHANG)
            if done:
                status = value
            else:
                assert time.monotonic() < deadline, "the child does not end"
                time.sleep(0.002)
    finally:
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed; its traceback is on stderr"


def wait_for(shared: Shared, value: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while shared.value < value:
        assert time.monotonic() < deadline, f"nothing happened: {shared.value} of {value}"
        time.sleep(0.001)


def hold_lock(prefix: Path, holding: Shared, release: Shared) -> None:
    lock = WriterLock(str(prefix), 0)
    holding.value = 1
    wait_for(release, 1)
    lock.release()


def second_writer_is_told(prefix: Path) -> None:
    """With ``lock_timeout=0`` a second writer gets an error at once, with the pid of the first; else it waits."""
    NESTED.save(prefix, 2)
    holding, release = Shared(), Shared()
    with child(lambda: hold_lock(prefix, holding, release)) as pid:
        wait_for(holding, 1)
        before = snapshot(prefix)
        for act in (
            lambda: tdgpu.append_memmap(prefix, NESTED.rows(2, 1)),
            lambda: tdgpu.recover_memmap(prefix),
            lambda: tdgpu.MemmapAppender(prefix, timeout=0),
        ):
            with tdgpu.options(lock_timeout=0), pytest.raises(tdgpu.errors.SaveLocked, match=str(pid)) as raised:
                act()
            assert raised.value.pid == pid
        assert snapshot(prefix) == before
        assert look(prefix, NESTED) == 2  # readers mind no lock
        done = Shared()
        with child(lambda: append_and_tell(prefix, 2, done)):
            time.sleep(0.2)
            assert done.value == 0, "the second writer did not wait"
            release.value = 1
            wait_for(done, 1)
    assert look(prefix, NESTED) == 3


def append_and_tell(prefix: Path, first: int, done: Shared) -> None:
    with tdgpu.options(lock_timeout=30):
        tdgpu.append_memmap(prefix, NESTED.rows(first, 1))
    done.value = 1


def two_writers_lose_nothing(prefix: Path, *, rows: int = 60) -> None:
    """Two processes append rows one by one at the same time: each row is there once, whole, each one's in order."""
    NESTED.save(prefix, 0)

    def write(first: int) -> None:
        with tdgpu.options(durable=False, lock_timeout=60):
            for number in range(first, first + rows):
                tdgpu.append_memmap(prefix, NESTED.rows(number, 1))

    with child(lambda: write(1000)), child(lambda: write(2000)):
        pass
    loaded = tensordict.load_memmap(prefix)
    assert NESTED.count(loaded, ordered=False) == 2 * rows
    numbers = NESTED.numbers(loaded)
    for first in (1000, 2000):
        assert [n for n in numbers if first <= n < first + rows] == list(range(first, first + rows))


def killed_writer_leaves_no_lock(prefix: Path) -> None:
    """A writer that is killed while it holds the lock, and has a child of its own: the next one goes on at once."""
    NESTED.save(prefix, 2)
    holding, grandchild = Shared(), Shared()

    def hold() -> None:
        appender = tdgpu.MemmapAppender(prefix)
        appender.append(NESTED.rows(2, 1))
        pid = os.fork()
        if pid == 0:  # it outlives the writer, as a worker process would
            signal.alarm(PATIENCE)
            while True:
                signal.pause()
        grandchild.value = pid
        holding.value = 1
        signal.pause()

    try:
        with child(hold) as pid:
            wait_for(holding, 1)
            os.kill(pid, signal.SIGKILL)
        with tdgpu.options(lock_timeout=0):
            tdgpu.append_memmap(prefix, NESTED.rows(2, 3))
    finally:
        if grandchild.value:
            os.kill(grandchild.value, signal.SIGKILL)
    assert look(prefix, NESTED) == look(prefix, NESTED, plain=True) == 5


def reader_sees_whole_rows(prefix: Path, bed: Bed, *, appends: int, appender: bool) -> int:
    """A process that loads all the time, while another one appends row by row: it never sees less than it saw before,
    nor anything but whole rows. Returns how often it loaded while rows were appended."""
    bed.save(prefix, 1)
    started, finished, loads = Shared(), Shared(), Shared()

    def read() -> None:
        last = 1
        while not finished.value:
            rows = look(prefix, bed)  # raises what it sees if it is torn
            assert rows >= last, f"{rows} rows after {last}"
            last = rows
            loads.value += 1
            started.value = 1
        assert look(prefix, bed) == 1 + appends

    def write() -> None:
        if appender:
            with tdgpu.MemmapAppender(prefix, durable=False) as opened:
                for number in range(1, 1 + appends):
                    opened.append(bed.rows(number, 1))
                    opened.flush()
        else:
            with tdgpu.options(durable=False):
                for number in range(1, 1 + appends):
                    tdgpu.append_memmap(prefix, bed.rows(number, 1))

    with child(read):
        wait_for(started, 1)
        begun = loads.value
        write()
        seen = loads.value - begun
        finished.value = 1
    return seen


def without_rights(directory: Path) -> None:
    """A user who may not write: an error that says where, and nothing changes."""
    directory.chmod(0o755)
    prefix = directory / "save"
    NESTED.save(prefix, 2)
    for what, mode in (("deep", 0o555), ("step.memmap", 0o444)):
        for path in (prefix, *prefix.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        target = prefix / what
        target.chmod(mode)
        assert stat.S_IMODE(target.stat().st_mode) == mode
        before = snapshot(prefix)

        def append(target: Path = target) -> None:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            with pytest.raises((PermissionError, tdgpu.errors.AppendError), match=re.escape(str(target))):
                tdgpu.append_memmap(prefix, NESTED.rows(2, 1))

        with child(append):
            pass
        assert snapshot(prefix) == before
