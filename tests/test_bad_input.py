"""Saves that are damaged or hostile: a clear error that names the file, never a crash, a hang or a changed file."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saves import SAVES
from tensordict import TensorDict
from test_load_host import snapshot

from tdgpu.errors import (
    FormatError,
    InvalidArgument,
    KeyEscapeError,
    LeafSizeError,
    MissingLeafError,
    PickleRefused,
    SaveNotFound,
    TdgpuError,
    UnknownClassError,
)
from tdgpu.load import load_memmap
from tdgpu.options import options

WAYS = [None, "meta"]
PICKLE = "f/_tensordict/extra/other.pickle"  # of the save "tensorclass_pickle"


def refused(save: Path, cause: type[TdgpuError], *, file: Path | None = None, **arguments: Any) -> TdgpuError:
    """The error with which every way to load ``save`` refuses it; asserts that nothing changes on disk."""
    before = snapshot(save) if os.path.isdir(save) else {}
    for on in WAYS:
        with pytest.raises(cause) as caught:
            load_memmap(save, device=on, **arguments)
        error = caught.value
        assert error.file is not None
        assert error.file in str(error)
        assert pickle.loads(pickle.dumps(error)).file == error.file
        if file is not None:
            assert error.file == str(file)
    if os.path.isdir(save):
        assert snapshot(save) == before
    return error


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    SAVES["flat"](tmp_path / "save")
    return tmp_path / "save"


def edit(save: Path, change: Callable[[dict[str, Any]], Any], level: str = "") -> Path:
    """Rewrites ``meta.json``."""
    file = save / level / "meta.json"
    meta = json.loads(file.read_text())
    replaced = change(meta)
    file.write_text(json.dumps(meta if replaced is None else replaced))
    return file


# --- files ------------------------------------------------------------------------------------------------------------


def test_no_save(tmp_path: Path) -> None:
    for prefix in (tmp_path / "nowhere", tmp_path, tmp_path / "nowhere" / "below", tmp_path / ("x" * 300)):
        error = refused(prefix, SaveNotFound)
        assert isinstance(error, FileNotFoundError)
    with pytest.raises(SaveNotFound):
        load_memmap("nul\0")


def test_plain_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    assert isinstance(refused(tmp_path / "file", InvalidArgument), ValueError)


def test_level_without_metadata(tmp_path: Path) -> None:
    SAVES["nested"](tmp_path)
    (tmp_path / "inner" / "meta.json").unlink()
    refused(tmp_path, SaveNotFound, file=tmp_path / "inner" / "meta.json")


def test_file_in_place_of_a_level(tmp_path: Path) -> None:
    SAVES["nested"](tmp_path)
    shutil.rmtree(tmp_path / "inner" / "deep")
    (tmp_path / "inner" / "deep").write_text("{}")
    refused(tmp_path, MissingLeafError, file=tmp_path / "inner" / "deep")


def test_file_in_place_of_a_stack_member(tmp_path: Path) -> None:
    SAVES["lazy_stack"](tmp_path)
    shutil.rmtree(tmp_path / "2")
    (tmp_path / "2").write_text("{}")
    refused(tmp_path, MissingLeafError, file=tmp_path / "2")


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: os.mkfifo(path)], ids=["directory", "pipe"])
def test_something_else_in_place_of_a_leaf(flat: Path, make: Callable[[Path], Any]) -> None:
    (flat / "obs.memmap").unlink()
    make(flat / "obs.memmap")
    with pytest.raises(MissingLeafError) as caught:
        load_memmap(flat)
    assert caught.value.file == str(flat / "obs.memmap")
    load_memmap(flat, device="meta")  # looks at names only


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: os.mkfifo(path)], ids=["directory", "pipe"])
def test_something_else_in_place_of_metadata(flat: Path, make: Callable[[Path], Any]) -> None:
    (flat / "meta.json").unlink()
    make(flat / "meta.json")
    for on in WAYS:
        with pytest.raises(SaveNotFound) as caught:
            load_memmap(flat, device=on)
        assert caught.value.file == str(flat / "meta.json")


def test_links_to_files_elsewhere_are_followed(flat: Path, tmp_path: Path) -> None:
    (flat / "obs.memmap").rename(tmp_path / "moved")
    (flat / "obs.memmap").symlink_to(tmp_path / "moved")
    assert_same(load_memmap(flat), TensorDict.load_memmap(flat), devices=True)


def test_dangling_link(flat: Path) -> None:
    (flat / "obs.memmap").unlink()
    (flat / "obs.memmap").symlink_to(flat / "nowhere")
    with pytest.raises(MissingLeafError):
        load_memmap(flat)
    assert not (flat / "nowhere").exists()


def test_loop_of_links_in_place_of_a_leaf(flat: Path) -> None:
    (flat / "obs.memmap").unlink()
    (flat / "obs.memmap").symlink_to(flat / "obs.memmap")
    with pytest.raises(FormatError, match="loop"):
        load_memmap(flat)


def test_loop_of_links_in_place_of_metadata(flat: Path) -> None:
    (flat / "meta.json").unlink()
    (flat / "meta.json").symlink_to(flat / "meta.json")
    for on in WAYS:
        with pytest.raises(FormatError, match="loop"):
            load_memmap(flat, device=on)


def test_level_that_lies_in_itself(tmp_path: Path) -> None:
    SAVES["nested"](tmp_path)
    shutil.rmtree(tmp_path / "inner" / "deep")
    (tmp_path / "inner" / "deep").symlink_to(tmp_path)
    for on in WAYS:
        with pytest.raises(FormatError, match="loop"):
            load_memmap(tmp_path, device=on)


def test_levels_that_multiply_without_end(tmp_path: Path) -> None:
    """Each level holds the next one twice: 2**40 levels in 40 directories. The bound on metadata ends it."""
    both = {"type": "TensorDict"}
    meta = {"a": both, "b": both, "_type": str(TensorDict), "shape": [], "device": "None"}
    for i in range(40):
        level = tmp_path / str(i)
        level.mkdir()
        (level / "meta.json").write_text(json.dumps(meta))
        (level / "a").symlink_to(tmp_path / str(i + 1))
        (level / "b").symlink_to(tmp_path / str(i + 1))
    (tmp_path / "40").mkdir()
    (tmp_path / "40" / "meta.json").write_text(json.dumps({**meta, "a": 0, "b": 0}))
    with options(max_metadata_bytes=100_000), pytest.raises(FormatError, match="max_metadata_bytes"):
        load_memmap(tmp_path / "0", device="meta")


def test_too_many_levels_below_one_another(tmp_path: Path) -> None:
    path = tmp_path
    meta = {"_type": str(TensorDict), "shape": [], "n": {"type": "TensorDict"}}
    for _ in range(300):
        (path / "meta.json").write_text(json.dumps(meta))
        path = path / "n"
        path.mkdir()
    refused(tmp_path, FormatError)


# --- leaves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [0, 1, 47])
def test_short_leaf(flat: Path, found: int) -> None:
    os.truncate(flat / "obs.memmap", found)
    with pytest.raises(LeafSizeError) as caught:
        load_memmap(flat)
    error = caught.value
    assert (error.key, error.wanted, error.found) == (("obs",), 48, found)
    assert (flat / "obs.memmap").stat().st_size == found


@pytest.mark.parametrize("name", ["nested_tensor"])
def test_nested_leaf_without_or_with_short_sizes(tmp_path: Path, name: str) -> None:
    SAVES[name](tmp_path)
    sizes = tmp_path / "ragged.shape.memmap"
    os.truncate(sizes, 63)
    refused(tmp_path, LeafSizeError, file=sizes)
    sizes.unlink()
    refused(tmp_path, MissingLeafError, file=sizes)


@pytest.mark.parametrize("rows", [[[1 << 40, 1 << 40]], [[1 << 62, 2]], [[1 << 62, 4]], [[3, 1 << 63 - 1]], [[-1, 2]]])
def test_nested_leaf_with_impossible_sizes(tmp_path: Path, rows: list[list[int]]) -> None:
    SAVES["nested_tensor"](tmp_path)
    edit(tmp_path, lambda meta: meta["ragged"].update(shape=[len(rows), 2]))
    torch.tensor(rows).numpy().tofile(tmp_path / "ragged.shape.memmap")
    refused(tmp_path, FormatError, file=tmp_path / "ragged.shape.memmap")


def test_nested_leaf_with_short_values(tmp_path: Path) -> None:
    SAVES["nested_tensor"](tmp_path)
    os.truncate(tmp_path / "ragged.memmap", 63)
    refused(tmp_path, LeafSizeError, file=tmp_path / "ragged.memmap")


def test_nested_leaf_with_huge_sparse_sizes(tmp_path: Path) -> None:
    SAVES["nested_tensor"](tmp_path)
    edit(tmp_path, lambda meta: meta["ragged"].update(shape=[1 << 36, 2]))
    os.truncate(tmp_path / "ragged.shape.memmap", 1 << 40)
    for on in WAYS:
        with pytest.raises(FormatError, match="max_metadata_bytes"):
            load_memmap(tmp_path, device=on)


# --- metadata ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "{", "nonsense", "[]", "3", "null", '"text"', "\xff\xfe", "{" * 100_000, "[" * 100_000, '{"a": ' * 100_000,
     '{"a": 1', "{'a': 1}", '{"shape": []}', '{"_type": 3}', '{"_type": null}', "1" * 10_000],
    ids=lambda text: text[:12] or "empty",
)  # fmt: skip
def test_malformed_metadata(flat: Path, text: str) -> None:
    (flat / "meta.json").write_bytes(text.encode("latin-1"))
    refused(flat, FormatError, file=flat / "meta.json")


def test_huge_metadata_is_not_read(flat: Path) -> None:
    os.truncate(flat / "meta.json", 1 << 40)
    for on in WAYS:
        with pytest.raises(FormatError, match="max_metadata_bytes") as caught:
            load_memmap(flat, device=on)
        assert caught.value.file == str(flat / "meta.json")


def test_duplicate_keys_mean_the_last(flat: Path) -> None:
    text = (flat / "meta.json").read_text()
    (flat / "meta.json").write_text('{"obs": {"shape": [-1], "dtype": "torch.float32"}, ' + text[1:])
    assert_same(load_memmap(flat), TensorDict.load_memmap(flat), devices=True)


BAD_SHAPES: list[Any] = [
    [-1], [4, -3], [1.0], [4.0, 3], [True, 3], [4, None], ["4"], [[4]], "4", 12, {"0": 4}, True,
    [1 << 63], [1 << 62, 4], [1 << 32, 1 << 32], [0, 1 << 62, 1 << 62], [1 << 64, 0], [1 << 61], [1e300], [10**400],
]  # fmt: skip


@pytest.mark.parametrize("shape", BAD_SHAPES, ids=lambda shape: str(shape)[:20])
def test_malformed_shape(flat: Path, shape: Any) -> None:
    file = edit(flat, lambda meta: meta["obs"].update(shape=shape))
    error = refused(flat, FormatError, file=file)
    assert error.key == ("obs",)


@pytest.mark.parametrize("shape", [shape for shape in BAD_SHAPES if shape != [1 << 61]], ids=lambda s: str(s)[:20])
def test_malformed_batch_size(flat: Path, shape: Any) -> None:
    refused(flat, FormatError, file=edit(flat, lambda meta: meta.update(shape=shape)))


def test_a_bool_is_no_size_beside_an_equal_int(flat: Path) -> None:
    """True and 1.0 equal 1, and must not be found where [1] has been seen."""
    for name in ("first", "second"):
        (flat / f"{name}.memmap").write_bytes(bytes(4))
    for size in (True, 1.0):
        entries = {name: {"shape": [n], "dtype": "torch.float32"} for name, n in (("first", 1), ("second", size))}
        edit(flat, lambda meta, entries=entries: meta.update(entries))  # type: ignore[misc]
        assert refused(flat, FormatError).key == ("second",)


@pytest.mark.parametrize(
    "dtype",
    ["torch.float31", "float32", "torch.qint8", "torch.quint4x2", "torch.nn", "", 5, ["torch.float32"], True, {}],
)
def test_unknown_dtype(flat: Path, dtype: Any) -> None:
    file = edit(flat, lambda meta: meta["obs"].update(dtype=dtype))
    assert refused(flat, FormatError, file=file).key == ("obs",)


@pytest.mark.parametrize("version", [2, 10**30])
def test_newer_version(flat: Path, version: int) -> None:
    refused(flat, FormatError, file=edit(flat, lambda meta: meta.update(_format_version=version)))
    with pytest.raises(RuntimeError):
        TensorDict.load_memmap(flat)


@pytest.mark.parametrize("version", [0, -5, 1, True, 2.5, "2", None, [2]])
def test_other_versions_are_read_as_by_tensordict(flat: Path, version: Any) -> None:
    edit(flat, lambda meta: meta.update(_format_version=version))
    assert_same(load_memmap(flat), TensorDict.load_memmap(flat), devices=True)


@pytest.mark.parametrize(
    "type_name",
    [
        "<class 'nowhere.Unknown'>",
        "<class '__main__.Unknown'>",
        "",
        "x",
        "<class 'torch.Tensor'>",
        "<class '__main__.f.<locals>.TensorDict'>",
        "<class '__main__.A.TensorDict'>",
    ],
)
def test_unknown_class(flat: Path, type_name: str) -> None:
    file = edit(flat, lambda meta: meta.update(_type=type_name, _class="nowhere:Unknown"))
    error = refused(flat, UnknownClassError, file=file)
    assert isinstance(error, RuntimeError)
    assert "import" in str(error)


@pytest.mark.parametrize(
    ("type_name", "class_id"),
    [("<class '__main__.TensorDict'>", None), ("<class 'tensordict.tensordict.TensorDict'>", None),
     ("<class 'a.b.TensorDict'>", "a.b:TensorDict"), ("nonsense", "tensordict:TensorDict"),
     ("<class 'tensordict._td.TensorDict'>", "nonsense"), ("<class 'tensordict._td.TensorDict'>", {"a": 1}),
     ("<class 'tensordict.base.TensorDictBase'>", "nonsense"),
     ("<class 'tensordict.nn.params.TensorDictParams'>", "tensordict:TensorDictParams"),
     ("<class 'tensordict.persistent.PersistentTensorDict'>", "tensordict:PersistentTensorDict"),
     ("<class 'saves.Typed'>", "saves:Typed"), ("nonsense", "saves:Subclass")],
)  # fmt: skip
def test_class_names_resolve_as_in_tensordict(flat: Path, type_name: str, class_id: Any) -> None:
    edit(flat, lambda meta: meta.update(_type=type_name, _class=class_id))
    assert_same(load_memmap(flat), TensorDict.load_memmap(flat), devices=True)


@pytest.mark.parametrize("key", ["device", "_names"])
@pytest.mark.parametrize("value", [3, ["cpu", "cpu"], "nonsense:0", None, [[1]], [3.5]])
def test_malformed_level_fields(flat: Path, key: str, value: Any) -> None:
    edit(flat, lambda meta: meta.update({key: value}))
    if key == "_names" and not isinstance(value, list):
        assert_same(load_memmap(flat), TensorDict.load_memmap(flat), devices=True)  # ignored
        return
    refused(flat, FormatError)


@pytest.mark.parametrize(
    "entry", [3, None, "text", [1], {}, {"dtype": "torch.float32"}, {"shape": [4]}, {"device": "cpu"}]
)
def test_incomplete_entries_are_ignored(flat: Path, entry: Any) -> None:
    edit(flat, lambda meta: meta.update(extra=entry, obs=entry))
    for on in WAYS:
        ours, theirs = load_memmap(flat, device=on), TensorDict.load_memmap(flat, device=on)
        assert_same(ours, theirs)
        assert list(ours.keys()) == ["reward", "done"]


@pytest.mark.parametrize("dim", [None, "0", 1.0, True, [0], 5, -5, 10**30])
def test_stack_dim_out_of_range(tmp_path: Path, dim: Any) -> None:
    SAVES["lazy_stack"](tmp_path)
    refused(tmp_path, FormatError, file=edit(tmp_path, lambda meta: meta.update(stack_dim=dim)))


def test_negative_stack_dim(tmp_path: Path) -> None:
    SAVES["lazy_stack_dim1"](tmp_path)
    edit(tmp_path, lambda meta: meta.update(stack_dim=-1))
    assert_same(load_memmap(tmp_path), TensorDict.load_memmap(tmp_path), devices=True)


def test_stack_of_members_with_other_numbers_of_dimensions(tmp_path: Path) -> None:
    SAVES["lazy_stack"](tmp_path)
    edit(tmp_path, lambda meta: meta.update(shape=[1]), "1")
    refused(tmp_path, FormatError)


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["../obs", "..", "a/../../b", "/etc/passwd", "\x00", "\ud800", "x" * 300])
def test_keys_never_lead_out(flat: Path, key: str) -> None:
    (flat.parent / "obs.memmap").write_bytes(bytes(48))
    edit(flat, lambda meta: meta.update({key: dict(meta["obs"])}))
    assert refused(flat, MissingLeafError).key == (key,)
    leads_out = key.startswith("/") or ".." in f"{key}.memmap".split("/")
    refused(flat, KeyEscapeError if leads_out else MissingLeafError, robust_key=False)


@pytest.mark.parametrize("subpath", ["..", "../save", ("..", "save"), ("/", "etc"), "nul\0", ("a/../../b",), "\ud800"])
@pytest.mark.parametrize("robust_key", [True, False])
def test_subpaths_never_lead_out(flat: Path, subpath: Any, robust_key: bool) -> None:
    with pytest.raises(ValueError, match="subpath"):
        load_memmap(flat, subpath=subpath, robust_key=robust_key)


# --- objects ----------------------------------------------------------------------------------------------------------


def test_pickles_are_refused_before_anything_is_unpickled(tmp_path: Path) -> None:
    SAVES["tensorclass"](tmp_path / "save")

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    (tmp_path / "save" / "at").mkdir()
    (tmp_path / "save" / "other.pickle").write_bytes(pickle.dumps({"extra": Bomb()}))
    refused(tmp_path / "save", PickleRefused, file=tmp_path / "save" / "other.pickle", allow_pickle=False)
    assert not (tmp_path / "exploded").exists()


def test_pickle_below_a_foreign_level_is_refused(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.arange(4)}, [4])
    td.set_non_tensor("thing", {1, 2})
    td._get_sub_tensordict(slice(1, 3)).memmap(tmp_path)
    refused(tmp_path, PickleRefused, allow_pickle=False)


@pytest.mark.parametrize("data", [b"", b"nonsense", pickle.dumps([1]), pickle.dumps({"a": 1})[:-3],
                                  b"cnowhere_at_all\nThing\n."])  # fmt: skip
def test_damaged_pickle(tmp_path: Path, data: bytes) -> None:
    SAVES["tensorclass_pickle"](tmp_path)
    (tmp_path / PICKLE).write_bytes(data)
    refused(tmp_path, FormatError, file=tmp_path / PICKLE, allow_pickle=True)


def test_recorded_types_of_another_pickle_are_not_used(tmp_path: Path) -> None:
    SAVES["tensorclass_types"](tmp_path)
    assert load_memmap(tmp_path, allow_pickle=False).extra is dict
    (tmp_path / "_tensordict" / "extra" / "other.pickle").write_bytes(pickle.dumps({"data": list}))
    refused(tmp_path, PickleRefused, allow_pickle=False)
    for load in (load_memmap, TensorDict.load_memmap):
        assert load(tmp_path, allow_pickle=True).extra is list


@pytest.mark.parametrize(
    "change", [{"types": {"data": "int"}}, {"types": 3}, {"types": {"data": [1]}}, {"types": None}]
)
def test_malformed_record_of_types(tmp_path: Path, change: dict[str, Any]) -> None:
    SAVES["tensorclass_types"](tmp_path)
    file = tmp_path / "_tensordict" / "extra" / "json_types.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    refused(tmp_path, FormatError, file=file, allow_pickle=False)


@pytest.mark.parametrize("data", ["other.pkl", "../pickle.pkl", 3, {"a": 1}, True])
def test_malformed_non_tensor_stack(tmp_path: Path, data: Any) -> None:
    SAVES["non_tensor_stack"](tmp_path)
    refused(tmp_path, FormatError, file=edit(tmp_path, lambda meta: meta.update(data=data), "s"))


def test_non_tensor_stack_without_its_pickle(tmp_path: Path) -> None:
    SAVES["non_tensor_stack_pickle"](tmp_path)
    (tmp_path / "s" / "pickle.pkl").unlink()
    refused(tmp_path, MissingLeafError, file=tmp_path / "s" / "pickle.pkl", allow_pickle=True)


def test_deep_non_tensor_stack(tmp_path: Path) -> None:
    """tensordict takes twice as long for each level more."""
    SAVES["non_tensor_stack"](tmp_path)
    file = tmp_path / "s" / "meta.json"
    text = file.read_text()
    for depth in (10, 17, 60, 900):
        file.write_text(text.replace('["a","b","c"]', "[" * depth + "1" + "]" * depth))
        assert file.read_text() != text
        if depth > 16:
            refused(tmp_path, FormatError, file=file, subpath="s")
        else:
            assert_same(load_memmap(tmp_path, subpath="s"), TensorDict.load_memmap(tmp_path, subpath="s"))


def test_deep_lazy_stack(tmp_path: Path) -> None:
    """tensordict takes twice as long for each level more."""
    SAVES["lazy_stack"](tmp_path / "save")
    meta = (tmp_path / "save" / "meta.json").read_text()
    path = tmp_path / "deep"
    for _ in range(40):
        path.mkdir()
        (path / "meta.json").write_text(meta)
        path = path / "0"
    shutil.copytree(tmp_path / "save" / "0", path)
    refused(tmp_path / "deep", FormatError)


# --- anything ---------------------------------------------------------------------------------------------------------

MUTANTS = ["nested", "tensorclass", "lazy_stack_named", "nested_tensor", "non_tensor", "sub_tensordict", "zero_size"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("originals")
    for name in MUTANTS:
        SAVES[name](top / name)
    return top


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated_metadata_loads_as_in_tensordict_or_raises(
    data: st.DataObject, originals: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = data.draw(st.sampled_from(MUTANTS))
    save = tmp_path_factory.mktemp("mutant") / "save"
    shutil.copytree(originals / name, save)
    file = data.draw(st.sampled_from(sorted(save.rglob("meta.json"))))
    text = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(text) - 1))
    length = data.draw(st.integers(0, 3))
    text[at : at + length] = data.draw(
        st.one_of(st.binary(max_size=4), st.sampled_from([b"-", b"9", b"0", b"99999999999999999999", b"[", b"}", b'"']))
    )
    file.write_bytes(bytes(text))
    before = snapshot(save)
    on = data.draw(st.sampled_from([None, "meta"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours: Any
        try:
            ours = load_memmap(save, device=on, mode="r")
        except Exception as error:
            ours = error
        assert snapshot(save) == before
        if isinstance(ours, TdgpuError):
            shutil.rmtree(save.parent)
            return  # refused, with a reason
        try:
            theirs = TensorDict.load_memmap(save, device=on, mode="r")
        except Exception as error:
            theirs = error
    if isinstance(ours, Exception):
        assert type(ours) is type(theirs)
    elif isinstance(theirs, Exception):  # only where tdgpu knows more: another device, float8
        assert isinstance(theirs, (KeyError, RuntimeError))
    else:
        assert_same(ours, theirs)
    shutil.rmtree(save.parent)
