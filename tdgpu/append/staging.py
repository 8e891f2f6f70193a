"""From tensors to chunks: which way each tensor of some rows takes out of where it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import torch

from tdgpu.append.batch import Batch
from tdgpu.errors import InvalidArgument, TransferError
from tdgpu.layout.growth import Growing
from tdgpu.transfer import outlets
from tdgpu.transfer.outlets import HostOutlet, Outlet

__all__ = ["StagePlan", "Stager"]

# Tensors of fewer bytes are packed: one chunk, one copy for many of them.
PACKED_ON_HOST = 256 << 10
PACKED_ON_DEVICE = 64 << 10

_CPU = torch.device("cpu")
_is_cpu = attrgetter("is_cpu")


@dataclass
class Ways:
    """How the tensors of one call leave one place.

    Attributes:
        packed: numbers of those that go together in chunks.
        alone: numbers of those that go by themselves, window by window.
        packed_nbytes: bytes of the former.
    """

    packed: list[int] = field(default_factory=list)
    alone: list[int] = field(default_factory=list)
    packed_nbytes: int = 0


@dataclass
class StagePlan:
    """The ways of all tensors of one call.

    Attributes:
        tensors: of each leaf.
        in_place: numbers of those on the host that are written from where they are.
        ways: by place.
        whole: the place from which all of them go in one chunk; then there are no other ways.
        is_large: whether it takes more than a chunk per place.
    """

    tensors: Sequence[torch.Tensor]
    in_place: list[int] = field(default_factory=list)
    ways: dict[torch.device, Ways] = field(default_factory=dict)
    whole: torch.device | None = None
    is_large: bool = False


class Stager:
    """The outlets of one save, made as rows come from a place for the first time."""

    def __init__(self, growing: Growing) -> None:
        self._growing = growing
        self._outlets: dict[torch.device, Outlet] = {}
        # Leaves of one dtype and row shape: one call of torch puts their rows one behind the other. Those of larger
        # elements come first: then each begins where its elements are aligned.
        self._groups = growing.groups
        self._in_groups = np.array([number for group in self._groups for number in group], np.uint32)
        self._group_of = np.empty(len(growing.leaves), np.uint32)
        for i, group in enumerate(self._groups):
            self._group_of[group] = i
        self._row_nbytes = growing.row_nbytes
        self._largest_row = int(growing.row_sizes.max(initial=0))

    # --- which way ---

    def plan(self, count: int, tensors: Sequence[torch.Tensor], sizes: np.ndarray, *, in_place: bool) -> StagePlan:
        """Sorts tensors by the way that they take.

        Args:
            count: rows.
            tensors: of each leaf, plain tensors.
            sizes: their bytes.
            in_place: whether all on the host that can be are written from where they are, not only large ones.

        Raises:
            InvalidArgument: a tensor without data.
            DeviceError, ForkError: a device cannot be used.
        """
        plan = StagePlan(tensors)
        if count * self._largest_row < PACKED_ON_DEVICE:
            # Rows of a thousand small leaves come here many times a second: nothing is asked of each that can be asked
            # of all.
            places = {_CPU} if all(map(_is_cpu, tensors)) else {tensor.device for tensor in tensors}
            if len(places) == 1:
                place = places.pop()
                if place.type != "meta" and count * self._row_nbytes <= self._outlet(place).largest:
                    plan.whole = place
                    return plan
        for number, (tensor, nbytes) in enumerate(zip(tensors, sizes.tolist(), strict=True)):
            if tensor.device.type == "meta":
                raise InvalidArgument(
                    "Rows on the meta device have no bytes to append.",
                    save=self._growing.prefix, key=self._growing.leaves[number].key,
                )  # fmt: skip
            packed = PACKED_ON_HOST if tensor.is_cpu else PACKED_ON_DEVICE
            if tensor.is_cpu and (in_place or nbytes >= packed) and outlets.is_plain(tensor):
                plan.in_place.append(number)
                continue
            ways = plan.ways.setdefault(tensor.device, Ways())
            if nbytes < min(packed, self._outlet(tensor.device).largest):
                ways.packed.append(number)
                ways.packed_nbytes += nbytes
            else:
                ways.alone.append(number)
        plan.is_large = bool(plan.in_place) or any(
            ways.alone or ways.packed_nbytes > self._outlet(place).largest for place, ways in plan.ways.items()
        )
        return plan

    def fits(self, batch: Batch, plan: StagePlan, nbytes: int) -> bool:
        """Whether a plan that is not large finds room in a batch. ``nbytes``: of all of its tensors."""
        if plan.whole is not None:
            return batch.has_room((self._outlet(plan.whole), nbytes, len(plan.tensors)))
        return batch.has_room(
            *((self._outlet(place), ways.packed_nbytes, len(ways.packed)) for place, ways in plan.ways.items())
        )

    def _outlet(self, place: torch.device) -> Outlet:
        outlet = self._outlets.get(place)
        if outlet is None:
            outlet = self._outlets[place] = outlets.take(place)
        return outlet

    # --- on its way ---

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
        used = [self._outlet(place) for place in ([plan.whole] if plan.whole is not None else plan.ways)]
        for outlet in used:
            outlet.begin()
        if plan.whole is not None:
            files = self._in_groups
            groups = [[plan.tensors[number] for number in group] for group in self._groups]
            staged = used[0].pack(groups, int(sizes.sum()))
            batch.add_chunk(used[0], staged, files, sizes[files], places[files])
        for outlet, ways in zip(used, plan.ways.values(), strict=False):
            for groups_of_chunk in self._in_chunks(ways, sizes, outlet.largest):
                files = np.array([number for group in groups_of_chunk for number in group], np.uint32)
                nbytes = int(sizes[files].sum())
                if not batch.has_room((outlet, nbytes, len(files))):
                    batch = post()
                staged = outlet.pack([[plan.tensors[number] for number in group] for group in groups_of_chunk], nbytes)
                batch.add_chunk(outlet, staged, files, sizes[files], places[files])
            for number in ways.alone:
                place = int(places[number])
                for window in outlet.windows(plan.tensors[number]):
                    nbytes = window.numel() * window.dtype.itemsize
                    if not batch.has_room((outlet, nbytes, 1)):
                        batch = post()
                    batch.add_run(outlet, outlet.stage(window, nbytes), number, place)
                    place += nbytes
        if plan.in_place:
            batch = post()  # a store of their own, for which nobody has to wait for a device
            files = np.array(plan.in_place, np.uint32)
            there = [plan.tensors[number] for number in plan.in_place]
            batch.add_memory([tensor.data_ptr() for tensor in there], files, sizes[files], places[files], there)
        for outlet in used:
            outlet.end()

    def _in_chunks(self, ways: Ways, sizes: np.ndarray, largest: int) -> list[list[list[int]]]:
        """The packed tensors by chunk, and within it by group."""
        chunks: list[dict[int, list[int]]] = []
        room = 0
        for number in ways.packed:
            nbytes = int(sizes[number])
            if nbytes > room:
                chunks.append({})
                room = largest
            chunks[-1].setdefault(int(self._group_of[number]), []).append(number)
            room -= nbytes
        return [[chunk[group] for group in sorted(chunk)] for chunk in chunks]

    def put(self, data: memoryview, number: int, place: int, batch: Batch, post: Callable[[], Batch]) -> None:
        """Puts bytes on their way to a file."""
        outlet = self._outlet(_CPU)
        assert isinstance(outlet, HostOutlet)
        for first in range(0, len(data), outlet.largest):
            part = data[first : first + outlet.largest]
            if not batch.has_room((outlet, len(part), 1)):
                batch = post()
            batch.add_run(outlet, outlet.put(part), number, place + first)

    # --- errors, and the end ---

    def check_devices(self) -> None:
        """Raises DeviceError if a device that rows come from has broken down."""
        for outlet in list(self._outlets.values()):
            outlet.check()

    def release(self) -> None:
        """Lets go of the rows whose copies are over."""
        for outlet in self._outlets.values():
            outlet.release()

    def mark(self, *, all_chunks: bool = False) -> dict[torch.device, int]:
        """The last chunk of each outlet so far; or where each began, if all of its chunks are meant."""
        return {
            place: outlet.first if all_chunks else outlet.native.last_chunk() for place, outlet in self._outlets.items()
        }

    def take_back(self, mark: dict[torch.device, int]) -> None:
        """Nothing that was staged since ``mark`` will be written. No store of it is under way."""
        for place, chunk in mark.items():
            self._outlets[place].take_back(chunk)

    def close(self, *, well: bool) -> None:
        """Gives the outlets back; ends them, if something went wrong. No store is under way."""
        while self._outlets:
            _, outlet = self._outlets.popitem()
            with contextlib.suppress(TransferError):
                if well and outlet.is_at_rest():
                    outlets.give_back(outlet)
                    continue
            outlets.give_up(outlet)
