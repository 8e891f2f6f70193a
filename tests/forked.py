"""Code in processes of their own that cost no more than a fork.

Importing torch takes seconds, and so does freeing all that it made when a process ends. So one process imports it, and
each piece of code runs in a fork of that one, which ends as a program ends: what it opened itself is closed, and what
was imported before is not looked through for garbage.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

# In a forked process: called after everything else that runs at its end.
at_the_very_end: list[Callable[[], object]] = []


def _end() -> None:
    while at_the_very_end:
        at_the_very_end.pop()()


def serve(simulated: str) -> None:
    """The process that is forked: for each line it reads, it writes the child's number, and then its status."""
    atexit.register(_end)  # the first to be registered is the last to run
    if simulated:
        importlib.import_module("simgpu").load()
    importlib.import_module("torch").set_num_threads(1)  # what OpenMP has begun before a fork hangs in the child
    for name in ("appends", "loaders"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        code, arguments, environment, out = json.loads(line)
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
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<test>", "exec"), {"__name__": "__main__"})


class _Forker:
    def __init__(self, simulated: bool) -> None:
        # A pool of threads, such as OpenMP's, does not survive a fork.
        paths = os.pathsep.join([str(HERE), str(HERE.parent)])
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._out = tempfile.mkdtemp(prefix="tdgpu-test-")
        code = "import forked, sys; forked.serve(sys.argv[1])"
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", code, "simulated" if simulated else ""],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
        atexit.register(self._close)

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.kill()  # other children of this process may hold its input open
        self._process.wait(20)
        shutil.rmtree(self._out, ignore_errors=True)

    def run(self, code: str, arguments: list[str], environment: dict[str, str], timeout: float) -> tuple[int, str, str]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([code, arguments, environment, self._out]) + "\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        too_long = threading.Timer(timeout, os.kill, (child, signal.SIGABRT))  # faulthandler says where it was
        too_long.start()
        status = int(process.stdout.readline())
        too_long.cancel()
        return status, Path(self._out, "out").read_text(), Path(self._out, "err").read_text()


_forkers: dict[bool, _Forker] = {}


def run_process(
    code: str, *arguments: Any, timeout: float = 60, simulated: bool = False, **environment: str
) -> tuple[int, str, str]:
    """Runs code in a process of its own, which is ended if that takes too long: its status, and what it printed.

    Args:
        code: its lines may be indented.
        *arguments: its ``sys.argv[1:]``.
        timeout: in seconds; then it is ended by SIGABRT, and its stderr says where it was.
        simulated: whether the simulated device has been loaded there. Nothing has been done with it.
        **environment: what is added to its environment.
    """
    if simulated not in _forkers:
        _forkers[simulated] = _Forker(simulated)
    try:
        given = [str(argument) for argument in arguments]
        return _forkers[simulated].run(textwrap.dedent(code), given, environment, timeout)
    except BaseException:
        del _forkers[simulated]  # its answer may still come
        raise


def in_process(code: str, *arguments: Any, timeout: float = 60, simulated: bool = False, **environment: str) -> str:
    """Likewise; it must end well. What it printed on stdout."""
    status, out, err = run_process(code, *arguments, timeout=timeout, simulated=simulated, **environment)
    assert status == 0, out + err
    assert "Traceback" not in err and "terminate" not in err, err
    return out


_RANKS = """
import os, runpy, signal, socket, sys
world_size, seconds, sys.argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
ranks = []
for rank in range(world_size):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        signal.alarm(seconds)  # those that wait for one that has failed
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
while ranks:
    rank, status = os.wait()
    ranks.remove(rank)
    if status:
        for other in ranks:
            os.kill(other, signal.SIGKILL)
        sys.exit(1)
"""


def in_ranks(world_size: int, script: Path, *arguments: Any, timeout: int = 100) -> str:
    """Runs a script in processes that find in their environment what torchrun tells them. What they print."""
    return in_process(_RANKS, world_size, timeout, script, *arguments, timeout=timeout + 20)
