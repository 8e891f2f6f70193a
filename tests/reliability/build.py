"""Compiles the tracer into a cache outside the source tree: once for each compiler and state of the source."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "tracer.cpp"
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-O1", "-shared"]


def build() -> Path:
    """The tracer's library, built now if it is not there yet.

    Raises:
        RuntimeError: there is no C++ compiler, or it failed; the message holds what it said.
    """
    compiler = _find_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\0".join([version, platform.machine(), *FLAGS]).encode() + SOURCE.read_bytes())
    cache = Path(os.environ.get("TDGPU_TEST_CACHE") or Path.home() / ".cache" / "tdgpu-tests")
    library = cache / f"tracer-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as scratch:
        # Renamed when it is complete, so that two that build at the same time do not meet.
        built = Path(scratch) / library.name
        done = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(built)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"building the tracer failed: {done.stdout}{done.stderr}")
        built.rename(library)
    return library


def _find_compiler() -> str:
    for name in filter(None, [os.environ.get("CXX"), "c++", "g++", "clang++"]):
        if path := shutil.which(name):
            return path
    raise RuntimeError("no C++ compiler found (tried $CXX, c++, g++, clang++)")
