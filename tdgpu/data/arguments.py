"""What DeviceLoader's arguments may be."""

from __future__ import annotations

import math
import operator
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from torch.utils.data import BatchSampler

from tdgpu.errors import DeviceError, InvalidArgument, InvalidArgumentType, NotSupported
from tdgpu.layout.placeholders import fake_is_active

__all__ = [
    "MOST_THREADS",
    "Sharding",
    "check_batching",
    "check_bools",
    "check_callables",
    "check_device",
    "check_samplers",
    "pins",
    "place",
    "refuse_fake_mode",
    "refuse_processes",
    "residence",
    "seconds",
    "seed",
    "whole",
]


#: Of ``num_workers``, as of the option ``threads``.
MOST_THREADS = 256


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


def check_bools(**switches: Any) -> None:
    """Raises InvalidArgumentType for what is neither True nor False."""
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise InvalidArgumentType(f"{name} must be a bool, got {switch!r}.")


def check_samplers(sampler: Any, batch_sampler: Any, batch_size: Any) -> None:
    """Refuses what gives no indices, or not one by one.

    Raises:
        InvalidArgument, InvalidArgumentType: with the reason.
    """
    for name, given, what in (
        ("sampler", sampler, "indices"),
        ("batch_sampler", batch_sampler, "lists of indices"),
    ):
        is_iterable = hasattr(given, "__iter__") or hasattr(given, "__getitem__")
        has_no_items = isinstance(given, (str, bytes)) or (
            isinstance(given, (torch.Tensor, np.ndarray)) and not given.ndim
        )
        if given is not None and (not is_iterable or has_no_items):
            raise InvalidArgumentType(
                f"{name} must be a Sampler, or anything else that can be iterated for {what}, got {given!r:.200}."
            )
    if isinstance(sampler, BatchSampler) and batch_size is not None:
        raise InvalidArgument(LISTS)


#: What is wrong with a sampler that gives batches where rows are wanted.
LISTS = "The sampler gives lists of indices, which are batches: say batch_size=None, or give it as batch_sampler=."


def check_batching(
    batch_size: Any, shuffle: Any, sampler: Any, batch_sampler: Any, drop_last: Any, generator: Any
) -> None:
    """Refuses what contradicts itself, as DataLoader does.

    Raises:
        InvalidArgument, InvalidArgumentType: with the reason.
    """
    if shuffle not in (None, False, True, "permute"):
        raise InvalidArgument(f'shuffle must be True, False or "permute", got {shuffle!r}.')
    check_bools(drop_last=drop_last)
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


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number that is at least ``least``, and at most ``most``."""
    if isinstance(value, bool):
        raise InvalidArgumentType(f"{name} must be a whole number, got {value!r}.")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentType(f"{name} must be a whole number, got {value!r}.") from None
    if number < least:
        raise InvalidArgument(f"{name} must be at least {least}, got {number}.")
    if most is not None and number > most:
        raise InvalidArgument(f"{name} must be at most {most}, got {number}.")
    return number


def seconds(name: str, value: Any) -> float:
    """A time, not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgumentType(f"{name} must be a number of seconds, got {value!r}.")
    if not value >= 0 or math.isinf(value):
        raise InvalidArgument(f"{name} must be at least 0 seconds, got {value!r}.")
    return float(value)


def seed(value: Any, world_size: int, generator: torch.Generator | None = None) -> int:
    """The seed of shuffles. The global generator is asked for its own, and not drawn from."""
    if value is not None and generator is not None:
        raise InvalidArgument("The order comes from generator= or follows from seed=: give one of them.")
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
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InvalidArgument(f"device={device!r} is no device here: {_first_line(error)}") from None
    except TypeError:
        raise InvalidArgumentType(f"device must be a torch.device, or its name or index, got {device!r}.") from None
    if found.type == "meta":
        raise InvalidArgument("Batches on the meta device would have no bytes: load_memmap gives the structure.")
    return found


def check_device(device: torch.device | None) -> None:
    """Raises DeviceError if this machine does not have the device. Nothing of it is started."""
    if device is None or device.type == "cpu":
        return
    try:
        count = int(torch.get_device_module(device.type).device_count())
    except (RuntimeError, AttributeError) as error:
        raise DeviceError(f"The device {device} cannot be used: {_first_line(error)}") from None
    if (device.index or 0) >= count:
        raise DeviceError(
            f"The device {device} cannot be used: torch {torch.__version__} finds {count or 'no'} devices of that type"
            " here."
        )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def refuse_fake_mode(save: str) -> None:
    """Raises NotSupported while a ``FakeTensorMode`` is active."""
    # The first question costs a tenth of the second, and there is rarely a mode.
    if torch._C._len_torch_dispatch_stack() and fake_is_active():
        raise NotSupported(
            "Under a FakeTensorMode tensors have no bytes that rows could be read into: take the rows outside of it."
            " load_memmap gives the structure.",
            save=save,
        )


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
        if not isinstance(mask_key, (str, type(None))):
            raise InvalidArgumentType(f"mask_key must be a string, got {mask_key!r}.")
        if mask_key is not None and padding != "mask":
            raise InvalidArgument('mask_key names the entry of padding="mask", and without it there is no mask.')
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
        return cls(rank, world_size, (mask_key or "mask") if padding == "mask" else None)
