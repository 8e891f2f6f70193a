"""Batches on a device, in the order of its streams: whoever uses them, when, and on which stream."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loaders import ahead, all_numbers, numbers, save_rows, wait_until
from tensordict import TensorDict
from test_load_device import MACHINES, machine

import tdgpu
from tdgpu import DeviceLoader
from tdgpu.data import iterator as iterator_module
from tdgpu.data.fetch import _DeviceFetch

COUNT = 240
# A direct read has nothing to do with rows, which are gathered from the page cache.
ROADS = [name for name in MACHINES if name != "direct reads"]


@pytest.fixture
def save(tmp_path: Path) -> Path:
    return save_rows(tmp_path / "save", COUNT)


@contextlib.contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    previous = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(previous)


def scribble(like: torch.Tensor, stream: torch.Stream | None = None) -> None:
    """Writes to memory of that size that the allocator has to give, on a stream: now and then somebody else's."""
    with on(stream) if stream is not None else contextlib.nullcontext():
        for _ in range(4):
            torch.empty_like(like).fill_(1)


# --- who uses a batch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROADS)
def test_batches_arrive_on_every_road(sim, save, name):
    with machine(sim, name):
        before = sim.stat("pageable_copies")
        batches = [batch for epoch in range(2) for batch in DeviceLoader(save, 7, device="simgpu", prefetch_factor=3)]
        assert sim.stat("pageable_copies") == before or name in ("no pinned memory", "generic road wanted")
        sim.set(pinned_limit=-1)  # the simulation's copies back to the host are staged, too
        assert all_numbers(batches) == [*range(COUNT), *range(COUNT)]


def test_batches_arrive_on_whatever_accelerator_there_is(device, save):
    loader = DeviceLoader(save, 32, device=device, shuffle=True, seed=1)
    host = DeviceLoader(save, 32, shuffle=True, seed=1)
    for _ in range(2):
        assert all_numbers(loader) == all_numbers(host)
    for batch in loader:
        assert batch.device == device == batch["nested", "wide"].device


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("way", ["made and used there", "asked for there", "used there", "a stream for each batch"])
def test_other_streams(sim, save, way, resident):
    """The stream that is current when a batch is asked for may use it at once; another one that waits for that one."""
    sim.set(delay_us=1500)
    side, main = torch.Stream("simgpu"), torch.accelerator.current_stream()
    got: list[Any] = []
    loader = DeviceLoader(save, 24, device="simgpu", resident=resident)
    if way == "made and used there":
        with on(side):
            got = [batch["nested", "wide"] + 1 for batch in loader]
    elif way == "asked for there":
        iterator = iter(loader)
        got.append(next(iterator)["nested", "wide"] + 1)  # two more are on their way, allocated on this stream
        with on(side):
            for batch in iterator:
                got.append(batch["nested", "wide"] + 1)
                del batch  # its memory goes back to the first stream's, which must not write it yet
                scribble(torch.empty(24 * 300, dtype=torch.int32, device="simgpu"), main)
    elif way == "used there":
        for batch in loader:
            side.wait_stream(main)
            with on(side):
                got.append(batch["nested", "wide"] + 1)
                for leaf in batch.values(True, True):
                    leaf.record_stream(side)
            del batch
    else:
        iterator, streams = iter(loader), [torch.Stream("simgpu") for _ in range(3)]
        for number in range(10):
            with on(streams[number % 3]):
                got.append(next(iterator)["nested", "wide"] + 1)
        for stream in streams:
            main.wait_stream(stream)
    main.wait_stream(side)
    wide = torch.cat([one.cpu() for one in got])
    assert torch.equal(wide.flatten(), torch.arange(COUNT * 300, dtype=torch.int32) + 1)


@pytest.fixture
def many(sim, tmp_path):
    """A loader of which the last batch, asked for at once on a stream of its own, was fetched with those before it."""
    save_rows(tmp_path, COUNT)
    loader = DeviceLoader(tmp_path, 8, device="simgpu", prefetch_factor=40)
    list(loader)
    torch.accelerator.synchronize()
    sim.set(delay_us=10_000, fixed_delay=1)

    def last() -> list[int]:
        iterator = iter(loader)
        with on(torch.Stream("simgpu")):
            kept = [next(iterator) for _ in range(29)]
        with on(torch.Stream("simgpu")):
            wide = (next(iterator)["nested", "wide"] + 1).cpu()
        del kept
        return (wide[:, 0] // 300).tolist()

    return last


def test_small_batches_that_came_together_go_to_different_streams(many):
    for _ in range(3):
        assert many() == list(range(COUNT - 8, COUNT))


def test_small_batches_that_came_together_without_that_wait(many, monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(_DeviceFetch, "follow", lambda fetch: None)
    assert any(many() != list(range(COUNT - 8, COUNT)) for _ in range(10))


# --- whose memory it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [False, True])
def test_batches_that_are_kept_are_never_written_again(sim, save, resident):
    loader = DeviceLoader(save, 20, device="simgpu", resident=resident)
    kept, views = [], []
    for _ in range(3):
        for number, batch in enumerate(loader):
            if number % 4 == 0:
                kept.append(batch)
            elif number % 4 == 1:
                views.append((20 * number, batch["nested", "wide"][3:5, 7:9]))  # a view keeps all of it
    loader.close()
    del loader
    gc.collect()
    assert all_numbers(kept) == [20 * number + i for _ in range(3) for number in (0, 4, 8) for i in range(20)]
    for first, view in views:
        assert view.cpu().tolist() == [[(first + row) * 300 + 7, (first + row) * 300 + 8] for row in (3, 4)]


def test_a_batch_may_be_changed_and_differentiated(device, tmp_path):
    """Its leaves share storage, but nothing that autograd counts."""
    TensorDict(a=torch.ones(8, 3), b=torch.ones(8, 3), batch_size=[8]).memmap(tmp_path)
    for batch in DeviceLoader(tmp_path, 4, device=device):
        a, b = batch["a"].requires_grad_(), batch["b"]
        product = (a * a).sum()
        b.add_(5)
        product.backward()
        assert torch.equal(a.grad.cpu(), torch.full((4, 3), 2.0)) and not a._is_view()
        a.detach().zero_()
        assert (b == 6).all()


@pytest.mark.parametrize("name", ["gated", "small chunks", "host road wanted", "generic road wanted"])
def test_memory_is_not_recycled_while_somebody_reads_it(sim, save, name):
    """Batches are dropped at once, while work that reads them is queued: the allocator hands the same memory to the
    batches under way."""
    with machine(sim, name):
        loader = DeviceLoader(save, 8, device="simgpu", prefetch_factor=4)
        all_numbers(loader)
        sim.set(delay_us=4000)
        sums = [batch["nested", "wide"].clone() for _ in range(2) for batch in loader]
        wide = torch.cat([one.cpu() for one in sums])
        assert torch.equal(wide.flatten(), torch.arange(COUNT * 300, dtype=torch.int32).repeat(2))


@pytest.mark.parametrize("early", ["break", "close", "error"])
def test_memory_of_batches_that_are_given_up_is_not_handed_out_early(sim, save, early):
    sim.set(delay_us=3000)
    loader = DeviceLoader(save, 24, device="simgpu", prefetch_factor=5)
    for _ in range(6):
        iterator = iter(loader)
        assert numbers(next(iterator)) == list(range(24))
        if early == "close":
            iterator.close()
        elif early == "error":
            loader.transform = lambda batch: 1 // 0
            with pytest.raises(ZeroDivisionError):
                next(iterator)
            loader.transform = None
        del iterator
        # Of the size of a batch: the allocator gives the memory of those that were under way.
        ours = [torch.empty(24 * 1209, dtype=torch.uint8, device="simgpu") for _ in range(5)]
        for tensor in ours:
            tensor.fill_(7)
        assert all((tensor == 7).all() for tensor in ours)


def test_a_slot_is_not_filled_again_before_its_copy_is_over(sim, tmp_path):
    """A ring of a few batches, copies that take long, and readers that do not."""
    save_rows(tmp_path, 400)
    sim.set(delay_us=3000)
    with tdgpu.options(ring_bytes=128 << 10):
        assert all_numbers(DeviceLoader(tmp_path, 10, device="simgpu", prefetch_factor=20)) == list(range(400))


# --- these tests can fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bug", ["the consumer does not wait", "a slot is freed early", "memory is taken early"])
def test_seeded_bugs_are_caught(sim, tmp_path, bug):
    """A driver that leaves out what a bug would leave out shows as wrong bytes."""
    wide = torch.arange(40.0).view(40, 1).repeat(1, 10_000)
    TensorDict(a=wide, batch_size=[40]).memmap(tmp_path)
    wrong = 0
    with tdgpu.options(ring_bytes=256 << 10, chunk_bytes=32 << 10):
        loader = DeviceLoader(tmp_path, 8, device="simgpu", prefetch_factor=1)
        list(loader)  # makes the engine, whose own calls are not meant
        torch.accelerator.synchronize()
        for attempt in range(20):
            if wrong:
                break
            sim.set(delay_us=3000, seed=attempt)
            # Its memory is what the first batch gets; a write that is still queued must come before.
            scratch = torch.empty(80_000, device="simgpu")
            iterator = iter(loader)
            if bug == "a slot is freed early":
                sim.set(early_write=1)
            elif bug == "the consumer does not wait":
                sim.skip("cuStreamWaitEvent", 2)  # 1 is the copy stream's wait for the consumer
            else:
                sim.skip("cuStreamWaitEvent", 1)
                scratch.copy_(torch.full((80_000,), -1.0).pin_memory(), non_blocking=True)
            del scratch
            got = [next(iterator)["a"].cpu()]  # at once: later, its copy has ended by itself
            got += [batch["a"] for batch in iterator]
            sim.set(early_write=0)
            wrong += int((torch.cat([one.cpu() for one in got]) != wide).sum())
            if sim.violations():
                wrong += 1
    sim.reset()
    assert wrong > 0


# --- transform --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [False, True])
def test_a_transform_gets_the_batch_on_its_device(sim, save, resident):
    sim.set(delay_us=2000)
    threads = set()

    def transform(batch: TensorDict) -> TensorDict:
        threads.add(threading.get_ident())
        assert batch.device == torch.device("simgpu", 0)
        batch["nested", "wide"] *= 2  # in place: it is nobody else's
        return batch.set("sum", batch["nested", "wide"].sum(-1))

    loader = DeviceLoader(save, 24, device="simgpu", transform=transform, resident=resident)
    for _ in range(2):  # the save on the device stays as it was
        batches = list(loader)
        wide = torch.arange(COUNT * 300, dtype=torch.int32).view(COUNT, 300) * 2
        assert torch.equal(torch.cat([batch["nested", "wide"].cpu() for batch in batches]), wide)
        assert torch.equal(torch.cat([batch["sum"].cpu() for batch in batches]), wide.sum(-1))
    assert threads == {threading.get_ident()}


def test_a_mask_comes_in_the_order_of_the_stream(sim, save):
    sim.set(delay_us=2000)
    loader = DeviceLoader(save, 50, device="simgpu", rank=6, world_size=7, padding="mask")
    masks = [(numbers(batch.exclude("mask")), batch["mask"].cpu().tolist()) for batch in loader]
    assert [number for found, mask in masks for number, real in zip(found, mask, strict=True) if real] == list(
        range(6, COUNT, 7)
    )


# --- prefetching ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "simgpu"])
@pytest.mark.parametrize(("factor", "workers"), [(1, 0), (2, 0), (2, 3), (9, 0)])
@pytest.mark.parametrize("width", [1, 10_000])
def test_batches_are_read_before_they_are_asked_for(sim, tmp_path, monkeypatch, device, factor, workers, width):
    """As many as were asked for, each completely: on the device, too. Small ones come several at a time."""
    sim.set(delay_us=100)
    if width > 1:
        monkeypatch.setattr(iterator_module, "TOGETHER", 1)
    wide = torch.arange(120.0).view(120, 1).repeat(1, width)
    TensorDict(a=wide, batch_size=[120]).memmap(tmp_path)
    loader = DeviceLoader(tmp_path, 10, device=device, prefetch_factor=factor, num_workers=workers)
    depth = factor * max(1, workers)
    iterator = iter(loader)
    for handed_out in range(1, 13):
        next(iterator)
        wanted = min(depth, 12 - handed_out)
        assert ahead(iterator) == wanted if width > 1 else ahead(iterator) >= wanted
        if handed_out in (1, 7, 12):
            under_way = [fetch for fetch, _ in iterator._under_way]
            wait_until(lambda fetches=under_way: all(fetch.is_read(0) for fetch in fetches))  # type: ignore[misc]
            if device:
                wait_until(lambda fetches=under_way: all(fetch._transfer.flight.wait(0) for fetch in fetches))  # type: ignore[misc]
    assert next(iterator, None) is None


def test_a_loop_that_works_does_not_wait(sim, save):
    """What a step takes hides what a batch takes, and the statistics say so."""
    sim.set(delay_us=4000, fixed_delay=1)
    loader = DeviceLoader(save, 24, device="simgpu", prefetch_factor=2)
    list(loader)
    iterator = iter(loader)
    next(iterator)
    before = loader.stats()
    for _ in iterator:
        time.sleep(0.02)
    stats = loader.stats()
    assert stats.batches - before.batches == 9 and stats.rows - before.rows == 216
    assert stats.working - before.working > 0.15
    assert stats.waiting - before.waiting < 0.05


def test_the_host_does_not_wait_for_the_device(sim, save):
    """A batch is handed out when its bytes are read: its copy may take long, and only the stream waits for it."""
    loader = DeviceLoader(save, 24, device="simgpu", prefetch_factor=2)
    list(loader)
    torch.accelerator.synchronize()
    sim.set(delay_us=100_000, fixed_delay=1)
    begin = time.perf_counter()
    batches = list(loader)
    assert time.perf_counter() - begin < 0.5  # ten copies take a second
    sim.set(delay_us=0)
    assert all_numbers(batches) == list(range(COUNT))
