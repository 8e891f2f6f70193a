"""From tensors to chunks: which way each tensor of some rows takes out of where it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tdgpu.append.batch import Batch
from tdgpu.errors import InvalidArgument, TransferError
from tdgpu.layout.growth import Growing
from tdgpu.transfer import outlets
from tdgpu.transfer.fetch import raw_bytes
from tdgpu.transfer.outlets import HostOutlet, Outlet, bytewise

__all__ = ["Stager"]

# Tensors of fewer bytes are packed: one chunk, one copy for many of them.
PACKED_ON_HOST = 256 << 10
PACKED_ON_DEVICE = 64 << 10

_CPU = torch.device("cpu")


@dataclass
class Ways:
    """How the tensors of one call leave one place.

    Attributes:
        packed: numbers of those that go together in chunks.
        alone: numbers of those that go by themselves, window by window.
    """

    packed: list[int] = field(default_factory=list)
    alone: list[int] = field(default_factory=list)
    packed_nbytes: int = 0


@dataclass
class StagePlan:
    """The ways of all tensors of one call.

    Attributes:
        tensors: of each leaf, as a plain ``torch.Tensor``.
        in_place: numbers of those on the host that are written from where they are.
        ways: by place.
        is_large: whether it takes more than a chunk per place.
    """

    tensors: list[torch.Tensor]
    in_place: list[int]
    ways: dict[torch.device, Ways]
    is_large: bool = False


class Stager:
    """The outlets of one save, made as rows come from a place for the first time."""

    def __init__(self) -> None:
        self._outlets: dict[torch.device, Outlet] = {}
        self._numbers = np.empty(0, np.uint32)

    def plan(
        self, growing: Growing, tensors: Sequence[torch.Tensor], sizes: np.ndarray, *, in_place: bool
    ) -> StagePlan:
        """Sorts tensors by the way that they take.

        Args:
            growing: the save.
            tensors: of each of its leaves.
            sizes: their bytes.
            in_place: whether all on the host that can be are written from where they are, not only large ones.

        Raises:
            InvalidArgument: a tensor without data.
            DeviceError, ForkError: a device cannot be used.
        """
        plan = StagePlan(list(tensors), [], {})
        host = Ways()
        packed, packed_nbytes = host.packed, 0
        at_least = 0 if in_place else PACKED_ON_HOST
        plain = torch.Tensor
        # Rows of a thousand small leaves go through here many times a second.
        for number, (tensor, nbytes) in enumerate(zip(tensors, sizes.tolist(), strict=True)):
            if type(tensor) is not plain:
                tensor = plan.tensors[number] = tensor.detach().as_subclass(torch.Tensor)
            if not tensor.is_cpu:
                self._plan_device(plan, growing, number, tensor, nbytes)
                continue
            is_plain = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
            if is_plain and nbytes >= at_least:
                plan.in_place.append(number)
            elif nbytes < PACKED_ON_HOST:
                packed.append(number)
                packed_nbytes += nbytes
                if not is_plain:
                    plan.tensors[number] = raw_bytes(bytewise(tensor))
            else:
                host.alone.append(number)
        host.packed_nbytes = packed_nbytes
        if host.packed or host.alone:
            plan.ways[_CPU] = host
        for device, ways in plan.ways.items():
            plan.is_large = plan.is_large or bool(ways.alone) or ways.packed_nbytes > self._outlet(device).largest
        plan.is_large = plan.is_large or bool(plan.in_place)
        return plan

    def _plan_device(self, plan: StagePlan, growing: Growing, number: int, tensor: torch.Tensor, nbytes: int) -> None:
        if tensor.device.type == "meta":
            raise InvalidArgument(
                "Rows on the meta device have no bytes to append.", save=growing.prefix, key=growing.leaves[number].key
            )
        ways = plan.ways.setdefault(tensor.device, Ways())
        if nbytes < PACKED_ON_DEVICE:
            ways.packed.append(number)
            ways.packed_nbytes += nbytes
        else:
            ways.alone.append(number)

    def _all(self, count: int) -> np.ndarray:
        """The numbers of all tensors."""
        if len(self._numbers) != count:
            self._numbers = np.arange(count, dtype=np.uint32)
        return self._numbers

    def _outlet(self, device: torch.device) -> Outlet:
        outlet = self._outlets.get(device)
        if outlet is None:
            outlet = self._outlets[device] = outlets.take(device)
        return outlet

    def fits(self, batch: Batch, plan: StagePlan) -> bool:
        """Whether a plan that is not large finds room in a batch."""
        return all(
            batch.has_room(self._outlet(device), ways.packed_nbytes, len(ways.packed))
            for device, ways in plan.ways.items()
        )

    def stage(
        self, plan: StagePlan, sizes: np.ndarray, places: np.ndarray, batch: Batch, post: Callable[[], Batch]
    ) -> None:
        """Puts all tensors on their way.

        Args:
            plan: the ways.
            sizes: of each tensor its bytes.
            places: where they go in its file.
            batch: takes the chunks.
            post: gives the batch to the writers when it is full, and returns the next.
        """
        outlet_of = {device: self._outlet(device) for device in plan.ways}
        for outlet in outlet_of.values():
            outlet.begin()
        for device, ways in plan.ways.items():
            outlet = outlet_of[device]
            for numbers in _in_chunks(ways, sizes, outlet.largest):
                if len(numbers) == len(plan.tensors):  # every leaf, as is usual: nothing to choose
                    files, tensors, its_sizes, its_places = self._all(len(numbers)), plan.tensors, sizes, places
                else:
                    files = np.array(numbers, np.uint32)
                    tensors = [plan.tensors[number] for number in numbers]
                    its_sizes, its_places = sizes[files], places[files]
                if not batch.has_room(outlet, int(its_sizes.sum()), len(numbers)):
                    batch = post()
                batch.add_chunk(outlet, outlet.pack(tensors, its_sizes), files, its_sizes, its_places)
            for number in ways.alone:
                file, place = np.array([number], np.uint32), int(places[number])
                for window in outlet.windows(plan.tensors[number]):
                    nbytes = window.numel() * window.dtype.itemsize
                    if not batch.has_room(outlet, nbytes):
                        batch = post()
                    staged = outlet.stage(window, nbytes)
                    batch.add_chunk(outlet, staged, file, np.array([nbytes], np.uint64), np.array([place], np.uint64))
                    place += nbytes
        if plan.in_place:
            files = np.array(plan.in_place, np.uint32)
            there = [plan.tensors[number] for number in plan.in_place]
            batch.add_memory([tensor.data_ptr() for tensor in there], files, sizes[files], places[files], there)
        for outlet in outlet_of.values():
            outlet.end()

    def put(self, data: memoryview, number: int, place: int, batch: Batch, post: Callable[[], Batch]) -> None:
        """Puts bytes on their way to a file."""
        outlet = self._outlet(_CPU)
        assert isinstance(outlet, HostOutlet)
        file = np.array([number], np.uint32)
        for first in range(0, len(data), outlet.largest):
            part = data[first : first + outlet.largest]
            if not batch.has_room(outlet, len(part)):
                batch = post()
            staged = outlet.put(part)
            batch.add_chunk(
                outlet, staged, file, np.array([len(part)], np.uint64), np.array([place + first], np.uint64)
            )

    def check_devices(self) -> None:
        """Raises DeviceError if a device that rows come from has broken down."""
        for outlet in list(self._outlets.values()):
            outlet.check()

    def mark(self, *, all_chunks: bool = False) -> dict[torch.device, int]:
        """The last chunk of each outlet so far; or where each began, if all of its chunks are meant."""
        return {
            device: outlet.first if all_chunks else outlet.native.last_chunk()
            for device, outlet in self._outlets.items()
        }

    def take_back(self, mark: dict[torch.device, int]) -> None:
        """Nothing that was staged since ``mark`` will be written. No store of it is under way."""
        for device, chunk in mark.items():
            self._outlets[device].take_back(chunk)

    def close(self, *, well: bool) -> None:
        """Gives the outlets back; ends them, if something went wrong. No store is under way."""
        while self._outlets:
            _, outlet = self._outlets.popitem()
            with contextlib.suppress(TransferError):
                if well and outlet.is_at_rest():
                    outlets.give_back(outlet)
                    continue
            outlets.give_up(outlet)


def _in_chunks(ways: Ways, sizes: np.ndarray, largest: int) -> list[list[int]]:
    """Runs of the packed tensors that together fit a chunk."""
    if ways.packed_nbytes <= largest:
        return [ways.packed] if ways.packed else []
    chunks: list[list[int]] = []
    room = 0
    for number in ways.packed:
        nbytes = int(sizes[number])
        if nbytes > room:
            chunks.append([])
            room = largest
        chunks[-1].append(number)
        room -= nbytes
    return chunks
