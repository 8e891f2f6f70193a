"""The command line: exit codes, what goes to which stream, and a doctor that nothing stops."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import in_process, run_process
from tensordict import TensorDict

import tdgpu.transfer
from tdgpu import cli, demo, doctor
from tdgpu.errors import DeviceError, InvalidArgument

ROOT = Path(__file__).parents[1]

# What "python -m tdgpu" does, in a process of its own.
RUN = "import runpy; runpy.run_module('tdgpu', run_name='__main__', alter_sys=True)"


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


def test_the_demo_says_plainly_that_a_device_cannot_be_used(call, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("Torch not compiled with CUDA enabled\nand a second line")

    monkeypatch.setattr(torch, "empty", refuse)
    assert call("demo", "--device", "cuda") == (
        1,
        "",
        "error: The device 'cuda' cannot be used here: Torch not compiled with CUDA enabled\n",
    )


@pytest.mark.parametrize("arguments", [["--device", "meta"], ["--device", "cpu", "--save", ""]])
def test_the_demo_refuses_what_it_cannot_work_with(call, arguments):
    code, out, err = call("demo", *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {arguments[-2]} ")


def test_a_directory_that_cannot_be_made_is_an_error_without_a_traceback(call, tmp_path):
    (tmp_path / "file").write_text("")
    save = str(tmp_path / "file" / "save")
    code, out, err = call("demo", "--device", "cpu", "--save", save)
    assert (code, out) == (1, "")
    assert err == f"error: Not a directory: {save}\n"


def test_an_error_of_the_system_that_names_no_file_keeps_its_traceback(monkeypatch):
    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(demo, "run", fail)
    monkeypatch.setattr(sys, "argv", ["tdgpu", "demo"])
    with pytest.raises(OSError, match="Input/output error"):
        cli.main()


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
    command = [sys.executable, "-m", "tdgpu", "demo", "--device", "cpu", "--json"]  # as a user starts it
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
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


def test_doctor_says_once_that_a_setting_is_bad_and_shows_the_rest(call, monkeypatch):
    monkeypatch.setenv("TDGPU_THREADS", "many")
    code, out, err = call("doctor", "--json")
    assert (code, err) == (1, "")
    assert out.count("many") == 1
    report = json.loads(out)
    assert "TDGPU_THREADS" in report["options"]["error"]
    assert report["core"] == report["driver"] == {"error": "not looked at: see options"}
    assert report["versions"]["torch"]
    assert report["pinned"]["memlock_soft"] == doctor._pinned(None)["memlock_soft"]
    assert [row["device"] for row in report["devices"]] == ["cpu"]

    code, out, err = call("doctor", "--device", "cuda")
    assert (code, err, out.count("many")) == (1, "", 1)
    assert re.search(r"cuda .* not looked at: see options", out)


def test_doctor_survives_a_missing_core(tmp_path):
    out = in_process(RUN, "doctor", "--json", TDGPU_NATIVE_CORE=str(tmp_path / "nowhere.so"))
    assert "nowhere.so" in json.dumps(json.loads(out)["core"])


def test_doctor_survives_whatever_the_native_part_raises(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("in the driver")

    monkeypatch.setattr(tdgpu.transfer, "diagnose", fail)
    report = doctor.examine()
    assert report["core"] == {"error": "ZeroDivisionError: in the driver"}
    assert report["driver"] == {"error": "not looked at: see core"}
    assert [row["device"] for row in report["devices"]] == ["cpu"]
    assert set(report["codecs"]) == {"error"} or report["codecs"]["libdeflate"]


def test_doctor_probes_only_the_device_it_is_asked_about(monkeypatch):
    asked = []

    def diagnose(device=None):
        asked.append(device)
        return {}

    monkeypatch.setattr(tdgpu.transfer, "diagnose", diagnose)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for device in (None, "cpu", "cuda", "cuda:1", "cuda:2", "xpu", "meta"):
        doctor.examine(device)
    assert [str(device) for device in asked] == ["None", "None", "cuda", "cuda:1", "None", "None", "None"]
    with pytest.raises(InvalidArgument, match="gpu:zero"):
        doctor.examine("gpu:zero")


@pytest.mark.parametrize("arguments", [[], ["--device", "cpu"]])
def test_doctor_always_has_a_row_for_the_cpu(call, arguments):
    code, out, _ = call("doctor", "--json", *arguments)
    assert code == 0
    (row,) = (row for row in json.loads(out)["devices"] if row["device"] == "cpu")
    assert (row["path"], row["why"]) == ("mapped", "files are mapped, and read when they are used")
    assert re.search(r"cpu .* mapped .* files are mapped, and read when they are used", call("doctor", *arguments)[1])


def test_doctor_says_that_torch_has_no_such_device(monkeypatch):
    # The driver counts a device, and this build of torch is without CUDA.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    listed = doctor._row("cuda:0", None, "not tried")
    monkeypatch.setattr(tdgpu.transfer, "diagnose", lambda _: {"core": {}, "driver": {}, "devices": [dict(listed)]})
    for device, others in (("cuda:0", []), ("xpu", ["cuda:0"]), ("meta", ["cuda:0"])):
        rows = doctor.examine(device)["devices"]
        assert [row["device"] for row in rows] == ["cpu", *others, device]
        assert all(row.keys() == listed.keys() for row in rows)
        assert ("structure" if device == "meta" else f"torch has no device '{device}' here") in rows[-1]["why"]


def test_doctor_says_what_the_optional_packages_are_for(call):
    _, out, _ = call("doctor")
    assert "codecs: used for archives\n" in out
    assert "cupy: used for device arrays; optional\n" in out


def test_a_long_path_is_in_one_piece_where_there_is_no_terminal(call, monkeypatch, tmp_path):
    library = str(tmp_path / ("long-" * 30) / ("[x] longer-" * 15) / "libcuda.so")
    monkeypatch.setenv("TDGPU_CUDA_DRIVER", library)
    code, out, _ = call("doctor")
    assert code == 0
    assert [line for line in out.splitlines() if "TDGPU_CUDA_DRIVER" in line and library in line]
    save = str(tmp_path / ("long-" * 30) / "save")
    _, out, _ = call("demo", "--device", "cpu", "--save", save)
    assert save in out


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


def test_an_output_that_is_full_is_said_in_one_line(tmp_path):
    TensorDict(a=torch.zeros(3)).memmap(tmp_path / "save")
    to_full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    status, _, err = run_process(to_full + RUN, "verify", tmp_path / "save")
    assert status != 0 and "No space left" in err and "Traceback" not in err
