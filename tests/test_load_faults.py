"""What goes wrong while bytes move: the leaf is named, nothing hangs, and the next load works."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from test_load_device import same_values, save_random

import tdgpu
from tdgpu import errors
from tdgpu.transfer import generic, native, registry

PATHS = ["auto", "host", "generic"]


@pytest.fixture
def hooked(monkeypatch):
    """What threads report on stderr."""
    seen: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    return seen


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", ["EIO", "truncated"])
def test_a_blocking_load_names_the_leaf(faulty, tmp_path, path, fault):
    td = save_random(tmp_path, large=3)
    with tdgpu.options(path=path):
        if fault == "EIO":
            faulty.io.fail(2, errno.EIO, "large1")
        else:
            faulty.io.truncate_at(2, "large1")
        with pytest.raises(errors.LoadError, match="large1") as caught:
            tdgpu.load_memmap(tmp_path, device="simgpu")
        error = pickle.loads(pickle.dumps(caught.value))
        assert (
            error.key == ("nested", "large1")
            and error.file.endswith("nested/large1.memmap")
            and error.save == str(tmp_path)
        )
        assert error.wanted > error.found and isinstance(error, OSError)
        faulty.io.reset()
        td.memmap(tmp_path)
        assert same_values(tdgpu.load_memmap(tmp_path, device="simgpu"), td)


@pytest.mark.parametrize("path", PATHS)
def test_what_could_not_be_read_is_ff(faulty, tmp_path, path):
    TensorDict(a=torch.zeros(300_000), b=torch.zeros(10)).memmap(tmp_path)
    with tdgpu.options(path=path):
        faulty.io.fail(0, errno.EIO, "a.memmap")
        future = tdgpu.load_memmap(tmp_path, device="simgpu", return_early=True)
        with pytest.raises(errors.LoadError):
            future.synchronize()
        with pytest.raises(errors.LoadError):
            future.result()
        assert future.done()
        assert future._result["a"].isnan().all() and not future._result["b"].any()


def test_short_and_interrupted_reads_are_no_errors(faulty, tmp_path):
    td = save_random(tmp_path, large=1)
    faulty.io.set(short_reads=1, eintr_every=3)
    for path in PATHS:
        with tdgpu.options(path=path):
            assert same_values(tdgpu.load_memmap(tmp_path, device="simgpu"), td)


@pytest.mark.parametrize("path", PATHS)
def test_a_failure_after_the_call_returned(faulty, tmp_path, path, hooked):
    """As CUDA reports: at once on stderr, and as an exception from the next call on the device."""
    td = save_random(tmp_path, large=6)
    with tdgpu.options(path=path, ring_bytes=256 << 10):
        faulty.io.set(delay_us=2000)
        faulty.io.fail(2, errno.EIO, "large5")
        if path == "auto":
            tdgpu.load_memmap(tmp_path, device="simgpu", non_blocking=True)
            until(lambda: hooked)
            assert hooked[0].exc_type is errors.LoadError and "large5" in str(hooked[0].exc_value)
            with pytest.raises(errors.LoadError, match="large5"):
                tdgpu.load_memmap(tmp_path, device="simgpu")
        else:  # the calling thread has read everything when the call returns
            with pytest.raises(errors.LoadError, match="large5"):
                tdgpu.load_memmap(tmp_path, device="simgpu", non_blocking=True)
        faulty.io.reset()
        assert same_values(tdgpu.load_memmap(tmp_path, device="simgpu", non_blocking=True), td)
        registry.synchronize()
    assert len(hooked) <= 1


def test_synchronize_raises_what_failed_once(faulty, tmp_path, hooked):
    save_random(tmp_path, large=6)
    with tdgpu.options(ring_bytes=256 << 10):
        faulty.io.set(delay_us=2000)
        faulty.io.fail(2, errno.EIO, "large5")
        tdgpu.load_memmap(tmp_path, device="simgpu", non_blocking=True)
        with pytest.raises(errors.LoadError, match="large5"):
            tdgpu.synchronize("simgpu")
        tdgpu.synchronize()


def test_a_dropped_future_still_reports(faulty, tmp_path, hooked):
    save_random(tmp_path, large=6)
    with tdgpu.options(ring_bytes=256 << 10):
        faulty.io.set(delay_us=2000)
        faulty.io.fail(2, errno.EIO, "large5")
        tdgpu.load_memmap(tmp_path, device="simgpu", return_early=True)
        gc.collect()
        until(lambda: hooked)
        with pytest.raises(errors.LoadError, match="large5"):
            tdgpu.synchronize()


@pytest.mark.parametrize(
    ("path", "function", "nth"),
    [
        ("auto", "cuMemcpyHtoDAsync", 1),
        ("auto", "cuMemcpyHtoDAsync", 20),
        ("auto", "cuStreamBatchMemOp", 3),
        ("auto", "cuEventRecord", 1),
        ("auto", "cuEventRecord", 2),
        ("auto", "cuStreamWaitEvent", 1),
        ("auto", "cuStreamWaitEvent", 2),
        ("host", "cuMemcpyHtoDAsync", 20),
        ("host", "cuEventQuery", 3),
        ("generic", "cuMemcpyHtoDAsync", 20),
    ],
)
def test_a_failing_driver_call_is_raised_and_the_next_load_works(sim, tmp_path, path, function, nth):
    td = save_random(tmp_path, large=3)
    with tdgpu.options(path=path, ring_bytes=256 << 10, chunk_bytes=32 << 10):
        tdgpu.load_memmap(tmp_path, device="simgpu")
        sim.fail(function, nth, 1)
        with pytest.raises(errors.TransferError):
            tdgpu.load_memmap(tmp_path, device="simgpu", non_blocking=True)
        assert same_values(tdgpu.load_memmap(tmp_path, device="simgpu"), td)


@pytest.mark.parametrize("path", PATHS)
def test_failures_do_not_use_up_what_loads_need(sim, tmp_path, path):
    td = save_random(tmp_path, large=2)
    with tdgpu.options(path=path, ring_bytes=256 << 10, chunk_bytes=32 << 10):
        for nth in range(1, 12):
            sim.fail("cuMemcpyHtoDAsync", nth, 1)
            with pytest.raises(errors.TransferError):
                tdgpu.load_memmap(tmp_path, device="simgpu")
            sim.fail("cuMemcpyHtoDAsync", 1_000_000, 1)
        assert same_values(tdgpu.load_memmap(tmp_path, device="simgpu"), td)


def test_a_broken_context_ends_in_errors_not_in_a_hang(sim, tmp_path):
    save_random(tmp_path, large=6)
    sim.set(delay_us=2000)
    with tdgpu.options(ring_bytes=256 << 10):
        future = tdgpu.load_memmap(tmp_path, device="simgpu", return_early=True)
        sim.fail("cuEventQuery", 1, 700, sticky=True)
        with pytest.raises(errors.DeviceError):
            future.synchronize()
        with pytest.raises(RuntimeError):
            tdgpu.load_memmap(tmp_path, device="simgpu")
        registry.close_all()
        sim.reset()


def test_no_device_memory_is_torchs_own_error(sim, tmp_path):
    td = save_random(tmp_path)
    TensorDict(a=torch.zeros(20_000_000)).memmap(tmp_path / "more")
    torch.accelerator.empty_cache()
    sim.set(device_limit=sim.stat("device_bytes") + (1 << 20))
    with pytest.raises(RuntimeError, match="memory"):
        tdgpu.load_memmap(tmp_path / "more", device="simgpu")
    sim.set(device_limit=-1)
    assert same_values(tdgpu.load_memmap(tmp_path, device="simgpu"), td)


def test_a_capturing_stream_is_refused(sim, tmp_path):
    td = save_random(tmp_path)
    sim.set(capturing=1)
    with pytest.raises(errors.CaptureError, match="graph"):
        tdgpu.load_memmap(tmp_path, device="simgpu")
    sim.set(capturing=0)
    assert same_values(tdgpu.load_memmap(tmp_path, device="simgpu"), td)


def test_a_future_dropped_while_a_graph_is_captured(sim, tmp_path):
    """The stream cannot be made to wait then, so the host waits: the memory must not go while it is written."""
    save_random(tmp_path, large=4)
    sim.set(delay_us=2000)
    tdgpu.load_memmap(tmp_path, device="simgpu")
    future = tdgpu.load_memmap(tmp_path, device="simgpu", return_early=True)
    flight = future._transfers[0].flight
    sim.set(capturing=1)
    del future
    gc.collect()
    assert flight.wait(0)
    sim.set(capturing=0)


def test_futures_in_reference_cycles_do_not_stop_the_next_load(sim, tmp_path):
    """The collector drops them when it likes, also within tdgpu's own locks."""
    save_random(tmp_path, leaves=100, large=6)
    sim.set(delay_us=500)
    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        for _ in range(60):
            future = tdgpu.load_memmap(tmp_path, device="simgpu", return_early=True)
            future.itself = future
            del future
    finally:
        gc.set_threshold(*before)
    tdgpu.synchronize()


@pytest.mark.parametrize("path", ["auto", "generic"])
def test_warnings_as_errors_warn_once_and_build_one_engine(sim, tmp_path, path):
    td = save_random(tmp_path)
    before = sim.pinned_bytes()
    sim.set(pinned_limit=before + (1 << 20))
    with tdgpu.options(path=path), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="pinned host memory"):
            tdgpu.load_memmap(tmp_path, device="simgpu")
        threads = threading.active_count()
        for _ in range(3):
            assert same_values(tdgpu.load_memmap(tmp_path, device="simgpu"), td)
        assert threading.active_count() <= threads + 1


def test_a_failure_is_raised_by_one_call_only(faulty, tmp_path, hooked):
    save_random(tmp_path / "bad", large=6)
    td = save_random(tmp_path / "good", seed=1)
    with tdgpu.options(ring_bytes=256 << 10):
        faulty.io.set(delay_us=1000)
        faulty.io.fail(2, errno.EIO, "large5")
        future = tdgpu.load_memmap(tmp_path / "bad", device="simgpu", return_early=True)
        future.result()
        until(lambda: hooked)  # nobody waits any more: said on stderr
        with pytest.raises(errors.LoadError, match="large5"):
            future.synchronize()
        assert same_values(tdgpu.load_memmap(tmp_path / "good", device="simgpu"), td)
        tdgpu.synchronize()


@pytest.mark.parametrize("path", ["auto", "generic"])
@pytest.mark.parametrize("swap", ["pipe", "zeros", "another file", "directory", "nothing"])
def test_a_file_that_changes_places_during_the_load(faulty, tmp_path, path, swap):
    """Neither a reader that waits for ever, nor bytes of something else."""
    td = save_random(tmp_path / "save", large=6)
    save_random(tmp_path / "other", seed=1, large=6)
    file = tmp_path / "save" / "nested" / "large5.memmap"
    with tdgpu.options(path=path, ring_bytes=256 << 10):
        faulty.io.set(delay_us=3000)
        future = tdgpu.load_memmap(tmp_path / "save", device="simgpu", return_early=True)
        file.rename(tmp_path / "away")
        if swap == "pipe":
            os.mkfifo(file)
        elif swap == "zeros":
            file.symlink_to("/dev/zero")
        elif swap == "another file":
            (tmp_path / "other" / "nested" / "large5.memmap").rename(file)
        elif swap == "directory":
            file.mkdir()
        with pytest.raises(errors.LoadError, match="large5"):
            future.synchronize()
        if swap == "directory":
            file.rmdir()
        (tmp_path / "away").rename(file)
        assert same_values(tdgpu.load_memmap(tmp_path / "save", device="simgpu"), td)


def test_an_out_is_left_alone_by_a_blocking_load_that_fails(faulty, tmp_path):
    save_random(tmp_path, large=2)
    out = TensorDict(keep=torch.ones(2), small0=torch.ones(1)).to("simgpu")
    faulty.io.fail(1, errno.EACCES, "large1")
    with pytest.raises(errors.LoadError, match="Permission denied"):
        tdgpu.load_memmap(tmp_path, out=out)
    assert set(out.keys()) == {"keep", "small0"}
    assert out["small0"].cpu().tolist() == [1.0]


def test_a_future_is_not_copied(sim, tmp_path):
    save_random(tmp_path)
    future = tdgpu.load_memmap(tmp_path, device="simgpu", return_early=True)
    with pytest.raises(TypeError, match="result"):
        pickle.dumps(future)
    with pytest.raises(TypeError, match="key"):
        future.wait(3)
    with pytest.raises(KeyError):
        future.wait(())
    future.synchronize()


def test_threads_load_at_the_same_time(sim, tmp_path):
    wanted = {}
    for i in range(4):
        wanted[i] = save_random(tmp_path / str(i), seed=i, large=2)
    failed = []

    def work(i: int) -> None:
        try:
            for n in range(6):
                path = ("auto", "host")[n % 2]
                with tdgpu.options(path=path, ring_bytes=512 << 10):
                    loaded = tdgpu.load_memmap(tmp_path / str(i), device="simgpu", non_blocking=True)
                assert same_values(loaded, wanted[i])
        except BaseException as error:
            failed.append(error)

    with tdgpu.options(ring_bytes=512 << 10, chunk_bytes=64 << 10):
        tdgpu.load_memmap(tmp_path / "0", device="simgpu")
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_an_unusable_device_is_said_plainly(tmp_path):
    save_random(tmp_path)
    if not torch.cuda.is_available():
        for name in ("cuda:0", "cuda"):
            with pytest.raises(errors.DeviceError, match="cuda"):
                tdgpu.load_memmap(tmp_path, device=name)
    with pytest.raises(RuntimeError, match="nonsense"):
        tdgpu.load_memmap(tmp_path, device="nonsense:3")


@pytest.mark.parametrize("moment", ["a copy", "the post"])
def test_a_generic_load_after_one_that_was_interrupted_twice(sim, tmp_path, monkeypatch, moment):
    """The second interrupt comes while the first is cleaned up: the next load must free the places in the ring."""
    td = save_random(tmp_path, large=4)
    with tdgpu.options(path="generic", ring_bytes=256 << 10, chunk_bytes=32 << 10):
        tdgpu.load_memmap(tmp_path, device="simgpu")
        with monkeypatch.context() as patch:

            def interrupt(*_: object, **__: object) -> None:
                raise KeyboardInterrupt

            if moment == "a copy":
                patch.setattr(generic._Work, "_copy", interrupt)
            else:
                post = native.Stage.post

                def post_and_interrupt(*arguments: Any) -> None:
                    post(*arguments)
                    raise KeyboardInterrupt

                patch.setattr(native.Stage, "post", post_and_interrupt)
            settle = generic.GenericEngine.settle
            calls: list[None] = []

            def settle_once(engine: generic.GenericEngine) -> None:
                calls.append(None)
                if len(calls) == 2:
                    raise KeyboardInterrupt
                settle(engine)

            patch.setattr(generic.GenericEngine, "settle", settle_once)
            with pytest.raises(KeyboardInterrupt):
                tdgpu.load_memmap(tmp_path, device="simgpu")
            assert len(calls) == 2
        for _ in range(3):
            assert same_values(tdgpu.load_memmap(tmp_path, device="simgpu"), td)
