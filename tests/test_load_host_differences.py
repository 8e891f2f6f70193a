"""Where tdgpu differs from tensordict on purpose: one test per property, each beside what tensordict does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from compare import assert_same
from forked import in_process
from saves import BUILDERS, FLOAT8, SAVES, random_bytes
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch._subclasses import FakeTensorMode

from tdgpu import errors
from tdgpu.errors import KeyEscapeError, LeafSizeError, MissingLeafError, NotSupported
from tdgpu.load import load_memmap

STRUCTURE_ONLY = ["meta", "fake"]


def load(path: Path, how: str | None) -> TensorDictBase:
    """A load on the CPU (None), to meta, or under a fake mode."""
    if how == "fake":
        with FakeTensorMode():
            result = load_memmap(path)
    else:
        result = load_memmap(path, device=how)
    assert isinstance(result, TensorDictBase)
    return result


@pytest.mark.parametrize("how", [None, *STRUCTURE_ONLY])
def test_a_missing_leaf_raises(tmp_path: Path, how: str | None) -> None:
    SAVES["nested"](tmp_path)
    file = tmp_path / "inner" / "b.memmap"
    file.unlink()
    with pytest.raises(MissingLeafError) as missing:
        load(tmp_path, how)
    assert (missing.value.key, missing.value.file) == (("inner", "b"), str(file))
    assert not file.exists()
    assert "b" not in TensorDict.load_memmap(tmp_path)["inner"]


@pytest.mark.parametrize("how", [None, *STRUCTURE_ONLY])
def test_a_missing_child_raises(tmp_path: Path, how: str | None) -> None:
    SAVES["nested"](tmp_path)
    (tmp_path / "inner" / "deep").rename(tmp_path / "elsewhere")
    with pytest.raises(MissingLeafError) as missing:
        load(tmp_path, how)
    assert missing.value.key == ("inner", "deep")
    assert "deep" not in TensorDict.load_memmap(tmp_path)["inner"]


def test_a_short_leaf_raises_and_is_not_grown(tmp_path: Path) -> None:
    SAVES["flat"](tmp_path)
    file = tmp_path / "obs.memmap"
    os.truncate(file, 47)
    with pytest.raises(LeafSizeError) as short:
        load_memmap(tmp_path)
    assert (short.value.wanted, short.value.found, short.value.file) == (48, 47, str(file))
    assert file.stat().st_size == 47
    TensorDict.load_memmap(tmp_path)
    assert file.stat().st_size == 48  # tensordict has grown it, with a zero


def test_a_longer_leaf_is_fine(tmp_path: Path) -> None:
    SAVES["flat"](tmp_path)
    with open(tmp_path / "obs.memmap", "ab") as file:
        file.write(b"more")
    assert_same(load_memmap(tmp_path), TensorDict.load_memmap(tmp_path), devices=True)


@pytest.mark.parametrize("how", [None, *STRUCTURE_ONLY])
def test_a_lazy_stack_without_members_raises(tmp_path: Path, how: str | None) -> None:
    SAVES["lazy_stack"](tmp_path)
    for i in range(3):
        (tmp_path / str(i)).rename(tmp_path / f"old{i}")
    with pytest.raises(MissingLeafError) as missing:
        load(tmp_path, how)
    assert missing.value.file == str(tmp_path / "0")
    assert len(TensorDict.load_memmap(tmp_path)) == 0


def test_a_lazy_stack_with_a_gap_raises(tmp_path: Path) -> None:
    SAVES["lazy_stack"](tmp_path)
    (tmp_path / "1").rename(tmp_path / "old1")
    with pytest.raises(MissingLeafError, match="member 1"):
        load_memmap(tmp_path)
    assert len(TensorDict.load_memmap(tmp_path)) == 1


def test_a_tensorclass_without_its_tensors_raises(tmp_path: Path) -> None:
    SAVES["point"](tmp_path)
    (tmp_path / "_tensordict").rename(tmp_path / "old")
    with pytest.raises(MissingLeafError):
        load_memmap(tmp_path)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_loads(tmp_path: Path, dtype: torch.dtype) -> None:
    td = TensorDict({"a": random_bytes(dtype, 256, 4)}, [256])
    td.memmap(tmp_path)
    for mode in (None, "r", "r+"):
        assert_same(load_memmap(tmp_path, mode=mode), td)
    assert load_memmap(tmp_path, device="meta")["a"].dtype == dtype
    with FakeTensorMode():
        assert load_memmap(tmp_path)["a"].dtype == dtype
    with pytest.raises(KeyError):
        TensorDict.load_memmap(tmp_path)


@pytest.mark.parametrize("how", STRUCTURE_ONLY)
@pytest.mark.parametrize("name", ["nested_tensor", "nested_of_scalars"])
def test_a_nested_leaf_without_data_is_refused(tmp_path: Path, how: str, name: str) -> None:
    SAVES[name](tmp_path)
    with pytest.raises(NotSupported, match="nested tensor") as refused:
        load(tmp_path, how)
    assert refused.value.key is not None
    theirs = TensorDict.load_memmap(tmp_path, device="meta")
    assert not any(leaf.is_nested for leaf in theirs.values(True, True))  # tensordict: the shape of its sizes


def test_torch_still_has_no_nested_meta_tensors() -> None:
    """When this fails, placeholders can be made for nested leaves."""
    sizes = torch.tensor([[2], [3]])
    layout = torch._nested_compute_contiguous_strides_offsets(sizes)
    with pytest.raises(NotImplementedError):
        torch._nested_view_from_buffer(torch.empty(5, device="meta"), sizes, *layout)


def test_fake_load_to_an_accelerator_without_index_takes_one(tmp_path: Path) -> None:
    SAVES["nested"](tmp_path)
    with FakeTensorMode():
        ours = load_memmap(tmp_path, device="cuda")
        theirs = TensorDict.load_memmap(tmp_path, device="cuda:0")
        for level in (theirs, theirs["inner"], theirs["inner", "deep"]):
            level._memmap_prefix = None
        assert_same(ours, theirs, devices=True)


@pytest.mark.parametrize("how", STRUCTURE_ONLY)
def test_a_result_without_data_does_not_keep_its_directory(tmp_path: Path, how: str) -> None:
    SAVES["nested"](tmp_path)
    ours = load(tmp_path, how)
    assert ours._memmap_prefix is None
    assert ours["inner", "deep"]._memmap_prefix is None
    assert TensorDict.load_memmap(tmp_path, device="meta")._memmap_prefix == tmp_path


def test_the_result_is_on_the_device_of_its_leaves(tmp_path: Path) -> None:
    SAVES["nested"](tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "device": "cuda:0"}))
    ours = load_memmap(tmp_path)
    assert ours.device == torch.device("cpu")
    assert ours["inner"].device == torch.device("cpu")
    assert_same(ours, load_memmap(tmp_path, device="cpu"), devices=True)


def test_a_save_without_device_stays_without(tmp_path: Path) -> None:
    SAVES["flat"](tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "device": "None"}))
    assert load_memmap(tmp_path).device is None
    assert_same(load_memmap(tmp_path), TensorDict.load_memmap(tmp_path), devices=True)


@pytest.mark.parametrize("key", ["../x", "/x", "a/../../x"])
@pytest.mark.parametrize("how", [None, *STRUCTURE_ONLY])
def test_a_raw_key_cannot_leave_the_save(tmp_path: Path, key: str, how: str | None) -> None:
    inside = tmp_path / "save"
    TensorDict({"a": torch.zeros(2)}).memmap(inside)
    TensorDict({"x": torch.ones(2)}).memmap(tmp_path / "other")
    (tmp_path / "x.memmap").write_bytes(b"secret__")
    meta = json.loads((inside / "meta.json").read_text())
    meta[key] = meta.pop("a")
    (inside / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(KeyEscapeError):
        load_memmap(inside, robust_key=False, device=how if how != "fake" else None)
    if key == "../x":
        assert key in TensorDict.load_memmap(inside, robust_key=False)


@pytest.mark.parametrize("child", ["../other", "..", ".", "", "/etc"])
def test_a_raw_child_cannot_leave_its_level(tmp_path: Path, child: str) -> None:
    inside = tmp_path / "save"
    TensorDict({"a": torch.zeros(2)}).memmap(inside)
    TensorDict({"x": torch.ones(2)}).memmap(tmp_path / "other")
    meta = json.loads((inside / "meta.json").read_text())
    (inside / "meta.json").write_text(json.dumps({**meta, child: {"type": "TensorDict"}}))
    with pytest.raises(KeyEscapeError):
        load_memmap(inside, robust_key=False)


def test_a_raw_subpath_cannot_leave_the_save(tmp_path: Path) -> None:
    inside = tmp_path / "save"
    TensorDict({"n": {"a": torch.zeros(2)}}).memmap(inside)
    TensorDict({"x": torch.ones(2)}).memmap(tmp_path / "other")
    for robust_key in (False, True):
        with pytest.raises(ValueError, match="subpath"):
            load_memmap(inside, subpath=("..", "other"), robust_key=robust_key)
    assert "x" in TensorDict.load_memmap(inside, subpath=("..", "other"), robust_key=False)


def test_a_raw_key_may_name_a_directory_below(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    TensorDict({"a/b": torch.arange(3)}).memmap(tmp_path, robust_key=False)
    for how in (None, "meta"):
        assert_same(
            load_memmap(tmp_path, robust_key=False, device=how),
            TensorDict.load_memmap(tmp_path, robust_key=False, device=how),
        )


def test_a_stack_out_of_the_same_dimension_is_returned_itself(tmp_path: Path) -> None:
    SAVES["lazy_stack"](tmp_path)
    out = LazyStackedTensorDict(*(TensorDict({"stale": torch.zeros(2)}) for _ in range(3)))
    members = list(out.tensordicts)
    assert load_memmap(tmp_path, out=out) is out
    assert all(a is b for a, b in zip(out.tensordicts, members, strict=True))
    assert_same(out, BUILDERS["lazy_stack"]())
    other = LazyStackedTensorDict(*(TensorDict({"stale": torch.zeros(2)}) for _ in range(3)))
    theirs = TensorDict.load_memmap(tmp_path, out=other)
    assert theirs is not other
    assert_same(out, theirs, devices=True)


@pytest.mark.parametrize("how", STRUCTURE_ONLY)
def test_no_leaf_is_opened_without_data(tmp_path: Path, how: str) -> None:
    """In a process of its own, because an audit hook stays."""
    for name in ("nested", "tensorclass", "lazy_stack", "keys", "zero_size", "sub_tensordict", "non_tensor_stack"):
        SAVES[name](tmp_path / name)
    script = f"""
import contextlib, os, sys
opened = []
import torch, saves
from torch._subclasses import FakeTensorMode
from tdgpu.load import load_memmap
top = {str(tmp_path)!r}
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
with FakeTensorMode() if {how!r} == "fake" else contextlib.nullcontext():
    for name in os.listdir(top):
        load_memmap(os.path.join(top, name), device=None if {how!r} == "fake" else "meta")
found = [path for path in opened if path.startswith(top)]
assert len(found) > 20, found
assert not [path for path in found if path.endswith(".memmap")], found
"""
    in_process(script)


def test_an_out_that_cannot_take_the_save_is_refused_unchanged(tmp_path):
    td = TensorDict({"a": torch.zeros(6, 3), "b": TensorDict(c=torch.arange(6), batch_size=[6])}, batch_size=[6])
    td.memmap(tmp_path)
    plain = TensorDict({"keep": torch.ones(3)}, batch_size=[3])
    stack = LazyStackedTensorDict.lazy_stack([TensorDict(keep=torch.ones(1)) for _ in range(3)])
    for out in (plain, stack):
        with pytest.raises(errors.OutMismatchError) as caught:
            load_memmap(tmp_path, out=out)
        assert caught.value.save == str(tmp_path)
        assert list(out.keys()) == ["keep"]


def test_a_file_that_cannot_be_mapped_is_named(tmp_path, monkeypatch):
    TensorDict(a=torch.zeros(3)).memmap(tmp_path)

    def refuse(*_, **__):
        raise RuntimeError("unable to open file: Permission denied (13)")

    monkeypatch.setattr(torch, "from_file", refuse)
    with pytest.raises(errors.LoadError, match="Permission denied") as caught:
        load_memmap(tmp_path)
    assert caught.value.key == ("a",)
