"""What every way of moving bytes offers, whoever moves them."""

from __future__ import annotations

import abc
from collections.abc import Callable

import numpy as np
import torch

from tdgpu.errors import LoadError, TransferError
from tdgpu.layout.tree import Leaf
from tdgpu.transfer import native
from tdgpu.transfer.plan import LoadPlan


class Flight(abc.ABC):
    """A load under way, without its tensors: what errors, waits and reports need.

    It can outlive the result. ``start`` gives one inside a :class:`Transfer`; a call that returns before the bytes are
    there leaves it with the device's watcher.
    """

    def __init__(self, save: str, plan: LoadPlan, path: str) -> None:
        self.save = save
        self.path = path
        self.nbytes = plan.nbytes
        self.leaf_count = len(plan.leaves)
        # Only what names a failed piece is kept: neither the tensors nor their storages.
        self._piece_leaf = plan.piece_leaf
        self._keys = [leaf.key for leaf in plan.leaves]
        self._files = plan.files
        self.was_raised = False  # a call has raised the failure: no other one needs to
        self.is_watched = False

    @abc.abstractmethod
    def wait(self, milliseconds: int = native.SLICE_MS) -> bool:
        """Whether nothing of the load is under way, waiting on the host for up to `milliseconds`."""

    @abc.abstractmethod
    def wait_filled(self, milliseconds: int = native.SLICE_MS) -> bool:
        """Whether no byte is still to be read, waiting for up to `milliseconds`."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Bytes that are not read yet need not be. The copies still run, in order."""

    @abc.abstractmethod
    def failure(self) -> Exception | None:
        """The first thing that went wrong so far."""

    @property
    @abc.abstractmethod
    def moved(self) -> int:
        """Bytes read so far."""

    def raise_failure(self) -> None:
        """Raises the failure, if there is one."""
        failure = self.failure()
        if failure is not None:
            self.was_raised = True
            raise failure

    def synchronize(self, tell: Callable[[int], None] | None = None) -> None:
        """Waits on the host until the load is over, in slices, so that Ctrl-C is heard; raises what failed.

        Args:
            tell: called after each slice with the bytes moved so far.
        """
        while not self.wait():
            if tell is not None:
                tell(self.moved)
        self.raise_failure()

    def error_of(self, report: native.Report) -> Exception | None:
        """The exception for what the native core reports."""
        if report.cause == "none":
            return None
        if report.piece < 0:
            error = native.error_of(report.cause, report.message, "The load failed")
            if isinstance(error, TransferError):
                error.save = self.save
            return error
        leaf = int(self._piece_leaf[report.piece])
        what = (
            "A leaf's file ended early"
            if report.cause == "truncated"
            else f"A leaf's file cannot be read: {report.message}"
        )
        return LoadError(
            f"{what}. Its bytes from there on are 0xFF on the device; do not use the result.",
            save=self.save, key=self._keys[leaf], file=self._files[leaf][0], wanted=report.wanted, found=report.found,
        )  # fmt: skip


class Transfer(abc.ABC):
    """A load with its tensors, which may be used in a stream's order once that stream was made to wait."""

    def __init__(self, plan: LoadPlan, flight: Flight, device: torch.device, watch: Callable[[Flight], None]) -> None:
        self.device = device
        self.flight = flight
        self._watch = watch
        self._tensors = plan.tensors()
        self._last_chunk = dict(zip(plan.leaves, plan.last_chunk, strict=True))
        self._event_chunks = np.flatnonzero(plan.chunks["event"])

    def tensor(self, leaf: Leaf) -> torch.Tensor:
        """The leaf's tensor, filled or not."""
        return self._tensors[leaf]

    def carries(self, leaf: Leaf) -> bool:
        """Whether the leaf is one of this transfer's."""
        return leaf in self._tensors

    def position(self, leaf: Leaf) -> int:
        """When the leaf is complete, in the order of the copies."""
        return self._last_chunk[leaf]

    def _event(self, leaf: Leaf | None) -> int:
        """The first event behind the leaf's last chunk; for None the end."""
        if leaf is None:
            return len(self._event_chunks)
        return int(np.searchsorted(self._event_chunks, self._last_chunk[leaf]))

    @abc.abstractmethod
    def wait(self, leaf: Leaf | None = None) -> None:
        """Makes the device's current stream wait for the leaf, or for everything. The host goes on."""

    def leave(self) -> None:
        """Hands the load to the device's watcher: nobody is going to wait on the host. Raises what failed already."""
        self.flight.raise_failure()
        self._watch(self.flight)

    def cancel(self) -> None:
        """Gives the load up: an error or an interrupt came in between. The tensors can be dropped then."""
        self.flight.cancel()
        self.flight.was_raised = True

    def synchronize(self, tell: Callable[[int], None] | None = None) -> None:
        """Waits on the host; raises what failed. See :meth:`Flight.synchronize`."""
        self.flight.synchronize(tell)
