"""What the tests of appends share: saves that are easy to check, tensordict beside ours, interrupts."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensordict
import torch
from compare import assert_same
from tensordict import TensorDict

import tdgpu
from tdgpu import errors
from tdgpu.layout.lock import WriterLock
from tdgpu.transfer import outgoing, outlets


def flat(first: int, count: int) -> TensorDict:
    numbers = torch.arange(first, first + count)
    return TensorDict(
        {"a": numbers.float().view(-1, 1) * torch.ones(3), "n": {"b": numbers.clone(), "m": {"c": numbers.short()}}},
        [count],
    )


def expect(path: Path, rows: int) -> None:
    loaded = load(path)
    assert loaded.batch_size == (rows,)
    for key, value in flat(0, rows).items(True, True):
        assert torch.equal(loaded[key], value), key


def state(path: Path) -> dict[str, tuple[int, bytes | str]]:
    """Everything that there is below a directory: the mode of each entry, and its bytes or where it leads."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for entry in sorted([path, *path.rglob("*")]):
        status = os.lstat(entry)
        what: bytes | str = ""
        if stat.S_ISLNK(status.st_mode):
            what = os.readlink(entry)
        elif stat.S_ISREG(status.st_mode):
            what = entry.read_bytes()
        found[str(entry.relative_to(path))] = status.st_mode, what
    return found


def theirs(path: Path, rows: Any, allow_pickle: bool | None = True) -> type[BaseException] | None:
    """What tensordict raises; None: it appends."""
    return _family(lambda: tensordict.append_memmap(path, rows, allow_pickle=allow_pickle))


def ours(path: Path, rows: Any, allow_pickle: bool | None = True) -> type[BaseException] | None:
    return _family(lambda: tdgpu.append_memmap(path, rows, allow_pickle=allow_pickle))


def _family(call: Any) -> type[BaseException] | None:
    try:
        call()
    except (TypeError, ValueError, FileNotFoundError, RuntimeError) as error:
        families = (TypeError, ValueError, FileNotFoundError, RuntimeError)
        return next(base for base in families if isinstance(error, base))
    return None


def load(path: Path) -> Any:
    return tensordict.load_memmap(path, allow_pickle=True)


def check_like_tensordict(path: Path, *calls: Any) -> None:
    """Appends the rows of each call to a save and, by tensordict, to a copy: all is the same afterwards."""
    copy = path.with_name(f"{path.name}.theirs")
    shutil.copytree(path, copy)
    for rows in calls:
        assert theirs(copy, rows) is None
        tdgpu.append_memmap(path, rows, allow_pickle=True)
        assert state(path) == state(copy)
    assert_same(load(path), load(copy))
    assert_same(tdgpu.load_memmap(path, allow_pickle=True), load(copy))


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock of a save."""
    try:
        WriterLock(str(path), 0).release()
    except errors.SaveLocked:
        return False
    return True


@contextlib.contextmanager
def ring_of(nbytes: int, **others: Any):
    """Options with a host ring of so many bytes: one that was made before is not used."""
    outlets.close_idle()
    with tdgpu.options(ring_bytes=nbytes, **others):
        yield
    outlets.close_idle()


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.005)


def failing(code: int) -> Callable[..., None]:
    def function(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return function


def refusing(code: int) -> Callable[..., None]:
    def function(*_: Any, **__: Any) -> None:
        raise outgoing.FileError(0, code)

    return function


# Raises KeyboardInterrupt in the main thread at the nth of the places where Python runs signal handlers: a function is
# entered, a call has returned, a loop goes round.
INTERRUPTS = '''
import contextlib, dis, os, shutil, signal, sys, threading, torch, tdgpu, tensordict
from pathlib import Path
from tensordict import TensorDict
from tdgpu.layout.lock import WriterLock

signal.signal(signal.SIGINT, signal.SIG_IGN)  # as which one comes again that came during a finalizer

def handler(code, at, known={}):
    """Where an exception at this instruction goes."""
    if not hasattr(dis, "_parse_exception_table"):
        return None
    if code not in known:
        known[code] = dis._parse_exception_table(code)
    return next((entry.target for entry in known[code] if entry.start <= at < entry.end), None)

class Interrupt:
    def __init__(self, at):
        self.left, self.at, self.last = at, None, {}
    def __enter__(self):
        sys.settrace(self.trace)
        return self
    def __exit__(self, *_):
        sys.settrace(None)
        self.last.clear()
    def trace(self, frame, event, argument):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            before, self.last[frame] = self.last.get(frame), frame.f_lasti
            name = "" if before is None else dis.opname[frame.f_code.co_code[before]]
            if (name.startswith("CALL") and "INTRINSIC" not in name or name in ("RESUME", "JUMP_BACKWARD")) and (
                # It would have been raised by that instruction, and not by the next.
                handler(frame.f_code, before) == handler(frame.f_code, frame.f_lasti)):
                self.left -= 1
                if self.left == 0:
                    self.at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                    raise KeyboardInterrupt
        elif event == "return":
            self.last.pop(frame, None)
        return self.trace

def flat(first, count):
    numbers = torch.arange(first, first + count)
    return TensorDict({"a": numbers.float().view(-1, 1) * torch.ones(3),
                       "n": {"b": numbers.clone(), "m": {"c": numbers.short()}}}, [count])

def files(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}

def is_free(path):
    try:
        WriterLock(str(path), 0).release()
    except tdgpu.SaveLocked:
        return False
    return True
'''
