"""map, filter, flatten, concatenate and save_to_disk: the right rows, whatever the function returns."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import numbers, resident_bytes, save_rows
from saves import BUILDERS, Point
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorClass, TensorDict

import tdgpu
from tdgpu import MemmapDataset
from tdgpu.errors import InvalidArgument, InvalidArgumentType, SaveExists, TransformError, UnknownKeyError
from tdgpu.options import options

ROWS = 50


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("cache")
    with options(cache=str(directory)):
        yield directory
        assert os.listdir(directory / "building") == [] if (directory / "building").exists() else True


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> MemmapDataset:
    return MemmapDataset(save_rows(tmp_path_factory.mktemp("shared") / "save", ROWS))


def entries(cache: Path) -> list[str]:
    return os.listdir(cache / "entries") if (cache / "entries").exists() else []


# --- what comes of it -------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(0, ROWS), batch_size=st.integers(1, 60), batched=st.booleans(), indices=st.booleans(),
    some=st.booleans(), removed=st.booleans(),
)  # fmt: skip
def test_every_row_is_what_the_function_makes_of_it(shared, size, batch_size, batched, indices, some, removed):
    seen: list[int] = []

    def function(rows: TensorDict, *index: Any) -> dict[str, Any]:
        assert set(rows.keys()) == ({"number"} if some else {"number", "byte", "nested"})
        seen.extend(rows["number"].reshape(-1).tolist())
        assert len(index) == indices
        position = torch.as_tensor(index[0]) if index else torch.zeros((), dtype=torch.int64)
        return {"new": rows["number"] * 3, "nested": {"position": position.expand(rows.batch_size)}}

    view = shared.shuffle(7).select(range(size))
    result = view.map(
        function, batched, batch_size, with_indices=indices, input_keys=["number"] if some else None,
        remove_keys=["byte", ("nested", "wide")] if removed else None, load_from_cache=False,
    )  # fmt: skip
    expected = view[:]
    assert seen == expected["number"].tolist() and len(result) == size
    if not size:
        assert set(result[:].keys(True, True)) >= {"number"}
        return
    found = result[:]
    assert torch.equal(found["new"], expected["number"] * 3) and torch.equal(found["number"], expected["number"])
    position = torch.arange(size) if indices else torch.zeros(size, dtype=torch.int64)
    assert torch.equal(found["nested", "position"], position)
    assert set(found.keys(True, True)) == {"new", "number", ("nested", "position")} | (
        set() if removed else {"byte", ("nested", "wide")}
    )
    if not removed:
        assert numbers(found) == expected["number"].tolist()
    loaded = tdgpu.load_memmap(result.prefix)
    assert torch.equal(loaded["new"], found["new"])


@pytest.mark.parametrize("batched", [False, True])
def test_a_function_gets_rows_on_the_device(shared, where, batched):
    def function(rows: TensorDict, index: Any) -> TensorDict:
        assert rows["number"].device.type == (where or "cpu") and rows.device == rows["number"].device
        if batched:
            assert index.device == rows["number"].device and index.dtype == torch.int64
        return TensorDict({"twice": rows["number"] * 2, "index": torch.as_tensor(index).cpu()}, rows.batch_size)

    view = shared.select(range(ROWS - 1, -1, -1))
    result = view.map(function, batched, 16, with_indices=True, device=where, num_threads=2)
    assert result[:]["twice"].tolist() == [2 * i for i in range(ROWS - 1, -1, -1)]
    assert result[:]["index"].tolist() == list(range(ROWS))
    assert numbers(result[:]) == list(range(ROWS - 1, -1, -1))
    kept = view.filter(lambda rows: rows["number"] % 2 == 1, batched, 16, device=where)
    assert numbers(kept[:]) == list(range(ROWS - 1, -1, -2))


VALUES: dict[str, tuple[Callable[[int], Any], Any]] = {
    "bool": (lambda i: i > 1, torch.tensor([False, False, True])),
    "int": (lambda i: i, torch.tensor([0, 1, 2])),
    "float": (lambda i: i / 2, torch.tensor([0.0, 0.5, 1.0])),
    "complex": (lambda i: i * 1j, torch.tensor([0, 1j, 2j])),
    "numpy scalar": (lambda i: np.float16(i), torch.tensor([0, 1, 2], dtype=torch.float16)),
    "array": (lambda i: np.full((2, 1), i, np.uint8), torch.tensor([[[0]] * 2, [[1]] * 2, [[2]] * 2]).byte()),
    "read-only array": (lambda i: np.broadcast_to(np.int16(i), (2,)), torch.tensor([[0, 0], [1, 1], [2, 2]]).short()),
    "tensor": (lambda i: torch.tensor(i, dtype=torch.bfloat16), torch.tensor([0, 1, 2], dtype=torch.bfloat16)),
    "gradient": (lambda i: torch.full((1,), i + 0.0, requires_grad=True) * 2, torch.tensor([[0.0], [2.0], [4.0]])),
    "list": (lambda i: [i, [i + 1][0]], torch.tensor([[0, 1], [1, 2], [2, 3]])),
    "lists of lists": (lambda i: [[i], [i]], torch.tensor([[[0], [0]], [[1], [1]], [[2], [2]]])),
    "string": (lambda i: "abc"[i], ["a", "b", "c"]),
    "the same string": (lambda i: "same", ["same"] * 3),
    "object": (lambda i: {"k": [i, None]}.get("k") if i < 9 else None, [[0, None], [1, None], [2, None]]),
    "None": (lambda i: None, [None] * 3),
    "1 is not True": (lambda i: [None, [1, None], [True, None]][i], [None, [1, None], [True, None]]),
    "datetime": (lambda i: np.datetime64(i, "D"), [np.datetime64(i, "D") for i in range(3)]),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("batched", [False, True])
def test_values_of_every_kind(shared, name, batched):
    make, expected = VALUES[name]

    def function(rows: Any) -> Any:
        if not batched:
            value = make(int(rows["number"]))
            return {"value": value, "deep": {"er": {"value": value}}}
        values = [make(i) for i in rows["number"].tolist()]
        return {"value": values, "deep": TensorDict({"er": {}}, [len(values)]).to_dict() | {"er": {"value": values}}}

    # Of a batch of one row each, too: what is a value must not depend on the others.
    for batch_size in (3, 1):
        dataset = MemmapDataset(shared.prefix, allow_pickle=True).select(range(3))
        found = dataset.map(function, batched, batch_size, load_from_cache=False)[:]
        for key in ("value", ("deep", "er", "value")):
            value = found.get(key)
            if isinstance(expected, torch.Tensor):
                assert value.dtype == expected.dtype and torch.equal(value, expected)
            else:
                got = value.tolist() if isinstance(value, NonTensorStack) else [value.data] * 3
                assert got == expected and [type(item) for item in got] == [type(item) for item in expected]
        assert numbers(found) == [0, 1, 2]


def test_non_tensor_values_of_the_rows_come_along(tmp_path):
    td = TensorDict({"x": torch.arange(5), "n": {"y": torch.zeros(5, 2)}}, [5])
    td["word"], td["n", "same"] = NonTensorStack(*"abcde"), NonTensorData("k", batch_size=[5])
    td.memmap(tmp_path / "save")
    dataset = MemmapDataset(tmp_path / "save")
    result = dataset.shuffle(0).map(lambda row: {"up": row["word"].upper(), "x": row["x"] + 1}, batch_size=2)
    again = result.map(lambda rows: rows.set("z", rows["x"]), batched=True, batch_size=3)
    found, order = again[:], dataset.shuffle(0)[:]["x"].tolist()
    assert found["x"].tolist() == found["z"].tolist() == [i + 1 for i in order]
    assert list(found["word"]) == ["abcde"[i] for i in order] and list(found["up"]) == ["ABCDE"[i] for i in order]
    assert found["n", "same"] == "k" and found["n", "y"].shape == (5, 2)
    assert list(dataset.filter(lambda row: row["word"] in "bd")[:]["word"]) == ["b", "d"]


class Pair(TensorClass):
    left: torch.Tensor
    point: Point
    name: str = "none"


@pytest.mark.parametrize("batched", [False, True])
def test_tensorclasses_in_and_out(shared, batched):
    def make(rows: Any) -> Pair:
        x = rows["number"].float()
        point = Point(x=x, y=x.unsqueeze(-1).expand(*x.shape, 2), batch_size=rows.batch_size)
        return Pair(left=x * 2, point=point, name="made", batch_size=rows.batch_size)

    pairs = shared.map(make, batched, 16)
    found = pairs[:]
    assert type(found) is Pair and type(found.point) is Point and found.name == "made" and len(found) == ROWS
    assert torch.equal(found.left, 2 * found.point.x) and torch.equal(found.point.y[:, 1], torch.arange(50.0))
    changed = pairs.map(lambda rows: {"left": rows.left + 1, "point": {"x": rows.point.x * 0}}, batched)
    assert type(changed[3]) is Pair and changed[3].left == 7 and changed[3].point.x == 0 and changed[3].point.y[0] == 3
    inside = shared.map(lambda rows: {"pair": make(rows)}, batched, 7)
    assert type(inside[4]["pair"]) is Pair and inside[4]["pair"].left == 8 and inside[4]["pair"].name == "made"
    with pytest.raises(TransformError, match=r"A Pair has no field .*rows 0 to 49.*\[key 'more'\]"):
        pairs.map(lambda rows: {"more": rows.left}, batched)
    with pytest.raises(InvalidArgument, match="Only keys of a TensorDict can be removed"):
        pairs.map(lambda rows: {}, batched, remove_keys=["left"])


@pytest.mark.parametrize("name", ["nested", "names", "tensorclass", "non_tensor", "non_tensor_stack"])
def test_saves_of_every_kind_come_through_unchanged(tmp_path, name):
    BUILDERS[name]().memmap(tmp_path / "save")
    dataset = MemmapDataset(tmp_path / "save", allow_pickle=True)
    index = [len(dataset) - 1, 0]
    assert_same(dataset.select(index).flatten()[:], dataset[index])
    assert_same(dataset.select(index).map(lambda rows: {}, batched=True)[:], dataset[index])


def test_several_batch_dimensions(tmp_path):
    TensorDict({"a": torch.arange(30).view(5, 3, 2), "n": {"b": torch.ones(5, 3)}}, [5, 3]).memmap(tmp_path)
    dataset = MemmapDataset(tmp_path)
    result = dataset.map(lambda rows: {"sum": rows["a"].sum(-1)}, batched=True, batch_size=2)
    assert result.batch_size == (5, 3) and torch.equal(result[:]["sum"], dataset[:]["a"].sum(-1))
    result = dataset.map(lambda row: {"sum": row["a"].sum()})
    assert result.batch_size == (5,) and torch.equal(result[:]["sum"], dataset[:]["a"].sum((1, 2)))


def test_a_lazy_stack_becomes_dense_rows_if_it_can(tmp_path):
    rows = [TensorDict({"a": torch.full((2,), i)}, []) for i in range(4)]
    LazyStackedTensorDict(*rows).memmap(tmp_path / "stack")
    result = MemmapDataset(tmp_path / "stack").map(lambda row: {"b": row["a"] + 1})
    assert result[:]["b"].tolist() == [[i + 1] * 2 for i in range(4)] == (result[:]["a"] + 1).tolist()
    points = [Point(x=torch.tensor(float(i)), y=torch.zeros(2), batch_size=[]) for i in range(4)]
    stack: Any = torch.stack(points)  # type: ignore[arg-type]
    stack.memmap(tmp_path / "points")
    found = MemmapDataset(tmp_path / "points").select([3, 1]).flatten()[:]
    assert type(found) is Point and found.x.tolist() == [3.0, 1.0]
    ragged = [TensorDict({"a": torch.zeros(i)}, []) for i in range(1, 3)]
    LazyStackedTensorDict(*ragged).memmap(tmp_path / "ragged")
    with pytest.raises(TransformError, match="rows 0 to 1 cannot be stored"):
        MemmapDataset(tmp_path / "ragged").map(lambda row: {})


# --- another number of rows -------------------------------------------------------------------------------------------


def test_a_batch_may_give_more_rows_fewer_or_none(shared):
    def spread(rows: TensorDict) -> dict[str, Any]:
        number = rows["number"]
        times = number % 3
        return {
            "number": number.repeat_interleave(times),
            "word": [str(n) for n in number.tolist() for _ in range(n % 3)],
        }

    result = shared.map(spread, batched=True, batch_size=1, remove_keys=["byte", "nested"])
    expected = [i for i in range(ROWS) for _ in range(i % 3)]
    assert result[:]["number"].tolist() == expected and list(result[:]["word"]) == list(map(str, expected))
    for function in (spread, lambda rows: {"number": torch.zeros(0)}):
        with pytest.raises(TransformError, match=r"0 rows for row 0, .*of these 1 can stay: name it in remove_keys"):
            shared.map(function, batched=True, batch_size=1, remove_keys=["byte"])
    with pytest.raises(TransformError, match=r"rows were returned here, and 3 in other entries \(rows 0 to 4\)"):
        shared.map(lambda rows: {"a": torch.zeros(3), "b": {"c": torch.zeros(4)}}, batched=True, batch_size=5)


def test_without_rows_the_function_is_not_called(shared):
    def never(rows: Any) -> Any:
        raise AssertionError

    for batched in (False, True):
        result = shared.select([]).map(never, batched, remove_keys=["byte"])
        assert (
            len(result) == 0 and result[:]["nested", "wide"].shape == (0, 300) and "byte" not in set(result[:].keys())
        )
    assert len(shared.select([]).filter(never)) == 0


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_an_exception_names_the_row_keeps_its_traceback_and_leaves_nothing(shared, cache):
    def inner(row: Any) -> Any:
        return {"a": 1 / (int(row["number"]) - 23)}

    with pytest.raises(TransformError, match=r"inner has raised ZeroDivisionError in map, at row 23: ") as caught:
        shared.map(inner, batch_size=10)
    cause = caught.value.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert "1 / (int(row" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(TransformError, match=r"<lambda> has raised StopIteration in filter, at rows 0 to 19"):
        shared.filter(lambda rows: next(iter(())), batched=True, batch_size=20)
    with pytest.raises(KeyboardInterrupt):
        shared.map(lambda row: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert entries(cache) == []


WRONG: dict[str, tuple[Callable[[int], Any], bool, str]] = {
    "another dtype": (lambda i: {"a": 1 if i < 17 else 1.5}, False, r"float32 of shape \[\] for row 17, and .*int64"),
    "another dtype later": (lambda i: {"a": torch.tensor(i if i < 20 else i / 2)}, False, r"rows 20 to 29.*key 'a'"),
    "another shape": (lambda i: {"n": {"a": torch.zeros(2 + (i == 33))}}, False, r"row 33.*\[key 'n/a'\]"),
    "another shape later": (lambda i: {"n": {"a": torch.zeros(2 + (i >= 30))}}, False, r"rows 30 to 39.*\[key 'n/a'\]"),
    "another key": (lambda i: {"a": 1, **({"b": 2} if i == 5 else {})}, False, r"other keys for row 5 than for row 0"),
    "another key later": (lambda i: {"a": 1, **({"b": 2} if i >= 20 else {})}, False, r"rows 20 to 29.*'b'"),
    "text later": (lambda i: {"a": 1 if i < 20 else "x"}, False, r"rows 20 to 29"),
    "text": (lambda i: {"a": 1 if i < 25 else "x"}, False, r"a str for row 25, and a int for row 20.*\[key 'a'\]"),
    "a number": (lambda i: i, False, r"a dict, a TensorDict, a tensorclass or None, not a int \(row 0\)"),
    "None for one": (lambda i: None if i == 3 else {"a": 1}, False, r"None for some rows"),
    "None for later ones": (lambda i: None if i >= 20 else {"a": 1}, False, r"None for some rows.*20 to 29"),
    "a key that is none": (lambda i: {3: 1}, False, r"no string for row 0: 3"),
    "a large int": (lambda i: {"a": 2**70}, False, r"no tensor \(rows 0 to 9\).*\[key 'a'\]"),
    "a sparse tensor": (lambda i: {"a": torch.eye(2).to_sparse()}, False, r"sparse_coo .*\(row 0\).*\[key 'a'\]"),
    "one value for all": (lambda i: {"a": "text"}, True, r"one value per row .* not a str \(rows 0 to 9\).*'a'"),
    "a scalar": (lambda i: {"n": {"a": torch.tensor(1)}}, True, r"a single number for rows 0 to 9.*\[key 'n/a'\]"),
    "unequal tensors": (lambda i: {"a": [torch.zeros(k) for k in range(10)]}, True, r"rows 0 to 9.*\[key 'a'\]"),
    "ragged lists": (lambda i: {"a": [[0] * (k + 1) for k in range(10)]}, True, r"no tensor \(rows 0 to 9\).*'a'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_stored_is_an_error_that_names_the_key_and_the_rows(shared, cache, name):
    make, batched, message = WRONG[name]
    with pytest.raises(TransformError, match=message):
        shared.map(lambda rows: make(int(rows["number"].reshape(-1)[0])), batched, 10)
    assert entries(cache) == []


def test_arguments_are_checked(shared):
    for wrong in (3, None, "map"):
        with pytest.raises(InvalidArgumentType):
            shared.map(wrong)
    for key in ("z", ("nested", "z")):
        with pytest.raises(UnknownKeyError):
            shared.map(lambda row: {}, input_keys=[key])
        with pytest.raises(UnknownKeyError):
            shared.map(lambda row: {}, remove_keys=[key])
    with pytest.raises(InvalidArgument):
        shared.map(lambda row: {}, batch_size=0)
    with pytest.raises(InvalidArgumentType):
        shared.map(lambda row: {}, batched="yes")
    with pytest.raises(InvalidArgument):
        shared.map(lambda row: {}, new_fingerprint="no/name")
    with pytest.raises(InvalidArgumentType):
        shared.map(lambda row: {}, new_fingerprint=3)


# --- for what it does, in memory that is bounded ----------------------------------------------------------------------


def test_none_is_for_what_the_function_does(shared, cache):
    called: list[int] = []
    for _ in range(2):
        assert shared.map(lambda row: called.append(int(row["number"]))) is shared
    assert called == [*range(ROWS), *range(ROWS)] and entries(cache) == []


def test_rows_may_be_changed_by_the_function_without_changing_the_save(shared):
    def function(rows: TensorDict) -> dict[str, Any]:
        del rows["byte"]
        rows["number"] = rows["number"] * 0
        return {"a": rows["number"]}

    assert numbers(shared.map(function, batched=True)[:]) == list(range(ROWS))
    assert numbers(shared.map(function)[:]) == numbers(shared[:]) == list(range(ROWS))


def test_memory_does_not_grow_with_the_rows(tmp_path):
    width = 1 << 16
    TensorDict({"a": torch.arange(400).to(torch.uint8).view(-1, 1).expand(-1, width).contiguous()}, [400]).memmap(
        tmp_path
    )
    most = 0

    def function(rows: TensorDict) -> dict[str, Any]:
        nonlocal most
        most = max(most, resident_bytes())
        return {"b": rows["a"] + 1, "c": rows["a"].short()}

    dataset = MemmapDataset(tmp_path)
    dataset.select(range(20)).map(function, batched=True, batch_size=10)
    before, most = most, 0
    result = dataset.map(function, batched=True, batch_size=10)
    size = sum(file.stat().st_size for file in result.prefix.rglob("*.memmap"))
    assert size == 100 << 20
    assert most - before < size / 5
    del dataset
    most = resident_bytes()
    flat = result.shuffle(0).flatten()
    assert resident_bytes() - most < size / 5
    assert torch.equal(flat[7]["b"], result.shuffle(0)[7]["b"])


# --- filter, and copies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [False, True])
def test_filter_keeps_the_rows_of_a_view_in_its_order(shared, batched):
    view = shared.shuffle(3).select(range(40))
    kept = view.filter(lambda rows, i: (rows["byte"] < 30) & (torch.as_tensor(i) > 4), batched, 7, with_indices=True)
    expected = [number for i, number in enumerate(numbers(view[:])) if number < 30 and i > 4]
    assert numbers(kept[:]) == expected
    assert numbers(kept.filter(lambda rows: [True] * len(rows) if batched else np.True_, batched).shard(2, 0)[:])
    assert kept.prefix == shared.prefix


@pytest.mark.parametrize("returned", [[True] * 3, torch.ones(50), None, "x", [[True]] * 50, 1])
def test_a_filter_that_gives_no_bools_is_refused(shared, returned):
    with pytest.raises(TransformError, match="rows 0 to 49"):
        shared.filter(lambda rows: returned, batched=True)


def test_flatten_and_concatenate_copy_rows_in_order(shared):
    assert shared.flatten() is shared
    view = shared.shuffle(3).rename_keys({"number": "n"})
    flat = view.flatten()
    assert flat[:]["n"].tolist() == view[:]["n"].tolist() and flat.flatten() is flat
    empty = shared.select([])
    assert len(empty.flatten()) == 0
    whole = shared.concatenate(shared.select([3]), empty, shared.shuffle(0))
    assert numbers(whole[:]) == [*range(ROWS), 3, *numbers(shared.shuffle(0)[:])]
    assert numbers(empty.concatenate(shared.select([1]))[:]) == [1]
    with pytest.raises(TransformError, match=r"rows 0 to 49 of dataset 1"):
        shared.concatenate(view)
    with pytest.raises(InvalidArgumentType):
        shared.concatenate([shared])


def test_what_is_saved_to_disk_stays(shared, tmp_path):
    view = shared.shuffle(3).filter(lambda row: row["byte"] > 9)
    view.save_to_disk(tmp_path / "deep" / "rows")
    assert numbers(tdgpu.load_memmap(tmp_path / "deep" / "rows")) == numbers(view[:])
    assert os.listdir(tmp_path / "deep") == ["rows"]
    with pytest.raises(SaveExists):
        view.save_to_disk(tmp_path / "deep" / "rows")
    BUILDERS["lazy_stack"]().memmap(tmp_path / "lazy")
    with pytest.raises((TransformError, RuntimeError)):
        MemmapDataset(tmp_path / "lazy").save_to_disk(tmp_path / "deep" / "lazy")
    assert os.listdir(tmp_path / "deep") == ["rows"]
