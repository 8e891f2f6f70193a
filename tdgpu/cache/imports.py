"""What an import inside a function would bring, told without importing it: hashing runs no module."""

from __future__ import annotations

import importlib.machinery
import re
import sys
from types import CodeType
from typing import Any

from tdgpu.cache import origin
from tdgpu.cache.bytecode import code_digest, reads
from tdgpu.cache.encode import digest

__all__ = ["absolute", "digest_of_source", "is_name"]

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_name(text: str) -> bool:
    """Whether a text could name a module that can be found."""
    return len(text) < 200 and _NAME.fullmatch(text) is not None and _find(text) is not None


def absolute(name: str, level: int, namespace: dict[str, Any]) -> str:
    """The full name of what ``import`` of a name at a level means in a module."""
    if level == 0:
        return name
    package = namespace.get("__package__") or str(namespace.get("__name__", "")).rpartition(".")[0]
    base = ".".join(package.split(".")[: len(package.split(".")) - level + 1])
    return f"{base}.{name}" if name else base


def digest_of_source(name: str) -> bytes:
    """The digest of a module that has not been imported, and of all that it would import: of what is in their files."""
    return digest(*_Sources().of(name))


class _Sources:
    def __init__(self) -> None:
        self._met: set[str] = set()

    def of(self, name: str) -> list[bytes]:
        """What it is made of, in the order in which it would be imported."""
        found: list[bytes] = []
        waiting = [name]
        while waiting:
            full = waiting.pop()
            if full in self._met:
                continue
            self._met.add(full)
            found.append(full.encode())
            spec = _find(full)
            if spec is None or spec.origin in ("built-in", "frozen"):
                found.append(b"missing" if spec is None else b"python")
                continue
            version = None if spec.origin is None else origin.release_of_file(spec.origin, full)
            if version is not None or spec.origin is None:
                found.append(str(version).encode())
                continue
            found.append(self._file(spec, full, waiting))
            if "." in full:
                waiting.append(full.rpartition(".")[0])
        return found

    def _file(self, spec: importlib.machinery.ModuleSpec, name: str, waiting: list[str]) -> bytes:
        assert spec.origin is not None
        try:
            with open(spec.origin, "rb") as file:
                data = file.read()
        except OSError as error:
            return str(error.errno).encode()
        try:
            code: CodeType = compile(data, "<source>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return digest(data)  # compiled code of C
        package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        for (module, level), taken in sorted(reads(code).imports.items(), reverse=True):
            full = absolute(module, level, {"__package__": package})
            waiting += [f"{full}.{part}" for part in sorted(taken, reverse=True) if _find(f"{full}.{part}")]
            waiting.append(full)
        return code_digest(code)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module would come from. Unlike ``importlib.util.find_spec``, no parent of it is imported."""
    path: Any = None
    spec: importlib.machinery.ModuleSpec | None = None
    full = ""
    for part in name.split("."):
        full = f"{full}.{part}" if full else part
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(full, path)
            if spec is not None:
                break
        if spec is None:
            return None
        path = spec.submodule_search_locations or []
    return spec
