"""How loaders and their iterators end: early, by errors, in forks and at exit; and that nothing is left of them."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from loaders import ahead, all_numbers, descriptors, native_threads, numbers, resident_bytes, save_rows, wait_until
from tensordict import TensorDict

from tdgpu import DeviceLoader, errors


@pytest.fixture
def save(tmp_path: Path) -> Path:
    return save_rows(tmp_path / "save", 200)


def threads_become(count: int) -> None:
    """A thread that has been joined may be seen for another moment."""
    wait_until(lambda: len(native_threads()) == count)


# --- early ends -------------------------------------------------------------------------------------------------------


def test_a_loop_that_is_left_early_gives_back_what_is_under_way(save, where):
    loader = DeviceLoader(save, 10, device=where, prefetch_factor=4)
    iterator = iter(loader)
    numbers(next(iterator))
    assert ahead(iterator) >= 4
    fetches = [weakref.ref(fetch) for fetch, _ in iterator._under_way]
    gone = weakref.ref(iterator)
    del iterator
    assert gone() is None  # at once, not when the collector comes by
    assert all(fetch() is None for fetch in fetches)
    assert loader.state_dict()["position"] == 10  # the loader still knows where it was
    assert all_numbers(loader) == list(range(200))


def test_early_breaks_leave_no_threads_descriptors_or_memory(save, where):
    def epoch() -> None:
        with DeviceLoader(save, 10, device=where, prefetch_factor=3, num_workers=2, shuffle=True) as loader:
            for batch in loader:
                numbers(batch)
                break

    epoch()
    gc.collect()
    before = len(native_threads()), descriptors(), threading.active_count()
    for _ in range(15):
        epoch()
    wait_until(lambda: (len(native_threads()), descriptors(), threading.active_count()) == before)


@pytest.mark.parametrize("persistent", [True, False])
def test_threads_end_with_the_iterator_or_with_the_loader(save, persistent):
    before = len(native_threads())
    loader = DeviceLoader(save, 10, num_workers=3, persistent_workers=persistent)
    assert len(native_threads()) == before  # none until it is iterated
    for _ in range(2):
        assert all_numbers(loader) == list(range(200))
        threads_become(before + (3 if persistent else 0))
    iterator = iter(loader)
    next(iterator)
    threads_become(before + 3)
    del iterator
    threads_become(before + (3 if persistent else 0))
    del loader  # nothing refers to itself: no collector is needed
    threads_become(before)


def test_a_loader_that_is_dropped_lives_as_long_as_its_iterator(save, where):
    loader = DeviceLoader(save, 10, device=where)
    gone = weakref.ref(loader)
    iterator = iter(loader)
    kept = next(iterator)
    del loader
    assert all_numbers(iterator) == list(range(10, 200))
    del iterator
    assert gone() is None
    assert numbers(kept) == list(range(10))


def test_close_ends_every_iterator_and_the_loader_goes_on(save, where):
    loader = DeviceLoader(save, 10, device=where, prefetch_factor=3)
    first, second = iter(loader), iter(loader)
    kept = [next(first), next(second), next(second)]
    loader.close()
    loader.close()
    # What was under way is given up: it must not come out half read.
    assert list(first) == [] and list(second) == []
    assert [numbers(batch)[0] for batch in kept] == [0, 0, 10]
    assert loader.state_dict()["position"] == 20
    assert all_numbers(loader) == list(range(200))
    loader.close()


def test_an_iterator_in_a_reference_cycle_is_collected(save, where):
    before = len(native_threads())
    for _ in range(5):
        loader = DeviceLoader(save, 10, device=where, num_workers=2)
        iterator = iter(loader)
        next(iterator)
        iterator.itself = iterator  # type: ignore[attr-defined]
        loader.iterator = iterator  # type: ignore[attr-defined]
        del loader, iterator
    gc.collect()
    if where is None:
        threads_become(before)


# --- errors -----------------------------------------------------------------------------------------------------------


class Bad(Exception):
    pass


@pytest.mark.parametrize("name", ["transform", "collate_fn"])
@pytest.mark.parametrize("depth", [1, 5])
def test_an_error_in_a_function_of_the_users(save, where, name, depth):
    """It comes out as it is, the batch does not count as handed out, and the next epoch is whole."""
    fails = [True]

    def function(batch: Any) -> Any:
        batch = torch.stack(batch) if isinstance(batch, list) else batch
        if fails[0] and 30 in batch["number"].cpu():
            raise Bad
        return batch

    arguments: dict[str, Any] = {name: function}
    loader = DeviceLoader(save, 10, device=where, prefetch_factor=depth, **arguments)
    before = descriptors()
    iterator = iter(loader)
    assert [numbers(next(iterator))[0] for _ in range(3)] == [0, 10, 20]
    with pytest.raises(Bad):
        next(iterator)
    assert next(iterator, None) is None
    assert ahead(iterator) == 0
    fails[0] = False
    state = loader.state_dict()
    assert all_numbers(loader) == list(range(200))
    loader.load_state_dict(state)
    assert all_numbers(loader) == list(range(30, 200))
    loader.close()
    assert descriptors() <= before + (8 if where else 0)  # the engine's own


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("what", ["error", "no such row", "not a number"])
def test_an_error_of_a_sampler_comes_behind_the_batches_before_it(save, where, depth, what):
    """However many are under way: the depth changes when things are read, not what is handed out."""

    class Sampler:
        def __iter__(self):
            yield from range(0, 50, 5)
            if what == "error":
                raise Bad
            yield 200 if what == "no such row" else "seven"

    loader = DeviceLoader(save, 2, sampler=Sampler(), device=where, prefetch_factor=depth)
    iterator = iter(loader)
    got = [numbers(next(iterator)) for _ in range(5)]
    assert got == [[0, 5], [10, 15], [20, 25], [30, 35], [40, 45]]
    with pytest.raises({"error": Bad, "no such row": IndexError}.get(what, errors.InvalidArgumentType)):
        next(iterator)
    assert next(iterator, None) is None


def test_an_interrupt_in_a_function_of_the_users_is_not_held_back(save):
    class Sampler:
        def __iter__(self):
            yield 1
            raise KeyboardInterrupt

    iterator = iter(DeviceLoader(save, sampler=Sampler()))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert next(iterator, None) is None


def test_empty_batches_of_a_batch_sampler(save, where):
    loader = DeviceLoader(save, batch_sampler=[[], [3, 1], []], device=where)
    assert [numbers(batch) for batch in loader] == [[], [3, 1], []]


# --- several at once --------------------------------------------------------------------------------------------------


def test_several_live_iterators_each_have_their_own_epoch(save, where):
    loader = DeviceLoader(save, 20, shuffle=True, seed=3, device=where)
    wanted = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        wanted.append(all_numbers(loader))
    loader.set_epoch(0)
    iterators = [iter(loader) for _ in range(3)]
    got: list[list[int]] = [[], [], []]
    for _ in range(10):
        for iterator, found in zip(iterators, got, strict=True):
            found += numbers(next(iterator))
    assert got == wanted and all(next(iterator, None) is None for iterator in iterators)
    assert len({tuple(one) for one in wanted}) == 3


def in_threads(count: int, work: Any) -> None:
    failed = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert failed == []


def test_threads_with_an_iterator_each(save, where):
    loader = DeviceLoader(save, 7, device=where, prefetch_factor=3)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:

        def work(_: int) -> None:
            for _ in range(1 if where else 6):
                assert all_numbers(loader) == list(range(200))

        in_threads(4, work)
    finally:
        sys.setswitchinterval(before)


def test_threads_that_share_an_iterator(save, where):
    """Each batch comes once, to one of them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        loader = DeviceLoader(save, 3, device=where, prefetch_factor=2)
        iterator = iter(loader)
        found: list[int] = []
        in_threads(4, lambda _: [found.append(number) for batch in iterator for number in numbers(batch)])  # type: ignore[func-returns-value]
    finally:
        sys.setswitchinterval(before)
    assert sorted(found) == list(range(200))


def test_a_batch_is_not_asked_for_while_one_is_asked_for(save):
    loader = DeviceLoader(save, 10, transform=lambda batch: next(iterator))
    iterator = iter(loader)
    with pytest.raises(errors.TdgpuError, match="while this thread"):
        next(iterator)


def test_close_from_within(save, where):
    """As a signal handler may do it."""
    loader = DeviceLoader(save, 10, device=where, transform=lambda batch: (loader.close(), batch)[1])  # type: ignore[func-returns-value]
    iterator = iter(loader)
    assert numbers(next(iterator)) == list(range(10))
    assert next(iterator, None) is None


def test_close_while_other_threads_iterate(save, where):
    """Whenever it comes, each of them gets whole batches, or its end."""
    for attempt in range(5):
        loader = DeviceLoader(save, 5, device=where, prefetch_factor=3)
        taken = threading.Semaphore(0)

        def work(_: int, loader: DeviceLoader = loader, taken: threading.Semaphore = taken) -> None:
            found = []
            for batch in loader:
                found += numbers(batch)
                taken.release()
            assert found == list(range(len(found)))

        def close(number: int, loader: DeviceLoader = loader, taken: Any = taken, n: int = attempt) -> None:
            for _ in range(2 * n + 1):
                taken.acquire()
            loader.close()

        in_threads(3, lambda number, work=work, close=close: (close if number == 2 else work)(number))


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shuffle", "permute", "batch_sampler"])
def test_memory_does_not_grow_over_many_epochs(tmp_path, kind):
    save_rows(tmp_path, 2000)
    arguments: Any = {
        "shuffle": {"batch_size": 400, "shuffle": True},
        "permute": {"batch_size": 400, "shuffle": "permute"},
        "batch_sampler": {"batch_sampler": [list(range(i, i + 400)) for i in range(0, 1600, 400)]},
    }[kind]
    loader = DeviceLoader(tmp_path, **arguments)

    def epochs(count: int) -> None:
        for _ in range(count):
            for batch in loader:
                batch["number"].sum()

    epochs(20)
    gc.collect()
    before, objects = resident_bytes(), len(gc.get_objects())
    epochs(80)  # 150 MB of batches
    gc.collect()
    assert resident_bytes() - before < 4 << 20
    assert len(gc.get_objects()) - objects < 500


def test_large_batches_do_not_grow_and_are_never_written_again(tmp_path):
    """Their memory is used again, but not while anybody holds a piece of it."""
    wide = torch.arange(40).view(40, 1).expand(40, 100_000).to(torch.float32)
    TensorDict(a=wide, batch_size=[40]).memmap(tmp_path)
    loader = DeviceLoader(tmp_path, 8, prefetch_factor=2)
    kept = []
    for epoch in range(4):
        for number, batch in enumerate(loader):
            assert torch.equal(batch["a"][:, -1], torch.arange(8.0) + 8 * number)
            if number == epoch:
                kept.append((8 * number, batch["a"][3:4, 5:9]))  # a view keeps all of it
    assert all((view == first + 3).all() for first, view in kept)
    kept.clear()
    before = resident_bytes()
    for _ in range(10):
        for batch in loader:
            batch["a"][0, 0] = 1
    assert resident_bytes() - before < 16 << 20


def test_device_memory_does_not_grow_over_many_epochs(sim, tmp_path):
    sim.set(delay_us=0)
    save_rows(tmp_path, 100)
    loader = DeviceLoader(tmp_path, 20, device="simgpu", shuffle=True)

    def epochs(count: int) -> None:
        for _ in range(count):
            for batch in loader:
                batch["number"].sum()

    epochs(10)
    names = ("device_bytes", "pinned_bytes", "streams", "events")
    before, open_files = {name: sim.stat(name) for name in names}, descriptors()
    epochs(20)
    after = {name: sim.stat(name) for name in names}
    assert after.pop("events") <= before.pop("events") + 10  # a hundred batches have passed
    assert after == before and descriptors() == open_files


# --- at rest ---------------------------------------------------------------------------------------------------------


def test_the_threads_wait_for_work_without_files_or_time(save):
    loader = DeviceLoader(save, 10, num_workers=2)
    assert all_numbers(loader) == list(range(200))
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the directory itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    assert not [link for link in links if link.endswith(".memmap")]
    used = os.times()
    wait_until(lambda: os.times().elapsed - used.elapsed > 0.3)
    assert os.times().user - used.user < 0.2
    loader.close()
