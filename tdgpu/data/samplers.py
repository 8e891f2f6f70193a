"""What a loader needs of samplers that are not its own: where they are, and whether they give the same again."""

from __future__ import annotations

import collections
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from tdgpu.data.arguments import LISTS
from tdgpu.data.orders import KeyedSampler
from tdgpu.errors import FormatError, InvalidArgument, InvalidArgumentType, TdgpuError

if TYPE_CHECKING:
    from tdgpu.data.iterator import Progress

__all__ = ["Given", "Samplers", "of_rows"]


class Samplers:
    """The samplers of a loader: its ``sampler``, its ``batch_sampler``, and the sampler within that.

    Args:
        sampler, batch_sampler: as of the loader.
        generator: the loader's own, which is not theirs.
    """

    def __init__(self, sampler: Any, batch_sampler: Any, generator: torch.Generator | None) -> None:
        inner = getattr(batch_sampler, "sampler", None)
        found = {"sampler": sampler, "batch_sampler": batch_sampler, "batch_sampler.sampler": inner}
        self._all = {name: sampler for name, sampler in found.items() if sampler is not None}
        self._generator = generator

    def set_epoch(self, epoch: int) -> None:
        """Tells those that want to know."""
        for sampler in self._all.values():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def world_size(self) -> int | None:
        """Of how many ranks their rows are one's share; None if they do not say."""
        shares = [getattr(sampler, "num_replicas", None) for sampler in self._all.values()]
        return next((share for share in shares if isinstance(share, int)), None)

    def state(self) -> dict[str, Any]:
        """The state in which an epoch begins now."""
        state: dict[str, Any] = {}
        for name, sampler in self._all.items():
            if isinstance(sampler, DistributedSampler):
                # All that its order depends on. torchdata's has a state, too: how far it was in the epoch before.
                state[name] = {"epoch": sampler.epoch}
            elif isinstance(sampler, KeyedSampler):
                state[name] = sampler.begin_state()
            elif hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
                state[name] = sampler.state_dict()
            generator = getattr(sampler, "generator", None)
            if isinstance(generator, torch.Generator) and generator is not self._generator:
                state[f"{name}.generator"] = generator.get_state()
            if name in state or f"{name}.generator" in state:
                state[f"{name}.class"] = type(sampler).__name__
        return state

    def check(self, state: dict[str, Any], save: str) -> None:
        """Refuses the state of a loader with other samplers, or one that they cannot go on from.

        Raises:
            FormatError: the samplers are others.
            InvalidArgument: a sampler draws another order each time.
        """
        here = self.state()
        for name in self._all:
            there_class, here_class = (one.get(f"{name}.class") for one in (state, here))
            same = (
                {entry in state for entry in (name, f"{name}.generator")},
                {entry in here for entry in (name, f"{name}.generator")},
            )
            if there_class != here_class or same[0] != same[1]:
                raise FormatError(
                    f"The state is of a loader whose {name} is {_named(there_class)}, and here it is"
                    f" {_named(here_class)}.",
                    save=save,
                )
        if state["position"] and any(map(_draws_globally, self._all.values())):
            raise InvalidArgument(
                "A torch sampler without a generator draws another order each time, so it cannot go on in the middle of"
                " one: give it a generator, or take shuffle=True and seed=.",
                save=save,
            )

    def load(self, state: dict[str, Any], save: str) -> None:
        """Has each begin as the state says, which was checked.

        Raises:
            InvalidArgument: it is of another order.
        """
        for name, sampler in self._all.items():
            if name in state:
                try:
                    if isinstance(sampler, DistributedSampler):
                        sampler.set_epoch(state[name]["epoch"])
                    else:
                        sampler.load_state_dict(state[name])
                except TdgpuError as error:
                    error.save = save
                    raise
            if f"{name}.generator" in state:
                sampler.generator.set_state(state[f"{name}.generator"])


def _named(sampler_class: str | None) -> str:
    return f"a {sampler_class}" if sampler_class else "one without a state"


def _draws_globally(sampler: Any) -> bool:
    """Whether a sampler draws its order from the global generator, anew each time."""
    kinds = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return isinstance(sampler, kinds) and getattr(sampler, "generator", None) is None


def of_rows(batches: Iterable[list[Any]]) -> Iterator[list[Any]]:
    """Batches of what a sampler gives one by one.

    Raises:
        InvalidArgumentType: it gives lists.
    """
    for batch in batches:
        if isinstance(batch[0], (list, tuple, np.ndarray, torch.Tensor)) and np.ndim(batch[0]):
            raise InvalidArgumentType(LISTS)
        yield batch


class Given:
    """A checksum of what a sampler has given so far, in one epoch.

    A loader that goes on asks its sampler again for what was handed out already, and passes over it. That the sampler
    gives the same again is the sampler's affair, and this finds out whether it does.

    Args:
        skipped: batches that were handed out before.
        checksum: of those, as the state tells it.
        save: for the message.

    Attributes:
        progress: of the epoch, to be set before it begins.
    """

    progress: Progress

    def __init__(self, skipped: int, checksum: int, save: str) -> None:
        self._skipped = skipped
        self._wanted = checksum
        self._save = save
        # By the number of batches before it; of those that may still be the last that was handed out.
        self._checksums = collections.deque([(self._skipped, checksum)])

    def pass_on(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, from the epoch's first on.

        Raises:
            FormatError: those that were handed out before are others now.
        """
        checksum, number = 0, 0
        for batch in batches:
            if isinstance(batch, Iterable) and not hasattr(batch, "__len__"):
                batch = list(batch)
            checksum, number = _add(checksum, batch), number + 1
            if number == self._skipped and checksum != self._wanted:
                raise self._other()
            if number > self._skipped:
                self._checksums.append((number, checksum))
                while self._checksums[0][0] < self.progress.position:
                    self._checksums.popleft()
            yield batch
        if number < self._skipped:
            raise self._other()

    def _other(self) -> FormatError:
        return FormatError(
            "The sampler gives other rows than it gave before the state was saved, so the loader cannot go on behind"
            " those: its order must follow from its epoch, its generator, or its own state_dict.",
            save=self._save,
        )

    def checksum(self) -> int:
        """Of the batches that were handed out."""
        while True:
            position = self.progress.position
            for number, checksum in self._checksums.copy():
                if number == position:
                    return checksum
            # Another thread has got a batch meanwhile.


def _add(checksum: int, batch: Any) -> int:
    """The checksum behind one more batch."""
    try:
        rows = np.asarray(batch, dtype=np.int64).reshape(-1)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return checksum  # no rows: an error when the batch is asked for
    return zlib.crc32(rows.tobytes(), zlib.crc32(len(rows).to_bytes(8, "little"), checksum))
