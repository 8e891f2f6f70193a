"""What the tests of appends share: saves that are easy to check, tensordict beside ours, processes, interrupts."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
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

HERE = Path(__file__).parent


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


# Importing torch takes seconds: one process does it, and each piece of code runs in a fork of that one, which ends as a
# program ends.
_FORKER = """
import json, os, sys
import torch
from appends import *
torch.set_num_threads(1)  # what OpenMP has begun before a fork hangs in the child
for line in sys.stdin:
    code, arguments, out = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in enumerate(("in", "out", "err")):
    file = os.open(os.devnull if number == 0 else f"{out}/{name}", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, number)
    os.close(file)
sys.argv = ["-c", *arguments]
exec(compile(code, "<test>", "exec"), {"__name__": "__main__"})
"""


class _Forker:
    def __init__(self) -> None:
        # A pool of threads, such as OpenMP's, does not survive a fork.
        paths = os.pathsep.join([str(HERE), str(HERE.parent)])
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._out = tempfile.mkdtemp(prefix="tdgpu-test-")
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", _FORKER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
        atexit.register(self._close)

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.kill()  # other children of this process may hold its input open
        self._process.wait(20)
        shutil.rmtree(self._out, ignore_errors=True)

    def run(self, code: str, arguments: list[str], timeout: float) -> tuple[int, str, str]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([code, arguments, self._out]) + "\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        too_long = threading.Timer(timeout, os.kill, (child, signal.SIGABRT))  # faulthandler says where it was
        too_long.start()
        status = int(process.stdout.readline())
        too_long.cancel()
        return status, Path(self._out, "out").read_text(), Path(self._out, "err").read_text()


_forkers: list[_Forker] = []


def run_process(code: str, *arguments: Any, timeout: float = 60) -> tuple[int, str, str]:
    """Runs code in a process of its own, which is ended if that takes too long: its status, and what it printed."""
    if not _forkers:
        _forkers.append(_Forker())
    try:
        return _forkers[0].run(textwrap.dedent(code), [str(argument) for argument in arguments], timeout)
    except BaseException:
        _forkers.clear()  # its answer may still come
        raise


def in_process(code: str, *arguments: Any, timeout: float = 60) -> str:
    """Likewise; it must end well."""
    status, out, err = run_process(code, *arguments, timeout=timeout)
    assert status == 0, out + err
    assert "Traceback" not in err and "terminate" not in err, err
    return out


# Raises KeyboardInterrupt in the main thread at the nth of the places where Python runs signal handlers: a function is
# entered, a call has returned, a loop goes round.
INTERRUPTS = '''
import contextlib, dis, os, shutil, signal, sys, threading, torch, tdgpu, tensordict
from pathlib import Path
from tensordict import TensorDict
from tdgpu.layout.lock import WriterLock

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
