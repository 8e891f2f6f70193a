"""``python -m tdgpu doctor``: what tdgpu finds on this machine, and which way a load would take.

No part of the report can stop the rest: what fails is shown as its error.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tdgpu.errors import InvalidArgument
from tdgpu.options import Options, get

__all__ = ["examine", "render"]

PURPOSES = {"codecs": "used for archives", "cupy": "used for device arrays; optional"}


def examine(device: str | None = None) -> dict[str, Any]:
    """Looks at this machine.

    Args:
        device: a device to probe, such as ``"cuda:0"``. This creates a context there. Default: no context is created
            anywhere, and the devices are only listed.

    Returns:
        One entry per section: ``versions``, ``core`` (the native core), ``driver`` (CUDA's library), ``devices`` (the
        CPU, the accelerators, and the device to probe even if torch has none such), ``pinned`` (limits on pinned host
        memory, in bytes, None where there is none), ``codecs`` (for archives), ``cupy``, and ``options``. A section
        that could not be made is ``{"error": why}``; where settings cannot be read, that is ``options``, and the
        sections that depend on them point there.

    Raises:
        InvalidArgument: torch knows no device of that name.

    >>> sorted(examine())
    ['codecs', 'core', 'cupy', 'devices', 'driver', 'options', 'pinned', 'versions']
    """
    target = None if device is None else _device(device)
    # Read once: a setting that is wrong fails every part that reads them, with the same error.
    now: Options | None = None
    try:
        now = get()
        options: Any = _options(now)
    except InvalidArgument as error:
        options = {"error": str(error)}
    hint: str | None = None
    native: dict[str, Any] = {"error": "not looked at: see options"}
    if now is not None:
        native = _guarded(lambda: _native(target))
    if "error" in native:
        hint = native["error"] if now is None else "not looked at: see core"
        native = {"core": native, "driver": {"error": hint}}
    return {
        "versions": _guarded(_versions),
        "core": native.get("core"),
        "driver": native.get("driver"),
        "devices": _devices(native.get("devices", []), target, hint),
        "pinned": _guarded(lambda: _pinned(now)),
        "codecs": _guarded(_codecs),
        "cupy": _guarded(_cupy),
        "options": options,
    }


def render(report: dict[str, Any], console: Console) -> None:
    """Prints the report of :func:`examine`, a table per section."""
    for section, content in report.items():
        title = f"{section}: {PURPOSES[section]}" if section in PURPOSES else section
        table = Table(show_header=False)
        for row in _rows(content):
            # As plain text (brackets in a message are no markup), and in full: a shortened path helps nobody.
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        console.print(Text(title if table.rows else f"{title}: none", style="bold"))
        if table.rows:
            console.print(table)


def _rows(content: Any) -> list[list[str]]:
    """A section's table: a row per entry, the entry's own fields beside its name."""
    if isinstance(content, list):
        return [[_text(value) for value in entry.values()] for entry in content]
    return [[name, _text(value)] for name, value in (content or {}).items()]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def _guarded(section: Callable[[], Any]) -> Any:
    try:
        return section()
    except Exception as error:  # the point of this module is to show what fails
        return {"error": f"{type(error).__name__}: {error}"}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("tdgpu", "torch", "tensordict", "numpy"):
        found[package] = _version(package) or "not installed"
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(name: str) -> Any:
    import torch

    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InvalidArgument(f"--device {name!r} is no device that torch knows: {error}") from None


def _native(device: Any) -> dict[str, Any]:
    from tdgpu.transfer import diagnose

    # What torch has no device for cannot be tried.
    return diagnose(device if device is not None and _has(device) else None)


def _has(device: Any) -> bool:
    """Whether torch has that accelerator here."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return False
    return (device.index or 0) < torch.accelerator.device_count()


def _devices(found: list[dict[str, Any]], target: Any, hint: str | None) -> list[dict[str, Any]]:
    """The CPU, what was found, and a row for the target if it is neither; `hint` says why nothing was looked at."""
    cpu = _row("cpu", "mapped", "files are mapped, and read when they are used")
    if target is None or target.type == "cpu":
        return [cpu, *found]
    if hint is None:
        if _has(target):
            return [cpu, *found]
        if target.type == "meta":
            hint = "no device: a load makes the structure, and reads no leaf"
        else:
            hint = f"torch has no device {str(target)!r} here"
    # The driver may count a device that this build of torch cannot use.
    others = [row for row in found if row["device"] != str(target)]
    return [cpu, *others, _row(str(target), None, hint)]


def _row(device: str, path: str | None, why: str) -> dict[str, Any]:
    # With the fields of the rows that diagnose() makes.
    return {"device": device, "name": None, "memory_operations": None, "pinned_bytes": None, "path": path, "why": why}


def _pinned(now: Options | None) -> dict[str, Any]:
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return {
        "memlock_soft": soft,
        "memlock_hard": hard,
        "cgroup_memory": _cgroup_limit(),
        "ring_bytes": "not known: see options" if now is None else now.ring_bytes,
    }


def _cgroup_limit(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """The smallest memory limit of this process's control groups, in bytes. None: no limit, or none that is visible."""
    limits = []
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # version 2: one hierarchy, every ancestor's limit counts
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        path = base / group.lstrip("/")
        for folder in (path, *path.parents):
            file = folder / name
            if file.is_file() and (text := file.read_text().strip()) != "max":
                limits.append(int(text))
            if folder == base:
                break
    # Version 1 has no word for "no limit": it says the largest number that fits.
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def _codecs() -> dict[str, str]:
    """The library that inflates each method, or what to install."""
    from tdgpu.errors import NotSupported
    from tdgpu.transfer import codecs

    found = {}
    for name in codecs.PLACES:
        try:
            found[name] = codecs.find(name)
        except NotSupported as error:
            found[name] = f"missing: {error.message}"
    return found


def _cupy() -> dict[str, str | None]:
    # By its metadata only: importing CuPy may touch the driver.
    return {package: _version(package) for package in ("cupy-cuda12x", "cupy-cuda13x", "cupy")}


def _options(now: Options) -> list[dict[str, Any]]:
    return [
        {
            "name": option.name,
            "value": getattr(now, option.name),
            "env": option.metadata["env"],
            "source": "environment" if os.environ.get(option.metadata["env"]) else "default",
        }
        for option in fields(Options)
    ]
