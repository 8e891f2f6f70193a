"""Every setting, with its environment variable beside it.

Settings are read when a transfer engine is made or a load begins, never at import. Precedence: ``options(...)`` around
the call, then the environment, then the default.

>>> with options(threads=2):
...     get().threads
2
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from tdgpu.errors import InvalidArgument, InvalidArgumentType

__all__ = ["Options", "get", "options", "parse_size"]

MiB = 1 << 20
TiB = 1 << 40


def parse_size(text: str) -> int:
    """Bytes, from ``"16777216"``, ``"16M"``, ``"16MiB"``, ``"1g"`` or ``"1T"``."""
    units = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:] in units else ""
    number = number.removesuffix(unit).strip()
    # A whole number stays exact: a float would round it.
    return int((int(number) if number.isdecimal() else float(number)) * units[unit])


def _flag(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    return known[text.strip().lower()]


# What each parser reads, for the error about a value that it cannot read.
READABLE: dict[Callable[[str], Any], str] = {
    parse_size: "a size in bytes, such as 16777216 or 16M",
    _flag: "1 or 0",
    int: "a whole number",
}


def _default_threads() -> int:
    # Readers mostly wait for the disk or copy from the page cache: beyond eight, memory bandwidth is the limit.
    return max(2, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2))


def _option(default: Any, env: str, parse: Callable[[str], Any], doc: str, **checks: Any) -> Any:
    metadata = {"env": env, "parse": parse, "doc": doc, **checks}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """The settings in force. ``docs/options.md`` is the table of them."""

    path: str = _option(
        "auto", "TDGPU_PATH", str,
        "How bytes reach a device: `auto` takes the best that works; `gated`, `host` (host-enqueued) or `generic`"
        " insist on one and raise where it cannot be had.",
        choices=("auto", "gated", "host", "generic"),
    )  # fmt: skip
    ring_bytes: int = _option(
        16 * MiB, "TDGPU_RING_BYTES", parse_size,
        "Pinned staging memory per device, in bytes. Read when a device is first used.",
        minimum=64 << 10, maximum=TiB,
    )  # fmt: skip
    chunk_bytes: int = _option(
        MiB, "TDGPU_CHUNK_BYTES", parse_size,
        "Bytes of one copy. Large loads use larger chunks, up to a quarter of the ring, so that the stream's queue is"
        " not filled.",
        minimum=4 << 10, maximum=TiB,
    )  # fmt: skip
    threads: int = _option(
        _default_threads, "TDGPU_THREADS", int,
        "Native reader threads per device. Read when a device is first used.",
        minimum=1, maximum=256,
    )  # fmt: skip
    direct_io: bool = _option(
        False, "TDGPU_DIRECT_IO", _flag,
        "Read leaves of 1 MiB or more with O_DIRECT, past the page cache. Falls back to buffered reads where the file"
        " system refuses it, at open or at the first read.",
    )  # fmt: skip
    durable: bool = _option(
        True, "TDGPU_DURABLE", _flag,
        "Appends reach the disk before they count as committed (`fsync` of files and directories). Off: they survive a"
        " killed process, but not a power failure.",
    )  # fmt: skip
    lock_timeout: int = _option(
        30, "TDGPU_LOCK_TIMEOUT", int,
        "Seconds that an append waits for another writer of the same save before it raises.",
        minimum=0, maximum=86400,
    )  # fmt: skip
    cuda_driver: str | None = _option(
        None, "TDGPU_CUDA_DRIVER", str,
        "Path of the CUDA driver library. Unset: `libcuda.so.1`, as the loader finds it.",
    )  # fmt: skip
    native_core: str | None = _option(
        None, "TDGPU_NATIVE_CORE", str,
        "Path of tdgpu's own shared library, to run another build of it. Unset: the one in the package.",
    )  # fmt: skip
    max_metadata_bytes: int = _option(
        256 * MiB, "TDGPU_MAX_METADATA_BYTES", parse_size,
        "Largest `meta.json` that is read, in bytes: a larger one raises before it is parsed.",
        minimum=1,
    )  # fmt: skip
    cache: str | None = _option(
        None, "TDGPU_CACHE", str,
        "The directory of the cache. Unset: `tdgpu` in `XDG_CACHE_HOME`, or in `~/.cache` (`~/Library/Caches` on"
        " macOS).",
    )  # fmt: skip
    cache_max_bytes: int | None = _option(
        None, "TDGPU_CACHE_MAX_BYTES", parse_size,
        "Bytes that the results in the cache may have: after a build, those that were not used for longest are removed,"
        " never one in use. Unset: no limit.",
        minimum=0,
    )  # fmt: skip


def _checked(option: Any, value: Any, source: str) -> Any:
    checks = option.metadata
    if value is None and option.default is None:
        return value
    if "choices" in checks and value not in checks["choices"]:
        raise InvalidArgument(f"{source} must be one of {', '.join(checks['choices'])}, got {value!r}.")
    for name, wrong in (("minimum", lambda bound: value < bound), ("maximum", lambda bound: value > bound)):
        if name in checks and not isinstance(value, int):
            raise InvalidArgumentType(f"{source} is a whole number, not {value!r}.")
        if name in checks and wrong(checks[name]):
            raise InvalidArgument(f"{source} has a {name} of {checks[name]}, got {value}.")
    return value


def _from_environment() -> dict[str, Any]:
    given: dict[str, Any] = {}
    for option in fields(Options):
        env = option.metadata["env"]
        text = os.environ.get(env)
        if text is None or text == "":
            continue
        parse = option.metadata["parse"]
        try:
            value = parse(text)
        except (ValueError, KeyError, OverflowError):
            raise InvalidArgument(
                f"The environment variable {env} has the value {text!r}, which cannot be read: it takes"
                f" {READABLE[parse]}."
            ) from None
        given[option.name] = _checked(option, value, env)
    return given


_override: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("tdgpu_options", default=None)


def get() -> Options:
    """The settings in force here: those of the enclosing ``options(...)`` over those of the environment."""
    return Options(**{**_from_environment(), **(_override.get() or {})})


@contextlib.contextmanager
def options(**values: Any) -> Iterator[Options]:
    """Changes settings for a block of code (and, like any context variable, for the tasks that it starts).

    Args:
        **values: any field of :class:`Options`, by name.

    Raises:
        InvalidArgument: an unknown name, or a value outside its bounds.

    >>> with options(chunk_bytes=1 << 20) as now:
    ...     now.chunk_bytes
    1048576
    """
    known = {option.name: option for option in fields(Options)}
    for name, value in values.items():
        if name not in known:
            raise InvalidArgument(f"There is no option {name!r}. There are: {', '.join(known)}.")
        _checked(known[name], value, f"options({name}=...)")
    token = _override.set({**(_override.get() or {}), **values})
    try:
        yield get()
    finally:
        _override.reset(token)
