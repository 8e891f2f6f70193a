"""A whole process: exit, interrupt, fork, limits, import. Each in a process of its own, with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import simgpu
import torch
from forked import run_process
from tensordict import TensorDict

import tdgpu

HERE = Path(__file__).parent

PROLOGUE = """
import sys, os, time, signal, threading, errno
import simgpu
sim = simgpu.load()
import torch, tdgpu
from tdgpu.transfer import native, registry
prefix = sys.argv[1]
"""
PYTHONPATH = os.pathsep.join([str(HERE), str(HERE.parent)])


@pytest.fixture(autouse=True)
def simulation():
    simgpu.require()


def run(code: str, prefix: Path, *, timeout: float = 60, **environment: str) -> tuple[int, str, str]:
    """Runs code with the simulated device: its status, stdout, stderr. After the time it is aborted, which fails."""
    status, out, err = run_process(PROLOGUE + code, prefix, timeout=timeout, simulated=True, **environment)
    assert status != -signal.SIGABRT, out + err
    return status, out, err


def ok(done: tuple[int, str, str]) -> str:
    status, out, err = done
    assert status == 0, out + err
    assert "Traceback" not in err and "terminate" not in err, err
    return out


def fresh(*command: str) -> tuple[int, str, str]:
    """Runs python in a process that has imported nothing yet."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("process") / "save"
    TensorDict({f"w{i}": torch.full((250_000,), float(i)) for i in range(16)}).memmap(path)
    return path


def test_importing_touches_no_device(save):
    code = "print([sim.stat(f'contexts:{i}') for i in range(2)], 'cupy' in sys.modules, threading.active_count())"
    assert ok(fresh("-c", PROLOGUE + code, str(save))) == "[0, 0] False 1\n"


def test_only_the_device_asked_for_gets_a_context(save):
    code = """
import simgpu
torch_contexts = [sim.stat(f"contexts:{i}") for i in range(2)]
loaded = tdgpu.load_memmap(prefix, device="simgpu:1")
print(torch_contexts[0] == sim.stat("contexts:0"), sim.stat("contexts:1") > torch_contexts[1], loaded.device)
"""
    assert ok(run(code, save)).strip() == "True True simgpu:1"


def test_what_a_script_leaves_open_ends_in_silence(tmp_path):
    """Its global variables go after the modules that their ends would need."""
    TensorDict(x=torch.arange(40.0), batch_size=[40]).memmap(tmp_path / "save")
    code = """
import sys, torch, tensordict, tdgpu
prefix = sys.argv[1]
archive = tdgpu.pack_memmap(prefix, prefix + ".tdz", compression="deflate")
readers = [tdgpu.MemmapReader(prefix), tdgpu.MemmapDataset(prefix)[3]]
kept = [tdgpu.load_memmap(prefix), tdgpu.load_memmap(archive), *readers]
loaders = [tdgpu.DeviceLoader(place, 2) for place in (prefix, archive)]
kept += [*loaders, *map(iter, loaders), *map(next, map(iter, loaders))]
appender = tdgpu.MemmapAppender(prefix)
appender.append(tdgpu.load_memmap(prefix)[:1])
appender.flush()
tensordict.kept = kept  # a module that goes after tdgpu's
print(len(kept))
"""
    done = fresh("-c", code, str(tmp_path / "save"))
    assert done == (0, "10\n", "")
    assert len(tdgpu.load_memmap(tmp_path / "save")) == 41


@pytest.mark.parametrize("path", ["auto", "host", "generic"])
@pytest.mark.parametrize("arguments", ["non_blocking=True", "return_early=True"])
def test_exit_with_a_load_under_way_is_prompt_and_clean(save, path, arguments):
    code = f"""
import forked
forked.at_the_very_end.append(lambda: print(time.monotonic(), flush=True))
tdgpu.load_memmap(prefix, device="simgpu")
native.set_pread(sim.io.pread_address)
sim.io.set(delay_us=20000)
sim.set(delay_us=5000)
loaded = tdgpu.load_memmap(prefix, device="simgpu", {arguments})
print(time.monotonic(), flush=True)
"""
    begin, end = ok(run(code, save, TDGPU_PATH=path, TDGPU_RING_BYTES="1M")).split()
    assert float(end) - float(begin) < 3


def test_exit_while_the_device_hangs(save):
    """Work of the user's own that never ends must not keep the process from ending."""
    code = """
sim.set(hang_ms=600_000)
tdgpu.load_memmap(prefix, device="simgpu")
sim.set(delay_us=100_000_000, fixed_delay=1)
x = torch.empty(10, device="simgpu")
x.copy_(torch.ones(10).pin_memory(), non_blocking=True)
loaded = tdgpu.load_memmap(prefix, device="simgpu", non_blocking=True)
print("returned", flush=True)
"""
    _, out, _ = run(code, save, timeout=30)
    assert "returned" in out


@pytest.mark.parametrize("path", ["auto", "host", "generic"])
def test_ctrl_c_is_heard_and_the_next_load_works(save, path):
    code = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us with SIGINT ignored
tdgpu.load_memmap(prefix, device="simgpu")
native.set_pread(sim.io.pread_address)
sim.io.set(delay_us=50000)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try:
    tdgpu.load_memmap(prefix, device="simgpu")
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - begin < 3)
native.set_pread(None)
loaded = tdgpu.load_memmap(prefix, device="simgpu")
print(all((loaded[f"w{i}"].cpu() == i).all().item() for i in range(16)), sim.violations())
"""
    assert ok(run(code, save, TDGPU_PATH=path, TDGPU_RING_BYTES="1M")) == "interrupted True\nTrue []\n"


@pytest.mark.parametrize("path", ["auto", "host", "generic"])
def test_interrupts_at_any_moment(save, path):
    """A hundred loads, each interrupted somewhere: no load hangs, no memory is written after it was given back."""
    code = """
import random
def interrupt(*_):
    if armed:  # a signal that another thread has received may be handled here some time later
        raise KeyboardInterrupt
armed = False
signal.signal(signal.SIGALRM, interrupt)
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as which one comes again that came during a finalizer
sim.set(delay_us=200)
tdgpu.load_memmap(prefix, device="simgpu", subpath="")
random.seed(1)
interrupted = 0
for i in range(100):
    ways = [{}, {"non_blocking": True}, {"return_early": True}]
    armed = True
    try:
        signal.setitimer(signal.ITIMER_REAL, random.choice([0.0005, 0.002, 0.005, 0.02]) * (0.5 + random.random()))
        loaded = tdgpu.load_memmap(prefix, device="simgpu", **ways[i % 3])
        armed = False
    except KeyboardInterrupt:
        armed = False
        interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    loaded = None
loaded = tdgpu.load_memmap(prefix, device="simgpu")
right = all((loaded[f"w{i}"][:1000].cpu() == i).all().item() for i in range(16))
print(interrupted > 20, right, sim.violations())
"""
    status, out, err = run(code, save, TDGPU_PATH=path, TDGPU_RING_BYTES="1M", timeout=110)
    assert (status, out) == (0, "True True []\n"), err


def test_interrupts_of_loads_to_the_cpu(tmp_path):
    """Native threads inflate into the tensors' memory: it must not go before them, whenever the interrupt comes."""
    code = """
import random, threading
from tensordict import TensorDict
td = TensorDict({f"w{i}": torch.full((300_000,), float(i)) for i in range(8)})
archives = [tdgpu.save(td, f"{prefix}/{block}.tdz", compression="deflate", block_size=block) for block in (65536, None)]
def interrupt(*_):
    if armed:
        raise KeyboardInterrupt
armed = False
signal.signal(signal.SIGALRM, interrupt)
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as which one comes again that came during a finalizer
random.seed(1)
threads = threading.active_count()
interrupted = 0
for i in range(200):
    ways = [{}, {"return_early": True}, {"rows": None, "num_threads": 0}]
    armed = True
    try:
        signal.setitimer(signal.ITIMER_REAL, random.choice([0.0005, 0.002, 0.005, 0.01]) * (0.5 + random.random()))
        loaded = tdgpu.load_memmap(archives[i % 2], **{"num_threads": 2, **ways[i % 3]})
        if i % 3 == 1:
            loaded.result()
        armed = False
    except KeyboardInterrupt:
        armed = False
        interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    loaded = None
    other = [torch.full((300_000,), -1.0) for _ in range(8)]  # what is given back is used again, at once
    assert all((one == -1).all() for one in other)
loaded = tdgpu.load_memmap(archives[0], num_threads=2)
right = all((loaded[f"w{i}"] == i).all().item() for i in range(8))
left = [name for name in os.listdir("/proc/self/task") if "tdgpu" in open(f"/proc/self/task/{name}/comm").read()]
print(interrupted > 20, right, left, sim.violations())
"""
    status, out, err = run(code, tmp_path, timeout=110)
    assert (status, out) == (0, "True True [] []\n"), err


def test_a_forked_child_gets_a_clear_error_and_can_use_the_cpu(save):
    code = """
tdgpu.load_memmap(prefix, device="simgpu")
child = os.fork()
if child == 0:
    try:
        tdgpu.load_memmap(prefix, device="simgpu")
        print("no error")
    except tdgpu.errors.ForkError as error:
        on_cpu, meta = tdgpu.load_memmap(prefix), tdgpu.load_memmap(prefix, device="meta")
        print("spawn" in str(error), on_cpu["w3"].sum().item(), meta["w3"].device, flush=True)
    sys.exit(0)  # the child's exit handlers run, too
_, status = os.waitpid(child, 0)
print("child", status, (tdgpu.load_memmap(prefix, device="simgpu")["w3"].cpu() == 3).all().item())
"""
    assert ok(run(code, save)) == "True 750000.0 meta\nchild 0 True\n"


def test_a_fork_while_loads_are_under_way(save):
    code = """
tdgpu.load_memmap(prefix, device="simgpu")
sim.set(delay_us=2000)
future = tdgpu.load_memmap(prefix, device="simgpu", return_early=True)
detached = tdgpu.load_memmap(prefix, device="simgpu", non_blocking=True)
child = os.fork()
if child == 0:
    import gc
    del future, detached
    gc.collect()
    sys.exit(0)
_, status = os.waitpid(child, 0)
print("child", status, (future.result()["w3"].cpu() == 3).all().item(), sim.violations())
"""
    assert ok(run(code, save)) == "child 0 True []\n"


def test_a_child_forked_before_any_load_is_free(save):
    code = """
child = os.fork()
if child == 0:
    print((tdgpu.load_memmap(prefix, device="cpu")["w3"] == 3).all().item(), flush=True)
    sys.exit(0)
print(os.waitpid(child, 0)[1])
"""
    assert ok(run(code, save)) == "True\n0\n"


def test_three_hundred_leaves_with_few_open_files(tmp_path):
    TensorDict({f"k{i}": torch.full((50_000,), float(i)) for i in range(300)}).memmap(tmp_path)
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
loaded = tdgpu.load_memmap(prefix, device="simgpu", non_blocking=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
tdgpu.synchronize()
print(sum(float(loaded[f"k{i}"][-1].cpu()) for i in range(300)))
"""
    for path in ("auto", "generic"):
        assert ok(run(code, tmp_path, TDGPU_PATH=path)) == f"{float(sum(range(300)))}\n"


def test_no_file_is_left_open_after_a_load(save):
    code = """
tdgpu.load_memmap(prefix, device="simgpu")
def open_leaves():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    return [link for link in links if link.endswith(".memmap")]
deadline = time.monotonic() + 5
while open_leaves() and time.monotonic() < deadline:
    time.sleep(0.01)
print(open_leaves())
"""
    assert ok(run(code, save)) == "[]\n"


def test_descriptor_zero_survives(save):
    """Nothing is closed that tdgpu did not open."""
    code = """
before = os.fstat(0).st_ino
tdgpu.load_memmap(prefix, device="simgpu")
registry.close_all()
print(os.fstat(0).st_ino == before)
"""
    assert ok(run(code, save)) == "True\n"


def test_a_load_from_a_signal_handler_is_refused_not_stuck(save):
    code = """
tdgpu.load_memmap(prefix, device="simgpu")
native.set_pread(sim.io.pread_address)
sim.io.set(delay_us=20000)
seen = []
def handler(*_):
    try:
        tdgpu.load_memmap(prefix, device="simgpu")
        seen.append("loaded")
    except tdgpu.errors.DeviceError as error:
        seen.append("signal handler" in str(error))
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
with tdgpu.options(path="host"):
    loaded = tdgpu.load_memmap(prefix, device="simgpu", non_blocking=True)
print(seen, (loaded["w7"].cpu() == 7).all().item())
"""
    assert ok(run(code, save, TDGPU_RING_BYTES="1M")) == "[True] True\n"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_worker_processes(save, method, tmp_path):
    script = tmp_path / "work.py"
    script.write_text(
        """
import multiprocessing, sys
def work(prefix):
    import simgpu
    simgpu.load()
    import tdgpu
    return float(tdgpu.load_memmap(prefix, device="simgpu")["w5"].sum().item())
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    with context.Pool(1) as pool:
        print(pool.map(work, [sys.argv[1]] * 2))
"""
    )
    assert ok(fresh(str(script), str(save), method)) == "[1250000.0, 1250000.0]\n"
