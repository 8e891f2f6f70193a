"""Reading ``meta.json``: nothing in it is believed before it is checked."""

from __future__ import annotations

import math
from typing import Any

import torch

from tdgpu.errors import TdgpuError
from tdgpu.layout import scan
from tdgpu.layout.files import Where
from tdgpu.layout.tree import Shape

__all__ = ["INT64_MAX", "MAX_STACKED", "ShapeChecker", "names", "parse", "saved_device", "stack_dim"]

INT64_MAX = 2**63 - 1

#: Lazy stacks inside one another. tensordict takes twice as long for each more: seconds at 24, years at 48.
MAX_STACKED = 16
_VERSION = 1

# Every dtype of torch by the name that tensordict writes. A quantized tensor's scale is not saved, so its bytes alone
# are no tensor.
DTYPES = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.qint", "torch.quint"))
}


def parse(data: bytes, where: Where) -> dict[str, Any]:
    """The JSON object of a ``meta.json``.

    Raises:
        FormatError: it is not JSON, not an object, nested too deeply, or of a newer format version.
    """
    try:
        meta = scan.loads(data)
    except RecursionError:
        raise where.malformed("The metadata is nested too deeply.") from None
    except ValueError as error:
        raise where.malformed(f"The metadata is not JSON: {error}.") from error
    if type(meta) is not dict:
        raise where.malformed(f"The metadata is not a JSON object but a {type(meta).__name__}.")
    version = meta.get("_format_version", 0)
    if isinstance(version, int) and version > _VERSION:  # a leaf of that name has a dict here
        raise where.malformed(
            f"The save has format version {version}; this version of tdgpu reads versions up to {_VERSION}."
        )
    return meta


class ShapeChecker:
    """Checks the shapes and dtypes of one level."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._seen: dict[tuple[object, ...], tuple[Shape, torch.dtype, int]] = {}

    def fail(self, key: str | None, what: str) -> TdgpuError:
        """The error for the leaf ``key`` of this level, or for the level itself."""
        if key is None:
            return self._where.malformed(f"The level {what}.")
        return self._where._replace(key=(*self._where.key, key)).malformed(f"The leaf {what}.")

    def shape(self, key: str | None, raw: object) -> Shape:
        """The shape that JSON gave as ``raw``."""
        if type(raw) is not list or not all(type(size) is int for size in raw):  # bool is no int here
            raise self.fail(key, f"has a shape that is not a list of integers: {_short(raw)}")
        if raw and min(raw) < 0:
            raise self.fail(key, f"has a negative shape: {_short(raw)}")
        # Strides multiply what is not zero, so a tensor without elements can be too large as well.
        if math.prod(size or 1 for size in raw) > INT64_MAX:
            raise self.fail(key, f"has a shape that is too large for an int64: {_short(raw)}")
        return tuple(raw)

    def leaf(self, key: str, raw_shape: object, raw_dtype: object) -> tuple[Shape, torch.dtype, int]:
        """Shape, dtype and bytes of a leaf. Most leaves of a save share a few: those that were seen are remembered."""
        seen: tuple[object, ...] | None = None
        if type(raw_shape) is list and type(raw_dtype) is str:
            for size in raw_shape:
                if type(size) is not int:  # True and 1.0 are equal to 1, and would be found as if they were
                    break
            else:
                seen = (raw_dtype, *raw_shape)
                known = self._seen.get(seen)
                if known is not None:
                    return known
        shape = self.shape(key, raw_shape)
        dtype = DTYPES.get(raw_dtype) if type(raw_dtype) is str else None
        if dtype is None:
            raise self.fail(key, f"has the dtype {_short(raw_dtype)}, which this torch cannot load from bytes")
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > INT64_MAX:
            raise self.fail(key, f"has {nbytes} bytes, too many for an int64")
        assert seen is not None
        self._seen[seen] = found = (shape, dtype, nbytes)
        return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- the fields of a level --------------------------------------------------------------------------------------------


def saved_device(raw: object, where: Where) -> torch.device | None:
    """The device that a level was saved with, or None."""
    if raw == "None":
        return None
    try:
        if not isinstance(raw, str):
            raise TypeError("it is not a string")
        return torch.device(raw)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise where.malformed(f"The saved device {_short(raw)} is not one that torch knows: {reason}.") from error


def names(raw: object, ndim: int, where: Where) -> list[str | None] | None:
    """The names of the ``ndim`` batch dimensions, or None."""
    if not isinstance(raw, list):  # a leaf of that name has a dict here
        return None
    given = [name for name in raw if name is not None]
    if len(raw) != ndim or not all(isinstance(name, str) for name in given) or len(set(given)) != len(given):
        raise where.malformed(f"The names {_short(raw)} do not name {ndim} batch dimensions.")
    return raw


def stack_dim(raw: object, where: Where) -> int:
    """The dimension along which a lazy stack stacks its members."""
    if type(raw) is not int:
        raise where.malformed(f"The stack_dim of a lazy stack is not an integer: {_short(raw)}.")
    return raw
