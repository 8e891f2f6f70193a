"""A save that is kept open by several threads and processes, and how that ends: closed, dropped, forked, at exit."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from appends import expect, flat, is_free, load, wait_until
from forked import in_process, run_process
from tensordict import TensorDict

import tdgpu
from tdgpu import MemmapAppender, errors

MiB = 1 << 20

pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def save(tmp_path: Path) -> Path:
    flat(0, 1).memmap(tmp_path / "save")
    return tmp_path / "save"


@pytest.mark.parametrize("width", [1, 80_000])
def test_threads_append_at_once(tmp_path, width):
    TensorDict({"x": torch.zeros(0, width), "y": torch.zeros(0, dtype=torch.int64)}, [0]).memmap(tmp_path)
    failed: list[BaseException] = []

    def work(which: int) -> None:
        try:
            for i in range(20):
                number = torch.tensor([which * 100 + i])
                appender.append(TensorDict({"x": number.float().view(1, 1).repeat(1, width), "y": number}, [1]))
                if i % 8 == which:
                    appender.flush()
        except BaseException as error:
            failed.append(error)

    with MemmapAppender(tmp_path, durable=False, flush_rows=7) as appender:
        threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failed == []
    loaded = load(tmp_path)
    assert sorted(loaded["y"].tolist()) == [which * 100 + i for which in range(4) for i in range(20)]
    assert torch.equal(loaded["x"], loaded["y"].float().view(-1, 1).expand(-1, width))


@pytest.mark.parametrize("width", [3, 100_000])
def test_what_append_took_while_another_thread_closes_is_committed(tmp_path, width):
    """append has returned, and close "commits all rows that were appended": one of the two must say no."""
    rows = TensorDict({"x": torch.ones(1, width)}, [1])
    rows.memmap(tmp_path)
    for _ in range(8):
        before = load(tmp_path).batch_size[0]
        appender = MemmapAppender(tmp_path, durable=False)
        taken, began = [0], threading.Event()
        errors_seen: list[Any] = []

        def work(appender=appender, taken=taken, seen=errors_seen, began=began) -> None:
            try:
                while True:
                    appender.append(rows)
                    taken[0] += 1
                    began.set()
            except errors.InvalidArgument as error:
                seen.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        began.wait(10)
        appender.close()
        thread.join(20)
        assert len(errors_seen) == 1 and "closed" in errors_seen[0]
        assert load(tmp_path).batch_size[0] - before == taken[0]
    assert bool((load(tmp_path)["x"] == 1).all())


def test_a_second_appender_is_refused_and_told_who_it_is(save):
    with MemmapAppender(save) as appender:
        for timeout in (0, 0.1):
            with pytest.raises(errors.SaveLocked) as raised:
                MemmapAppender(save, timeout=timeout)
            assert raised.value.pid == os.getpid()
        with tdgpu.options(lock_timeout=0), pytest.raises(errors.SaveLocked):
            tdgpu.append_memmap(save, flat(1, 1))
        appender.append(flat(1, 1))
    with MemmapAppender(save, timeout=0) as appender:
        appender.append(flat(2, 1))
    expect(save, 3)


def test_it_waits_for_another_writer(save):
    first = MemmapAppender(save)
    threading.Timer(0.3, first.close).start()
    with MemmapAppender(save, timeout=20) as second:
        second.append(flat(1, 1))
    expect(save, 2)


def test_a_closed_appender_says_so(save):
    appender = MemmapAppender(save, flush_rows=5)
    appender.close()
    with pytest.raises(errors.InvalidArgument, match="closed"):
        appender.append(flat(1, 1))
    with pytest.raises(errors.InvalidArgument, match="closed"):
        appender.flush()
    with pytest.raises(errors.InvalidArgument, match="closed"), appender:
        appender.append(flat(1, 1))
    expect(save, 1)


@pytest.mark.parametrize("when", [{}, {"flush_rows": 1000}, {"flush_seconds": 0.001}])
def test_one_that_is_dropped_commits_and_warns(save, when):
    appender = MemmapAppender(save, **when)
    appender.append(flat(1, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del appender
        gc.collect()
        wait_until(lambda: is_free(save))
    told = [str(warning.message) for warning in caught if warning.category is ResourceWarning]
    assert len(told) == 1 and f"{save} was not closed; 2 pending rows" in told[0]
    expect(save, 3)


def test_dropping_one_while_the_background_is_at_work(tmp_path):
    flat(0, 1).memmap(tmp_path)
    rows = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for i in range(40):
            appender = MemmapAppender(tmp_path, durable=False, flush_rows=1 + i % 3, flush_seconds=0.001, timeout=10)
            for _ in range(3):
                appender.append(flat(rows, 1))
                rows += 1
            if i % 2:
                time.sleep(0.001)
            del appender
        wait_until(lambda: is_free(tmp_path))
    expect(tmp_path, rows)
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "tdgpu-append"])


# How a program ends that has two saves open, with two pending rows each.
ENDINGS = {
    "end": "",
    "exception": "raise ZeroDivisionError",
    "in a cycle": "cycle = [first, second]; cycle.append(cycle); del first, second, cycle",
    "in a daemon thread": "threading.Thread(target=lambda kept=first: time.sleep(60), daemon=True).start(); del first",
    "dropped, where warnings are errors": "warnings.simplefilter('error'); del first, second; gc.collect()",
    "the first cannot commit": "os.replace = refuse_in('first')",
    "the second cannot commit": "os.replace = refuse_in('second')",
    "no thread can be started": "threading.Thread.start = refuse",
}


def test_what_is_open_at_the_end_of_the_program_is_committed(tmp_path):
    """However it ends, and whatever else fails then."""
    for name in ENDINGS:
        for which in ("first", "second"):
            flat(0, 1).memmap(tmp_path / name / which)
    status, out, err = run_process(
        """
        import gc, json, os, signal, sys, threading, time, warnings
        from pathlib import Path
        from appends import *
        real = os.replace
        def refuse(*_):
            raise RuntimeError("can't start new thread")
        def refuse_in(name):
            def replace(old, new):
                if f'/{name}/' in str(new):
                    raise OSError(5, "refused")
                real(old, new)
            return replace
        for name, code in json.loads(sys.argv[2]).items():
            if os.fork() == 0:
                signal.alarm(20)
                first, second = (
                    tdgpu.MemmapAppender(Path(sys.argv[1]) / name / which, flush_rows=1000, flush_seconds=1000)
                    for which in ("first", "second")
                )
                first.append(flat(1, 2))
                second.append(flat(1, 2))
                exec(code)
                sys.exit(0)
            print(f"{name}: {os.wait()[1]}", flush=True)
        """,
        tmp_path,
        json.dumps(ENDINGS),
        timeout=120,
    )
    assert status == 0, err
    assert out == "".join(f"{name}: {256 if name == 'exception' else 0}\n" for name in ENDINGS), err
    assert "Fatal" not in err
    left = {
        f"{name}, {which}": load(tmp_path / name / which).batch_size[0]
        for name in ENDINGS for which in ("first", "second")
    }  # fmt: skip
    assert {at for at, rows in left.items() if rows != 3} == {
        "the first cannot commit, first", "the second cannot commit, second"
    }, left  # fmt: skip
    assert err.count("refused") >= 2


def test_a_fork_leaves_the_appender_to_the_parent(save):
    found = in_process(
        """
        import gc, os, signal, sys
        from pathlib import Path
        from appends import *
        path = Path(sys.argv[1])
        appender = tdgpu.MemmapAppender(path, flush_rows=1000)
        appender.append(flat(1, 2))
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            for call in (lambda: appender.append(flat(3, 1)), appender.flush):
                try:
                    call()
                except errors.ForkError:
                    continue
                os._exit(1)
            len(appender), appender.pending, repr(appender)
            appender.close()
            del appender
            gc.collect()
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert not is_free(path)
        appender.append(flat(3, 1))
        appender.close()
        print(is_free(path))
        """,
        save,
    )
    assert found == "True\n"
    expect(save, 4)


def test_a_fork_while_a_thread_appends_ends_in_an_error_not_in_a_hang(save):
    found = in_process(
        """
        import os, signal, sys, threading
        from appends import *
        appender = tdgpu.MemmapAppender(sys.argv[1])
        inside, on = threading.Event(), threading.Event()
        class Slow(TensorDict):  # the moment in which append looks at rows
            @property
            def batch_dims(self):
                inside.set()
                on.wait(30)
                return 1
        slow = flat(1, 1)
        slow.__class__ = Slow
        thread = threading.Thread(target=appender.append, args=(slow,))
        thread.start()
        inside.wait(30)
        pid = os.fork()
        if pid == 0:
            signal.alarm(5)
            try:
                appender.append(flat(2, 1))
            except errors.ForkError:
                os._exit(0)
            os._exit(1)
        status = os.waitpid(pid, 0)[1]
        on.set()
        thread.join(30)
        appender.close()
        print(status)
        """,
        save,
    )
    assert found == "0\n"
    expect(save, 2)


def test_memory_does_not_grow(tmp_path):
    """Not over many small appends with commits, nor over large ones without."""
    found = in_process(
        """
        import os, sys
        from pathlib import Path
        from appends import *
        def rss():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        path, width = Path(sys.argv[1]), 100_000
        rows = TensorDict({"a": torch.ones(1, 8), "n": TensorDict({"b": torch.ones(1)}, [1])}, [1])
        with tdgpu.MemmapAppender.create(path / "small", rows, durable=False, flush_rows=2000) as appender:
            for _ in range(3000):
                appender.append(rows)
            before, files = rss(), len(os.listdir("/proc/self/fd"))
            for _ in range(10_000):
                appender.append(rows)
            print(rss() - before, len(os.listdir("/proc/self/fd")) - files)
        rows = TensorDict({"x": torch.zeros(1, width), "y": torch.zeros(1)}, [1])
        with tdgpu.MemmapAppender.create(path / "large", rows, durable=False) as appender:
            for i in range(160):
                if i == 40:
                    before = rss()
                appender.append(TensorDict({"x": torch.full((1, width), float(i)), "y": torch.ones(1)}, [1]))
            print(rss() - before, appender.pending)
        """,
        tmp_path,
    )
    grown, files, large, pending = map(int, found.split())
    assert grown < 4 * MiB and files == 0
    assert large < 16 * MiB and pending == 160
    assert load(tmp_path / "small").batch_size == (13_000,)
