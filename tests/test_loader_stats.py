"""What DeviceLoader says about where the time goes: the copies, by the device's clock."""

from __future__ import annotations

import gc
import pickle
import time
from pathlib import Path

import pytest
import torch
from loaders import all_numbers, save_rows, wait_until
from test_load_device import machine

import tdgpu
from tdgpu import DeviceLoader

COUNT = 240
DELAY = 0.004


@pytest.fixture
def save(tmp_path: Path) -> Path:
    return save_rows(tmp_path / "save", COUNT)


@pytest.mark.parametrize("road", ["gated", "small chunks", "host road wanted", "generic road wanted"])
def test_copies_are_timed_on_every_road(sim, save, road):
    with machine(sim, road):
        loader = DeviceLoader(save, 24, device="simgpu", resident=False)
        list(loader)
        before, copies = loader.stats(), sim.stat("copies")
        sim.set(delay_us=int(DELAY * 1e6), fixed_delay=1)
        list(loader)
        now = loader.stats()  # at once: the last copy is among them
        seconds, copies = now.copying - before.copying, sim.stat("copies") - copies
        assert copies >= 2 and copies * DELAY <= seconds < copies * 2 * DELAY + 0.1
        assert f"copying {now.copying:.3f} s" in str(now)
        loader.close()


def test_what_a_copy_waits_for_is_not_copying(sim, save):
    """It waits for the stream that its memory was allocated on, for its rows, and for a place in the ring."""
    loader = DeviceLoader(save, 24, device="simgpu", resident=False)
    list(loader)
    busy = torch.empty(1000, device="simgpu")
    sim.set(delay_us=int(DELAY * 1e6), fixed_delay=1)
    before, begin = loader.stats().copying, time.perf_counter()
    for _ in range(60):
        busy.fill_(1)
    copies = sim.stat("copies")
    list(loader)
    copying, copies = loader.stats().copying - before, sim.stat("copies") - copies
    assert time.perf_counter() - begin > 60 * DELAY > 20 * DELAY + copies * DELAY > copying


def test_asking_does_not_wait_while_a_loop_runs(sim, save):
    loader = DeviceLoader(save, 100, device="simgpu", resident=False, prefetch_factor=1)
    list(loader)
    before = loader.stats().copying
    iterator = iter(loader)
    sim.set(delay_us=100_000, fixed_delay=1)
    batches = [next(iterator)]
    begin = time.perf_counter()
    assert loader.stats().copying == before
    assert time.perf_counter() - begin < 0.05
    wait_until(lambda: loader.stats().copying >= before + 0.1)
    batches += iterator
    assert loader.stats().copying >= before + 0.3
    sim.set(delay_us=0)
    assert all_numbers(batches) == list(range(COUNT))


def test_a_loop_that_was_left_is_waited_for_too_but_not_for_ever(sim, save, monkeypatch):
    loader = DeviceLoader(save, 100, device="simgpu", resident=False)
    list(loader)
    before = loader.stats().copying
    sim.set(delay_us=100_000, fixed_delay=1)
    next(iter(loader))
    assert loader.stats().copying >= before + 0.1
    sim.set(delay_us=400_000)
    monkeypatch.setattr("tdgpu.data.loader.LAST_COPIES_SECONDS", 0.1)
    batch = next(iter(loader))
    begin, before = time.perf_counter(), loader.stats().copying
    assert 0.1 <= time.perf_counter() - begin < 0.3
    sim.set(delay_us=0)
    batch.cpu()
    assert loader.stats().copying >= before + 0.4


def test_nothing_is_kept_of_copies_that_are_over(sim, save):
    """Neither events nor what they are asked by, whether or not anybody asks."""
    loader = DeviceLoader(save, 24, device="simgpu", resident=False)
    for _ in range(3):
        list(loader)
    made = sim.stat("calls:cuEventCreate")
    for _ in range(10):
        list(loader)
        assert len(loader._watch._copies) <= 4
    loader.stats()
    assert not loader._watch._copies
    # One more now and then: as many as were under way at a time.
    assert sim.stat("calls:cuEventCreate") - made <= 8
    loader.close()
    gc.collect()
    assert sim.violations() == []


def test_only_batches_are_timed(sim, save):
    tdgpu.load_memmap(save, device="simgpu")
    assert not sim.stat("calls:cuEventElapsedTime")
    loader = DeviceLoader(save, 24, device="simgpu", resident=True)
    list(loader)
    assert loader.stats().copying == 0 and not sim.stat("calls:cuEventElapsedTime")
    loader = DeviceLoader(save, 24)
    list(loader)
    assert loader.stats().copying == 0
    loader = DeviceLoader(save, 24, device="simgpu", resident=False)
    list(loader)
    assert loader.stats().copying > 0 and sim.stat("calls:cuEventElapsedTime")
    assert pickle.loads(pickle.dumps(loader)).stats().copying == 0


def test_a_device_that_breaks_down_tells_no_times(sim, save):
    loader = DeviceLoader(save, 24, device="simgpu", resident=False)
    list(loader)
    before = loader.stats().copying
    sim.fail("cuEventElapsedTime", 0, 700)
    iterator = iter(loader)
    next(iterator)
    torch.accelerator.synchronize()
    assert loader.stats().copying == before and not loader._watch._copies
