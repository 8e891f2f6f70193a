"""A disk that is really full: a small tmpfs."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import tdgpu

from .bed import NESTED, Torn, look, snapshot
from .sweep import Tally

__all__ = ["full_disk", "mounted", "no_more_files"]

PAGE = 4096
# More than a page of each leaf: every one needs space of its own.
ROWS = 1100
BEFORE = 10


@contextlib.contextmanager
def mounted(directory: Path, options: str) -> Iterator[Path]:
    """A tmpfs, which needs the right to mount.

    Raises:
        PermissionError: it is not there.
    """
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tdgpu-test", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"{' '.join(command)}: {done.stderr}")
    try:
        yield directory
    finally:
        gc.collect()  # of what was loaded from there
        subprocess.run(["umount", str(directory)], check=True)


def full_disk(directory: Path, *, durable: bool = True, step: int = 1) -> Tally:
    """Appends with less and less space left: too little for the first leaf, ..., for the last metadata file.

    Each append succeeds, or raises an error that names a file and leaves every byte as it was; with space, the next one
    succeeds.

    Args:
        step: how many pages less each time.
    """
    tally = Tally(f"full disk, {'durable' if durable else 'not durable'}")
    with mounted(directory, f"size={1 << 20}") as disk:
        prefix, filler = disk / "save", disk / "filler"
        NESTED.save(prefix, BEFORE)
        needed = _pages_of_append(prefix)
        for free in range(needed + 1, -1, -step):
            _fill(filler, free)
            _append_to_full(tally, prefix, filler, f"{free} pages free", durable=durable)
    tally.points = needed
    return tally


def no_more_files(directory: Path) -> Tally:
    """Appends on a disk that has space, but takes only so many more files."""
    tally = Tally("no more files")
    with mounted(directory, f"size={16 << 20},nr_inodes=60") as disk:
        prefix, filler = disk / "save", disk / "filler"
        NESTED.save(prefix, BEFORE)
        tally.points = len(NESTED.levels)
        for free in range(len(NESTED.levels) + 1):
            filler.mkdir()
            for i in range(os.statvfs(disk).f_ffree - free):
                (filler / str(i)).touch()
            _append_to_full(tally, prefix, filler, f"{free} files free", durable=True)
    return tally


def _pages_of_append(prefix: Path) -> int:
    """The pages that the append needs, measured on a copy that is made by it and undone."""
    before = os.statvfs(prefix)
    _append(prefix, durable=False)
    after = os.statvfs(prefix)
    _restore(prefix)
    # The temporary metadata is there beside the old, a page for each level.
    return before.f_bfree - after.f_bfree + len(NESTED.levels)


def _append(prefix: Path, *, durable: bool) -> None:
    with tdgpu.options(durable=durable):
        tdgpu.append_memmap(prefix, NESTED.rows(BEFORE, ROWS))


def _append_to_full(tally: Tally, prefix: Path, filler: Path, where: str, *, durable: bool) -> None:
    before = snapshot(prefix)
    try:
        try:
            _append(prefix, durable=durable)
        except OSError as error:
            if not (isinstance(error, tdgpu.errors.AppendError) and str(prefix) in str(error)):
                raise Torn(f"an error that names no file, or is of another kind: {error!r}") from error
            if snapshot(prefix) != before:
                raise Torn(f"the save is not as it was, after {error}") from error
            _remove(filler)
            _append(prefix, durable=durable)
            tally.add(False)
        else:
            _remove(filler)
            tally.add(True)
        for plain in (False, True):
            if (found := look(prefix, NESTED, plain=plain)) != BEFORE + ROWS:
                raise Torn(f"{found} rows")
    except (Torn, tdgpu.TdgpuError, OSError) as error:
        tally.fail(error, where)
        _remove(filler)
    _restore(prefix)


def _restore(prefix: Path) -> None:
    gc.collect()  # what was loaded keeps removed files, and so their space
    subprocess.run(["rm", "-rf", str(prefix)], check=True)
    NESTED.save(prefix, BEFORE)


def _remove(filler: Path) -> None:
    subprocess.run(["rm", "-rf", str(filler)], check=True)


def _fill(filler: Path, free: int) -> None:
    """Takes all but so many pages."""
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, (os.statvfs(filler.parent).f_bfree - free) * PAGE)
