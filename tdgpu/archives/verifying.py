"""Looking for damage: :func:`verify_memmap`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tdgpu.archives.pipeline import thread_count
from tdgpu.errors import ArchiveError, SaveNotFound, TdgpuError, UnknownClassError
from tdgpu.layout import reader
from tdgpu.layout.archive.central import Directory
from tdgpu.layout.archive.index import SIDECAR, is_index
from tdgpu.layout.archive.records import Entry
from tdgpu.layout.commit import TEMPORARY
from tdgpu.transfer import host, runs
from tdgpu.transfer.progress import bar

__all__ = ["Report", "verify_memmap"]


@dataclass(frozen=True)
class Report:
    """What :func:`verify_memmap` found.

    Attributes:
        path: what was looked at.
        kind: ``"archive"`` or ``"directory"``.
        entries: the entries of the archive; of a directory, the files of its leaves.
        nbytes: bytes of them, inflated.
        problems: what is wrong, each an error that names the entry or file.
        notes: what could not be checked, and why; and whether an append is pending.
    """

    path: Path
    kind: str
    entries: int
    nbytes: int
    problems: tuple[TdgpuError, ...]
    notes: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_memmap(path: str | os.PathLike[str], *, num_threads: int | None = None, progress: bool = False) -> Report:
    """Checks a save, and lists what is wrong with it. Nothing is written, and no pickle is loaded.

    Of an archive: the zip structure; every entry's size and CRC-32, stored ones too; every block index, and every block
    by it; and the tree that the ``meta.json`` entries describe, with the sizes of all leaves. Of a directory, which has
    no checksums: the tree, and the size of every file. A tree is read up to its first problem.

    Args:
        path: an archive or a saved directory.
        num_threads: threads that inflate; 0 or 1 is one after the other, None one for each core that the process may
            use.
        progress: show a progress bar on stderr, if that is a terminal.

    Returns:
        The report. A damaged save is a report with problems, not an exception.

    Raises:
        SaveNotFound: there is nothing at ``path`` (a FileNotFoundError).
        OSError: it cannot be read.

    Example:
        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path:
        ...     archive = tdgpu.save(TensorDict(a=torch.zeros(3)), path + "/run.tdz")
        ...     before = tdgpu.verify_memmap(archive)
        ...     _ = TensorDict.load_memmap(archive, mode="r+")["a"].add_(1)  # leaves a stale CRC-32
        ...     after = tdgpu.verify_memmap(archive)
        ...     print(before.is_sound, after.is_sound, type(after.problems[0]).__name__)
        True False ChecksumError
    """
    threads = thread_count(num_threads)
    place = os.fspath(path)
    if not os.path.exists(place):
        raise SaveNotFound("There is no save here.", save=place)
    problems: list[TdgpuError] = []
    notes: list[str] = []
    entries = nbytes = 0
    is_directory = os.path.isdir(place)
    if not is_directory:
        try:
            with Directory(place) as archive:
                every = list(archive.entries.values())
                entries, nbytes = len(every), sum(entry.nbytes for entry in every)
                with bar(f"checking {os.path.basename(place)}", nbytes, enabled=progress) as tell:
                    problems += _entries(archive, every, threads, tell)
        except TdgpuError as error:
            problems.append(error)
    if is_directory:
        notes += [
            f"An append was killed, or is under way: {os.path.join(directory, TEMPORARY)} is there. Readers see whole"
            " rows all the same; recover_memmap puts the files in order."
            for directory, _, names in os.walk(place)
            if TEMPORARY in names
        ][:1]
    if is_directory or entries:
        try:
            save = reader.read(place)
            save.close()
            if is_directory:
                leaves = [leaf for level in save.root.walk(into_foreign=True) for leaf in level.leaves.values()]
                entries, nbytes = sum(leaf.extent is not None for leaf in leaves), sum(leaf.nbytes for leaf in leaves)
        except UnknownClassError as error:
            notes.append(f"The tree was not checked. {error}")
        except TdgpuError as error:
            if error.file is None or error.file not in {problem.file for problem in problems}:
                problems.append(error)
    kind = "directory" if is_directory else "archive"
    return Report(Path(path), kind, entries, nbytes, tuple(problems), tuple(notes))


def _entries(
    archive: Directory, entries: Sequence[Entry], threads: int, tell: Callable[[int], None]
) -> list[TdgpuError]:
    """What is wrong with the entries of an archive."""
    problems: list[TdgpuError] = []
    wants: list[host.Want] = []
    for entry in entries:
        try:
            extent = archive.extent(entry)
            packed = extent.packed
            has_blocks = packed is not None and packed.blocks is not None and runs.belongs(packed.blocks, packed)
            _check_index(archive, entry, has_blocks=has_blocks)
            wants.append(host.Want(extent, (), 0, entry.nbytes, 0))
        except TdgpuError as error:
            problems.append(error)
    return problems + _read(archive, wants, threads, tell)


def _check_index(archive: Directory, entry: Entry, *, has_blocks: bool) -> None:
    """Raises ArchiveError if an entry has a block index that a load would pass over."""
    body = entry.index
    sidecar = archive.entries.get(entry.name + SIDECAR)
    if body is None and sidecar is not None and entry.method == 8:
        body = archive.read(sidecar)
    if body is not None and is_index(body) and not has_blocks:
        raise archive.refuse(entry.name, "The block index does not fit the entry", ArchiveError)


def _read(
    archive: Directory, wants: Sequence[host.Want], threads: int, tell: Callable[[int], None]
) -> list[TdgpuError]:
    """Inflates and checks all, and finds out which of them failed."""
    try:
        host.read(archive.path, wants, threads=threads, verify=True, tell=tell)
    except TdgpuError as error:
        if len(wants) == 1:
            packed = wants[0].extent.packed
            error.key, error.file = None, f"{archive.path}::/{'' if packed is None else packed.name}"
            return [error]
        # A read ends at the first failure: the halves tell what else there is.
        half = len(wants) // 2
        return [problem for part in (wants[:half], wants[half:]) for problem in _read(archive, part, threads, tell)]
    return []
