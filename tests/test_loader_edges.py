"""What a loader must not do silently: ignore a dataset's own ways, hand out what was given up, change the order."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from loaders import all_numbers, numbers, save_rows
from tensordict import TensorDict
from torch.utils.data import RandomSampler, Subset

import tdgpu
from tdgpu import DeviceLoader, MemmapDataset, PermutationSampler
from tdgpu.errors import FormatError, InvalidArgument, InvalidArgumentType, TdgpuError


@pytest.fixture
def save(tmp_path):
    save_rows(tmp_path / "save", 100)
    return tmp_path / "save"


class Plus(Subset):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + 100

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Own(MemmapDataset):
    def __getitems__(self, indices: Any) -> Any:
        return super().__getitems__(indices) + 100


def test_datasets_that_change_how_rows_are_got_are_refused(save):
    for dataset in (
        Plus(MemmapDataset(save), [1, 2]),
        Own(save),
        Subset(Own(save), [1]),
        Subset(Plus(Own(save), [1]), [0]),
    ):
        with pytest.raises(InvalidArgumentType, match=r"would not be called.*transform="):
            DeviceLoader(dataset)


def test_indices_of_a_subset_that_are_changed_in_place_are_seen(save):
    subset = Subset(MemmapDataset(save), [0, 1, 2, 3])
    loader = DeviceLoader(subset, 4)
    assert all_numbers(loader) == [0, 1, 2, 3]
    subset.indices[0] = 9  # type: ignore[index]
    assert all_numbers(loader) == [9, 1, 2, 3]


@pytest.mark.parametrize("resident", [False, True])
def test_a_sampler_of_more_rows_than_there_are(save, resident, sim):
    loader = DeviceLoader(save, 50, sampler=PermutationSampler(120), device="simgpu", resident=resident)
    with pytest.raises(IndexError, match="out of range: there are 100 rows"):
        all_numbers(loader)


def test_ranks_that_would_draw_orders_of_their_own_are_refused(save):
    with pytest.raises(InvalidArgument, match="seed="):
        DeviceLoader(save, 4, shuffle=True, generator=torch.Generator(), rank=0, world_size=2)
    DeviceLoader(save, 4, generator=torch.Generator(), rank=0, world_size=2)


def test_a_sampler_that_draws_anew_cannot_go_on_in_the_middle(save):
    loader = DeviceLoader(save, 10, sampler=RandomSampler(range(100)))
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(InvalidArgument, match="give it a generator"):
        DeviceLoader(save, 10, sampler=RandomSampler(range(100))).load_state_dict(state)


def test_a_state_of_fewer_rows_is_not_of_another_order(save):
    loader = DeviceLoader(save, 10, shuffle=True, seed=1)
    iterator = iter(loader)
    next(iterator)
    tdgpu.append_memmap(save, tdgpu.load_memmap(save)[:10])
    loader.dataset.refresh()
    state = loader.state_dict()
    assert state["rows"] == 100
    with pytest.raises(FormatError, match="rows 100, and this one has 110"):
        DeviceLoader(save, 10, shuffle=True, seed=1).load_state_dict(state)


def test_batches_that_were_started_in_inference_mode_can_be_trained_on(save):
    iterator = iter(DeviceLoader(save, 10))
    with torch.inference_mode():
        next(iterator)
    weight = torch.ones(10, requires_grad=True)
    batch = next(iterator)
    (batch["number"].float() * weight).sum().backward()
    assert numbers(batch) == list(range(10, 20))


@pytest.mark.parametrize("width", [1, 20_000])
def test_what_is_given_up_is_never_handed_out(tmp_path, width):
    """As at the end of the program, or when another thread ends the threads."""
    count = 3000 if width == 1 else 300
    wide = torch.arange(count).view(-1, 1).expand(count, width).contiguous()
    TensorDict(x=wide, batch_size=[count]).memmap(tmp_path)
    for attempt in range(15):
        loader = DeviceLoader(tmp_path, 30, num_workers=1)
        iterator = iter(loader)
        fetcher: Any = loader._fetcher
        threading.Timer(0.0005 * attempt, fetcher.close).start()
        first = 0
        try:
            for batch in iterator:
                assert torch.equal(batch["x"], wide[first : first + 30])
                first += 30
        except TdgpuError:
            continue
        assert first == count


def test_a_handler_may_close_an_iterator_at_any_moment(save):
    loader = DeviceLoader(save, 2)
    iterator = iter(loader)
    previous = signal.signal(signal.SIGALRM, lambda *_: iterator.close())
    try:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            iterator = iter(loader)
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.002 * os.urandom(1)[0] / 255)
            found = all_numbers(iterator)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert found == list(range(len(found)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_threads_that_take_batches_of_many_lengths(save):
    dataset = MemmapDataset(save)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(300):
                index = torch.randint(100, (int(torch.randint(1, 60, (), generator=generator)),), generator=generator)
                assert numbers(dataset[index]) == index.tolist()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
