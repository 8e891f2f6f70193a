"""``append_memmap`` that fails, is killed or interrupted, or meets others: a save has the old rows or the new."""

from __future__ import annotations

import errno
import os
import shutil
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from appends import INTERRUPTS, expect, failing, flat, is_free, load, ours, state
from forked import in_process
from tensordict import TensorDict

import tdgpu
from tdgpu import errors
from tdgpu.layout import commit
from tdgpu.transfer import outgoing

_failing = failing(errno.EIO)


# --- failures (facts 18 and 20 of the list of format facts) -----------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("at", ["write", "reserve", "metadata", "rename"])
def test_18_a_failure_restores_every_byte(tmp_path, monkeypatch, at, durable):
    path = tmp_path / "save"
    flat(0, 3).memmap(path)
    os.chmod(path / "meta.json", 0o640)
    before = state(path)
    with tdgpu.options(durable=durable), monkeypatch.context() as patch:
        if at == "write":
            patch.setattr(outgoing.Store, "report", lambda self: outgoing.StoreReport(0, 5, 0, 1, errno.EIO))
        elif at == "reserve":
            real = outgoing.Files.reserve

            def reserve(self: Any, *arguments: Any) -> None:
                real(self, *arguments)
                raise outgoing.FileError(2, errno.ENOSPC)

            patch.setattr(outgoing.Files, "reserve", reserve)
        elif at == "metadata":
            patch.setattr(commit, "_write_temporary", _failing_at_last(commit._write_temporary, 3))
        else:
            patch.setattr(os, "replace", _failing)
        with pytest.raises(errors.AppendError) as raised:
            tdgpu.append_memmap(path, flat(3, 2))
        assert raised.value.errno == (errno.ENOSPC if at == "reserve" else errno.EIO)
        assert raised.value.file is not None and raised.value.file.startswith(str(path))
        assert state(path) == before
        assert is_free(path)
    tdgpu.append_memmap(path, flat(3, 2))
    expect(path, 5)


def test_18_a_failure_leaves_a_file_as_long_as_it_was_found(tmp_path, monkeypatch):
    flat(0, 3).memmap(tmp_path)
    with open(tmp_path / "a.memmap", "ab") as opened:
        opened.write(b"surplus")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", _failing)
        with pytest.raises(errors.AppendError):
            tdgpu.append_memmap(tmp_path, flat(3, 20))
    assert (tmp_path / "a.memmap").stat().st_size == 36 + 7
    expect(tmp_path, 3)


def _failing_at_last(real: Any, nth: int) -> Any:
    calls = []

    def function(*arguments: Any, **others: Any) -> None:
        calls.append(1)
        if len(calls) == nth:
            _failing()
        real(*arguments, **others)

    return function


def test_18_metadata_that_could_not_be_put_in_its_place_is_completed_by_the_next(tmp_path, monkeypatch):
    flat(0, 3).memmap(tmp_path)
    real = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda old, new: _failing() if Path(new).parent != tmp_path else real(old, new))
        with pytest.raises(errors.AppendError, match="committed"):
            tdgpu.append_memmap(tmp_path, flat(3, 2))
    loaded = tdgpu.load_memmap(tmp_path)
    assert loaded.batch_size == (5,) and torch.equal(loaded["n", "m", "c"], flat(0, 5)["n", "m", "c"])
    tdgpu.append_memmap(tmp_path, flat(5, 2))
    expect(tmp_path, 7)
    assert not list(tmp_path.rglob(commit.TEMPORARY))


@pytest.mark.parametrize("committed", [True, False])
def test_20_what_a_killed_append_left_is_undone_or_completed_first(tmp_path, committed):
    flat(0, 3).memmap(tmp_path / "save")
    shutil.copytree(tmp_path / "save", tmp_path / "new")
    tensordict.append_memmap(tmp_path / "new", flat(3, 2))
    for meta in (tmp_path / "new").rglob("meta.json"):
        shutil.copy(meta, tmp_path / "save" / meta.relative_to(tmp_path / "new").with_name(commit.TEMPORARY))
    for leaf in (tmp_path / "new").rglob("*.memmap"):
        shutil.copy(leaf, tmp_path / "save" / leaf.relative_to(tmp_path / "new"))
    if committed:
        os.replace(tmp_path / "save" / commit.TEMPORARY, tmp_path / "save" / "meta.json")
    there = 5 if committed else 3
    tdgpu.append_memmap(tmp_path / "save", flat(there, 2))
    expect(tmp_path / "save", there + 2)
    assert not list(tmp_path.rglob(commit.TEMPORARY))


# --- several writers, and interrupts ----------------------------------------------------------------------------------


def test_several_threads_append(tmp_path):
    TensorDict({"a": torch.zeros(0, dtype=torch.int64), "n": {"b": torch.zeros(0, 3)}}, [0]).memmap(tmp_path)
    failed: list[BaseException] = []

    def work(which: int) -> None:
        try:
            for i in range(12):
                number = torch.tensor([which * 100 + i])
                rows = TensorDict({"a": number, "n": TensorDict({"b": number.float().expand(1, 3)}, [1])}, [1])
                tdgpu.append_memmap(tmp_path, rows)
        except BaseException as error:
            failed.append(error)

    with tdgpu.options(durable=False):
        threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failed == []
    loaded = load(tmp_path)
    found = loaded["a"].tolist()
    assert sorted(found) == [which * 100 + i for which in range(4) for i in range(12)]
    for which in range(4):  # each in its order
        assert [number for number in found if number // 100 == which] == [which * 100 + i for i in range(12)]
    assert torch.equal(loaded["n", "b"], loaded["a"].float().view(-1, 1).expand(-1, 3))


@pytest.mark.parametrize("rows", ["small", "large"])
def test_an_interrupt_anywhere_leaves_the_old_rows_or_the_new(tmp_path, rows):
    found = in_process(
        INTERRUPTS
        + textwrap.dedent("""
        where, large = Path(sys.argv[1]), sys.argv[2] == "large"
        def rows(first):
            made = flat(first, 2)
            if large:
                made["w"] = torch.arange(first, first + 2).repeat_interleave(300_000).view(300_000, 2).t()
            return made
        rows(0).memmap(where / "old")
        shutil.copytree(where / "old", where / "new")
        tdgpu.append_memmap(where / "new", rows(2))
        old, new = files(where / "old"), files(where / "new")
        wrong, seen = [], set()
        sys.unraisablehook = lambda _: None
        with tdgpu.options(durable=False, lock_timeout=0, threads=1):
            at = 1 + os.getpid() % (step := 101 if large else 31)
            while True:
                save = where / "save"
                shutil.copytree(where / "old", save)
                ended = "well"
                try:
                    with Interrupt(at) as interrupt:
                        tdgpu.append_memmap(save, rows(2))
                except BaseException as error:
                    ended = repr(error)
                if interrupt.at is None:
                    break
                free, found = is_free(save), files(save)
                # Python swallows what is raised in a finalizer.
                whole = found == new if ended == "well" else ended == "KeyboardInterrupt()" and found in (old, new)
                if not whole or not free:
                    wrong.append((interrupt.at, ended, "new" if found == new else found == old, free))
                seen.add(found == new)
                shutil.rmtree(save)
                at += step
        assert False in seen, seen
        print(wrong)
        """),
        tmp_path,
        rows,
    )
    assert found == "[]\n"


def test_ctrl_c_at_random_moments(tmp_path):
    """Real signals, in a loop of appends; after each, there is a whole number of them and nothing to recover."""
    found = in_process(
        INTERRUPTS
        + textwrap.dedent("""
        import random, time
        path, rows = Path(sys.argv[1]), 1
        def handler(number, frame):
            raise KeyboardInterrupt
        # What is raised in a finalizer is swallowed: another comes.
        sys.unraisablehook = lambda _: signal.setitimer(signal.ITIMER_REAL, 0.005)
        signal.signal(signal.SIGALRM, handler)
        flat(0, 1).memmap(path)
        chance, interrupts, deadline = random.Random(5), 0, time.monotonic() + 2.5
        while time.monotonic() < deadline:
            with tdgpu.options(durable=chance.random() < 0.3, lock_timeout=0):
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.02))
                    while time.monotonic() < deadline:
                        tdgpu.append_memmap(path, flat(rows, 1))
                        rows += 1
                except KeyboardInterrupt:
                    interrupts += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                report = tdgpu.recover_memmap(path)
                assert report.state == "clean" and report.surplus == 0, report
                assert report.rows in (rows, rows + 1), (report, rows)
                rows = report.rows
        loaded = tensordict.load_memmap(path)
        for key, value in flat(0, rows).items(True, True):
            assert torch.equal(loaded[key], value), key
        assert not list(path.rglob(".*"))
        print(interrupts > 10, rows > 10)
        """),
        tmp_path / "save",
    )
    assert found == "True True\n"


def test_no_thread_can_be_started(tmp_path, monkeypatch):
    flat(0, 1).memmap(tmp_path)
    tdgpu.append_memmap(tmp_path, flat(1, 1))

    def refused(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    tdgpu.append_memmap(tmp_path, flat(2, 1))
    assert ours(tmp_path, flat(0, 1).exclude("a")) is ValueError
    assert is_free(tmp_path)
    expect(tmp_path, 3)
