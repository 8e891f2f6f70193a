"""Results that are not kept: in a temporary directory, which is gone when the process has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from caches import FILES, cache_at, contents, make, never, wanted
from forked import run_process
from reliability.processes import child, wait_for
from reliability.tracing import Shared

from tdgpu.cache import switch
from tdgpu.cache.directory import find, obtain
from tdgpu.cache.fingerprint import Fingerprint
from tdgpu.errors import CacheError

ROOT = Path(__file__).parents[1]

BEGIN = """
import os, signal, sys, tempfile
tempfile.tempdir = None  # it was found before
from caches import FILES, contents, make, never, wanted
from tdgpu.cache.directory import obtain
from tdgpu.cache.switch import disable_caching, enable_caching
disable_caching()
entry = obtain(wanted(), make)
assert contents(entry.path) == FILES
assert entry.path.is_relative_to(os.environ["TMPDIR"])
# """  # a test's own lines come behind this


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Any]:
    """Where temporary files and the cache lie."""
    (tmp_path / "tmp").mkdir()
    return {"TMPDIR": str(tmp_path / "tmp"), "TDGPU_CACHE": str(tmp_path / "cache")}


def run(code: str, places: dict[str, Any], *, status: int = 0) -> str:
    """Runs code behind the beginning; it must end with that status and say nothing but what an exception says."""
    ended, out, err = run_process(BEGIN + code.replace("\n    ", "\n"), **places)
    assert ended == status, out + err
    assert err.count("Traceback") == (1 if status == 1 else 0), err
    assert status == 1 or err == ""
    return out


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("raise ZeroDivisionError", 1),
        ("sys.exit(3)", 3),
        ("os.chdir('/'); import threading; threading.Thread(target=obtain, args=(wanted(1), make)).start()", 0),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_the_temporary_directory_is_gone_at_the_end_whatever_the_end(places, end, status):
    out, code = "", f"\n{end}\n"
    if status == -signal.SIGINT:
        ended, out, err = run_process(BEGIN + code, **places)
        assert ended in (status, 130, 1) and err.count("Traceback") == 1, err
    else:
        out = run(code, places, status=status)
    assert out == ""
    assert os.listdir(places["TMPDIR"]) == []
    assert not Path(places["TDGPU_CACHE"], "entries").exists()


def test_a_program_as_users_start_it_ends_without_a_message(places):
    code = BEGIN + "\nkept = open(entry.path / 'a.memmap', 'rb')\n"
    env = {**os.environ, **places, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert os.listdir(places["TMPDIR"]) == []


def test_every_result_is_computed_anew_and_those_before_stay_until_the_end(places):
    run(
        """
    again = obtain(wanted(), make)
    assert again.path != entry.path and contents(again.path) == contents(entry.path) == FILES
    enable_caching()
    kept = obtain(wanted(), make)
    assert kept.path.is_relative_to(os.environ["TDGPU_CACHE"])
    assert obtain(wanted(), never).path == kept.path
    assert contents(entry.path) == FILES
    """,
        places,
    )
    assert os.listdir(places["TMPDIR"]) == []


def test_a_fork_does_not_remove_its_parents_results_and_removes_its_own(places):
    run(
        """
    pid = os.fork()
    if pid == 0:
        assert contents(entry.path) == FILES
        own = obtain(wanted(), make)
        assert own.path.parent.parent != entry.path.parent.parent
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert contents(entry.path) == FILES
    assert os.listdir(os.environ["TMPDIR"]) == [entry.path.parent.parent.name]
    """,
        places,
    )
    assert os.listdir(places["TMPDIR"]) == []


def test_a_worker_of_multiprocessing_does_not_either_and_removes_its_own(places):
    run(
        """
    import multiprocessing
    def work(entry):
        assert contents(entry.path) == FILES
        obtain(wanted(), make)
        assert len(os.listdir(os.environ["TMPDIR"])) == 2
    worker = multiprocessing.get_context("fork").Process(target=work, args=(entry,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert os.listdir(os.environ["TMPDIR"]) == [entry.path.parent.parent.name]
    """,
        places,
    )
    assert os.listdir(places["TMPDIR"]) == []


def test_what_a_killed_process_has_left_goes_and_what_a_living_one_uses_does_not(places, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", places["TMPDIR"])
    run("\nos.kill(os.getpid(), signal.SIGKILL)\n", places, status=-signal.SIGKILL)
    left = os.listdir(places["TMPDIR"])
    assert len(left) == 1
    os.mkdir(Path(places["TMPDIR"], "tdgpu-other"))
    living, release = Shared(), Shared()

    def live() -> None:
        hold = switch.temporary_directory()  # removes what is left
        living.value = 1
        wait_for(release, 1)
        assert os.path.isdir(hold.directory)

    with child(live):
        wait_for(living, 1)
        assert switch.sweep_temporary() == []
        assert left[0] not in os.listdir(places["TMPDIR"])
        assert len(os.listdir(places["TMPDIR"])) == 2
        release.value = 1
    # A child that ends by os._exit removes nothing; its lock is free.
    assert len(switch.sweep_temporary()) == 1
    assert os.listdir(places["TMPDIR"]) == ["tdgpu-other"]


def test_links_and_what_belongs_to_others_are_not_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("")
    os.symlink(tmp_path / "precious", tmp_path / "tdgpu-cache-link")
    (tmp_path / "tdgpu-cache-file").write_text("")
    (tmp_path / "tdgpu-cache-foreign").mkdir()
    (tmp_path / "tdgpu-cache-own").mkdir()
    (tmp_path / "tdgpu-cache-own" / "link").symlink_to(tmp_path / "precious")
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid)
    if os.geteuid() == 0:
        os.chown(tmp_path / "tdgpu-cache-foreign", 65534, 65534)
        assert switch.sweep_temporary() == [tmp_path / "tdgpu-cache-own"]
    else:
        switch.sweep_temporary()
        assert not (tmp_path / "tdgpu-cache-own").exists()
    assert (tmp_path / "precious" / "file").exists()
    assert (tmp_path / "tdgpu-cache-link").exists()


def test_what_cannot_be_hashed_is_computed_into_the_temporary_directory_too(tmp_path):
    with cache_at(tmp_path / "cache") as root:
        unhashable = Fingerprint("0" * 16, {}, "closure `lock` of <function f at a.py:1> cannot be hashed")
        entry = obtain(unhashable, make)
        assert contents(entry.path) == FILES
        assert not entry.path.is_relative_to(root)
        assert not root.exists()
        assert find(unhashable.digest) is None


def test_a_builder_that_fails_leaves_nothing_there_either(tmp_path):
    def fail(path: Path) -> None:
        make(path)
        raise ZeroDivisionError

    switch.disable_caching()
    try:
        assert not switch.is_caching_enabled()
        directory = switch.temporary_directory().directory
        before = os.listdir(directory)
        with pytest.raises(ZeroDivisionError):
            obtain(wanted(), fail)
        with pytest.raises(CacheError, match="no save"):
            obtain(wanted(), lambda _path: None)
        assert os.listdir(directory) == before
    finally:
        switch.enable_caching()
    assert switch.is_caching_enabled()


def test_a_full_place_for_temporary_results_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(switch, "_latest", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    switch.disable_caching()
    try:
        with pytest.raises(CacheError, match="No temporary directory") as caught:
            obtain(wanted(), never)
        assert str(tmp_path / "missing") in str(caught.value)
    finally:
        switch.enable_caching()
