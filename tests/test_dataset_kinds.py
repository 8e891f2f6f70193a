"""MemmapDataset of every kind of save, and of some of its keys."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import tensordict
import torch
from compare import assert_same
from saves import BUILDERS, DTYPES, LEGACY, random_bytes
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

import tdgpu
from tdgpu.data.dataset import MemmapDataset
from tdgpu.errors import InvalidArgument, NotSupported, UnknownKeyError

# Every kind of save with a batch dimension, of which tdgpu knows how many rows it has.
WITH_ROWS = (
    "flat", "nested", "names", "empty_levels", "zero_size", "dtypes", "keys", "legacy_keys", "point", "tensorclass",
    "tensorclass_pickle", "tensorclass_types", "tensorclass_stack", "non_tensor", "non_tensor_pickle",
    "non_tensor_stack", "non_tensor_stack_deep", "non_tensor_stack_pickle", "lazy_stack", "lazy_stack_named",
    "lazy_stack_dim1", "lazy_stack_of_stacks", "typed", "subclass",
)  # fmt: skip


# --- every kind of save -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_ROWS)
@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_save(name, tmp_path):
    value = BUILDERS[name]()
    value.memmap(tmp_path, robust_key=name not in LEGACY)
    dataset = MemmapDataset(tmp_path, allow_pickle=True)
    loaded = tdgpu.load_memmap(tmp_path, mode="r", allow_pickle=True)
    rows = value.batch_size[0]
    assert (len(dataset), dataset.batch_size) == (rows, value.batch_size)
    order = torch.tensor([i % rows for i in (2, 0, 1, 1)] if rows else [], dtype=torch.int64)
    assert_same(dataset[order], loaded[order])
    # A slice gives what the same rows as a list give: tensordict itself keeps a part of a stack only for the former.
    assert_same(dataset[:], loaded[torch.arange(rows)])
    for i in range(rows):
        assert_same(dataset[i], loaded[i])
    if rows:
        assert_same(pickle.loads(pickle.dumps(dataset))[[0]], dataset[[0]])
    assert not any(isinstance(leaf, tensordict.MemoryMappedTensor) for leaf in _leaves(dataset[:]))


def _leaves(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, LazyStackedTensorDict):
        return [leaf for member in value.tensordicts for leaf in _leaves(member)]
    if tensordict.is_tensorclass(value):
        return _leaves(value._tensordict)
    return [leaf for item in value._tensordict.values() for leaf in _leaves(item)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_arrives(dtype, tmp_path):
    values = random_bytes(dtype, 40, 3)
    stacked = LazyStackedTensorDict(*(TensorDict(v=row) for row in values))
    for i, value in enumerate((TensorDict({"v": values}, [40]), stacked, TensorDict({"s": stacked}, [40]))):
        value.memmap(tmp_path / str(i))
        dataset = MemmapDataset(tmp_path / str(i))
        for index in (slice(None), list(range(40))):
            batch = dataset[index]["s"] if i == 2 else dataset[index]
            assert torch.equal(batch["v"].view(torch.uint8), values.view(torch.uint8))
        row = dataset[7]["s"] if i == 2 else dataset[7]
        assert torch.equal(row["v"].view(torch.uint8), values[7].view(torch.uint8))


def test_minus_zero_stays_minus_zero(tmp_path):
    stacked = LazyStackedTensorDict(*(TensorDict(v=torch.tensor([-0.0, 0.0])) for _ in range(3)))
    stacked.memmap(tmp_path)
    assert torch.signbit(MemmapDataset(tmp_path)[:]["v"]).tolist() == [[True, False]] * 3
    assert torch.signbit(MemmapDataset(tmp_path)[1]["v"]).tolist() == [True, False]


def test_a_value_per_row_and_a_value_for_all(tmp_path):
    td = TensorDict({"s": NonTensorStack("a", "b", "c"), "t": torch.arange(3)}, [3])
    td.set_non_tensor("all", "x")
    td.memmap(tmp_path)
    dataset = MemmapDataset(tmp_path)
    batch = dataset[[2, 0, 2]]
    assert (batch["s"], batch["all"], batch["t"].tolist()) == (["c", "a", "c"], "x", [2, 0, 2])
    assert (dataset[1]["s"], dataset[1]["all"]) == ("b", "x")


@pytest.mark.parametrize(("name", "error"), [
    ("scalars", InvalidArgument), ("lazy_permute", NotSupported), ("sub_tensordict", NotSupported),
])  # fmt: skip
def test_what_has_no_rows_is_refused_at_once(name, error, tmp_path):
    BUILDERS[name]().memmap(tmp_path)
    with pytest.raises(error) as refused:
        MemmapDataset(tmp_path)
    assert refused.value.save == str(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_a_nested_tensor_is_refused_and_can_be_left_out(tmp_path):
    ragged = torch.nested.nested_tensor([torch.arange(2), torch.arange(5)])
    TensorDict({"n": {"r": ragged, "x": torch.arange(2)}, "a": torch.arange(2)}, [2]).memmap(tmp_path)
    with pytest.raises(NotSupported, match="strided nested") as error:
        MemmapDataset(tmp_path)
    assert error.value.key == ("n", "r")
    assert MemmapDataset(tmp_path, keys=["a", ("n", "x")])[[1]]["n", "x"].tolist() == [1]


def test_a_foreign_level_below_is_indexed_as_its_class_does(tmp_path):
    source = TensorDict({"a": torch.arange(8).view(4, 2)}, [4])
    TensorDict({"s": source._get_sub_tensordict(slice(1, 3)), "t": torch.arange(2)}, [2]).memmap(tmp_path)
    dataset = MemmapDataset(tmp_path)
    assert dataset[[1, 0]]["s", "a"].tolist() == [[4, 5], [2, 3]]
    assert dataset[1]["s", "a"].tolist() == [4, 5]
    with pytest.raises(NotSupported, match="SubTensorDict") as error:
        MemmapDataset(tmp_path, keys=[("s", "a")])
    assert error.value.key == ("s",)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_only_what_is_wanted_is_there_and_no_other_leaf_is_opened(tmp_path):
    BUILDERS["nested"]().memmap(tmp_path)
    dataset = MemmapDataset(tmp_path, keys=["a", ("inner", ("deep", "a"))])
    assert dataset.keys == [("a",), ("inner", "deep", "a")]
    assert sorted(dataset[0].keys(True, True), key=str) == [("inner", "deep", "a"), "a"]
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line}
    assert mapped == {f"{tmp_path}/a.memmap", f"{tmp_path}/inner/deep/a.memmap"}


@pytest.mark.parametrize(("name", "keys"), [
    ("nested", ["inner"]), ("nested", [("inner", "b"), "z"]), ("nested", [("inner", "deep"), "inner"]),
    ("nested", ["inner", ("inner", "deep")]), ("nested", []), ("keys", ["a/b", ("n..", ".."), "", "."]),
    ("point", ["x"]), ("tensorclass", ["image", ("at", "y")]), ("tensorclass", ["label", "image"]),
    ("tensorclass", [("at", "x"), "extra"]), ("tensorclass_stack", ["y"]), ("typed", [("t", "a")]), ("names", ["a"]),
    ("non_tensor", ["str", "list"]), ("non_tensor_stack", ["s"]), ("lazy_stack", ["a"]), ("lazy_stack", [("n", "b")]),
    ("lazy_stack_named", [("s", "a")]),
])  # fmt: skip
def test_keys_are_those_of_select(name, keys, tmp_path):
    value = BUILDERS[name]()
    value.memmap(tmp_path)
    dataset = MemmapDataset(tmp_path, keys=keys)
    loaded = tdgpu.load_memmap(tmp_path, mode="r")
    # select() drops the rest of a subtree if a key below it is named, too, and has the order of its arguments.
    wanted = [key for key in keys if isinstance(key, str) or key[0] not in keys]
    saved = list(loaded.keys(True))
    expected = loaded.select(*sorted(wanted, key=saved.index))
    for index in (0, torch.tensor([1, 0])):
        assert_same(dataset[index], expected[index])


@pytest.mark.parametrize(("name", "keys", "key"), [
    ("nested", ["nope"], ("nope",)), ("nested", [("inner", "nope")], ("inner", "nope")),
    ("nested", [("a", "b")], ("a", "b")), ("nested", ["inner/b"], ("inner/b",)), ("point", ["z"], ("z",)),
    ("tensorclass", [("at", "z")], ("at", "z")), ("tensorclass", [("label", "z")], ("label", "z")),
    ("lazy_stack", ["b"], ("b",)), ("lazy_stack_dim1", ["only1"], ("only1",)), ("lazy_stack", [("0", "a")], ("0", "a")),
    ("non_tensor", [("str", "x")], ("str", "x")), ("point", ["_tensordict"], ("_tensordict",)),
])  # fmt: skip
def test_an_unknown_key_is_an_error_that_names_it(name, keys, key, tmp_path):
    BUILDERS[name]().memmap(tmp_path)
    with pytest.raises(UnknownKeyError) as error:
        MemmapDataset(tmp_path, keys=keys)
    assert (error.value.key, error.value.save) == (key, str(tmp_path))
