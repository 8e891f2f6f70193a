"""``append_memmap`` from one end to the other, on the host: the disk holds what tensordict would have left there."""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensordict
import torch
from compare import assert_same
from saves import BUILDERS, DTYPES, FLOAT8, SAVES, Frame, Point, Thing, Typed, point, random_bytes
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictParams, lazy_stack
from test_growth import BETTER, ROWS
from torch._subclasses.fake_tensor import FakeTensorMode

import tdgpu
from tdgpu import errors
from tdgpu.layout import commit
from tdgpu.layout.lock import WriterLock
from tdgpu.transfer import outgoing, outlets

HERE = Path(__file__).parent
MiB = 1 << 20

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*allow_pickle.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


def state(path: Path) -> dict[str, tuple[int, bytes | str]]:
    """Everything that there is below a directory: the mode of each entry, and its bytes or where it leads."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for entry in sorted([path, *path.rglob("*")]):
        status = os.lstat(entry)
        what: bytes | str = ""
        if stat.S_ISLNK(status.st_mode):
            what = os.readlink(entry)
        elif stat.S_ISREG(status.st_mode):
            what = entry.read_bytes()
        found[str(entry.relative_to(path))] = status.st_mode, what
    return found


def theirs(path: Path, rows: Any, allow_pickle: bool | None = True) -> type[BaseException] | None:
    """What tensordict raises; None: it appends."""
    return _family(lambda: tensordict.append_memmap(path, rows, allow_pickle=allow_pickle))


def ours(path: Path, rows: Any, allow_pickle: bool | None = True) -> type[BaseException] | None:
    return _family(lambda: tdgpu.append_memmap(path, rows, allow_pickle=allow_pickle))


def _family(call: Any) -> type[BaseException] | None:
    try:
        call()
    except (TypeError, ValueError, FileNotFoundError, RuntimeError) as error:
        families = (TypeError, ValueError, FileNotFoundError, RuntimeError)
        return next(base for base in families if isinstance(error, base))
    return None


def load(path: Path) -> Any:
    return tensordict.load_memmap(path, allow_pickle=True)


def check_like_tensordict(path: Path, *calls: Any) -> None:
    """Appends the rows of each call to a save and, by tensordict, to a copy: all is the same afterwards."""
    copy = path.with_name(f"{path.name}.theirs")
    shutil.copytree(path, copy)
    for rows in calls:
        assert theirs(copy, rows) is None
        tdgpu.append_memmap(path, rows, allow_pickle=True)
        assert state(path) == state(copy)
    assert_same(load(path), load(copy))
    assert_same(tdgpu.load_memmap(path, allow_pickle=True), load(copy))


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock of a save."""
    try:
        WriterLock(str(path), 0).release()
    except errors.SaveLocked:
        return False
    return True


@contextlib.contextmanager
def ring_of(nbytes: int, **others: Any):
    """Options with a host ring of so many bytes: one that was made before is not used."""
    outlets.close_idle()
    with tdgpu.options(ring_bytes=nbytes, **others):
        yield
    outlets.close_idle()


# Importing torch takes seconds: one process does it, and each piece of code runs in a fork of that one, which ends as a
# program ends.
_FORKER = """
import json, os, sys, tempfile
from test_append import *
torch.set_num_threads(1)  # what OpenMP has begun before a fork hangs in the child
for line in sys.stdin:
    code, arguments, out = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in enumerate(("in", "out", "err")):
    file = os.open(os.devnull if number == 0 else f"{out}/{name}", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, number)
    os.close(file)
sys.argv = ["-c", *arguments]
exec(compile(code, "<test>", "exec"), {"__name__": "__main__"})
"""


class _Forker:
    def __init__(self) -> None:
        # A pool of threads, such as OpenMP's, does not survive a fork.
        paths = os.pathsep.join([str(HERE), str(HERE.parent)])
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._out = tempfile.mkdtemp(prefix="tdgpu-test-")
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", _FORKER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
        atexit.register(self._close)

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.kill()  # other children of this process may hold its input open
        self._process.wait(20)
        shutil.rmtree(self._out, ignore_errors=True)

    def run(self, code: str, arguments: list[str], timeout: float) -> tuple[int, str, str]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([code, arguments, self._out]) + "\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        too_long = threading.Timer(timeout, os.kill, (child, signal.SIGABRT))  # faulthandler says where it was
        too_long.start()
        status = int(process.stdout.readline())
        too_long.cancel()
        return status, Path(self._out, "out").read_text(), Path(self._out, "err").read_text()


_forkers: list[_Forker] = []


def run_process(code: str, *arguments: Any, timeout: float = 60) -> tuple[int, str, str]:
    """Runs code in a process of its own, which is ended if that takes too long: its status, and what it printed."""
    if not _forkers:
        _forkers.append(_Forker())
    try:
        return _forkers[0].run(textwrap.dedent(code), [str(argument) for argument in arguments], timeout)
    except BaseException:
        _forkers.clear()  # its answer may still come
        raise


def in_process(code: str, *arguments: Any, timeout: float = 60) -> str:
    """Likewise; it must end well."""
    status, out, err = run_process(code, *arguments, timeout=timeout)
    assert status == 0, out + err
    assert "Traceback" not in err and "terminate" not in err, err
    return out


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


def flat(first: int, count: int) -> TensorDict:
    numbers = torch.arange(first, first + count)
    return TensorDict(
        {"a": numbers.float().view(-1, 1) * torch.ones(3), "n": {"b": numbers.clone(), "m": {"c": numbers.short()}}},
        [count],
    )


def expect(path: Path, rows: int) -> None:
    loaded = load(path)
    assert loaded.batch_size == (rows,)
    for key, value in flat(0, rows).items(True, True):
        assert torch.equal(loaded[key], value), key


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
    monkeypatch.setattr(os, "replace", _failing)
    with pytest.raises(errors.AppendError):
        tdgpu.append_memmap(tmp_path, flat(0, 2))
    assert state(tmp_path) == before
    monkeypatch.setattr(os, "replace", real)
    tdgpu.append_memmap(tmp_path, flat(0, 2))
    expect(tmp_path, 2)


def _failing(*_: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


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


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("at", ["write", "reserve", "metadata", "rename"])
def test_18_a_failure_restores_every_byte(tmp_path, monkeypatch, at, durable):
    path = tmp_path / "save"
    flat(0, 3).memmap(path)
    os.chmod(path / "meta.json", 0o640)
    before = state(path)
    with tdgpu.options(durable=durable), monkeypatch.context() as patch:
        if at == "write":
            patch.setattr(outgoing.Store, "report", lambda self: outgoing.StoreReport(0, 5, 0, 1, errno.EIO))
        elif at == "reserve":
            real = outgoing.Files.reserve

            def reserve(self: Any, *arguments: Any) -> None:
                real(self, *arguments)
                raise outgoing.FileError(2, errno.ENOSPC)

            patch.setattr(outgoing.Files, "reserve", reserve)
        elif at == "metadata":
            patch.setattr(commit, "_write_temporary", _failing_at_last(commit._write_temporary, 3))
        else:
            patch.setattr(os, "replace", _failing)
        with pytest.raises(errors.AppendError) as raised:
            tdgpu.append_memmap(path, flat(3, 2))
        assert raised.value.errno == (errno.ENOSPC if at == "reserve" else errno.EIO)
        assert raised.value.file is not None and raised.value.file.startswith(str(path))
        assert state(path) == before
        assert is_free(path)
    tdgpu.append_memmap(path, flat(3, 2))
    expect(path, 5)


def test_18_a_failure_leaves_a_file_as_long_as_it_was_found(tmp_path, monkeypatch):
    flat(0, 3).memmap(tmp_path)
    with open(tmp_path / "a.memmap", "ab") as opened:
        opened.write(b"surplus")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", _failing)
        with pytest.raises(errors.AppendError):
            tdgpu.append_memmap(tmp_path, flat(3, 20))
    assert (tmp_path / "a.memmap").stat().st_size == 36 + 7
    expect(tmp_path, 3)


def _failing_at_last(real: Any, nth: int) -> Any:
    calls = []

    def function(*arguments: Any, **others: Any) -> None:
        calls.append(1)
        if len(calls) == nth:
            _failing()
        real(*arguments, **others)

    return function


def test_18_metadata_that_could_not_be_put_in_its_place_is_completed_by_the_next(tmp_path, monkeypatch):
    flat(0, 3).memmap(tmp_path)
    real = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda old, new: _failing() if Path(new).parent != tmp_path else real(old, new))
        with pytest.raises(errors.AppendError, match="committed"):
            tdgpu.append_memmap(tmp_path, flat(3, 2))
    loaded = tdgpu.load_memmap(tmp_path)
    assert loaded.batch_size == (5,) and torch.equal(loaded["n", "m", "c"], flat(0, 5)["n", "m", "c"])
    tdgpu.append_memmap(tmp_path, flat(5, 2))
    expect(tmp_path, 7)
    assert not list(tmp_path.rglob(commit.TEMPORARY))


@pytest.mark.parametrize("committed", [True, False])
def test_20_what_a_killed_append_left_is_undone_or_completed_first(tmp_path, committed):
    flat(0, 3).memmap(tmp_path / "save")
    shutil.copytree(tmp_path / "save", tmp_path / "new")
    tensordict.append_memmap(tmp_path / "new", flat(3, 2))
    for meta in (tmp_path / "new").rglob("meta.json"):
        shutil.copy(meta, tmp_path / "save" / meta.relative_to(tmp_path / "new").with_name(commit.TEMPORARY))
    for leaf in (tmp_path / "new").rglob("*.memmap"):
        shutil.copy(leaf, tmp_path / "save" / leaf.relative_to(tmp_path / "new"))
    if committed:
        os.replace(tmp_path / "save" / commit.TEMPORARY, tmp_path / "save" / "meta.json")
    there = 5 if committed else 3
    tdgpu.append_memmap(tmp_path / "save", flat(there, 2))
    expect(tmp_path / "save", there + 2)
    assert not list(tmp_path.rglob(commit.TEMPORARY))


# --- names, modes, limits ---------------------------------------------------------------------------------------------


class Named(os.PathLike):
    def __init__(self, path: Any) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return os.fspath(self.path)


@pytest.mark.parametrize("kind", [str, Path, Named, os.fsencode])
def test_a_prefix_of_any_kind(tmp_path, kind):
    flat(0, 3).memmap(tmp_path)
    if kind is os.fsencode:
        # As with load_memmap: an error or rows, but nothing in between.
        with contextlib.suppress(TypeError):
            tdgpu.append_memmap(kind(tmp_path), flat(3, 1))  # type: ignore[arg-type]
        assert load(tmp_path).batch_size[0] in (3, 4)
        return
    tdgpu.append_memmap(kind(tmp_path), flat(3, 1))
    expect(tmp_path, 4)


def test_a_relative_prefix(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    for name in ("save", "elsewhere/save"):
        flat(0, 3).memmap(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    tdgpu.append_memmap("save", flat(3, 1))
    appender = tdgpu.MemmapAppender("save")
    appender.append(flat(4, 1))
    monkeypatch.chdir("elsewhere")  # it means what it meant
    appender.append(flat(5, 1))
    appender.flush()
    appender.append(flat(6, 1))
    appender.close()
    expect(tmp_path / "save", 7)
    expect(tmp_path / "elsewhere" / "save", 3)


def test_a_prefix_may_be_a_link(tmp_path):
    flat(0, 3).memmap(tmp_path / "save")
    os.symlink("save", tmp_path / "link")
    tdgpu.append_memmap(tmp_path / "link", flat(3, 1))
    with tdgpu.MemmapAppender(tmp_path / "link") as appender, tdgpu.options(lock_timeout=0):
        appender.append(flat(4, 1))
        with pytest.raises(errors.SaveLocked):
            tdgpu.append_memmap(tmp_path / "save", flat(0, 1))
    expect(tmp_path / "save", 5)
    assert os.readlink(tmp_path / "link") == "save"


@pytest.mark.parametrize("how", ["link", "directory"])
def test_a_save_that_took_the_place_of_the_locked_one_gets_no_metadata(tmp_path, how):
    """Its rows are in the files that were opened: metadata must not go to another save that looks the same."""
    first, second = tmp_path / "first", tmp_path / "second"
    flat(0, 3).memmap(first)
    flat(0, 3).memmap(second)
    name = first
    if how == "link":
        name = tmp_path / "link"
        name.symlink_to(first)
    appender = tdgpu.MemmapAppender(name)
    appender.append(flat(3, 1))
    if how == "link":
        name.unlink()
        name.symlink_to(second)
    else:
        first.rename(tmp_path / "away")
        second.rename(first)
    with contextlib.suppress(errors.AppendError):
        appender.close()
    for path in tmp_path.iterdir():
        expect(path, len(load(path)))
        assert tdgpu.load_memmap(path).batch_size[0] in (3, 4)


@pytest.mark.parametrize("what", ["a.memmap", "n", "n/m/meta.json"])
def test_links_within_a_save_are_refused(tmp_path, what):
    path = tmp_path / "save"
    flat(0, 3).memmap(path)
    (path / what).rename(tmp_path / "moved")
    (path / what).symlink_to(tmp_path / "moved")
    before = state(tmp_path)
    with pytest.raises(errors.InvalidArgument, match="symbolic link"):
        tdgpu.append_memmap(path, flat(3, 1))
    assert state(tmp_path) == before


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, make):
    flat(0, 3).memmap(tmp_path)
    (tmp_path / "a.memmap").unlink()
    make(tmp_path / "a.memmap")
    before = os.listdir(tmp_path)
    with pytest.raises((errors.InvalidArgument, errors.LeafSizeError, errors.MissingLeafError)):
        tdgpu.append_memmap(tmp_path, flat(3, 1))
    assert os.listdir(tmp_path) == before


@pytest.mark.parametrize("kind", ["nested", "tensorclass"])
def test_modes_stay(tmp_path, kind):
    path = tmp_path / "save"
    SAVES[kind](path)
    modes = {}
    for i, file in enumerate(sorted(file for file in path.rglob("*") if file.is_file())):
        modes[file] = (0o640, 0o600, 0o664, 0o666)[i % 4]
        os.chmod(file, modes[file])
    tdgpu.append_memmap(path, BUILDERS[kind](), allow_pickle=True)
    assert {file: stat.S_IMODE(file.stat().st_mode) for file in modes} == modes


def test_ten_thousand_rows_in_one_call(tmp_path):
    flat(0, 1).memmap(tmp_path)
    tdgpu.append_memmap(tmp_path, flat(1, 10_000))
    expect(tmp_path, 10_001)


def test_more_leaves_than_files_may_be_open(tmp_path):
    done = in_process(
        """
        import resource, sys, torch, tdgpu
        from tensordict import TensorDict
        def rows(first, count):
            return TensorDict({f"k{i}": torch.arange(first, first + count) + i for i in range(5000)}, [count])
        rows(0, 1).memmap(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with tdgpu.options(durable=False):
            tdgpu.append_memmap(sys.argv[1], rows(1, 2))
            with tdgpu.MemmapAppender(sys.argv[1]) as appender:
                appender.append(rows(3, 1))
                appender.append(rows(4, 40))
        print("done")
        """,
        tmp_path,
    )
    assert done == "done\n"
    for i in range(0, 5000, 501):
        data = np.fromfile(tmp_path / f"k{i}.memmap", np.int64)
        assert (data == np.arange(44) + i).all()
    assert load(tmp_path).batch_size == (44,)


def test_host_memory_in_use_does_not_grow_with_the_rows(tmp_path):
    """96 MiB that must be put in order on the way: only the ring, and not the leaf, is on the host in addition."""
    peak = in_process(
        """
        import sys, torch, tdgpu
        from tensordict import TensorDict
        def status(name):
            return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))
        rows = TensorDict({"x": torch.ones(96, 1 << 18).t().contiguous().t()}, [96])
        assert not rows["x"].is_contiguous()
        rows[:1].contiguous().memmap(sys.argv[1])
        with tdgpu.options(durable=False):
            tdgpu.append_memmap(sys.argv[1], rows[:1])
            open("/proc/self/clear_refs", "w").write("5")
            before = status("VmRSS")
            tdgpu.append_memmap(sys.argv[1], rows)
            print(status("VmHWM") - before)
        """,
        tmp_path,
    )
    assert int(peak) <= (16 + 32) * MiB
    assert (tmp_path / "x.memmap").stat().st_size == 98 * MiB


def test_nothing_stays_open_or_locked(tmp_path):
    flat(0, 1).memmap(tmp_path)
    tdgpu.append_memmap(tmp_path, flat(1, 1))
    before = len(os.listdir("/proc/self/fd"))
    for first in range(2, 12):
        tdgpu.append_memmap(tmp_path, flat(first, 1))
        assert ours(tmp_path, flat(0, 1).exclude("a")) is ValueError
    assert len(os.listdir("/proc/self/fd")) == before
    assert is_free(tmp_path)


# --- options and arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
def test_only_durable_appends_sync(tmp_path, monkeypatch, durable):
    flat(0, 3).memmap(tmp_path)
    syncs: list[str] = []
    fsync, sync = os.fsync, outgoing.Files.sync

    def counted_fsync(descriptor: int) -> None:
        syncs.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def counted_sync(files: outgoing.Files) -> None:
        syncs.append("leaves")
        sync(files)

    monkeypatch.setattr(os, "fsync", counted_fsync)
    monkeypatch.setattr(outgoing.Files, "sync", counted_sync)
    with tdgpu.options(durable=durable):
        tdgpu.append_memmap(tmp_path, flat(3, 1))
    expect(tmp_path, 4)
    if not durable:
        assert syncs == []
        return
    assert syncs[0] == "leaves"  # before any metadata
    for directory in (tmp_path, tmp_path / "n", tmp_path / "n" / "m"):
        assert syncs.count(str(directory)) == 2  # the temporary file is there; it is renamed
        assert syncs.count(str(directory / commit.TEMPORARY)) == 1


def test_pickles_as_with_tensordict(tmp_path):
    path, copy = tmp_path / "save", tmp_path / "copy"
    rows = BUILDERS["non_tensor_pickle"]()
    rows.memmap(path)
    shutil.copytree(path, copy)
    for allowed in (None, True, False):
        before = state(path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mine = ours(path, rows, allowed)
        with warnings.catch_warnings(record=True) as expected:
            warnings.simplefilter("always")
            other = theirs(copy, rows, allowed)
        assert mine is other
        assert {w.category for w in caught} == {w.category for w in expected}
        assert state(path) == state(copy)
        assert (mine is RuntimeError) == (allowed is False) == (state(path) == before)
    with pytest.raises(TypeError):
        tdgpu.append_memmap(path, rows, allow_pickle=1)  # type: ignore[arg-type]
    other_thing = rows.clone()
    other_thing.set_non_tensor("thing", Thing(6))
    assert ours(path, other_thing) is ValueError


@pytest.mark.parametrize("width", [3, 100_000])
@pytest.mark.parametrize("where", ["meta", "fake", "fake, outside of the mode"])
def test_rows_without_bytes_are_refused(tmp_path, where, width):
    TensorDict({"x": torch.zeros(2, width), "y": torch.zeros(2)}, [2]).memmap(tmp_path)
    before = state(tmp_path)
    mode = FakeTensorMode()
    with mode if "fake" in where else contextlib.nullcontext():
        rows = TensorDict({"x": torch.zeros(2, width, device="meta" if where == "meta" else "cpu")}, [2])
        if where == "fake":
            rows["y"] = torch.zeros(2)
            with pytest.raises((errors.InvalidArgument, errors.NotSupported)):
                tdgpu.append_memmap(tmp_path, rows)
    if where != "fake":
        rows["y"] = torch.zeros(2)
        with pytest.raises((errors.InvalidArgument, errors.NotSupported)):
            tdgpu.append_memmap(tmp_path, rows)
    assert state(tmp_path) == before
    assert is_free(tmp_path)


# --- several writers, and interrupts ----------------------------------------------------------------------------------


def test_several_threads_append(tmp_path):
    TensorDict({"a": torch.zeros(0, dtype=torch.int64), "n": {"b": torch.zeros(0, 3)}}, [0]).memmap(tmp_path)
    failed: list[BaseException] = []

    def work(which: int) -> None:
        try:
            for i in range(12):
                number = torch.tensor([which * 100 + i])
                rows = TensorDict({"a": number, "n": TensorDict({"b": number.float().expand(1, 3)}, [1])}, [1])
                tdgpu.append_memmap(tmp_path, rows)
        except BaseException as error:
            failed.append(error)

    with tdgpu.options(durable=False):
        threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failed == []
    loaded = load(tmp_path)
    found = loaded["a"].tolist()
    assert sorted(found) == [which * 100 + i for which in range(4) for i in range(12)]
    for which in range(4):  # each in its order
        assert [number for number in found if number // 100 == which] == [which * 100 + i for i in range(12)]
    assert torch.equal(loaded["n", "b"], loaded["a"].float().view(-1, 1).expand(-1, 3))


# Raises KeyboardInterrupt in the main thread at the nth of the places where Python runs signal handlers: a function is
# entered, a call has returned, a loop goes round.
INTERRUPTS = '''
import contextlib, dis, os, shutil, signal, sys, threading, torch, tdgpu, tensordict
from pathlib import Path
from tensordict import TensorDict
from tdgpu.layout.lock import WriterLock

def handler(code, at, known={}):
    """Where an exception at this instruction goes."""
    if not hasattr(dis, "_parse_exception_table"):
        return None
    if code not in known:
        known[code] = dis._parse_exception_table(code)
    return next((entry.target for entry in known[code] if entry.start <= at < entry.end), None)

class Interrupt:
    def __init__(self, at):
        self.left, self.at, self.last = at, None, {}
    def __enter__(self):
        sys.settrace(self.trace)
        return self
    def __exit__(self, *_):
        sys.settrace(None)
        self.last.clear()
    def trace(self, frame, event, argument):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            before, self.last[frame] = self.last.get(frame), frame.f_lasti
            name = "" if before is None else dis.opname[frame.f_code.co_code[before]]
            if (name.startswith("CALL") and "INTRINSIC" not in name or name in ("RESUME", "JUMP_BACKWARD")) and (
                # It would have been raised by that instruction, and not by the next.
                handler(frame.f_code, before) == handler(frame.f_code, frame.f_lasti)):
                self.left -= 1
                if self.left == 0:
                    self.at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                    raise KeyboardInterrupt
        elif event == "return":
            self.last.pop(frame, None)
        return self.trace

def flat(first, count):
    numbers = torch.arange(first, first + count)
    return TensorDict({"a": numbers.float().view(-1, 1) * torch.ones(3),
                       "n": {"b": numbers.clone(), "m": {"c": numbers.short()}}}, [count])

def files(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}

def is_free(path):
    try:
        WriterLock(str(path), 0).release()
    except tdgpu.SaveLocked:
        return False
    return True
'''


@pytest.mark.parametrize("rows", ["small", "large"])
def test_an_interrupt_anywhere_leaves_the_old_rows_or_the_new(tmp_path, rows):
    found = in_process(
        INTERRUPTS
        + textwrap.dedent("""
        where, large = Path(sys.argv[1]), sys.argv[2] == "large"
        def rows(first):
            made = flat(first, 2)
            if large:
                made["w"] = torch.arange(first, first + 2).repeat_interleave(300_000).view(300_000, 2).t()
            return made
        rows(0).memmap(where / "old")
        shutil.copytree(where / "old", where / "new")
        tdgpu.append_memmap(where / "new", rows(2))
        old, new = files(where / "old"), files(where / "new")
        wrong, seen = [], set()
        sys.unraisablehook = lambda _: None
        with tdgpu.options(durable=False, lock_timeout=0, threads=1):
            at = 1 + os.getpid() % (step := 101 if large else 31)
            while True:
                save = where / "save"
                shutil.copytree(where / "old", save)
                ended = "well"
                try:
                    with Interrupt(at) as interrupt:
                        tdgpu.append_memmap(save, rows(2))
                except BaseException as error:
                    ended = repr(error)
                if interrupt.at is None:
                    break
                free, found = is_free(save), files(save)
                # Python swallows what is raised in a finalizer.
                whole = found == new if ended == "well" else ended == "KeyboardInterrupt()" and found in (old, new)
                if not whole or not free:
                    wrong.append((interrupt.at, ended, "new" if found == new else found == old, free))
                seen.add(found == new)
                shutil.rmtree(save)
                at += step
        assert False in seen, seen
        print(wrong)
        """),
        tmp_path,
        rows,
    )
    assert found == "[]\n"


def test_ctrl_c_at_random_moments(tmp_path):
    """Real signals, in a loop of appends; after each, there is a whole number of them and nothing to recover."""
    found = in_process(
        INTERRUPTS
        + textwrap.dedent("""
        import random, time
        path, rows = Path(sys.argv[1]), 1
        def handler(number, frame):
            raise KeyboardInterrupt
        # What is raised in a finalizer is swallowed: another comes.
        sys.unraisablehook = lambda _: signal.setitimer(signal.ITIMER_REAL, 0.005)
        signal.signal(signal.SIGALRM, handler)
        flat(0, 1).memmap(path)
        chance, interrupts, deadline = random.Random(5), 0, time.monotonic() + 2.5
        while time.monotonic() < deadline:
            with tdgpu.options(durable=chance.random() < 0.3, lock_timeout=0):
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.02))
                    while time.monotonic() < deadline:
                        tdgpu.append_memmap(path, flat(rows, 1))
                        rows += 1
                except KeyboardInterrupt:
                    interrupts += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                report = tdgpu.recover_memmap(path)
                assert report.state == "clean" and report.surplus == 0, report
                assert report.rows in (rows, rows + 1), (report, rows)
                rows = report.rows
        loaded = tensordict.load_memmap(path)
        for key, value in flat(0, rows).items(True, True):
            assert torch.equal(loaded[key], value), key
        assert not list(path.rglob(".*"))
        print(interrupts > 10, rows > 10)
        """),
        tmp_path / "save",
    )
    assert found == "True True\n"


def test_no_thread_can_be_started(tmp_path, monkeypatch):
    flat(0, 1).memmap(tmp_path)
    tdgpu.append_memmap(tmp_path, flat(1, 1))

    def refused(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    tdgpu.append_memmap(tmp_path, flat(2, 1))
    assert ours(tmp_path, flat(0, 1).exclude("a")) is ValueError
    assert is_free(tmp_path)
    expect(tmp_path, 3)
