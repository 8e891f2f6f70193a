"""One append, and the repair of one that was killed: :func:`append_memmap`, :func:`recover_memmap`."""

from __future__ import annotations

import os
from typing import Any

from tdgpu.append.session import RowsLost, Session
from tdgpu.errors import InvalidArgument, InvalidArgumentType
from tdgpu.layout import commit
from tdgpu.layout.commit import RecoveryReport
from tdgpu.layout.growth import match
from tdgpu.layout.lock import WriterLock
from tdgpu.options import get as get_options
from tdgpu.signals import uninterrupted

__all__ = ["append_memmap", "recover_memmap"]


def append_memmap(prefix: str | os.PathLike[str], rows: Any, *, allow_pickle: bool | None = None) -> None:
    """Appends rows to a saved directory, along its first batch dimension, as ``tensordict.append_memmap`` does.

    The rows are committed when this returns: every later load sees them, on all levels, whole. A load that runs
    meanwhile sees all of them or none. An error, Ctrl-C, or the death of the process leaves the save as it was, or with
    all of the rows. With the option ``durable`` (the default) they also survive a power failure.

    Rows on a device pass through pinned memory, on a stream of their own behind what the current stream holds now; host
    memory in use does not grow with them. Rows on the host are written from where they are.

    Many small appends are faster with a :class:`tdgpu.MemmapAppender`, which keeps the save open.

    Args:
        prefix: the directory that ``save`` or ``memmap`` wrote. Readers that opened it before keep what they see.
        rows: a tensor collection with the keys, classes, dtypes and trailing shapes of the save, whose batch size
            differs from the saved one in the first dimension only. On the host, on devices, or mixed; where a tensor is
            saved, an array with ``__dlpack__`` (CuPy, ...) counts as one. Non-tensor values must be those of the save.
        allow_pickle: whether pickled non-tensor data of the save, to which that of the rows is compared, may be loaded,
            as in :func:`tdgpu.load_memmap`.

    Raises:
        InvalidArgument: ``prefix`` is no directory, the save cannot grow (an archive, a lazy stack, a nested
            tensor, a stack of non-tensors), the rows do not fit, or a file of the save is a symbolic link or has
            a hard link (a ValueError). Nothing has been changed.
        SaveNotFound: the directory is no save (a FileNotFoundError).
        InvalidArgumentType: ``rows`` is no tensor collection (a TypeError).
        SaveLocked: another writer did not end within the option ``lock_timeout`` (a TimeoutError); ``error.pid``.
        AppendError: no space, or a file that cannot be written (an OSError). The message says whether the rows are
            committed: they are not, unless only what follows the commit has failed.
        TransferError: the device refused (a RuntimeError). Nothing has been changed.
        PermissionError: a directory of the save cannot be written.
        FormatError, MissingLeafError, LeafSizeError: the save is damaged.
        PickleRefused: pickled data with ``allow_pickle=False`` (a RuntimeError).

    Example:
        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = TensorDict(a=torch.zeros(3, 2), batch_size=[3]).memmap(path)
        ...     tdgpu.append_memmap(path, TensorDict(a=torch.ones(2, 2), batch_size=[2]))
        ...     print(tdgpu.load_memmap(path)["a"].sum(-1).tolist())
        [0.0, 0.0, 0.0, 2.0, 2.0]
    """
    if allow_pickle is not None and not isinstance(allow_pickle, bool):
        raise InvalidArgumentType(f"allow_pickle must be a bool or None, got {allow_pickle!r}.")
    settings = get_options()
    session = Session(prefix, durable=settings.durable, timeout=settings.lock_timeout, allow_pickle=allow_pickle)
    try:
        count, tensors = match(session.growing, rows)
        session.stage(count, tensors, in_place=True)
        session.finish(session.snapshot())
    except RowsLost as lost:
        raise session.fail(lost) from lost.__cause__
    finally:
        uninterrupted(session.close, always=True)


def recover_memmap(prefix: str | os.PathLike[str]) -> RecoveryReport:
    """Completes or undoes what a killed append has left in a saved directory.

    Appends do this by themselves first, and loads show such a save as it will be then. So it is for those who want to
    know, and for other programs that read the save. It follows tensordict's rule for its own ``append_memmap``. Only
    numbers of rows are looked at: :func:`tdgpu.verify_memmap` tells whether all files are there.

    Args:
        prefix: the saved directory.

    Returns:
        What was found and done: ``state`` is ``"clean"`` (nothing to do), ``"undone"`` (the save has its old rows) or
        ``"completed"`` (it has the new ones); ``rows``, how many there are; ``completed`` and ``removed``, the files
        that took their place or are gone; ``surplus``, bytes behind the rows in leaf files, which the next append
        overwrites.

    Raises:
        InvalidArgument: there is no saved directory (a ValueError).
        SaveLocked: a writer is at work, and did not end within the option ``lock_timeout`` (a TimeoutError).
        FormatError: levels have different numbers of rows, and no file to mend that with. Nothing has been changed.
        OSError: a file cannot be renamed or removed.

    Example:
        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = TensorDict(a=torch.zeros(3, 2), batch_size=[3]).memmap(path)
        ...     report = tdgpu.recover_memmap(path)
        ...     print(report.state, report.rows)
        clean 3
    """
    path = os.path.abspath(os.fspath(prefix))
    if not os.path.isdir(path):
        raise InvalidArgument("Only a saved directory can be recovered, and this is none.", save=path)
    lock = WriterLock(path, get_options().lock_timeout)
    try:
        report: RecoveryReport = uninterrupted(lambda: commit.recover(path))
        return report
    finally:
        uninterrupted(lock.release, always=True)
