"""combine and Fingerprint: the parts, what changed in them, and what happens where something cannot be hashed."""

from __future__ import annotations

import json
import random
import re
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tdgpu.cache.fingerprint import MAX_PARTS, Fingerprint, changed, combine, fingerprint
from tdgpu.cache.hasher import FingerprintWarning, Hasher

SOURCE = "d19493523d95e2dc"


def mapped(function: Any, **arguments: Any) -> Fingerprint:
    return combine(SOURCE, "map", {"function": function, **arguments})


class Model:
    def __init__(self, rate: float = 0.5) -> None:
        self.rate = rate
        self.layers: list[torch.nn.Module] = [torch.nn.Linear(2, 2, device="meta")]
        self.calls = 0

    def run(self, row: Any) -> Any:
        return row * self.rate


def closure(model: Any) -> Any:
    return lambda row: model.run(row)


# --- what it depends on -----------------------------------------------------------------------------------------------


def test_it_is_sixteen_digits_of_the_source_the_transform_and_every_argument():
    variants = [
        combine(SOURCE, "map", {"a": 1}),
        combine(SOURCE[::-1], "map", {"a": 1}),
        combine(SOURCE, "filter", {"a": 1}),
        combine(SOURCE, "map", {"a": 2}),
        combine(SOURCE, "map", {"b": 1}),
        combine(SOURCE, "map", {"a": 1, "b": None}),
        combine(SOURCE, "map", {}),
    ]
    assert all(re.fullmatch("[0-9a-f]{16}", variant.digest) for variant in variants)
    assert len({variant.digest for variant in variants}) == len(variants)
    assert combine(SOURCE, "map", {"a": 1, "b": 2}) == combine(SOURCE, "map", {"b": 2, "a": 1})
    assert str(variants[0]) == variants[0].digest


def test_the_order_of_a_dict_among_the_arguments_counts_since_a_function_may_go_through_it():
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert mapped(len, options=one).digest != mapped(len, options=other).digest
    assert Hasher.hash(one) == Hasher.hash(other)


def test_a_transform_that_changes_itself_when_it_is_called_differs_afterwards():
    def function(row: Any, seen: list[Any] = []) -> Any:  # noqa: B006
        seen.append(row)

    before = mapped(function)
    assert mapped(function) == before
    function(1)
    assert changed(before, mapped(function)) == ["argument function: default seen[0]"]


def test_fingerprint_of_anything_is_its_hash():
    assert fingerprint([1, 2]) == Hasher.hash([1, 2])
    assert fingerprint(closure) == Hasher.hash(closure)


# --- parts ------------------------------------------------------------------------------------------------------------


def test_the_parts_survive_json():
    before = mapped(closure(Model()), batch_size=3)
    again = Fingerprint.from_dict(json.loads(json.dumps(before.as_dict())))
    assert (again, again.parts, again.unhashable) == (before, before.parts, None)
    assert before.parts["source"] == SOURCE and before.parts["transform"] == "map"


HELPER = 1


def helper(row: Any) -> Any:
    return row + HELPER


def calling(row: Any) -> Any:
    return helper(row)


def test_what_changed_is_named_where_it_is(monkeypatch):
    before = mapped(closure(Model()))
    assert changed(before, mapped(closure(Model()))) == []
    assert changed(before, mapped(closure(Model(0.25)))) == ["argument function: closure model.rate"]
    grown = Model()
    grown.layers.append(torch.nn.ReLU())
    names = changed(before, mapped(closure(grown)))
    assert names and all(name.startswith("argument function: closure model.layers[1]") for name in names)
    assert changed(before, mapped(closure(Model()), batch_size=2)) == ["argument batch_size"]
    assert changed(before, combine("0" * 16, "map", {"function": closure(Model())})) == ["source"]
    assert changed(mapped(lambda row: row + 1), mapped(lambda row: row + 2)) == ["argument function: code"]

    before = mapped(lambda row: helper(row))
    monkeypatch.setitem(globals(), "HELPER", 2)
    assert (
        changed(before, mapped(lambda row: helper(row))) == ["argument function: global helper: global HELPER"]
        or changed(before, mapped(lambda row: helper(row))) == []
    )  # two lambdas of one body are the same


def test_a_value_that_every_run_has_anew_is_named():
    """As of datasets#7986: a closure over self, in which something counts."""
    model = Model()
    before = mapped(model.run)
    model.calls += 1
    assert changed(before, mapped(model.run)) == ["argument function.__self__.calls"]


def test_settings_in_a_dict_are_named_by_their_keys():
    before = mapped(len, settings={"lr": 1, "names": ["a", "b"]})
    assert changed(before, mapped(len, settings={"lr": 2, "names": ["a", "b"]})) == ["argument settings['lr']"]
    assert changed(before, mapped(len, settings={"lr": 1, "names": ["a", "c"]})) == ["argument settings['names'][1]"]


def test_the_parts_are_bounded():
    value = {f"key{i}": {f"inner{j}": [j] for j in range(100)} for i in range(100)}
    assert MAX_PARTS <= len(combine(SOURCE, "map", {"value": value}).parts) < MAX_PARTS + 20


def test_a_part_that_is_a_text_is_not_stored():
    assert "secret" not in json.dumps(mapped(len, token="secret", more={"secret2": 1, "a": "secret3"}).parts).replace(
        "secret2", ""
    )


# --- what cannot be hashed --------------------------------------------------------------------------------------------


def random_and_named(value: Any, expected: str) -> None:
    with pytest.warns(FingerprintWarning) as caught:
        first, second = mapped(value), mapped(value)
    assert len(caught) == 2  # one each
    assert first.digest != second.digest
    assert re.search(expected, str(caught[0].message)), str(caught[0].message)
    assert first.unhashable is not None and re.search(expected, first.unhashable)
    assert caught[0].filename == __file__


def locked() -> Model:
    model = Model()
    model.lock = threading.Lock()  # type: ignore[attr-defined]
    return model


def deep() -> Any:
    holder = types.SimpleNamespace(inner=[{"a": locked()}])

    def function(row: Any) -> Any:
        return holder.inner

    return function


def with_default(row: Any, lock: Any = threading.Lock()) -> Any:  # noqa: B008
    return lock


LOCK = threading.RLock()


def with_global(row: Any) -> Any:
    return LOCK


class WithLock:
    lock = threading.Lock()


UNHASHABLE: dict[str, tuple[Any, str]] = {
    "a closure": (
        lambda: closure(locked()),
        r"closure `model\.lock` of <function <lambda> at test_fingerprint\.py:\d+>",
    ),
    "deep inside": (
        deep,
        r"closure `holder\.inner\[0\]\['a'\]\.lock` of <function function at test_fingerprint\.py:\d+>",
    ),
    "a default": (lambda: with_default, r"default `lock` of <function with_default at test_fingerprint\.py:\d+>"),
    "a global": (lambda: with_global, r"global `LOCK` of <function with_global at test_fingerprint\.py:\d+>"),
    "of a global function": (lambda: lambda row: with_global(row), r"global `LOCK` of <function with_global"),
    "self": (lambda: locked().run, r"`function\.__self__\.lock`, <a lock>"),
    "a class": (lambda: lambda row: WithLock, r"global `WithLock\.lock` of <function <lambda>"),
    "itself": (lambda: threading.Lock(), r"`function`, <a lock>.*cannot pickle"),
    "an open file": (lambda: open(__file__), r"`function`, <a TextIOWrapper>"),  # noqa: SIM115
    "a generator": (lambda: [1, (x for x in [1])], r"`function\[1\]`, <a generator>"),
    "a thread": (lambda: threading.current_thread(), r"`function\._\w+"),
    "an object that fails": (lambda: Failing(), r"ZeroDivisionError: on purpose"),
}


class Failing:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("case", UNHASHABLE)
def test_it_is_random_and_the_warning_names_the_object_and_its_attribute(case):
    make, expected = UNHASHABLE[case]
    random_and_named(make(), expected)


def test_an_operator_that_anybody_could_have_registered_is_not_taken_for_one_of_a_library():
    library = torch.library.Library("tdgpu_tests", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    random_and_named(lambda row: torch.ops.tdgpu_tests.twice(row), r"torch\.ops\.tdgpu_tests cannot be looked into")
    random_and_named(torch.ops.tdgpu_tests.twice, r"torch\.ops\.tdgpu_tests cannot be looked into")


def test_two_things_that_cannot_be_hashed_are_one_warning():
    with pytest.warns(FingerprintWarning) as caught:
        found = mapped(closure(locked()), other=threading.Lock())
    assert len(caught) == 1
    assert "closure `model.lock`" in str(caught[0].message) and "`other`" in str(caught[0].message)
    assert found.parts["argument other"] == "cannot be hashed"


def test_a_hash_of_what_cannot_be_hashed_is_random_and_warns_once():
    with pytest.warns(FingerprintWarning, match=r"`value\[0\]`, <a lock>, cannot be hashed") as caught:
        one = Hasher.hash([threading.Lock()])
    assert len(caught) == 1 and re.fullmatch("[0-9a-f]{16}", one)


def test_a_random_fingerprint_moves_no_generator_on():
    states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mapped(threading.Lock())
    assert states == (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())


def test_the_example_in_the_documentation_is_true(tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs" / "cache.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, "docs/cache.md", "exec", dont_inherit=True), {"__name__": "example"})
