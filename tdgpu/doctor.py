"""``python -m tdgpu doctor``: what tdgpu finds on this machine, and which way a load would take.

No part of the report can stop the rest: what fails is shown as its error.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import resource
import sys
import zlib
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


def examine(device: str | None = None) -> dict[str, Any]:
    """Looks at this machine.

    Args:
        device: a device to probe, such as ``"cuda:0"``. This creates a context there. Default: no context is created
            anywhere, and the devices are only listed.

    Returns:
        One entry per section: ``versions``, ``core`` (the native core), ``driver`` (CUDA's library), ``devices``,
        ``pinned`` (limits on pinned host memory, in bytes, None where there is none), ``codecs`` (for archives),
        ``cupy``, and ``options``. A section that could not be made is ``{"error": why}``.

    Raises:
        InvalidArgument: torch knows no device of that name.

    >>> sorted(examine())
    ['codecs', 'core', 'cupy', 'devices', 'driver', 'options', 'pinned', 'versions']
    """
    target = None if device is None else _device(device)
    native = _guarded(lambda: _native(target))
    failed = {"error": native["error"]} if "error" in native else None
    return {
        "versions": _guarded(_versions),
        "core": failed or native.get("core"),
        "driver": failed or native.get("driver"),
        "devices": failed or native.get("devices"),
        "pinned": _guarded(_pinned),
        "codecs": _guarded(_codecs),
        "cupy": _guarded(_cupy),
        "options": _guarded(_options),
    }


def render(report: dict[str, Any], console: Console) -> None:
    """Prints the report of :func:`examine`, a table per section."""
    for section, content in report.items():
        table = Table(title=section, title_justify="left", title_style="bold", show_header=False)
        for row in _rows(content):
            # As plain text (brackets in a message are no markup), and in full: a shortened path helps nobody.
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        console.print(table if table.rows else f"{section}: none")


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

    return diagnose(device)


def _pinned() -> dict[str, int | None]:
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return {
        "memlock_soft": soft,
        "memlock_hard": hard,
        "cgroup_memory": _cgroup_limit(),
        "ring_bytes": get().ring_bytes,
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


def _codecs() -> dict[str, str | None]:
    """What could inflate archives, by the C function or the module that is needed. None: not found."""
    return {
        "deflate (PyPI)": _exporter("deflate", "libdeflate_deflate_decompress_ex"),
        "zlib-ng (PyPI)": _exporter("zlib_ng", "zng_inflate"),
        "libdeflate (system)": _exporting("libdeflate.so.0", "libdeflate_deflate_decompress_ex"),
        "zlib (standard library)": zlib.ZLIB_RUNTIME_VERSION,
        "zstandard (PyPI)": _version("zstandard"),
        "zstd (standard library)": platform.python_version() if sys.version_info >= (3, 14) else None,
    }


def _exporter(package: str, function: str) -> str | None:
    """The extension module of the package that exports the C function."""
    spec = importlib.util.find_spec(package)  # finds it without running it
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    candidates = [str(file) for folder in folders for file in sorted(folder.glob("*.so"))]
    if spec.origin is not None and spec.origin.endswith(".so"):
        candidates.append(spec.origin)
    return next((file for file in candidates if _exporting(file, function)), None)


def _exporting(library: str, function: str) -> str | None:
    """The library, if it can be opened and exports the C function."""
    try:
        return library if hasattr(ctypes.CDLL(library), function) else None
    except OSError:
        return None


def _cupy() -> dict[str, str | None]:
    # By its metadata only: importing CuPy may touch the driver.
    return {package: _version(package) for package in ("cupy-cuda12x", "cupy-cuda13x", "cupy")}


def _options() -> list[dict[str, Any]]:
    now = get()
    return [
        {
            "name": option.name,
            "value": getattr(now, option.name),
            "env": option.metadata["env"],
            "source": "environment" if os.environ.get(option.metadata["env"]) else "default",
        }
        for option in fields(Options)
    ]
