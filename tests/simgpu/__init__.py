"""A simulated GPU for tests: a torch device called "simgpu" over a simulated CUDA driver.

    import simgpu

    sim = simgpu.load()
    x = torch.arange(4.0, device="simgpu")
    sim.set(delay_us=2000)  # every copy waits up to 2 ms first
    ...
    assert sim.violations() == []  # what was found wrong since the last reset

Asynchronous as a GPU is: a missing wait, a missing `record_stream` or a staging slot reused too early gives wrong
bytes or a violation. Nothing here was measured on a GPU; what the driver does is what its header documents.
"""

from __future__ import annotations

import os

from .build import Unavailable
from .controls import Sim, load

__all__ = ["Sim", "Unavailable", "load", "require"]


def require() -> Sim:
    """The simulation, for a pytest test or fixture: skips with the reason where it cannot be built.

    With CI=true in the environment it raises `Unavailable` instead, so that CI never skips it unnoticed.
    """
    import pytest

    try:
        return load()
    except Unavailable as error:
        if os.environ.get("CI", "").lower() == "true":
            raise
        pytest.skip(str(error))
