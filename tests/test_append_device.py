"""Rows leave a device: the right bytes on every road, in stream order, and a device that stays usable."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from test_load_device import machine

import tdgpu
from tdgpu import errors
from tdgpu.transfer import outlets

# Of those in test_load_device, the roads that rows take; a direct read has nothing to do with a write.
MACHINES = [
    "gated", "full queue", "one hardware queue", "no memory operations", "half the ring", "no pinned memory",
    "host road wanted", "generic road wanted", "small chunks",
]  # fmt: skip


def made(first: int, count: int, device: Any = "cpu") -> TensorDict:
    """Rows `first` to `first + count`, whose every element tells which row it is of: small leaves and one of 400 KB."""
    numbers = torch.arange(first, first + count)
    return TensorDict(
        {
            "small": numbers.float(),
            "flags": (numbers % 3 == 0).view(count, 1).expand(count, 5).contiguous(),
            "nested": {"half": numbers.half().view(count, 1).repeat(1, 7), "wide": numbers.view(count, 1) * 10_000
                       + torch.arange(50_000)},
        },
        batch_size=[count],
    ).to(device)  # fmt: skip


def expect(path: Any, rows: int) -> None:
    loaded, wanted = TensorDict.load_memmap(path), made(0, rows)
    assert loaded.batch_size == (rows,)
    for key, value in wanted.items(True, True):
        assert torch.equal(loaded[key], value), key


@pytest.mark.parametrize("name", MACHINES)
def test_rows_of_a_device_arrive(sim, tmp_path, name):
    made(0, 2).memmap(tmp_path)
    with machine(sim, name):
        tdgpu.append_memmap(tmp_path, made(2, 1, "simgpu"))
        tdgpu.append_memmap(tmp_path, made(3, 6, "simgpu"))
        with tdgpu.MemmapAppender(tmp_path, durable=False) as appender:
            for i in range(9, 30, 3):
                appender.append(made(i, 3, "simgpu"))
    expect(tmp_path, 30)


def test_rows_arrive_on_whatever_accelerator_there_is(device, tmp_path):
    made(0, 1).memmap(tmp_path)
    tdgpu.append_memmap(tmp_path, made(1, 4, device))
    with tdgpu.MemmapAppender(tmp_path, flush_rows=5) as appender:
        for i in range(5, 25):
            appender.append(made(i, 1, device))
    expect(tmp_path, 25)


@pytest.mark.parametrize("name", ["gated", "small chunks", "host road wanted"])
def test_rows_may_be_overwritten_once_append_returns(sim, tmp_path, name):
    sim.set(delay_us=2000)
    made(0, 1).memmap(tmp_path)
    rows = made(0, 2, "simgpu")
    with machine(sim, name), tdgpu.MemmapAppender(tmp_path, durable=False) as appender:
        for i in range(1, 21, 2):
            for key, value in made(i, 2, "simgpu").items(True, True):
                rows[key].copy_(value, non_blocking=True)
            appender.append(rows)
            for value in rows.values(True, True):
                value.fill_(1)
    expect(tmp_path, 21)


@pytest.mark.parametrize("wait", [1, 2])
def test_a_missing_wait_on_the_way_out_shows(sim, tmp_path, wait):
    """1: the copy stream's for who makes the rows. 2: the caller's stream's for the copies."""
    wrong = 0
    for attempt in range(20):
        if wrong:
            break
        path = tmp_path / str(attempt)
        TensorDict(a=torch.zeros(0, 50_000), batch_size=[0]).memmap(path)
        before, made_, after = (torch.full((2, 50_000), float(i)).to("simgpu") for i in range(3))
        rows = before.clone()
        torch.accelerator.synchronize()
        sim.set(delay_us=3000)
        with tdgpu.MemmapAppender(path, durable=False) as appender:
            appender.append(TensorDict(a=before, batch_size=[2]))  # makes the outlet
            sim.skip("cuStreamWaitEvent", wait)
            rows.copy_(made_, non_blocking=True)
            appender.append(TensorDict(a=rows, batch_size=[2]))
            rows.copy_(after, non_blocking=True)
        assert sim.stat("skipped") == attempt + 1
        wrong += int((TensorDict.load_memmap(path)["a"][2:] != 1).sum())
    assert wrong > 0


def test_rows_of_several_places_and_of_many_forms(sim, tmp_path):
    values = torch.arange(4 * 6 * 1000, dtype=torch.float32).view(4, 6, 1000)
    complex_ = torch.complex(values[:, :, 0], values[:, :, 1])
    shapes = {**dict.fromkeys("abcde", (6, 1000)), "z": (6,), "n": (6,), "one": (3,)}
    empty = {
        key: torch.zeros(0, *shape, dtype=torch.complex64 if key == "z" else None) for key, shape in shapes.items()
    }
    TensorDict(empty, batch_size=[0]).memmap(tmp_path)
    forms = {
        "a": values.to("simgpu"),
        "b": values.transpose(1, 2).contiguous().to("simgpu").transpose(1, 2),  # strided
        "c": values[:1].to("simgpu").expand(4, 6, 1000),
        "d": torch.stack([values, -values], -1)[..., 0],  # strided, on the host
        "e": values.clone().requires_grad_(),
        "z": complex_.to("simgpu").conj(),
        "n": complex_.conj().imag,  # negated lazily, on the host
        "one": torch.arange(48.0).view(4, 12)[:, ::4].to("simgpu"),
    }
    tdgpu.append_memmap(tmp_path, TensorDict(forms, batch_size=[4]))
    tdgpu.append_memmap(tmp_path, TensorDict({k: v[:1] for k, v in forms.items()}, batch_size=[1]))
    with tdgpu.MemmapAppender(tmp_path) as appender:
        for i in range(4):
            appender.append(TensorDict({k: v[i : i + 1] for k, v in forms.items()}, batch_size=[1]))
    loaded = TensorDict.load_memmap(tmp_path)
    order = [0, 1, 2, 3, 0, 0, 1, 2, 3]
    for key, value in forms.items():
        wanted = value.detach().cpu().resolve_conj().resolve_neg()[order]
        assert torch.equal(loaded[key], wanted), key


def test_every_dtype_leaves_a_device(sim, tmp_path):
    from saves import DTYPES, FLOAT8, random_bytes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is called experimental
        rows = TensorDict({str(d): random_bytes(d, 6, 5, seed=i) for i, d in enumerate(DTYPES + FLOAT8)}, [6])
        rows[:2].memmap(tmp_path)
        on_device = TensorDict({k: v.to("simgpu") for k, v in rows.items()}, [6])
        tdgpu.append_memmap(tmp_path, on_device[2:3])
        tdgpu.append_memmap(tmp_path, TensorDict({k: v[3:4] for k, v in rows.items()}, [1]))
        with tdgpu.MemmapAppender(tmp_path) as appender:
            appender.append(on_device[4:5])
            appender.append(rows[5:])
        loaded = tdgpu.load_memmap(tmp_path)
    for key, value in rows.items():
        assert torch.equal(loaded[key].view(torch.uint8), value.view(torch.uint8)), key


class Exported:
    """What another library's device array looks like."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.streams: list[Any] = []

    def __dlpack__(self, **arguments: Any) -> Any:
        self.streams.append(arguments.get("stream"))
        return self.tensor.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def test_arrays_of_other_libraries_count_as_tensors(sim, tmp_path):
    made(0, 1).memmap(tmp_path)
    rows = made(1, 2)
    rows["nested"].set_non_tensor("half", Exported(rows["nested", "half"]))
    tdgpu.append_memmap(tmp_path, rows)
    expect(tmp_path, 3)


def test_a_lazy_stack_of_device_rows(sim, tmp_path):
    made(0, 1).memmap(tmp_path)
    tdgpu.append_memmap(tmp_path, LazyStackedTensorDict(*made(1, 3, "simgpu").unbind(0)))
    expect(tmp_path, 4)


def test_nothing_of_a_leaf_is_on_the_host_but_the_ring(sim, tmp_path):
    """Every copy from the device goes to pinned memory, and there is no more of that than the ring."""
    values = torch.randn(8, 100_000)
    TensorDict(a=values[:0], batch_size=[0]).memmap(tmp_path)
    rows = TensorDict(a=values, batch_size=[8]).to("simgpu")
    pinned, pageable = sim.pinned_bytes(), sim.stat("pageable_copies")
    with tdgpu.options(ring_bytes=256 << 10):
        tdgpu.append_memmap(tmp_path, rows)
        assert sim.stat("pageable_copies") == pageable
        assert 0 < sim.pinned_bytes() - pinned <= (256 << 10) + (64 << 10)
    assert torch.equal(TensorDict.load_memmap(tmp_path)["a"], values)


@pytest.mark.parametrize("path", ["auto", "generic"])
@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_takes_the_rows_back(faulty, tmp_path, path, fault):
    made(0, 3).memmap(tmp_path)
    sizes = {file: file.stat().st_size for file in tmp_path.rglob("*.memmap")}
    with tdgpu.options(path=path, ring_bytes=256 << 10):
        faulty.io.fail_write(3, fault, "wide")
        with pytest.raises(errors.AppendError, match="wide") as caught:
            tdgpu.append_memmap(tmp_path, made(3, 8, "simgpu"))
        assert (
            caught.value.errno == fault
            and caught.value.key == ("nested", "wide")
            and caught.value.save == str(tmp_path)
        )
        faulty.io.reset()
        assert {file: file.stat().st_size for file in tmp_path.rglob("*.memmap")} == sizes
        assert not list(tmp_path.rglob(".meta*"))
        expect(tmp_path, 3)
        tdgpu.append_memmap(tmp_path, made(3, 2, "simgpu"))
    expect(tmp_path, 5)


def test_short_and_interrupted_writes_are_no_errors(faulty, tmp_path):
    made(0, 1).memmap(tmp_path)
    faulty.io.set(short_reads=1, eintr_every=3, delay_us=100)
    with tdgpu.options(ring_bytes=256 << 10):
        tdgpu.append_memmap(tmp_path, made(1, 3, "simgpu"))
        tdgpu.append_memmap(tmp_path, made(4, 3))
    expect(tmp_path, 7)


def append_until_it_fails(appender: tdgpu.MemmapAppender, rows: TensorDict) -> None:
    for _ in range(12):
        appender.append(rows)


@pytest.mark.parametrize("nth", [1, 3, 4, 5, 10, 14])
def test_an_error_of_torch_in_the_middle_takes_only_its_rows_back(sim, tmp_path, nth):
    """Rows of several leaves, which torch packs: its own copies fail as well as those of the outlet."""
    made(0, 1).memmap(tmp_path)
    rows = made(1, 3, "simgpu")
    small = tdgpu.options(ring_bytes=256 << 10, chunk_bytes=32 << 10)
    with small, tdgpu.MemmapAppender(tmp_path, durable=False) as appender:
        appender.append(rows[:1])
        sim.fail("cuMemcpyDtoHAsync", nth, 1)
        with pytest.raises(RuntimeError):
            append_until_it_fails(appender, rows[1:2])
        sim.fail("cuMemcpyDtoHAsync", 1_000_000, 1)
        kept = appender.pending
        appender.append(rows[2:])
    loaded, wanted = TensorDict.load_memmap(tmp_path), made(0, 4)[[0, 1] + [2] * (kept - 1) + [3]]
    assert all(torch.equal(loaded[key], value) for key, value in wanted.items(True, True))


@pytest.mark.parametrize(
    ("path", "function", "nth"),
    [
        ("auto", "cuMemcpyDtoHAsync", 1),
        ("auto", "cuMemcpyDtoHAsync", 3),
        ("auto", "cuMemcpyDtoHAsync", 12),
        ("auto", "cuStreamBatchMemOp", 2),
        ("auto", "cuStreamWaitValue32", 1),
        ("auto", "cuStreamWriteValue32", 1),
        ("auto", "cuEventRecord", 1),
        ("auto", "cuStreamWaitEvent", 1),
        ("auto", "cuStreamWaitEvent", 2),
        ("generic", "cuMemcpyDtoHAsync", 5),
    ],
)
def test_a_failing_driver_call_is_raised_and_nothing_else_is_lost(sim, tmp_path, path, function, nth):
    values = torch.arange(7).view(7, 1) + torch.zeros(7, 50_000)
    TensorDict(a=values[:1], batch_size=[1]).memmap(tmp_path)
    rows = TensorDict(a=values[1:], batch_size=[6]).to("simgpu")
    with tdgpu.options(path=path, ring_bytes=256 << 10, chunk_bytes=32 << 10):
        with tdgpu.MemmapAppender(tmp_path, durable=False) as appender:
            appender.append(rows[:1])
            sim.fail(function, nth, 1)
            with pytest.raises(errors.TransferError):
                append_until_it_fails(appender, rows[1:3])
            sim.fail(function, 1_000_000, 1)
            kept = appender.pending
            assert kept % 2 == 1
            appender.append(rows[3:])
        loaded = TensorDict.load_memmap(tmp_path)["a"]
        assert torch.equal(loaded, values[[0, 1] + [2, 3] * (kept // 2) + [4, 5, 6]])


def test_a_broken_context_ends_in_errors_not_in_a_hang(sim, tmp_path):
    values = torch.randn(8, 50_000)
    TensorDict(a=values[:1], batch_size=[1]).memmap(tmp_path)
    rows = TensorDict(a=values, batch_size=[8]).to("simgpu")
    appender = tdgpu.MemmapAppender(tmp_path, durable=False)
    sim.set(delay_us=2_000_000)
    appender.append(rows)
    sim.fail("cuStreamQuery", 1, 700, sticky=True)
    with pytest.raises(errors.AppendError, match=r"broke down.* 8 rows .* lost") as caught:
        appender.flush()
    assert caught.value.save == str(tmp_path)
    with pytest.raises(errors.AppendError):
        appender.append(rows)
    appender.close()
    outlets.close_idle()
    sim.reset()
    assert torch.equal(TensorDict.load_memmap(tmp_path)["a"], values[:1])


def test_a_capturing_stream_is_refused(sim, tmp_path):
    made(0, 1).memmap(tmp_path)
    rows = made(1, 2, "simgpu")
    sim.set(capturing=1)
    with pytest.raises(errors.CaptureError, match="graph"):
        tdgpu.append_memmap(tmp_path, rows)
    sim.set(capturing=0)
    tdgpu.append_memmap(tmp_path, rows)
    expect(tmp_path, 3)


def test_a_road_that_is_insisted_on_and_not_there(sim, tmp_path):
    made(0, 1).memmap(tmp_path)
    sim.set(memops=0)
    with tdgpu.options(path="gated"), pytest.raises(errors.DeviceError, match="gated"):
        tdgpu.append_memmap(tmp_path, made(1, 1, "simgpu"))
    expect(tmp_path, 1)


def test_two_appenders_and_a_load_share_the_device(sim, tmp_path):
    sim.set(delay_us=200)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        made(0, 1).memmap(path)
    failures: list[BaseException] = []

    def work(path: Any) -> None:
        try:
            with tdgpu.MemmapAppender(path, durable=False, flush_rows=4) as appender:
                for i in range(1, 21, 2):
                    appender.append(made(i, 2, "simgpu"))
                    loaded = tdgpu.load_memmap(path, device="simgpu")
                    assert torch.equal(loaded["small"].cpu(), torch.arange(len(loaded)).float())
        except BaseException as error:
            failures.append(error)

    with tdgpu.options(ring_bytes=256 << 10):
        threads = [threading.Thread(target=work, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    for path in paths:
        expect(path, 21)


def test_a_forked_child_cannot_use_the_device_or_its_parents_appender(sim, tmp_path):
    made(0, 1).memmap(tmp_path / "a")
    made(0, 1).memmap(tmp_path / "b")
    appender = tdgpu.MemmapAppender(tmp_path / "a", durable=False)
    appender.append(made(1, 1, "simgpu"))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            rows = TensorDict(small=torch.ones(1))  # nothing that needs threads of torch
            for call in (lambda: appender.append(rows), appender.flush):
                try:
                    call()
                except errors.ForkError:
                    code += 1
            appender.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    appender.close()
    expect(tmp_path / "a", 2)
