"""Streams through torch's device-independent names, with the driver's handle where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tdgpu.errors import DeviceError


def current_index(device_type: str) -> int:
    """The index of the current device of that type: what ``"cuda"`` without an index means."""
    module = torch.get_device_module(device_type)
    return int(module.current_device()) if hasattr(module, "current_device") else 0


def current_stream(device: torch.device) -> torch.Stream:
    """The stream on which work for `device` goes now."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device)
    return torch.accelerator.current_stream(device)


def handle(stream: torch.Stream) -> int:
    """The driver's handle of a stream (0: the legacy default stream)."""
    # torch's device-independent streams have native_handle, torch.cuda's have had cuda_stream for longer.
    value: int = stream.cuda_stream if hasattr(stream, "cuda_stream") else getattr(stream, "native_handle")  # noqa: B009
    return value


def is_default_accelerator(device: torch.device) -> bool:
    """Whether torch's device-independent stream functions speak of this device."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def side_stream(device: torch.device) -> torch.Stream | None:
    """A stream of its own for copies; None where the device has one stream only, whose order is all there is."""
    if not is_default_accelerator(device):
        return None
    try:
        return torch.Stream(device)
    except (RuntimeError, NotImplementedError):
        return None


def host_buffer(device: torch.device, wanted: int, smallest: int) -> tuple[torch.Tensor, bool]:
    """Host memory for staging copies from or to a device.

    Args:
        device: the device.
        wanted: bytes.
        smallest: how few pinned bytes are still of use.

    Returns:
        A tensor of bytes, and whether it is pinned: then it may be smaller than `wanted`.
    """
    size = wanted
    while size >= smallest and is_default_accelerator(device):
        try:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, NotImplementedError):
            size //= 2  # the machine allows no more
            continue
        if buffer.is_pinned():
            return buffer, True
        break
    return torch.empty(wanted, dtype=torch.uint8), False


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on the device; None if it does not tell."""
    module = torch.get_device_module(device.type)
    try:
        return int(module.mem_get_info(device)[0])
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


@contextlib.contextmanager
def on(stream: torch.Stream | None, device: torch.device) -> Iterator[None]:
    """Makes a stream current for a block; None changes nothing."""
    if stream is None:
        yield
        return
    previous = current_stream(device)
    # A stream's device becomes the current one with it.
    with current_device_kept():
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(previous)


@contextlib.contextmanager
def current_device_kept() -> Iterator[None]:
    """Making a stream of another device current makes that device current, too: this makes the former one so again."""
    if torch.accelerator.current_accelerator() is None:
        yield
        return
    index = torch.accelerator.current_device_index()
    try:
        yield
    finally:
        torch.accelerator.set_device_index(index)


def check_usable(device: torch.device) -> None:
    """Raises DeviceError unless torch can use the device now, with the reason; starts torch's own use of it."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(f"The device {device} cannot be used: {error}") from error
