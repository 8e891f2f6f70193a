"""Compiles the simulation into a cache outside the source tree: once for each torch, compiler, state of the sources."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).parent
SIMCUDA = HERE.parent / "simcuda"
IO_SOURCE = SIMCUDA / "simio.cpp"

DRIVER_LIBRARY = "libtdsim_cuda.so"
IO_LIBRARY = "libtdsim_io.so"
TORCH_LIBRARY = "libsimgpu_torch.so"

BASE_FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-pthread", "-O1"]


class Unavailable(RuntimeError):
    """The simulation cannot be built on this machine; the message says why."""


def build() -> Path:
    """The folder with the three libraries, built now if it is not there yet.

    Raises:
        Unavailable: there is no C++ compiler.
        RuntimeError: the compiler failed; the message holds what it said.
    """
    compiler = _find_compiler()
    cache = _cache_folder()
    folder = cache / _key(compiler)
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "build.lock"):
        if not folder.is_dir():  # another process may have built it while this one waited
            scratch = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
            try:
                _compile(compiler, scratch)
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _find_compiler() -> str:
    for name in filter(None, [os.environ.get("CXX"), "c++", "g++", "clang++"]):
        if path := shutil.which(name):
            return path
    raise Unavailable("no C++ compiler found (tried $CXX, c++, g++, clang++)")


def _cache_folder() -> Path:
    if configured := os.environ.get("TDGPU_TEST_CACHE"):
        return Path(configured)
    return Path.home() / ".cache" / "tdgpu-tests"


def _sources() -> list[Path]:
    return sorted(path for folder in (SIMCUDA, HERE) for path in folder.iterdir() if path.suffix in (".cpp", ".h"))


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [torch.__version__, str(torch.version.git_version), version, platform.machine()]
    for part in parts + _torch_flags():
        digest.update(part.encode() + b"\0")
    for path in (Path(__file__), *_sources()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"torch{torch.__version__}-{digest.hexdigest()[:16]}"


def _torch_flags() -> list[str]:
    # -isystem: torch's own headers are not free of warnings.
    includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    return [*includes, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]


def _compile(compiler: str, target: Path) -> None:
    def compile_one(source: Path) -> str:
        built = target / f"{source.parent.name}-{source.stem}.o"
        flags = _torch_flags() if source.parent == HERE else []
        _run([compiler, *BASE_FLAGS, *flags, "-c", str(source), "-o", str(built)])
        return str(built)

    def link(library: str, objects: list[str], *flags: str) -> None:
        _run([compiler, "-shared", "-pthread", *objects, *flags, "-o", str(target / library)])

    driver_sources = sorted(SIMCUDA.glob("*.cpp"))
    driver_sources.remove(IO_SOURCE)
    torch_sources = sorted(HERE.glob("*.cpp"))
    with ThreadPoolExecutor(max_workers=2) as pool:  # one that includes torch takes about 1 GiB of memory
        torch_objects = pool.map(compile_one, torch_sources)
        driver_objects = pool.map(compile_one, driver_sources)
        io_objects = pool.map(compile_one, [IO_SOURCE])
    # -Bsymbolic: inside the library its own cu* functions are meant, even where a real driver is loaded as well.
    link(DRIVER_LIBRARY, list(driver_objects), "-Wl,-Bsymbolic")
    link(IO_LIBRARY, list(io_objects))
    torch_folder = cpp_extension.library_paths()[0]
    libraries = [f"-L{target}", "-ltdsim_cuda", f"-L{torch_folder}", "-ltorch_cpu", "-lc10"]
    # $ORIGIN: the folder is renamed after this.
    run_paths = ["-Wl,-rpath,$ORIGIN", f"-Wl,-rpath,{torch_folder}"]
    link(TORCH_LIBRARY, list(torch_objects), *libraries, *run_paths)
    for path in target.glob("*.o"):
        path.unlink()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"building the simulation failed: {' '.join(command)}\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
