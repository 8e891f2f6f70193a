"""Loads without an accelerator, beside tensordict's own: the same class, structure and bytes for every kind of save."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from saves import BUILDERS, LEGACY, NESTED, PICKLED, SAVES, UPSTREAM_CANNOT_LOAD, Frame, Point
from tensordict import LazyStackedTensorDict, TensorDict, is_tensorclass
from torch._subclasses import FakeTensor, FakeTensorMode

from tdgpu.errors import LockedOutError, OutMismatchError, PickleRefused, TdgpuError
from tdgpu.load import load_memmap

COMPARABLE = sorted(set(SAVES) - UPSTREAM_CANNOT_LOAD)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every save, made once: that no load changes one is asserted at the end."""
    top = tmp_path_factory.mktemp("saves")
    for name, save in SAVES.items():
        save(top / name)
    return {name: top / name for name in SAVES}


def snapshot(top: Path) -> dict[str, tuple[int, int, bytes]]:
    """Size, time of change and contents of every file below ``top``."""
    found = {}
    for directory, _, files in os.walk(top):
        for file in files:
            path = os.path.join(directory, file)
            status = os.stat(path)
            with open(path, "rb") as stream:
                found[path] = (status.st_size, status.st_mtime_ns, stream.read())
    return found


@pytest.fixture(scope="module", autouse=True)
def nothing_changes_on_disk(saved: dict[str, Path]) -> Iterator[None]:
    before = snapshot(saved["flat"].parent)
    yield
    assert snapshot(saved["flat"].parent) == before


def policy(name: str) -> bool | None:
    """``allow_pickle`` for a save: only where it is needed, because the loader of a third party does not know it."""
    return True if name in PICKLED else None


def both(path: Path, name: str, **arguments: Any) -> tuple[Any, Any]:
    """What tdgpu and tensordict load."""
    arguments.setdefault("robust_key", name not in LEGACY)
    arguments.setdefault("allow_pickle", policy(name))
    return load_memmap(path, **arguments), TensorDict.load_memmap(path, **arguments)


# What comes back is of another class (TensorDict, or a list for a tuple in JSON), or has leaves before children.
CHANGED_BY_SAVING = {"params", "typed", "non_tensor", "lazy_view", "nested", "non_tensor_stack"}


@pytest.mark.parametrize("name", sorted(set(SAVES) - CHANGED_BY_SAVING))
def test_mapped_load_equals_what_was_saved(saved: dict[str, Path], name: str) -> None:
    ours = load_memmap(saved[name], robust_key=name not in LEGACY, allow_pickle=policy(name))
    assert_same(ours, BUILDERS[name]())


@pytest.mark.parametrize("on", [None, "cpu"])
@pytest.mark.parametrize("name", COMPARABLE)
def test_mapped_load_equals_tensordicts(saved: dict[str, Path], name: str, on: str | None) -> None:
    ours, theirs = both(saved[name], name, device=on)
    assert_same(ours, theirs, devices=True)
    assert not ours.is_locked


@pytest.mark.parametrize("name", sorted(set(COMPARABLE) - NESTED))
def test_indexed_cpu_device_equals_tensordicts(saved: dict[str, Path], name: str) -> None:
    ours, theirs = both(saved[name], name, device="cpu:0")
    assert_same(ours, theirs, devices=True)


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("name", sorted(set(COMPARABLE) - {"third_party"}))  # its loader does not know the argument
def test_modes_equal_tensordicts(saved: dict[str, Path], name: str, mode: str) -> None:
    ours, theirs = both(saved[name], name, mode=mode)
    assert_same(ours, theirs, devices=True)


@pytest.mark.parametrize("name", sorted(set(COMPARABLE) - NESTED))
def test_meta_load_equals_tensordicts(saved: dict[str, Path], name: str) -> None:
    ours, theirs = both(saved[name], name, device="meta")
    for level in _levels(theirs):  # a deliberate difference, with a test of its own
        level._memmap_prefix = None
    assert_same(ours, theirs, devices=name not in ("sub_tensordict", "third_party"))


@pytest.mark.parametrize("on", [None, "cpu", "meta", "cuda:1"])
@pytest.mark.parametrize("name", sorted(set(COMPARABLE) - NESTED))
def test_fake_load_equals_tensordicts(saved: dict[str, Path], name: str, on: str | None) -> None:
    with FakeTensorMode() as fake_mode:
        ours, theirs = both(saved[name], name, device=on)
        for level in _levels(theirs):
            level._memmap_prefix = None
        if name == "third_party":  # its own loader made it
            ours._memmap_prefix = None
        assert_same(ours, theirs, devices=True)
        leaves = [value for level in _levels(ours) for value in level._tensordict.values()]
        modes = {leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)}
        assert modes <= {fake_mode}


def _levels(td: Any) -> Iterator[TensorDict]:
    """The plain TensorDicts in a collection."""
    if is_tensorclass(td):
        yield from _levels(td._tensordict)
    elif isinstance(td, LazyStackedTensorDict):
        for member in td.tensordicts:
            yield from _levels(member)
    elif isinstance(td, TensorDict) and hasattr(td, "_tensordict"):
        yield td
        for value in td._tensordict.values():
            if not isinstance(value, torch.Tensor):
                yield from _levels(value)
    elif hasattr(td, "_source"):
        yield from _levels(td._source)


@pytest.mark.parametrize("name", sorted(PICKLED))
def test_pickle_policy(saved: dict[str, Path], name: str) -> None:
    with pytest.raises(PickleRefused) as refused:
        load_memmap(saved[name], allow_pickle=False)
    assert isinstance(refused.value, RuntimeError)
    assert refused.value.file is not None
    with pytest.warns(FutureWarning, match="allow_pickle") as record:
        load_memmap(saved[name])
    assert {warning.filename for warning in record} == {__file__}  # at the line of whoever called tdgpu
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_memmap(saved[name], allow_pickle=True)


@pytest.mark.parametrize("name", sorted(set(COMPARABLE) - PICKLED))
def test_saves_without_pickle_load_with_every_policy(saved: dict[str, Path], name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if name in NESTED or name == "dtypes":
            warnings.simplefilter("ignore", UserWarning)  # torch's own, about nested tensors and complex32
        for allow_pickle in (None,) if name == "third_party" else (None, False):
            assert_same(*both(saved[name], name, allow_pickle=allow_pickle), devices=True)


SUBPATHS = [
    ("nested", "inner"), ("nested", "inner/deep"), ("nested", ("inner", "deep")), ("nested", (("inner",), "deep")),
    ("nested", "/inner//deep/"), ("nested", ""), ("tensorclass", "at"), ("tensorclass", "_tensordict/at"),
    ("tensorclass", ("_tensordict", "at", "_tensordict")), ("lazy_stack", "1"), ("lazy_stack", "2/n"),
    ("keys", ("na/b",)), ("keys", ("n..",)), ("keys", ("child of dots", "..", ".")), ("legacy_keys", ("n n",)),
    ("tensorclass_pickle", ("f", "at")), ("lazy_stack_named", "s/0"), ("sub_tensordict", "_source/n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "subpath"), SUBPATHS)
@pytest.mark.parametrize("as_str", [False, True])
def test_subpath_equals_tensordicts(saved: dict[str, Path], name: str, subpath: Any, as_str: bool) -> None:
    path: Any = str(saved[name]) if as_str else saved[name]
    ours, theirs = both(path, name, subpath=subpath)
    assert_same(ours, theirs, devices=True)


@pytest.mark.parametrize("subpath", ["obs", "missing", (), ("a", ()), 5, "inner/b", ("inner", "missing"), ["inner"]])
def test_wrong_subpaths_are_refused_as_by_tensordict(saved: dict[str, Path], subpath: Any) -> None:
    for load in (load_memmap, TensorDict.load_memmap):
        with pytest.raises(ValueError, match="subpath"):
            load(saved["nested"], subpath=subpath)


@pytest.mark.parametrize("robust_key", [True, None, False])
@pytest.mark.parametrize("name", ["flat", "nested", "tensorclass", "lazy_stack"])
def test_robust_key_of_plain_keys(saved: dict[str, Path], name: str, robust_key: bool | None) -> None:
    assert_same(*both(saved[name], name, robust_key=robust_key), devices=True)


def test_robust_load_reads_legacy_names(saved: dict[str, Path]) -> None:
    ours, theirs = both(saved["legacy_keys"], "legacy_keys", robust_key=True)
    assert_same(ours, theirs, devices=True)
    assert_same(ours, BUILDERS["legacy_keys"]())
    assert_same(load_memmap(saved["legacy_keys"], device="meta"), _on_meta(BUILDERS["legacy_keys"]()))


def _on_meta(td: Any) -> Any:
    return td.apply(lambda leaf: torch.empty_like(leaf, device="meta"))


# --- out --------------------------------------------------------------------------------------------------------------


def _outs(name: str) -> dict[str, Any]:
    """Objects to load the save ``name`` into, made anew each time."""
    same = BUILDERS[name]()
    different = TensorDict({"stale": torch.zeros(2), "n": TensorDict({"stale": torch.zeros(1)})}, [])
    on_cpu = TensorDict({"stale": torch.zeros(2)}, device="cpu")
    wrapped = Point(x=torch.zeros(3), y=torch.zeros(3), batch_size=[3])
    return {"same": same, "different": different, "on_cpu": on_cpu, "tensorclass": wrapped}


OUT_KINDS = sorted(set(COMPARABLE) - {"third_party", "sub_tensordict", "lazy_permute", "lazy_view", "lazy_unsqueeze"})


@pytest.mark.parametrize("shape", ["same", "different", "on_cpu", "tensorclass"])
@pytest.mark.parametrize("name", OUT_KINDS)
def test_out_equals_tensordicts(saved: dict[str, Path], name: str, shape: str) -> None:
    mine, other = _outs(name)[shape], _outs(name)[shape]
    arguments: dict[str, Any] = {"robust_key": name not in LEGACY, "allow_pickle": True}
    try:
        theirs = TensorDict.load_memmap(saved[name], out=other, **arguments)
    except Exception as error:
        with pytest.raises((type(error), TdgpuError)):
            load_memmap(saved[name], out=mine, **arguments)
        return
    ours = load_memmap(saved[name], out=mine, **arguments)
    assert_same(ours, theirs, devices=True)
    assert_same(mine, other, devices=True)
    if not isinstance(theirs, LazyStackedTensorDict):  # there tensordict makes a new stack
        assert (ours is mine) == (theirs is other)


def test_out_keeps_its_object_and_its_nested_objects(saved: dict[str, Path]) -> None:
    out = TensorDict({"inner": {"stale": torch.zeros(4)}, "stale": torch.zeros(4)}, [4])
    inner = out["inner"]
    assert load_memmap(saved["nested"], out=out) is out
    assert out["inner"] is inner
    assert_same(out, _in_order_of(load_memmap(saved["nested"]), list(out.keys())))


def _in_order_of(td: TensorDict, order: list[str]) -> TensorDict:
    result = td.empty()
    for key in order:
        result._set_str(key, td._get_str(key, default=None), inplace=False, validated=True)
    return result


def test_tensorclass_out_is_returned_with_new_fields(saved: dict[str, Path]) -> None:
    at = Point(x=torch.zeros(3), y=torch.zeros(3), batch_size=[3])
    out = Frame(image=torch.zeros(3), at=at, label="old", extra=None, batch_size=[3])
    assert load_memmap(saved["tensorclass"], out=out) is out
    assert (out.label, out.at) == ("cat", out.at)
    assert out.at is at
    assert_same(out, BUILDERS["tensorclass"]())


def test_out_keeps_its_batch_size_and_names(saved: dict[str, Path]) -> None:
    out = TensorDict({}, batch_size=[], names=None)
    load_memmap(saved["names"], out=out)
    assert out.batch_size == ()
    assert out["n"].batch_size == (2, 3)


@pytest.mark.parametrize("on", ["cuda", "cuda:1", "meta"])
def test_out_on_another_device_is_refused_and_unchanged(saved: dict[str, Path], on: str) -> None:
    for load in (load_memmap, TensorDict.load_memmap):
        out = TensorDict({"stale": torch.zeros(2)}, device="cpu")
        with pytest.raises(ValueError, match="device") as refused:
            load(saved["flat"], device=on, out=out)
        if load is load_memmap:
            assert isinstance(refused.value, OutMismatchError)
            assert list(out.keys()) == ["stale"]


def test_out_on_meta_wins_over_no_device(saved: dict[str, Path]) -> None:
    out = TensorDict({"stale": torch.zeros(2, device="meta")}, device="meta")
    assert load_memmap(saved["nested"], out=out) is out
    assert {leaf.device.type for leaf in out.values(True, True)} == {"meta"}
    assert out._memmap_prefix is None


def test_tensorclass_save_wraps_a_tensordict_out(saved: dict[str, Path]) -> None:
    out = TensorDict(device="meta")
    ours = load_memmap(saved["point"], out=out)
    theirs = TensorDict.load_memmap(saved["point"], out=TensorDict(device="meta"))
    theirs._tensordict._memmap_prefix = None
    assert_same(ours, theirs, devices=True)
    assert ours._tensordict is out


def test_locked_out_is_refused_and_unchanged(saved: dict[str, Path]) -> None:
    out = BUILDERS["nested"]()
    out["z"].zero_()
    out.lock_()
    with pytest.raises(LockedOutError) as refused:
        load_memmap(saved["nested"], out=out)
    assert isinstance(refused.value, RuntimeError)
    assert not out["z"].any()
    with pytest.raises(RuntimeError):
        TensorDict.load_memmap(saved["nested"], out=out)


def test_out_that_fails_late_in_the_tree_is_unchanged(saved: dict[str, Path]) -> None:
    # The conflict lies in the last level that is looked at; nothing of the others may have been filled before.
    out = TensorDict({"z": torch.zeros(1), "inner": {"deep": TensorDict({"a": torch.zeros(1)}).lock_()}})
    with pytest.raises(LockedOutError) as refused:
        load_memmap(saved["nested"], out=out)
    assert refused.value.key == ("inner", "deep")
    assert out["z"].tolist() == [0.0]
    assert list(out.keys()) == ["z", "inner"]


def test_stack_of_another_length_is_refused_and_unchanged(saved: dict[str, Path]) -> None:
    out = LazyStackedTensorDict(TensorDict({"a": torch.zeros(1)}), TensorDict({"a": torch.zeros(1)}))
    for load in (load_memmap, TensorDict.load_memmap):
        with pytest.raises(ValueError, match="stack"):
            load(saved["lazy_stack"], out=out)
    assert not out[0]["a"].any()


# --- arguments --------------------------------------------------------------------------------------------------------


def test_arguments_are_checked_before_anything_is_read() -> None:
    for load in (load_memmap, TensorDict.load_memmap):
        with pytest.raises(ValueError, match="mode"):
            load("/nowhere", mode="w")
        with pytest.raises(TypeError, match="allow_pickle"):
            load("/nowhere", allow_pickle="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rows"):
        load_memmap("/nowhere", rows=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step"):
        load_memmap("/nowhere", rows=slice(0, 4, 2))
    with pytest.raises(TypeError, match="out"):
        load_memmap("/nowhere", out={})


@pytest.mark.parametrize("on", ["nope", ""])
def test_unknown_devices_raise_as_in_tensordict(saved: dict[str, Path], on: str) -> None:
    for load in (load_memmap, TensorDict.load_memmap):
        with pytest.raises(RuntimeError):
            load(saved["flat"], device=on)


def test_num_threads_is_any_integer(saved: dict[str, Path]) -> None:
    assert_same(*both(saved["flat"], "flat", num_threads=-3), devices=True)


def test_mode_decides_whether_writes_reach_the_file(tmp_path: Path) -> None:
    SAVES["flat"](tmp_path)
    load_memmap(tmp_path, mode="r")["obs"].zero_()
    assert load_memmap(tmp_path)["obs"].any()
    load_memmap(tmp_path)["obs"].fill_(1)
    assert load_memmap(tmp_path)["obs"].eq(1).all()
    load_memmap(tmp_path, mode="r+")["obs"].fill_(2)
    assert load_memmap(tmp_path)["obs"].eq(2).all()


def test_archive_on_the_cpu_is_tensordicts(saved: dict[str, Path], tmp_path: Path) -> None:
    archive = tmp_path / "a.tdz"
    BUILDERS["nested"]().save(archive)
    assert_same(load_memmap(archive), TensorDict.load_memmap(archive), devices=True)
    assert_same(load_memmap(archive, subpath="inner"), TensorDict.load_memmap(archive, subpath="inner"))
    assert_same(load_memmap(archive, device="meta"), TensorDict.load_memmap(archive, device="meta"), devices=True)
    archive.write_bytes(b"no archive")
    for load in (load_memmap, TensorDict.load_memmap):
        with pytest.raises(ValueError, match="archive"):
            load(archive)


def test_a_later_post_init_sees_the_loaded_tensors(saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Point, "__post_init__", lambda self: seen.append(self.x.device.type), raising=False)
    load_memmap(saved["point"])
    load_memmap(saved["point"], device="meta")
    assert seen == ["cpu", "meta"]


def test_default_device_does_not_move_leaves(saved: dict[str, Path]) -> None:
    with torch.device("meta"):
        for name in ("zero_size", "nested"):
            ours = load_memmap(saved[name])
            assert {leaf.device.type for leaf in ours.values(True, True)} == {"cpu"}
