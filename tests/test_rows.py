"""Some rows of a save, narrowed and then read, are the rows of the whole loaded save."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from compare import assert_same
from saves import BUILDERS, LEGACY, SAVES, UPSTREAM_CANNOT_LOAD, Subclass, Thing
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TypedTensorDict,
    pack_memmap,
)
from torch._subclasses import FakeTensorMode

from tdgpu.errors import FormatError, InvalidArgument, InvalidArgumentType, NotSupported, OutMismatchError
from tdgpu.layout import objects, reader
from tdgpu.layout.assemble import assemble
from tdgpu.layout.mapped import Mapper, nested_view
from tdgpu.layout.placeholders import Placeholders
from tdgpu.layout.places import places
from tdgpu.layout.rows import narrow
from tdgpu.layout.save import Save
from tdgpu.layout.tree import Kind, Leaf

SLICES = (
    slice(None), slice(0, 100), slice(0, 1), slice(1, 3), slice(-1, None), slice(None, -1), slice(-100, 2),
    slice(1, 1), slice(2, 1), slice(100, None), slice(0, 0), slice(1, None, 1),
)  # fmt: skip
SLICE_IDS = [f"{s.start}:{s.stop}" for s in SLICES]


def _numbers(*shape: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + int(np.prod(shape))).view(shape)


def _member(*shape: int, first: int = 0, **more: Any) -> TensorDict:
    return TensorDict({"a": _numbers(*shape, 2, first=first), **more}, list(shape))


def _grid(outer: int, inner: int) -> Any:
    """A lazy stack of lazy stacks, of batch size [4, 2, 3] in some order, along the dimensions given."""
    stacks = [
        LazyStackedTensorDict(*(_member(4, first=100 * i + 10 * j) for j in range(3)), stack_dim=inner)
        for i in range(2)
    ]
    return LazyStackedTensorDict(*stacks, stack_dim=outer)


def _nested(*parts: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are called a prototype
        return torch.nested.nested_tensor(list(parts))


def _meta_data() -> TensorDict:
    td = TensorDict({"a": _numbers(3)}, [3])
    td["m"] = MetaData("x")
    return td


# What the saves of every kind do not have: other stacks, which are what is not simple about rows.
MORE: dict[str, Callable[[], Any]] = {
    "widths": lambda: TensorDict({"w": torch.empty(4, 0, 3), "b": torch.ones(4, dtype=torch.bool)}, [4]),
    "two dimensions": lambda: TensorDict({"a": _numbers(4, 3, 2), "n": {"b": _numbers(4, 3)}}, [4, 3]),
    "no columns": lambda: TensorDict({"a": torch.empty(4, 0)}, [4, 0]),
    "own class at the root": lambda: Subclass({"a": _numbers(3)}, [3]),
    "metadata": _meta_data,
    "other classes in a stack": lambda: LazyStackedTensorDict(
        BUILDERS["point"](), BUILDERS["point"](), BUILDERS["tensorclass"]()
    ),
    "other classes in a stack 1": lambda: LazyStackedTensorDict(
        BUILDERS["point"](), BUILDERS["tensorclass"](), stack_dim=1
    ),
    "stack 0 of stacks 0": lambda: _grid(0, 0),
    "stack 0 of stacks 1": lambda: _grid(0, 1),
    "stack 1 of stacks 0": lambda: _grid(1, 0),
    "stack 1 of stacks 1": lambda: _grid(1, 1),
    "stack 2 of stacks 0": lambda: _grid(2, 0),
    "stack -1 of stacks -1": lambda: _grid(-1, -1),
    "stack of stacks in a tensordict": lambda: TensorDict({"s": _grid(1, 0), "t": _numbers(3, 2)}, [3, 2]),
    "stack of named": lambda: LazyStackedTensorDict(
        *(TensorDict({"a": _numbers(4, 2)}, [4], names=["row"]) for _ in range(3)), stack_dim=1, stack_dim_name="m"
    ),
    "stack of other keys": lambda: LazyStackedTensorDict(
        _member(first=1, b=_numbers(2)), _member(first=2, c=_numbers(3)), TensorDict({"n": {"a": _numbers(1)}})
    ),
    "stack of other lengths": lambda: LazyStackedTensorDict(_member(3), _member(5), stack_dim=1),
    "stack with objects": lambda: LazyStackedTensorDict(
        *(
            TensorDict({"o": NonTensorData(str(i)), "s": NonTensorStack("x", str(i)), "m": _member(2)}, [2])
            for i in range(3)
        )
    ),
    "stack of objects": lambda: LazyStackedTensorDict(NonTensorData("a"), NonTensorData("b"), NonTensorData("c")),
    "values": lambda: NonTensorStack("a", "b", "c", "d"),
    "equal values": lambda: NonTensorStack("a", "a", "a", "a"),
    "values in two dimensions": lambda: NonTensorStack(
        *(NonTensorStack(*(f"{i}{j}" for j in range(3))) for i in range(4)), stack_dim=1
    ),
    "values that are lists": lambda: TensorDict({"s": NonTensorStack([1, 2], [3, 4], [5])}, [3]),
    "values that are lists of one length": lambda: NonTensorStack([[1], [2]], [[3], [4]], [[5], [6]]),
    "values that are dicts": lambda: TensorDict({"s": NonTensorStack({"k": 1}, None, {"k": [2]})}, [3]),
    "pickled values": lambda: TensorDict({"s": NonTensorStack(Thing(1), Thing(2), Thing(3))}, [3]),
}  # fmt: skip
# Saves without a batch dimension, and those of a class with a format of its own.
FLAT = ("scalars", "non_tensor_root", "nested_tensor", "nested_of_scalars", "params", "odd_sizes", "large", "mixed")
FOREIGN = ("sub_tensordict", "lazy_permute", "lazy_view", "lazy_unsqueeze", "third_party")
NAMES = [name for name in (*SAVES, *MORE) if name not in (*FLAT, *FOREIGN, *UPSTREAM_CANNOT_LOAD)]
RAGGED = [torch.arange(6.0).view(3, 2), torch.arange(2.0).view(1, 2), torch.empty(0, 2), torch.arange(8.0).view(4, 2)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("rows")
    paths = {name: top / name for name in (*SAVES, *MORE)}
    for name, save in SAVES.items():
        save(paths[name])
    for name, build in MORE.items():
        build().memmap(paths[name])
    return paths


def _read(path: Path, name: str = "", **arguments: Any) -> Save:
    save = reader.read(path, robust_key=name not in LEGACY, **arguments)
    objects.resolve(save, True)
    return save


def _from_file(leaf: Leaf) -> torch.Tensor:
    """A leaf, of which nothing but the bytes that it names has been read."""
    assert leaf.extent is not None
    assert 0 <= leaf.first <= leaf.first + leaf.nbytes <= leaf.extent.nbytes
    fd = os.open(leaf.extent.file, os.O_RDONLY)
    try:
        data = os.pread(fd, leaf.nbytes, leaf.extent.offset + leaf.first)
    finally:
        os.close(fd)
    assert len(data) == leaf.nbytes > 0
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(leaf.dtype)
    return values.view(leaf.shape) if leaf.nested_sizes is None else nested_view(values, leaf.nested_sizes)


def _load(save: Save, rows: slice, device: str | None = None, out: Any = None) -> Any:
    target = None if device is None else torch.device(device)
    narrowed = narrow(save, rows)
    structure = device == "meta" or torch._guards.active_fake_mode() is not None
    provide = Placeholders(target, save.prefix) if structure else _from_file
    assert set(places(narrowed, target, out)) == set(narrowed.leaves())
    return assemble(
        narrowed, provide, device=target, out=out, keep_prefix=narrowed is save and not structure, mode="r"
    )  # fmt: skip


def _upstream(path: Path, name: str, rows: slice, device: str | None = None) -> Any:
    loaded = TensorDict.load_memmap(path, device, robust_key=name not in LEGACY, mode="r", allow_pickle=True)
    return loaded[slice(rows.start, rows.stop)]


# --- what is loaded ---


@pytest.mark.parametrize("rows", SLICES, ids=SLICE_IDS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_whole(saved: dict[str, Path], name: str, rows: slice) -> None:
    ours, theirs = _load(_read(saved[name], name), rows), _upstream(saved[name], name, rows)
    assert_same(ours, theirs)
    assert ours.device == theirs.device


@pytest.mark.parametrize("rows", [slice(None), slice(1, 3), slice(1, 1)], ids=[":", "1:3", "1:1"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_meta_tensors(saved: dict[str, Path], name: str, rows: slice) -> None:
    ours = _load(_read(saved[name], name, check=False), rows, "meta")
    theirs = _upstream(saved[name], name, rows, "meta")
    assert_same(ours, theirs)
    assert ours.device == theirs.device


@pytest.mark.parametrize("rows", [slice(1, 2), slice(0, 0)], ids=["1:2", "0:0"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_fake_tensors(saved: dict[str, Path], name: str, rows: slice) -> None:
    with FakeTensorMode():
        assert_same(_load(_read(saved[name], name), rows), _upstream(saved[name], name, rows))


@pytest.mark.parametrize("archived", [False, True])
@pytest.mark.parametrize("name", ["flat", "dtypes", "tensorclass", "lazy_stack", "stack 1 of stacks 0", "values"])
def test_rows_that_are_mapped(saved: dict[str, Path], tmp_path: Path, name: str, archived: bool) -> None:
    path = pack_memmap(saved[name], tmp_path / "a.tdz") if archived else saved[name]
    with contextlib.closing(_read(path)) as save:
        for rows in SLICES:
            ours = assemble(narrow(save, rows), Mapper(save, "r"), device=None, mode="r", keep_prefix=False)
            assert_same(ours, _upstream(path, name, rows))


@pytest.mark.parametrize("rows", SLICES, ids=SLICE_IDS)
def test_dtypes_that_tensordict_cannot_load(saved: dict[str, Path], rows: slice) -> None:
    want = BUILDERS["float8"]()
    ours = _load(_read(saved["float8"]), rows)
    for key, value in want.items():
        assert ours[key].dtype == value.dtype
        assert torch.equal(ours[key].view(torch.uint8), value.view(torch.uint8)[rows])


@pytest.mark.parametrize("rows", SLICES, ids=SLICE_IDS)
def test_rows_of_nested_tensors_are_components(tmp_path: Path, rows: slice) -> None:
    ragged, scalars = _nested(*RAGGED), _nested(*torch.arange(4))
    _unchecked([4], plain=_numbers(4, 2), ragged=ragged, scalars=scalars).memmap(tmp_path / "s")
    ours = _load(_read(tmp_path / "s"), rows)
    assert torch.equal(ours["plain"], _numbers(4, 2)[rows])
    for key, parts in (("ragged", RAGGED), ("scalars", list(torch.arange(4)))):
        found = ours[key]
        assert found.is_nested and found.layout is torch.strided
        assert len(found.unbind()) == len(parts[rows])
        assert all(torch.equal(a, b) for a, b in zip(found.unbind(), parts[rows], strict=True))


def test_nested_tensors_under_a_fake_mode_stay_refused(tmp_path: Path) -> None:
    _unchecked([4], ragged=_nested(*RAGGED)).memmap(tmp_path / "s")
    with FakeTensorMode():
        save = _read(tmp_path / "s")
        (leaf,) = narrow(save, slice(1, 4)).leaves()
        assert leaf.nested_sizes is not None and leaf.nested_sizes.tolist() == [[1, 2], [0, 2], [4, 2]]
        for rows in (slice(1, 4), slice(1, 1)):
            with pytest.raises(NotSupported):
                _load(save, rows)


def test_a_subpath_has_its_own_batch_size(tmp_path: Path) -> None:
    TensorDict({"n": TensorDict({"a": _numbers(5, 2)}, [5])}).memmap(tmp_path / "s")
    assert_same(_load(_read(tmp_path / "s", subpath="n"), slice(1, 3)), TensorDict({"a": _numbers(5, 2)[1:3]}, [2]))


def test_a_stack_of_no_values(tmp_path: Path) -> None:
    NonTensorStack("a").memmap(tmp_path / "s")
    meta = tmp_path / "s" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "data": []}))
    for rows in (slice(None), slice(0, 1)):
        assert_same(_load(_read(tmp_path / "s"), rows), _upstream(tmp_path / "s", "", rows))


def test_a_typed_level_stays_typed(saved: dict[str, Path]) -> None:
    save = _read(saved["typed"])
    typed: Any = type("Typed2", (TypedTensorDict,), {"__annotations__": {"a": torch.Tensor}})
    save.root.children["t"].kind, save.root.children["t"].cls = Kind.TYPED, typed
    found = _load(save, slice(1, 2)).get("t")
    assert type(found) is typed
    assert torch.equal(found["a"], BUILDERS["typed"]()["t", "a"][1:2])


# --- what is read ---


def test_only_the_bytes_of_the_rows_are_named(saved: dict[str, Path]) -> None:
    save = _read(saved["nested"])
    narrowed = narrow(save, slice(1, 3))
    assert {"/".join(leaf.key): (leaf.shape, leaf.first, leaf.nbytes) for leaf in narrowed.leaves()} == {
        "z": ((2, 3), 12, 24), "a": ((2,), 2, 4), "inner/b": ((2,), 4, 8), "inner/deep/a": ((2, 2), 16, 32),
    }  # fmt: skip
    for before, after in zip(save.leaves(), narrowed.leaves(), strict=True):
        assert after.extent is before.extent
    assert narrowed.nbytes == 68


@pytest.mark.parametrize("name", NAMES)
def test_a_save_is_not_changed(saved: dict[str, Path], name: str) -> None:
    save = _read(saved[name], name)

    def state(save: Save) -> list[Any]:
        return [
            (level.key, level.kind, level.batch_size, level.rows, repr(level.objects), list(level.children),
             [(leaf.key, leaf.shape, leaf.first, leaf.nbytes, leaf.extent) for leaf in level.leaves.values()])
            for level in save.root.walk()
        ]  # fmt: skip

    before = state(save)
    for rows in SLICES:
        narrow(save, rows)
    assert state(save) == before


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_read_nothing(saved: dict[str, Path], name: str) -> None:
    assert all(
        leaf.extent is None and leaf.nbytes == 0 for leaf in narrow(_read(saved[name], name), slice(0, 0)).leaves()
    )


def test_members_keep_their_number_and_are_found_by_key(saved: dict[str, Path]) -> None:
    narrowed = narrow(_read(saved["lazy_stack"]), slice(1, 3))
    assert list(narrowed.root.children) == ["1", "2"]
    assert [leaf.key for leaf in narrowed.select(("a",)) or ()] == [("1", "a"), ("2", "a")]
    assert narrowed.select(("missing",)) is None


def test_an_empty_stack_takes_no_memory_for_its_members(tmp_path: Path) -> None:
    LazyStackedTensorDict(_member(1000), _member(1000)).memmap(tmp_path / "s")
    empty = _load(_read(tmp_path / "s"), slice(2, 2))
    assert empty["a"].shape == (0, 1000, 2)
    assert empty["a"].untyped_storage().nbytes() == 8


def test_the_whole_of_a_tensordict_is_the_save(saved: dict[str, Path]) -> None:
    for name in ("flat", "point", "typed"):
        save = _read(saved[name])
        assert narrow(save, slice(None)) is save
        assert narrow(save, slice(0, 100)) is not save


def test_part_of_a_save_does_not_know_its_directory(saved: dict[str, Path]) -> None:
    save = _read(saved["nested"])
    for rows, known in ((slice(None), True), (slice(0, 4), False)):
        narrowed = narrow(save, rows)
        loaded = assemble(narrowed, _from_file, device=None, keep_prefix=narrowed is save)
        assert (loaded._memmap_prefix is not None, loaded["inner"]._memmap_prefix is not None) == (known, known)


# --- arithmetic ---


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> list[Save]:
    """By number of rows: tensors, values and the members of a stack, whose first element is their row."""
    top = tmp_path_factory.mktemp("counted")
    for n in range(7):
        td = TensorDict({"a": _numbers(n, 1), "b": _numbers(n, 1).to(torch.uint8).expand(n, 3)}, [n])
        if n:
            td["v"] = NonTensorStack(*map(str, range(n)))
            td["s"] = LazyStackedTensorDict(*(TensorDict({"c": _numbers(2, first=i)}) for i in range(n)))
        td.memmap(top / str(n))
    return [_read(top / str(n)) for n in range(7)]


BOUNDS = st.none() | st.integers(-9, 9) | st.sampled_from([2**63, -(2**63), 2**100]) | st.integers(-9, 9).map(np.int8)


@hypothesis.given(n=st.integers(0, 6), start=BOUNDS, stop=BOUNDS, step=st.sampled_from([None, 1]))
@hypothesis.settings(deadline=None)
def test_bounds_are_those_of_a_list(counted: list[Save], n: int, start: Any, stop: Any, step: Any) -> None:
    want = list(range(n))[start:stop:step]
    loaded = _load(counted[n], slice(start, stop, step))
    assert loaded.batch_size == (len(want),)
    assert loaded["a"].tolist() == [[i] for i in want]
    assert loaded["b"].tolist() == [[i] * 3 for i in want]
    if n:
        assert loaded.get("v").tolist() == list(map(str, want))
        assert loaded["s", "c"].tolist() == [[i, i + 1] for i in want]


@hypothesis.given(first=st.tuples(BOUNDS, BOUNDS), second=st.tuples(BOUNDS, BOUNDS))
@hypothesis.settings(deadline=None)
def test_rows_of_rows(counted: list[Save], first: tuple[Any, Any], second: tuple[Any, Any]) -> None:
    narrowed = narrow(narrow(counted[6], slice(*first)), slice(*second))
    want = _numbers(6)[slice(*(None if b is None else max(min(int(b), 99), -99) for b in first))]
    want = want[slice(*(None if b is None else max(min(int(b), 99), -99) for b in second))]
    values = _load(narrowed, slice(None)).get("v")
    assert values.tolist() == list(map(str, want.tolist()))
    for leaf in narrowed.root.leaves.values():
        assert leaf.nbytes == len(want) * leaf.dtype.itemsize * leaf.shape[1]
        if len(want):
            assert _from_file(leaf)[:, 0].tolist() == want.tolist()


# --- what is refused ---


@pytest.mark.parametrize("rows", [3, -1, True, None, [0, 1], (0, 2), range(2), "0:2", 1.0, torch.arange(2), ...])
def test_rows_must_be_a_slice(saved: dict[str, Path], rows: Any) -> None:
    with pytest.raises(InvalidArgumentType, match="rows must be a slice"):
        narrow(_read(saved["flat"]), rows)


def test_the_hint_for_one_row_is_that_row(saved: dict[str, Path]) -> None:
    for row, hint in ((3, r"slice\(3, 4\)"), (-1, r"slice\(-1, None\)"), (-2, r"slice\(-2, -1\)")):
        with pytest.raises(InvalidArgumentType, match=f"For one row: {hint}"):
            narrow(_read(saved["flat"]), row)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [slice(0.0, 2), slice("a"), slice(None, None, 1.0), slice(0, [1])])
def test_bounds_must_be_integers(saved: dict[str, Path], rows: slice) -> None:
    with pytest.raises(InvalidArgumentType, match="integers or None"):
        narrow(_read(saved["flat"]), rows)


@pytest.mark.parametrize("step", [2, -1, 0])
def test_steps_are_refused(saved: dict[str, Path], step: int) -> None:
    with pytest.raises(InvalidArgument, match="index the result"):
        narrow(_read(saved["flat"]), slice(0, 4, step))


@pytest.mark.parametrize("rows", [slice(None), slice(0, 1)])
@pytest.mark.parametrize("name", FLAT)
def test_without_a_batch_dimension_there_are_no_rows(saved: dict[str, Path], name: str, rows: slice) -> None:
    with pytest.raises(InvalidArgument, match="no batch dimension to take rows of") as raised:
        narrow(_read(saved[name]), rows)
    assert raised.value.save == str(saved[name])


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_levels_are_refused(saved: dict[str, Path], tmp_path: Path, name: str) -> None:
    with pytest.raises(NotSupported, match="index the result"):
        narrow(_read(saved[name]), slice(0, 1))
    rows = BUILDERS[name]().batch_size[0]
    TensorDict({"below": BUILDERS[name](), "a": _numbers(rows)}, [rows]).memmap(tmp_path / "s")
    with pytest.raises(NotSupported, match="index the result") as raised:
        narrow(_read(tmp_path / "s"), slice(0, 1))
    assert raised.value.key == ("below",)


def _unchecked(size: list[int], **values: Any) -> TensorDict:
    """A tensordict whose batch size need not be that of what it holds."""
    td = TensorDict({}, size)
    td._tensordict.update(values)
    return td


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (_numbers(3), ("v",)),
        (torch.tensor(1), ("v",)),
        (_nested(*torch.arange(3)), ("v",)),
        (_member(3), ("v",)),
        (TensorDict({"a": _numbers(4)}), ("v",)),
        (_unchecked([4], s=_member(3)), ("v", "s")),
        (BUILDERS["point"](), ("v",)),
        (NonTensorStack("a", "b", "c"), ("v",)),
        (LazyStackedTensorDict(_member(), _member()), ("v",)),
        (LazyStackedTensorDict(_member(4), _member(5), stack_dim=1), ("v", "1")),
    ],
)
def test_contradicting_rows_are_refused(tmp_path: Path, value: Any, key: tuple[str, ...]) -> None:
    _unchecked([4], v=value).memmap(tmp_path / "s")
    save = _read(tmp_path / "s")
    with pytest.raises(FormatError, match="rows") as raised:
        narrow(save, slice(0, 2))
    assert raised.value.key == key
    assert raised.value.save == str(tmp_path / "s")


def test_no_members_of_nested_tensors_are_refused(tmp_path: Path) -> None:
    members = [TensorDict({"r": _nested(torch.zeros(1), torch.zeros(2))}) for _ in range(2)]
    LazyStackedTensorDict(*members).memmap(tmp_path / "s")
    save = _read(tmp_path / "s")
    assert [part.tolist() for part in _load(save, slice(1, 2)).tensordicts[0]["r"].unbind()] == [[0], [0, 0]]
    with pytest.raises(NotSupported) as raised:
        narrow(save, slice(0, 0))
    assert raised.value.key == ("0", "r")


# --- into an existing collection ---


def test_out_takes_rows(saved: dict[str, Path]) -> None:
    save = _read(saved["nested"])
    out = TensorDict({"z": _numbers(2), "old": _numbers(2), "a": _numbers(2), "inner": TensorDict({}, [2])}, [2])
    inner = out["inner"]
    assert _load(save, slice(1, 3), out=out) is out
    assert out["inner"] is inner
    assert_same(out, _upstream(saved["nested"], "nested", slice(1, 3)))
    with pytest.raises(OutMismatchError):
        _load(save, slice(0, 3), out=out)


def test_out_takes_members_of_a_stack(saved: dict[str, Path]) -> None:
    save = _read(saved["lazy_stack"])
    out = LazyStackedTensorDict(TensorDict(), TensorDict())
    assert _load(save, slice(1, 3), out=out) is out
    assert_same(out, _upstream(saved["lazy_stack"], "lazy_stack", slice(1, 3)))
    with pytest.raises(OutMismatchError):
        _load(save, slice(0, 1), out=out)


@pytest.mark.parametrize("device", [None, "meta"])
def test_out_of_no_rows_takes_an_empty_stack(saved: dict[str, Path], device: str | None) -> None:
    out = TensorDict({"s": TensorDict({}, [0])}, [0], device="meta" if device is None else None)
    assert _load(_read(saved["lazy_stack_named"], check=False), slice(0, 0), device, out=out) is out
    assert list(out["s"].keys()) == ["a"]
    assert out["s", "a"].shape == (0, 2, 3)
    assert out["s", "a"].is_meta
