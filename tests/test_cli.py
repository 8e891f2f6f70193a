"""The command line: exit codes, what goes to which stream, and a doctor that nothing stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tdgpu.transfer
from tdgpu import cli, demo, doctor
from tdgpu.errors import DeviceError, InvalidArgument


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A real process, as a user starts it."""
    return subprocess.run(
        [sys.executable, "-m", "tdgpu", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[1],
        check=False,
    )


@pytest.fixture
def call(monkeypatch, capsys):
    """The command line in this process: (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["tdgpu", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code or 0, *capsys.readouterr()

    return call


@pytest.mark.parametrize("arguments", [["nope"], ["demo", "--nope"], ["demo", "--device"], ["doctor", "cuda"]])
def test_wrong_usage_exits_with_2(call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert "Error" in err


@pytest.mark.parametrize("command", [[], ["demo"], ["doctor"]])
def test_help_says_what_there_is(call, command):
    code, out, _ = call(*command, "--help")
    assert code == 0
    assert ("--json" if command else "doctor") in out


@pytest.mark.parametrize("command", ["demo", "doctor"])
def test_an_unknown_device_is_an_error_without_a_traceback(call, command):
    code, out, err = call(command, "--device", "gpu:zero")
    assert (code, out) == (1, "")
    assert err.startswith("error: --device 'gpu:zero'")
    assert "Traceback" not in err


def test_an_error_prints_its_facts_on_stderr(call, monkeypatch):
    def fail(*_, **__):
        raise DeviceError("the driver refused", file="/data/x.memmap", wanted=4, found=2)

    monkeypatch.setattr(demo, "run", fail)
    assert call("demo", "--json") == (
        1,
        "",
        "error: the driver refused [file /data/x.memmap; wanted 4 bytes, found 2]\n",
    )


def test_json_is_one_object_and_the_only_output_on_stdout():
    done = run("demo", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["accuracy"] >= 0.95
    assert "training" not in done.stderr, "a progress bar where there is no terminal"


def test_the_table_has_no_escape_codes_where_there_is_no_terminal(call):
    code, out, err = call("demo", "--device", "cpu")
    assert code == 0
    assert "test accuracy" in out
    assert "\x1b" not in out + err


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_reports_every_section(call, monkeypatch):
    monkeypatch.setenv("TDGPU_RING_BYTES", "4M")
    code, out, _ = call("doctor", "--json")
    assert code == 0
    report = json.loads(out)
    failed = {name: part["error"] for name, part in report.items() if isinstance(part, dict) and part.get("error")}
    assert set(failed) <= {"driver"}, failed
    assert report["versions"]["python"] == sys.version.split()[0]
    assert report["pinned"]["ring_bytes"] == 4 << 20
    options = {option["name"]: (option["value"], option["source"]) for option in report["options"]}
    assert options["ring_bytes"] == (4 << 20, "environment")
    assert options["direct_io"] == (False, "default")


def test_doctor_prints_tables(call):
    code, out, _ = call("doctor")
    assert code == 0
    for section in ("versions", "core", "driver", "pinned", "codecs", "options"):
        assert section in out


def test_doctor_survives_a_bad_setting(call, monkeypatch):
    monkeypatch.setenv("TDGPU_THREADS", "many")
    code, out, _ = call("doctor", "--json")
    assert code == 0
    report = json.loads(out)
    assert "TDGPU_THREADS" in report["options"]["error"]
    assert report["versions"]["torch"]


def test_doctor_survives_a_missing_core(tmp_path):
    done = run("doctor", "--json", TDGPU_NATIVE_CORE=str(tmp_path / "nowhere.so"))
    assert done.returncode == 0, done.stderr
    assert "nowhere.so" in json.dumps(json.loads(done.stdout)["core"])


def test_doctor_survives_whatever_the_native_part_raises(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("in the driver")

    monkeypatch.setattr(tdgpu.transfer, "diagnose", fail)
    report = doctor.examine()
    assert report["core"] == report["devices"] == {"error": "ZeroDivisionError: in the driver"}
    assert report["codecs"]["zlib (standard library)"]


def test_doctor_probes_only_the_device_it_is_asked_about(monkeypatch):
    asked = []

    def diagnose(device=None):
        asked.append(device)
        return {}

    monkeypatch.setattr(tdgpu.transfer, "diagnose", diagnose)
    doctor.examine()
    doctor.examine("cpu")
    assert [str(device) for device in asked] == ["None", "cpu"]
    with pytest.raises(InvalidArgument, match="gpu:zero"):
        doctor.examine("gpu:zero")


def test_a_message_with_brackets_is_shown_as_it_is(capsys):
    from rich.console import Console

    path = "/data/" + "long/" * 40 + "[red].so"
    doctor.render({"core": {"path": path}, "devices": []}, Console(width=60))
    out = capsys.readouterr().out
    assert path in "".join(out.split("\n")).replace("│", "").replace("path", "").replace(" ", "")
    assert "devices: none" in out


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b", {"a/memory.max": "max", "a/b/memory.max": "1000"}, 1000),
        ("0::/a/b", {"a/memory.max": "500", "a/b/memory.max": "1000"}, 500),
        ("0::/a", {"a/memory.max": "max"}, None),
        ("0::/", {}, None),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "2000"}, 2000),
        ("4:cpu,memory:/a", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_the_memory_limit_is_the_smallest_of_the_control_groups(tmp_path, membership, files, limit):
    (tmp_path / "cgroup").write_text(membership + "\n")
    for name, text in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert doctor._cgroup_limit(tmp_path / "fs", tmp_path / "cgroup") == limit
