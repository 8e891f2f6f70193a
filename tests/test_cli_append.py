"""The commands ``append`` and ``recover``: what they print, and their exit codes."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensordict
import torch
from tensordict import TensorDict

import tdgpu
from tdgpu import cli
from tdgpu.layout.lock import WriterLock


@pytest.fixture
def call(monkeypatch, capsys):
    """The command line in this process: (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["tdgpu", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code or 0, *capsys.readouterr()

    return call


def rows_of(start: int, stop: int) -> TensorDict:
    numbers = torch.arange(start, stop)
    return TensorDict({"a": numbers, "n": {"b": numbers.to(torch.float64)}}, [stop - start])


def numbers(save: Path) -> list[int]:
    """The numbers in the rows, as tensordict reads them."""
    loaded = TensorDict.load_memmap(save)
    assert loaded["n", "b"].tolist() == loaded["a"].tolist()
    return loaded["a"].tolist()


@pytest.fixture
def saves(tmp_path: Path) -> tuple[Path, Path]:
    """Rows 0 to 2, and rows 10 to 14."""
    rows_of(0, 3).memmap(tmp_path / "dest")
    rows_of(10, 15).memmap(tmp_path / "source")
    return tmp_path / "dest", tmp_path / "source"


def contents(save: Path) -> dict[str, bytes]:
    return {str(path.relative_to(save)): path.read_bytes() for path in save.rglob("*") if path.is_file()}


# --- append -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["directory", "stored", "deflate"])
def test_rows_of_a_directory_or_an_archive_are_appended(call, saves, compression):
    dest, source = saves
    if compression != "directory":
        source = tdgpu.pack_memmap(source, source.with_suffix(".tdz"), compression=compression)
    code, out, err = call("append", dest, source)
    assert (code, err) == (0, "")
    assert out.startswith(f"{dest}: 5 rows appended in ")
    assert numbers(dest) == [0, 1, 2, 10, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("rows", "added"),
    [
        ("1:3", [11, 12]),
        (":2", [10, 11]),
        ("-2:", [13, 14]),
        ("3:99", [13, 14]),
        (":", [10, 11, 12, 13, 14]),
        ("4:2", []),
    ],
)
def test_some_rows(call, saves, rows, added):
    dest, source = saves
    code, out, _ = call("append", dest, source, f"--rows={rows}", "--no-durable", "--json")
    assert code == 0
    report = json.loads(out)
    assert report.pop("seconds") >= 0
    assert report == {"directory": str(dest), "source": str(source), "rows": len(added)}
    assert numbers(dest) == [0, 1, 2, *added]


@pytest.mark.parametrize("flags", [[], ["--no-durable"]])
def test_the_disk_is_waited_for_unless_told_otherwise(call, saves, flags, monkeypatch):
    from tdgpu.append import copying

    asked = {}

    def append_save(prefix, source, **options):
        asked.update(options)
        return 0

    monkeypatch.setattr(copying, "append_save", append_save)
    assert call("append", *saves, *flags)[0] == 0
    assert asked["durable"] is (False if flags else None)


@pytest.mark.parametrize("rows", ["1", "a:b", "1:2:3", "", "1.5:2"])
def test_what_is_no_range_of_rows_is_wrong_usage(call, saves, rows):
    before = contents(saves[0])
    code, out, err = call("append", *saves, f"--rows={rows}")
    assert (code, out) == (2, "")
    assert "--rows" in err
    assert contents(saves[0]) == before


def test_rows_that_do_not_fit_are_an_error_and_nothing_changes(call, saves):
    dest, source = saves
    TensorDict(a=torch.zeros(3), batch_size=[3]).memmap(source.with_name("other"))
    before = contents(dest)
    code, out, err = call("append", dest, source.with_name("other"))
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert str(dest) in err
    assert contents(dest) == before


@pytest.mark.parametrize("missing", ["dest", "source"])
def test_a_save_that_is_not_there_is_named(call, saves, missing):
    paths = [str(path) if path.name != missing else str(path) + "-no" for path in saves]
    code, out, err = call("append", *paths)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert f"{missing}-no" in err


def test_a_writer_in_the_way_is_named(call, saves, monkeypatch):
    monkeypatch.setenv("TDGPU_LOCK_TIMEOUT", "0")
    dest, source = saves
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()

    def hold() -> None:
        lock = WriterLock(str(dest), 0)
        held.set()
        release.wait(60)
        lock.release()

    holder = context.Process(target=hold)
    holder.start()
    try:
        assert held.wait(60)
        code, out, err = call("append", dest, source)
    finally:
        release.set()
        holder.join()
    assert (code, out) == (1, "")
    assert str(holder.pid) in err
    assert numbers(dest) == [0, 1, 2]
    assert call("append", dest, source)[0] == 0


# --- recover ----------------------------------------------------------------------------------------------------------


def killed(save: Path, *renamed: str) -> None:
    """Leaves what an append of rows 10 to 14 does that is killed when only ``renamed`` levels have new metadata."""
    old = {path: path.read_bytes() for path in save.rglob("meta.json")}
    tensordict.append_memmap(save, rows_of(10, 15))
    for path, text in old.items():
        if str(path.parent.relative_to(save)) not in renamed:
            os.replace(path, path.with_name(".meta.json.append.tmp"))
            path.write_bytes(text)


def test_a_clean_save_is_left_as_it_is(call, saves):
    dest, _ = saves
    before = contents(dest)
    assert call("recover", dest) == (0, f"{dest}: clean, 3 rows\n", "")
    code, out, err = call("recover", dest, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "path": str(dest), "state": "clean", "rows": 3, "completed": [], "removed": [], "surplus": 0
    }  # fmt: skip
    assert contents(dest) == before


def test_an_append_that_was_not_committed_is_undone(call, saves):
    dest, _ = saves
    killed(dest)
    code, out, err = call("recover", dest)
    assert (code, out) == (0, f"{dest}: undone, 3 rows\n")
    assert err.count("removed: ") == 2
    assert "completed" not in err
    assert "note: 80 bytes" in err  # five rows of two leaves
    assert numbers(dest) == [0, 1, 2]


def test_an_append_that_was_committed_is_completed(call, saves):
    dest, _ = saves
    killed(dest, ".")
    code, out, err = call("recover", dest, "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["state"], report["rows"], len(report["completed"]), report["removed"]) == ("completed", 8, 1, [])
    assert err.count("completed: ") == 1
    assert numbers(dest) == [0, 1, 2, 10, 11, 12, 13, 14]
    assert call("recover", dest)[1] == f"{dest}: clean, 8 rows\n"


def test_an_append_recovers_by_itself(call, saves):
    dest, source = saves
    killed(dest, ".")
    assert call("append", dest, source, "--rows", ":1")[0] == 0
    assert numbers(dest) == [0, 1, 2, 10, 11, 12, 13, 14, 10]


def test_recovery_of_what_is_no_save(call, tmp_path):
    code, out, err = call("recover", tmp_path / "nowhere")
    assert (code, out) == (1, "")
    assert "nowhere" in err


def test_recovery_waits_for_no_writer_longer_than_it_may(call, saves, monkeypatch):
    monkeypatch.setenv("TDGPU_LOCK_TIMEOUT", "0")
    lock = WriterLock(str(saves[0]), 0)
    try:
        code, out, err = call("recover", saves[0])
    finally:
        lock.release()
    assert (code, out) == (1, "")
    assert str(os.getpid()) in err


@pytest.mark.parametrize("command", ["append", "recover"])
def test_help(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert "--json" in out


def test_from_a_shell(saves):
    dest, source = saves
    done = subprocess.run(
        [sys.executable, "-m", "tdgpu", "append", str(dest), str(source), "--rows", "-1:", "--json"],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[1], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["rows"], done.stderr) == (1, "")
    assert numbers(dest) == [0, 1, 2, 14]
