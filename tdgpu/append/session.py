"""One save that grows: locked, recovered, its files open."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import resource
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tdgpu.append.batch import Batch
from tdgpu.append.staging import Stager
from tdgpu.errors import (
    AppendError,
    InvalidArgument,
    LeafSizeError,
    MissingLeafError,
    NotSupported,
    TdgpuError,
)
from tdgpu.layout import commit, objects, reader, remembered
from tdgpu.layout.files import Where
from tdgpu.layout.growth import Growing, growing
from tdgpu.layout.lock import WriterLock
from tdgpu.layout.placeholders import fake_is_active
from tdgpu.options import get as get_options
from tdgpu.signals import uninterrupted, until_exit
from tdgpu.transfer import outgoing, outlets
from tdgpu.transfer.outgoing import FileError

__all__ = ["Session", "Snapshot"]


class Snapshot(NamedTuple):
    """What a commit is about: so many rows in all, which are written once the stores are over."""

    rows: int
    stores: tuple[outgoing.Store, ...]


class _Undo(NamedTuple):
    """How things were before a call: rows, stores under way, the batch, and the last chunk of each outlet."""

    rows: int
    stores: tuple[outgoing.Store, ...]
    in_batch: Batch
    batch: tuple[int, int, int]
    chunks: dict[torch.device, int]


_NOTHING = (0, 0, 0)  # the mark of an empty batch


class RowsLost(Exception):
    """Rows that were given to the writers did not get to the disk. ``__cause__`` says why."""


class Session:
    """The right to add rows to a save, and everything that takes.

    Rows are staged (``stage``), given to the writers (``post``, as the rings fill or for a commit) and committed. Until
    then they count for nobody. Not thread-safe, except that ``finish`` may run beside everything else.

    Attributes:
        growing: the save; ``growing.rows`` is what is committed.
        rows: committed and staged rows.
        failed: what has lost staged rows; nothing can be added any more.
    """

    _is_closed = True  # until it is open

    def __init__(
        self, prefix: str | os.PathLike[str], *, durable: bool, timeout: float, allow_pickle: bool | None
    ) -> None:
        """
        Args:
            prefix: the saved directory.
            durable: whether commits reach the disk before they count.
            timeout: seconds to wait for another writer.
            allow_pickle: as in :func:`tdgpu.load_memmap`.

        Raises:
            InvalidArgument: this is no saved directory, or it cannot grow.
            SaveLocked: another writer did not end in time.
            PermissionError: metadata cannot be replaced in one of its directories.
            FormatError, MissingLeafError, LeafSizeError: the save is not sound.
        """
        self.prefix = os.path.abspath(os.fspath(prefix))
        self.durable = durable
        self._process = os.getpid()
        if not os.path.isdir(self.prefix):
            raise InvalidArgument(
                "An archive cannot grow: unpack it with unpack_memmap first."
                if os.path.isfile(self.prefix)
                else "Rows are appended to a directory that save or memmap wrote, and there is none here."
                " (MemmapAppender.create makes one.)",
                save=self.prefix,
            )
        self._lock = WriterLock(self.prefix, timeout)
        try:
            self.growing = _read(self.prefix, allow_pickle)
            commit.check_writable(self.growing)
            self._row_nbytes = self.growing.row_sizes
            self.files = outgoing.Files(
                [leaf.file for leaf in self.growing.leaves], self._row_nbytes, _most_open(), get_options().threads
            )
            self._open_files()
        except BaseException:
            uninterrupted(self._lock.release, always=True)
            raise
        self.rows = self.growing.rows
        self.failed: AppendError | None = None
        self._loss: Exception | None = None  # why rows are lost, whoever has been told
        self._reserved = self.rows  # rows that there is space for
        self._posted = self.rows  # rows that the writers have, or had
        self._batch = Batch()
        # What the writers have, oldest first; what is written is let go.
        self._stores: collections.deque[outgoing.Store] = collections.deque()
        self._stager = Stager(self.growing)
        self._undo: _Undo | None = None
        self._is_closed = False

    def _open_files(self) -> None:
        try:
            self.files.open_all(self.growing.rows)
        except FileError as error:
            leaf = self.growing.leaves[error.file]
            where = Where(self.prefix, leaf.key, leaf.file)
            wanted = self.growing.rows * leaf.row_nbytes
            if error.code == errno.ENOENT:
                raise where.error(MissingLeafError, "The leaf's file is missing.") from None
            if error.code == errno.EINVAL:
                raise where.error(
                    LeafSizeError, "The leaf's file is too short.", wanted=wanted, found=error.found
                ) from None
            refused = {
                errno.ELOOP: "The leaf's file is a symbolic link: nothing is written through it.",
                errno.ENOTSUP: "The leaf's file is no regular file: it cannot grow.",
                errno.EISDIR: "The leaf's file is no regular file: it cannot grow.",
                errno.ENXIO: "The leaf's file is no regular file: it cannot grow.",
                errno.EMLINK: "The leaf's file has another name, too (a hard link), where rows would appear, too: copy"
                " the save.",
            }.get(error.code)
            if refused is not None:
                raise where.error(InvalidArgument, refused) from None
            if error.code in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise PermissionError(error.code, "Rows cannot be appended to this file", leaf.file) from None
            raise self._file_error(error, "The leaf's file cannot be opened") from error

    # --- staging ---

    def stage(self, count: int, tensors: Sequence[torch.Tensor], *, in_place: bool) -> None:
        """Stages rows, and gives them to the writers as the rings fill.

        When it returns, rows of a device may be overwritten by what is then queued on its current stream; rows on the
        host at once, or with ``in_place`` when they are written.

        Args:
            count: how many rows.
            tensors: those of ``growing.leaves``, in that order, as :func:`tdgpu.layout.growth.match` gives them.
            in_place: whether rows on the host are written from where they are, instead of from a copy.

        Raises:
            AppendError: there is no space for the rows, or a file cannot be opened. These rows are not taken; those
                that were staged before still are.
            TransferError, NotSupported: the device refused, or there is no data to copy. Likewise.
        """
        if fake_is_active():
            raise NotSupported("Under an active FakeTensorMode no tensor has bytes to append.", save=self.prefix)
        self._repair()
        if count == 0 or not tensors:
            self.rows += count
            return
        sizes = self._row_nbytes * np.uint64(count)
        places = self._row_nbytes * np.uint64(self.rows)
        with torch.no_grad():
            plan = self._stager.plan(count, tensors, sizes, in_place=in_place)
            # A few small rows wait in the batch for others. What is more fills batches of its own; so that none of it
            # is taken if something fails, the space for it comes first, and what came before it is on its way.
            if plan.is_large or not self._stager.fits(self._batch, plan, int(sizes.sum())):
                self.post()
            if plan.is_large:
                self._reserve(self.rows + count)
            self._undo = _Undo(self.rows, tuple(self._stores), self._batch, self._batch.mark(), self._stager.mark())
            try:
                self._stager.stage(plan, sizes, places, self._batch, self._post_batch)
                if plan.in_place:
                    batch = self._batch
                    self._post_batch()
                    if not in_place and batch.store is not None:
                        self._wait([batch.store])
                self.rows += count
                self._undo = None
            except BaseException as error:
                uninterrupted(self._repair, always=True)
                if isinstance(error, RowsLost) and error.__cause__ is not None:
                    raise error.__cause__ from None
                if isinstance(error, TdgpuError) and error.save is None:
                    error.save = self.prefix
                raise

    def put(self, data: memoryview, leaf: int, place: int) -> None:
        """Puts bytes of rows on their way to a leaf's file, for those who count the rows themselves (``count``)."""
        self._stager.put(data, leaf, place, self._batch, self._post_batch)

    def count(self, rows: int) -> None:
        """Counts rows, all of whose bytes were put, as staged. Raises AppendError if there is no space for them."""
        self._reserve(self.rows + rows)
        self.rows += rows

    def _repair(self) -> None:
        """Takes back what a call has staged that failed, or was interrupted, in the middle."""
        self._settle_batch()
        undo = self._undo
        if undo is not None:
            posted = [store for store in self._stores if store not in undo.stores]
            # If the batch has been posted in between, all of the present one is this call's.
            self._batch.take_back(undo.batch if self._batch is undo.in_batch else _NOTHING)
            _give_up(posted)
            self._stager.take_back(undo.chunks)
            self._stores = collections.deque(store for store in self._stores if store in undo.stores)
            self._posted = min(self._posted, undo.rows)
            self.rows = undo.rows
            self._undo = None

    def post(self) -> None:
        """Gives all staged rows to the writers. Raises AppendError if there is no space for them; they stay staged."""
        self._settle_batch()
        if self._batch.parts:
            self._reserve(self.rows)
            self._post_batch()
        self._posted = self.rows

    def _post_batch(self) -> Batch:
        """Gives the batch to the writers; returns the next one."""
        batch = self._batch
        if batch.parts:
            # Rows of earlier calls must not be in a store that this call may take back.
            assert self._undo is None or self._undo.in_batch is not batch or self._undo.batch == _NOTHING
            batch.store = outgoing.Store((batch.keep, batch.chunks))
            outlets.writers().post(self.files, batch.all_parts(), batch.chunks, batch.store)
            self._settle_batch()
            self.release()
        return self._batch

    def _settle_batch(self) -> None:
        """Begins a new batch if the writers have this one: an interrupt may have come before that could be noted."""
        store = self._batch.store
        if store is not None and store.has_begun:
            if not self._stores or self._stores[-1] is not store:
                self._stores.append(store)
            self._batch = Batch()

    def release(self) -> None:
        """Lets go of what is written, and of rows that are copied."""
        while self._stores and self._stores[0].is_over_and_well():
            self._stores.popleft()
        self._stager.release()

    def _reserve(self, rows: int) -> None:
        if rows <= self._reserved:
            return
        try:
            self.files.reserve(self._reserved, rows)
        except FileError as error:
            with contextlib.suppress(FileError):
                self.files.cut_back(self._reserved)
            raise self._file_error(
                error, f"There is no space for {rows - self._reserved} more rows" if error.is_full else "Rows cannot be"
                " appended to this file",
            ) from error  # fmt: skip
        self._reserved = rows

    def _file_error(
        self, error: FileError, what: str, wanted: int | None = None, found: int | None = None
    ) -> AppendError:
        leaf = self.growing.leaves[error.file]
        return AppendError(
            f"{what}: {error}.",
            code=error.code,
            save=self.prefix,
            key=leaf.key,
            file=leaf.file,
            wanted=wanted,
            found=found,
        )

    # --- committing ---

    def snapshot(self, *, posted_only: bool = False) -> Snapshot:
        """All rows that are staged now, on their way to the disk. Raises AppendError as ``post``.

        Args:
            posted_only: only those that the writers have: there is no space for more.
        """
        self._repair()
        if self._loss is not None:
            raise RowsLost from self._loss
        if posted_only:
            return Snapshot(self._posted, tuple(self._stores))
        self.post()
        self.release()
        return Snapshot(self.rows, tuple(self._stores))

    def finish(self, snapshot: Snapshot) -> None:
        """Waits until the rows are written, and commits them.

        Raises:
            RowsLost: they could not be written: see ``fail``.
            AppendError: the metadata could not be written. The rows are on the disk, and can be committed later. Or, as
                the message then says, they are committed.
        """
        try:
            self._wait(snapshot.stores)
        except RowsLost as lost:
            self._loss = self._loss or lost.__cause__  # type: ignore[assignment]
            raise
        uninterrupted(lambda: self._commit(snapshot.rows))

    def _wait(self, stores: Sequence[outgoing.Store]) -> None:
        for store in stores:
            while not store.wait():
                try:
                    self._stager.check_devices()
                except TdgpuError as error:
                    raise RowsLost from error
            report = store.report()
            if report.code == errno.ECANCELED:
                try:
                    self._stager.check_devices()  # which is then why
                except TdgpuError as error:
                    raise RowsLost from error
            if report.code:
                cause = FileError(report.file, report.code)
                raise RowsLost from self._file_error(cause, "Rows could not be written", report.wanted, report.found)

    def _commit(self, rows: int) -> None:
        if rows <= self.growing.rows and not self.growing.is_unfinished:
            return  # somebody else has committed them, and perhaps more
        if self._loss is not None:
            raise RowsLost from self._loss
        if self.durable:
            try:
                self.files.sync()
            except FileError as error:
                # It is not tried again: the system may then say that all is well although the bytes are lost.
                self._loss = self._file_error(error, "Rows could not be brought to the disk")
                raise RowsLost from self._loss
        if not self._lock.is_for(self.prefix):
            raise AppendError(
                "Another directory has taken the place of the save, or it is gone. Nothing was committed.",
                save=self.prefix,
            )
        commit.advance(self.growing, rows, durable=self.durable)

    def fail(self, lost: RowsLost) -> AppendError:
        """Gives up what is not committed. The error to raise for it."""
        if self.failed is None:
            cause = lost.__cause__
            count = self.rows - self.growing.rows
            facts = {name: getattr(cause, name, None) for name in ("key", "file", "wanted", "found")}
            message = cause.message if isinstance(cause, TdgpuError) else str(cause)
            self.failed = AppendError(
                f"{message} {count} rows that were not committed are lost; {self.growing.rows} are committed.",
                code=getattr(cause, "errno", None), save=self.prefix, **facts,
            )  # fmt: skip
            self.failed.__cause__ = cause
            self.take_back()
        return self.failed

    # --- the end ---

    def take_back(self) -> None:
        """Forgets what is not committed, and gives the files their committed size (or that with which they were found,
        if it is more)."""
        self._undo = _Undo(self.growing.rows, (), self._batch, _NOTHING, self._stager.mark(all_chunks=True))
        self._repair()
        try:
            commit.check_unchanged(self.growing)
        except AppendError:
            pass  # what lies behind our rows may be those of a writer that did not ask for the lock
        else:
            with contextlib.suppress(FileError):
                self.files.cut_back(self.growing.rows)
        self._reserved = self.growing.rows

    @until_exit
    def __del__(self) -> None:
        # Only an interrupt at the very moment of an end can have kept it open.
        if not self._is_closed and os.getpid() == self._process:
            uninterrupted(self.close, always=True)

    def close(self) -> None:
        """Ends everything; what is not committed is forgotten. May be called again."""
        if self._is_closed:
            return
        try:
            if self._undo or self.rows != self.growing.rows or self._reserved != self.growing.rows:
                self.take_back()
            self._stager.close(well=self.failed is None)
            self._stores.clear()  # which are over, and keep the files open
            self.files.close()
            if self.failed is None:
                remembered.keep(self.growing)
        finally:
            self._is_closed = True
            self._lock.release()


def _give_up(stores: Sequence[outgoing.Store]) -> None:
    for store in stores:
        store.cancel()
    for store in stores:
        while not store.wait():
            pass


def _read(prefix: str, allow_pickle: bool | None) -> Growing:
    """The save, after what a killed append has left is undone or completed."""
    known = remembered.take(prefix)
    if known is not None:
        return known
    # Not checked here: opening the files to write tells more.
    save = reader.read(prefix, check=False)
    if any(os.path.lexists(os.path.join(level.path, commit.TEMPORARY)) for level in save.root.walk()):
        commit.recover(prefix)
        save = reader.read(prefix, check=False)
    objects.resolve(save, allow_pickle)
    return growing(save)


def _most_open() -> int:
    """How many files may be kept open: half of those that the process may still open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = soft // 2
    return max((soft - used) // 2, 0)
