"""What is written down about a result: what it is, and the digest of every file, so that what has changed is not used.

A result is a directory: ``save/``, the save itself; ``entry.json`` and ``files.json``, which this module writes and
reads; and ``used``, which is locked while somebody uses it. Without ``entry.json`` it counts for nothing.

That the files are those that were built is found out anew at every lookup, by their bytes: a file that has not changed
since its bytes were hashed last, as told by the rules of :mod:`tdgpu.cache.remembered`, is not read again.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdgpu.cache.fingerprint import Fingerprint
from tdgpu.cache.leaves import Source, digests
from tdgpu.errors import TdgpuError
from tdgpu.layout.commit import sync_directory, sync_file
from tdgpu.layout.tree import Extent

__all__ = ["ENTRY", "SAVE", "Record", "changed_file", "read", "write"]

VERSION = 1
ENTRY, FILES, SAVE = "entry.json", "files.json", "save"


@dataclass(frozen=True)
class Record:
    """What ``entry.json`` says.

    Attributes:
        fingerprint: what the result depends on, with its name.
        nbytes: of the files of the save, in all.
        built: when it was complete, in seconds since 1970.
        reason: why it was built, where that was not because there was none.
    """

    fingerprint: Fingerprint
    nbytes: int
    built: float
    reason: str | None = None

    @property
    def digest(self) -> str:
        """The name of the result."""
        return self.fingerprint.digest

    @property
    def transform(self) -> str:
        """The name of the transform that made it."""
        return self.fingerprint.parts.get("transform", "")


def write(directory: Path, fingerprint: Fingerprint, reason: str | None) -> Record:
    """Writes down what is in a directory, and has all of it on the disk when it returns.

    Raises:
        OSError: a file cannot be read, written or synced.
    """
    files = _files(directory / SAVE)
    for name in files:
        sync_file(str(directory / SAVE / name))
    found = dict(zip(files, _digests(directory, files), strict=True))
    sizes = {name: status.st_size for name, status in files.items()}
    record = Record(fingerprint, sum(sizes.values()), time.time(), reason)
    _dump(directory / FILES, {name: [sizes[name], found[name]] for name in files})
    _dump(directory / ENTRY, {
        "version": VERSION, "digest": record.digest, "transform": record.transform, "bytes": record.nbytes,
        "built": record.built, "reason": reason, "fingerprint": fingerprint.as_dict(),
    })  # fmt: skip
    for parent, _, _ in os.walk(directory):
        sync_directory(parent)
    return record


def read(directory: Path) -> Record | str | None:
    """What ``entry.json`` says; None if there is none; a text that says what is wrong with it."""
    try:
        stored = json.loads((directory / ENTRY).read_bytes())
        if stored["version"] != VERSION:
            return f"it is of version {stored['version']} of the cache, and this is version {VERSION}"
        fingerprint = Fingerprint.from_dict(stored["fingerprint"])
        return Record(fingerprint, int(stored["bytes"]), float(stored["built"]), stored["reason"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"its {ENTRY} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"its {ENTRY} is damaged"


def changed_file(directory: Path) -> str | None:
    """What is not as it was built, in words; None if all of it is.

    Where in doubt it has changed: a file that cannot be read, one that is new.
    """
    try:
        stored: dict[str, list[Any]] = json.loads((directory / FILES).read_bytes())
        files = _files(directory / SAVE)
        for name in stored.keys() | files.keys():
            if name not in files:
                return f"{SAVE}/{name} is missing"
            if name not in stored:
                return f"{SAVE}/{name} is new"
            if files[name].st_size != stored[name][0]:
                return f"{SAVE}/{name} has another size"
        for name, digest in zip(files, _digests(directory, files), strict=True):
            if digest != stored[name][1]:
                return f"the content of {SAVE}/{name} has changed"
    except FileNotFoundError as error:
        return f"{os.path.relpath(error.filename, directory)} is missing"
    except (OSError, TdgpuError) as error:
        return f"a file cannot be read ({error})"
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return f"its {FILES} is damaged"
    return None


def _files(save: Path) -> dict[str, os.stat_result]:
    """The files below a directory, by their path in it.

    Raises:
        OSError: it cannot be listed.
        ValueError: there is something else than files and directories.
    """
    return dict(sorted(_walk(save, "")))


def _walk(directory: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(directory) as members:
        for member in members:
            if member.is_dir(follow_symlinks=False):
                yield from _walk(directory / member.name, f"{prefix}{member.name}/")
                continue
            status = os.stat(member.path, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{member.path} is neither a file nor a directory")
            yield prefix + member.name, status


def _digests(directory: Path, files: dict[str, os.stat_result]) -> list[str]:
    save = directory / SAVE
    sources = [
        Source(Extent(str(save / name), 0, status.st_size, None, status.st_ino), (name,), 0, status.st_size)
        for name, status in files.items()
    ]
    return [digest.hex() for digest in digests(str(save), sources)]


def _dump(file: Path, content: dict[str, Any]) -> None:
    with open(file, "x", encoding="utf-8") as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())
