"""What goes wrong under a running loader: the file is named, nothing hangs, no wrong byte is handed out."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaders import all_numbers, descriptors, numbers, rows, save_rows, wait_until
from tensordict import TensorDict
from test_load_device import save_random

import tdgpu
from tdgpu import DeviceLoader, errors
from tdgpu.data import iterator as iterator_module
from tdgpu.transfer import native

COUNT = 400
# The file of this leaf is the one that things happen to.
LEAF = ("nested", "wide")


@pytest.fixture
def save(tmp_path: Path) -> Path:
    return save_rows(tmp_path / "save", COUNT)


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that most batches of these small saves are not under way yet, and some still come together."""
    monkeypatch.setattr(iterator_module, "TOGETHER", 2)


@pytest.fixture
def file(save: Path) -> Path:
    return save / "nested" / "wide.memmap"


def until_it_fails(
    batches: Iterable[Any], failure: type[Exception] | tuple[type[Exception], ...]
) -> tuple[list[int], Any]:
    """The rows that are handed out before something fails, as it must."""
    got: list[int] = []
    try:
        for batch in batches:
            got += numbers(batch)
    except failure as error:
        return got, error
    raise AssertionError("nothing failed")


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0.0, 0.5, 0.999])
def test_a_file_that_shrinks(save, file, where, left):
    """Batches before the cut are right, then comes an error that names file and leaf; not zeros, and no signal."""
    size = file.stat().st_size
    whole = file.read_bytes()
    loader = DeviceLoader(save, 20, device=where, prefetch_factor=2)
    iterator = iter(loader)
    got = numbers(next(iterator))
    os.truncate(file, int(size * left))
    more, error = until_it_fails(iterator, errors.LoadError)
    assert got + more == list(range(20 + len(more)))
    assert (error.file, error.key, error.save) == (str(file), LEAF, str(save))
    assert error.wanted > error.found == int(size * left)
    assert next(iterator, None) is None
    # It stays an error as long as the file is too short, and is none when it is whole again.
    with pytest.raises(errors.TdgpuError, match="wide"):
        all_numbers(loader)
    file.write_bytes(whole)
    assert all_numbers(loader) == list(range(COUNT))
    loader.close()


def test_a_file_that_shrinks_and_grows_again_between_two_batches(save, file, where):
    """The bytes that were cut off came back as zeros: rows of them are an error or right, never zeros."""
    size, got = file.stat().st_size, []
    loader = DeviceLoader(save, 4, device=where, prefetch_factor=1)  # so that most are not under way yet
    iterator = iter(loader)
    got += numbers(next(iterator))
    got += numbers(next(iterator))
    whole = file.read_bytes()
    os.truncate(file, size // 2)
    got += until_it_fails(iterator, errors.LoadError)[0]
    file.write_bytes(whole)
    assert got == list(range(len(got)))


@pytest.mark.parametrize("swap", ["vanishes", "another file", "another save", "directory", "pipe"])
def test_a_file_whose_name_goes_to_another(save, file, where, swap, tmp_path):
    """A loader keeps the bytes of the save that it has opened; a new one meets what is there now."""
    loader = DeviceLoader(save, 20, device=where)
    iterator = iter(loader)
    got = numbers(next(iterator))
    away = tmp_path / "away"
    if swap == "another save":
        save.rename(away)
        rows(7, 30).memmap(save)
    else:
        file.rename(away)
    if swap == "another file":
        shutil.copy(away, file)
        with open(file, "r+b") as other:
            other.write(bytes(1000))
    elif swap == "directory":
        file.mkdir()
    elif swap == "pipe":
        os.mkfifo(file)
    assert got + all_numbers(iterator) == list(range(COUNT))
    assert all_numbers(loader) == list(range(COUNT))
    loader.close()
    # Its threads and mappings are gone: it opens the files anew, and they are not those that it was made of.
    with pytest.raises(errors.TdgpuError, match="save"):
        all_numbers(loader)
    if swap in ("vanishes", "directory", "pipe"):
        with pytest.raises(errors.TdgpuError, match="wide"):
            all_numbers(DeviceLoader(save, 20, device=where))


def test_a_compressed_leaf_needs_its_file_no_more(tmp_path, where):
    archive = tdgpu.save(rows(0, 100), tmp_path / "a.tdz", compression="deflate")
    loader = DeviceLoader(archive, 30, device=where)
    assert all_numbers(loader) == list(range(100))
    os.truncate(archive, 100)
    assert all_numbers(loader) == list(range(100))


def test_memory_of_compressed_leaves_stays_while_threads_gather_from_it(tmp_path, where):
    """Also when everything is dropped in the middle."""
    wide = torch.arange(64.0).view(64, 1).repeat(1, 100_000)
    archive = tdgpu.save(TensorDict(a=wide, batch_size=[64]), tmp_path / "a.tdz", compression="deflate")
    for _ in range(3):
        loader = DeviceLoader(archive, 16, device=where, prefetch_factor=3)
        assert torch.equal(next(iter(loader))["a"][:, 7].cpu(), torch.arange(16.0))
        del loader
    if where:
        tdgpu.synchronize()


def test_a_load_under_way_holds_the_memory_that_threads_gather_from(sim, tmp_path):
    archive = tdgpu.save(rows(0, 100), tmp_path / "a.tdz", compression="deflate")
    loader = DeviceLoader(archive, 30, device="simgpu")
    iterator: Any = iter(loader)
    next(iterator)
    fetcher: Any = loader._fetcher
    memory = weakref.ref(fetcher.rows._inflated[0])
    del fetcher
    flights = [fetch._transfer.flight for fetch, _ in iterator._under_way]
    assert flights
    del loader, iterator
    assert memory() is not None
    tdgpu.synchronize()
    del flights
    wait_until(lambda: memory() is None)


def test_errors_leave_nothing_behind(save, file, where):
    whole = file.read_bytes()
    loader = DeviceLoader(save, 20, device=where, num_workers=2)
    assert all_numbers(loader) == list(range(COUNT))
    gc.collect()
    before = descriptors(), threading.active_count()
    for _ in range(5):
        iterator = iter(loader)
        next(iterator)
        os.truncate(file, 5000)
        with pytest.raises(errors.LoadError):
            list(iterator)
        file.write_bytes(whole)
        assert all_numbers(loader) == list(range(COUNT))
    del iterator
    assert (descriptors(), threading.active_count()) == before


# --- slow readers -----------------------------------------------------------------------------------------------------


class Busy:
    """Keeps the only thread that reads for a loader busy, until it is released or the time is over."""

    def __init__(self, sim: Any, loader: DeviceLoader, path: Path) -> None:
        self._sim = sim
        sim.io.reset()
        native.set_pread(sim.io.pread_address)
        sim.io.set(delay_us=400_000)  # at most, at random
        path.write_bytes(bytes(4096 * 8))
        if loader.device is None:
            fetcher: Any = loader._take_fetcher()
            loader._fetcher = fetcher
            self._memory = torch.empty(4096 * 8, dtype=torch.uint8)
            pieces = [(4096 * i, 4096, 4096 * i, 0, 0, 0, i) for i in range(8)]
            chunks = [(self._memory.data_ptr(), 4096 * 8, 0, 8, 0, 0)]
            work = native.Work(
                [(str(path), 0)], np.array(pieces, native.PIECE), np.array(chunks, native.CHUNK),
                np.empty(0, native.RUN),
            )  # fmt: skip
            self._read = fetcher._readers.post(work)
        else:
            td = TensorDict({f"k{i}": torch.zeros(70_000) for i in range(8)})
            td.memmap(path.with_suffix(".save"))
            self._read = tdgpu.load_memmap(path.with_suffix(".save"), device="simgpu", return_early=True)

    def release(self) -> None:
        self._sim.io.set(delay_us=0)
        native.set_pread(None)


@pytest.fixture
def slow(request, sim, save, tmp_path):
    """A loader on the CPU or a device, and what keeps its only thread busy."""
    made: list[Busy] = []

    def make(device: str | None, **arguments: Any) -> tuple[DeviceLoader, Busy]:
        loader = DeviceLoader(save, 50, device=device, num_workers=1, **arguments)
        all_numbers(loader)
        made.append(Busy(sim, loader, tmp_path / "slow"))
        return loader, made[-1]

    with tdgpu.options(threads=1):
        yield make
        for busy in made:
            busy.release()
        tdgpu.synchronize()


@pytest.mark.parametrize("device", [None, "simgpu"])
def test_a_timeout_is_kept_and_may_be_waited_out(slow, device):
    loader, busy = slow(device, timeout=0.05)
    iterator = iter(loader)
    begin = time.monotonic()
    with pytest.raises(errors.BatchTimeout, match=r"0\.05"):
        next(iterator)
    assert 0.04 < time.monotonic() - begin < 1
    with pytest.raises(TimeoutError):
        next(iterator)
    with pytest.raises(RuntimeError):  # what DataLoader raises
        next(iterator)
    busy.release()
    got: list[int] = []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            batch = next(iterator, None)
        except errors.BatchTimeout:
            continue
        if batch is None:
            break
        got += numbers(batch)
    assert got == list(range(COUNT))  # none is lost, none comes twice
    assert loader.state_dict()["epoch"] == 2


@pytest.mark.parametrize("device", [None, "simgpu"])
def test_giving_up_on_a_slow_reader(slow, device):
    """An iterator that is dropped, or closed by another thread, keeps nobody waiting for its batches."""
    loader, busy = slow(device)
    dropped = iter(DeviceLoader(loader.dataset, 50, device=device, timeout=0.02, num_workers=1))
    if device:
        with pytest.raises(errors.BatchTimeout):
            next(dropped)
    begin = time.monotonic()
    del dropped
    iterator = iter(loader)
    closer = threading.Timer(0.1, iterator.close)
    closer.start()
    assert list(iterator) == []
    assert time.monotonic() - begin < 3
    busy.release()
    closer.join()
    assert all_numbers(loader) == list(range(COUNT))


# --- the device -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "function", "nth"),
    [
        ("auto", "cuMemcpyHtoDAsync", 3),
        ("auto", "cuStreamWaitValue32", 2),
        ("auto", "cuStreamWriteValue32", 2),
        ("auto", "cuEventRecord", 2),
        ("auto", "cuStreamWaitEvent", 1),
        ("auto", "cuStreamWaitEvent", 2),
        ("host", "cuMemcpyHtoDAsync", 3),
        ("generic", "cuMemcpyHtoDAsync", 3),
    ],
)
def test_a_failing_driver_call_is_raised_and_the_next_epoch_works(sim, save, path, function, nth):
    with tdgpu.options(path=path):
        loader = DeviceLoader(save, 20, device="simgpu")
        assert all_numbers(loader) == list(range(COUNT))
        sim.fail(function, nth, 1)
        got, _ = until_it_fails(loader, errors.TransferError)
        assert sim.stat("failed") == 1
        assert got == list(range(len(got)))  # what was handed out is right
        assert all_numbers(loader) == list(range(COUNT))
        loader.close()


def test_failing_driver_calls_do_not_use_up_what_loaders_need(sim, save):
    with tdgpu.options(ring_bytes=256 << 10):
        loader = DeviceLoader(save, 50, device="simgpu")
        assert all_numbers(loader) == list(range(COUNT))
        for nth in range(1, 10):
            sim.fail("cuMemcpyHtoDAsync", nth, 1)
            until_it_fails(itertools.chain.from_iterable(itertools.repeat(loader)), errors.TransferError)
        assert all_numbers(loader) == list(range(COUNT))


@pytest.mark.parametrize("function", ["cuMemcpyHtoDAsync", "cuStreamWaitEvent", "cuEventRecord"])
def test_a_broken_context_ends_in_errors_not_in_a_hang(sim, save, function):
    sim.set(delay_us=1000)
    loader = DeviceLoader(save, 20, device="simgpu", prefetch_factor=3)
    iterator = iter(loader)
    numbers(next(iterator))
    sim.fail(function, 1, 700, sticky=True)
    until_it_fails(iterator, RuntimeError)
    with pytest.raises(RuntimeError):
        list(loader)
    del iterator
    loader.close()
    tdgpu.transfer.registry.close_all()
    sim.reset()
    assert all_numbers(DeviceLoader(save, 20, device="simgpu")) == list(range(COUNT))


def test_a_read_error_of_a_file_that_cannot_be_mapped_names_it(sim, save, file):
    os.truncate(file, 0)
    with pytest.raises(errors.TdgpuError, match="wide"):
        list(DeviceLoader(save, 20, device="simgpu"))


def test_no_device_memory_is_torchs_own_error(sim, tmp_path):
    TensorDict(a=torch.arange(8.0).view(8, 1).repeat(1, 1_000_000), batch_size=[8]).memmap(tmp_path)
    loader = DeviceLoader(tmp_path, 4, device="simgpu")
    with tdgpu.options(ring_bytes=32 << 20):
        torch.accelerator.empty_cache()
        sim.set(device_limit=sim.stat("device_bytes") + (1 << 20))
        with pytest.raises(RuntimeError, match="memory"):
            list(loader)
        sim.set(device_limit=-1)
        assert torch.equal(torch.cat([batch["a"][:, 9].cpu() for batch in loader]), torch.arange(8.0))


@pytest.mark.parametrize("limit", [0, 160 << 10])
def test_limits_of_pinned_memory(sim, save, limit):
    """A smaller ring, or pageable memory; one warning in those words, and the same bytes."""
    sim.set(pinned_limit=sim.pinned_bytes() + limit)
    before = sim.pinned_bytes()
    with tdgpu.options(ring_bytes=512 << 10):
        loader = DeviceLoader(save, 20, device="simgpu")
        with pytest.warns(RuntimeWarning, match="pinned host memory") as caught:
            batches = [batch for _ in range(2) for batch in loader]
        assert len(caught) == 1 and sim.pinned_bytes() - before <= limit
        sim.set(pinned_limit=-1)  # the simulation's copies back to the host are staged, too
        assert all_numbers(batches) == [*range(COUNT), *range(COUNT)]


def test_a_batch_larger_than_the_ring(sim, tmp_path):
    td = TensorDict(a=torch.arange(40.0).view(40, 1).repeat(1, 8000), batch_size=[40])
    td.memmap(tmp_path)
    pinned = sim.pinned_bytes()
    with tdgpu.options(ring_bytes=256 << 10):
        for path in ("auto", "host", "generic"):
            with tdgpu.options(path=path):
                loaded = [batch["a"].cpu() for batch in DeviceLoader(tmp_path, 20, device="simgpu", prefetch_factor=3)]
            assert torch.equal(torch.cat(loaded), td["a"])
        assert sim.pinned_bytes() - pinned <= 2 * (320 << 10)
        TensorDict(a=torch.zeros(2, 40_000), batch_size=[2]).memmap(tmp_path / "wide rows")
        with pytest.raises(errors.NotSupported, match="ring_bytes"):
            list(DeviceLoader(tmp_path / "wide rows", device="simgpu"))


def test_a_capturing_stream_is_refused(sim, save):
    loader = DeviceLoader(save, 20, device="simgpu")
    assert all_numbers(loader) == list(range(COUNT))
    sim.set(capturing=1)
    with pytest.raises(errors.CaptureError, match="graph"):
        list(loader)
    sim.set(capturing=0)
    assert all_numbers(loader) == list(range(COUNT))


def test_an_earlier_load_that_failed_is_not_taken_for_the_loaders(faulty, save, tmp_path, monkeypatch):
    """It is raised by the next call on the device, as documented; the loader then goes on."""
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    save_random(tmp_path / "other", large=6)
    with tdgpu.options(ring_bytes=256 << 10):
        loader = DeviceLoader(save, 20, device="simgpu")
        assert all_numbers(loader) == list(range(COUNT))
        faulty.io.set(delay_us=2000)
        faulty.io.fail(2, errno.EIO, "large5")
        tdgpu.load_memmap(tmp_path / "other", device="simgpu", non_blocking=True)
        wait_until(lambda: bool(seen))
        faulty.io.reset()
        with pytest.raises(errors.LoadError, match="large5"):
            list(loader)
        assert all_numbers(loader) == list(range(COUNT))
