"""What a disk may hold after the power failed, by POSIX's rules.

A write lasts once the file was synced after it; a name (of a new, renamed or removed file) once its directory was. Of
all else any part may have reached the disk, in any order, whatever the order of the calls was. File systems promise
more (a journal keeps names in order); an append that trusts only this holds on all of them.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .tracing import Call

__all__ = ["Disk", "State"]

# What is on the disk, by the path below the root.
State = dict[str, bytes]

# Calls that change nothing which the model knows of: who may read a file, or who holds a lock.
OUTSIDE = frozenset({"flock", "fchmod", "chmod", "fchown", "chown", "sync_file_range"})
SECTOR = 512


@dataclass(eq=False)
class Change:
    """A change to a file or directory that lasts once that was synced.

    Attributes:
        begin, end: the points between which it was made.
        offset, data: what was written to the file, and where.
        size: the least size of the file from then on; for a truncation: the size.
        truncates: whether the file is cut.
        names: for a directory: the names that now mean another file; None: no file.
    """

    begin: int
    end: int
    offset: int = 0
    data: bytes = b""
    size: int = 0
    truncates: bool = False
    names: dict[str, File | None] = field(default_factory=dict)


@dataclass(eq=False)
class File:
    """A file or directory: what lasts from the beginning, the changes, and the syncs (begin, end)."""

    content: bytes = b""
    names: dict[str, File | None] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    syncs: list[tuple[int, int]] = field(default_factory=list)

    def unsure(self, at: int) -> list[Change]:
        """The changes that had begun by then, and need not last."""
        return [change for change in self.changes if change.begin <= at and not self._lasts(change, at)]

    def lasting(self, at: int) -> list[Change]:
        return [change for change in self.changes if self._lasts(change, at)]

    def _lasts(self, change: Change, at: int) -> bool:
        return any(begin > change.end and end <= at for begin, end in self.syncs)


class Disk:
    """A directory, and what a log says was done to it.

    Args:
        before: the files there, by their path below the root. They last.
        root: the directory.
        calls: in the order in which they began.

    Raises:
        NotImplementedError: the log has a call that the model doesn't know.
    """

    def __init__(self, before: State, root: Path, calls: Iterable[Call]) -> None:
        self.root = os.path.realpath(root)
        self.directories: dict[str, File] = {"": File()}
        self.files: list[File] = []
        self.ends: list[int] = [0]
        for path, content in before.items():
            directory, name = os.path.split(path)
            self._directory(directory).names[name] = self._new(content)
        # What each name means while the log goes on.
        self._now = {path: dict(directory.names) for path, directory in self.directories.items()}
        for call in calls:
            if call.result >= 0 and call.name not in OUTSIDE:
                self._replay(call)
                self.ends.append(call.exit)

    def _directory(self, path: str) -> File:
        if path not in self.directories:
            self.directories[path] = File()
        return self.directories[path]

    def _new(self, content: bytes = b"") -> File:
        self.files.append(File(content))
        return self.files[-1]

    def _replay(self, call: Call) -> None:
        path = os.path.relpath(call.path, self.root)
        if call.name == "open":
            self._open(call, path)
        elif call.name in ("fsync", "fdatasync"):
            target = self.directories.get("" if path == os.curdir else path) or self._file(path, call)
            target.syncs.append((call.entry, call.exit))
        elif call.name in ("write", "pwrite", "writev", "pwritev"):
            data = call.data[: call.result]
            offset = call.offset if call.name in ("write", "writev") else call.args[3]
            change = Change(call.entry, call.exit, offset, data, offset + len(data))
            self._file(path, call).changes.append(change)
        elif call.name == "fallocate" and call.args[1] == 0:
            change = Change(call.entry, call.exit, size=call.args[2] + call.args[3])
            self._file(path, call).changes.append(change)
        elif call.name == "ftruncate":
            self._file(path, call).changes.append(Change(call.entry, call.exit, size=call.args[1], truncates=True))
        elif call.name == "unlink" and path not in self.directories:
            self._rename(call, {path: None})
        elif call.name == "rename" and os.path.dirname(call.path) == os.path.dirname(call.path2):
            self._rename(call, {path: None, os.path.relpath(call.path2, self.root): self._file(path, call)})
        elif call.name != "mmap" or (call.args[2] & mmap.PROT_WRITE and call.args[3] & mmap.MAP_SHARED):
            raise NotImplementedError(f"what the disk holds after {call}, {call.args}")

    def _open(self, call: Call, path: str) -> None:
        directory, name = os.path.split(path)
        flags = call.args[2]
        if os.path.isdir(call.path):
            return
        if flags & os.O_APPEND:
            raise NotImplementedError(f"where {call} writes")
        if self._now[directory].get(name) is None:
            self._rename(call, {path: self._new()})
        elif flags & os.O_TRUNC:
            self._file(path, call).changes.append(Change(call.entry, call.exit, truncates=True))

    def _file(self, path: str, call: Call) -> File:
        directory, name = os.path.split(path)
        found = self._now.get(directory, {}).get(name)
        if found is None:
            raise NotImplementedError(f"which file {call} means")
        return found

    def _rename(self, call: Call, paths: dict[str, File | None]) -> None:
        directory = os.path.dirname(next(iter(paths)))
        names = {os.path.basename(path): file for path, file in paths.items()}
        self._now[directory].update(names)
        self.directories[directory].changes.append(Change(call.entry, call.exit, names=names))

    def states(self, source: random.Random, *, samples: int = 4) -> Iterator[tuple[int, State]]:
        """What the disk may hold: (the point at which the power failed, the files), each state and point once.

        Of the names that need not last: none, all, each alone, all but each, and ``samples`` random choices; with each
        of these the contents that need not last are gone, all there, there in size only, or there in part.
        """
        seen: set[tuple[int, int]] = set()
        for at in self.ends:
            unsure = [change for directory in self.directories.values() for change in directory.unsure(at)]
            everything = frozenset(unsure)
            choices = {frozenset(), everything}
            choices |= {frozenset({change}) for change in unsure} | {everything - {change} for change in unsure}
            choices |= {frozenset(c for c in unsure if source.random() < 0.5) for _ in range(samples)}
            for names in sorted(choices, key=lambda chosen: [unsure.index(c) for c in unsure if c in chosen]):
                for kept in (_nothing, _everything, _size_only, _partly(source)):
                    state = self._state(at, names, kept)
                    key = (at, hash(frozenset(state.items())))
                    if key not in seen:
                        seen.add(key)
                        yield at, state

    def _state(self, at: int, names: frozenset[Change], kept: Callable[[Change], bytes | None]) -> State:
        state: State = {}
        contents: dict[File, bytes] = {}
        for path, directory in self.directories.items():
            meant = dict(directory.names)
            lasting = set(directory.lasting(at))
            for change in directory.changes:
                if change in lasting or change in names:
                    meant.update(change.names)
            for name, file in meant.items():
                if file is not None:
                    if file not in contents:
                        contents[file] = _content(file, at, kept)
                    state[os.path.join(path, name)] = contents[file]
        return state


def _content(file: File, at: int, kept: Callable[[Change], bytes | None]) -> bytes:
    content = bytearray(file.content)
    lasting, unsure = set(file.lasting(at)), set(file.unsure(at))
    for change in file.changes:
        data: bytes | None = None
        if change in lasting:
            data = change.data
        elif change in unsure:
            data = kept(change)
        if data is None:
            continue
        if change.truncates:
            del content[change.size :]
        content.extend(bytes(max(0, change.size - len(content))))
        content[change.offset : change.offset + len(data)] = data
    return bytes(content)


# How much of a change that need not last is there: None: nothing; else these bytes, and the size.


def _nothing(change: Change) -> bytes | None:
    return None


def _everything(change: Change) -> bytes | None:
    return change.data


def _size_only(change: Change) -> bytes | None:
    return bytes(len(change.data))


def _partly(source: random.Random) -> Callable[[Change], bytes | None]:
    """Some sectors, or nothing."""

    def kept(change: Change) -> bytes | None:
        if source.random() < 0.3:
            return None
        data = bytearray(change.data)
        cut = change.offset + source.randrange(len(data) + 1)
        for start in range(0, len(data), SECTOR):
            if source.random() < 0.5:
                data[start : start + SECTOR] = bytes(len(data[start : start + SECTOR]))
        # At least something is missing: the tail.
        data[cut - change.offset :] = bytes(len(data) - (cut - change.offset))
        return bytes(data)

    return kept
