"""Which device is served how, and the engines there are.

Devices with a driver table (CUDA's, and those that ``register_driver`` names) get a :class:`DeviceEngine`, other
accelerators a :class:`GenericEngine`. Engines are made on first use, never at import, and kept for the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tdgpu.errors import DeviceError, ForkError
from tdgpu.layout.tree import Leaf
from tdgpu.options import get as get_options
from tdgpu.transfer import library, streams
from tdgpu.transfer.base import Transfer
from tdgpu.transfer.engine import DeviceEngine
from tdgpu.transfer.generic import GenericEngine
from tdgpu.transfer.plan import LoadPlan

# How long the exit of the process waits for copies under way before it leaves their memory to the system.
EXIT_MS = 500


class _Registry:
    """The engines of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.drivers: dict[str, library.Driver] = {}
        self.engines: dict[tuple[torch.device, bool], DeviceEngine | GenericEngine] = {}


_driver_paths: dict[str, str] = {}
_registry = _Registry()
_lost_in_fork = False


def register_driver(device_type: str, path: str) -> None:
    """Says that devices of a torch type are driven by a library that has the CUDA driver's functions."""
    _driver_paths[device_type] = path


def driver_path(device_type: str) -> str | None:
    """The driver library for a device type, or None where there is none (ROCm calls itself "cuda", too)."""
    if device_type in _driver_paths:
        return _driver_paths[device_type]
    if device_type == "cuda" and torch.version.hip is None:
        return get_options().cuda_driver or "libcuda.so.1"
    return None


def driver(path: str) -> library.Driver:
    """The driver library, opened on first use.

    Raises:
        DeviceError: it cannot be opened.
    """
    with _registry.lock:
        if path not in _registry.drivers:
            _registry.drivers[path] = library.Driver(path)
        return _registry.drivers[path]


def chosen_driver(device: torch.device) -> str | None:
    """The driver library through which the options have bytes of a device moved, or None: by torch alone.

    Raises:
        ForkError: the process was forked after an accelerator was used.
        DeviceError: the options insist on a driver, and there is none.
    """
    if _lost_in_fork:
        raise ForkError(
            "This process was forked from one in which tdgpu had used an accelerator, so it cannot move bytes to or"
            f" from {device}. Start workers with the spawn or forkserver method, or stay on the CPU."
        )
    wanted = get_options().path
    path = None if wanted == "generic" else driver_path(device.type)
    if path is None and wanted in ("gated", "host"):
        raise DeviceError(f"TDGPU_PATH={wanted}, but there is no driver table for devices of type {device.type}.")
    return path


def engine_for(device: torch.device) -> DeviceEngine | GenericEngine:
    """The engine that the options choose for a device with an index. Touches no other device.

    Raises:
        ForkError: the process was forked after an engine was made.
        DeviceError: the device cannot be used, or the options insist on a way that it does not have.
    """
    path = chosen_driver(device)
    key = (device, path is not None)
    engine = _registry.engines.get(key)
    if engine is None:
        streams.check_usable(device)
        table = None if path is None else driver(path)
        with _registry.lock:
            engine = _registry.engines.get(key)
            if engine is None:
                engine = GenericEngine(device) if table is None else DeviceEngine(table, device)
                _registry.engines[key] = engine
        # Only now: a warning may be an error, and the engine must not be made again then.
        warn_about_pinned(engine.pinned_bytes, engine.settings.ring_bytes, engine.device)
    _warn_of_late_settings(engine)
    return engine


def warn_about_pinned(got: int, wanted: int, device: torch.device) -> None:
    """One warning, in words that do not send the user to look at the device's memory."""
    if got < wanted - wanted % 4096:
        warnings.warn(
            f"Only {got} of {wanted} bytes of pinned host memory could be had for staging copies of {device}:"
            f" they {'use a smaller ring' if got else 'go through pageable memory'} and may be slower. Look at the"
            " limits on locked memory (ulimit -l, the container's) or set TDGPU_RING_BYTES.",
            RuntimeWarning,
            stacklevel=2,
        )


def _warn_of_late_settings(engine: DeviceEngine | GenericEngine) -> None:
    now, then = get_options(), engine.settings
    for name in ("ring_bytes", "threads"):
        if getattr(now, name) != getattr(then, name):
            warnings.warn(
                f"The option {name}={getattr(now, name)} has no effect: transfers to {engine.device} were set up with"
                f" {name}={getattr(then, name)} when it was first used.",
                RuntimeWarning,
                stacklevel=2,
            )


def start(
    save: str,
    leaves: Sequence[Leaf],
    device: torch.device,
    *,
    early: bool,
    verify: bool = False,
    most_threads: int = 0,
) -> Transfer:
    """Starts moving leaves to an accelerator, and returns while the bytes are on their way.

    Args:
        save: the save's path, for messages.
        leaves: leaves with elements, whose sizes were checked.
        device: the accelerator, with its index.
        early: whether leaves may be waited for one by one; the current stream is not touched then.
        verify: whether the CRC-32 of an archive's stored entries is checked, too.
        most_threads: how many of the device's reader threads may work on this load; 0 for all.

    Raises:
        LoadError: an earlier load to the device failed after its call had returned; or this one, already.
        DeviceError: the device refused.
    """
    engine = engine_for(device)
    engine.watcher.raise_pending()
    return engine.start(
        save,
        lambda: engine.make_plan(leaves, early=early, verify=verify, most_threads=most_threads),
        early=early,
    )


def start_plan(save: str, plan: Callable[[], LoadPlan], device: torch.device) -> Transfer:
    """Starts what a plan says, whose destinations are on an accelerator; the current stream waits for nothing.

    Its copies are timed.

    Args:
        save: the save's path, for messages.
        plan: allocates the destinations, on the current stream. Its chunks have at most :func:`most_chunk_bytes`.
        device: the accelerator, with its index.

    Raises:
        LoadError, DeviceError: as of :func:`start`.
    """
    engine = engine_for(device)
    engine.watcher.raise_pending()
    return engine.start(save, plan, early=True, timed=True)


def most_chunk_bytes(device: torch.device) -> int:
    """Bytes of the largest chunk of which several fit an accelerator's ring."""
    return engine_for(device).ring_bytes // 4


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Waits on the host until every load to an accelerator is over, and raises what failed.

    Args:
        device: only that device's loads; None for all.

    Raises:
        LoadError: a load failed, and no call has raised that yet.

    >>> synchronize()
    """
    wanted = None if device is None else torch.device(device)
    with _registry.lock:
        engines = list(_registry.engines.items())
    for (has, _), engine in engines:
        if wanted is None or (has.type == wanted.type and wanted.index in (None, has.index)):
            engine.watcher.synchronize()


def close_all() -> None:
    """Ends every engine; the next load makes new ones. Loads under way end without their bytes."""
    for engine in _registry.engines.values():
        engine.close(EXIT_MS)
    _registry.engines.clear()


def _after_fork_in_child() -> None:
    # The engines' threads do not exist here, and their locks may be held for ever. Nothing of them is touched or freed.
    global _registry, _lost_in_fork
    _lost_in_fork = _lost_in_fork or bool(_registry.engines or _registry.drivers)
    _kept.append(_registry)
    _registry = _Registry()


_kept: list[Any] = []

os.register_at_fork(after_in_child=_after_fork_in_child)
# Before the interpreter takes threads and modules apart, and before the driver's own exit.
atexit.register(close_all)
