"""The order of DeviceLoader's rows: DataLoader's for the same generator and sampler, and orders of its own."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tdgpu import DeviceLoader, MemmapDataset, PermutationSampler, WeightedSampler
from tdgpu.data.orders import Permutation

ROWS = 23
WEIGHTS = [row + 1.0 for row in range(ROWS)]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("order") / "save"
    TensorDict({"i": torch.arange(ROWS), "x": torch.arange(ROWS * 2.0).view(ROWS, 2)}, [ROWS]).memmap(path)
    return path


@pytest.fixture(scope="module")
def dataset(save: Path) -> MemmapDataset:
    return MemmapDataset(save)


def read(loader: Iterable[Any]) -> list[Any]:
    """The rows of each batch, or the row."""
    return [batch["i"].tolist() for batch in loader]


def rows_of(loader: Iterable[Any]) -> list[int]:
    return list(itertools.chain.from_iterable(read(loader)))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- as DataLoader ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, ROWS, 100, None])
@pytest.mark.parametrize("shuffle", [True, False, None])
def test_a_generator_gives_dataloaders_order(dataset, shuffle, batch_size, drop_last):
    if batch_size is None and drop_last:
        return  # both refuse it: test_loader_refusals
    ours, theirs = seeded(5), seeded(5)
    loader = DeviceLoader(dataset, batch_size, shuffle, drop_last=drop_last, generator=ours, prefetch_factor=3)
    other = DataLoader(dataset, batch_size, shuffle, drop_last=drop_last, generator=theirs)
    assert len(loader) == len(other)
    epochs = []
    for _ in range(4):
        epochs.append(read(loader))
        assert epochs[-1] == read(other)
        assert torch.equal(ours.get_state(), theirs.get_state())
    assert not shuffle or (drop_last and batch_size == 100) or epochs[0] != epochs[1]


def test_an_early_break_draws_what_dataloader_draws(dataset):
    ours, theirs = seeded(6), seeded(6)
    for _ in range(3):
        mine = next(iter(DeviceLoader(dataset, 4, True, generator=ours)))
        other = next(iter(DataLoader(dataset, 4, True, generator=theirs)))
        assert mine["i"].tolist() == other["i"].tolist()
        assert torch.equal(ours.get_state(), theirs.get_state())


# Makes the arguments of a loader, of a dataset and a generator.
SAMPLED: dict[str, Callable[[Any, torch.Generator], dict[str, Any]]] = {
    "sequential": lambda dataset, _: {"sampler": SequentialSampler(dataset)},
    "random": lambda dataset, g: {"sampler": RandomSampler(dataset, generator=g)},
    "random, replacement": lambda dataset, g: {"sampler": RandomSampler(dataset, True, 50, generator=g)},
    "random, more than all": lambda dataset, g: {"sampler": RandomSampler(dataset, False, 60, generator=g)},
    "random, fewer": lambda dataset, g: {"sampler": RandomSampler(dataset, False, 7, generator=g)},
    "subset random": lambda _, g: {"sampler": SubsetRandomSampler([1, 5, 3, 2, 22], generator=g)},
    "weighted": lambda _, g: {"sampler": WeightedRandomSampler(WEIGHTS, 40, generator=g)},
    "weighted, once": lambda _, g: {
        "sampler": WeightedRandomSampler(WEIGHTS, 9, replacement=False, generator=g)
    },
    "distributed": lambda dataset, _: {"sampler": DistributedSampler(dataset, 3, 1, seed=4)},
    "distributed, drop_last": lambda dataset, _: {"sampler": DistributedSampler(dataset, 2, 1, drop_last=True)},
    "batches": lambda dataset, g: {"batch_sampler": BatchSampler(RandomSampler(dataset, generator=g), 5, False)},
    "batches as items": lambda dataset, g: {
        "sampler": BatchSampler(RandomSampler(dataset, generator=g), 5, True), "batch_size": None,
    },
    "rows as items": lambda dataset, g: {"sampler": RandomSampler(dataset, generator=g), "batch_size": None},
    "permutation": lambda dataset, _: {"sampler": PermutationSampler(dataset, seed=8)},
    "ours, weighted": lambda _, __: {"sampler": WeightedSampler(torch.arange(ROWS), 50, seed=8)},
    "ours, weighted, once": lambda _, __: {"sampler": WeightedSampler(torch.arange(ROWS), 15, False, seed=8)},
    "ours, rows as items": lambda dataset, _: {"sampler": PermutationSampler(dataset), "batch_size": None},
    "list": lambda _, __: {"sampler": [3, 1, 22, 0, 1]},
    "generator of the loader, too": lambda dataset, g: {"sampler": RandomSampler(dataset, generator=g), "generator": g},
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLED)
def test_every_sampler_gives_dataloaders_order(dataset, name):
    ours, theirs = seeded(7), seeded(7)
    mine, others = SAMPLED[name](dataset, ours), SAMPLED[name](dataset, theirs)
    for drop_last in (False, True):
        if drop_last and ("batch_sampler" in mine or mine.get("batch_size", 1) is None):
            continue
        size: dict[str, Any] = {} if "batch_sampler" in mine or "batch_size" in mine else {"batch_size": 4}
        loader = DeviceLoader(dataset, drop_last=drop_last, prefetch_factor=2, **size, **mine)
        other = DataLoader(dataset, drop_last=drop_last, **size, **others)
        assert len(loader) == len(other)
        for epoch in range(3):
            loader.set_epoch(epoch)
            if hasattr(others.get("sampler"), "set_epoch"):
                others["sampler"].set_epoch(epoch)
            assert read(loader) == read(other)
            assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("make", [torch.tensor, np.array, list, tuple])
def test_anything_that_can_be_iterated_is_a_sampler(dataset, make):
    given = make([3, 1, 22, 0, 1])
    assert read(DeviceLoader(dataset, 2, sampler=given)) == read(DataLoader(dataset, 2, sampler=given))
    assert read(DeviceLoader(dataset, None, sampler=given)) == [3, 1, 22, 0, 1]


def test_samplers_without_a_length(dataset):
    class Endless:
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle([4, 2, 9])

    loader = DeviceLoader(dataset, 2, sampler=Endless())
    iterator = iter(loader)
    for what in (loader, iterator):
        with pytest.raises(TypeError, match="sampler has no length"):
            len(what)
    assert [next(iterator)["i"].tolist() for _ in range(4)] == [[4, 2], [9, 4], [2, 9], [4, 2]]


def test_set_epoch_reaches_a_sampler_within_a_batch_sampler(dataset):
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, 2, 0)
    loader = DeviceLoader(dataset, batch_sampler=BatchSampler(sampler, 4, False))
    loader.set_epoch(3)
    assert sampler.epoch == 3
    assert rows_of(loader) == list(sampler)


def test_an_epoch_that_began_keeps_its_order(dataset):
    """set_epoch while an iterator is alive is for the next one."""
    for sampler in (PermutationSampler(dataset, 1), WeightedSampler(torch.ones(ROWS), 40, seed=1)):
        loader = DeviceLoader(dataset, 4, sampler=sampler)
        wanted = list(sampler.order().take(0, len(sampler)))
        iterator = iter(loader)
        seen = next(iterator)["i"].tolist()
        loader.set_epoch(3)
        assert seen + rows_of(iterator) == wanted
        wanted = list(sampler.order().take(0, len(sampler)))
        assert sampler.epoch == 3 and rows_of(loader) == wanted


@pytest.mark.parametrize("within", [False, True])
def test_each_iterator_has_the_next_epoch_of_a_sampler(dataset, within):
    """Also one that was left, and within a batch sampler."""
    sampler = PermutationSampler(dataset, seed=3)
    batches: dict[str, Any] = {"batch_sampler": BatchSampler(sampler, 4, False)}
    loader = DeviceLoader(dataset, **(batches if within else {"batch_size": 4, "sampler": sampler}))
    orders = [list(Permutation(ROWS, 3, epoch)) for epoch in range(6)]
    assert [rows_of(loader), rows_of(loader)] == orders[:2]
    assert next(iter(loader))["i"].tolist() == orders[2][:4]
    assert rows_of(loader) == orders[3]
    loader.set_epoch(1)
    assert [rows_of(loader), rows_of(loader)] == orders[1:3]
    assert len(loader) == 6 and rows_of(loader) == orders[3]  # asking for the length begins nothing


def test_a_state_that_a_sampler_was_given_counts(dataset):
    sampler = PermutationSampler(dataset, seed=3)
    whole = list(Permutation(ROWS, 3, 0))
    begun = iter(sampler)
    assert [next(begun) for _ in range(6)] == whole[:6]
    resumed = PermutationSampler(dataset)
    resumed.load_state_dict(sampler.state_dict())
    loader = DeviceLoader(dataset, 4, sampler=resumed)
    assert rows_of(loader) == whole[6:]
    assert rows_of(loader) == list(Permutation(ROWS, 3, 1))


# --- its own orders ---------------------------------------------------------------------------------------------------

OWN: list[dict[str, Any]] = [{"shuffle": True}, {"shuffle": "permute"}]


@pytest.mark.parametrize("arguments", OWN)
def test_every_epoch_has_every_row_once_in_another_order(dataset, arguments):
    loader = DeviceLoader(dataset, 4, seed=1, **arguments)
    epochs = [rows_of(loader) for _ in range(5)]
    assert all(sorted(rows) == list(range(ROWS)) for rows in epochs)
    assert len(set(map(tuple, epochs))) == 5
    # An order follows from the seed and the epoch, whatever the batch size.
    again = DeviceLoader(dataset, 7, seed=1, **arguments)
    for epoch in (3, 0, 4):
        again.set_epoch(epoch)
        assert rows_of(again) == epochs[epoch]
    assert rows_of(DeviceLoader(dataset, 4, seed=2, **arguments)) not in epochs
    assert rows_of(DeviceLoader(dataset, 4, seed=-(2**70), **arguments)) not in epochs


@pytest.mark.parametrize("arguments", [*OWN, {}, {"sampler": range(ROWS)}])
def test_epochs_count_on_and_iterators_have_each_their_own(dataset, arguments):
    loader = DeviceLoader(dataset, 4, seed=1, **arguments)
    wanted = [rows_of(loader) for _ in range(3)]
    loader.set_epoch(0)
    alive = [iter(loader) for _ in range(3)]
    mixed: list[list[int]] = [[], [], []]
    for _ in range(len(loader)):
        for rows, iterator in zip(mixed, alive, strict=True):
            rows += next(iterator)["i"].tolist()
    assert mixed == wanted
    assert all(list(iterator) == [] for iterator in alive)


@pytest.mark.parametrize("arguments", [*OWN, {}, {"sampler": [3, 2, 1]}, {"shuffle": True, "generator": seeded(0)}])
def test_no_global_generator_is_drawn_from(dataset, arguments):
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = states()
    loader = DeviceLoader(dataset, 4, **arguments)
    assert len(rows_of(loader)) == len(rows_of(loader)) > 0
    loader.load_state_dict(loader.state_dict())
    rows_of(loader)
    assert states() == before


def test_without_a_seed_it_is_that_of_the_global_generator(dataset):
    orders = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        orders.append(rows_of(DeviceLoader(dataset, 4, shuffle=True)))
    assert orders[0] == orders[2] != orders[1]
    assert orders[0] == rows_of(DeviceLoader(dataset, 4, shuffle=True, seed=1))


def test_shuffles_are_even():
    """Each of the 24 orders of four rows is as likely: chi-square with 23 degrees of freedom, 5 standard deviations."""
    from tdgpu.data import schedule

    counts: dict[tuple[int, ...], int] = {}
    for seed, epoch in itertools.product(range(60), range(40)):
        order = tuple(schedule.shuffled(4, seed, epoch)().take(0, 4).tolist())
        counts[order] = counts.get(order, 0) + 1
    mean = 2400 / 24
    assert len(counts) == 24 and sum((count - mean) ** 2 / mean for count in counts.values()) < 23 + 5 * 46**0.5


@pytest.mark.parametrize("shuffle", [False, "permute"])
def test_a_trillion_rows_take_no_memory(tmp_path, shuffle):
    rows = 2**40
    TensorDict(w=torch.empty(rows, 0), batch_size=[rows]).memmap(tmp_path)
    loader = DeviceLoader(tmp_path, 1000, shuffle=shuffle)
    next(iter(loader))
    tracemalloc.start()
    try:
        assert len(loader) == -(-rows // 1000)
        iterator = iter(loader)
        assert all(next(iterator).batch_size == (1000,) for _ in range(3))
        state = loader.state_dict()
        loader.load_state_dict({**state, "position": rows - 1500})
        assert [batch.batch_size[0] for batch in loader] == [1000, 500]
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_an_empty_save(tmp_path):
    TensorDict(x=torch.empty(0, 3), batch_size=[0]).memmap(tmp_path)
    for arguments in ({}, {"shuffle": True}, {"shuffle": "permute"}, {"shuffle": True, "generator": seeded(0)}):
        loader = DeviceLoader(tmp_path, 4, **arguments)
        assert len(loader) == 0 and list(loader) == [] == list(loader)
    loader = DeviceLoader(tmp_path, 4, rank=1, world_size=2)
    assert len(loader) == 0 and list(loader) == []
