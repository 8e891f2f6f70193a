"""Inflates small entries in memory, with what Python has: never more than the archive's directory promised."""

from __future__ import annotations

import bz2
import importlib
import io
import lzma
import struct
import zlib
from typing import Any

__all__ = ["METHODS", "Damaged", "Unavailable", "inflate"]

#: The methods that can be read, as zip numbers them.
METHODS = {0: "stored", 8: "deflate", 12: "bzip2", 14: "lzma", 93: "zstd"}


class Damaged(Exception):
    """The bytes are not what was compressed."""


class Unavailable(Exception):
    """This Python lacks what inflates the method."""


def inflate(method: int, data: bytes, nbytes: int) -> bytes:
    """The inflated bytes of an entry.

    Args:
        method: one of :data:`METHODS`.
        data: its compressed bytes.
        nbytes: how many it must inflate to.

    Raises:
        Damaged: it inflates to fewer or more, or not at all.
        Unavailable: zstd, where neither Python nor the package ``zstandard`` has it.

    >>> inflate(8, zlib.compress(b"abc", wbits=-15), 3)
    b'abc'
    """
    if method == 0:
        found = data
    else:
        try:
            # One byte more than promised tells a longer stream from one that fits.
            found = _INFLATERS[method](data, nbytes + 1)
        except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
            raise Damaged(f"it does not inflate: {error}") from error
    if len(found) != nbytes:
        raise Damaged(f"it inflates to {'more' if len(found) > nbytes else len(found)}")
    return found


def _deflate(data: bytes, limit: int) -> bytes:
    inflater = zlib.decompressobj(wbits=-15)
    return _ended(inflater, inflater.decompress(data, limit), limit)


def _bzip2(data: bytes, limit: int) -> bytes:
    inflater = bz2.BZ2Decompressor()
    return _ended(inflater, inflater.decompress(data, max_length=limit), limit)


def _lzma(data: bytes, limit: int) -> bytes:
    """The form that zip uses: version, size of the properties, the properties (5 bytes), a raw stream."""
    if len(data) < 9 or struct.unpack_from("<H", data, 2)[0] != 5:
        raise Damaged("it does not begin as lzma")
    packed, dictionary = struct.unpack_from("<BL", data, 4)
    properties = {
        "id": lzma.FILTER_LZMA1,
        "lc": packed % 9,
        "lp": packed // 9 % 5,
        "pb": packed // 45,
        # It is allocated at once: no more of it than the bytes that can ever be looked back at.
        "dict_size": max(min(dictionary, limit), 4096),
    }
    inflater = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[properties])
    # Such a stream may have no end mark; then it ends where the promised bytes do.
    return inflater.decompress(data[9:], max_length=limit)


def _zstd(data: bytes, limit: int) -> bytes:
    try:
        module: Any = importlib.import_module("compression.zstd")
    except ImportError:
        return _zstandard(data, limit)
    inflater = module.ZstdDecompressor()
    try:
        return _ended(inflater, inflater.decompress(data, max_length=limit), limit)
    except module.ZstdError as error:
        raise Damaged(f"it does not inflate: {error}") from error


def _zstandard(data: bytes, limit: int) -> bytes:
    try:
        module: Any = importlib.import_module("zstandard")
    except ImportError:
        raise Unavailable("zstd needs Python 3.14 or the package zstandard") from None
    try:
        with module.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=False) as reader:
            found: bytes = reader.read(limit)
        return found
    except module.ZstdError as error:
        raise Damaged(f"it does not inflate: {error}") from error


def _ended(inflater: Any, found: bytes, limit: int) -> bytes:
    if len(found) < limit and not inflater.eof:
        raise Damaged("its stream has no end")
    if inflater.unused_data:
        raise Damaged("there is something behind the end of its stream")
    return found


_INFLATERS = {8: _deflate, 12: _bzip2, 14: _lzma, 93: _zstd}
