"""MemmapDataset under torch.utils.data: every feature of DataLoader, every sampler, every dataset of datasets."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from saves import BUILDERS, Point
from tensordict import NonTensorStack, TensorDict
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
    default_collate,
    get_worker_info,
    random_split,
)

import tdgpu
from tdgpu.data.dataset import MemmapDataset
from tdgpu.errors import FormatError, InvalidArgumentType, LoadError

ROWS = 10


def rows_of(*values: int) -> Point:
    numbers = torch.tensor(values, dtype=torch.float32)
    return Point(x=numbers, y=numbers.reshape(len(values), 1).repeat(1, 2), batch_size=[len(values)])


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Points 0 to 9."""
    rows_of(*range(ROWS)).memmap(tmp_path / "save")
    return tmp_path / "save"


@pytest.fixture
def dataset(save: Path) -> MemmapDataset:
    return MemmapDataset(save)


def numbers(batch) -> list[int]:
    """The numbers in a batch, which is of the saved class and which all leaves agree on."""
    assert type(batch) is Point
    values = [int(value) for value in batch.x.tolist()]
    assert batch.batch_size == torch.Size([len(values)])
    assert batch.y.tolist() == [[value] * 2 for value in values]
    return values


def batches(loader) -> list[list[int]]:
    return [numbers(batch) for batch in loader]


def joined(lists) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


IN_ORDER = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

# --- arguments of DataLoader ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_of_the_saved_class(dataset, num_workers):
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers)
    assert len(loader) == 3
    assert batches(loader) == IN_ORDER
    assert batches(loader) == IN_ORDER


def test_a_batch_is_read_at_once(dataset, monkeypatch):
    def one(self, index):
        raise AssertionError("row by row")

    monkeypatch.setattr(MemmapDataset, "_one", one)
    assert batches(DataLoader(dataset, batch_size=4)) == IN_ORDER
    assert batches(DataLoader(Subset(dataset, range(ROWS)), batch_size=4)) == IN_ORDER


def test_the_default_batch_size(dataset):
    assert batches(DataLoader(dataset)) == [[i] for i in range(ROWS)]


def test_drop_last(dataset):
    loader = DataLoader(dataset, batch_size=4, drop_last=True)
    assert (len(loader), batches(loader)) == (2, IN_ORDER[:2])


def test_shuffle_and_generator(dataset):
    def epoch(seed: int) -> list[int]:
        loader = DataLoader(dataset, 3, shuffle=True, generator=torch.Generator().manual_seed(seed))
        return joined(batches(loader))

    assert epoch(1) == epoch(1) != epoch(2)
    assert sorted(epoch(1)) == list(range(ROWS))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_batches(dataset, num_workers):
    rows = list(DataLoader(dataset, batch_size=None, num_workers=num_workers))
    assert [(type(row), row.batch_size, int(row.x)) for row in rows] == [(Point, (), i) for i in range(ROWS)]


def test_tensordicts_without_batches(tmp_path):
    # torch's own default_convert takes a TensorDict for a mapping, and raises.
    TensorDict({"a": torch.arange(3), "n": {"b": torch.zeros(3, 2)}}, [3]).memmap(tmp_path)
    dataset = MemmapDataset(tmp_path)
    for num_workers in (0, 1):
        rows = list(DataLoader(dataset, batch_size=None, num_workers=num_workers))
        assert [(type(row), row.batch_size, row["a"].item()) for row in rows] == [(TensorDict, (), i) for i in range(3)]
    sampler = BatchSampler(SequentialSampler(dataset), 2, False)
    assert [batch["a"].tolist() for batch in DataLoader(dataset, batch_size=None, sampler=sampler)] == [[0, 1], [2]]
    # In lists and dicts, too; and what it did before it still does.
    arrays: Any = [np.arange(2)] * 3
    stack: Any = StackDataset(rows=dataset, number=arrays)
    found = list(DataLoader(stack, batch_size=None))
    assert [row["rows"]["a"].item() for row in found] == [0, 1, 2]
    assert torch.equal(found[0]["number"], torch.arange(2))


def _rows_in(rows) -> list[tuple[type, int, list[float]]]:
    """A collate_fn that uses what it gets as a sequence of rows."""
    by_index = [rows[i] for i in range(len(rows))]
    assert [int(row.x) for row in by_index] == [int(row.x) for row in rows]
    return [(type(row), int(row.x), row.y.tolist()) for row in rows]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_fn_gets_a_sequence_of_rows(dataset, num_workers):
    found = list(DataLoader(dataset, batch_size=4, collate_fn=_rows_in, num_workers=num_workers))
    assert found == [[(Point, i, [i, i]) for i in batch] for batch in IN_ORDER]


@pytest.mark.parametrize("collate_fn", [torch.stack, default_collate, lambda rows: torch.stack(list(rows)),
                                        lambda rows: default_collate(list(rows)), lambda rows: rows])  # fmt: skip
def test_collate_fns_that_people_have(dataset, collate_fn):
    assert batches(DataLoader(dataset, batch_size=4, collate_fn=collate_fn)) == IN_ORDER


def test_the_collate_fn_of_the_reference(dataset, device):
    class SimpleCustomBatch:
        def __init__(self, data) -> None:
            self.inp = torch.stack([row.x for row in data], 0)
            self.tgt = torch.stack([row.y for row in data], 0)

        def pin_memory(self) -> SimpleCustomBatch:
            self.inp = self.inp.pin_memory()
            self.tgt = self.tgt.pin_memory()
            return self

    for sample in DataLoader(dataset, batch_size=2, collate_fn=SimpleCustomBatch, pin_memory=True):
        assert sample.inp.is_pinned()
        assert sample.tgt.shape == (2, 2)
        assert sample.tgt.is_pinned()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pin_memory_keeps_the_class_and_its_batch_size(dataset, device, num_workers):
    loader = DataLoader(dataset, batch_size=4, pin_memory=True, num_workers=num_workers)
    found = list(loader)
    assert [numbers(batch) for batch in found] == IN_ORDER
    for batch in found:
        assert batch.x.is_pinned()
        assert batch.y.is_pinned()
        assert batch.to(device, non_blocking=True).x.device == device


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["nested", "names", "tensorclass", "non_tensor", "lazy_stack_named", "typed"])
def test_pin_memory_of_every_kind(name, tmp_path, device):
    value = BUILDERS[name]()
    value.memmap(tmp_path)
    rows = value.batch_size[0]
    (batch,) = DataLoader(MemmapDataset(tmp_path), batch_size=rows, pin_memory=True)
    assert (type(batch), batch.batch_size) == (type(value), value.batch_size)
    # A stack makes new tensors of those of its members, which are what is pinned.
    for part in batch["s"].tensordicts if name == "lazy_stack_named" else [batch]:
        assert all(leaf.is_pinned() for leaf in part.values(True, True))


def _mark_worker(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker_id
    assert isinstance(info.dataset, MemmapDataset)
    info.dataset.seen_by = (worker_id, info.num_workers, info.seed)  # type: ignore[attr-defined]


def _told_by_worker(rows):
    info: Any = get_worker_info()
    return info.dataset.seen_by, numbers(rows)


def test_worker_init_fn_and_worker_info(dataset):
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(dataset, 4, num_workers=2, worker_init_fn=_mark_worker, collate_fn=_told_by_worker,
                        generator=generator)  # fmt: skip
    found = list(loader)
    assert [batch for _, batch in found] == IN_ORDER
    assert [told[:2] for told, _ in found] == [(0, 2), (1, 2), (0, 2)]
    assert found[0][0][2] + 1 == found[1][0][2]
    assert not hasattr(dataset, "seen_by")


def _number(rows):
    return os.getpid(), numbers(rows)


def test_persistent_workers(dataset):
    loader = DataLoader(dataset, 4, num_workers=2, persistent_workers=True, collate_fn=_number)
    epochs = [list(loader) for _ in range(3)]
    assert [[batch for _, batch in epoch] for epoch in epochs] == [IN_ORDER] * 3
    assert len({pid for epoch in epochs for pid, _ in epoch}) == 2


def test_persistent_workers_see_rows_after_a_refresh(save, dataset):
    loader = DataLoader(dataset, 4, num_workers=2, persistent_workers=True)
    assert batches(loader) == IN_ORDER
    tdgpu.append_memmap(save, rows_of(10, 11, 12))
    assert batches(loader) == IN_ORDER
    assert dataset.refresh() == 3
    assert len(loader) == 4
    assert batches(loader) == [*IN_ORDER[:2], [8, 9, 10, 11], [12]]


@pytest.mark.parametrize("options", [{"prefetch_factor": 1}, {"prefetch_factor": 5}, {"timeout": 60},
                                     {"in_order": False}])  # fmt: skip
def test_prefetch_factor_timeout_and_order(dataset, options):
    loader = DataLoader(dataset, 4, num_workers=2, **options)
    assert sorted(batches(loader)) == IN_ORDER


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_are_not_forked(dataset, method):
    dataset[0]
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context=method)
    assert batches(loader) == IN_ORDER


def test_batches_of_workers_are_the_users_own(save, dataset):
    before = (save / "_tensordict" / "x.memmap").read_bytes()
    for num_workers in (0, 1):
        for batch in DataLoader(dataset, 4, num_workers=num_workers):
            batch.x.fill_(77)
            batch.y.fill_(77)
    assert batches(DataLoader(dataset, 4)) == IN_ORDER
    assert (save / "_tensordict" / "x.memmap").read_bytes() == before


def test_what_varies_from_row_to_row(tmp_path):
    td = TensorDict({"s": NonTensorStack(*"abcdef"), "t": torch.arange(6)}, [6])
    td.memmap(tmp_path)
    for num_workers in (0, 1):
        found = list(DataLoader(MemmapDataset(tmp_path), batch_size=4, num_workers=num_workers))
        assert [batch["s"] for batch in found] == [["a", "b", "c", "d"], ["e", "f"]]
        assert [batch["t"].tolist() for batch in found] == [[0, 1, 2, 3], [4, 5]]


def test_lazy_stacks_of_rows_of_different_lengths(tmp_path):
    BUILDERS["lazy_stack"]().memmap(tmp_path)
    for num_workers in (0, 1):
        (batch,) = DataLoader(MemmapDataset(tmp_path), batch_size=3, num_workers=num_workers)
        assert [member["a"].shape for member in batch.unbind(0)] == [(1,), (3,), (2,)]


@pytest.mark.parametrize("compression", [None, "deflate"])
def test_archives_in_workers(save, tmp_path, compression):
    tdgpu.pack_memmap(save, tmp_path / "save.tdz", compression=compression)
    assert batches(DataLoader(MemmapDataset(tmp_path / "save.tdz"), 4, num_workers=2)) == IN_ORDER


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


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_out_of_range_in_a_worker_is_readable(dataset, save, num_workers):
    loader = DataLoader(dataset, batch_size=2, sampler=[1, 99], num_workers=num_workers)
    with pytest.raises(IndexError, match="The row 99 is out of range: there are 10 rows") as error:
        list(loader)
    assert str(save) in str(error.value)
    with pytest.raises(TypeError, match="indexed by an integer") as refused:
        list(DataLoader(dataset, batch_size=2, sampler=[1, 2.5], num_workers=num_workers))
    assert isinstance(refused.value, InvalidArgumentType)


@pytest.mark.parametrize(("method", "error"), [("fork", LoadError), ("spawn", FormatError)])
def test_a_save_that_is_replaced_before_a_worker_opens_it(save, dataset, method, error):
    loader = DataLoader(dataset, 4, num_workers=1, multiprocessing_context=method)
    save.rename(save.parent / "original")
    rows_of(*range(20, 30)).memmap(save)
    with pytest.raises(error) as raised:
        list(loader)
    assert str(save) in str(raised.value)
    shutil.rmtree(save)
    (save.parent / "original").rename(save)
    assert batches(DataLoader(dataset, 4, num_workers=1)) == IN_ORDER


def test_a_save_that_grows_while_it_is_loaded(save, dataset):
    stop = threading.Event()
    added: list[int] = []

    def append() -> None:
        while not stop.is_set():
            tdgpu.append_memmap(save, rows_of(ROWS + len(added)))
            added.append(1)
            time.sleep(0.005)

    writer = threading.Thread(target=append)
    writer.start()
    try:
        loader = DataLoader(dataset, batch_size=3, num_workers=2, shuffle=True)
        for _ in range(3):
            before = len(dataset)
            assert sorted(joined(batches(loader))) == list(range(before))
            while dataset.refresh() == 0:
                time.sleep(0.001)
    finally:
        stop.set()
        writer.join()
    dataset.refresh()
    assert sorted(joined(batches(loader))) == list(range(ROWS + len(added)))


def _die(rows):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_leaves_the_dataset_usable(dataset):
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(DataLoader(dataset, 4, num_workers=2, collate_fn=_die))
    assert batches(DataLoader(dataset, 4, num_workers=2)) == IN_ORDER


def test_an_iterator_that_is_left_early(dataset):
    for _ in range(2):
        for batch in DataLoader(dataset, 2, num_workers=2):
            assert numbers(batch) == [0, 1]
            break
    assert batches(DataLoader(dataset, 4, num_workers=2)) == IN_ORDER
