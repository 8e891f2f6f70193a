"""Plain values as bytes, without ambiguity: a value of another type or another value never has the same bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import xxhash

__all__ = ["digest", "frame", "raw", "scalar"]

#: Longer texts and byte strings are told by their digest.
_LONG = 1 << 10
_SLICE = 1 << 20


def digest(*parts: bytes) -> bytes:
    """The 16 bytes that name a sequence of byte strings. Where one ends and the next begins counts.

    >>> digest(b"ab", b"c") == digest(b"a", b"bc")
    False
    """
    return xxhash.xxh3_128_digest(b"".join(map(frame, parts)))


def frame(data: bytes) -> bytes:
    """The bytes, preceded by how many they are."""
    return len(data).to_bytes(8, "little") + data


def raw(data: bytes) -> bytes:
    """Bytes, such as a digest, in a form that no value of :func:`scalar` has, and that says where it ends."""
    return b"D" + frame(data)


def scalar(value: Any) -> bytes | None:
    """The bytes that stand for a value of a plain type, which say where they end; None for any other type.

    Subclasses are other types: an ``IntEnum`` is no int here, and a bool is not the int that it equals.

    >>> scalar(1) == scalar(True), scalar(1) == scalar(1.0), scalar("a") == scalar(b"a"), scalar([])
    (False, False, False, None)
    """
    encode = _ENCODERS.get(type(value))
    return None if encode is None else encode(value)


def _int(value: int) -> bytes:
    return b"i" + frame(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _str(value: str) -> bytes:
    if len(value) <= _LONG:
        return b"s" + frame(value.encode("utf-8", "surrogatepass"))
    state = xxhash.xxh3_128()
    for start in range(0, len(value), _SLICE):  # never a second copy of the whole
        state.update(value[start : start + _SLICE].encode("utf-8", "surrogatepass"))
    return b"S" + struct.pack("<Q", len(value)) + state.digest()


def _bytes(tag: bytes) -> Callable[[bytes | bytearray], bytes]:
    def encode(value: bytes | bytearray) -> bytes:
        if len(value) <= _LONG:
            return tag + b"s" + frame(bytes(value))
        return tag + b"l" + struct.pack("<Q", len(value)) + xxhash.xxh3_128_digest(value)

    return encode


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"T" if value else b"F",
    type(...): lambda _: b"E",
    type(NotImplemented): lambda _: b"X",
    int: _int,
    # All bits: -0.0 is not 0.0, and a NaN is itself.
    float: lambda value: b"f" + struct.pack("<d", value),
    complex: lambda value: b"c" + struct.pack("<dd", value.real, value.imag),
    str: _str,
    bytes: _bytes(b"b"),
    bytearray: _bytes(b"B"),
}
