"""Hostile archives, each with what a load must say to it.

``CASES[name]`` makes the bytes of one. The families live in modules of their own; this one has what they share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from archives import small
from archives.raw import Entry, write
from tdgpu.errors import ArchiveError, TdgpuError

__all__ = ["CASES", "Case", "add", "family"]

#: When a case is found out: "central", by every load, since every load reads the central directory (or a metadata
#: entry); "local", by those that read local headers and check sizes, which are all but meta and fake; "bytes", by those
#: that read the leaves' bytes now, which are those and, on the CPU, only of compressed leaves.
STAGES = ("central", "local", "bytes")


@dataclasses.dataclass
class Case:
    """One hostile archive.

    Attributes:
        name: what is wrong.
        make: its bytes.
        cause: the error, or the errors one of which it must be; empty if it may load, with the right values, or be
            refused, as long as nothing worse happens.
        stage: who finds out, see STAGES.
        entry: the entry that the error must name; "" if there is no single one.
        unpacks: whether unpacking it is no wrong: what is damaged is only the meaning of its contents.
    """

    name: str
    make: Callable[[], bytes]
    cause: tuple[type[TdgpuError], ...] = (ArchiveError,)
    stage: str = "central"
    entry: str = ""
    unpacks: bool = False


CASES: dict[str, Case] = {}

Causes = type[TdgpuError] | tuple[type[TdgpuError], ...]


def add(
    name: str,
    make: Callable[[], bytes],
    cause: Causes = ArchiveError,
    stage: str = "central",
    entry: str = "",
    *,
    unpacks: bool = False,
) -> None:
    """Registers a case."""
    assert name not in CASES
    assert stage in STAGES
    causes = cause if isinstance(cause, tuple) else (cause,)
    CASES[name] = Case(name, make, causes, stage, entry, unpacks)


def family(
    title: str,
    variants: Mapping[str, Callable[[], Sequence[Entry]]],
    cause: Causes = ArchiveError,
    stage: str = "central",
    entry: str = "",
    *,
    unpacks: bool = False,
) -> None:
    """Registers a case for each list of entries."""
    for name, make in variants.items():
        add(f"{title}: {name}", written(make), cause, stage, entry, unpacks=unpacks)


def written(make: Callable[[], Sequence[Entry]]) -> Callable[[], bytes]:
    """What makes the archive of these entries."""
    return lambda: write(make()).data


def with_entry(*extra: Entry) -> Callable[[], Sequence[Entry]]:
    """The small save, and other entries behind."""
    return lambda: [*small.entries(), *extra]
