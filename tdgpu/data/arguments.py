"""What DeviceLoader's arguments may be."""

from __future__ import annotations

import math
import operator
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed

from tdgpu.errors import InvalidArgument, InvalidArgumentType

__all__ = [
    "Sharding",
    "check_batching",
    "check_callables",
    "pins",
    "place",
    "refuse_processes",
    "residence",
    "seconds",
    "seed",
    "whole",
]


def refuse_processes(worker_init_fn: Any, multiprocessing_context: Any, pin_memory_device: str | None) -> None:
    """Refuses what is meant for worker processes, of which there are none.

    Raises:
        InvalidArgument: one is given.
    """
    why = "DeviceLoader has threads instead of worker processes"
    if worker_init_fn is not None:
        raise InvalidArgument(
            f"worker_init_fn has nothing to initialise: {why}, which run no Python. Seed the transform itself."
        )
    if multiprocessing_context is not None:
        raise InvalidArgument(f"multiprocessing_context has no meaning: {why}.")
    if pin_memory_device:
        raise InvalidArgument("pin_memory_device has no meaning: say device=, and batches are on it.")


def check_callables(**functions: Any) -> None:
    """Raises InvalidArgumentType for what cannot be called."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise InvalidArgumentType(f"{name} must be a function, got {function!r}.")


def check_batching(
    batch_size: Any, shuffle: Any, sampler: Any, batch_sampler: Any, drop_last: Any, generator: Any
) -> None:
    """Refuses what contradicts itself, as DataLoader does.

    Raises:
        InvalidArgument, InvalidArgumentType: with the reason.
    """
    if shuffle not in (None, False, True, "permute"):
        raise InvalidArgument(f'shuffle must be True, False or "permute", got {shuffle!r}.')
    if not isinstance(drop_last, bool):
        raise InvalidArgumentType(f"drop_last must be a bool, got {drop_last!r}.")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InvalidArgumentType(f"generator must be a torch.Generator, got {generator!r}.")
    if sampler is not None and shuffle:
        raise InvalidArgument("sampler and shuffle exclude each other: the sampler says the order.")
    if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
        raise InvalidArgument("batch_sampler excludes batch_size, shuffle, sampler and drop_last: it says all that.")
    if batch_size is not None:
        whole("batch_size", batch_size, 1)
    elif drop_last:
        raise InvalidArgument("batch_size=None gives single rows, so there is no last batch to drop (drop_last).")
    if generator is not None and shuffle == "permute":
        raise InvalidArgument('shuffle="permute" follows from seed= and the epoch; it draws from no generator.')


def whole(name: str, value: Any, least: int) -> int:
    """A whole number that is at least ``least``."""
    if isinstance(value, bool):
        raise InvalidArgumentType(f"{name} must be a whole number, got {value!r}.")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentType(f"{name} must be a whole number, got {value!r}.") from None
    if number < least:
        raise InvalidArgument(f"{name} must be at least {least}, got {number}.")
    return number


def seconds(name: str, value: Any) -> float:
    """A time, not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgumentType(f"{name} must be a number of seconds, got {value!r}.")
    if not value >= 0 or math.isinf(value):
        raise InvalidArgument(f"{name} must be at least 0 seconds, got {value!r}.")
    return float(value)


def seed(value: Any, world_size: int) -> int:
    """The seed of shuffles. The global generator is asked for its own, and not drawn from."""
    if value is None:
        # Many programs seed each rank's generator otherwise, and ranks with other orders would share no rows out.
        return torch.initial_seed() if world_size == 1 else 0
    if isinstance(value, bool):
        raise InvalidArgumentType(f"seed must be a whole number, got {value!r}.")
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentType(f"seed must be a whole number, got {value!r}.") from None


def place(device: Any) -> torch.device | None:
    """The device of batches; None for the CPU, where they are as :class:`MemmapDataset` gives them."""
    if device is None:
        return None
    found = torch.device(device)
    if found.type == "meta":
        raise InvalidArgument("Batches on the meta device would have no bytes: load_memmap gives the structure.")
    return found


def pins(pin_memory: bool) -> bool:
    """Whether batches on the CPU are pinned. Without an accelerator they cannot be: a warning, as in DataLoader."""
    if pin_memory and not torch.accelerator.is_available():
        warnings.warn("pin_memory=True has no effect: there is no accelerator.", RuntimeWarning, stacklevel=5)
        return False
    return pin_memory


def residence(resident: Any, device: torch.device | None, collate_fn: Any) -> bool | str:
    """Whether the save is kept on the device."""
    if resident not in (True, False, "auto"):
        raise InvalidArgument(f'resident must be True, False or "auto", got {resident!r}.')
    if resident is True and (device is None or device.type == "cpu" or collate_fn is not None):
        raise InvalidArgument(
            "resident=True keeps the save on the device, and batches are made on the CPU here"
            + (" (collate_fn)." if collate_fn is not None else ": say device=.")
        )
    return resident


class Sharding(NamedTuple):
    """Which share of the rows is this process's.

    Attributes:
        rank, world_size: of so many processes this one.
        mask_key: the entry that tells which rows count; None if there is none.
    """

    rank: int
    world_size: int
    mask_key: str | None

    @classmethod
    def checked(cls, rank: Any, world_size: Any, padding: Any, mask_key: Any, *, has_sampler: bool) -> Sharding:
        """Raises InvalidArgument or InvalidArgumentType for what makes no sense."""
        if padding not in ("repeat", "mask"):
            raise InvalidArgument(f'padding must be "repeat" or "mask", got {padding!r}.')
        if not isinstance(mask_key, str):
            raise InvalidArgumentType(f"mask_key must be a string, got {mask_key!r}.")
        if (rank is None) != (world_size is None):
            raise InvalidArgument("rank and world_size belong together: give both or neither.")
        if has_sampler:
            if rank is not None or padding == "mask":
                raise InvalidArgument(
                    "A sampler says which rows are whose: rank, world_size and padding are not for it."
                )
            return cls(0, 1, None)
        if rank is None:
            rank, world_size = 0, 1
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        world_size = whole("world_size", world_size, 1)
        rank = whole("rank", rank, 0)
        if rank >= world_size:
            raise InvalidArgument(f"rank must be below world_size, got {rank} of {world_size}.")
        return cls(rank, world_size, mask_key if padding == "mask" else None)
