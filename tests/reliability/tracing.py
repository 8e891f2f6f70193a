"""Runs a function in a forked child under ptrace.

The tests are told where it was killed, what it did, and how it ended. ``tracer.cpp`` does the work.
"""

from __future__ import annotations

import ctypes
import errno as errno_names
import faulthandler
import functools
import mmap
import os
import struct
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .build import build

__all__ = ["CHANGING", "SYNCS", "Call", "Shared", "Trace", "run_traced"]

SYNCS = frozenset({"fsync", "fdatasync"})
# The calls that change what is on disk, or make it last. (sync_file_range promises nothing: it is a hint.)
CHANGING = SYNCS | {
    "write", "pwrite", "writev", "pwritev", "pwritev2", "fallocate", "ftruncate", "truncate", "syncfs",
    "sendfile", "splice", "copy_file_range", "fchmod", "chmod", "fchown", "chown",
    "open", "openat2", "old open", "creat", "mkdir", "unlink", "rmdir", "rename", "link", "symlink",
}  # fmt: skip

FAILED, UNTRACED = 97, 98  # exit codes of the child: the function raised; it could not be traced


class _Plan(ctypes.Structure):
    _fields_ = (
        ("root", ctypes.c_char_p),
        ("kill_at", ctypes.c_int64),
        ("fail_from", ctypes.c_int64),
        ("fail_to", ctypes.c_int64),
        ("failing", ctypes.c_char_p),
        ("error", ctypes.c_int32),
        ("log", ctypes.c_int32),
        ("seconds", ctypes.c_double),
    )


class _Result(ctypes.Structure):
    _fields_ = (
        ("points", ctypes.c_int64),
        ("calls", ctypes.c_int64),
        ("outcome", ctypes.c_int32),
        ("status", ctypes.c_int32),
        ("number", ctypes.c_int64),
        ("at_entry", ctypes.c_int32),
        ("thread", ctypes.c_int32),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()))
    library.tracer_run.argtypes = [ctypes.c_int, ctypes.POINTER(_Plan), ctypes.POINTER(_Result)]
    library.tracer_run.restype = None
    library.tracer_log.argtypes = [ctypes.POINTER(ctypes.c_size_t)]
    library.tracer_log.restype = ctypes.c_void_p
    return library


@dataclass(frozen=True)
class Call:
    """A system call on a file below the root.

    Attributes:
        index: from 1, in the order in which the calls began.
        entry, exit: the points (stops of the process) at which it began and ended.
        thread: 0 is the first one of the child.
        name: of the call, without what only tells variants apart (``open`` for openat, ``pwrite`` for pwrite64).
        result: what it returned; below zero: an errno.
        args: as the kernel got them.
        path, path2: of the files, absolute.
        data: the bytes of a write.
        offset: where a ``write`` began (-1: unknown).
    """

    index: int
    entry: int
    exit: int
    thread: int
    name: str
    result: int
    offset: int
    args: tuple[int, ...]
    path: str
    path2: str
    data: bytes

    def __str__(self) -> str:
        paths = " -> ".join(filter(None, (self.path, self.path2)))
        return f"{self.index}. {self.name}({paths}) = {self.result}"


@dataclass
class Trace:
    """What became of the child.

    Attributes:
        points: how many stops it passed: each system call of each thread is two, entry and exit.
        exit_code: of a child that ended by itself; None if it was killed. 0: the function returned.
        killed_at: where it was killed, in words; empty if it ended by itself.
        error: the traceback of a function that raised.
        calls: those on files below the root, if a log was asked for, in the order in which they began.
    """

    points: int
    exit_code: int | None
    killed_at: str
    error: str
    calls: list[Call] = field(default_factory=list)


class Shared:
    """A number that parent and child share, and that outlives a killed child."""

    def __init__(self, value: int = 0) -> None:
        self._memory = mmap.mmap(-1, 8)
        self.value = value

    @property
    def value(self) -> int:
        return int(struct.unpack("q", self._memory[:8])[0])

    @value.setter
    def value(self, value: int) -> None:
        self._memory[:8] = struct.pack("q", value)


def run_traced(
    function: Callable[[], object],
    *,
    root: str | os.PathLike[str] | None = None,
    kill_at: int = 0,
    fail: Iterable[int] = (),
    failing: Iterable[str] = CHANGING,
    error: int = errno_names.EIO,
    log: bool = False,
    seconds: float = 30.0,
) -> Trace:
    """Forks, and runs the function in the child, traced.

    Args:
        function: called without arguments.
        root: calls on files below this directory are numbered, from 1.
        kill_at: the point at which the whole child is killed (``SIGKILL``); 0: nowhere.
        fail: the first and the last number of the calls that fail, if they are of those in ``failing``; the kernel
            doesn't do them.
        error: the errno that they return.
        log: whether to log the numbered calls.
        seconds: a child that takes longer is killed, and an error raised.

    Raises:
        TimeoutError: it took longer.
        RuntimeError: this system doesn't let a process trace its child.
    """
    library = _library()
    first, last = tuple(fail) or (0, 0)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(library, function, writer)
    os.close(writer)
    plan = _Plan(
        root=os.fsencode(os.path.realpath(root)) if root is not None else b"",
        kill_at=kill_at,
        fail_from=first,
        fail_to=last,
        failing=f"|{'|'.join(failing)}|".encode(),
        error=error,
        log=log,
        seconds=seconds,
    )
    result = _Result()
    library.tracer_run(pid, ctypes.byref(plan), ctypes.byref(result))
    with open(reader, encoding="utf-8", errors="replace") as pipe:
        text = pipe.read()
    if result.outcome == 2:
        raise TimeoutError(f"The child did not end within {seconds} s. What it said: {text or 'nothing'}")
    if result.outcome == -1 or (os.WIFEXITED(result.status) and os.WEXITSTATUS(result.status) == UNTRACED):
        raise RuntimeError(f"The child could not be traced: is ptrace forbidden here? ({result.status}; {text})")
    ended = os.WIFEXITED(result.status)
    where = f"{'entry' if result.at_entry else 'exit'} of system call {result.number} in thread {result.thread}"
    return Trace(
        points=result.points,
        exit_code=os.WEXITSTATUS(result.status) if ended else None,
        killed_at="" if ended else where if result.outcome == 1 else f"signal {os.WTERMSIG(result.status)}",
        error=text,
        calls=_read_log(library) if log else [],
    )


def _child(library: ctypes.CDLL, function: Callable[[], object], writer: int) -> None:
    code = UNTRACED
    try:
        if library.tracer_begin() == 0:
            # The traceback of a crash or of a hang belongs to the parent's report.
            faulthandler.enable(writer)
            function()
            code = 0
    except BaseException:
        code = FAILED
        # Cut to what a pipe holds: nobody reads it before the child has ended.
        os.write(writer, traceback.format_exc()[-60000:].encode())
    finally:
        os._exit(code)


def _read_log(library: ctypes.CDLL) -> list[Call]:
    size = ctypes.c_size_t()
    address = library.tracer_log(ctypes.byref(size))
    calls = []
    for line in ctypes.string_at(address, size.value).decode().splitlines():
        parts = line.split("\t")
        index, entry, exit_, thread = map(int, parts[:4])
        result, offset, *args = map(int, parts[5:13])
        path, path2, data = map(bytes.fromhex, parts[13:])
        calls.append(
            Call(index, entry, exit_, thread, parts[4], result, offset, tuple(args), _plain(path), _plain(path2), data)
        )
    return sorted(calls, key=lambda call: call.index)


def _plain(path: bytes) -> str:
    """The path without ``.`` and ``//`` in it."""
    return str(Path(os.fsdecode(path))) if path else ""
