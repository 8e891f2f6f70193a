"""The settings: what is in force, where it comes from, and that the page about them is true."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import fields
from pathlib import Path

import pytest

from tdgpu.errors import InvalidArgument
from tdgpu.options import Options, get, options

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
ENVIRONMENT = {option.metadata["env"] for option in fields(Options)}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for variable in ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)


def table() -> dict[str, tuple[str, str, str]]:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (env, default, meaning) for name, env, default, meaning in rows}


def default_text(option) -> str:
    """The default, as the page writes it."""
    if option.name == "threads":
        return "the CPUs of the process, 2 to 8"  # it depends on the machine
    value = getattr(Options(), option.name)
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if option.name.endswith("_bytes"):
        return f"{value >> 20} MiB"
    return f"`{value}`"


def test_the_page_lists_exactly_the_options():
    expected = {
        option.name: (option.metadata["env"], default_text(option), option.metadata["doc"])
        for option in fields(Options)
    }
    assert table() == expected


def test_the_default_number_of_threads_is_the_cpus_within_its_bounds(monkeypatch):
    for cpus, threads in ((1, 2), (4, 4), (96, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, cpus=cpus: set(range(cpus)))
        assert get().threads == threads


def test_the_block_comes_before_the_environment_and_the_environment_before_the_default(monkeypatch):
    assert get().chunk_bytes == 1 << 20
    monkeypatch.setenv("TDGPU_CHUNK_BYTES", "2M")
    assert get().chunk_bytes == 2 << 20
    with options(chunk_bytes=3 << 20) as now:
        assert now == get()
        assert now.chunk_bytes == 3 << 20
        with options(threads=2):
            assert (get().chunk_bytes, get().threads) == (3 << 20, 2)
    assert get().chunk_bytes == 2 << 20


def test_an_exception_in_the_block_ends_it():
    with pytest.raises(KeyError), options(threads=3):
        raise KeyError
    assert get() == Options()


def test_another_thread_does_not_see_the_block():
    seen = []
    with options(threads=3):
        thread = threading.Thread(target=lambda: seen.append(get().threads))
        thread.start()
        thread.join()
    assert seen == [Options().threads]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 65536),
        ("64k", 65536),
        ("64KiB", 65536),
        ("16M", 16 << 20),
        ("1.5 MiB", 3 << 19),
        ("1g", 1 << 30),
        ("1T", 1 << 40),
    ],
)
def test_sizes_have_units(monkeypatch, text, size):
    monkeypatch.setenv("TDGPU_RING_BYTES", text)
    assert get().ring_bytes == size


def test_the_error_about_a_size_shows_it_as_it_was_given(monkeypatch):
    monkeypatch.setenv("TDGPU_CHUNK_BYTES", "99999999999999999999")
    with pytest.raises(InvalidArgument, match=r"TDGPU_CHUNK_BYTES has a maximum of 1099511627776, got 9{20}"):
        get()


@pytest.mark.parametrize(("text", "flag"), [("1", True), ("Yes", True), ("on", True), ("0", False), ("FALSE", False)])
def test_flags_have_words(monkeypatch, text, flag):
    monkeypatch.setenv("TDGPU_DIRECT_IO", text)
    assert get().direct_io is flag


def test_an_empty_variable_counts_as_unset(monkeypatch):
    for variable in ENVIRONMENT:
        monkeypatch.setenv(variable, "")
    assert get() == Options()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("TDGPU_PATH", "fast"),
        ("TDGPU_RING_BYTES", "many"),
        ("TDGPU_RING_BYTES", "inf"),
        ("TDGPU_RING_BYTES", "M"),
        ("TDGPU_RING_BYTES", "1k"),
        ("TDGPU_RING_BYTES", "99999999999999999999"),
        ("TDGPU_RING_BYTES", "1025g"),
        ("TDGPU_CHUNK_BYTES", "-1"),
        ("TDGPU_CHUNK_BYTES", "99999999999999999999"),
        ("TDGPU_THREADS", "0"),
        ("TDGPU_THREADS", "257"),
        ("TDGPU_THREADS", "2.5"),
        ("TDGPU_DIRECT_IO", "maybe"),
        ("TDGPU_MAX_METADATA_BYTES", "0"),
    ],
)
def test_a_bad_value_names_its_variable(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(InvalidArgument, match=variable):
        get()


@pytest.mark.parametrize(
    ("variable", "takes"),
    [
        ("TDGPU_RING_BYTES", "a size in bytes, such as 16777216 or 16M"),
        ("TDGPU_DIRECT_IO", "1 or 0"),
        ("TDGPU_THREADS", "a whole number"),
    ],
)
def test_the_error_about_an_unreadable_value_says_what_can_be_read(monkeypatch, variable, takes):
    monkeypatch.setenv(variable, "x")
    with pytest.raises(InvalidArgument, match=f"{variable} has the value 'x'.*: it takes {takes}"):
        get()


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": "fast"},
        {"ring_bytes": 1},
        {"ring_bytes": (1 << 40) + 1},
        {"chunk_bytes": (1 << 40) + 1},
        {"threads": 0},
        {"threads": 1000},
        {"max_metadata_bytes": 0},
    ],
)
def test_a_bad_value_in_the_block_names_its_option(wrong):
    (name,) = wrong
    with pytest.raises(InvalidArgument, match=rf"options\({name}="), options(**wrong):
        pass
    assert get() == Options()


def test_an_unknown_option_lists_those_that_exist():
    with pytest.raises(InvalidArgument, match=r"no option 'treads'.*threads"), options(treads=2):
        pass


@pytest.mark.parametrize("value", ["16M", 1.5, None])
def test_a_value_of_the_wrong_type(value):
    with pytest.raises(TypeError, match="whole number"), options(ring_bytes=value):
        pass
