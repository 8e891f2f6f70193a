"""The bar over a loader's batches: it hands out what the loader does, says what is true, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import pty
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked import run_process
from loaders import all_numbers, native_threads, numbers, save_rows

from tdgpu import DeviceLoader
from tdgpu.data.progress import pace, progress
from tdgpu.data.stats import Stopwatch

NONE = Stopwatch().stats()
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture
def loader(tmp_path: Path) -> Iterator[DeviceLoader]:
    with DeviceLoader(save_rows(tmp_path / "save", 100), batch_size=10) as loader:
        yield loader


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error is a terminal of 100 columns, as far as rich can tell."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def on_a_terminal(program: str, save: Path) -> tuple[int, str]:
    """Exit status and output of a program whose standard streams are a terminal; ``SAVE`` is 100 rows."""
    save_rows(save, 100)
    ours, theirs = pty.openpty()
    imports = f"""
import os, time
for stream in (1, 2):
    os.dup2(os.open({os.ttyname(theirs)!r}, os.O_RDWR | os.O_NOCTTY), stream)
import tdgpu
from tdgpu.data.progress import progress
loader = tdgpu.DeviceLoader({str(save)!r}, batch_size=10)
"""
    output = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while some := os.read(ours, 65536):
                output.extend(some)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        status, _, _ = run_process(imports + program, TERM="xterm", COLUMNS="100", LINES="30")
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    return status, output.decode()


def test_without_a_terminal_there_are_batches_and_no_bar(loader, capsys):
    assert all_numbers(progress(loader)) == list(range(100))
    assert all_numbers(progress(loader)) == list(range(100))  # the next epoch; the loader is open
    assert capsys.readouterr() == ("", "")


def test_the_bar_says_how_far_it_is_and_is_gone_at_the_end(tmp_path):
    program = "for batch in progress(loader, 'reading [all]'): time.sleep(0.05)\nprint('after')"
    status, output = on_a_terminal(program, tmp_path / "save")
    assert status == 0
    assert "reading [all]" in output
    assert "/10" in output
    assert "rows/s" in output
    assert "waiting for data" in output
    assert output.count(HIDE_CURSOR) == output.count(SHOW_CURSOR) == 1
    _, rest = output.split(SHOW_CURSOR)
    assert "\x1b[2K" in rest  # the line of the bar is erased
    assert rest.endswith("after\r\n")


@pytest.mark.parametrize(
    "program",
    [
        "for batch in progress(loader): raise KeyError('mine')",
        "for i, batch in enumerate(progress(loader)): raise KeyError('mine')",
        "batches = progress(loader)\nfor batch in batches: raise KeyError('mine')",
    ],
)
def test_an_exception_leaves_the_terminal_as_it_was(tmp_path, program):
    status, output = on_a_terminal(program, tmp_path / "save")
    assert status == 1
    assert "KeyError: 'mine'" in output
    assert output.count(HIDE_CURSOR) == output.count(SHOW_CURSOR) == 1


@pytest.mark.usefixtures("terminal")
def test_after_a_break_the_loader_goes_on_behind_it(loader, capsys):
    for batch in progress(loader):
        if numbers(batch)[0] == 30:
            break
    output = capsys.readouterr().err
    assert output.count(HIDE_CURSOR) == output.count(SHOW_CURSOR) == 1
    state = loader.state_dict()
    assert state["position"] == 40
    loader.load_state_dict(state)
    assert all_numbers(progress(loader)) == list(range(40, 100))
    assert "/6" in capsys.readouterr().err  # of what was left


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_it_opened_is_closed_and_nothing_else(loader, is_terminal, request, monkeypatch):
    if is_terminal:
        request.getfixturevalue("terminal")
    mine = iter(loader)
    next(mine)
    made: list[Any] = []
    real = DeviceLoader.__iter__

    def watched(self: DeviceLoader) -> Iterator[Any]:
        made.append(real(self))
        return made[-1]

    monkeypatch.setattr(DeviceLoader, "__iter__", watched)
    time.sleep(0.1)  # a thread names itself as it begins
    threads = native_threads()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for _ in progress(loader):
            1 / 0  # noqa: B018
    (ours,) = made
    assert ours.is_over
    assert native_threads() == threads
    assert numbers(next(mine)) == list(range(10, 20))


@pytest.mark.usefixtures("terminal")
def test_an_error_of_the_loader_comes_through(loader, capsys):
    def fail(batch: Any) -> Any:
        raise ValueError("this batch")

    loader.transform = fail
    with pytest.raises(ValueError, match="this batch"):
        list(progress(loader))
    output = capsys.readouterr().err
    assert output.count(HIDE_CURSOR) == output.count(SHOW_CURSOR) == 1


@pytest.mark.usefixtures("terminal")
def test_a_sampler_without_a_length_has_a_bar_without_an_end(tmp_path, capsys):
    with DeviceLoader(save_rows(tmp_path / "save", 100), batch_size=2, sampler=(row for row in (3, 1, 4))) as loader:
        assert all_numbers(progress(loader)) == [3, 1, 4]
    assert "/?" in capsys.readouterr().err


def test_two_bars_at_once(loader, terminal, capsys):
    for batch in progress(loader, "outer"):
        assert all_numbers(progress(loader, "inner")) == list(range(100))
        if numbers(batch)[0] == 10:
            break
    assert "outer" in capsys.readouterr().err


def test_what_an_iterator_has_to_open_first_is_waited_for(loader, monkeypatch):
    """For a save that is kept on the device, that is all of the loading."""
    real = DeviceLoader._make_fetcher

    def slow(self: DeviceLoader) -> Any:
        time.sleep(0.2)
        return real(self)

    monkeypatch.setattr(DeviceLoader, "_make_fetcher", slow)
    iter(loader)
    assert loader.stats().waiting >= 0.2
    iter(loader)
    assert loader.stats().waiting < 0.4  # it is open


def test_the_figures_are_of_what_was_done_since():
    before = replace(NONE, rows=1000, waiting=5.0, working=7.0)
    assert pace(before, before) == ""
    assert pace(before, replace(before, rows=4000, waiting=5.5, working=8.5)) == "1,500 rows/s, 25% waiting for data"


def test_the_share_of_waiting_is_that_of_the_loader(loader):
    before = loader.stats()
    for _ in progress(loader):
        time.sleep(0.01)
    now = loader.stats()
    assert now.working - before.working >= 0.09
    share = int(pace(before, now).split(", ")[1].split("%")[0])
    assert share == round(100 * now.stalled)
