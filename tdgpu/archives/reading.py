"""Reads and checks whole entries of an archive, part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tdgpu.errors import TdgpuError
from tdgpu.layout.archive.central import Directory
from tdgpu.layout.archive.index import SIDECAR
from tdgpu.layout.archive.records import Entry
from tdgpu.transfer import host

__all__ = ["contents", "is_sidecar"]

# Takes the entry, the first byte and the bytes.
Sink = Callable[[Entry, int, memoryview], None]


def is_sidecar(directory: Directory, entry: Entry) -> bool:
    """Whether an entry is the block index of another one."""
    return entry.name.endswith(SIDECAR) and entry.name.removesuffix(SIDECAR) in directory.entries


def contents(
    directory: Directory,
    entries: Sequence[Entry],
    sink: Sink,
    *,
    threads: int,
    verify: bool,
    tell: Callable[[int], None],
) -> None:
    """Reads entries, and gives their bytes to `sink`, in parts that may come in any order.

    An entry without bytes is given once, empty. Size and CRC-32 of everything that is inflated are checked; those of an
    entry are known when all of its parts have been given.

    Args:
        directory: the archive.
        entries: the entries.
        sink: gets the bytes, valid during the call.
        threads: threads that inflate; 0 and 1 are one after the other.
        verify: whether the CRC-32 of stored entries is checked, too.
        tell: is told the bytes that are done.

    Raises:
        ChecksumError: an entry is not what the archive promises.
        LoadError: the archive cannot be read.
        NotSupported: an entry cannot be inflated on this machine.
    """
    owners: dict[int, Entry] = {}
    wants: list[host.Want] = []
    for entry in entries:
        want = host.Want(directory.extent(entry), (), 0, entry.nbytes, 0)
        owners[id(want)] = entry
        wants.append(want)
    done = 0
    try:
        for want, first, data in host.stream(directory.path, wants, threads=threads, verify=verify):
            sink(owners[id(want)], first, data)
            done += len(data)
            tell(done)
    except TdgpuError as error:
        error.key = None  # entries have none; the message names the entry
        raise
    for entry in entries:
        if not entry.nbytes:
            sink(entry, 0, memoryview(b""))
