"""The fast reading of metadata gives what json gives, or leaves it to json."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdgpu.layout.scan import loads

ENTRY = '{"device": "cpu", "shape": [2, 3], "dtype": "torch.int8", "is_nested": false}'
OTHER = '{"device": "cuda:0", "shape": [], "dtype": "torch.bool", "is_nested": false}'
TAIL = '"shape": [], "device": "cpu", "_type": "T"}'


def same(text: str | bytes) -> None:
    """Equal values, equal types, equal order: or the same error."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    try:
        wanted = json.loads(data)
    except (ValueError, RecursionError) as error:
        with pytest.raises(type(error)):
            loads(data)
        return
    assert json.dumps(loads(data)) == json.dumps(wanted)  # True is not 1 there, and the order counts


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", "null", "{", '{"a": ' + ENTRY, '{"a": ' + ENTRY + "}", '{"a": ' + ENTRY + ", }",
        '{"a": ' + ENTRY + ", " + TAIL, '{"a": ' + ENTRY + ', "a": ' + OTHER + ", " + TAIL,
        '{"a": ' + ENTRY + ', "shape": ' + OTHER + ", " + TAIL, '{"shape": ' + ENTRY + ", " + TAIL,
        '{"x": 5, "is_nested": false}, ' + TAIL, '{"x": {"y": ' + ENTRY + ', "z": 1}, ' + TAIL,
        '{"c": {"type": "TensorDict"}, "a": ' + ENTRY + ", " + TAIL, '{"a": ' + ENTRY + ', "c": {"type": "T"}, ' + TAIL,
        '{"a\\"b": ' + ENTRY + ", " + TAIL, '{"a\\u0041": ' + ENTRY + ", " + TAIL, '{"\n": ' + ENTRY + ", " + TAIL,
        '{"é": ' + ENTRY + ", " + TAIL, '{"": ' + ENTRY + ", " + TAIL, '{ "a": ' + ENTRY + ", " + TAIL,
        '{"a": ' + ENTRY + ",  " + TAIL, '{"a": {"is_nested": false}, "is_nested": false}, ' + TAIL,
        '{"a": {}, "b": {"is_nested": false}, ' + TAIL, '{"a": ' + ENTRY.replace("2", "01") + ", " + TAIL,
        '{"a": ' + ENTRY.replace("2", "true") + ', "b": ' + ENTRY.replace("2", "1") + ", " + TAIL,
        '{"a": ' + ENTRY.replace("2", "NaN") + ", " + TAIL, '{"\ud800": ' + ENTRY + ", " + TAIL,
        '{"a": ' + ENTRY + ", " + "[" * 100_000,
    ],
)  # fmt: skip
def test_it_is_json(text):
    same(text)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "latin-1"])
def test_other_encodings(encoding):
    same(('{"é": ' + ENTRY + ", " + TAIL).encode(encoding))


SYNTAX = [", ", ",", " ", "{", "}", "}, ", "5", '"', "\\", "\n", '"a": ', '"b": ', '"a": {', '"is_nested": false}, ']
PARTS = st.sampled_from([*SYNTAX, ENTRY, OTHER, ENTRY[1:], TAIL])


def test_it_is_json_with_bytes_missing():
    text = '{"a": ' + ENTRY + ', "b": ' + OTHER + ", " + TAIL
    for length in range(1, 6):
        for start in range(len(text)):
            same(text[:start] + text[start + length :])


@settings(max_examples=400, deadline=None)
@given(st.lists(PARTS, max_size=12).map(lambda parts: "{" + "".join(parts)))
def test_it_is_json_for_shuffled_parts(text):
    same(text)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.sampled_from([ENTRY, OTHER, '{"type": "T"}', "1"]), max_size=8))
def test_it_is_json_for_any_keys(members):
    same("{" + "".join(f"{json.dumps(key, ensure_ascii=False)}: {value}, " for key, value in members.items()) + TAIL)


def test_equal_entries_are_one_object():
    meta = loads(('{"a": ' + ENTRY + ', "b": ' + OTHER + ', "c": ' + ENTRY + ", " + TAIL).encode())
    assert meta["a"] is meta["c"] is not meta["b"]
