"""``append_memmap`` from one end to the other, on the host: the disk holds what tensordict would have left there."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from typing import Any

import numpy as np
import pytest
import tensordict
import torch
from appends import check_like_tensordict, expect, failing, flat, is_free, load, ours, ring_of, state, theirs
from saves import BUILDERS, DTYPES, FLOAT8, SAVES, Frame, Point, Typed, point, random_bytes
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictParams, lazy_stack
from test_growth import BETTER, ROWS

import tdgpu
from tdgpu import errors

MiB = 1 << 20

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*allow_pickle.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


# --- saves and rows of every kind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(set(BUILDERS) - BETTER))
def test_every_save_grows_as_with_tensordict_or_not_at_all(tmp_path, kind):
    path, copy = tmp_path / "save", tmp_path / "copy"
    SAVES[kind](path)
    shutil.copytree(path, copy)
    rows = BUILDERS[kind]()
    before = state(path)
    expected = theirs(copy, rows)
    if kind in ("third_party", "tensorclass_stack"):  # refused there by an accident, a TypeError over a missing path
        expected = ValueError
    assert ours(path, rows) is expected
    if expected is not None:
        assert state(path) == before
        assert is_free(path)
        return
    assert state(path) == state(copy)
    check_like_tensordict(path, rows, rows[:1], rows[:0], rows)


def test_values_that_tensordict_loses_grow(tmp_path):
    rows = BUILDERS["non_tensor"]().exclude("tuple")  # which a save turns into a list
    rows.memmap(tmp_path)
    for _ in range(2):
        tdgpu.append_memmap(tmp_path, rows)
    loaded = load(tmp_path)
    assert loaded.batch_size == (6,)
    assert torch.equal(loaded["t"], rows["t"].repeat(3))


def test_eight_bit_floats_grow(tmp_path):
    rows = BUILDERS["float8"]()
    rows.memmap(tmp_path)
    tdgpu.append_memmap(tmp_path, rows)
    tdgpu.append_memmap(tmp_path, rows[1:3])
    loaded = tdgpu.load_memmap(tmp_path)
    for key in map(str, FLOAT8):
        wanted = rows[key].view(torch.uint8)
        assert torch.equal(loaded[key].view(torch.uint8), torch.cat([wanted, wanted, wanted[1:3]]))


@pytest.mark.parametrize("name", sorted(ROWS))
def test_rows_fit_as_with_tensordict_or_change_nothing(tmp_path, name):
    path, copy = tmp_path / "save", tmp_path / "copy"
    ROWS["as saved"]().memmap(path)
    os.chmod(path / "meta.json", 0o640)
    shutil.copytree(path, copy)
    before = state(path)
    rows = ROWS[name]()
    expected = theirs(copy, rows)
    assert ours(path, rows) is expected
    assert state(path) == (before if expected is not None else _with_modes_of(state(copy), before))
    assert is_free(path)


def _with_modes_of(found: dict[str, Any], modes: dict[str, Any]) -> dict[str, Any]:
    """tensordict loses the mode of meta.json."""
    return {name: (modes[name][0] if name in modes else mode, what) for name, (mode, what) in found.items()}


@pytest.mark.parametrize("kind", ["flat", "nested", "dtypes", "keys", "tensorclass", "non_tensor_pickle"])
def test_rows_that_were_loaded_from_another_save(tmp_path, kind):
    SAVES[kind](tmp_path / "save")
    SAVES[kind](tmp_path / "rows")
    check_like_tensordict(tmp_path / "save", load(tmp_path / "rows"))


@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8], ids=str)
@pytest.mark.parametrize("size", ["small", "large"])
def test_every_dtype_in_every_memory_layout(tmp_path, dtype, size):
    """Small ones are packed, large ones go in windows, some of which end in the middle of a row."""
    width = 6 if size == "small" else 25_000
    whole = random_bytes(dtype, 7, width)
    TensorDict({"x": whole}, [7]).memmap(tmp_path / "save")
    layouts = {
        "plain": random_bytes(dtype, 3, width, seed=1),
        "column": random_bytes(dtype, 3, 2, width, seed=2)[:, 1],
        "transposed": random_bytes(dtype, width, 3, seed=3).t(),
        "expanded": random_bytes(dtype, 1, width, seed=4).expand(3, width),
        "offset": random_bytes(dtype, 5, width, seed=5)[2:],
        "every second": random_bytes(dtype, 6, width, seed=6)[::2],
    }
    with ring_of(256 << 10, durable=False):
        for rows in layouts.values():
            tdgpu.append_memmap(tmp_path / "save", TensorDict({"x": rows}, [3]))
        with tdgpu.MemmapAppender(tmp_path / "save") as appender:
            for rows in layouts.values():
                appender.append(TensorDict({"x": rows}, [3]))
    parts = [whole, *layouts.values(), *layouts.values()]
    wanted = b"".join(
        (part if part.is_contiguous() else torch.stack([p.clone() for p in _bytes(part).unbind(0)]))
        .contiguous().view(torch.uint8).numpy().tobytes() for part in parts
    )  # fmt: skip
    assert (tmp_path / "save" / "x.memmap").read_bytes() == wanted


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of their size, which torch can copy from any layout; complex ones as they are."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor if tensor.dtype.itemsize > 8 else tensor.view(kinds[tensor.dtype.itemsize])


@pytest.mark.parametrize("width", [3, 70_000])
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugated_and_negated_rows(tmp_path, dtype, width):
    base = torch.randn(3, width, 2, dtype=dtype.to_real(), generator=torch.Generator().manual_seed(1))
    numbers = torch.view_as_complex(base)
    path = tmp_path / "save"
    TensorDict({"c": numbers, "r": base[..., 0].contiguous()}, [3]).memmap(path)
    conjugated, negated = numbers.conj(), numbers.conj().imag
    assert conjugated.is_conj() and negated.is_neg()
    rows = TensorDict({"c": conjugated, "r": negated}, [3])
    with ring_of(1 * MiB):
        tdgpu.append_memmap(path, rows)
        with tdgpu.MemmapAppender(path) as appender:
            appender.append(rows)
    loaded = load(path)
    wanted = torch.view_as_real(numbers).clone()
    wanted[..., 1].neg_()
    for first in (3, 6):
        assert torch.equal(torch.view_as_real(loaded["c"][first : first + 3].clone()), wanted)
        assert torch.equal(loaded["r"][first : first + 3], wanted[..., 1])


@pytest.mark.parametrize("ring", [64 << 10, 1 * MiB, 16 * MiB])
@pytest.mark.parametrize("nbytes", [1, 4096, 15_000, 60_000, 100_000, 255_000, 262_144, 3_000_001])
@pytest.mark.parametrize("plain", [True, False])
def test_rows_of_every_size_pass_a_ring_of_any_size(tmp_path, ring, nbytes, plain):
    """Also such as are larger than its chunks, or than all of it."""
    wide = torch.randint(0, 255, (4, nbytes, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    rows = wide[..., 0].contiguous() if plain else wide[..., 0]
    TensorDict({"x": rows[:1], "y": rows[:1, :1]}, [1]).memmap(tmp_path)
    with ring_of(ring, durable=False):
        tdgpu.append_memmap(tmp_path, TensorDict({"x": rows[1:3], "y": rows[1:3, :1]}, [2]))
        with tdgpu.MemmapAppender(tmp_path) as appender:
            appender.append(TensorDict({"x": rows[3:], "y": rows[3:, :1]}, [1]))
            appender.append(TensorDict({"x": rows[:2], "y": rows[:2, :1]}, [2]))
    loaded = load(tmp_path)
    wanted = torch.cat([rows, rows[:2]])
    assert torch.equal(loaded["x"], wanted)
    assert torch.equal(loaded["y"], wanted[:, :1])


# --- the list of format facts -----------------------------------------------------------------------------------------


def test_1_files_grow_in_place_and_metadata_is_replaced(tmp_path):
    flat(0, 3).memmap(tmp_path)
    before = {file: os.stat(file).st_ino for file in tmp_path.rglob("*") if file.is_file()}
    tdgpu.append_memmap(tmp_path, flat(3, 2))
    after = {file: os.stat(file).st_ino for file in tmp_path.rglob("*") if file.is_file()}
    assert after.keys() == before.keys()
    for file, inode in after.items():
        assert (inode != before[file]) == (file.name == "meta.json"), file
    expect(tmp_path, 5)


def test_2_further_batch_dimensions_must_match(tmp_path):
    path = tmp_path / "save"
    BUILDERS["names"]().memmap(path)
    before = state(path)
    rows = BUILDERS["names"]()
    for wrong in (rows[:, :2], rows.transpose(0, 1), TensorDict({"a": torch.zeros(2, 3, 4)}, [2]), rows[0, 0]):
        assert ours(path, wrong) is ValueError
    assert state(path) == before
    check_like_tensordict(path, rows, rows[1:])
    assert load(path).names == ["time", None]


def test_3_no_collection_no_save_no_directory(tmp_path):
    path = tmp_path / "save"
    flat(0, 3).memmap(path)
    flat(0, 3).save(tmp_path / "archive.tdz")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"nothing")
    before = state(tmp_path)
    for rows in (torch.zeros(3), {"a": torch.zeros(3)}, None, 3, [flat(0, 1)], np.zeros(3)):
        assert ours(path, rows) is TypeError
    for name in ("archive.tdz", "missing", "file", "empty"):
        assert ours(tmp_path / name, flat(0, 1)) is theirs(tmp_path / name, flat(0, 1)), name
    for name in ("archive.tdz", "missing", "file"):
        assert ours(tmp_path / name, flat(0, 1)) is ValueError, name
    assert state(tmp_path) == before


def test_4_keys_in_any_order_and_none_missing(tmp_path):
    path = tmp_path / "save"
    flat(0, 3).memmap(path)
    rows = flat(3, 2)
    turned = TensorDict({"n": TensorDict({"m": rows["n", "m"], "b": rows["n", "b"]}, [2]), "a": rows["a"]}, [2])
    check_like_tensordict(path, turned)
    before = state(path)
    assert ours(path, rows.exclude(("n", "m", "c"))) is ValueError
    assert ours(path, rows.clone().set(("n", "m", "d"), torch.zeros(2))) is ValueError
    assert state(path) == before


def test_5_another_dtype_or_shape_below_changes_no_byte(tmp_path):
    flat(0, 3).memmap(tmp_path)
    before = state(tmp_path)
    for wrong in (torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int16)):
        rows = flat(3, 2)
        rows["n", "m", "c"] = wrong
        with pytest.raises(errors.InvalidArgument) as raised:
            tdgpu.append_memmap(tmp_path, rows)
        assert raised.value.key == ("n", "m", "c")
        assert str(tmp_path) in str(raised.value)
    assert state(tmp_path) == before


def test_6_a_tensorclass_within_a_tensordict_keeps_its_class_and_values(tmp_path):
    def rows(label: str = "cat", count: int = 3) -> TensorDict:
        frame = Frame(image=torch.rand(count, 4), at=point()[:count], label=label, extra=None, batch_size=[count])
        return TensorDict({"f": frame, "t": torch.rand(count)}, [count])

    path = tmp_path / "save"
    rows().memmap(path)
    before = state(path)
    assert ours(path, rows("dog")) is ValueError
    assert ours(path, TensorDict({"f": point(), "t": torch.rand(3)}, [3])) is ValueError
    assert state(path) == before
    check_like_tensordict(path, rows(), rows(count=1))
    assert type(load(path)["f"]) is Frame and type(load(path)["f"].at) is Point


@pytest.mark.parametrize("kind", ["lazy_stack", "lazy_stack_named", "non_tensor_stack", "nested_tensor"])
def test_7_what_cannot_grow_says_so(tmp_path, kind):
    SAVES[kind](tmp_path)
    before = state(tmp_path)
    with pytest.raises(errors.InvalidArgument, match=r"cannot grow|no batch dimension"):
        tdgpu.append_memmap(tmp_path, BUILDERS[kind](), allow_pickle=True)
    assert state(tmp_path) == before


def test_8_values_must_be_equal_or_a_stack_of_equals(tmp_path):
    path = tmp_path / "save"

    def rows(value: Any) -> TensorDict:
        return TensorDict({"t": torch.zeros(2), "v": value}, [2])

    text, other, number = (NonTensorData(value, batch_size=[2]) for value in ("text", "other", 3))
    rows(text).memmap(path)
    before = state(path)
    for wrong in (other, NonTensorStack("text", "other"), number):
        assert ours(path, rows(wrong)) is ValueError
    assert state(path) == before
    check_like_tensordict(path, rows(text), rows(NonTensorStack("text", "text")))


def test_9_rows_of_other_classes(tmp_path):
    path = tmp_path / "save"
    base = TensorDict({"a": torch.arange(6.0).view(3, 2), "n": {"b": torch.arange(3)}}, [3])
    base.memmap(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parameters = TensorDictParams(base.clone(), no_convert=True)
    check_like_tensordict(
        path,
        lazy_stack([base[2], base[0]]),
        base[::2],
        parameters,
        base._get_sub_tensordict(slice(1, 3)),
        base._get_sub_tensordict(torch.tensor([2, 0])),
        base.lock_(),
    )


def test_9_typed_rows(tmp_path):
    path = tmp_path / "save"
    Typed(a=torch.arange(3.0), batch_size=[3]).memmap(path)
    check_like_tensordict(path, Typed(a=torch.arange(2.0), batch_size=[2]), TensorDict({"a": torch.ones(1)}, [1]))


def test_10_no_rows_change_nothing(tmp_path):
    path = tmp_path / "save"
    flat(0, 3).memmap(path)
    before = state(path)
    tdgpu.append_memmap(path, flat(0, 0))
    assert state(path) == before
    check_like_tensordict(path, flat(0, 0))


def test_11_a_save_without_rows_gets_its_files(tmp_path):
    path = tmp_path / "save"
    mask = os.umask(0o027)
    try:
        flat(0, 0).memmap(path)
        assert not list(path.rglob("*.memmap"))
        check_like_tensordict(path, flat(0, 0), flat(0, 2), flat(2, 3))
    finally:
        os.umask(mask)
    expect(path, 5)


def test_11_rows_that_do_not_fit_leave_no_files_behind(tmp_path, monkeypatch):
    flat(0, 0).memmap(tmp_path)
    before = state(tmp_path)
    assert ours(tmp_path, TensorDict({"a": torch.zeros(2, 3)}, [2])) is ValueError
    assert state(tmp_path) == before
    real = os.replace
    monkeypatch.setattr(os, "replace", failing(errno.EIO))
    with pytest.raises(errors.AppendError):
        tdgpu.append_memmap(tmp_path, flat(0, 2))
    assert state(tmp_path) == before
    monkeypatch.setattr(os, "replace", real)
    tdgpu.append_memmap(tmp_path, flat(0, 2))
    expect(tmp_path, 2)


def test_12_leaves_of_no_width_are_metadata_only(tmp_path):
    path = tmp_path / "save"

    def rows(count: int) -> TensorDict:
        hollow = {"z": torch.zeros(count, 0), "y": torch.zeros(count, 2, 0, 3, dtype=torch.uint8)}
        return TensorDict({**hollow, "a": torch.zeros(count)}, [count])

    rows(2).memmap(path)
    check_like_tensordict(path, rows(3), rows(1))
    assert load(path)["y"].shape == (6, 2, 0, 3)
    hollow = tmp_path / "hollow"
    rows(2).exclude("a").memmap(hollow)
    check_like_tensordict(hollow, rows(3).exclude("a"))
    assert load(hollow)["z"].shape == (5, 0)


def test_13_rows_with_a_gradient_and_with_odd_strides(tmp_path):
    path = tmp_path / "save"
    TensorDict({"a": torch.zeros(1, 1, 4)}, [1]).memmap(path)
    one = torch.arange(40.0)
    check_like_tensordict(
        path,
        TensorDict({"a": torch.rand(2, 1, 4, requires_grad=True)}, [2]),
        TensorDict({"a": (torch.rand(2, 1, 4, requires_grad=True) * 2)}, [2]),
        TensorDict({"a": torch.nn.Parameter(torch.rand(2, 1, 4))}, [2]),
        TensorDict({"a": one.as_strided((1, 1, 4), (17, 23, 1))}, [1]),  # strides of sizes of 1 mean nothing
        TensorDict({"a": one.as_strided((1, 1, 4), (0, 3, 2), 5)}, [1]),
        TensorDict({"a": one.as_strided((3, 1, 4), (1, 9, 2))}, [3]),  # rows that overlap
        TensorDict({"a": one[:1].expand(2, 1, 4)}, [2]),
    )
    graph = torch.rand(2, 1, 4, requires_grad=True)
    tdgpu.append_memmap(path, TensorDict({"a": graph}, [2]))
    assert graph.requires_grad and graph.grad is None


def test_14_a_save_can_be_appended_to_itself(tmp_path):
    path = tmp_path / "save"
    flat(0, 3).memmap(path)
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    for _ in range(3):
        tdgpu.append_memmap(path, load(path))
        tensordict.append_memmap(copy, load(copy))
        assert state(path) == state(copy)
    tdgpu.append_memmap(path, load(path)[1::2])
    tensordict.append_memmap(copy, load(copy)[1::2])
    tdgpu.append_memmap(path, tdgpu.load_memmap(path, mode="r")[:5])
    tensordict.append_memmap(copy, tensordict.load_memmap(copy, mode="r")[:5])
    assert state(path) == state(copy)
    assert load(path).batch_size == (41,)


def test_14_large_leaves_of_itself_through_a_small_ring(tmp_path):
    TensorDict({"x": torch.randn(40, 30_000), "y": torch.randn(40, 3)}, [40]).memmap(tmp_path)
    rows = load(tmp_path)
    strided = TensorDict({key: rows[key].as_strided((20, rows[key].shape[1]), (2 * rows[key].shape[1], 1)) for key in
                          ("x", "y")}, [20])  # fmt: skip
    wanted = {key: torch.cat([rows[key].clone(), rows[key].clone()[::2]]) for key in ("x", "y")}
    with ring_of(1 * MiB):
        tdgpu.append_memmap(tmp_path, strided)
    for key, value in wanted.items():
        assert torch.equal(load(tmp_path)[key], value)


@pytest.mark.parametrize("mode", [None, "r", "r+"])
def test_15_readers_that_mapped_before_keep_the_old_rows(tmp_path, mode):
    flat(0, 3).memmap(tmp_path)
    before = [tensordict.load_memmap(tmp_path, mode=mode), tdgpu.load_memmap(tmp_path, mode=mode)]
    for first in range(3, 9, 2):
        tdgpu.append_memmap(tmp_path, flat(first, 2))
    for reader in before:
        assert reader.batch_size == (3,)
        for key, value in flat(0, 3).items(True, True):
            assert torch.equal(reader[key], value)
    expect(tmp_path, 9)


def test_16_surplus_bytes_of_a_failed_append_are_overwritten(tmp_path):
    path = tmp_path / "save"
    flat(0, 3).memmap(path)
    for surplus, file in ((b"\xaa" * 5000, path / "a.memmap"), (b"\xbb" * 7, path / "n" / "m" / "c.memmap")):
        with open(file, "ab") as opened:
            opened.write(surplus)
    check_like_tensordict(path, flat(3, 2), flat(5, 4))
    expect(path, 9)


def test_16_surplus_of_a_save_without_rows(tmp_path):
    path = tmp_path / "save"
    flat(0, 0).memmap(path)
    (path / "a.memmap").write_bytes(b"\xcc" * 100)
    check_like_tensordict(path, flat(0, 2))
    expect(path, 2)


def test_17_a_file_that_is_too_short_is_refused(tmp_path):
    flat(0, 3).memmap(tmp_path)
    file = tmp_path / "n" / "b.memmap"
    os.truncate(file, 23)
    before = state(tmp_path)
    with pytest.raises(errors.LeafSizeError, match="too short") as raised:
        tdgpu.append_memmap(tmp_path, flat(3, 1))
    assert (raised.value.wanted, raised.value.found, raised.value.file) == (24, 23, str(file))
    file.unlink()
    with pytest.raises(errors.MissingLeafError) as missing:
        tdgpu.append_memmap(tmp_path, flat(3, 1))
    assert missing.value.file == str(file)
    file.write_bytes(before["n/b.memmap"][1] if isinstance(before["n/b.memmap"][1], bytes) else b"")
    assert state(tmp_path) == before
