"""The examples run, learn, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import in_process, in_ranks

import tdgpu
from tdgpu import MemmapDataset

EXAMPLES = Path(__file__).parents[1] / "examples"


# One thread each: they are small, and other tests may run meanwhile.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(example: str, *arguments: str | Path) -> str:
    """What an example prints, run with these arguments."""
    code = """
        import runpy, sys
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    """
    return in_process(code, EXAMPLES / example, *arguments, timeout=240, **ENVIRONMENT)  # type: ignore[arg-type]


def found(pattern: str, output: str) -> list[float]:
    numbers = [float(number.replace(",", "")) for number in re.findall(pattern, output)]
    assert numbers, output
    return numbers


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_example_says_what_it_is(example):
    output = run(example, "--help")
    assert f"examples/{example}\n" in output  # how to run it
    assert "--seed" in output


def test_images(tmp_path):
    small = ("--images", "300", "--size", "64", "--crop", "56", "--epochs", "6", "--directory", tmp_path / "images")
    output = run("images.py", *small)
    assert "300 images" in output
    assert "240 to train with, 60 to test" in output
    losses = found(r"loss ([\d.]+), [\d,]+ rows/s", output)
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 1.5
    assert found(r"([\d.]+)% of the test images", output)[0] > 50  # by chance: 12.5
    assert f"{6 * 7} batches, {6 * 7 * 32} rows" in output  # full ones only
    # The save is there already; it is taken as it is.
    assert "300 images" in run("images.py", *small, "--images", "7", "--epochs", "1")


def test_replay(tmp_path):
    output = run("replay.py", "--rounds", "6", "--batches", "20", "--directory", tmp_path / "buffer")
    rows = found(r"round \d+: ([\d,]+) rows", output)
    assert len(rows) == 6
    assert rows == sorted(rows)
    assert rows[-1] > rows[0]  # appended while it learned
    assert all(number % 1600 == 0 for number in rows)  # whole rollouts
    losses = found(r"loss ([\d.]+)", output)
    assert losses[-1] < losses[0] / 2
    assert f"{6 * 20} batches, {6 * 20 * 128} rows" in output
    assert found(r"committed ([\d,]+) rows", output) == [len(MemmapDataset(tmp_path / "buffer"))]


# 31 steps an epoch of the 2001 rows, and two epochs.
SMALL = ("--rows", "2001", "--batch-size", "32", "--test-rows", "333", "--stop-after")


@pytest.fixture(scope="module")
def uninterrupted() -> str:
    paths = os.pathsep.join([str(Path(tdgpu.__file__).parents[1]), *sys.path])
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [*torchrun, EXAMPLES / "distributed.py", *SMALL, "0"],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_distributed(uninterrupted):
    assert "goes on" not in uninterrupted
    assert "62 batches, " in uninterrupted
    ((right, rows),) = re.findall(r"(\d+) of (\d+) test rows", uninterrupted)
    assert int(rows) == 333  # each once
    assert int(right) / int(rows) > 0.8


@pytest.mark.parametrize("stop_after", [20, 31], ids=["within an epoch", "at its end"])
def test_distributed_goes_on_as_if_nothing_had_happened(uninterrupted, stop_after):
    output = in_ranks(2, EXAMPLES / "distributed.py", *SMALL, stop_after)
    assert f"goes on in epoch 0, at row {stop_after * 64:,}" in output
    assert f"{62 - stop_after} batches, " in output
    assert output.splitlines()[-1] == uninterrupted.splitlines()[-1]  # the sum of all weights, too
