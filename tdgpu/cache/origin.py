"""Where code comes from: a library, which name and version stand for, or the user, whose code may change any time."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import site
import sys
import sysconfig
from types import ModuleType
from typing import Any

from tdgpu.cache.encode import digest

__all__ = ["module_of", "release_of", "release_of_file"]

#: Packages that count as libraries wherever they lie, as in a checkout.
_OURS = frozenset({"tdgpu"})


def module_of(namespace: dict[str, Any]) -> ModuleType | None:
    """The module whose globals these are."""
    module = sys.modules.get(namespace.get("__name__", ""))
    return module if getattr(module, "__dict__", None) is namespace else None


def release_of(name: str) -> str | None:
    """What stands for the code of a module of that name; None if that is the user's.

    The standard library is known by Python's minor version; an installed package by its version and by the digests of
    its Python files in the record of its installation: a package that is installed again with changes is another one,
    whatever version it claims.

    >>> release_of("json.decoder") == f"python {sys.version_info[0]}.{sys.version_info[1]}", release_of("__main__")
    (True, None)
    """
    top = name.partition(".")[0]
    if top in _OURS:
        return _distribution(top)
    # Not remembered: it may be imported yet.
    return None if name not in sys.modules or name in ("__main__", "__mp_main__") else _release_of(name)


@functools.lru_cache(maxsize=4096)
def _release_of(name: str) -> str | None:
    module = sys.modules[name]
    if name in sys.builtin_module_names:
        return _python()
    spec = getattr(module, "__spec__", None)
    if getattr(spec, "origin", None) in ("built-in", "frozen"):
        return _python()
    file = getattr(module, "__file__", None) or getattr(spec, "origin", None)
    if file is None:
        # A namespace package, or a module made by a library: it is what its parent is.
        paths = list(getattr(module, "__path__", ()))
        if paths:
            file = os.path.join(str(paths[0]), "__init__.py")
        elif "." in name:
            return release_of(name.rpartition(".")[0])
    return None if file is None else release_of_file(file, name)


def release_of_file(file: str, name: str) -> str | None:
    """As :func:`release_of`, for a module of which only the file is known."""
    path = os.path.realpath(file)
    if any(path.startswith(directory) for directory in _installed()):
        return _distribution(name.partition(".")[0])
    return _python() if any(path.startswith(directory) for directory in _standard()) else None


def _python() -> str:
    return f"python {sys.version_info[0]}.{sys.version_info[1]}"


@functools.lru_cache(maxsize=1)
def _installed() -> tuple[str, ...]:
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    user = site.getusersitepackages()
    paths += [user] if isinstance(user, str) else list(user)
    paths += [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return _real(paths)


@functools.lru_cache(maxsize=1)
def _standard() -> tuple[str, ...]:
    return _real([sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")])


def _real(paths: list[str]) -> tuple[str, ...]:
    return tuple(sorted({os.path.realpath(path) + os.sep for path in paths if path}))


@functools.lru_cache(maxsize=1024)
def _distribution(top: str) -> str | None:
    try:
        found = [importlib.metadata.distribution(top)]
    except (importlib.metadata.PackageNotFoundError, ValueError):
        # Its distribution has another name than the package: all of them must be looked through.
        names = _names().get(top, ())
        found = [importlib.metadata.distribution(name) for name in sorted(set(names))]
    if not found:
        # Nothing says which version this is. In a checkout of tdgpu itself, its version does.
        version = getattr(sys.modules.get(top), "__version__", None) if top in _OURS else None
        return None if version is None else f"{top} {version}"
    return ", ".join(f"{one.metadata['Name']} {one.version} {_record(one)}" for one in found)


@functools.lru_cache(maxsize=1)
def _names() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def _record(distribution: importlib.metadata.Distribution) -> str:
    """A digest of what the installed Python files are, as the installer recorded it."""
    rows = (distribution.read_text("RECORD") or "").splitlines()
    files = sorted(row for row in rows if ".py,sha256=" in row)
    return digest("\n".join(files).encode()).hex()[:16]
