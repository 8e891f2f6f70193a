"""What a load to a device would do here, and why: the facts behind ``python -m tdgpu doctor``."""

from __future__ import annotations

from typing import Any

import torch

from tdgpu.errors import TdgpuError
from tdgpu.transfer import library, registry, streams
from tdgpu.transfer.engine import DeviceEngine


def diagnose(device: torch.device | None = None) -> dict[str, Any]:
    """Facts about the native core, the drivers and the devices.

    Args:
        device: the device to try; no context is made on any other, and on none if it is None.

    Returns:
        ``core``: ``path``, ``version``, ``error``. ``driver``: ``library``, ``version``, ``error``. ``devices``: one
        dictionary each with ``device``, ``name``, ``memory_operations``, ``pinned_bytes``, ``path``, ``why``; what only
        trying could tell is None.
    """
    found: dict[str, Any] = {"core": _core(), "driver": _driver(), "devices": []}
    for candidate in _devices(found["driver"]):
        tried = device is not None and candidate == _with_index(device)
        found["devices"].append(_try(candidate) if tried else _untried(candidate))
    return found


def _core() -> dict[str, Any]:
    try:
        loaded = library.core()
        return {"path": str(library.library_path()), "version": loaded.tdgpu_version().decode(), "error": None}
    except TdgpuError as error:
        return {"path": error.file, "version": None, "error": str(error)}


def _driver() -> dict[str, Any]:
    path = registry.driver_path("cuda")
    facts: dict[str, Any] = {"library": path, "version": None, "devices": 0, "error": None}
    if path is None:
        facts["error"] = "this build of torch is not for CUDA"
        return facts
    try:
        facts["version"], facts["devices"] = registry.driver(path).facts()
    except TdgpuError as error:
        facts["error"] = str(error)
    return facts


def _devices(driver: dict[str, Any]) -> list[torch.device]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return [torch.device("cuda", index) for index in range(driver["devices"])]
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def _with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device(device.type, streams.current_index(device.type))


def _name(device: torch.device) -> str | None:
    path = registry.driver_path(device.type)
    try:
        return None if path is None else registry.driver(path).device_name(device.index)
    except TdgpuError:
        return None


def _untried(device: torch.device) -> dict[str, Any]:
    return {
        "device": str(device), "name": _name(device), "memory_operations": None, "pinned_bytes": None, "path": None,
        "why": f"not tried: --device {device} tries it",
    }  # fmt: skip


def _try(device: torch.device) -> dict[str, Any]:
    facts = {**_untried(device), "why": None}
    try:
        engine = registry.engine_for(device)
        if isinstance(engine, DeviceEngine):
            facts["memory_operations"] = not engine.native.why_host
            facts["pinned_bytes"] = engine.pinned_bytes
            facts["path"] = engine.road()
            facts["why"] = engine.native.why_host or "the driver's stream memory operations work and the ring is pinned"
            if facts["path"] == "host" and not engine.native.why_host:
                facts["why"] = "TDGPU_PATH=host"
        else:
            facts["path"] = "generic"
            facts["pinned_bytes"] = engine.pinned_bytes
            has_table = registry.driver_path(device.type) is not None
            facts["why"] = "TDGPU_PATH=generic" if has_table else f"devices of type {device.type} have no driver table"
    except TdgpuError as error:
        facts["why"] = str(error)
    return facts
