"""The simulated torch device: it lets right code pass, and it catches the bugs that it is there to catch.

A test suite on a simulation that forgives is worth nothing, so most tests here seed a bug and expect it to be found.
"""

from __future__ import annotations

import ctypes
import textwrap
from collections.abc import Iterator, Sequence

import pytest
import simgpu
import torch
from forked import run_process
from simgpu.driver_calls import Driver
from torch import Tensor

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


# --- seeded bugs ---


def keep_busy(stream: torch.Stream) -> None:
    """Puts the stream behind the others: with `delay_us`, each allocation takes that long."""
    with stream:
        for _ in range(5):
            torch.empty(KB, device="simgpu")


def loaded_on_side_stream(wait: bool) -> bool:
    """Copies to the device on a side stream, reads on the default stream; True if the reader saw the bytes."""
    source = torch.randn(64 * KB).pin_memory()
    main, side = torch.accelerator.current_stream(), torch.Stream("simgpu")
    target = torch.empty(source.numel(), device="simgpu")
    side.wait_stream(main)
    keep_busy(side)
    with side:
        target.copy_(source, non_blocking=True)
    if wait:
        main.wait_stream(side)
    right = torch.equal(target.cpu(), source)
    side.synchronize()
    return right


def test_right_waits_give_right_bytes(sim: simgpu.Sim) -> None:
    sim.set(delay_us=2000)
    assert all(loaded_on_side_stream(wait=True) for _ in range(10))
    assert sim.violations() == []


def test_missing_wait_gives_wrong_bytes(sim: simgpu.Sim) -> None:
    sim.set(delay_us=20000, fixed_delay=1)
    assert not any(loaded_on_side_stream(wait=False) for _ in range(3))


def test_skipped_driver_call_is_a_missing_wait(sim: simgpu.Sim) -> None:
    sim.set(delay_us=20000, fixed_delay=1)
    sim.skip("cuStreamWaitEvent", 2)  # 1 orders the copy behind the allocation, 2 is the consumer's
    assert not loaded_on_side_stream(wait=True)
    assert sim.stat("skipped") == 1


def test_copy_that_does_not_wait_for_its_destination_is_overwritten(sim: simgpu.Sim) -> None:
    """The destination belongs to the allocating stream until that stream has passed its allocation."""
    sim.set(delay_us=20000, fixed_delay=1)
    sim.skip("cuStreamWaitEvent", 1)
    source = torch.randn(64 * KB).pin_memory()
    main, side = torch.accelerator.current_stream(), torch.Stream("simgpu")
    keep_busy(main)
    target = torch.empty(source.numel(), device="simgpu")
    side.wait_stream(main)
    with side:
        target.copy_(source, non_blocking=True)
    main.wait_stream(side)
    assert not torch.equal(target.cpu(), source)


def read_on_side_stream_while_freed(record: bool) -> bool:
    """Frees a tensor that a side stream still reads, and reuses its memory; True if the reader saw the bytes."""
    source = torch.randn(64 * KB).pin_memory()
    main, side = torch.accelerator.current_stream(), torch.Stream("simgpu")
    value = source.to("simgpu")
    out = torch.empty(source.numel()).pin_memory()
    side.wait_stream(main)
    keep_busy(side)
    with side:
        out.copy_(value, non_blocking=True)
    if record:
        value.record_stream(side)
    del value
    reused = torch.full((source.numel(),), 7.0).to("simgpu")
    side.synchronize()
    del reused
    return torch.equal(out, source)


def test_missing_record_stream_gives_wrong_bytes(sim: simgpu.Sim) -> None:
    sim.set(delay_us=10000, fixed_delay=1)
    assert read_on_side_stream_while_freed(record=True)
    assert not read_on_side_stream_while_freed(record=False)
    assert sim.violations() == []


def test_host_read_before_the_copy_is_done_sees_poison(sim: simgpu.Sim) -> None:
    sim.set(delay_us=20000, fixed_delay=1)
    value = torch.ones(KB, device="simgpu")
    out = torch.zeros(KB).pin_memory()
    out.copy_(value, non_blocking=True)
    assert not torch.equal(out, torch.zeros(KB))
    assert not torch.equal(out, torch.ones(KB))
    torch.accelerator.synchronize()
    assert torch.equal(out, torch.ones(KB))


def test_pinned_tensor_may_go_while_torch_copies_it(sim: simgpu.Sim) -> None:
    sim.set(delay_us=5000, fixed_delay=1)
    source = torch.ones(64 * KB).pin_memory()
    target = source.to("simgpu", non_blocking=True)
    before = sim.pinned_bytes()
    del source
    assert sim.pinned_bytes() == before
    assert torch.equal(target.cpu(), torch.ones(64 * KB))
    torch.accelerator.synchronize()
    torch.empty(4, pin_memory=True)  # reclaims
    assert sim.pinned_bytes() < before
    assert sim.violations() == []


def test_memory_that_was_never_written_is_poison(sim: simgpu.Sim) -> None:
    poison = torch.full((KB,), POISON, dtype=torch.uint8)
    fresh = torch.empty(KB, dtype=torch.uint8, device="simgpu")
    assert torch.equal(fresh.cpu(), poison)
    fresh.zero_()
    del fresh
    assert torch.equal(torch.empty(KB, dtype=torch.uint8, device="simgpu").cpu(), poison)


# --- limits, faults, hangs ---


def test_pinned_limit(sim: simgpu.Sim) -> None:
    sim.set(pinned_limit=sim.pinned_bytes() + 64 * KB)
    held = torch.empty(32 * KB, dtype=torch.uint8, pin_memory=True)
    with pytest.raises(RuntimeError, match=r"pinned host memory.*OUT_OF_MEMORY"):
        torch.empty(64 * KB, dtype=torch.uint8, pin_memory=True)
    del held


def test_device_limit(sim: simgpu.Sim) -> None:
    torch.accelerator.empty_cache()
    sim.set(device_limit=sim.stat("device_bytes:0") + 256 * KB)
    held = torch.empty(128 * KB, dtype=torch.uint8, device="simgpu")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(512 * KB, dtype=torch.uint8, device="simgpu")
    del held
    torch.empty(256 * KB, dtype=torch.uint8, device="simgpu")  # after giving back what was cached


def test_failures_and_sticky_errors(sim: simgpu.Sim, driver: Driver) -> None:
    sim.fail("cuEventCreate", 2, 999)
    driver.made("cuEventCreate", 0)
    event = ctypes.c_uint64(0)
    assert driver.code("cuEventCreate", ctypes.byref(event), 0) == 999
    assert driver.code("cuEventCreate", ctypes.byref(event), 0) == 0
    sim.fail("cuMemAlloc", 1, 719, sticky=True)
    assert driver.code("cuMemAlloc_v2", ctypes.byref(event), KB) == 719
    assert driver.code("cuStreamSynchronize", 0) == 719
    with pytest.raises(RuntimeError, match="CUDA_ERROR_LAUNCH_FAILED"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize("simgpu:1")  # the other context is not affected
    sim.reset()
    torch.accelerator.synchronize()


def test_unknown_names_are_refused(sim: simgpu.Sim) -> None:
    with pytest.raises(ValueError, match="dealy_us"):
        sim.set(dealy_us=1)
    with pytest.raises(ValueError, match="cuMemAllocAsync"):
        sim.fail("cuMemAllocAsync", 1, 2)
    with pytest.raises(ValueError, match="short_read"):
        sim.io.set(short_read=1)


# --- devices and contexts ---


def test_two_devices_in_torch(sim: simgpu.Sim) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("simgpu")
    assert torch.accelerator.device_count() == 2
    first = torch.arange(6.0, device="simgpu").reshape(2, 3)
    torch.accelerator.set_device_index(1)
    second = torch.ones(2, 3, device="simgpu")
    assert second.device == torch.device("simgpu", 1)
    second.copy_(first)
    assert torch.equal((second * 2).cpu(), first.cpu() * 2)
    assert first.to("simgpu:1").device.index == 1
    assert sim.violations() == []


def test_streams_of_torch_are_streams_of_the_driver(sim: simgpu.Sim, driver: Driver) -> None:
    assert torch.accelerator.current_stream().native_handle == 0  # type: ignore[attr-defined]
    stream = torch.Stream("simgpu")
    driver.call("cuStreamQuery", stream.native_handle)  # type: ignore[attr-defined]
    start, end = (torch.Event("simgpu", enable_timing=True) for _ in range(2))
    start.record(stream)
    end.record(stream)
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0


# --- tensors ---

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_makes_the_round_trip(sim: simgpu.Sim, dtype: torch.dtype) -> None:
    source = torch.randint(0, 2, (6, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    moved = source.to("simgpu")
    assert moved.dtype == dtype
    assert torch.equal(moved.cpu().view(torch.uint8), source.view(torch.uint8))
    assert torch.equal(moved.view(torch.uint8).cpu(), source.view(torch.uint8))
    part = moved.narrow(0, 2, 3).t()
    assert torch.equal(part.cpu().contiguous().view(torch.uint8), source[2:5].t().contiguous().view(torch.uint8))
    whole = torch.empty(0, dtype=dtype, device="simgpu").set_(moved.untyped_storage(), 4, (5, 4), (4, 1))
    assert torch.equal(whole.cpu().view(torch.uint8), source[1:].contiguous().view(torch.uint8))


def test_strided_copies_touch_nothing_else(sim: simgpu.Sim) -> None:
    target = torch.zeros(4, 6, device="simgpu")
    target[:, 1:3] = torch.ones(4, 2)
    target.t()[5].copy_(torch.full((4,), 2.0))
    expected = torch.zeros(4, 6)
    expected[:, 1:3], expected[:, 5] = 1, 2
    assert torch.equal(target.cpu(), expected)
    assert torch.equal((target > 1).nonzero().cpu(), (expected > 1).nonzero())
    assert torch.equal(target[torch.tensor([2, 0], device="simgpu")].cpu(), expected[[2, 0]])


def test_conjugate_and_negative_views(sim: simgpu.Sim) -> None:
    value = torch.randn(3, 4, dtype=torch.complex64)
    moved = value.to("simgpu")
    assert torch.equal(moved.conj().cpu(), value.conj())
    assert torch.equal(moved.conj().imag.cpu(), value.conj().imag)
    assert torch.equal(torch.view_as_real(moved).cpu(), torch.view_as_real(value))
    moved.conj().copy_(value)
    moved.conj().imag.mul_(2)
    value.conj().copy_(value.clone())
    value.conj().imag.mul_(2)
    assert torch.equal(moved.cpu(), value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors(sim: simgpu.Sim) -> None:
    buffer = torch.arange(10.0).to("simgpu")
    sizes, strides, offsets = torch.tensor([[2, 3], [2, 2]]), torch.tensor([[3, 1], [2, 1]]), torch.tensor([0, 6])
    nested = torch._nested_view_from_buffer(buffer, sizes, strides, offsets)
    expected = [torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 10.0).reshape(2, 2)]

    def same(parts: Sequence[Tensor]) -> bool:
        return len(parts) == 2 and all(torch.equal(a.cpu(), b) for a, b in zip(parts, expected, strict=True))

    assert nested.device.type == "simgpu"
    assert nested.is_nested
    assert same(nested.unbind())
    assert same(nested.cpu().unbind())
    assert same(nested.cpu().to("simgpu").unbind())
    assert same(nested.clone().unbind())
    assert torch.equal(nested._nested_tensor_size(), sizes)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_step_equals_the_cpu(sim: simgpu.Sim, optimizer: type[torch.optim.Optimizer]) -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)
        inputs, wanted = torch.randn(5, 4).to(device), torch.randn(5, 1).to(device)
        step = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        for _ in range(2):
            step.zero_grad()
            (model(inputs) - wanted).square().mean().backward()
            step.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    sim.set(delay_us=50)
    for ours, reference in zip(train("simgpu"), train("cpu"), strict=True):
        torch.testing.assert_close(ours, reference)
    assert sim.violations() == []


def test_storages_can_grow_and_shrink(sim: simgpu.Sim) -> None:
    value = torch.arange(4.0, device="simgpu")
    value.untyped_storage().resize_(32)
    value.resize_(8)
    assert torch.equal(value[:4].cpu(), torch.arange(4.0))
    value.untyped_storage().resize_(0)
    assert value.untyped_storage().nbytes() == 0


def test_memory_statistics(sim: simgpu.Sim) -> None:
    before = torch.accelerator.memory_allocated()
    value = torch.empty(64 * KB, dtype=torch.uint8, device="simgpu")
    assert torch.accelerator.memory_allocated() == before + 64 * KB
    del value
    assert torch.accelerator.memory_allocated() == before


# --- the process ---


def run_python(code: str) -> tuple[int, str, str]:
    return run_process("import torch, simgpu\nsim = simgpu.load()\n" + textwrap.dedent(code), simulated=True)


def test_only_the_devices_used_get_a_context_and_exit_is_clean_with_work_queued(sim: simgpu.Sim) -> None:
    done = run_python("""
        from simgpu.driver_calls import Driver, Pinned
        print(sim.stat("contexts"))
        torch.accelerator.set_device_index(1)
        torch.zeros(3, device="simgpu").cpu()
        print(sim.stat("contexts:0"), sim.stat("contexts:1"))

        driver = Driver(sim.driver_path, device=1)
        driver.call("cuCtxSetCurrent", driver.context)
        flags = Pinned(driver, 64)
        stream = torch.Stream("simgpu")
        driver.wait_value(stream.native_handle, flags.address, 1)  # nobody opens this gate
        source = torch.ones(4096).pin_memory()
        with stream:
            kept = source.to("simgpu", non_blocking=True)
    """)
    assert done == (0, "0\n0 1\n", "")
