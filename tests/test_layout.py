"""What a save is: its keys, tree and kinds, and where its leaves go."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from saves import BUILDERS, KEYS, LEGACY, SAVES
from tensordict import LazyStackedTensorDict, TensorDict, is_tensorclass
from tensordict._utils_key_json import _encode_key_for_filesystem, _is_safe_legacy_key
from torch._subclasses import FakeTensorMode

from tdgpu.layout import collector, keys, reader
from tdgpu.layout.mapped import nested_view
from tdgpu.layout.places import concrete, places
from tdgpu.layout.save import Save
from tdgpu.layout.tree import Kind

# --- keys -------------------------------------------------------------------------------------------------------------


@given(st.text(max_size=12))
@example("")
@example(".")
@example("..")
@example("C:x")
@example("a\\b")
def test_keys_are_encoded_as_by_tensordict(key: str) -> None:
    name = keys.encode(key)
    assert name == _encode_key_for_filesystem(key)
    assert "/" not in name
    assert name not in ("", ".", "..")
    for child in (False, True):
        safe = _is_safe_legacy_key(key, is_collection=child)
        assert keys.legacy_name(key, child=child) == (key if safe else None)


@given(st.lists(st.text(max_size=3), max_size=5))
def test_keys_that_are_their_own_names(some: list[str]) -> None:
    assert keys.all_plain(some) == all(keys.encode(key) == key for key in some)


@given(st.lists(st.text(max_size=4), unique=True, max_size=8))
def test_no_two_keys_have_the_same_name(some: list[str]) -> None:
    assert len({keys.encode(key) for key in some}) == len(some)


# --- tree -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [True, False])
def test_leaves_are_listed_with_their_bytes(tmp_path: Path, check: bool) -> None:
    SAVES["nested"](tmp_path)
    save = reader.read(tmp_path, check=check)
    found = [(leaf.key, leaf.shape, leaf.dtype, leaf.nbytes) for leaf in save.leaves()]
    assert found == [
        (("z",), (4, 3), torch.float32, 48),
        (("a",), (4,), torch.int16, 8),
        (("inner", "b"), (4,), torch.float32, 16),
        (("inner", "deep", "a"), (4, 2), torch.int64, 64),
    ]
    assert save.nbytes == 136
    for leaf in save.leaves():
        assert leaf.extent is not None
        assert (leaf.extent.offset, leaf.extent.nbytes, leaf.extent.packed) == (0, leaf.nbytes, None)
        assert Path(leaf.extent.file).stat().st_size == leaf.nbytes
    assert Path(save.leaves()[3].extent.file) == tmp_path / "inner" / "deep" / "a.memmap"  # type: ignore[union-attr]


def _entry(value: Any, key: str) -> Any:
    inner = value._tensordict if is_tensorclass(value) else value
    return inner.tensordicts[int(key)] if isinstance(inner, LazyStackedTensorDict) else value.get(key)


# Without views and third parties, whose leaves are not listed.
LISTED = set(BUILDERS) - {"sub_tensordict", "third_party", "lazy_permute", "lazy_view", "lazy_unsqueeze"}


@pytest.mark.parametrize("name", sorted(LISTED))
def test_a_leafs_key_is_the_one_that_a_user_writes(tmp_path: Path, name: str) -> None:
    SAVES[name](tmp_path)
    save = reader.read(tmp_path, robust_key=name not in LEGACY)
    built = BUILDERS[name]()
    for leaf in save.leaves():
        value = built
        for key in leaf.key:
            value = _entry(value, key)
        assert value.dtype == leaf.dtype
        if leaf.is_nested:
            assert leaf.nested_sizes is not None
            assert torch.equal(leaf.nested_sizes, value._nested_tensor_size())
            assert leaf.nbytes == sum(part.nbytes for part in value.unbind())
        else:
            assert tuple(value.shape) == leaf.shape
            assert leaf.nbytes == value.nbytes
            assert (leaf.extent is None) == (value.numel() == 0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("flat", Kind.TENSORDICT),
        ("params", Kind.TENSORDICT),
        ("point", Kind.TENSORCLASS),
        ("lazy_stack", Kind.LAZY_STACK),
        ("non_tensor_root", Kind.NON_TENSOR_DATA),
        ("sub_tensordict", Kind.FOREIGN),
        ("lazy_permute", Kind.FOREIGN),
        ("third_party", Kind.FOREIGN),
    ],
)
def test_kinds(tmp_path: Path, name: str, kind: Kind) -> None:
    SAVES[name](tmp_path)
    save = reader.read(tmp_path)
    assert save.root.kind is kind
    assert save.foreign() == ([save.root] if kind is Kind.FOREIGN else [])


def test_leaves_below_a_foreign_level_are_not_tdgpus_to_load(tmp_path: Path) -> None:
    SAVES["sub_tensordict"](tmp_path)
    save = reader.read(tmp_path)
    assert save.leaves() == []
    assert list(save.root.children["_source"].leaves) == ["a"]


def test_batch_sizes(tmp_path: Path) -> None:
    for name in (
        "flat",
        "names",
        "point",
        "lazy_stack",
        "lazy_stack_dim1",
        "lazy_stack_of_stacks",
        "tensorclass_stack",
    ):
        SAVES[name](tmp_path / name)
        built = BUILDERS[name]()
        assert reader.read(tmp_path / name).root.batch_size == tuple(built.batch_size)


def test_nested_sizes_are_real_tensors_under_a_fake_mode(tmp_path: Path) -> None:
    SAVES["nested_tensor"](tmp_path)
    with FakeTensorMode(), torch.device("meta"):
        save = reader.read(tmp_path, check=False)
    sizes = save.root.leaves["ragged"].nested_sizes
    assert sizes is not None
    assert type(sizes) is torch.Tensor
    assert sizes.tolist() == [[3, 2], [1, 2], [0, 2], [4, 2]]


def test_every_key_names_its_own_file(tmp_path: Path) -> None:
    SAVES["keys"](tmp_path)
    save = reader.read(tmp_path)
    assert list(save.root.leaves) == list(KEYS)
    assert len({leaf.extent.file for leaf in save.leaves() if leaf.extent}) == len(save.leaves())


# --- places -----------------------------------------------------------------------------------------------------------


def _places(save: Save, device: str | None, out: Any = None) -> dict[str, str]:
    found = places(save, None if device is None else torch.device(device), out)
    return {"/".join(leaf.key): str(place) for leaf, place in found.items()}


def test_places(tmp_path: Path) -> None:
    SAVES["nested"](tmp_path)
    save = reader.read(tmp_path)
    everywhere = ("z", "a", "inner/b", "inner/deep/a")
    assert _places(save, None) == dict.fromkeys(everywhere, "None")
    assert _places(save, "meta") == dict.fromkeys(everywhere, "meta")
    assert _places(save, "cuda:3") == dict.fromkeys(everywhere, "cuda:3")
    inner = TensorDict({"deep": TensorDict(device="cpu")}, device=None)
    out = TensorDict({"z": torch.zeros(1)})
    out._tensordict["inner"] = inner
    assert _places(save, None, out) == {"z": "None", "a": "None", "inner/b": "None", "inner/deep/a": "cpu"}
    out._device = torch.device("meta")
    inner._tensordict["deep"] = TensorDict(device="meta")
    assert _places(save, None, out) == dict.fromkeys(everywhere, "meta")


def test_an_unindexed_device_matches_any_index_of_out(tmp_path: Path) -> None:
    SAVES["flat"](tmp_path)
    save = reader.read(tmp_path)
    with FakeTensorMode():
        out = TensorDict(device="cuda:1")
        assert set(_places(save, "cuda", out).values()) == {"cuda:1"}
        assert set(_places(save, "cuda").values()) == {"cuda:0"}


def test_concrete_device() -> None:
    for device in (None, torch.device("cpu"), torch.device("meta"), torch.device("cuda", 2)):
        assert concrete(device) == device


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_a_nested_view_inside_a_storage_is_refused() -> None:
    """torch would read from the beginning of the storage instead."""
    values, sizes = torch.arange(8.0), torch.tensor([[2], [3]])
    assert [part.tolist() for part in nested_view(values[:5], sizes).unbind()] == [[0, 1], [2, 3, 4]]
    with pytest.raises(ValueError, match="beginning"):
        nested_view(values[3:], sizes)


def test_the_collector_is_paused_and_comes_back() -> None:
    assert gc.isenabled()
    with collector.paused():
        assert not gc.isenabled()
        with collector.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="x"), collector.paused():
        raise ValueError("x")
    assert gc.isenabled()
    gc.disable()
    try:
        with collector.paused():
            pass
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()


def test_the_collector_comes_back_after_pauses_in_many_threads() -> None:
    barrier = threading.Barrier(4)

    def pause() -> None:
        barrier.wait()
        for _ in range(200):
            with collector.paused():
                pass

    threads = [threading.Thread(target=pause) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gc.isenabled()
