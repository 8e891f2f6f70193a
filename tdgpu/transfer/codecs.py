"""Where the native core finds the libraries that it inflates with.

They are loaded when a load first needs them. Two come with packages that tdgpu depends on; the others are those that
Python's own modules were built with, or the system's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator

from tdgpu.errors import DeviceError, NotSupported
from tdgpu.transfer import native

# Zip's numbers of the methods.
STORED, DEFLATE, BZIP2, LZMA, ZSTD = 0, 8, 12, 14, 93

# Of libdeflate every method needs the CRC-32.
_NEEDED = {
    STORED: ("libdeflate",),
    DEFLATE: ("libdeflate", "zlib"),
    BZIP2: ("libdeflate", "bzip2"),
    LZMA: ("libdeflate", "lzma"),
    ZSTD: ("libdeflate", "zstd"),
}

# Modules whose shared library has the functions, or was linked with what has them; then the names of the system's own.
PLACES = {
    "libdeflate": (("deflate._deflate",), (), "the Python package deflate"),
    "zlib": (("zlib_ng.zlib_ng",), (), "the Python package zlib-ng"),
    "bzip2": (("_bz2",), ("libbz2.so.1.0", "libbz2.so.1"), "the system's libbz2"),
    "lzma": (("_lzma",), ("liblzma.so.5",), "the system's liblzma"),
    "zstd": (("_zstd",), ("libzstd.so.1",), "the system's libzstd"),
}


def require(methods: Iterable[int]) -> None:
    """Makes sure that the core can inflate these methods.

    Raises:
        NotSupported: the method is unknown, or its library is not on this machine.
    """
    for method in methods:
        if method not in _NEEDED:
            raise NotSupported(f"Entries compressed by the zip method {method} cannot be inflated.")
        for codec in _NEEDED[method]:
            find(codec)


@functools.cache
def find(codec: str) -> str:
    """Loads a library into the core, and tells which one.

    Raises:
        NotSupported: there is none.
    """
    reasons = []
    for path in _candidates(codec):
        try:
            native.load_codec(codec, path)
        except DeviceError as error:
            reasons.append(error.message)
        else:
            return path
    remedy = PLACES[codec][2]
    raise NotSupported(f"{codec} is needed to read this archive: install {remedy}. {' '.join(reasons)}".rstrip())


def _candidates(codec: str) -> Iterator[str]:
    modules, names, _ = PLACES[codec]
    for name in modules:
        try:
            path = getattr(importlib.import_module(name), "__file__", None)
        except ImportError:
            continue
        if path is not None:  # None: built into the interpreter
            yield path
    yield from names
