"""Devices for the tests: a CUDA device where there is one, else the simulated one.

A test that takes ``device`` runs on either (and is marked ``gpu``); one that takes ``sim`` needs the simulation's
controls. Both end by asserting that the simulation saw nothing wrong. ``TDGPU_TEST_DEVICE=simgpu`` insists on the
simulation.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import simgpu

from tdgpu.transfer import native, outgoing, outlets, registry

ON_CUDA = os.environ.get("TDGPU_TEST_DEVICE", "cuda") == "cuda" and torch.cuda.is_available()

if not ON_CUDA:
    # Before any test: torch's autograd does not take to a device that comes after the first backward().
    with contextlib.suppress(simgpu.Unavailable):  # the tests that need it skip then, or fail in CI
        simgpu.load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "device" in names and "sim" not in names:
            item.add_marker(pytest.mark.gpu)


def pytest_collection_finish() -> None:
    # What was imported stays, and need not be looked through whenever a test collects garbage.
    gc.collect()
    gc.freeze()


def close_all() -> None:
    """Ends engines and outlets: new ones see the simulation's settings."""
    outlets.close_idle()
    registry.close_all()


@pytest.fixture
def sim() -> Iterator[simgpu.Sim]:
    """The simulated device with random delays, and new engines."""
    if ON_CUDA:
        pytest.skip("needs the simulated device; set TDGPU_TEST_DEVICE=simgpu")
    simulation = simgpu.require()
    close_all()
    simulation.reset()
    simulation.set(delay_us=300)
    yield simulation
    close_all()
    found = simulation.violations()
    simulation.io.reset()
    simulation.reset()
    assert found == []


@pytest.fixture
def faulty(sim: simgpu.Sim) -> Iterator[simgpu.Sim]:
    """The simulated device, while reads and writes go through the simulation's pread and pwritev."""
    sim.io.reset()
    native.set_pread(sim.io.pread_address)
    outgoing.set_pwritev(sim.io.pwritev_address)
    yield sim
    native.set_pread(None)
    outgoing.set_pwritev(None)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """An accelerator: CUDA, or the simulation with random delays."""
    if ON_CUDA:
        return torch.device("cuda", torch.cuda.current_device())
    request.getfixturevalue("sim")
    return torch.device("simgpu", 0)


@pytest.fixture(params=["cpu", "simgpu"])
def where(request: pytest.FixtureRequest) -> str | None:
    """Where batches go: to the CPU, or the simulated device."""
    if request.param == "cpu":
        return None
    request.getfixturevalue("sim")
    return request.param
