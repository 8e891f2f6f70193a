"""Where everything goes: which part of ``out`` takes a level, and on which device its leaves belong.

Found before anything is transferred or changed, so that a refusal leaves ``out`` as it was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, is_tensor_collection, is_tensorclass

from tdgpu.errors import DeviceError, LockedOutError, OutMismatchError
from tdgpu.layout.files import Where
from tdgpu.layout.placeholders import fake_is_active
from tdgpu.layout.save import Save
from tdgpu.layout.tree import Kind, Leaf, Level

__all__ = ["Route", "check_out", "concrete", "places", "routes"]


class Route(NamedTuple):
    """What happens to one level.

    Attributes:
        out: the object that takes it, or None: a new one is made.
        device: the device of its leaves; None is the CPU, memory-mapped.
        given: the part of the caller's ``out`` that stands at this level's key, whether or not it can take the level.
    """

    out: Any
    device: torch.device | None
    given: Any


def concrete(device: torch.device | None) -> torch.device | None:
    """``device``, with the current index if it is an accelerator without one.

    While a fake mode is active nothing is initialised for that: then it is the current index if there is one, else 0.
    """
    if device is None or device.type in ("cpu", "meta"):
        return device
    index: int | None = device.index
    if index is not None:
        return device
    module: Any = getattr(torch, device.type, None)
    if fake_is_active() and not getattr(module, "is_initialized", lambda: False)():
        return torch.device(device.type, 0)
    current = getattr(module, "current_device", torch.accelerator.current_device_index)
    try:
        return torch.device(device.type, current())
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(f"The device {device} cannot be used: {error}") from error


def check_out(save: Save, device: torch.device | None, out: Any) -> None:
    """Raises what speaks against loading ``save`` into ``out``; changes nothing.

    Raises:
        LockedOutError: ``out`` is locked.
        OutMismatchError: ``out`` is on another device than ``device``, or stacks another number of members.
    """
    routes(save, device, out)


def places(save: Save, device: torch.device | None, out: Any) -> dict[Leaf, torch.device | None]:
    """The device of each leaf; None is the CPU, memory-mapped. Raises as :func:`check_out`."""
    found = routes(save, device, out)
    return {leaf: found[level].device for level in save.root.walk() for leaf in level.leaves.values()}


def routes(save: Save, device: torch.device | None, out: Any) -> dict[Level, Route]:
    """The route of every level. Raises as :func:`check_out`."""
    found: dict[Level, Route] = {}
    _route(save, save.root, out, device, found)
    return found


def _route(save: Save, level: Level, out: Any, device: torch.device | None, found: dict[Level, Route]) -> None:
    given = out
    if level.kind in (Kind.TENSORDICT, Kind.TYPED):
        if is_tensorclass(out):
            out = out._tensordict
        if out is not None:
            device = _agree(save, level, out, device)
            _check_unlocked(save, level, out)
            _check_fits(save, level, out)
        for key, child in level.children.items():
            existing = None if out is None else out._get_str(key, default=None)
            _route(save, child, existing if is_tensor_collection(existing) else None, device, found)
    elif level.kind in (Kind.TENSORCLASS, Kind.NON_TENSOR_DATA):
        inner = out
        if is_tensorclass(out):
            # By name: a class that was defined again, as in a notebook, is another object of the same name.
            out = out if str(type(out)) == str(level.cls) else None
            inner = None if out is None else out._tensordict
        else:
            out = None  # a plain collection takes the tensors; the tensorclass around it is a new one
        for child in level.children.values():
            _route(save, child, inner, device, found)
    elif level.kind is Kind.LAZY_STACK:
        if issubclass(level.cls, NonTensorStack):
            out = None
        if out is not None and level.rows == slice(0, 0):
            device = _agree(save, level, out, device)
            out = None  # a stack without members is no stack, so that there is nothing in `out` to fill
        members = [None] * len(level.children) if out is None else _members(save, level, out)
        for child, member in zip(level.children.values(), members, strict=True):
            _route(save, child, member, device, found)
        if not _stacks_alike(out, level):
            out = None  # the members are filled where they can be, but the stack itself is a new one
    found[level] = Route(out, concrete(device), given)


def _stacks_alike(out: Any, level: Level) -> bool:
    """Whether ``out`` is a lazy stack along the same dimension as the lazy stack ``level``."""
    if not isinstance(out, LazyStackedTensorDict):
        return False
    dim: int = level.meta["stack_dim"]
    return bool(out.stack_dim == (dim if dim >= 0 else dim + out.ndim))


def _where(save: Save, level: Level) -> Where:
    return Where(save.prefix, level.key, level.path)


def _agree(save: Save, level: Level, out: Any, device: torch.device | None) -> torch.device | None:
    """The device of ``out``, if it has one and ``device`` does not contradict it."""
    own: torch.device | None = out.device
    if own is None or device is None:
        return device if own is None else own
    if device.type != own.type or (None not in (device.index, own.index) and device.index != own.index):
        raise _where(save, level).error(
            OutMismatchError, f"Cannot load on device {device} into an `out` on device {own}."
        )
    return own


def _check_unlocked(save: Save, level: Level, out: Any) -> None:
    if out.is_locked and (level.leaves or level.children or len(list(out.keys()))):
        raise _where(save, level).error(LockedOutError, "`out` is locked: call out.unlock_() first.")


def _check_fits(save: Save, level: Level, out: Any) -> None:
    """What tensordict would find out only once ``out`` is half filled."""
    size = tuple(out.batch_size)

    def starts_with_size(shape: tuple[int, ...]) -> bool:
        return tuple(shape[: len(size)]) == size

    for child in level.children.values():
        if child.batch_size is None or starts_with_size(child.batch_size):
            continue
        # tensordict then gives the level the batch size of `out`, which works if all of its leaves have it.
        for below in child.walk():
            for leaf in below.leaves.values():
                if leaf.is_nested or not starts_with_size(leaf.shape):
                    raise _where(save, child).error(
                        OutMismatchError,
                        f"A level of batch size {child.batch_size} does not fit into a batch size of {size}.",
                    )
    if isinstance(out, LazyStackedTensorDict):
        dim, count = out.stack_dim, len(out.tensordicts)
        for leaf in level.leaves.values():
            if leaf.is_nested or len(leaf.shape) <= dim or leaf.shape[dim] != count:
                raise Where(save.prefix, leaf.key, level.path).error(
                    OutMismatchError,
                    f"A leaf of shape {leaf.shape} cannot be spread over an `out` that stacks {count} members in"
                    f" dimension {dim}.",
                )


def _members(save: Save, level: Level, out: Any) -> list[Any]:
    try:
        members = list(out.unbind(level.meta["stack_dim"]))
    except (IndexError, RuntimeError, ValueError) as error:
        raise _where(save, level).error(OutMismatchError, f"`out` cannot take a stack: {error}") from error
    if len(members) != len(level.children):
        raise _where(save, level).error(
            OutMismatchError,
            f"Cannot load {len(level.children)} stacked members into an `out` that stacks {len(members)}.",
        )
    return members
