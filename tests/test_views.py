"""Views of a dataset: select, shuffle, sort, shard, train_test_split, rename_keys, and views of views."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import all_numbers, numbers, rows, save_rows
from saves import BUILDERS, Point
from tensordict import NonTensorStack, TensorDict
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split

import tdgpu
from tdgpu import DeviceLoader, MemmapDataset
from tdgpu.errors import InvalidArgument, InvalidArgumentType, NotSupported, UnknownKeyError

ROWS = 60


@pytest.fixture
def dataset(tmp_path: Path) -> MemmapDataset:
    return MemmapDataset(save_rows(tmp_path / "save", ROWS))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> MemmapDataset:
    return MemmapDataset(save_rows(tmp_path_factory.mktemp("shared") / "save", ROWS))


# --- what they are ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        (slice(10, 2, -3), [10, 7, 4]),
        (range(0, 60, 20), [0, 20, 40]),
        ([-1, 0, 0], [59, 0, 0]),
        ((3, 2), [3, 2]),
        ((i * i for i in range(4)), [0, 1, 4, 9]),
        (np.array([5, 6], np.uint8), [5, 6]),
        (torch.tensor([7, -60]), [7, 0]),
        ([True] + [False] * 58 + [True], [0, 59]),
        (torch.arange(ROWS) == 4, [4]),
        ([], []),
    ],
)
def test_select_takes_what_indexing_takes(shared, indices, expected):
    view = shared.select(indices)
    assert len(view) == len(expected) and view.batch_size == (len(expected),)
    assert numbers(view[:]) == expected
    assert [int(row["number"]) for row in view] == expected


@pytest.mark.parametrize("indices", [3, "abc", None, {1: 2}, [1.5], [[1]], torch.tensor(2), torch.tensor([0.5])])
def test_select_refuses_what_names_no_rows(shared, indices):
    with pytest.raises(InvalidArgumentType):
        shared.select(indices)


def test_a_row_that_is_not_there_is_named(shared):
    view = shared.select(range(10))
    for read in (lambda: view.select([10]), lambda: view[10], lambda: view[[0, -11]]):
        with pytest.raises(IndexError, match=r"The row -?1[01] is out of range: there are 10 rows"):
            read()


def test_an_index_that_is_changed_afterwards_changes_no_view(shared):
    index = np.array([1, 2, 3])
    view = shared.select(index)
    index[:] = 0
    assert numbers(view[:]) == [1, 2, 3]


def test_shuffle_has_every_row_once_and_follows_from_its_seed(shared):
    orders = [numbers(shared.shuffle(seed)[:]) for seed in (0, 0, 1)]
    assert sorted(orders[0]) == list(range(ROWS))
    assert orders[0] == orders[1] != orders[2]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert numbers(shared.shuffle()[:]) == numbers(shared.shuffle(3)[:])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rows_", [0, 1, 7, 60])
@pytest.mark.parametrize("shards", [1, 2, 7, 61])
def test_shards_are_all_rows(shared, rows_, shards):
    whole = shared.select(range(rows_))
    parts = [numbers(whole.shard(shards, i)[:]) for i in range(shards)]
    assert parts == [part.tolist() for part in np.array_split(np.arange(rows_), shards)]
    parts = [numbers(whole.shard(shards, i, contiguous=False)[:]) for i in range(shards)]
    assert parts == [list(range(rows_))[i::shards] for i in range(shards)]


@pytest.mark.parametrize(("shards", "index"), [(0, 0), (2, 2), (2, -1), (2.0, 0), (True, 0)])
def test_there_is_no_other_shard(shared, shards, index):
    with pytest.raises((InvalidArgument, InvalidArgumentType)):
        shared.shard(shards, index)


@pytest.mark.parametrize(
    ("test_size", "train_size", "train", "test"),
    [
        (None, None, 45, 15), (0.1, None, 54, 6), (0.01, None, 59, 1), (None, 0.99, 59, 1), (7, None, 53, 7),
        (0, 5, 5, 0), (0.3, 0.3, 18, 18), (59, 1, 1, 59),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_split_has_no_row_twice(shared, test_size, train_size, train, test, shuffle):
    parts = shared.train_test_split(test_size, train_size, shuffle, 5)
    found = {name: numbers(part[:]) for name, part in parts.items()}
    assert list(found) == ["train", "test"] and [len(part) for part in found.values()] == [train, test]
    both = found["train"] + found["test"]
    assert len(set(both)) == len(both)
    assert (both == list(range(train + test))) is not shuffle
    again = shared.train_test_split(test_size, train_size, shuffle, 5)
    assert {name: numbers(part[:]) for name, part in again.items()} == found


@pytest.mark.parametrize(
    ("test_size", "train_size"),
    [
        (60, None), (61, None), (-1, None), (1.0, None), (0.0, None), (0.6, 0.6), (None, 0), (30, 31), ("a", None),
        (True, 1),
    ],
)  # fmt: skip
def test_a_split_that_cannot_be_is_refused(shared, test_size, train_size):
    with pytest.raises((InvalidArgument, InvalidArgumentType)):
        shared.train_test_split(test_size, train_size)


# --- sort -------------------------------------------------------------------------------------------------------------

COLUMNS = {
    "bool": torch.tensor([True, False] * 10),
    "uint8": torch.randint(0, 4, (20,), dtype=torch.uint8),
    "uint64": torch.from_numpy(np.array([2**64 - 1, 0, 2**63, 5] * 5, np.uint64)),
    "int64": torch.tensor([2**62, -(2**62), 0, 2**62 + 1] * 5),
    "bfloat16": torch.tensor([0.5, -1.5, 3.0, float("inf")] * 5, dtype=torch.bfloat16),
    "float16": torch.tensor([0.5, -1.5, 3.0, -float("inf")] * 5, dtype=torch.float16),
    "float64": torch.tensor([1.0, float("nan"), -1.0, 1.0 + 2**-50] * 5, dtype=torch.float64),
    "column": torch.randn(20, 1),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("descending", [False, True])
def test_sort_orders_every_dtype_and_keeps_equal_rows_in_order(tmp_path, name, descending):
    column = COLUMNS[name]
    TensorDict({"n": {"key": column}, "row": torch.arange(20)}, [20]).memmap(tmp_path)
    # What Python makes of it, NaN being larger than all numbers.
    keys = [(x != x, x) if x == x else (True, 0) for x in column.reshape(-1).tolist()]
    expected = sorted(range(20), key=lambda i: keys[i], reverse=descending)
    view = MemmapDataset(tmp_path).sort(("n", "key"), descending)
    assert view[:]["row"].tolist() == expected
    unstable = MemmapDataset(tmp_path).sort(("n", "key"), descending, stable=False)[:]
    assert [keys[i] for i in unstable["row"].tolist()] == [keys[i] for i in expected]
    assert sorted(unstable["row"].tolist()) == list(range(20))


def test_sort_refuses_what_has_no_order(tmp_path):
    td = TensorDict({"c": torch.zeros(4, dtype=torch.complex64), "wide": torch.zeros(4, 2), "x": torch.zeros(4)}, [4])
    td["s"] = NonTensorStack("a", "b", "c", "d")
    td.memmap(tmp_path)
    dataset = MemmapDataset(tmp_path)
    for key, error in (("c", NotSupported), ("s", NotSupported), ("wide", InvalidArgument), ("y", UnknownKeyError)):
        with pytest.raises(error, match=key if error is not UnknownKeyError else "no such key"):
            dataset.sort(key)
    with pytest.raises(InvalidArgumentType):
        dataset.sort("x", descending=1)  # type: ignore[arg-type]


# --- views of views ---------------------------------------------------------------------------------------------------


def _step(kind: int, seed: int, view: Any, model: list[int]) -> tuple[Any, list[int]]:
    """A transform of a view, and the same of a list of its numbers."""
    draw = random.Random(seed)
    size = len(model)
    if kind == 0:
        index = [draw.randrange(-size, size) for _ in range(draw.randrange(0, 2 * size + 1))] if size else []
        return view.select(index), [model[i] for i in index]
    if kind == 1:
        order = numbers_of_order(size, seed)
        return view.shuffle(seed), [model[i] for i in order]
    if kind == 2:
        descending = bool(seed % 2)
        return view.sort("number", descending), sorted(model, reverse=descending)
    if kind == 3:
        shards = draw.randrange(1, 5)
        which, contiguous = draw.randrange(shards), bool(seed % 2)
        part = np.array_split(np.array(model, np.int64), shards)[which].tolist() if contiguous else model[which::shards]
        return view.shard(shards, which, contiguous), part
    if kind == 4 and size > 1:
        test = draw.randrange(1, size)
        parts = view.train_test_split(test, shuffle=False)
        return (parts["test"], model[size - test :]) if seed % 2 else (parts["train"], model[: size - test])
    first = draw.randrange(0, size + 1)
    return view.select(slice(first, None, 2)), model[first::2]


def numbers_of_order(size: int, seed: int) -> list[int]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**6)), max_size=6))
def test_a_chain_of_views_is_the_same_chain_on_a_list(shared, steps):
    view, model = shared, list(range(ROWS))
    for kind, seed in steps:
        view, model = _step(kind, seed, view, model)
    assert len(view) == len(model)
    assert numbers(view[:]) == model
    assert numbers(pickle.loads(pickle.dumps(view))[:]) == model
    if model:
        assert [int(view[i]["number"]) for i in (0, -1)] == [model[0], model[-1]]
        loader = DeviceLoader(view, batch_size=7)
        assert all_numbers(loader) == model
        loader.close()
    assert numbers(shared[:]) == list(range(ROWS))  # which no view changes


# --- where they work --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [False, True])
def test_a_device_loader_gives_the_rows_of_a_view(dataset, where, resident):
    if where is None and resident:
        resident = "auto"
    order = random.Random(0).sample(range(ROWS), 40)
    view = dataset.select(order)
    place = {"device": where, "resident": resident}
    assert all_numbers(DeviceLoader(view, batch_size=7, **place)) == order
    for shuffle in (True, "permute"):
        shuffled = all_numbers(DeviceLoader(view, batch_size=7, shuffle=shuffle, seed=1, **place))
        positions = torch.tensor(all_numbers(DeviceLoader(dataset.select(range(40)), 7, shuffle, seed=1, **place)))
        assert shuffled == torch.tensor(order)[positions].tolist() != order
    subset = Subset(Subset(view, range(0, 40, 2)), [3, -1])
    assert all_numbers(DeviceLoader(subset, batch_size=1, **place)) == [order[6], order[38]]
    shares = [all_numbers(DeviceLoader(view, 4, rank=rank, world_size=3, drop_last=True, **place)) for rank in range(3)]
    assert [sorted(share) for share in shares] == [sorted(order[rank:36:3]) for rank in range(3)]


def test_a_loaders_state_goes_on_in_a_view(dataset):
    view = dataset.shuffle(4).shard(2, 1)
    whole = all_numbers(DeviceLoader(view, batch_size=4, shuffle="permute", seed=2))
    loader = DeviceLoader(view, batch_size=4, shuffle="permute", seed=2)
    iterator = iter(loader)
    begun = numbers(next(iterator)) + numbers(next(iterator))
    resumed = DeviceLoader(pickle.loads(pickle.dumps(view)), batch_size=4, shuffle="permute", seed=2)
    resumed.load_state_dict(loader.state_dict())
    assert begun + all_numbers(resumed) == whole
    assert sorted(whole) == sorted(numbers(view[:]))
    with pytest.raises(RuntimeError, match="rows"):
        DeviceLoader(dataset, batch_size=4, shuffle="permute", seed=2).load_state_dict(loader.state_dict())


def test_a_data_loader_and_its_workers_read_a_view(dataset):
    view = dataset.shuffle(1).select(slice(0, 50)).rename_keys({"number": "n"})
    expected = view[:]["n"].tolist()
    loader = DataLoader(view, batch_size=8, num_workers=2)
    assert torch.cat([batch["n"] for batch in loader]).tolist() == expected
    first, second = random_split(view, [20, 30], torch.Generator().manual_seed(0))
    assert sorted(row["n"].item() for part in (first, second) for row in DataLoader(part, batch_size=None)) == sorted(
        expected
    )
    assert len(ConcatDataset([view, view])) == 100


@pytest.mark.parametrize(
    "name", ["lazy_stack", "non_tensor_stack", "tensorclass", "tensorclass_stack", "typed", "names"]
)
def test_views_of_saves_of_every_kind(tmp_path, name):
    BUILDERS[name]().memmap(tmp_path)
    dataset = MemmapDataset(tmp_path, allow_pickle=True)
    index = [len(dataset) - 1, 0, 0]
    view, plain = dataset.select(index), dataset[index]
    assert type(view[:]) is type(plain) and view[:].batch_size == plain.batch_size == view.batch_size
    assert_same(view[:], plain)


def test_a_view_of_an_archive(tmp_path):
    save_rows(tmp_path / "save", 30)
    tdgpu.pack_memmap(tmp_path / "save", tmp_path / "rows.tdz", compression="deflate")
    view = MemmapDataset(tmp_path / "rows.tdz", keys=["number", "byte", "nested"]).select(range(29, -1, -3))
    assert all_numbers(DeviceLoader(view, batch_size=4)) == list(range(29, -1, -3))


# --- saves that grow --------------------------------------------------------------------------------------------------


def test_a_view_has_the_rows_of_when_it_was_made_and_its_dataset_may_go_on(dataset):
    view = dataset.select(range(10)).shuffle(0)
    renamed = dataset.rename_keys({"number": "n"})
    before = numbers(view[:])
    tdgpu.append_memmap(dataset.prefix, rows(ROWS, 5))
    assert dataset.refresh() == 5 and len(dataset) == 65
    assert numbers(view[:]) == before and len(view) == 10
    with pytest.raises(InvalidArgument, match="refresh the dataset"):
        view.refresh()
    assert len(renamed) == ROWS and renamed.select([-1])[:]["n"].tolist() == [ROWS - 1]
    assert renamed.refresh() == 5 and renamed[-1]["n"].item() == 64
    assert numbers(dataset.select([-1])[:]) == [64]
    assert numbers(pickle.loads(pickle.dumps(view))[:]) == before


# --- rename_keys ------------------------------------------------------------------------------------------------------


@pytest.fixture
def keyed(tmp_path: Path) -> MemmapDataset:
    td = TensorDict(
        {"a": torch.arange(3), "b": torch.ones(3), "n": {"x": torch.zeros(3, 2), "m": {"y": torch.ones(3)}}}, [3]
    )
    td["point"] = Point(x=torch.zeros(3), y=torch.ones(3, 2), batch_size=[3])
    td["text"] = NonTensorStack("one", "two", "three")
    td.memmap(tmp_path)
    return MemmapDataset(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        {"a": "c"},
        {"a": "b", "b": "a"},
        {("n", "x"): "x", "point": ("n", "p")},
        {("n", "x"): ("n", "z"), "text": "words"},
        {"a": ("deep", "er", "a"), ("n", "m"): "m"},
        {"n": ("k", "n"), "b": ("k", "b")},
    ],
)
def test_renamed_entries_are_those_of_the_old_keys(keyed, names):
    view = keyed.rename_keys(names)
    whole, got = keyed[:], view.select([2, 0])[:]
    new = {key if isinstance(key, tuple) else (key,): value for key, value in names.items()}
    expected = {}
    for key in whole.keys(True, True):
        parts = key if isinstance(key, tuple) else (key,)
        for old, to in new.items():
            if parts[: len(old)] == old:
                parts = (*(to if isinstance(to, tuple) else (to,)), *parts[len(old) :])
                break
        expected[parts] = whole.get(key)[[2, 0]]
    found = {key if isinstance(key, tuple) else (key,): got.get(key) for key in got.keys(True, True)}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (
            torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key].tolist() == value.tolist()
        )
    assert isinstance(got[names.get("point", "point")], Point)


def test_an_entry_that_stays_in_its_level_keeps_its_place(keyed):
    assert list(keyed.rename_keys({"a": "z"})[0].keys())[:2] == ["z", "b"]


def test_keys_are_told_under_their_new_names(keyed):
    some = MemmapDataset(keyed.prefix, keys=["a", "n"])
    view = some.rename_keys({"a": "b", ("n", "x"): "x"})
    assert view.keys == [("b",), ("n",), ("x",)]
    assert "keys=['b', 'n', 'x']" in repr(view) and "2 of 3 rows" in repr(view.select([0, 1]))
    assert set(view[0].keys(True, True)) == {"b", "x", ("n", "m", "y")}
    assert view.rename_keys({"b": "a", "x": ("n", "x")})[:].select("a", "n").keys() == some[:].keys()


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ({"z": "y"}, UnknownKeyError), ({("n", "z"): "y"}, UnknownKeyError), ({("a", "x"): "y"}, UnknownKeyError),
        ({"a": "b"}, InvalidArgument), ({"a": ("n", "x")}, InvalidArgument), ({"a": ("b", "x")}, InvalidArgument),
        ({"a": "c", "b": "c"}, InvalidArgument), ({"n": "k", ("n", "x"): "x"}, InvalidArgument),
        ({("point", "x"): "x"}, NotSupported), ({"a": 3}, InvalidArgumentType), (["a"], InvalidArgumentType),
        ({"a": ("point", "z")}, InvalidArgument),
    ],
)  # fmt: skip
def test_what_cannot_be_renamed_is_refused(keyed, names, error):
    with pytest.raises(error):
        keyed.rename_keys(names)
    assert len(keyed.rename_keys({"a": "q"})[0]) == len(keyed[0])


def test_the_fields_of_a_tensorclass_keep_their_names(tmp_path):
    rows_of_points = Point(x=torch.zeros(3), y=torch.ones(3, 2), batch_size=[3])
    rows_of_points.memmap(tmp_path)
    with pytest.raises(NotSupported, match="Point"):
        MemmapDataset(tmp_path).rename_keys({"x": "z"})


def test_a_subclass_keeps_its_class(dataset):
    class Mine(MemmapDataset):
        pass

    assert type(Mine(dataset.prefix).select([0]).rename_keys({"byte": "b"})) is Mine
