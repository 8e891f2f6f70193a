"""Hasher on values: equal ones are equal, others differ, and nothing of their size is copied."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import logging
import math
import pathlib
import random
import re
import threading
import uuid
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saves import BUILDERS
from tensordict import TensorDict

from tdgpu.cache.hasher import FingerprintWarning, Hasher
from tdgpu.cache.values import walk

hashed = Hasher.hash


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FingerprintWarning)
        yield


# --- containers -------------------------------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from([..., 2**63, -(2**63) - 1, -0.0, 0.0, math.nan, "", b"", "\ud800"])
)
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.frozensets(KEYS)
        | st.sets(KEYS)
    ),
    max_leaves=12,
)


def canonical(value: Any) -> Any:
    """What two values must share to be the same: type and content, by a way of its own."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(canonical(item) for item in value)
    if isinstance(value, dict):
        return "dict", frozenset((canonical(key), canonical(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, frozenset(canonical(item) for item in value)
    if isinstance(value, (float, complex)):
        return type(value).__name__, np.array(value).tobytes()
    return type(value).__name__, value


@settings(max_examples=60, deadline=None)
@given(VALUES, VALUES)
def test_values_have_the_same_digest_exactly_if_they_are_equal_in_type_and_content(one, other):
    assert (hashed(one) == hashed(other)) == (canonical(one) == canonical(other))


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_a_copy_has_the_same_digest(value):
    assert hashed(copy.deepcopy(value)) == hashed(value)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, VALUES), st.sets(KEYS), st.randoms())
def test_the_order_of_dicts_and_sets_does_not_count(mapping, elements, shuffler):
    pairs, shuffled = list(mapping.items()), list(elements)
    shuffler.shuffle(pairs)
    shuffler.shuffle(shuffled)
    assert hashed([dict(pairs)]) == hashed([mapping])
    assert hashed({1: set(shuffled)}) == hashed({1: elements})


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, min_size=1), st.data())
def test_one_changed_item_changes_the_digest(items, data):
    i = data.draw(st.integers(0, len(items) - 1))
    item = data.draw(VALUES)
    changed = [*items[:i], item, *items[i + 1 :]]
    assert (hashed(changed) == hashed(items)) == (canonical(item) == canonical(items[i]))


AMBIGUOUS = [
    [[], [[]]],
    [[[]], []],
    [[[], []]],
    [[[]]],
    [],
    [()],
    ([],),
    "",
    b"",
    bytearray(),
    [""],
    ["", ""],
    ["a", "bc"],
    ["ab", "c"],
    ["abc"],
    [["a"], "bc"],
    [["a", "bc"]],
    {"a": "bc"},
    {"ab": "c"},
    {"a": {"bc": 1}},
    {"a": "bc", 1: 1},
    {"a"},
    frozenset("a"),
    ["a"],
    ("a",),
    "a",
    b"a",
    1,
    True,
    1.0,
    1 + 0j,
    "1",
    b"1",
    0,
    False,
    0.0,
    -0.0,
    -0.0j,
    None,
    "None",
    [None],
    ...,
    NotImplemented,
    2**64,
    2**64 + 1,
    -(2**64),
    255,
    -1,
    256,
    [1] * 300,
    [1] * 301,
    [1.0] * 300,
    [True] * 300,
    [1] * 299 + [True],
    [2**63] * 300,
    (1,) * 300,
    np.ones(300, np.int64),
    "x" * 5000,
    "x" * 4999 + "y",
    b"x" * 5000,
    bytearray(b"x" * 5000),
    ["x" * 5000],
    range(3),
    range(0, 3, 2),
    range(4),
    slice(3),
    slice(0, 3),
    slice(0, 3, 1),
    int,
    float,
    type,
    object,
    len,
    print,
    math.nan,
    -math.nan,
    math.inf,
]


def test_values_that_are_easily_taken_for_each_other_all_differ():
    digests = [hashed(value) for value in AMBIGUOUS]
    assert len(set(digests)) == len(AMBIGUOUS), [
        (AMBIGUOUS[i], AMBIGUOUS[j]) for i in range(len(digests)) for j in range(i) if digests[i] == digests[j]
    ]


def test_a_shared_object_is_a_copy_of_itself():
    shared = [1]
    assert hashed([shared, shared]) == hashed([[1], [1]])


def test_sharing_that_doubles_at_every_level_takes_no_time():
    value: Any = []
    for _ in range(200):
        value = [value, value]
    assert len(hashed(value)) == 16


def cyclic(last: Any) -> Any:
    inner: dict[str, Any] = {"last": last}
    value = [1, inner]
    inner["above"] = value
    return value


def test_what_contains_itself_is_hashed_by_what_it_contains():
    assert hashed(cyclic(1)) == hashed(cyclic(1)) != hashed(cyclic(2))
    one: list[Any] = []
    one.append(one)
    two: list[Any] = [[]]
    two[0].append(two)
    assert hashed(one) == hashed(two)  # no way through them tells which is which
    other: list[Any] = [[]]
    other[0].extend([other, other])
    assert hashed(other) != hashed(one)


def test_depth_has_no_limit():
    def deep(kind: Any, last: int) -> Any:
        value: Any = last
        for _ in range(5_000):
            value = kind(value)
        return value

    kinds = [lambda value: [value], lambda value: (value,), lambda value: {"a": value}, Linked]
    assert len({hashed(deep(kind, last)) for kind in kinds for last in (1, 2)}) == 8


class Linked:
    def __init__(self, below: Any) -> None:
        self.below = below


# --- objects ----------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Data:
    number: int
    more: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Other:
    number: int
    more: list[int] = dataclasses.field(default_factory=list)


class Slots:
    __slots__ = ("a", "b")
    a: int


class MyList(list[Any]):
    pass


class MySet(set[Any]):
    pass


class Stated:
    """What it is, it says itself."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value}


def slots(a: int) -> Slots:
    made = Slots()
    made.a = a
    return made


Pair = collections.namedtuple("Pair", "a b")
UTC = datetime.timezone.utc
MAKERS: list[Any] = [
    lambda: Colour.RED,
    lambda: Colour.BLUE,
    lambda: Number.ONE,
    lambda: 1,
    lambda: Data(1),
    lambda: Data(2),
    lambda: Data(1, [1]),
    lambda: Other(1),
    lambda: Data,
    lambda: Other,
    lambda: slots(1),
    lambda: slots(2),
    Slots,
    lambda: Pair(1, 2),
    lambda: Pair(2, 1),
    lambda: (1, 2),
    lambda: MyList([1]),
    lambda: MyList([2]),
    lambda: [1],
    lambda: MySet("abc"),
    lambda: MySet("ab"),
    lambda: set("abc"),
    lambda: collections.OrderedDict(a=1, b=2),
    lambda: collections.OrderedDict(b=2, a=1),
    lambda: {"a": 1, "b": 2},
    lambda: collections.Counter("aab"),
    lambda: collections.defaultdict(list, a=[1]),
    lambda: collections.defaultdict(lambda: [1], a=[1]),
    lambda: collections.deque([1, 2]),
    lambda: collections.deque([1, 2], 5),
    lambda: collections.ChainMap({"a": 1}),
    lambda: re.compile("a"),
    lambda: re.compile("a", re.I),
    lambda: re.compile(b"a"),
    lambda: pathlib.Path("a/b"),
    lambda: pathlib.PurePosixPath("a/b"),
    lambda: pathlib.PureWindowsPath("a/b"),
    lambda: "a/b",
    lambda: datetime.datetime(2020, 1, 2),
    lambda: datetime.datetime(2020, 1, 2, tzinfo=UTC),
    lambda: datetime.date(2020, 1, 2),
    lambda: datetime.timedelta(1),
    lambda: decimal.Decimal("1.0"),
    lambda: decimal.Decimal("1.00"),
    lambda: decimal.Decimal(1),
    lambda: fractions.Fraction(1, 2),
    lambda: uuid.UUID(int=1),
    lambda: random.Random(0),
    lambda: random.Random(1),
    lambda: np.random.default_rng(0),
    lambda: np.random.default_rng(1),
    lambda: np.random.RandomState(0),
    lambda: np.random.RandomState(1),
    lambda: np.random.PCG64(0),
    lambda: np.random.Generator(np.random.MT19937(0)),
    lambda: torch.Generator().manual_seed(0),
    lambda: torch.Generator().manual_seed(1),
    lambda: torch.float32,
    lambda: torch.float64,
    lambda: torch.device("cpu"),
    lambda: torch.device("meta"),
    lambda: torch.device("meta", 0),
    lambda: torch.Size([1]),
    lambda: [1, 2],
    lambda: torch.strided,
    lambda: torch.channels_last,
    lambda: np.dtype("f4"),
    lambda: np.dtype("f8"),
    lambda: np.float32(1),
    lambda: np.float64(1),
    lambda: 1.0,
    lambda: np.datetime64("2020"),
    lambda: array.array("i", [1]),
    lambda: array.array("i", [2]),
    lambda: io.BytesIO(b"a"),
    lambda: io.BytesIO(b"b"),
    lambda: Stated(1),
    lambda: Stated(2),
    lambda: memoryview(b"ab"),
    lambda: {"a": 1}.keys(),
    lambda: {"a": 1}.values(),
    lambda: {"a": 1}.items(),
    lambda: torch.ops.aten.sin,
    lambda: torch.ops.aten.sin.default,
    lambda: torch.sin,
    lambda: torch.Tensor.sin,
    lambda: np.sin,
    lambda: "".join,
    lambda: "a".join,
    lambda: [].append,
    lambda: torch,
    lambda: torch.nn,
    lambda: logging.getLogger("a"),
    lambda: list[int],
    lambda: dict[str, int],
    lambda: int | str,
    lambda: weakref.ref(Colour),
    lambda: __import__("types").MappingProxyType({"a": 1}),
    lambda: super(MyList, MyList()),
    lambda: torch.nn.Linear,
    lambda: TensorDict,
    lambda: Colour,
]


def test_objects_made_alike_are_the_same_and_others_differ():
    digests = [hashed(make()) for make in MAKERS]
    assert digests == [hashed(make()) for make in MAKERS]
    assert len(set(digests)) == len(MAKERS), [
        (MAKERS[i](), MAKERS[j]()) for i in range(len(digests)) for j in range(i) if digests[i] == digests[j]
    ]


def test_attributes_count_whatever_order_they_were_set_in():
    one, other = Linked(1), Linked(1)
    one.a, one.b = 1, 2  # type: ignore[attr-defined]
    other.b, other.a = 2, 1  # type: ignore[attr-defined]
    assert hashed(one) == hashed(other)
    other.b = 3  # type: ignore[attr-defined]
    assert hashed(one) != hashed(other)


def test_a_dict_that_an_object_has_is_hashed_in_its_order():
    assert hashed(Linked({"a": 1, "b": 2})) != hashed(Linked({"b": 2, "a": 1}))


def test_no_method_of_a_users_class_is_called_but_those_that_pickling_calls():
    class Touchy(dict[Any, Any]):
        def fail(self, *_: Any) -> Any:
            raise AssertionError("called")

        __eq__ = __hash__ = __repr__ = __len__ = __bool__ = __getitem__ = __contains__ = __getattr__ = fail  # type: ignore[assignment]

    assert hashed([Touchy()]) == hashed([Touchy()])


def test_an_update_adds_to_what_was_added_before():
    def joined(*values: Any) -> str:
        hasher = tdgpu_hasher()
        for value in values:
            hasher.update(value)
        return hasher.hexdigest()

    tdgpu_hasher = Hasher
    assert joined(1, "a") == joined(1, "a")
    assert len({joined(), joined(1), joined(1, "a"), joined("a", 1), joined((1, "a")), hashed((1, "a"))}) == 6
    assert all(re.fullmatch("[0-9a-f]{16}", text) for text in (joined(), joined(1), hashed(1)))


# --- tensors and arrays -----------------------------------------------------------------------------------------------

BASE = torch.arange(24.0).view(2, 3, 4)
TENSORS: dict[str, Any] = {
    "a tensor": lambda: BASE.clone(),
    "one bit": lambda: torch.cat([BASE.flatten()[:-1], torch.tensor([23.0]).nextafter(torch.tensor(0.0))]).view(
        2, 3, 4
    ),
    "another shape": lambda: BASE.reshape(2, 12),
    "another dtype": lambda: BASE.double(),
    "the same bytes": lambda: BASE.view(torch.int32),
    "with a gradient": lambda: BASE.clone().requires_grad_(),
    "a parameter": lambda: torch.nn.Parameter(BASE.clone()),
    "meta": lambda: BASE.to("meta"),
    "an array": lambda: BASE.numpy(),
    "a list": lambda: BASE.tolist(),
    "none": lambda: torch.empty(0, 3),
    "none of another shape": lambda: torch.empty(3, 0),
    "a scalar": lambda: torch.tensor(1.5),
    "one": lambda: torch.tensor([1.5]),
    "-0.0": lambda: torch.tensor([-0.0]),
    "0.0": lambda: torch.tensor([0.0]),
    "nan": lambda: torch.tensor([math.nan]),
    "bool": lambda: torch.tensor([True]),
    "bfloat16": lambda: torch.tensor([1.0], dtype=torch.bfloat16),
    "float16": lambda: torch.tensor([1.0], dtype=torch.float16),
    "float8": lambda: torch.tensor([1.0]).to(torch.float8_e4m3fn),
    "complex": lambda: torch.tensor([1 + 2j]),
    "conjugate": lambda: torch.tensor([1 - 2j]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "dense": lambda: torch.eye(3),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested otherwise": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
    "numbers": lambda: np.arange(3),
    "numbers of 32 bits": lambda: np.arange(3, dtype=np.int32),
    "of the other byte order": lambda: np.arange(3, dtype=">i8"),
    "objects": lambda: np.array([1, "a", [2]], dtype=object),
    "other objects": lambda: np.array([1, "a", [3]], dtype=object),
    "texts": lambda: np.array(["a", "bc"]),
    "times": lambda: np.array(["2020-01-01"], "M8[s]"),
    "times of days": lambda: np.array(["2020-01-01"], "M8[D]"),
    "fields": lambda: np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    "other fields": lambda: np.array([(1, 2.0)], [("a", "i4"), ("c", "f8")]),
    "fields of objects": lambda: np.array([(1, "x")], [("a", "i4"), ("b", object)]),
    "masked": lambda: np.ma.masked_array([1, 2], [True, False]),
    "masked otherwise": lambda: np.ma.masked_array([1, 2], [False, True]),
    "a module": lambda: linear(0),
    "other weights": lambda: linear(1),
    "a module that does not train": lambda: linear(0).eval(),
    "with a hook": lambda: hooked(),
    "a sequence": lambda: torch.nn.Sequential(linear(0), torch.nn.ReLU()),
    "a sequence backwards": lambda: torch.nn.Sequential(torch.nn.ReLU(), linear(0)),
}


def linear(seed: int) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return module


def hooked() -> torch.nn.Module:
    module = linear(0)
    module.register_forward_hook(hook)
    return module


def hook(*_: Any) -> None:
    pass


def test_tensors_arrays_and_modules_made_alike_are_the_same_and_others_differ():
    digests = {name: hashed(make()) for name, make in TENSORS.items()}
    assert digests == {name: hashed(make()) for name, make in TENSORS.items()}
    assert len(set(digests.values())) == len(TENSORS), sorted(digests.items(), key=lambda item: item[1])


STRIDED: dict[str, Any] = {
    "transposed": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
    "every other one": lambda t: torch.stack([t, -t], dim=-1)[..., 0],
    "a slice": lambda t: torch.cat([t, t])[: len(t)],
    "channels last": lambda t: t.unsqueeze(0).contiguous(memory_format=torch.channels_last).squeeze(0),
    "negated lazily": lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
}


@pytest.mark.parametrize("how", STRIDED)
def test_strides_do_not_count(how, monkeypatch):
    from tdgpu.cache import tensors

    for window in (1 << 20, 16):  # as a whole, and bit by bit
        monkeypatch.setattr(tensors, "_WINDOW", window)
        assert hashed(STRIDED[how](BASE.clone())) == hashed(BASE)
        assert hashed(STRIDED[how](BASE + 1)) != hashed(BASE)


def test_a_large_expanded_tensor_is_hashed_window_by_window():
    expanded = torch.ones(1).expand(1 << 16, 1 << 16)  # 16 GiB, if it were there
    assert hashed(expanded[:, :64]) == hashed(torch.ones(1 << 16, 64))


@pytest.mark.parametrize("how", [np.asfortranarray, lambda a: np.stack([a, -a], -1)[..., 0], lambda a: a[::-1][::-1]])
def test_strides_of_an_array_do_not_count(how):
    array = np.arange(24.0).reshape(2, 3, 4)
    assert hashed(how(array)) == hashed(array) != hashed(how(array + 1))


def test_what_lies_between_the_fields_of_an_array_does_not_count():
    layout = np.dtype({"names": ["a", "b"], "formats": ["i1", "i8"], "offsets": [0, 8], "itemsize": 16})
    one, other = np.zeros(16, np.uint8), np.zeros(16, np.uint8)
    other[3] = 1
    assert hashed(one.view(layout)) == hashed(other.view(layout))


def test_the_device_does_not_count(device):
    assert hashed(BASE.to(device)) == hashed(BASE)
    assert hashed(TensorDict(a=BASE, batch_size=[2], device=device)) == hashed(TensorDict(a=BASE, batch_size=[2]))


def test_a_tensor_that_is_mapped_is_a_tensor(tmp_path):
    saved = TensorDict(a=BASE, batch_size=[2]).memmap(tmp_path / "save")
    assert hashed(saved["a"]) == hashed(BASE)
    assert hashed(saved) == hashed(TensorDict(a=BASE, batch_size=[2]))
    mapped = np.memmap(tmp_path / "array", np.int64, "w+", shape=(3,))
    mapped[:] = [0, 1, 2]
    assert hashed(mapped) == hashed(np.arange(3))


def tensors_in(collection: Any) -> Iterator[torch.Tensor]:
    """The tensors that a tensordict holds, and not copies of them."""
    for below in getattr(collection, "tensordicts", ()):
        yield from tensors_in(below)
    inner = vars(collection).get("_tensordict", vars(collection).get("_source", ()))
    for value in inner.values() if isinstance(inner, dict) else [inner]:
        if isinstance(value, torch.Tensor):
            yield value
        elif hasattr(value, "_tensordict") or hasattr(value, "tensordicts"):
            yield from tensors_in(value)


@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in ("third_party", "view")])
def test_every_kind_of_tensordict_is_hashed_by_its_contents(name):
    one = BUILDERS[name]()
    before = hashed(one)
    assert before == hashed(BUILDERS[name]())
    for tensor in tensors_in(one):
        if tensor.numel() and not tensor.is_nested and tensor.is_contiguous():
            with torch.no_grad():
                tensor.view(-1).view(torch.uint8)[tensor.nbytes // 2] ^= 1
            assert hashed(one) != before
            before = hashed(one)


def test_hashing_a_large_tensor_or_text_takes_no_memory():
    status = Path("/proc/self/status")

    def peak() -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) >> 10

    tensor = torch.zeros(400 << 20, dtype=torch.uint8).fill_(1)
    text = "x" * (200 << 20)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present
    before = peak()
    hashed({"t": tensor, "a": tensor.numpy(), "view": tensor.view(-1, 2)[:, 0], "text": text})
    assert peak() - before < 100


def test_what_a_walk_could_not_hash_does_not_spoil_what_comes_after():
    from tdgpu.cache.graph import Unhashable

    one = walk()
    value: list[Any] = [[1], threading.Lock()]
    value.append(value)
    with pytest.raises(Unhashable):
        one.digest(value, ordered=True)
    value[1] = 2
    assert one.digest(value, ordered=True) == walk().digest(value, ordered=True)


def test_what_copy_remembers_on_a_class_does_not_count():
    class Point:
        __slots__ = ("x",)

    before = Hasher.hash(Point)
    copy.copy(Point())
    assert "__slotnames__" in Point.__dict__ and Hasher.hash(Point) == before
