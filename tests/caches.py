"""What the tests of the cache directory share: results that are quick to make, and what lies in a cache directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from reliability.tracing import run_traced

from tdgpu.cache.directory import Entry, find, obtain
from tdgpu.cache.fingerprint import Fingerprint
from tdgpu.options import options

FILES = {"meta.json": b"{}", "a.memmap": b"a" * 5000, "inner/b.memmap": b"b" * 70_000}
NBYTES = sum(map(len, FILES.values()))


def wanted(number: int = 0, **parts: str) -> Fingerprint:
    """The fingerprint of a result."""
    return Fingerprint(f"{number:016x}", {"source": "5" * 16, "transform": "map", "number": f"<{number}>", **parts})


def make(path: Path) -> None:
    """Makes a result: some files."""
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)


def found(number: int = 0) -> Entry:
    """A result that is there."""
    entry = find(wanted(number).digest)
    assert entry is not None
    return entry


def never(path: Path) -> None:
    """For a result that must be found."""
    raise AssertionError(f"{path} is built")


def contents(path: Path) -> dict[str, bytes]:
    """The files below a directory."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def logged(log: Path, then: Callable[[Path], None] = make) -> Callable[[Path], None]:
    """A builder that adds a line to a file whenever it is called."""

    def build(path: Path) -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        then(path)

    return build


def leftovers(root: Path) -> list[str]:
    """What lies where results are built and removed."""
    return os.listdir(root / "building")


@contextlib.contextmanager
def cache_at(root: Path, **more: object) -> Iterator[Path]:
    """Has the cache lie in a directory."""
    with options(cache=str(root), **more):
        yield root


def sweep_kills(directory: Path, act: Callable[[Path], object], prepare: Callable[[Path], object], runs: int) -> int:
    """Kills a process at system calls of an act, evenly spread, and looks at what the next one finds.

    Args:
        directory: for the caches, one for each run.
        act: what is killed; called with a cache directory.
        prepare: what comes before it.
        runs: how often.

    Returns:
        After how many of the kills the result was there.
    """
    root = directory / "whole"
    prepare(root)
    whole = run_traced(lambda: act(root))
    assert whole.exit_code == 0, whole.error
    there = 0
    for number in range(runs):
        root = directory / str(number)
        prepare(root)
        point = 1 + whole.points * number // runs
        killed = run_traced(lambda root=root: act(root), kill_at=point)  # type: ignore[misc]
        assert killed.exit_code in (None, 0), killed.error
        with cache_at(root):
            left = find(wanted().digest)
            if left is not None:
                assert contents(left.path) == FILES, killed.killed_at
                there += 1
            assert contents(obtain(wanted(), make if left is None else never).path) == FILES, killed.killed_at
            # Whoever builds next removes what is left.
            obtain(wanted(1), make)
            assert leftovers(root) == [], killed.killed_at
    return there
