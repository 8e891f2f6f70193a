"""Leaves without data: meta tensors, and fake tensors while a ``FakeTensorMode`` is active."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tdgpu.errors import NotSupported
from tdgpu.layout.tree import Leaf, Shape

__all__ = ["Placeholders", "fake_is_active"]


def fake_is_active() -> bool:
    """Whether a ``FakeTensorMode`` is active, in which no tensor has data."""
    return torch._guards.active_fake_mode() is not None


class Placeholders:
    """Makes tensors of the right shape and dtype, on one device, without data."""

    def __init__(self, device: torch.device | None, save: str) -> None:
        """``device``: meta; or, while a fake mode is active, any device (None is the CPU)."""
        self._device = torch.device("cpu") if device is None else device
        self._save = save
        self._makers: dict[tuple[Shape, torch.dtype], Callable[[], torch.Tensor]] = {}

    def __call__(self, leaf: Leaf) -> torch.Tensor:
        """The placeholder of ``leaf``.

        Raises:
            NotSupported: the leaf is a nested tensor, which torch has neither as meta nor as fake tensor.
        """
        if leaf.sizes is not None:
            raise NotSupported(
                "This leaf is a strided nested tensor, which torch can make neither as a meta nor as a fake tensor."
                " Load another subpath, or load it on the CPU.",
                save=self._save,
                key=leaf.key,
            )
        maker = self._makers.get((leaf.shape, leaf.dtype))
        if maker is None:
            # With strides given, torch skips most of what empty() and zeros() do, and with all arguments bound, most of
            # their parsing: this is the fastest way to a meta tensor.
            maker = self._makers[leaf.shape, leaf.dtype] = partial(
                torch.empty_strided, leaf.shape, _contiguous(leaf.shape), dtype=leaf.dtype, device=self._device
            )
        return maker()


def _contiguous(shape: Shape) -> Shape:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)
