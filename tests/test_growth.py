"""What rows add to a save, and which rows fit: as tensordict says, where that is right."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensordict
import torch
from saves import BUILDERS, DTYPES, FLOAT8, SAVES, Frame, Point, Subclass, Thing, point, random_bytes
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictParams, lazy_stack

import tdgpu
from tdgpu.errors import FormatError, InvalidArgument, InvalidArgumentType, LeafSizeError, MissingLeafError
from tdgpu.layout import objects, reader
from tdgpu.layout.growth import Growing, growing, match

# Where tensordict refuses what it should take: NaN is never NaN there, and of some dtypes it cannot load any save.
BETTER = frozenset({"non_tensor", "float8"})


def read(path: Path) -> Growing:
    save = reader.read(path, check=False)
    objects.resolve(save, True)
    return growing(save)


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def ours(path: Path, rows: Any) -> type[BaseException] | None:
    """What speaks against these rows: the built-in exception, or None."""
    try:
        match(read(path), rows)
    except (ValueError, TypeError, RuntimeError) as error:
        return next(base for base in (TypeError, ValueError, RuntimeError) if isinstance(error, base))
    return None


def theirs(path: Path, rows: Any) -> type[BaseException] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensordict.append_memmap(path, rows, allow_pickle=True)
    except Exception as error:
        return next((base for base in (TypeError, ValueError, RuntimeError) if isinstance(error, base)), type(error))
    return None


def check_same_answer(path: Path, rows: Any, copy: Path) -> type[BaseException] | None:
    """Both accept, or both refuse alike; refused rows change no byte."""
    shutil.copytree(path, copy, symlinks=True)
    before = files_of(path)
    found, expected = ours(path, rows), theirs(copy, rows)
    assert files_of(path) == before
    assert found is expected, (found, expected)
    if expected is not None:
        assert files_of(copy) == before
    return found


# --- every kind of save -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(set(BUILDERS) - BETTER))
def test_the_same_saves_grow(tmp_path: Path, kind: str) -> None:
    SAVES[kind](tmp_path / "save")
    if kind in ("third_party", "tensorclass_stack"):  # refused there by an accident, a TypeError over a missing path
        assert ours(tmp_path / "save", BUILDERS[kind]()) is ValueError
        assert theirs(tmp_path / "save", BUILDERS[kind]()) is TypeError
        return
    check_same_answer(tmp_path / "save", BUILDERS[kind](), tmp_path / "copy")


def test_what_tensordict_should_take(tmp_path: Path) -> None:
    # A tuple is saved as a list, and is not equal to that.
    values, fp8 = BUILDERS["non_tensor"]().exclude("tuple"), BUILDERS["float8"]()
    for name, td in (("values", values), ("fp8", fp8)):
        td.memmap(tmp_path / name)
        assert theirs(tmp_path / name, td) is not None
        assert ours(tmp_path / name, td) is None
    assert ours(tmp_path / "values", values.exclude("nan")) is ValueError


@pytest.mark.parametrize(
    "kind", ["flat", "nested", "names", "zero_size", "dtypes", "keys", "legacy_keys", "tensorclass"]
)
def test_metadata_and_places_are_those_of_tensordict(tmp_path: Path, kind: str) -> None:
    """The files that tensordict's append changes are those that grow; the metadata that it writes is ours."""
    SAVES[kind](tmp_path / "save")
    rows = BUILDERS[kind]()
    if kind == "zero_size":
        rows = TensorDict(
            {"z": torch.ones(5, 3), "y": torch.empty(5, 2, 0, dtype=torch.int8), "n": {"k": torch.ones(5)}}, [5]
        )
    grows = read(tmp_path / "save")
    count, tensors = match(grows, rows)
    assert count == rows.batch_size[0]
    assert [tuple(tensor.shape) for tensor in tensors] == [(count, *leaf.row_shape) for leaf in grows.leaves]
    assert [tensor.dtype for tensor in tensors] == [leaf.dtype for leaf in grows.leaves]
    before = files_of(tmp_path / "save")
    tensordict.append_memmap(tmp_path / "save", rows)
    after = files_of(tmp_path / "save")
    changed = {name for name in after if before.get(name) != after[name]}
    expected = {str(Path(leaf.file).relative_to(tmp_path / "save")): leaf for leaf in grows.leaves}
    levels = {str(Path(level.directory, "meta.json").relative_to(tmp_path / "save")): level for level in grows.levels}
    assert changed == {*expected, *levels}
    for name, leaf in expected.items():
        assert len(after[name]) == leaf.row_nbytes * (grows.rows + count)
    for name, level in levels.items():
        assert level.metadata(grows.rows + count) == after[name]


def test_metadata_of_a_level_with_keys_like_the_mark(tmp_path: Path) -> None:
    td = TensorDict({str(10**17): torch.zeros(2), f"x{10**17 + 1}": torch.zeros(2, 3)}, [2])
    td.memmap(tmp_path)
    (level,) = read(tmp_path).levels
    tensordict.append_memmap(tmp_path, td[:1])
    assert level.metadata(3) == (tmp_path / "meta.json").read_bytes()


def test_order_of_levels_and_leaves(tmp_path: Path) -> None:
    td = TensorDict(
        {
            "n": {"m": {"c": torch.zeros(3)}, "b": torch.zeros(3, 2), "e": torch.zeros(3, 0)},
            "a": torch.zeros(3),
            "p": point(),
        },
        [3],
    )
    td.memmap(tmp_path)
    grows = read(tmp_path)
    assert [level.key for level in grows.levels] == [(), ("n",), ("n", "m"), ("p",)]
    assert [level.directory for level in grows.levels] == [
        str(tmp_path / name) for name in ("", "n", "n/m", "p/_tensordict")
    ]
    assert [leaf.key for leaf in grows.leaves] == [("a",), ("n", "b"), ("n", "m", "c"), ("p", "x"), ("p", "y")]
    assert (grows.rows, grows.batch_shape, grows.row_nbytes) == (3, (), 4 + 8 + 4 + 4 + 8)
    tensors = match(grows, td)[1]
    assert tensors[0] is td["a"]
    assert tensors[3] is td["p"].x


# --- rows that do not fit ---------------------------------------------------------------------------------------------


def _nested_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(3), torch.zeros(3)])


def _base() -> TensorDict:
    td = TensorDict(
        {
            "a": torch.zeros(3, 2),
            "n": TensorDict({"b": torch.zeros(3, 4, dtype=torch.int32)}, [3]),
            "z": torch.zeros(3, 0),
        },
        [3],
    )
    td["p"] = point()
    td["f"] = Frame(image=torch.zeros(3, 4), at=point(), label="cat", extra=None, batch_size=[3])
    td.set_non_tensor("s", "text")
    td.set_non_tensor("d", {"k": [1, 2]})
    return td


def _with(**entries: Any) -> Callable[[], Any]:
    def make() -> Any:
        td = _base()
        for key, value in entries.items():
            if value is None:
                del td[key]
            elif isinstance(value, NonTensorData | NonTensorStack):
                td._set_str(key, value, validated=True, inplace=False)
            else:
                td[key] = value
        return td

    return make


def _fields(**fields: Any) -> Callable[[], Any]:
    given = {"image": torch.zeros(3, 4), "at": point(), "label": "cat", "extra": None, **fields}
    return _with(f=Frame(batch_size=[3], **given))


def _forced(key: str, value: Any) -> Callable[[], Any]:
    """An entry that a TensorDict would not take by itself."""

    def make() -> Any:
        td = _base()
        td._tensordict[key] = value
        return td

    return make


def _integers() -> TensorDict:
    return TensorDict({"b": torch.zeros(3, 4, dtype=torch.int32)}, [3])


ROWS: dict[str, Callable[[], Any]] = {
    "as saved": _base,
    "no rows": lambda: _base()[:0],
    "one row": lambda: _base()[:1],
    "keys in another order": lambda: TensorDict(dict(reversed(list(_base()._tensordict.items()))), [3]),
    "strided": lambda: _with(a=torch.zeros(2, 3).t())(),
    "expanded": lambda: _with(a=torch.zeros(1, 1).expand(3, 2))(),
    "requires grad": _with(a=torch.zeros(3, 2, requires_grad=True)),
    "a parameter": _with(a=torch.nn.Parameter(torch.zeros(3, 2))),
    "a buffer": _with(a=torch.nn.Buffer(torch.zeros(3, 2))),
    "lazy at the top": lambda: lazy_stack([_base()[i] for i in range(3)]),
    "lazy below": _with(n=lazy_stack([TensorDict({"b": torch.zeros(4, dtype=torch.int32)}) for _ in range(3)])),
    "a sub-tensordict": lambda: _base()._get_sub_tensordict(slice(0, 2)),
    "a subclass below": _with(n=Subclass({"b": torch.zeros(3, 4, dtype=torch.int32)}, [3])),
    "params below": _with(n=TensorDictParams(_integers(), no_convert=True)),
    "no collection": lambda: torch.zeros(3),
    "a dict": lambda: {"a": torch.zeros(3, 2)},
    "none": lambda: None,
    "no batch dimension": lambda: TensorDict({"a": torch.zeros(3, 2)}),
    "another batch dimension": lambda: TensorDict({"a": torch.zeros(3, 2)}, [3, 2]),
    "a tensorclass": point,
    "a non-tensor value": lambda: NonTensorData("x", batch_size=[3]),
    "a stack of values": lambda: NonTensorStack("a", "b"),
    "a missing leaf": _with(a=None),
    "a missing level": _with(n=None),
    "a missing value": _with(s=None),
    "a missing hollow leaf": _with(z=None),
    "one more leaf": _with(q=torch.zeros(3)),
    "another name": lambda: _with(a=None, q=torch.zeros(3, 2))(),
    "another name below": _with(n=TensorDict({"q": torch.zeros(3, 4, dtype=torch.int32)}, [3])),
    "another dtype": _with(a=torch.zeros(3, 2, dtype=torch.float64)),
    "another dtype of no bytes": _with(z=torch.zeros(3, 0, dtype=torch.int8)),
    "another shape": _with(a=torch.zeros(3, 3)),
    "another shape of no bytes": _with(z=torch.zeros(3, 0, 1)),
    "one dimension less": _with(a=torch.zeros(3)),
    "one dimension more": _with(a=torch.zeros(3, 2, 1)),
    "a leaf for a level": _with(n=torch.zeros(3)),
    "a level for a leaf": _with(a=TensorDict({"x": torch.zeros(3, 2)}, [3])),
    "a tensorclass for a level": _with(n=Point(x=torch.zeros(3), y=torch.zeros(3), batch_size=[3])),
    "a level for a tensorclass": _with(p=TensorDict({"x": torch.zeros(3), "y": torch.zeros(3, 2)}, [3])),
    "another tensorclass": _with(p=Frame(image=torch.zeros(3), at=point(), label="x", batch_size=[3])),
    "another batch size below": _with(n=TensorDict({"b": torch.zeros(3, 4, dtype=torch.int32)}, [3, 4])),
    "a value for a leaf": _with(a=NonTensorData("x", batch_size=[3])),
    "a tensor as a value for a leaf": _with(a=NonTensorData(torch.zeros(3, 2), batch_size=[3])),
    "a value for a level": _with(n=NonTensorData("x", batch_size=[3])),
    "a leaf for a value": _with(s=torch.zeros(3)),
    "a level for a value": _with(s=TensorDict({"x": torch.zeros(3)}, [3])),
    "another value": _with(s=NonTensorData("other", batch_size=[3])),
    "an equal value": _with(d=NonTensorData({"k": [1.0, 2]}, batch_size=[3])),
    "an equal value of another class": _with(d=NonTensorData({"k": (1, 2)}, batch_size=[3])),
    "a stack of equals": _with(s=NonTensorStack("text", "text", "text")),
    "a stack with another": _with(s=NonTensorStack("text", "text", "other")),
    "a value that is an array": _with(s=NonTensorData(np.zeros(3), batch_size=[3])),
    "a value that cannot be compared": _with(s=NonTensorData(torch.zeros(2), batch_size=[3])),
    "another field": _fields(label="dog"),
    "one more field": _fields(extra="x"),
    "another field below": _fields(at=Point(x=torch.zeros(3, 1), y=torch.zeros(3), batch_size=[3])),
    "a nested tensor": _forced("a", _nested_tensor()),
    "a Python value": _forced("a", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_same_rows_fit(tmp_path: Path, name: str) -> None:
    _base().memmap(tmp_path / "save")
    rows = ROWS[name]()
    if name == "none":  # refused after the save has been read
        assert ours(tmp_path / "save", rows) is TypeError
    check_same_answer(tmp_path / "save", rows, tmp_path / "copy")


@pytest.mark.parametrize("rows", [_base(), TensorDict({"a": torch.zeros(2)}, [2])])
@pytest.mark.parametrize("kind", ["point", "tensorclass", "flat", "scalars", "lazy_stack", "empty_levels"])
def test_the_same_rows_fit_other_saves(tmp_path: Path, kind: str, rows: Any) -> None:
    SAVES[kind](tmp_path / "save")
    assert check_same_answer(tmp_path / "save", rows, tmp_path / "copy") is ValueError


def test_another_number_of_rows_in_a_leaf_is_refused(tmp_path: Path) -> None:
    _base().memmap(tmp_path)
    for count in (2, 4):
        with pytest.raises(InvalidArgument, match="key 'a'"):
            match(read(tmp_path), _forced("a", torch.zeros(count, 2))())


def test_a_sparse_tensor_is_refused(tmp_path: Path) -> None:
    _base().memmap(tmp_path)
    with pytest.raises(InvalidArgument, match=r"sparse_coo.*key 'a'"):
        match(read(tmp_path), _forced("a", torch.zeros(3, 2).to_sparse())())


def test_errors_name_the_save_and_the_key(tmp_path: Path) -> None:
    _base().memmap(tmp_path)
    grows = read(tmp_path)
    bad = _with(n=TensorDict({"b": torch.zeros(3, 4)}, [3]))()
    with pytest.raises(InvalidArgument, match="float32") as caught:
        match(grows, bad)
    assert (caught.value.save, caught.value.key) == (str(tmp_path), ("n", "b"))
    with pytest.raises(InvalidArgument, match=r"without \['a'\], with \['q'\]"):
        match(grows, _with(a=None, q=torch.zeros(3, 2))())
    with pytest.raises(InvalidArgumentType, match="Tensor") as other:
        match(grows, torch.zeros(3))
    assert other.value.save == str(tmp_path)


def test_values_that_are_nan_are_equal(tmp_path: Path) -> None:
    nan = float("nan")
    for saved, given, fits in (
        (nan, nan * 2, True), (nan, 1.0, False), (1.0, nan, False), (nan, "nan", False),
        ([1, nan], [1, nan * 2], True), ([1, nan], [2, nan], False), ([nan], [nan, nan], False),
        ({"a": [nan]}, {"a": [nan * 2]}, True), ({"a": nan}, {"b": nan}, False),
    ):  # fmt: skip
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        td = TensorDict({"t": torch.zeros(2)}, [2])
        td.set_non_tensor("v", saved)
        td.memmap(path)
        td.set_non_tensor("v", given)
        assert (ours(path, td) is None) == fits, (saved, given)


def test_values_whose_comparison_fails_differ(tmp_path: Path) -> None:
    class Wild:
        def __eq__(self, other: object) -> bool:
            raise ZeroDivisionError

        __hash__ = None  # type: ignore[assignment]

        def __repr__(self) -> str:
            raise ZeroDivisionError

    td = TensorDict({"t": torch.zeros(2)}, [2])
    td.set_non_tensor("v", Thing(3))
    td.memmap(tmp_path)
    assert ours(tmp_path, td) is None
    td._set_str("v", NonTensorData(Wild(), batch_size=[2]), validated=True, inplace=False)
    assert ours(tmp_path, td) is ValueError


# --- arrays of other libraries ----------------------------------------------------------------------------------------


class Foreign:
    """An array of another library, as far as DLPack shows it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **how: Any) -> Any:
        return self.tensor.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def test_arrays_of_other_libraries_count_as_tensors(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.zeros(3, 2), "n": {"b": torch.zeros(3, dtype=torch.int32)}}, [3])
    td.memmap(tmp_path)
    a, b = torch.arange(4.0).view(2, 2), torch.arange(2, dtype=torch.int32)
    rows = TensorDict({"a": Foreign(a), "n": TensorDict({"b": NonTensorData(b.numpy(), batch_size=[2])}, [2])}, [2])
    assert isinstance(rows.get("a"), NonTensorData)
    count, tensors = match(read(tmp_path), rows)
    assert count == 2
    assert torch.equal(tensors[0], a)
    assert torch.equal(tensors[1], b)
    assert tensors[0].data_ptr() == a.data_ptr()
    assert tensors[1].data_ptr() == b.data_ptr()
    rows["a"] = Foreign(a.double())
    with pytest.raises(InvalidArgument, match=r"float64.*key 'a'"):
        match(read(tmp_path), rows)
    rows["a"] = Foreign(a.to_sparse())
    with pytest.raises(InvalidArgument, match="Foreign cannot be taken as a tensor"):
        match(read(tmp_path), rows)


def test_nothing_is_read_from_tensors(tmp_path: Path) -> None:
    _base().memmap(tmp_path)
    rows = _base().to("meta")
    assert all(tensor.is_meta for tensor in match(read(tmp_path), rows)[1])


# --- what cannot grow -------------------------------------------------------------------------------------------------


def test_links_are_refused(tmp_path: Path) -> None:
    def save(name: str) -> Path:
        _base().memmap(tmp_path / name)
        return tmp_path / name

    def linked(path: Path) -> None:
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")

    for name, link in (
        ("leaf", "a.memmap"), ("meta", "meta.json"), ("inner meta", "n/meta.json"), ("level", "n"), ("class", "p"),
        ("class's", "p/_tensordict"),
    ):  # fmt: skip
        path = save(name)
        linked(path / link)
        with pytest.raises(InvalidArgument, match="symbolic link") as caught:
            tdgpu.append_memmap(path, _base())
        assert caught.value.file == str(path / link)
        assert caught.value.save == str(path)
    path = save("prefix")
    (tmp_path / "link").symlink_to(path)
    assert read(tmp_path / "link").rows == 3


def test_two_leaves_in_one_file_are_refused(tmp_path: Path) -> None:
    TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}, [3]).memmap(tmp_path)
    (tmp_path / "b.memmap").unlink()
    os.link(tmp_path / "a.memmap", tmp_path / "b.memmap")
    with pytest.raises(InvalidArgument, match=r"another name.*key 'a'"):
        tdgpu.append_memmap(tmp_path, TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}, [3]))


def test_damaged_saves_are_refused(tmp_path: Path) -> None:
    def save(name: str) -> Path:
        _base().memmap(tmp_path / name)
        return tmp_path / name

    path = save("short")
    os.truncate(path / "a.memmap", 23)
    with pytest.raises(LeafSizeError) as short:
        tdgpu.append_memmap(path, _base())
    assert (short.value.key, short.value.wanted, short.value.found) == (("a",), 24, 23)
    path = save("missing")
    (path / "a.memmap").unlink()
    with pytest.raises(MissingLeafError):
        tdgpu.append_memmap(path, _base())
    path = save("a pipe")
    (path / "a.memmap").unlink()
    os.mkfifo(path / "a.memmap")
    with pytest.raises((MissingLeafError, InvalidArgument), match="file"):
        tdgpu.append_memmap(path, _base())
    path = save("mixed")
    tensordict.append_memmap(path / "n", TensorDict({"b": torch.zeros(1, 4, dtype=torch.int32)}, [1]))
    with pytest.raises(FormatError, match=r"does not have the 3 rows.*key 'n'"):
        tdgpu.append_memmap(path, _base())


def test_archives_are_refused(tmp_path: Path) -> None:
    _base().memmap(tmp_path / "save")
    tensordict.pack_memmap(tmp_path / "save", tmp_path / "save.tdz")
    save = reader.read(tmp_path / "save.tdz")
    with pytest.raises(InvalidArgument, match="archive cannot grow"):
        growing(save)
    save.close()


def test_a_longer_file_and_one_left_of_no_rows(tmp_path: Path) -> None:
    TensorDict({"a": torch.zeros(0, 2)}, [0]).memmap(tmp_path)
    (tmp_path / "a.memmap").write_bytes(b"x" * 100)
    tdgpu.append_memmap(tmp_path, TensorDict({"a": torch.ones(3, 2)}, [3]))
    assert (tmp_path / "a.memmap").stat().st_size == 100
    assert tdgpu.load_memmap(tmp_path)["a"].sum() == 6


# --- speed ------------------------------------------------------------------------------------------------------------


def test_a_thousand_leaves_are_matched_fast(tmp_path: Path) -> None:
    TensorDict({f"k{i}": torch.zeros(2, 3) for i in range(1000)}, [2]).memmap(tmp_path)
    grows, rows = read(tmp_path), TensorDict({f"k{i}": torch.zeros(1, 3) for i in range(1000)}, [1])

    def best(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return min(times)

    # Measured against what touching each tensor costs here: on a busy machine both take longer.
    touch = best(lambda: [(tensor.shape, tensor.dtype) for tensor in rows.values()])
    assert best(lambda: match(grows, rows)) < 8 * touch
    assert best(lambda: grows.levels[0].metadata(123)) < touch


def test_every_dtype(tmp_path: Path) -> None:
    for i, dtype in enumerate((*DTYPES, *FLOAT8)):
        td = TensorDict({"a": random_bytes(dtype, 3, 2)}, [3])
        td.memmap(tmp_path / str(i))
        (leaf,) = read(tmp_path / str(i)).leaves
        assert (leaf.dtype, leaf.row_nbytes) == (dtype, 2 * dtype.itemsize)
        assert match(read(tmp_path / str(i)), td)[1][0] is td["a"]
