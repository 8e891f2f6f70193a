"""Why a lookup hit or missed, in words."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import cache_at, make
from tensordict import TensorDict

from tdgpu import MemmapDataset
from tdgpu.cache import switch
from tdgpu.cache.directory import obtain
from tdgpu.cache.explain import Explanation, explain
from tdgpu.cache.fingerprint import Fingerprint, combine, fingerprint
from tdgpu.cache.parts import of_dataset, with_source

SOURCE = "d19493523d95e2dc"
FACTOR = 2


def by_two(x: float) -> float:
    return x * 2


def by_three(x: float) -> float:
    return x * 3


helper = by_two


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> Iterator[Path]:
    with cache_at(tmp_path / "cache") as root:
        yield root


def scaled(scale: float) -> Callable[[Any], Any]:
    return lambda row: row["a"] * scale * FACTOR


def helped(row: Any) -> Any:
    return helper(row["a"])


def mapped(function: Any = helped, **arguments: Any) -> Fingerprint:
    return combine(SOURCE, "map", {"function": function, "batch_size": 10, **arguments})


def changes(before: Fingerprint, after: Fingerprint) -> list[str]:
    """What is said of a miss, where there is a result of another fingerprint."""
    obtain(before, make)
    found = explain(after)
    assert not found.is_hit
    assert found.closest == before.digest
    assert found.reason == "compared with the closest result, other are:"
    return list(found.changes)


def test_a_closure_that_has_changed():
    assert changes(mapped(scaled(0.5)), mapped(scaled(0.25))) == ["closure `scale`: 0.25 instead of 0.5"]


def test_the_code_of_a_helper_that_has_changed(monkeypatch):
    before = mapped()
    monkeypatch.setitem(globals(), "helper", by_three)
    found = changes(before, mapped())
    assert "code of global `helper`" in found


def test_a_global_that_has_changed(monkeypatch):
    before = mapped(scaled(1))
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert changes(before, mapped(scaled(1))) == ["global `FACTOR`: 3 instead of 2"]


def test_the_code_of_the_function_itself():
    found = changes(mapped(lambda row: row["a"]), mapped(lambda row: row["b"]))
    assert found == ["code of argument `function`"]


def test_an_argument_that_has_changed_is_said_with_both_values():
    assert changes(mapped(), mapped(batch_size=20)) == ["argument `batch_size`: 20 instead of 10"]


def test_an_argument_that_is_new():
    assert changes(mapped(), mapped(drop=True)) == ["argument `drop`: new"]


def test_an_argument_that_is_gone():
    assert changes(mapped(drop=True), mapped()) == ["argument `drop`: not there any more"]


def test_texts_are_not_told_since_they_may_be_secrets():
    assert changes(mapped(token="abc"), mapped(token="def")) == ["argument `token`"]


def test_another_version_of_torch(monkeypatch):
    before = mapped()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert changes(before, mapped()) == [f"torch: 2.99.0 instead of {before.parts['torch']}"]


def test_an_attribute_of_an_object():
    class Model:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        def run(self, row: Any) -> Any:
            return row["a"] * self.rate

    before, after = mapped(Model(1.0).run), mapped(Model(2.0).run)
    assert changes(before, after) == ["argument `function.__self__.rate`: 2.0 instead of 1.0"]


def saved(path: Path, **values: Any) -> MemmapDataset:
    TensorDict(values, batch_size=[3]).memmap(path)
    return MemmapDataset(path)


def test_the_leaf_of_the_source_that_has_changed(tmp_path):
    datasets = [
        saved(tmp_path / name, a=torch.arange(3), n={"b": torch.full((3,), value)})
        for name, value in (("one", 1.0), ("two", 2.0))
    ]
    sources = [of_dataset(dataset) for dataset in datasets]
    assert [source.digest for source in sources] == [fingerprint(dataset) for dataset in datasets]
    before, after = (with_source(combine(source.digest, "map", {"n": 1}), source) for source in sources)
    assert changes(before, after) == ["source: content of leaf `n/b`"]
    # Likewise two steps further on.
    before, after = (with_source(combine(one.digest, "filter", {}), one) for one in (before, after))
    assert changes(before, after) == ["source: source: content of leaf `n/b`"]


def test_a_source_of_which_the_parts_are_not_known():
    assert changes(combine(SOURCE, "map", {}), combine("0" * 15 + "1", "map", {})) == ["source: its content"]


def test_the_fingerprint_of_a_dataset_that_cannot_be_hashed_is_random_and_says_why(tmp_path, monkeypatch):
    class Frame(dict):
        def __reduce__(self) -> Any:
            raise TypeError("no")

    dataset = saved(tmp_path / "save", a=torch.arange(3))
    monkeypatch.setattr("tdgpu.cache.content.contents", lambda _dataset: (Frame(),))
    with pytest.warns(UserWarning, match="cannot be hashed"):
        found = of_dataset(dataset)
    assert found.unhashable is not None
    assert found.parts == {}


def test_a_hit():
    wanted = mapped()
    obtain(wanted, make)
    found = explain(wanted)
    assert found.is_hit
    assert found.reason.endswith("there is no other result of map before it")
    assert str(found).startswith(f"{wanted.digest}: hit; built ")


def test_of_a_result_that_is_there_its_name_alone_tells_why_it_was_built():
    obtain(mapped(), make)
    time.sleep(0.01)
    obtain(mapped(batch_size=20), make)
    obtain(mapped(batch_size=30), make)  # later: it has no part in that
    found = explain(mapped(batch_size=20).digest)
    assert (found.is_hit, found.closest) == (True, mapped().digest)
    assert found.changes == ("argument `batch_size`: 20 instead of 10",)
    assert str(found).endswith("other are:\n    argument `batch_size`: 20 instead of 10")


def test_a_name_that_is_not_there():
    found = explain("0" * 16)
    assert (found.is_hit, found.reason) == (False, "there is none of that name")


def test_the_closest_is_that_with_most_parts_in_common_and_of_the_same_transform():
    obtain(mapped(batch_size=11, drop=True), make)
    obtain(mapped(batch_size=12), make)
    obtain(combine(SOURCE, "filter", {"function": helped, "batch_size": 13}), make)
    assert explain(mapped(batch_size=13)).closest == mapped(batch_size=12).digest
    assert explain(combine(SOURCE, "sort", {})).reason == "there is no other result of sort"


def test_a_result_that_was_changed_or_damaged():
    path = obtain(mapped(), make).path
    (path / "a.memmap").write_bytes(b"")
    found = explain(mapped())
    assert not found.is_hit
    assert found.reason == "there is a result of that name, but save/a.memmap has another size"
    obtain(mapped(), make)
    assert "because of what was there before: save/a.memmap has another size" in explain(mapped()).reason


def test_what_cannot_be_hashed_says_so():
    class Processor:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def run(self, row: Any) -> Any:
            with self.lock:
                return row

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processor = Processor()
        wanted = mapped(lambda row: processor.run(row))
    found = explain(wanted)
    assert found.reason.startswith("built anew each time, because closure `processor.lock` of <function <lambda>")


def test_while_caching_is_disabled_nothing_is_found():
    obtain(mapped(), make)
    switch.disable_caching()
    try:
        assert explain(mapped()) == Explanation(
            mapped().digest, False, "built anew each time, because caching is disabled"
        )
    finally:
        switch.enable_caching()


def test_a_long_list_of_changes_is_cut():
    before = Fingerprint("1" * 16, {"transform": "map", **{f"argument {i}": "1" for i in range(40)}})
    after = Fingerprint("2" * 16, {"transform": "map", **{f"argument {i}": "2" for i in range(40)}})
    assert len(changes(before, after)) == 40
    lines = str(explain(after)).splitlines()
    assert lines[-1].strip() == "and 28 more"
    assert len(lines) == 14


def test_fingerprints_that_differ_beyond_the_parts_that_are_kept():
    before, after = (Fingerprint(digit * 16, {"transform": "map"}) for digit in "12")
    obtain(before, make)
    assert "very many parts" in explain(after).reason


def of_map(dataset: Any, function: Callable[[Any], Any] = lambda row: {"y": row["a"] + 1}) -> Explanation:
    """Why the result of a map was built, or was there."""
    return explain(dataset.map(function).fingerprint)


def test_what_has_made_a_map_compute_again(tmp_path):
    dataset = saved(tmp_path / "save", a=torch.arange(3), n={"b": torch.zeros(3)})
    assert of_map(dataset).closest is None
    with open(tmp_path / "save" / "n" / "b.memmap", "r+b") as file:
        file.write(b"\x01")
    assert of_map(dataset).changes == ("source: content of leaf `n/b`",)
    assert of_map(dataset.select([0, 2])).changes == ("source: step 1, select: new",)
    assert of_map(dataset.select([2, 0])).changes == ("source: step 1, select",)
    assert of_map(dataset, lambda row: {"y": row["a"] + 2}).changes == ("code of argument `function`",)


def test_autocast_is_part_of_what_a_function_finds():
    before = mapped()
    with torch.autocast("cpu", torch.bfloat16):
        after = mapped()
        with torch.autocast("cpu", torch.float16):
            other = mapped()
    assert len({before.digest, after.digest, other.digest}) == 3 and mapped() == before
    assert [name.partition(":")[0] for name in changes(before, after)] == ["autocast"]
