"""What can go wrong, one class per cause.

Every class also inherits the built-in exception that tensordict raises for the same cause, so code written for
``TensorDict.load_memmap`` keeps catching what it caught. Errors carry their facts as fields, survive pickling (a worker
process can send them home), and their message names the save, the key and the file.

>>> import pickle
>>> error = LeafSizeError("too short", save="/data/run", key=("obs",), file="/data/run/obs.memmap", wanted=40, found=7)
>>> print(error)
too short [key 'obs'; file /data/run/obs.memmap; wanted 40 bytes, found 7; save /data/run]
>>> pickle.loads(pickle.dumps(error)).wanted
40
"""

from __future__ import annotations

import os
import sys
import zipfile
from typing import Any

Key = tuple[str, ...]

__all__ = [
    "AppendError",
    "ArchiveError",
    "ArchiveNotSupported",
    "BatchTimeout",
    "CacheError",
    "CaptureError",
    "ChecksumError",
    "DeviceError",
    "ForkError",
    "FormatError",
    "InvalidArgument",
    "InvalidArgumentType",
    "KeyEscapeError",
    "LeafSizeError",
    "LoadError",
    "LockedOutError",
    "MissingLeafError",
    "NativeCoreError",
    "NotSupported",
    "OutMismatchError",
    "PickleRefused",
    "SaveExists",
    "SaveLocked",
    "SaveNotFound",
    "SubpathError",
    "TdgpuError",
    "TransferError",
    "TransformError",
    "UnknownClassError",
    "UnknownKeyError",
]


def _shortened(text: str) -> str:
    """The text, or its two ends: names in a hostile archive can be as long as they like."""
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-200:]}"


def _rebuild(cls: type[TdgpuError], message: str, fields: dict[str, Any]) -> TdgpuError:
    return cls(message, **fields)


class TdgpuError(Exception):
    """Root of everything that tdgpu raises.

    Attributes:
        message: what happened and what to do, without the facts below.
        save: the save (a directory or archive) that was read or written, if one is involved.
        key: the nested key of the leaf or level, as the user would write it.
        file: the file on disk.
        wanted, found: bytes (or, where the message says so, another count) that were expected and met.
    """

    def __init__(
        self,
        message: str,
        *,
        save: str | os.PathLike[str] | None = None,
        key: Key | None = None,
        file: str | os.PathLike[str] | None = None,
        wanted: int | None = None,
        found: int | None = None,
    ) -> None:
        self.message = message
        self.save = None if save is None else os.fspath(save)
        self.key = key
        self.file = None if file is None else os.fspath(file)
        self.wanted = wanted
        self.found = found
        super().__init__(message)

    def __str__(self) -> str:
        facts = []
        if self.key is not None:
            facts.append(f"key {_shortened('/'.join(self.key))!r}" if self.key else "the root")
        if self.file is not None:
            facts.append(f"file {_shortened(self.file)}")
        if self.wanted is not None and self.found is not None:
            facts.append(f"wanted {self.wanted} bytes, found {self.found}")
        if self.save is not None and self.save != self.file:
            facts.append(f"save {self.save}")
        return f"{self.message} [{'; '.join(facts)}]" if facts else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: getattr(self, name) for name in ("save", "key", "file", "wanted", "found")}
        return (_rebuild, (type(self), self.message, fields))


# --- what the caller asked for ----------------------------------------------------------------------------------------


class InvalidArgument(TdgpuError, ValueError):
    """An argument that no save could satisfy (an unknown mode, a device that does not exist)."""


class InvalidArgumentType(TdgpuError, TypeError):
    """An argument of the wrong type (``allow_pickle="yes"``)."""


class SubpathError(InvalidArgument):
    """``subpath`` names no saved level."""


class OutMismatchError(InvalidArgument):
    """``out`` cannot take this save: another device, another number of stacked members."""


class SaveExists(TdgpuError, RuntimeError):
    """There is something at the path already, and ``existsok=False``."""


class SaveLocked(TdgpuError, TimeoutError):
    """Another writer appends to the save, and did not end in time.

    Attributes:
        pid: the process that holds the lock; None where the system does not tell.
    """

    __str__ = TdgpuError.__str__

    def __init__(self, message: str, *, pid: int | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.pid = pid

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, (cls, message, facts) = super().__reduce__()
        return rebuild, (cls, message, {**facts, "pid": self.pid})


class BatchTimeout(TdgpuError, TimeoutError, RuntimeError):
    """A loader's batch was not there within ``timeout``. It may be asked for again."""

    __str__ = TdgpuError.__str__


class LockedOutError(TdgpuError, RuntimeError):
    """``out`` is locked: unlock it first."""


class UnknownKeyError(TdgpuError, KeyError):
    """There is no leaf or subtree of that key."""

    __str__ = TdgpuError.__str__


class NotSupported(TdgpuError, NotImplementedError):
    """torch itself, or this version of tdgpu, cannot do this."""


class ArchiveNotSupported(NotSupported):
    """The save is an archive and the call needs what only directories have."""


# --- what is on disk --------------------------------------------------------------------------------------------------


class SaveNotFound(TdgpuError, FileNotFoundError):
    """There is no save at the prefix, or a level of it has no ``meta.json``."""

    # FileNotFoundError formats itself from (errno, strerror, filename), which are not given here.
    __str__ = TdgpuError.__str__


class FormatError(TdgpuError, RuntimeError):
    """The metadata is malformed: not JSON, too large, too deep, a negative shape, an unknown dtype or version."""


class UnknownClassError(FormatError):
    """The class that was saved is not defined in this process: import its module first."""


class KeyEscapeError(FormatError):
    """A key, link or subpath leads outside the save."""


class ArchiveError(FormatError, zipfile.BadZipFile):
    """The archive's own structure is damaged or refused: its directory, a header, a name, an index, a method."""


class MissingLeafError(TdgpuError, FileNotFoundError):
    """A leaf, child or stack member that the metadata names is not on disk."""

    __str__ = TdgpuError.__str__


class LeafSizeError(TdgpuError, RuntimeError):
    """A leaf's file holds fewer bytes than its metadata says."""


class PickleRefused(TdgpuError, RuntimeError):
    """The save holds pickled data and ``allow_pickle=False``."""


# --- moving bytes -----------------------------------------------------------------------------------------------------


class TransferError(TdgpuError, RuntimeError):
    """The root of errors while bytes move."""


class LoadError(TransferError, OSError):
    """A leaf could not be read although its size was right when the load began."""

    __str__ = TdgpuError.__str__


class AppendError(TransferError, OSError):
    """Rows could not be written or committed. What was committed before stays; the message says what became of them.

    Attributes:
        errno: the system's number for what happened, if it is the system's; else None.
    """

    __str__ = TdgpuError.__str__

    def __init__(self, message: str, *, code: int | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.errno = code

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, (cls, message, facts) = super().__reduce__()
        return rebuild, (cls, message, {**facts, "code": self.errno})


class CacheError(TdgpuError, OSError):
    """A result could not be put into the cache or taken from it. Nothing of it is kept; ``save`` is where it lies."""

    __str__ = TdgpuError.__str__


class ChecksumError(LoadError, zipfile.BadZipFile):
    """An archive's entry does not inflate to the bytes that the archive promises: damaged, or of another size."""


class DeviceError(TransferError):
    """The device or its driver refused a call. ``code`` in the message is the driver's."""


class CaptureError(DeviceError):
    """The current stream is capturing a graph: a load cannot be part of a graph."""


class ForkError(DeviceError):
    """The process was forked after tdgpu used an accelerator; the child can load on the CPU only."""


class NativeCoreError(TdgpuError, ImportError):
    """The native core is missing or does not fit this version of the Python package."""

    __str__ = TdgpuError.__str__


class TransformError(TdgpuError, RuntimeError):
    """A function has raised an exception, which is ``__cause__``; or its results, or rows, cannot be stored.

    The message names the rows. Nothing was left in the cache.
    """


def user_level() -> int:
    """The ``stacklevel`` at which a warning of the caller points at the code that called tdgpu."""
    package = os.path.dirname(os.path.abspath(__file__))
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package + os.sep):
        frame = frame.f_back
        level += 1
    return level
