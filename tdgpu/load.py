"""Loading a save: :func:`load_memmap`, and :func:`load_save` of one that has been read."""

from __future__ import annotations

import contextlib
import operator
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import is_tensor_collection

from tdgpu.errors import InvalidArgument, InvalidArgumentType
from tdgpu.layout import objects, reader
from tdgpu.layout.assemble import assemble
from tdgpu.layout.mapped import Mapper, check_mode
from tdgpu.layout.placeholders import Placeholders, fake_is_active
from tdgpu.layout.places import check_out, places
from tdgpu.layout.rows import check, narrow
from tdgpu.layout.save import Save
from tdgpu.layout.tree import Leaf
from tdgpu.transfer import LoadFuture, Transfer, host, start
from tdgpu.transfer.progress import bar

__all__ = ["Request", "check_allow_pickle", "load_memmap", "load_save"]

_CPU = torch.device("cpu")


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
    rows: slice | None = None,
    verify: bool = False,
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
            ``"r+"`` where a directory's file can be written, else ``"r"``. Without effect where nothing is mapped.
        num_threads: native threads that inflate an archive's leaves on the CPU; 0 inflates one after the other. For an
            accelerator, how many of its reader threads (option ``threads``) may work on this load; 0 for all of them.
        allow_pickle: whether pickled non-tensor data may be loaded, which can run any code. None loads it and warns.
        return_early: return a :class:`tdgpu.LoadFuture` instead: nothing waits until its ``result()``.
        rows: a slice without a step: load only those rows, along the first batch dimension of what is loaded (of
            ``subpath``, if given). The result is what indexing the whole loaded object gives, and only the bytes of
            those rows are read; of a compressed archive, the blocks that hold them, or the whole leaf where it has no
            blocks. Bounds are those of a list: ``slice(-100, None)`` is the last hundred, and one past the end is the
            end. Of a lazy stack along that dimension, only the members in the range are loaded; of a strided nested
            leaf, those components. Non-tensor contents are read whole. The result, unless it is everything
            (``slice(None)``), does not know the directory as its own.
        verify: check the CRC-32 of the leaves that an archive stores uncompressed, too. What is inflated is always
            checked. Without effect on directories, which have no checksums.
        progress: show a progress bar while a blocking load moves or inflates bytes.

    Returns:
        The saved class: a TensorDict, a tensorclass, a lazy stack; or ``out``; or a future. It is not locked, and its
        ``device`` is where its leaves are.

    Raises:
        InvalidArgument: an unknown ``mode``, a file that is no archive, ``rows`` with a step or of a save without a
            batch dimension (a ValueError).
        InvalidArgumentType: an ``allow_pickle`` that is no bool, an ``out`` that is no collection, ``rows`` that are no
            slice of integers (a TypeError).
        SubpathError: ``subpath`` names no saved level (a ValueError).
        SaveNotFound: there is no save (a FileNotFoundError).
        MissingLeafError: a leaf, child or stack member is missing (a FileNotFoundError).
        LeafSizeError: a leaf's file is shorter than its tensor, or an archive's entry of another size (a RuntimeError).
        FormatError: malformed metadata, an unknown class, a key that leads outside the save, rows that contradict each
            other (a RuntimeError).
        ArchiveError: the archive's directory or one of its headers is damaged or refused (a ``zipfile.BadZipFile``).
        OutMismatchError, LockedOutError: ``out`` cannot take the save (a ValueError, a RuntimeError).
        PickleRefused: pickled data with ``allow_pickle=False`` (a RuntimeError).
        ArchiveNotSupported: ``mode="r+"``, and a leaf of an archive that writes cannot reach (a NotImplementedError).
        NotSupported: not possible in torch, or not on this machine (a NotImplementedError).
        ChecksumError: an entry does not inflate to what the archive promises (an OSError, a ``zipfile.BadZipFile``).
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
    request = Request.checked(
        device, non_blocking, out=out, robust_key=robust_key, mode=mode, num_threads=num_threads,
        allow_pickle=allow_pickle, return_early=return_early, rows=rows, verify=verify, progress=progress,
    )  # fmt: skip
    save = reader.read(prefix, subpath=subpath, robust_key=robust_key, check=not request.structure_only)
    with contextlib.closing(save):
        return load_save(save, request)


def check_allow_pickle(allow_pickle: object) -> bool | None:
    """``allow_pickle``, if it is a bool or None.

    Raises:
        InvalidArgumentType: it is not.
    """
    if allow_pickle is None or isinstance(allow_pickle, bool):
        return allow_pickle
    raise InvalidArgumentType(f"allow_pickle must be a bool or None, got {allow_pickle!r}.")


@dataclass(frozen=True)
class Request:
    """What a load is asked for: the arguments of :func:`load_memmap` once they are checked.

    Attributes:
        device: where the leaves go; None: the CPU, mapped.
        non_blocking, out, robust_key, mode, allow_pickle, return_early, verify, progress: as in :func:`load_memmap`.
        threads: so many threads inflate on the CPU, 0 being one after the other; on a device at most so many of the
            engine's.
        rows: the rows to load; None: all.
        fake: whether a ``FakeTensorMode`` is active.
        keep_prefix: whether a mapped result of the whole save knows the directory as its own.
        started: when the call began, by ``time.perf_counter()``.
    """

    device: torch.device | None
    non_blocking: bool
    out: Any
    robust_key: bool | None
    mode: str | None
    threads: int
    allow_pickle: bool | None
    return_early: bool
    rows: slice | None
    verify: bool
    progress: bool
    fake: bool
    keep_prefix: bool
    started: float

    @property
    def structure_only(self) -> bool:
        """Whether no leaf's file is needed."""
        return self.fake or (self.device is not None and self.device.type == "meta")

    @classmethod
    def checked(
        cls,
        device: torch.device | str | int | None,
        non_blocking: bool,
        *,
        out: Any,
        robust_key: bool | None,
        mode: str | None,
        num_threads: int,
        allow_pickle: bool | None,
        return_early: bool,
        rows: slice | None,
        verify: bool,
        progress: bool,
        keep_prefix: bool = True,
    ) -> Request:
        """Checks what can be checked without the save.

        Raises:
            InvalidArgument, InvalidArgumentType: see :func:`load_memmap`.
        """
        if mode not in (None, "r", "r+"):
            raise InvalidArgument(f"mode must be 'r', 'r+' or None, got {mode!r}.")
        check_allow_pickle(allow_pickle)
        if out is not None and not is_tensor_collection(out):
            raise InvalidArgumentType(f"out must be a tensor collection, got a {type(out).__name__}.")
        wanted_rows = None if rows is None else check(rows)
        if not hasattr(num_threads, "__index__"):
            raise InvalidArgumentType(f"num_threads is a whole number, not {num_threads!r}.")
        return cls(
            threads=operator.index(num_threads),
            started=time.perf_counter(),
            device=None if device is None else torch.device(device),
            fake=fake_is_active(),
            non_blocking=non_blocking, out=out, robust_key=robust_key, mode=mode, allow_pickle=allow_pickle,
            return_early=return_early, rows=wanted_rows, verify=verify, progress=progress, keep_prefix=keep_prefix,
        )  # fmt: skip


def load_save(save: Save, request: Request) -> Any:
    """Loads a save that has been read, as :func:`load_memmap` does.

    Args:
        save: the save, whose leaves' files were checked unless ``request.structure_only``. It is not changed, except
            that its non-tensor contents are read, for which an archive must still be open.
        request: what is wanted of it.

    Returns:
        What :func:`load_memmap` returns.

    Raises:
        TdgpuError: see :func:`load_memmap`.
    """
    objects.resolve(save, request.allow_pickle)
    whole = save
    if request.rows is not None:
        save = narrow(save, request.rows)
    check_mode(save, request.mode, structure_only=request.structure_only)
    check_out(save, request.device, request.out)
    where = places(save, request.device, request.out)

    def build(provide: Callable[[Leaf], torch.Tensor]) -> Any:
        return assemble(
            save, provide, device=request.device, out=request.out, allow_pickle=request.allow_pickle,
            robust_key=request.robust_key, mode=request.mode,
            keep_prefix=request.keep_prefix and not request.fake and save is whole,
        )  # fmt: skip

    on_host = _host_leaves(save, where, request.mode, request.fake)
    moving = {} if request.structure_only else _moving(where)
    if request.verify and not request.structure_only:
        _verify_stored(save, where, request.threads)
    if not moving:
        result = build(on_host)
        path = "structure" if request.structure_only else "mapped"
        return LoadFuture(result, save, [], path=path, started=request.started) if request.return_early else result

    transfers: dict[torch.device, Transfer] = {}
    try:
        for place, leaves in moving.items():
            if place.type == "cpu":
                transfers[place] = host.start(save.prefix, leaves, threads=request.threads)
            else:
                transfers[place] = start(
                    save.prefix, leaves, place, early=request.return_early, verify=request.verify,
                    most_threads=max(request.threads, 0),
                )  # fmt: skip
        carrier = {leaf: transfers[place] for place, leaves in moving.items() for leaf in leaves}

        def provide(leaf: Leaf) -> torch.Tensor:
            transfer = carrier.get(leaf)
            return on_host(leaf) if transfer is None else transfer.tensor(leaf)

        if not request.return_early:
            # First the bytes, so that an `out` is left as it was where they cannot be had. On the CPU there is no
            # stream that could wait for them.
            for transfer in transfers.values():
                if request.non_blocking and transfer.device.type != "cpu":
                    continue
                what = "inflating" if transfer.device.type == "cpu" else f"loading to {transfer.device}"
                with bar(what, transfer.flight.nbytes, enabled=request.progress) as tell:
                    transfer.synchronize(tell)
        result = build(provide)
        if request.return_early:
            return LoadFuture(result, save, list(transfers.values()), started=request.started)
        if request.non_blocking:
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
    mapper = Mapper(save, mode)

    def on_cpu(leaf: Leaf) -> torch.Tensor:
        place = where[leaf]
        tensor = mapper(leaf)
        return tensor if place is None else tensor.to(place)

    def maker(place: torch.device | None) -> Callable[[Leaf], torch.Tensor]:
        is_structure = fake or (place is not None and place.type == "meta")
        return Placeholders(place, save.prefix) if is_structure else on_cpu

    makers = {place: maker(place) for place in set(where.values())}
    if len(makers) == 1:
        return next(iter(makers.values()))
    return lambda leaf: makers[where[leaf]](leaf)


def _moving(where: dict[Leaf, torch.device | None]) -> dict[torch.device, list[Leaf]]:
    """The leaves whose bytes must be moved, by where they go: to an accelerator, or inflated to the CPU."""
    found: dict[torch.device, list[Leaf]] = {}
    for leaf, place in where.items():
        if leaf.extent is None or (place is not None and place.type == "meta"):
            continue
        if place is not None and place.type != "cpu":
            found.setdefault(place, []).append(leaf)
        elif leaf.extent.is_compressed:
            found.setdefault(_CPU, []).append(leaf)
    return found


def _verify_stored(save: Save, where: dict[Leaf, torch.device | None], threads: int) -> None:
    """Checks the CRC-32 of the leaves that are mapped from where an archive stores them as they are."""
    wants = [
        host.Want(leaf.extent, leaf.key, 0, leaf.extent.nbytes, 0)
        for leaf, place in where.items()
        if leaf.extent is not None
        and leaf.extent.packed is not None
        and not leaf.extent.is_compressed
        and (place is None or place.type == "cpu")
    ]
    host.read(save.prefix, wants, threads=threads)
