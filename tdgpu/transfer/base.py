"""What every way of moving bytes offers, whoever moves them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tdgpu.errors import ChecksumError, LoadError, NotSupported, TransferError
from tdgpu.layout.tree import Key, Leaf, Packed
from tdgpu.transfer import library, native


class CopyTimes(Protocol):
    """How long the copies of one load take on the device. It may be asked when all else of the load is gone."""

    def seconds(self) -> float | None:
        """Without what the copy stream waits for before each; None as long as they are under way. Never waits."""


class Flight(abc.ABC):
    """A load under way, without its tensors: what errors, waits and reports need.

    ``consequence`` says in an error what became of the leaf's bytes.

    It can outlive the result. ``start`` gives one inside a :class:`Transfer`; a call that returns before the bytes are
    there leaves it with the device's watcher.
    """

    consequence = "Its bytes from there on are 0xFF on the device; do not use the result."

    def __init__(
        self, save: str, names: Sequence[tuple[Key, Packed | None]], nbytes: int, work: native.Work, path: str
    ) -> None:
        """``names``: what ``work.pieces["leaf"]`` counts, by its key and what an archive says of it."""
        self.save = save
        self.path = path
        self.nbytes = nbytes
        self.leaf_count = len(names)
        # Only what names a failed piece is kept: neither the tensors nor their storages.
        self._pieces = work.pieces
        self._names = names
        self._files = work.files
        self._sources = work.sources  # threads may still gather from their memory
        self.was_raised = False  # a call has raised the failure: no other one needs to
        self.is_watched = False
        self.copy_times: CopyTimes | None = None  # where this was asked for, and the device has a clock

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

    def gathered(self) -> tuple[float, float] | None:
        """How long threads gathered rows that were in memory, and rows for which a disk was read; None if nobody
        knows."""
        return None

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
            error = library.error_of(report.cause, report.message, "The load failed")
            if isinstance(error, TransferError):
                error.save = self.save
            return error
        piece = self._pieces[report.piece]
        key, packed = self._names[int(piece["leaf"])]
        return failed_piece(report, self.save, key, self._files[int(piece["file"])][0], packed, self.consequence)


def failed_piece(
    report: native.Report, save: str, key: Key, file: str, packed: Packed | None, consequence: str = ""
) -> LoadError | NotSupported:
    """The exception for a piece that the core could not read or inflate."""
    what = "A leaf's file" if packed is None else f"The entry {packed.name!r}"
    # The core counts no bytes in these cases; its words say what was promised.
    if report.cause == "damaged":
        return ChecksumError(
            f"{what} is damaged: {report.message}. {consequence}".rstrip(), save=save, key=key, file=file
        )
    if report.cause in ("unsupported", "memory"):
        kind = NotSupported if report.cause == "unsupported" else LoadError
        return kind(
            f"{what} cannot be inflated here: {report.message}. {consequence}".rstrip(), save=save, key=key, file=file
        )
    if report.cause == "truncated":
        happened = "ended early" if packed is None else "is cut off by the archive's end"
    else:
        happened = f"cannot be read: {report.message}"
    return LoadError(
        f"{what} {happened}. {consequence}".rstrip(),
        save=save,
        key=key,
        file=file,
        wanted=report.wanted,
        found=report.found,
    )


class Transfer(abc.ABC):
    """A load with its tensors, which may be used in a stream's order once that stream was made to wait."""

    def __init__(
        self, device: torch.device, flight: Flight, tensors: dict[Leaf, torch.Tensor], watch: Callable[[Flight], None]
    ) -> None:
        self.device = device
        self.flight = flight
        self._watch = watch
        self._tensors = tensors

    def tensor(self, leaf: Leaf) -> torch.Tensor:
        """The leaf's tensor, filled or not."""
        return self._tensors[leaf]

    def carries(self, leaf: Leaf) -> bool:
        """Whether the leaf is one of this transfer's."""
        return leaf in self._tensors

    def position(self, leaf: Leaf) -> int:
        """When the leaf is complete, in the order of the copies. Without such an order, all are at the end."""
        return 0

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
