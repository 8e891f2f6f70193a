"""The commands of the cache: what they print, and their exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from caches import NBYTES, found, make, wanted
from reliability.processes import child, wait_for
from reliability.tracing import Shared

from tdgpu import cli
from tdgpu.cache.directory import obtain


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("TDGPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "cache"


@pytest.fixture
def call(monkeypatch, capsys):
    """The command line in this process: (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["tdgpu", "cache", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        code, (out, err) = exit.value.code or 0, capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def fill(count: int) -> list[str]:
    """Names of results that nobody uses; each was used an hour later than the one before it."""
    for number in range(count):
        path = obtain(wanted(number), make).path
        when = time.time() - 3600 * (count - number)
        os.utime(path.parent / "used", (when, when))
    return [wanted(number).digest for number in range(count)]


def names(call) -> list[str]:
    return [entry["digest"] for entry in json.loads(call("ls", "--json")[1])["entries"]]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["rm"],
        ["rm", "--all", "a"],
        ["gc", "--max-size", "much"],
        ["gc", "--max-size", "-1"],
        ["ls", "x"],
    ],
)
def test_wrong_usage_exits_with_2(root, call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert "Error" in err
    assert not root.exists()


def test_where_there_is_no_cache_there_is_nothing(root, call):
    assert call("ls") == (0, f"{root}: 0 results, 0 B\n", "")
    assert call("rm", "--all") == (0, f"{root}: 0 results removed, 0 bytes\n", "")
    assert call("gc", "--max-size", "1") == (0, f"{root}: 0 results removed, 0 bytes\n", "")
    assert call("explain") == (1, "", f"error: There are no results in {root}\n")
    assert not root.exists()


def test_ls_shows_sizes_and_ages(root, call):
    first, second = fill(2)
    code, out, err = call("ls")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == [second, first]
    assert lines[2].split()[1:4] == ["map", "73.2", "KiB"]
    assert lines[2].rstrip().endswith("2 h ago")
    assert lines[3] == f"{root}: 2 results, 146.5 KiB"


def test_ls_as_json(root, call):
    first, second = fill(2)
    entry = found(0)
    code, out, err = call("ls", "--json")
    report = json.loads(out)
    assert (code, err, report["directory"], report["bytes"]) == (0, "", str(root), 2 * NBYTES)
    assert [one["digest"] for one in report["entries"]] == [first, second]  # it has just been used
    assert [one["is_in_use"] for one in report["entries"]] == [True, False]
    assert report["entries"][0]["path"] == str(entry.path.parent)
    assert report["entries"][0]["transform"] == "map"
    assert abs(report["entries"][0]["built"] - time.time()) < 60


def test_ls_shows_what_is_damaged_and_what_was_replaced(root, call):
    fill(1)
    (found().path.parent / "entry.json").write_text("{")
    used = obtain(wanted(1), make)
    obtain(wanted(1), make, rebuild=True)
    states = [entry["state"] for entry in json.loads(call("ls", "--json")[1])["entries"]]
    assert sorted(states) == ["kept", "not used: its entry.json is damaged", "replaced"]
    assert "its entry.json is damaged" in call("ls")[1]
    del used
    code, _, err = call("gc")
    assert code == 0
    assert err.count("removed: ") == 2
    assert names(call) == [wanted(1).digest]


def test_rm_removes_what_it_is_told_to(root, call):
    first, second, third = fill(3)
    code, out, err = call("rm", first, third, "--json")
    assert (code, json.loads(out)["removed"]) == (0, [third, first])
    assert err == f"removed: {third}, 73.2 KiB\nremoved: {first}, 73.2 KiB\n"
    assert names(call) == [second]
    assert call("rm", "--all")[0] == 0
    assert names(call) == []


def test_rm_keeps_what_is_in_use_and_says_so(root, call):
    first, second = fill(2)
    entry = found(0)
    for arguments in ([first, second], ["--all"]):
        code, _, err = call("rm", *arguments)
        assert code == 1
        assert f"error: {first} is in use, and stays\n" in err
        assert names(call) == [first]
        fill(2)
    del entry


@pytest.mark.parametrize("digest", ["0123456789abcdef", "../cache", "/etc", "", "*"])
def test_a_result_that_is_not_there_is_an_error(root, call, digest):
    fill(1)
    for command in ("rm", "explain"):
        code, _, err = call(command, digest)
        assert code == 1
        assert err == f"error: There is no result {digest} in {root}\n"
    assert len(names(call)) == 1


def test_explain_says_why_a_result_was_built(root, call):
    obtain(wanted(1), make)
    time.sleep(0.01)
    obtain(wanted(2), make)
    code, out, err = call("explain", wanted(2).digest)
    assert (code, err) == (0, "")
    assert out.startswith(f"{wanted(2).digest}: hit; built ")
    assert out.splitlines()[1:] == ["    number: <2> instead of <1>"]
    assert call("explain") == (code, out, err)
    report = json.loads(call("explain", "--json")[1])
    assert (report["closest"], report["changes"]) == (wanted(1).digest, ["number: <2> instead of <1>"])


def test_gc_removes_what_was_not_used_for_longest(root, call):
    first, second, third = fill(3)
    code, out, err = call("gc", "--max-size", f"{2 * NBYTES}")
    assert (code, out) == (0, f"{root}: 1 result removed, {NBYTES} bytes\n")
    assert err == f"removed: {first}, 73.2 KiB\n"
    assert names(call) == [third, second]


def test_gc_takes_its_limit_from_the_environment_and_has_none_without(root, call, monkeypatch):
    fill(2)
    assert call("gc") == (0, f"{root}: 0 results removed, 0 bytes\n", "")
    monkeypatch.setenv("TDGPU_CACHE_MAX_BYTES", "100K")
    report = json.loads(call("gc", "--json")[1])
    assert (len(report["removed"]), report["left"]) == (1, NBYTES)
    monkeypatch.setenv("TDGPU_CACHE_MAX_BYTES", "much")
    code, _, err = call("gc")
    assert code == 1
    assert "TDGPU_CACHE_MAX_BYTES" in err


def test_gc_keeps_what_is_in_use_and_says_that_it_is_too_much(root, call):
    fill(2)
    entry = found()
    code, _, err = call("gc", "--max-size", "0")
    assert code == 0
    assert "note: what is in use stays: 73.2 KiB, and 0 B were asked for\n" in err
    assert names(call) == [wanted().digest]
    del entry


def test_gc_removes_what_a_killed_process_has_left(root, call):
    building = Shared()

    def build(path: Path) -> None:
        building.value = 1
        time.sleep(60)

    with child(lambda: obtain(wanted(), build)) as pid:
        wait_for(building, 1)
        assert call("gc")[2] == ""
        os.kill(pid, signal.SIGKILL)
    code, _, err = call("gc")
    assert code == 0
    assert err.startswith(f"left by a killed process: {root}/building/{wanted().digest}.{pid}.")
    assert os.listdir(root / "building") == []
    assert [name for name in os.listdir(root / "locks") if not name.startswith(".")] == []


def test_a_directory_that_cannot_be_written_to_is_an_error_without_a_traceback(root, call, monkeypatch):
    fill(1)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr("tdgpu.cache.budget.while_locked", refuse)
    for arguments in (["rm", wanted().digest], ["gc", "--max-size", "0"]):
        code, out, err = call(*arguments)
        assert (code, out) == (1, "")
        assert f"error: The cache directory {root} cannot be used: Permission denied." in err
    assert call("ls")[0] == 0
