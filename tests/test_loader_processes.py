"""Loaders in whole processes: forked, spawned, interrupted, and at exit."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path

import pytest
from forked import in_process, run_process
from loaders import all_numbers, numbers, save_rows

from tdgpu import DeviceLoader

HERE = Path(__file__).parent


@pytest.fixture
def save(tmp_path: Path) -> Path:
    return save_rows(tmp_path / "save", 200)


def test_a_copy_of_a_loader_in_another_process_is_a_loader_of_its_own(save):
    loader = DeviceLoader(save, 50, shuffle=True, seed=5)
    iterator = iter(loader)
    numbers(next(iterator))
    other = pickle.loads(pickle.dumps(loader))
    assert other.state_dict() == loader.state_dict()
    assert all_numbers(other) == all_numbers(loader)
    assert len(all_numbers(iterator)) == 150
    assert other._fetcher is not loader._fetcher


# Parent and child go on; the child, without a device, is told so. Both end at once, in the middle of an epoch.
FORK_AND_EXIT = """
assert right()
iterator = iter(loader)
first = numbers(next(iterator))
child = os.fork()
if child == 0:
    try:
        next(iterator)
    except errors.ForkError as error:
        assert "parent" in str(error)
    else:
        os._exit(3)
    del iterator
    gc.collect()
    if device:
        try:
            next(iter(loader))
        except errors.ForkError as error:
            assert "spawn" in str(error)
        else:
            os._exit(4)
        loader = DeviceLoader(dataset, 10)
    for _ in range(2):
        assert right()
    assert len(native_threads()) > 0
    rest = iter(loader)
    next(rest)
    sys.exit(0)  # handlers of exit run, with batches under way
status = os.waitpid(child, 0)[1]
rest = all_numbers(iterator)
assert right() and first + rest == list(range(200))
iterator = iter(loader)
next(iterator)
print(status, bad(), flush=True)
"""
# Nothing hangs, no batch is wrong, and threads and descriptors are given back.
CTRL_C = """
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as which one comes again that came during a finalizer
threads, files = len(native_threads()), descriptors()
random.seed(1)
interrupted = done = 0
end = time.monotonic() + 3
loop = iterator = batch = None
while time.monotonic() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.random() * random.choice([0.0005, 0.002, 0.02]))
        loop = DeviceLoader(dataset, 10, device=device) if random.random() < 0.2 else loader
        iterator = iter(loop)
        for batch in iterator:
            pass
        if random.random() < 0.2:
            loop.close()
        signal.setitimer(signal.ITIMER_REAL, 0)
        done += 1
    except KeyboardInterrupt:
        interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if batch is not None:
        numbers(batch)
    loop = batch = iterator = None
gc.collect()
assert interrupted > 50, (interrupted, done)
assert right()
loader.close()
print(len(native_threads()) <= threads, descriptors() <= files, bad(), flush=True)
"""
SETUP = """
import gc, os, random, signal, sys, threading, time
import torch
torch.set_num_threads(1)
from loaders import *
from tdgpu import DeviceLoader, MemmapDataset, errors
dataset = MemmapDataset(sys.argv[1])
loader = DeviceLoader(dataset, 10, device=device, prefetch_factor=4)
def right():
    return all_numbers(loader) == list(range(200))
assert right()
"""


def test_fork_and_exit_on_the_cpu(save):
    assert in_process("device = None\nbad = list\n" + SETUP + FORK_AND_EXIT, save) == "0 []\n"


def test_ctrl_c_at_any_moment_on_the_cpu(save):
    # An interrupt within a finalizer is printed by Python and goes no further: stderr may tell of one.
    status, out, err = run_process("device = None\nbad = list\n" + SETUP + CTRL_C, save)
    assert (status, out) == (0, "True True []\n"), err


def test_ctrl_c_fork_and_exit_on_a_device(save):
    code = """
import simgpu
sim = simgpu.load()
sim.set(delay_us=200)
device, bad = "simgpu", sim.violations
"""
    status, out, err = run_process(code + SETUP + CTRL_C + FORK_AND_EXIT, save, simulated=True)
    assert (status, out) == (0, "True True []\n0 []\n"), out + err


def read_all(loader: DeviceLoader, out: Path) -> None:
    out.write_text(str(all_numbers(loader) == list(range(200))))


def test_a_spawned_process_takes_a_loader_along(save, tmp_path):
    loader = DeviceLoader(save, 30)
    next(iter(loader))
    process = multiprocessing.get_context("spawn").Process(target=read_all, args=(loader, tmp_path / "out"))
    process.start()
    assert all_numbers(loader) == list(range(200))
    process.join(50)
    assert process.exitcode == 0 and (tmp_path / "out").read_text() == "True"
