"""How figures are taken: alternating runs, medians, one row per case."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Row:
    """One line of the table: ours against a reference (another program, or a bound), and the goal of their ratio."""

    case: str
    unit: str
    ours: float
    reference: float
    reference_is: str
    goal: float | None  # None: there is none, the figure is for information
    at_least: bool  # the ratio must reach the goal; otherwise it must not pass it
    checked: str  # what was asserted

    @property
    def ratio(self) -> float:
        return self.ours / self.reference

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.ratio >= self.goal if self.at_least else self.ratio <= self.goal

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


def seconds(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def alternate(a: Callable[[], object], b: Callable[[], object], times: int) -> tuple[float, float]:
    """Median seconds of a and b, run in turns (a b a b ...) so that a slow spell of the machine meets both."""
    a(), b()  # warm: the page cache, lazily made objects
    taken: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    gc.disable()
    try:
        for _ in range(times):
            taken[0].append(seconds(a))
            taken[1].append(seconds(b))
    finally:
        gc.enable()
    return statistics.median(taken[0]), statistics.median(taken[1])
