"""MemmapDataset under torch.utils.data: every sampler, and every dataset of datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from points import IN_ORDER, ROWS, batches, joined, numbers, rows_of
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from tdgpu.data.dataset import MemmapDataset


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Points 0 to 9."""
    rows_of(*range(ROWS)).memmap(tmp_path / "save")
    return tmp_path / "save"


@pytest.fixture
def dataset(save: Path) -> MemmapDataset:
    return MemmapDataset(save)


# --- samplers ---------------------------------------------------------------------------------------------------------


def test_sequential_sampler(dataset):
    assert batches(DataLoader(dataset, 4, sampler=SequentialSampler(dataset))) == IN_ORDER


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_sampler_without_replacement(dataset, num_workers):
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(3))
    found = joined(batches(DataLoader(dataset, 4, sampler=sampler, num_workers=num_workers)))
    assert sorted(found) == list(range(ROWS)) != found


def test_random_sampler_with_replacement(dataset):
    def sampler() -> RandomSampler:
        return RandomSampler(dataset, replacement=True, num_samples=50, generator=torch.Generator().manual_seed(3))

    loader = DataLoader(dataset, 8, sampler=sampler())
    found = batches(loader)
    assert (len(loader), joined(found)) == (7, list(sampler()))
    assert any(len(set(batch)) < len(batch) for batch in found)


def test_subset_random_sampler(dataset):
    sampler = SubsetRandomSampler([7, 1, 5], generator=torch.Generator().manual_seed(0))
    assert sorted(joined(batches(DataLoader(dataset, 2, sampler=sampler)))) == [1, 5, 7]


@pytest.mark.parametrize(("replacement", "count"), [(True, 40), (False, 3)])
def test_weighted_random_sampler(dataset, replacement, count):
    weights = [0, 1, 0, 0, 5, 0, 0, 0, 0, 2]

    def sampler() -> WeightedRandomSampler:
        generator = torch.Generator().manual_seed(4)
        return WeightedRandomSampler(weights, count, replacement=replacement, generator=generator)

    found = joined(batches(DataLoader(dataset, 8, sampler=sampler())))
    assert found == list(sampler())
    assert set(found) == {1, 4, 9}


def test_batch_sampler(dataset):
    sampler = BatchSampler(SequentialSampler(dataset), batch_size=3, drop_last=True)
    expected = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert batches(DataLoader(dataset, batch_sampler=sampler)) == expected
    assert batches(DataLoader(dataset, batch_sampler=sampler, num_workers=2)) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_sampler_as_sampler(dataset, num_workers):
    sampler = BatchSampler(RandomSampler(dataset, generator=torch.Generator().manual_seed(0)), 4, drop_last=False)
    found = batches(DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=num_workers))
    assert [len(batch) for batch in found] == [4, 4, 2]
    assert sorted(joined(found)) == list(range(ROWS))


def test_distributed_sampler(dataset):
    ranks = []
    for rank in range(3):
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=3, rank=rank, shuffle=True, seed=1)
        loader = DataLoader(dataset, batch_size=2, sampler=sampler)
        epochs = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            epochs.append(joined(batches(loader)))
        assert epochs[0] != epochs[1]
        ranks.append(epochs[0])
    assert [len(rank) for rank in ranks] == [4, 4, 4]
    assert set(joined(ranks)) == set(range(ROWS))


class AccedingSequenceLengthBatchSampler(Sampler[list[int]]):
    """The one of the reference, by the row's number instead of its length."""

    def __init__(self, sizes: list[int], batch_size: int) -> None:
        self.sizes = sizes
        self.batch_size = batch_size

    def __len__(self) -> int:
        return (len(self.sizes) + self.batch_size - 1) // self.batch_size

    def __iter__(self):
        for batch in torch.chunk(torch.argsort(torch.tensor(self.sizes)), len(self)):
            yield batch.tolist()


def test_samplers_of_ones_own(dataset):
    sampler = AccedingSequenceLengthBatchSampler([3, 1, 2, 0, 9, 8, 7, 6, 5, 4], 5)
    assert batches(DataLoader(dataset, batch_sampler=sampler)) == [[3, 1, 2, 0, 9], [8, 7, 6, 5, 4]]
    as_tensors: Any = [torch.tensor([1, 2]), torch.tensor([9])]
    assert batches(DataLoader(dataset, batch_sampler=as_tensors)) == [[1, 2], [9]]
    assert batches(DataLoader(dataset, batch_size=2, sampler=torch.tensor([4, 4, 0]))) == [[4, 4], [0]]


# --- datasets of datasets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_subset_of_a_subset(dataset, num_workers):
    inner = Subset(Subset(dataset, [9, 7, 5, 3, 1]), [0, 4, 2])
    assert batches(DataLoader(inner, batch_size=2, num_workers=num_workers)) == [[9, 1], [5]]
    assert int(inner[1].x) == 1
    assert numbers(inner[[0, 2]]) == [9, 5]


def test_random_split(dataset):
    parts = random_split(dataset, [0.3, 0.3, 0.4], generator=torch.Generator().manual_seed(42))
    assert [len(part) for part in parts] == [3, 3, 4]
    found = [joined(batches(DataLoader(part, batch_size=2, num_workers=1))) for part in parts]
    assert sorted(joined(found)) == list(range(ROWS))
    assert found == [list(part.indices) for part in parts]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_concat_dataset(dataset, save, num_workers):
    rows_of(20, 21, 22).memmap(save.parent / "more")
    both: ConcatDataset[Any] = ConcatDataset([dataset, MemmapDataset(save.parent / "more")])
    expected = [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 20, 21, 22]]
    assert batches(DataLoader(both, batch_size=7, num_workers=num_workers)) == expected
    assert int((dataset + MemmapDataset(save.parent / "more"))[-1].x) == 22


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stack_dataset(dataset, num_workers):
    other = TensorDataset(torch.arange(ROWS) * 10)
    pairs = list(DataLoader(StackDataset(dataset, other), batch_size=4, num_workers=num_workers))
    assert [numbers(batch) for batch, _ in pairs] == IN_ORDER
    assert [tens[0].tolist() for _, tens in pairs] == [[10 * i for i in batch] for batch in IN_ORDER]
    named = list(DataLoader(StackDataset(points=dataset, same=dataset), batch_size=4, num_workers=num_workers))
    assert [numbers(item["points"]) for item in named] == [numbers(item["same"]) for item in named] == IN_ORDER
    assert int(StackDataset(dataset, other)[3][0].x) == 3


class MyIterableDataset(IterableDataset):
    """The one of the reference, of a save's rows."""

    def __init__(self, rows: MemmapDataset, start: int, end: int) -> None:
        self.rows = rows
        self.start = start
        self.end = end

    def __iter__(self):
        return iter([int(self.rows[i].x) for i in range(self.start, self.end)])


def _configure(worker_id: int) -> None:
    info: Any = get_worker_info()
    dataset = info.dataset
    per_worker = -(-(dataset.end - dataset.start) // info.num_workers)
    overall_end = dataset.end
    dataset.start += worker_id * per_worker
    dataset.end = min(dataset.start + per_worker, overall_end)


def test_the_iterable_datasets_of_the_reference(dataset):
    stream = MyIterableDataset(dataset, 3, 7)
    assert [int(i) for i in DataLoader(stream, num_workers=0)] == [3, 4, 5, 6]
    assert [int(i) for i in DataLoader(stream, num_workers=2)] == [3, 3, 4, 4, 5, 5, 6, 6]
    assert [int(i) for i in DataLoader(stream, num_workers=2, worker_init_fn=_configure)] == [3, 5, 4, 6]
