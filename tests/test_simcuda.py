"""The simulated CUDA driver, by its own calls: what it lets pass, what it catches, and the faults it can be given."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import simgpu
from simgpu.driver_calls import WAIT, WRITE, Driver, MemOp, Pinned, in_thread

KB = 1024
POISON = 0xCB  # of device memory that was never written


@pytest.fixture
def sim() -> Iterator[simgpu.Sim]:
    sim = simgpu.require()
    sim.reset()
    yield sim
    sim.reset()


@pytest.fixture
def driver(sim: simgpu.Sim) -> Iterator[Driver]:
    with Driver(sim.driver_path).current() as driver:
        yield driver


def device_bytes(driver: Driver, address: int, size: int, stream: int) -> bytes:
    out = Pinned(driver, size)
    driver.call("cuMemcpyDtoHAsync_v2", out.address, address, size, stream)
    driver.call("cuStreamSynchronize", stream)
    data = out.bytes()
    out.free()
    return data


def test_source_rewritten_before_the_copy_is_done(sim: simgpu.Sim, driver: Driver) -> None:
    sim.set(delay_us=10000, fixed_delay=1)
    stream, target, source = driver.stream(), driver.made("cuMemAlloc_v2", 4 * KB), Pinned(driver, 4 * KB)
    driver.call("cuMemcpyHtoDAsync_v2", target, source.address, 4 * KB, stream)
    source.fill(9)
    driver.call("cuStreamSynchronize", stream)
    assert any("source of a host-to-device copy changed" in line for line in sim.violations())
    source.free()
    driver.call("cuMemFree_v2", target)


def test_source_may_change_until_the_gate_before_its_copy_opens(sim: simgpu.Sim, driver: Driver) -> None:
    """The gated copy: enqueued first, filled later. The target is poison until then."""
    stream, other = driver.stream(), driver.stream()
    target, source, flags = driver.made("cuMemAlloc_v2", KB), Pinned(driver, KB), Pinned(driver, 64)
    driver.wait_value(stream, flags.address, 1)
    driver.call("cuMemcpyHtoDAsync_v2", target, source.address, KB, stream)
    assert device_bytes(driver, target, KB, other) == bytes([POISON]) * KB
    source.fill(5)
    flags.words[0] = 1
    driver.call("cuStreamSynchronize", stream)
    assert device_bytes(driver, target, KB, stream) == bytes([5]) * KB
    assert sim.violations() == []
    source.free()
    flags.free()
    driver.call("cuMemFree_v2", target)


def test_destination_on_the_host_is_left_alone_until_its_gate_opens(sim: simgpu.Sim, driver: Driver) -> None:
    """A writer may still read the slot that a gated device-to-host copy will fill."""
    stream, source = driver.stream(), driver.made("cuMemAlloc_v2", KB)
    target, flags = Pinned(driver, KB), Pinned(driver, 64)
    target.fill(3)
    driver.wait_value(stream, flags.address, 1)
    driver.call("cuMemcpyDtoHAsync_v2", target.address, source, KB, stream)
    assert target.bytes() == bytes([3]) * KB
    flags.words[0] = 1
    driver.call("cuStreamSynchronize", stream)
    assert target.bytes() == bytes([POISON]) * KB
    target.free()
    flags.free()
    driver.call("cuMemFree_v2", source)


def test_pageable_source_is_taken_at_the_call(sim: simgpu.Sim, driver: Driver) -> None:
    stream, target, flags = driver.stream(), driver.made("cuMemAlloc_v2", KB), Pinned(driver, 64)
    source = ctypes.create_string_buffer(b"a" * KB, KB)
    driver.wait_value(stream, flags.address, 1)
    driver.call("cuMemcpyHtoDAsync_v2", target, ctypes.addressof(source), KB, stream)
    ctypes.memset(source, ord("b"), KB)
    flags.words[0] = 1
    assert device_bytes(driver, target, KB, stream) == b"a" * KB
    assert sim.stat("pageable_copies") == 1
    flags.free()
    driver.call("cuMemFree_v2", target)


def test_freeing_memory_in_flight_is_a_violation(sim: simgpu.Sim, driver: Driver) -> None:
    sim.set(delay_us=10000, fixed_delay=1)
    stream, target, source = driver.stream(), driver.made("cuMemAlloc_v2", KB), Pinned(driver, KB)
    driver.call("cuMemcpyHtoDAsync_v2", target, source.address, KB, stream)
    source.free()
    assert sim.violations() == ["cuMemFreeHost of memory in flight"]
    driver.call("cuMemFree_v2", target)


def test_early_write_frees_a_slot_too_early(sim: simgpu.Sim, driver: Driver) -> None:
    stream, flags = driver.stream(), Pinned(driver, 64)
    for early in (0, 1):
        sim.set(early_write=early)
        flags.fill(0)
        driver.wait_value(stream, flags.address, 1)
        driver.call("cuStreamWriteValue32_v2", stream, flags.address + 4, 7, 0)
        assert flags.words[1] == (7 if early else 0)
        flags.words[0] = 1
        driver.call("cuStreamSynchronize", stream)
        assert flags.words[1] == 7
    flags.free()


def test_host_function_must_not_call_the_driver(sim: simgpu.Sim, driver: Driver) -> None:
    results: list[int] = []
    version = ctypes.c_int(0)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def function(_: int) -> None:
        results.append(driver.code("cuDriverGetVersion", ctypes.byref(version)))

    stream = driver.stream()
    driver.call("cuLaunchHostFunc", stream, function, None)
    driver.call("cuStreamSynchronize", stream)
    assert results == [800]
    assert sim.violations() == ["cuDriverGetVersion called in a host function"]


def test_full_queue_blocks_the_caller_until_there_is_room(sim: simgpu.Sim, driver: Driver) -> None:
    sim.set(queue_depth=4)
    stream, flags, target = driver.stream(), Pinned(driver, 64), driver.made("cuMemAlloc_v2", KB)
    source = Pinned(driver, KB)
    driver.wait_value(stream, flags.address, 1)

    def enqueue() -> None:
        with driver.current():
            for _ in range(6):
                driver.call("cuMemcpyHtoDAsync_v2", target, source.address, KB, stream)

    thread = in_thread(enqueue)
    thread.join(0.2)
    assert thread.is_alive()
    assert sim.stat("enqueue_blocked") == 1
    flags.words[0] = 1
    thread.join(10)
    assert not thread.is_alive()
    driver.call("cuStreamSynchronize", stream)
    for memory in (flags, source):
        memory.free()
    driver.call("cuMemFree_v2", target)


def test_batch_is_one_entry_and_runs_in_order(sim: simgpu.Sim, driver: Driver) -> None:
    sim.set(queue_depth=1)
    stream, flags = driver.stream(), Pinned(driver, 64)
    operations = (MemOp * 3)(
        MemOp(WRITE, flags.address, 3), MemOp(WAIT, flags.address + 4, 1), MemOp(WRITE, flags.address + 8, 4)
    )
    driver.call("cuStreamBatchMemOp_v2", stream, 3, ctypes.byref(operations), 0)
    assert sim.stat("enqueue_blocked") == 0
    deadline = time.monotonic() + 5
    while flags.words[0] != 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert list(flags.words[:3]) == [3, 0, 0]
    flags.words[1] = 1
    driver.call("cuStreamSynchronize", stream)
    assert flags.words[2] == 4
    flags.free()


def test_without_memory_operations(sim: simgpu.Sim, driver: Driver) -> None:
    sim.set(memops=0)
    stream, flags, supported = driver.stream(), Pinned(driver, 64), ctypes.c_int(1)
    operation = MemOp(WAIT, flags.address, 0)
    assert driver.code("cuStreamWaitValue32_v2", stream, flags.address, 0, 0) == 801
    assert driver.code("cuStreamWriteValue32_v2", stream, flags.address, 0, 0) == 801
    assert driver.code("cuStreamBatchMemOp_v2", stream, 1, ctypes.byref(operation), 0) == 801
    driver.call("cuDeviceGetAttribute", ctypes.byref(supported), 122, 0)
    assert supported.value == 0
    flags.free()


def test_shared_hardware_queue_lets_a_gate_hold_up_another_stream(sim: simgpu.Sim, driver: Driver) -> None:
    sim.set(connections=1)
    gated, innocent, flags = driver.stream(), driver.stream(), Pinned(driver, 64)
    driver.wait_value(gated, flags.address, 1)
    driver.call("cuStreamWriteValue32_v2", innocent, flags.address + 4, 1, 0)
    time.sleep(0.05)
    assert flags.words[1] == 0
    flags.words[0] = 1
    driver.call("cuStreamSynchronize", innocent)
    assert flags.words[1] == 1
    flags.free()


def test_hang_is_reported_and_given_up(sim: simgpu.Sim, driver: Driver) -> None:
    sim.set(hang_ms=100)
    stream, flags = driver.stream(), Pinned(driver, 64)
    driver.wait_value(stream, flags.address, 1)
    assert driver.code("cuStreamSynchronize", stream) == 702
    assert any(line.startswith("hang: stream") for line in sim.violations())
    sim.reset()
    flags.free()


def test_lock_held_by_an_implicit_synchronize(sim: simgpu.Sim, driver: Driver) -> None:
    """A free that waits for a gate keeps other threads from enqueuing: whoever must open the gate may not enqueue."""
    sim.set(lock_while_sync=1)
    stream, flags = driver.stream(), Pinned(driver, 64)
    unrelated, target = driver.made("cuMemAlloc_v2", KB), driver.made("cuMemAlloc_v2", KB)
    driver.wait_value(stream, flags.address, 1)

    def free() -> None:
        with driver.current():
            driver.call("cuMemFree_v2", unrelated)

    def record() -> None:
        with driver.current():
            driver.call("cuEventRecord", driver.made("cuEventCreate", 2), driver.stream())

    freeing = in_thread(free)
    freeing.join(0.1)
    recording = in_thread(record)
    recording.join(0.1)
    assert freeing.is_alive()
    assert recording.is_alive()
    flags.words[0] = 1
    freeing.join(10)
    recording.join(10)
    assert not freeing.is_alive()
    assert not recording.is_alive()
    assert sim.violations() == []
    flags.free()
    driver.call("cuMemFree_v2", target)


def test_proc_address_hides_what_an_old_driver_lacks(sim: simgpu.Sim, driver: Driver) -> None:
    def address(symbol: bytes, version: int) -> tuple[int, int]:
        function, status = ctypes.c_uint64(0), ctypes.c_int(-1)
        arguments = (symbol, ctypes.byref(function), version, 0, ctypes.byref(status))
        driver.call("cuGetProcAddress_v2", *arguments)
        return function.value, status.value

    exported = ctypes.cast(driver.library.cuMemAlloc_v2, ctypes.c_void_p).value
    assert address(b"cuMemAlloc", 12000) == (exported, 0)
    assert address(b"cuStreamBatchMemOp", 11000) == (0, 2)
    assert address(b"cuNoSuchThing", 12000) == (0, 1)
    sim.set(version=11000)
    assert driver.code("cuGetProcAddress_v2", b"cuInit", ctypes.byref(ctypes.c_uint64(0)), 12000, 0, None) == 1


def test_capturing(sim: simgpu.Sim, driver: Driver) -> None:
    status, stream = ctypes.c_int(-1), driver.stream()
    driver.call("cuStreamIsCapturing", stream, ctypes.byref(status))
    assert status.value == 0
    sim.set(capturing=1)
    driver.call("cuStreamIsCapturing", stream, ctypes.byref(status))
    assert status.value == 1


def test_contexts_are_kept_apart(sim: simgpu.Sim, driver: Driver) -> None:
    stream, memory = driver.stream(), driver.made("cuMemAlloc_v2", KB)
    other = Driver(sim.driver_path, device=1)
    with other.current():
        assert other.code("cuStreamQuery", stream) == 400
        assert other.code("cuMemcpyDtoDAsync_v2", memory, memory, KB, 0) == 1
    assert [line.split(": ")[1] for line in sim.violations()] == [
        "stream of another context than the current one",
        "device memory of another context than the current one",
    ]
    driver.call("cuMemFree_v2", memory)


def test_calls_need_a_current_context(sim: simgpu.Sim, driver: Driver) -> None:
    codes: list[int] = []
    in_thread(lambda: codes.append(driver.code("cuStreamQuery", 0))).join()
    assert codes == [201]


def test_destroyed_handles_are_recognised(sim: simgpu.Sim, driver: Driver) -> None:
    stream, event = driver.stream(), driver.made("cuEventCreate", 2)
    driver.call("cuStreamDestroy_v2", stream)
    driver.call("cuEventDestroy_v2", event)
    assert driver.code("cuStreamQuery", stream) == 400
    assert driver.code("cuEventQuery", event) == 400
    assert len(sim.violations()) == 2


def test_faulty_reads(sim: simgpu.Sim, tmp_path: Path) -> None:
    path = tmp_path / "leaf.memmap"
    path.write_bytes(bytes(range(100)))
    library = ctypes.CDLL(sim.io.path, use_errno=True)
    library.simio_pread.restype = ctypes.c_ssize_t
    buffer = ctypes.create_string_buffer(100)
    descriptor = os.open(path, os.O_RDONLY)

    def read(size: int = 100, offset: int = 0) -> tuple[int, int]:
        ctypes.set_errno(0)
        got = library.simio_pread(descriptor, buffer, ctypes.c_size_t(size), ctypes.c_long(offset))
        return got, ctypes.get_errno()

    assert read() == (100, 0)
    assert buffer.raw == bytes(range(100))
    sim.io.set(short_reads=1)
    sizes = {read()[0] for _ in range(20)}
    assert len(sizes) > 3
    assert min(sizes) >= 1
    sim.io.reset()
    sim.io.set(eintr_every=2)
    assert [read() for _ in range(4)] == [(100, 0), (-1, errno.EINTR)] * 2
    assert sim.io.calls() == 4
    sim.io.reset()
    sim.io.fail(2, errno.EIO, "leaf")
    sim.io.fail(0, errno.EACCES, "another file")
    assert [read() for _ in range(3)] == [(100, 0), (-1, errno.EIO), (100, 0)]
    sim.io.reset()
    sim.io.truncate_at(2, "leaf")
    assert [read() for _ in range(2)] == [(100, 0), (50, 0)]
    os.close(descriptor)


# Without torch: these processes start in a moment.
PRELUDE = """
import os, sys
from driver_calls import Driver, Pinned
driver = Driver(sys.argv[1])
driver.call("cuCtxSetCurrent", driver.context)
"""


def run_python(sim: simgpu.Sim, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(simgpu.__file__).parent)}
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code), sim.driver_path]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_exit_with_work_queued(sim: simgpu.Sim) -> None:
    done = run_python(
        sim,
        """
        stream, flags, source = driver.stream(), Pinned(driver, 64), Pinned(driver, 4096)
        target = driver.made("cuMemAlloc_v2", 4096)
        driver.wait_value(stream, flags.address, 1)  # nobody opens this gate
        driver.call("cuMemcpyHtoDAsync_v2", target, source.address, 4096, stream)
        print("end")
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_forked_child_gets_an_error(sim: simgpu.Sim) -> None:
    done = run_python(
        sim,
        """
        child = os.fork()
        if child == 0:
            os._exit(driver.code("cuStreamQuery", 0))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
