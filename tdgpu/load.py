"""Loading a save: :func:`load_memmap`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, is_memmap_archive, is_tensor_collection

from tdgpu.errors import ArchiveNotSupported, InvalidArgument, InvalidArgumentType, NotSupported
from tdgpu.layout import directory, objects
from tdgpu.layout.assemble import assemble
from tdgpu.layout.mapped import mapped
from tdgpu.layout.placeholders import Placeholders, fake_is_active
from tdgpu.layout.places import check_out, places
from tdgpu.layout.tree import Leaf, Save
from tdgpu.transfer import LoadFuture, Transfer, start
from tdgpu.transfer.progress import bar

__all__ = ["load_memmap"]


def load_memmap(
    prefix: str | os.PathLike[str],
    device: torch.device | str | int | None = None,
    non_blocking: bool = False,
    *,
    out: Any = None,
    robust_key: bool | None = True,
    subpath: Any = None,
    mode: str | None = None,
    num_threads: int = 0,
    allow_pickle: bool | None = None,
    return_early: bool = False,
    rows: Any = None,
    progress: bool = False,
) -> Any:
    """Loads what ``TensorDict.memmap`` or ``save`` wrote.

    The first nine arguments are those of ``TensorDict.load_memmap``, in its order, with its defaults and meaning. What
    is different is said here. Every leaf's file is checked before anything is allocated or changed, and no load ever
    changes a file.

    Args:
        prefix: the saved directory, or an archive (``.tdz``).
        device: where the leaves go.

            - None or ``"cpu"``: they are memory-mapped, and read when they are used.
            - An accelerator (``"cuda"``, ``"cuda:1"``, an index, ...): native threads read them into pinned memory, and
              a copy stream moves them on. ``"cuda"`` is the current device.
            - ``"meta"``: structure only, in meta tensors; no leaf's file is opened. The same under an active
              ``FakeTensorMode``, which makes fake tensors on the given device.
        non_blocking: on an accelerator: return at once. What is issued later on the stream that is current during this
            call sees the loaded data. Without it, the bytes are on the device when this returns.
        out: a tensor collection to load into. Its nested collections are reused, its leaves are replaced, its keys that
            are not in the save are removed, and its batch size and names stay. If it has a device, that is used. It is
            returned, unless it is of another kind than the save: a tensorclass is then made around it, a stack anew.
        robust_key: whether keys are percent-encoded in file names (True, None), or used as they are (False).
        subpath: the nested level to load, as a nested key or a ``"/"``-separated path.
        mode: how files are mapped: ``"r"``, writes to the leaves stay in memory; ``"r+"``, they reach the files; None,
            ``"r+"`` where the file can be written, else ``"r"``. Without effect where nothing is mapped.
        num_threads: threads that inflate the leaves of a compressed archive on the CPU. Without effect on directories.
        allow_pickle: whether pickled non-tensor data may be loaded, which can run any code. None loads it and warns.
        return_early: return a :class:`tdgpu.LoadFuture` instead: nothing waits until its ``result()``.
        rows: not supported yet.
        progress: show a progress bar while a blocking load to an accelerator runs.

    Returns:
        The saved class: a TensorDict, a tensorclass, a lazy stack; or ``out``; or a future. It is not locked, and its
        ``device`` is where its leaves are.

    Raises:
        InvalidArgument: an unknown ``mode``, a file that is no archive (a ValueError).
        InvalidArgumentType: an ``allow_pickle`` that is no bool, an ``out`` that is no collection (a TypeError).
        SubpathError: ``subpath`` names no saved level (a ValueError).
        SaveNotFound: there is no save (a FileNotFoundError).
        MissingLeafError: a leaf, child or stack member is missing (a FileNotFoundError).
        LeafSizeError: a leaf's file is shorter than its tensor (a RuntimeError).
        FormatError: malformed metadata, an unknown class, a key that leads outside the save (a RuntimeError).
        OutMismatchError, LockedOutError: ``out`` cannot take the save (a ValueError, a RuntimeError).
        PickleRefused: pickled data with ``allow_pickle=False`` (a RuntimeError).
        ArchiveNotSupported, NotSupported: not possible yet, or not in torch (a NotImplementedError).
        TransferError: the bytes could not be moved (a RuntimeError). A load that returned before says so later.
        PermissionError: ``mode="r+"``, and a file that cannot be written.

    Example:
        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = TensorDict(obs=torch.arange(6.0).view(2, 3), batch_size=[2]).memmap(path)
        ...     print(load_memmap(path)["obs"].sum().item())
        ...     print(load_memmap(path, device="meta")["obs"])
        15.0
        tensor(..., device='meta', size=(2, 3))
    """
    if mode not in (None, "r", "r+"):
        raise InvalidArgument(f"mode must be 'r', 'r+' or None, got {mode!r}.")
    if allow_pickle is not None and not isinstance(allow_pickle, bool):
        raise InvalidArgumentType(f"allow_pickle must be a bool or None, got {allow_pickle!r}.")
    if out is not None and not is_tensor_collection(out):
        raise InvalidArgumentType(f"out must be a tensor collection, got a {type(out).__name__}.")
    if rows is not None:
        raise NotSupported("load_memmap(rows=...) is not supported yet: index the memory-mapped result instead.")
    started = time.perf_counter()
    target = None if device is None else torch.device(device)
    if os.path.isfile(prefix) and is_memmap_archive(Path(prefix)):
        return _load_archive(
            Path(prefix), target, non_blocking, return_early, out=out, robust_key=robust_key, subpath=subpath,
            mode=mode, num_threads=num_threads, allow_pickle=allow_pickle,
        )  # fmt: skip

    fake = fake_is_active()
    structure_only = fake or (target is not None and target.type == "meta")
    save = directory.read(prefix, subpath=subpath, robust_key=robust_key, check=not structure_only)
    objects.resolve(save, allow_pickle)
    check_out(save, target, out)
    where = places(save, target, out)

    def build(provide: Callable[[Leaf], torch.Tensor]) -> Any:
        return assemble(
            save, provide, device=target, out=out, allow_pickle=allow_pickle, robust_key=robust_key, mode=mode,
            keep_prefix=not fake,
        )  # fmt: skip

    on_host = _host_leaves(save, where, mode, fake)
    accelerators = {} if structure_only else _by_accelerator(where)
    if not accelerators:
        result = build(on_host)
        path = "structure" if structure_only else "mapped"
        return LoadFuture(result, save, [], path=path, started=started) if return_early else result

    transfers: dict[torch.device, Transfer] = {}
    try:
        for accelerator, leaves in accelerators.items():
            transfers[accelerator] = start(save.prefix, leaves, accelerator, early=return_early)

        def provide(leaf: Leaf) -> torch.Tensor:
            place = where[leaf]
            transfer = None if place is None else transfers.get(place)
            return on_host(leaf) if transfer is None else transfer.tensor(leaf)

        if not (non_blocking or return_early):
            # First the bytes, so that an `out` is left as it was where they cannot be had.
            for transfer in transfers.values():
                with bar(f"loading to {transfer.device}", transfer.flight.nbytes, enabled=progress) as tell:
                    transfer.synchronize(tell)
        result = build(provide)
        if return_early:
            return LoadFuture(result, save, list(transfers.values()), started=started)
        if non_blocking:
            for transfer in transfers.values():
                transfer.wait()
                transfer.leave()
    except BaseException:
        for transfer in transfers.values():
            transfer.cancel()
        raise
    return result


def _host_leaves(
    save: Save, where: dict[Leaf, torch.device | None], mode: str | None, fake: bool
) -> Callable[[Leaf], torch.Tensor]:
    """What makes the leaves that need no transfer: mapped on the CPU, meta, or fake."""

    def on_cpu(leaf: Leaf) -> torch.Tensor:
        place = where[leaf]
        tensor = mapped(leaf, mode)
        return tensor if place is None else tensor.to(place)

    def maker(place: torch.device | None) -> Callable[[Leaf], torch.Tensor]:
        is_structure = fake or (place is not None and place.type == "meta")
        return Placeholders(place, save.prefix) if is_structure else on_cpu

    makers = {place: maker(place) for place in set(where.values())}
    if len(makers) == 1:
        return next(iter(makers.values()))
    return lambda leaf: makers[where[leaf]](leaf)


def _by_accelerator(where: dict[Leaf, torch.device | None]) -> dict[torch.device, list[Leaf]]:
    """The leaves that have bytes to be moved, by the accelerator they go to."""
    found: dict[torch.device, list[Leaf]] = {}
    for leaf, place in where.items():
        if place is not None and place.type not in ("cpu", "meta") and leaf.extent is not None:
            found.setdefault(place, []).append(leaf)
    return found


def _load_archive(
    prefix: Path, device: torch.device | None, non_blocking: bool, return_early: bool, **arguments: Any
) -> Any:
    """An archive, which so far tensordict's own loader reads, on the CPU only."""
    out = arguments["out"]
    wanted = device if device is not None or out is None else out.device
    if wanted is not None and wanted.type != "cpu":
        raise ArchiveNotSupported(
            f"An archive cannot be loaded on {wanted} yet: unpack it into a directory"
            " (tensordict.unpack_memmap), or load it on the CPU.",
            save=prefix,
        )
    result = TensorDict.load_memmap(prefix, device, non_blocking, **arguments)
    return LoadFuture(result, None, [], path="mapped") if return_early else result
