"""A tree and its tensors, made into the object that was saved."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from tensordict._archive import _ArchivePath

from tdgpu.layout import collector, objects
from tdgpu.layout.mapped import nested_view
from tdgpu.layout.placeholders import Placeholders, fake_is_active
from tdgpu.layout.places import Route, routes
from tdgpu.layout.save import Save
from tdgpu.layout.store import ArchiveStore
from tdgpu.layout.tree import Kind, Leaf, Level

__all__ = ["assemble"]


def assemble(
    save: Save,
    provide: Callable[[Leaf], torch.Tensor],
    *,
    device: torch.device | None,
    out: Any = None,
    allow_pickle: bool | None = None,
    robust_key: bool | None = True,
    mode: str | None = None,
    keep_prefix: bool,
) -> Any:
    """Builds what was saved, around tensors that ``provide`` gives.

    Args:
        save: the tree.
        provide: called once for each leaf that has elements, before anything is built or changed; gives the finished
            tensor (for a nested leaf the nested tensor, see :func:`tdgpu.layout.mapped.nested_view`).
        device: the device that the caller asked for, or None.
        out: the object to fill, or None.
        allow_pickle, robust_key, mode: as in :func:`tdgpu.load_memmap`.
        keep_prefix: whether levels whose leaves are mapped from the directory remember it as their own. A later
            ``memmap_()`` writes there, so levels on a device never do.

    Returns:
        An object of the saved class, not locked; or ``out``.

    Raises:
        LockedOutError, OutMismatchError: see :func:`tdgpu.layout.places.check_out`.
        PickleRefused, FormatError: see :func:`tdgpu.layout.objects.resolve`.
    """
    objects.resolve(save, allow_pickle)
    builder = _Builder(save, routes(save, device, out), provide, allow_pickle, robust_key, mode, keep_prefix)
    with collector.paused():
        for level in save.root.walk():
            builder.gather(level)
        return builder.build(save.root)


class _Builder:
    def __init__(
        self,
        save: Save,
        found: dict[Level, Route],
        provide: Callable[[Leaf], torch.Tensor],
        allow_pickle: bool | None,
        robust_key: bool | None,
        mode: str | None,
        keep_prefix: bool,
    ) -> None:
        self.save = save
        self.routes = found
        self.provide = provide
        self.allow_pickle = allow_pickle
        self.robust_key = robust_key
        self.mode = mode
        self.keep_prefix = keep_prefix
        self.archive: Any = None
        self.tensors: dict[Level, dict[str, torch.Tensor]] = {}
        self.stacks: dict[Level, Any] = {}

    def gather(self, level: Level) -> None:
        """Collects what a level is made of, so that nothing is half built, or half filled, when that fails."""
        if level.kind is Kind.NON_TENSOR_STACK:
            self.stacks[level] = objects.build_stack(level, self.save.prefix)
        provide = self.provide
        device = self.routes[level].device
        self.tensors[level] = {
            key: provide(leaf) if leaf.extent is not None else _without_elements(leaf, device, self.save.prefix)
            for key, leaf in level.leaves.items()
        }

    def build(self, level: Level, device: torch.device | None = None) -> Any:
        """Builds a level. ``device`` is that of the tensordict that takes it."""
        if level.kind is Kind.TENSORDICT:
            return self._tensordict(level)
        if level.kind is Kind.TYPED:
            return level.cls._wrap_td(self._tensordict(level))  # type: ignore[attr-defined]
        if level.kind in (Kind.TENSORCLASS, Kind.NON_TENSOR_DATA):
            return self._tensorclass(level)
        if level.kind is Kind.LAZY_STACK:
            return self._lazy_stack(level, device)
        if level.kind is Kind.NON_TENSOR_STACK:
            return _rows(level, self.stacks[level], device)
        return self._foreign(level)

    def _tensordict(self, level: Level) -> Any:
        result: Any
        out, device, _ = self.routes[level]
        tensors = self.tensors[level]
        if out is None:
            result = self._new_tensordict(level, device, tensors)
        else:
            result = out
            for key, tensor in tensors.items():
                result._set_str(key, tensor, validated=True, inplace=False, non_blocking=False)
        for key, child in level.children.items():
            built = self.build(child, result.device)
            if built is not self.routes[child].given:
                # Validated: a child takes over the batch size, names and device of its parent.
                result._set_str(key, built, inplace=False, validated=False)
        if out is not None:
            for key in [key for key in result.keys() if key not in tensors and key not in level.children]:  # noqa: SIM118
                result.del_(key)
        keep = self.mode != "r" and self._is_mapped(level) and not self.save.is_archive
        result._memmap_prefix = Path(level.path) if keep else None
        return result

    def _is_mapped(self, level: Level) -> bool:
        device = self.routes[level].device
        return self.keep_prefix and (device is None or device.type == "cpu")

    def _new_tensordict(self, level: Level, device: torch.device | None, tensors: dict[str, torch.Tensor]) -> Any:
        if device is None and level.saved_device is not None:
            device = torch.device("cpu")  # where the leaves are, wherever they were when they were saved
        batch_size = torch.Size(level.batch_size or ())
        result: Any
        if issubclass(level.cls, TensorDict) and level.cls is not TensorDict:
            result = level.cls({}, batch_size=batch_size, device=device)
            for key, tensor in tensors.items():
                result._set_str(key, tensor, validated=True, inplace=False, non_blocking=False)
        else:
            result = TensorDict._new_unsafe(cast(Any, tensors), batch_size=batch_size, device=device, nested=False)
        if level.names is not None:
            result._set_names(level.names)
        return result

    def _tensorclass(self, level: Level) -> Any:
        out = self.routes[level].out
        inner = level.children.get("_tensordict")
        if inner is not None:
            tensordict = self.build(inner)
        else:
            tensordict = TensorDict(device="cpu") if out is None else out._tensordict
        result = level.cls._from_tensordict(tensordict, dict(level.objects), rebuild=False)  # type: ignore[attr-defined]
        if out is None:
            return result
        out._non_tensordict.clear()
        out._non_tensordict.update(result._non_tensordict)
        return out

    def _lazy_stack(self, level: Level, device: torch.device | None) -> Any:
        members = [self.build(child) for child in level.children.values()]
        out = self.routes[level].out
        if out is not None and all(a is b for a, b in zip(members, out.tensordicts, strict=True)):
            return out
        result = level.cls(*members, stack_dim=level.meta["stack_dim"])
        name = level.meta.get("stack_dim_name")
        if name is not None:
            result._td_dim_name = name
        return _rows(level, result, device)

    def _foreign(self, level: Level) -> Any:
        """A level whose format only its class knows: that class's own loader, which also puts it on the device."""
        _, device, out = self.routes[level]
        wanted: dict[str, Any] = {"device": device, "out": out, "robust_key": self.robust_key}
        if self.allow_pickle is not None:
            wanted["allow_pickle"] = self.allow_pickle
        path: Any = Path(level.path)
        if isinstance(self.save.store, ArchiveStore):
            path = self._in_archive(self.save.store.name(level.path))  # which has the mode
        elif self.mode is not None:
            wanted["mode"] = self.mode
        elif not self._is_mapped(level) and level.cls.__module__.partition(".")[0] == "tensordict":
            # Read-only where the mapping is only a step. Others' loaders may not know the argument.
            wanted["mode"] = "r"
        return level.cls._load_memmap(path, copy.deepcopy(level.meta), **wanted)  # type: ignore[attr-defined]

    def _in_archive(self, name: str) -> Any:
        """What tensordict's loaders take for a path in an archive. All of them share one mapping of it."""
        if self.archive is None:
            self.archive = _ArchivePath.root(self.save.prefix, writable=self.mode == "r+")
        return self.archive / name if name else self.archive


def _rows(level: Level, stack: Any, device: torch.device | None) -> Any:
    """The rows of a stack that are wanted. tensordict decides what they are: a stack of tensorclasses is a tensorclass,
    and one of no members is a tensordict.
    """
    if level.rows is None:
        return stack
    if device is not None and stack.device != device:
        stack = stack.to(device)  # before: one that has no values would lose its batch size
    return stack[:0] if level.rows.start == level.rows.stop else stack[:]


def _without_elements(leaf: Leaf, device: torch.device | None, save: str) -> torch.Tensor:
    # The device is always given: torch.set_default_device and `with torch.device(...)` are not meant for loads.
    device = torch.device("cpu") if device is None else device
    if device.type == "meta" or fake_is_active():
        return Placeholders(device, save)(leaf)
    if leaf.nested_sizes is not None:
        return nested_view(torch.empty(0, dtype=leaf.dtype, device=device), leaf.nested_sizes)
    if math.prod(leaf.shape):
        # Of a stack of which no member is loaded: only the shape counts, and takes no memory.
        return torch.empty((), dtype=leaf.dtype, device=device).expand(leaf.shape)
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
