"""A save that is kept open while it grows: :class:`MemmapAppender`."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from tdgpu.append.create import create_empty
from tdgpu.append.session import RowsLost, Session, Snapshot
from tdgpu.errors import AppendError, ForkError, InvalidArgument, InvalidArgumentType
from tdgpu.layout.growth import match
from tdgpu.options import get as get_options
from tdgpu.signals import Background, uninterrupted, until_exit

__all__ = ["MemmapAppender"]

# How long the background waits after a commit that has failed.
AGAIN_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 3600.0  # the system cannot wait for all that a float can say


class MemmapAppender:
    """Appends rows to a saved directory, many times, for what the bytes cost.

    ``append`` stages rows and returns; ``flush`` commits everything that was appended: then every load sees it. Rows
    that are not committed yet are ``pending``; if the process dies, they are gone, and the save is as it was after the
    last commit. ``close`` commits and ends; so does the end of a ``with`` block, also by an exception, and the end of
    the program.

    While it is open, nobody else can append to the save. Its methods may be called from several threads.

    Args:
        prefix: the directory that ``save`` or ``memmap`` wrote; :meth:`create` makes one.
        durable: whether a commit survives a power failure. That costs about as much as the disk takes to sync every
            file of the save. None: as the option ``durable`` says.
        flush_rows: commit in the background whenever so many rows are pending.
        flush_bytes: or so many bytes.
        flush_seconds: or when the oldest pending row has waited so long.
        timeout: seconds to wait for another writer; None: the option ``lock_timeout``.
        allow_pickle: as in :func:`tdgpu.append_memmap`.

    Raises:
        Everything that :func:`tdgpu.append_memmap` raises about the save.

    Example:
        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> def step(i):
        ...     return TensorDict(obs=torch.full((1, 4), float(i)), done=torch.tensor([i % 5 == 4]), batch_size=[1])
        >>> with tempfile.TemporaryDirectory() as path:
        ...     with MemmapAppender.create(path + "/run", step(0)) as appender:
        ...         for i in range(10):
        ...             appender.append(step(i))
        ...         print(len(appender), appender.pending)
        ...         appender.flush()
        ...         print(len(appender), appender.pending)
        ...     print(tdgpu.load_memmap(path + "/run")["done"].sum().item())
        0 10
        10 0
        2
    """

    _closed = True  # until it is open

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        durable: bool | None = None,
        flush_rows: int | None = None,
        flush_bytes: int | None = None,
        flush_seconds: float | None = None,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> None:
        settings = get_options()
        for name, value, kind, least in (
            ("flush_rows", flush_rows, int, 1),
            ("flush_bytes", flush_bytes, int, 1),
            ("flush_seconds", flush_seconds, (int, float), 0),
            ("timeout", timeout, (int, float), 0),
        ):
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                what = "a whole number" if kind is int else "a number"
                raise InvalidArgumentType(f"{name} must be {what} or None, got {value!r}.")
            if value is not None and not value >= least:
                raise InvalidArgument(f"{name} must be at least {least}, or None, got {value!r}.")
        if durable is not None and not isinstance(durable, bool):
            raise InvalidArgumentType(f"durable must be a bool or None, got {durable!r}.")
        if allow_pickle is not None and not isinstance(allow_pickle, bool):
            raise InvalidArgumentType(f"allow_pickle must be a bool or None, got {allow_pickle!r}.")
        self._process = os.getpid()
        self._flush_rows = flush_rows
        self._flush_bytes = flush_bytes
        self._flush_seconds = flush_seconds
        self._session = Session(
            prefix,
            durable=settings.durable if durable is None else durable,
            timeout=settings.lock_timeout if timeout is None else timeout,
            allow_pickle=allow_pickle,
        )
        # One for the session; one for who commits, taken first, so that rows can be appended meanwhile. A thread that
        # asks again for what it has, from a signal handler, gets an error: it would meet things half done.
        self._lock = _Turn(self._session.prefix)
        self._committing = _Turn(self._session.prefix)
        self._error: Exception | None = None  # of a commit in the background, that no call has raised
        self._failure_was_told = False
        self._closing = False
        self._oldest: float | None = None  # when the oldest pending row was appended
        # What wakes the background: anything. (An event would not survive an interrupt at the wrong moment.)
        self._due: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: Background | None = None
        self._closed = False
        if flush_rows or flush_bytes or flush_seconds:
            self._thread = Background(_commit_when_due, weakref.ref(self), self._due)
        _open.add(self)

    @classmethod
    def create(cls, prefix: str | os.PathLike[str], example_row: Any, **arguments: Any) -> MemmapAppender:
        """Opens a save, after making it if it is not there: with the structure of ``example_row``, and without rows.

        Args:
            prefix: the directory. It appears whole or not at all.
            example_row: rows like those that will be appended, on any device; or one row without the dimension of rows
                (batch size ``[]``). Only its structure is used.
            **arguments: those of :class:`MemmapAppender`.

        Raises:
            InvalidArgument: a save of this structure could not grow, or the one that is there is another.
            SaveExists: there is something else than a save.
        """
        durable = arguments.get("durable")
        create_empty(prefix, example_row, durable=get_options().durable if durable is None else durable)
        return cls(prefix, **arguments)

    def append(self, rows: Any) -> None:
        """Stages rows.

        When this returns, they may be overwritten: those on the host at once, those on a device by whatever is queued
        from then on on the stream that is current now. Nothing waits for the device, unless the ring is full. Rows on
        the host of 256 KiB or more in a leaf are written first.

        Args:
            rows: as for :func:`tdgpu.append_memmap`.

        Raises:
            InvalidArgument, InvalidArgumentType: they do not fit.
            AppendError: no space; these rows are not taken, and those that were appended before are still pending. Or
                rows that were appended before could not be written or committed: these are not taken either, and the
                message says what became of the others. Or a signal handler called this in the middle of another call.
            ForkError: the appender is another process's.
            TransferError: the device refused; these rows are not taken.
        """
        self._check_process()
        self._lock.run(self._append, rows)

    def flush(self) -> None:
        """Commits all rows that were appended. When this returns, every load sees them.

        Raises:
            AppendError: they could not be written or committed; the message says what became of them.
        """
        self._check_process()
        self._lock.run(self._usable)
        self._commit()

    def close(self) -> None:
        """Commits all rows that were appended, and ends. May be called again.

        It is not interrupted in the middle: Ctrl-C is answered when it is done.

        Raises:
            AppendError: as ``flush``. It is closed all the same.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._committing.refuse_reentry()
        self._lock.refuse_reentry()
        uninterrupted(self._close, always=True)

    @property
    def pending(self) -> int:
        """Rows that were appended and are not committed."""
        return self._session.rows - self._session.growing.rows

    def __len__(self) -> int:
        """Committed rows: those that a load sees."""
        return self._session.growing.rows

    def __bool__(self) -> bool:
        return True  # also without rows

    def __enter__(self) -> MemmapAppender:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.pending} pending"
        return f"MemmapAppender({self._session.prefix!r}, {len(self)} rows, {state})"

    @until_exit
    def __del__(self) -> None:
        if not self._closed and os.getpid() == self._process:
            try:
                warnings.warn(
                    f"The appender to {self._session.prefix} was not closed; {self.pending} pending rows are kept.",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )
            finally:  # a warning may be an error
                self.close()

    # --- inside ---

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkError(
                "This appender belongs to the process from which this one was forked.", save=self._session.prefix
            )

    def _usable(self) -> Session:
        if self._closed or self._closing:
            raise InvalidArgument("This appender is closed.", save=self._session.prefix)
        if self._session.failed is not None:
            self._failure_was_told = True
            raise self._session.failed
        error, self._error = self._error, None
        if error is not None:
            if isinstance(error, AppendError):
                error.message += f" (In the background. This call has done nothing; {self.pending} rows are pending.)"
            raise error
        return self._session

    def _is_due(self) -> bool:
        session = self._session
        rows = self.pending
        return bool(
            (self._flush_rows and rows >= self._flush_rows)
            or (self._flush_bytes and rows * session.growing.row_nbytes >= self._flush_bytes)
            or (self._flush_seconds and self._oldest and time.monotonic() >= self._oldest + self._flush_seconds)
        )

    def _append(self, rows: Any) -> None:
        session = self._usable()
        count, tensors = match(session.growing, rows)
        try:
            session.stage(count, tensors, in_place=False)
        except AppendError as error:
            error.message += f" These rows were not taken; {self.pending} others are pending."
            raise
        if count and self._oldest is None:
            self._oldest = time.monotonic()
            if self._flush_seconds is not None:
                self._due.put(None)
        if self._is_due():
            self._due.put(None)

    def _commit(self, *, closing: bool = False) -> None:
        self._committing.run(self._commit_alone, closing)

    def _commit_alone(self, closing: bool) -> None:
        try:
            self._session.finish(self._lock.run(self._begin_commit, closing))
        except RowsLost as lost:
            error = self._lock.run(self._session.fail, lost)
            self._failure_was_told = self._thread is None or self._thread.ident != threading.get_ident()
            raise error from lost.__cause__
        except BaseException:
            if self.pending and self._oldest is None:
                self._oldest = time.monotonic()
            raise
        self._lock.run(self._session.release)

    def _begin_commit(self, closing: bool) -> Snapshot:
        self._closing = self._closing or closing
        if self._session.failed is not None:
            # While this thread waited, or before.
            self._failure_was_told = True
            raise self._session.failed
        self._error = None  # what it was about is tried again
        snapshot = self._session.snapshot()
        self._oldest = None
        return snapshot

    def _close(self) -> None:
        was_told = self._failure_was_told
        try:
            self._commit(closing=True)
        except AppendError as error:
            if self._session.failed is None:
                self._keep_what_is_written(error)
            elif was_told:
                return
            raise
        finally:
            self._due.put(None)
            if self._thread is not None:
                self._thread.join()
            self._committing.run(self._lock.run, self._session.close)
            self._closed = True
            _open.discard(self)

    def _keep_what_is_written(self, error: AppendError) -> None:
        """At the end, commits at least the rows that the disk had room for; the error says what became of the rest."""
        with contextlib.suppress(AppendError, RowsLost):
            self._committing.run(
                lambda: self._session.finish(self._lock.run(lambda: self._session.snapshot(posted_only=True)))
            )
        error.message += f" {self.pending} rows that were pending are lost; {len(self)} are committed."

    def __reduce__(self) -> Any:
        raise InvalidArgumentType("An appender cannot be copied or sent to another process.")


class _Turn:
    """A lock around calls, that a thread cannot take again while it has it: it gets an error."""

    def __init__(self, save: str) -> None:
        self._save = save
        # Reentrant, for the moment between taking it and noting that.
        self._lock = threading.RLock()
        self._owner: int | None = None

    def refuse_reentry(self) -> None:
        """Raises AppendError if the calling thread has it."""
        if self._owner == threading.get_ident():
            raise AppendError(
                "The appender was called by a signal handler or a finalizer that ran in the middle of another of its"
                " calls. Nothing was done.",
                save=self._save,
            )

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls ``function`` while it has the lock."""
        with self._lock:  # no context manager of ours: an interrupt between two of its steps would keep the lock
            self.refuse_reentry()
            try:
                self._owner = threading.get_ident()
                return function(*arguments)
            finally:
                self._owner = None


def _commit_when_due(reference: weakref.ref[MemmapAppender], due: queue.SimpleQueue[None]) -> None:
    """The thread of an appender that commits in the background. It does not keep the appender."""
    wait: float | None = None
    failed_at = -math.inf
    while True:
        with contextlib.suppress(queue.Empty):
            due.get(timeout=wait)
            while True:
                due.get_nowait()
        appender = reference()
        if appender is None or appender._closing:
            return
        if appender._is_due():
            try:
                appender._commit()
            except Exception as error:
                appender._error = error
                failed_at = time.monotonic()
        if appender._session.failed is not None:
            return
        oldest, seconds = appender._oldest, appender._flush_seconds
        wait = None
        if oldest is not None and seconds is not None:
            # A disk that is full is not asked again and again.
            at = max(oldest + seconds, failed_at + AGAIN_SECONDS)
            wait = min(max(0.0, at - time.monotonic()), LONGEST_WAIT_SECONDS)
        del appender


# Those that are open when the program ends are closed then: while the writers are still there (they end later).
_open: weakref.WeakSet[MemmapAppender] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    first: Exception | None = None
    for appender in list(_open):
        try:
            appender.close()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
