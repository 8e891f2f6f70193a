"""Rows of another save or archive, appended byte by byte: no tensor is made of them."""

from __future__ import annotations

import contextlib
import os

import torch

from tdgpu.append.session import RowsLost, Session
from tdgpu.errors import InvalidArgument
from tdgpu.layout import objects, reader
from tdgpu.layout.assemble import assemble
from tdgpu.layout.growth import match
from tdgpu.layout.placeholders import Placeholders
from tdgpu.layout.rows import check, narrow
from tdgpu.layout.save import Save
from tdgpu.options import get as get_options
from tdgpu.signals import uninterrupted
from tdgpu.transfer import host
from tdgpu.transfer.progress import bar

__all__ = ["append_save"]

_META = torch.device("meta")


def append_save(
    prefix: str | os.PathLike[str],
    source: str | os.PathLike[str],
    *,
    rows: slice | None = None,
    durable: bool | None = None,
    allow_pickle: bool | None = None,
    progress: bool = False,
) -> int:
    """Appends the rows of another save, all of them or none.

    Args:
        prefix: the saved directory that grows.
        source: a saved directory or an archive; compressed leaves are inflated on the way, by native threads. Host
            memory in use does not grow with it.
        rows: which of its rows, as in :func:`tdgpu.load_memmap`.
        durable: whether the rows survive a power failure when this returns; None: as the option ``durable`` says.
        allow_pickle: as in :func:`tdgpu.append_memmap`, of both saves.
        progress: show a progress bar on stderr, if that is a terminal.

    Returns:
        How many rows were appended.

    Raises:
        InvalidArgument: as of :func:`tdgpu.append_memmap`; ``source`` is the save that grows.
        ChecksumError, LoadError: ``source`` cannot be read. Nothing has been changed.
        Everything that :func:`tdgpu.append_memmap` and the reading of a save raise.

    Example:
        >>> import tempfile, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = TensorDict(a=torch.arange(3), batch_size=[3]).memmap(path + "/all")
        ...     _ = TensorDict(a=torch.arange(5), batch_size=[5]).save(path + "/more.tdz")
        ...     print(append_save(path + "/all", path + "/more.tdz", rows=slice(3, None)))
        ...     print(tdgpu.load_memmap(path + "/all")["a"].tolist())
        2
        [0, 1, 2, 3, 4]
    """
    settings = get_options()
    if os.path.isdir(prefix) and os.path.isdir(source) and os.path.samefile(prefix, source):
        raise InvalidArgument("A save cannot be appended to itself this way.", save=prefix)
    wanted = None if rows is None else check(rows)
    save = reader.read(source)
    with contextlib.closing(save):
        objects.resolve(save, allow_pickle)
        if wanted is not None:
            save = narrow(save, wanted)
        # What fits is told by an object of its structure, which has no bytes.
        like = assemble(
            save, Placeholders(_META, save.prefix), device=_META, allow_pickle=allow_pickle, keep_prefix=False
        )
        session = Session(
            prefix, durable=settings.durable if durable is None else durable, timeout=settings.lock_timeout,
            allow_pickle=allow_pickle,
        )  # fmt: skip
        try:
            count, _ = match(session.growing, like)
            session.count(count)
            _copy(session, save, count, progress=progress)
            session.finish(session.snapshot())
        except RowsLost as lost:
            raise session.fail(lost) from lost.__cause__
        finally:
            uninterrupted(session.close, always=True)
    return count


def _copy(session: Session, save: Save, count: int, *, progress: bool) -> None:
    """Puts the bytes of all leaves behind the committed rows."""
    by_key = {leaf.key: leaf for leaf in save.leaves()}
    before = session.growing.rows
    wants, targets = [], {}
    for number, grows in enumerate(session.growing.leaves):
        leaf = by_key[grows.key]
        if leaf.extent is not None:
            wants.append(host.Want(leaf.extent, leaf.key, leaf.first, leaf.nbytes, 0))
            targets[leaf.key] = number, before * grows.row_nbytes
    done = 0
    with bar(f"appending {count} rows", sum(want.nbytes for want in wants), enabled=progress) as tell:
        for want, first, data in host.stream(save.prefix, wants, threads=get_options().threads, verify=True):
            number, place = targets[want.key]
            session.put(data, number, place + first)
            done += len(data)
            tell(done)
