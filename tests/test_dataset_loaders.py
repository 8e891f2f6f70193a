"""MemmapDataset under torch's DataLoader: every argument, and what goes wrong."""

from __future__ import annotations

import multiprocessing
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
from points import IN_ORDER, ROWS, batches, fails, joined, numbers, rows_of
from saves import BUILDERS, Point
from tensordict import NonTensorStack, TensorDict
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    StackDataset,
    Subset,
    default_collate,
    get_worker_info,
)

import tdgpu
from tdgpu.data.dataset import MemmapDataset
from tdgpu.errors import FormatError, InvalidArgumentType, LoadError


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Points 0 to 9."""
    rows_of(*range(ROWS)).memmap(tmp_path / "save")
    return tmp_path / "save"


@pytest.fixture
def dataset(save: Path) -> MemmapDataset:
    return MemmapDataset(save)


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


def forkserver() -> Any:
    """Makes processes that have imported tdgpu, and know nothing of this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tdgpu"])
    return context


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_are_not_forked(dataset, method):
    dataset[0]
    context = forkserver() if method == "forkserver" else method
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context=context)
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


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_out_of_range_in_a_worker_is_readable(dataset, save, num_workers):
    loader = DataLoader(dataset, batch_size=2, sampler=[1, 99], num_workers=num_workers)
    with fails(IndexError, match="The row 99 is out of range: there are 10 rows") as error:
        list(loader)
    assert str(save) in str(error.value)
    with fails(TypeError, match="indexed by an integer") as refused:
        list(DataLoader(dataset, batch_size=2, sampler=[1, 2.5], num_workers=num_workers))
    assert isinstance(refused.value, InvalidArgumentType)


@pytest.mark.parametrize(("method", "error"), [("fork", LoadError), ("forkserver", FormatError)])
def test_a_save_that_is_replaced_before_a_worker_opens_it(save, dataset, method, error):
    context = forkserver() if method == "forkserver" else method
    loader = DataLoader(dataset, 4, num_workers=1, multiprocessing_context=context)
    save.rename(save.parent / "original")
    rows_of(*range(20, 30)).memmap(save)
    with fails(error) as raised:
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
    with fails(RuntimeError, match="exited unexpectedly"):
        list(DataLoader(dataset, 4, num_workers=2, collate_fn=_die))
    assert batches(DataLoader(dataset, 4, num_workers=2)) == IN_ORDER


def test_an_iterator_that_is_left_early(dataset):
    for _ in range(2):
        for batch in DataLoader(dataset, 2, num_workers=2):
            assert numbers(batch) == [0, 1]
            break
    assert batches(DataLoader(dataset, 4, num_workers=2)) == IN_ORDER
