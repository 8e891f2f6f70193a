"""The module `torch.simgpu`, as `torch.cuda` is for CUDA: what torch's generic code looks for in it, and no more."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_in_forked_child = False


def register_device_module(device_count: Callable[[], int]) -> None:
    module = types.ModuleType("torch.simgpu")
    contents: dict[str, Any] = {
        "Event": torch.Event,
        "Stream": torch.Stream,
        "_is_in_bad_fork": lambda: _in_forked_child,
        "current_device": torch.accelerator.current_device_index,
        "current_stream": torch.accelerator.current_stream,
        "device_count": device_count,
        "device": _device,
        "empty_cache": torch.accelerator.empty_cache,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_available": lambda: device_count() > 0,
        "is_initialized": lambda: True,
        # Random numbers are drawn on the host, from torch's default generator.
        "manual_seed_all": lambda seed: None,
        "set_device": torch.accelerator.set_device_index,
        "set_stream": torch.accelerator.set_stream,
        "synchronize": torch.accelerator.synchronize,
    }
    for name, value in contents.items():
        setattr(module, name, value)
    torch._register_device_module("simgpu", module)
    os.register_at_fork(after_in_child=_mark_forked)


@contextlib.contextmanager
def _device(device: torch.device | str | int) -> Iterator[None]:
    """Makes the device the current one, as `torch.cuda.device` does."""
    index = device if isinstance(device, int) else torch.device(device).index
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(before if index is None else index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _mark_forked() -> None:
    global _in_forked_child
    _in_forked_child = True
