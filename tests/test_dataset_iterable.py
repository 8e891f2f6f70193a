"""IterableMemmapDataset: every row exactly once, over however many ranks and workers."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import pytest
import tensordict
import torch
from tensordict import TensorDict
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import ChainDataset, DataLoader, get_worker_info

import tdgpu
from tdgpu.data.iterable import IterableMemmapDataset
from tdgpu.errors import InvalidArgument, InvalidArgumentType, SaveNotFound, UnknownKeyError

ROWS = 11


@pytest.fixture
def save(tmp_path: Path) -> Path:
    rows_of(*range(ROWS)).memmap(tmp_path / "save")
    return tmp_path / "save"


def rows_of(*values: int) -> TensorDict:
    return TensorDict({"a": torch.tensor(values), "b": torch.tensor(values)[:, None] * 2}, [len(values)])


def numbers(items) -> list[list[int]]:
    """The numbers of each item, a row or a batch, whose leaves agree."""
    for item in items:
        assert type(item) is TensorDict
        assert torch.equal(item["b"].squeeze(-1), item["a"] * 2)
    return [item["a"].reshape(-1).tolist() for item in items]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than there are cores
@pytest.mark.parametrize("num_workers", [0, 1, 3, 12])
@pytest.mark.parametrize("batch_size", [None, 1, 4, 100])
def test_workers_take_turns_so_that_the_order_is_that_of_the_save(save, batch_size, num_workers):
    dataset = IterableMemmapDataset(save, batch_size=batch_size)
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    found = numbers(loader)
    size = batch_size or 1
    assert found == [list(range(ROWS))[i : i + size] for i in range(0, ROWS, size)]
    assert len(found) == len(dataset) == len(loader)


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 2), (2, 0), (3, 2), (6, 2), (20, 0)])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_every_row_once_over_ranks_and_workers(save, world_size, num_workers, batch_size):
    found = []
    for rank in range(world_size):
        dataset = IterableMemmapDataset(save, batch_size=batch_size, rank=rank, world_size=world_size)
        items = numbers(DataLoader(dataset, batch_size=None, num_workers=num_workers))
        assert len(items) == len(dataset)
        found.append(list(itertools.chain.from_iterable(items)))
    assert list(itertools.chain.from_iterable(found)) == list(range(ROWS))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_may_make_the_batches(save, num_workers):
    loader = DataLoader(IterableMemmapDataset(save), batch_size=4, num_workers=num_workers)
    found = list(loader)
    assert all(batch.batch_size == torch.Size([len(batch["a"])]) for batch in found)
    assert sorted(itertools.chain.from_iterable(numbers(found))) == list(range(ROWS))
    assert len(loader) == 3


def test_the_rank_is_that_of_the_process_group(save):
    dataset = IterableMemmapDataset(save)
    before = pickle.dumps(dataset)
    assert len(dataset) == ROWS
    torch.distributed.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    try:
        expected = [[3], [4], [5], [6]]
        assert (len(dataset), numbers(dataset)) == (4, expected)
        inside = pickle.dumps(dataset)
        # A dataset that was made, and sent here, before there was a group belongs to the rank that it is in.
        assert numbers(pickle.loads(before)) == expected
        assert len(IterableMemmapDataset(save, rank=0, world_size=1)) == ROWS
        for num_workers in (0, 2):
            assert numbers(DataLoader(dataset, batch_size=None, num_workers=num_workers)) == expected
    finally:
        torch.distributed.destroy_process_group()
    assert numbers(pickle.loads(inside)) == expected  # a worker that is spawned is in no group
    assert len(pickle.loads(before)) == ROWS


def test_a_spawned_worker(save):
    loader = DataLoader(IterableMemmapDataset(save, ["a"], 4), batch_size=None, num_workers=1,
                        multiprocessing_context="spawn")  # fmt: skip
    assert [list(batch.keys()) for batch in loader] == [["a"]] * 3


def _check_worker(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, IterableMemmapDataset)
    assert len(info.dataset) == ROWS


def test_worker_init_fn_persistent_workers_and_pinning(save, device):
    loader = DataLoader(IterableMemmapDataset(save, batch_size=4), batch_size=None, num_workers=2, pin_memory=True,
                        persistent_workers=True, worker_init_fn=lambda _: None)  # fmt: skip
    for _ in range(2):
        found = list(loader)
        assert numbers(found) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
        assert all(leaf.is_pinned() for batch in found for leaf in batch.values())
    checked = DataLoader(IterableMemmapDataset(save), batch_size=None, num_workers=2, worker_init_fn=_check_worker)
    assert len(numbers(checked)) == ROWS


def test_a_chain_of_datasets(save):
    chain = ChainDataset([IterableMemmapDataset(save, batch_size=6), IterableMemmapDataset(save, batch_size=11)])
    assert [len(batch) for batch in numbers(DataLoader(chain, batch_size=None))] == [6, 5, 11]
    assert len(chain) == 3


def test_a_save_that_grows_while_it_is_iterated(save):
    dataset = IterableMemmapDataset(save)
    iterator = iter(dataset)
    tdgpu.append_memmap(save, rows_of(11, 12))
    assert dataset.refresh() == 2
    assert numbers(list(iterator)) == [[i] for i in range(11)]
    assert numbers(dataset) == [[i] for i in range(13)]
    tensordict.append_memmap(save, rows_of(13))
    assert (len(dataset), dataset.refresh(), len(dataset)) == (13, 1, 14)


def test_no_rows(tmp_path):
    TensorDict({"a": torch.empty(0)}, [0]).memmap(tmp_path)
    for batch_size in (None, 4):
        dataset = IterableMemmapDataset(tmp_path, batch_size=batch_size)
        assert (len(dataset), list(DataLoader(dataset, batch_size=None, num_workers=1))) == (0, [])


def test_it_says_what_it_is(save):
    assert repr(IterableMemmapDataset(save)) == f"IterableMemmapDataset('{save}', 11 rows)"
    dataset = IterableMemmapDataset(save, ["a"], 4, rank=1, world_size=2)
    assert repr(dataset) == f"IterableMemmapDataset('{save}', batch_size=4, 11 rows, rank 1 of 2)"
    assert (dataset.prefix, dataset.keys) == (save, [("a",)])


@pytest.mark.parametrize(("arguments", "error"), [
    ({"batch_size": 0}, InvalidArgument), ({"batch_size": -1}, InvalidArgument),
    ({"batch_size": 2.0}, InvalidArgumentType), ({"batch_size": True}, InvalidArgumentType),
    ({"rank": 0}, InvalidArgument), ({"world_size": 2}, InvalidArgument),
    ({"rank": 2, "world_size": 2}, InvalidArgument), ({"rank": -1, "world_size": 2}, InvalidArgument),
    ({"rank": "0", "world_size": 2}, InvalidArgumentType), ({"keys": ["nope"]}, UnknownKeyError),
])  # fmt: skip
def test_arguments_are_checked(save, arguments, error):
    with pytest.raises(error):
        IterableMemmapDataset(save, **arguments)


def test_a_missing_save_is_an_error_at_once(tmp_path):
    with pytest.raises(SaveNotFound):
        IterableMemmapDataset(tmp_path / "nowhere")
