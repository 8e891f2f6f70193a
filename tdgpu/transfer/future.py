"""What a caller holds while bytes are on their way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tdgpu.errors import InvalidArgumentType, TdgpuError, UnknownKeyError
from tdgpu.layout.save import Save
from tdgpu.transfer.base import Transfer

GB = 1e9


@dataclass(frozen=True)
class LoadProgress:
    """Figures of a load.

    Attributes:
        leaves: number of leaves with elements.
        nbytes: bytes of those leaves.
        moved: bytes read from the files so far; 0 where nothing is moved (paths ``"mapped"`` and ``"structure"``).
        seconds: since the call, or until the load was seen to be over.
        path: what carries the bytes: ``"gated"`` (the gated copy stream), ``"host"`` (copies enqueued by the calling
            thread), ``"generic"`` (torch's own copies), ``"inflated"`` (an archive's compressed leaves on the CPU),
            ``"mapped"`` (leaves are mapped on the CPU, read when touched), ``"structure"`` (meta or fake tensors: there
            are no bytes). Several are joined by ``"+"``.
    """

    leaves: int
    nbytes: int
    moved: int
    seconds: float
    path: str

    @property
    def gbps(self) -> float:
        """GB/s (10**9 bytes) so far."""
        return self.moved / GB / self.seconds if self.seconds > 0 else 0.0


class LoadFuture:
    """A load under way, from ``load_memmap(..., return_early=True)``.

    No stream waits for the load until ``result`` or ``wait`` is called, so that work on the current stream overlaps
    with it. The tensors exist already; their contents may be used only on a stream that was made to wait, or on the
    host after ``synchronize``.

    >>> import tempfile, tdgpu, torch
    >>> from tensordict import TensorDict
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = TensorDict(a=torch.arange(3), b=TensorDict(c=torch.ones(2))).memmap(path)
    ...     future = tdgpu.load_memmap(path, device="cpu", return_early=True)
    ...     print(future.wait("a").tolist(), future.wait(("b", "c")).tolist())
    ...     future.synchronize()
    ...     print(future.done(), future.progress.path, sorted(future.result().keys()))
    [0, 1, 2] [1.0, 1.0]
    True mapped ['a', 'b']
    """

    def __init__(
        self,
        result: Any,
        save: Save,
        transfers: Sequence[Transfer],
        path: str = "",
        started: float | None = None,
    ) -> None:
        self._result = result
        self._save = save
        self._leaves = [leaf for leaf in save.leaves() if leaf.extent is not None]
        self._transfers = list(transfers)
        self._path = path
        self._started = time.perf_counter() if started is None else started
        self._seconds: float | None = None if transfers else time.perf_counter() - self._started

    def result(self) -> Any:
        """The loaded collection. The current stream of its device waits for all of it; the host goes on.

        On the CPU it is the host that waits: for an archive's compressed leaves to be inflated.

        Raises:
            LoadError: a leaf could not be read, as far as is known by now. A failure after that is reported as for
                ``non_blocking=True``.
        """
        for transfer in self._transfers:
            transfer.flight.raise_failure()
            transfer.wait()
            transfer.leave()
        return self._result

    def wait(self, key: str | tuple[str, ...] | None = None) -> Any:
        """One leaf or subtree, for which the current stream of its device waits. The host goes on.

        Args:
            key: a key as in ``td[key]``; None for everything, as ``result``.

        Returns:
            What ``result().get(key)`` gives.

        Raises:
            UnknownKeyError: there is no such leaf or subtree.
            LoadError: a leaf could not be read, as far as is known by now.
        """
        if key is None:
            return self.result()
        wanted = (key,) if isinstance(key, str) else key
        if not isinstance(wanted, tuple) or not all(isinstance(part, str) for part in wanted):
            raise InvalidArgumentType(f"A key is a string or a tuple of strings, not {key!r}.")
        leaves = self._save.select(wanted)
        if not wanted or leaves is None:
            raise UnknownKeyError("The save has no such leaf or subtree.", save=self._save.prefix, key=wanted)
        # First the stream, then the value: a lazy stack stacks its members when it is asked.
        for transfer in self._transfers:
            transfer.flight.raise_failure()
            carried = [leaf for leaf in leaves if transfer.carries(leaf)]
            if carried:
                transfer.wait(max(carried, key=transfer.position))
        return self._result.get(wanted)

    def done(self) -> bool:
        """Whether the load is over, well or not. Does not wait."""
        over = all(transfer.flight.wait(0) for transfer in self._transfers)
        if over and self._seconds is None:
            self._seconds = time.perf_counter() - self._started
        return over

    def synchronize(self) -> None:
        """Waits on the host until everything is on the device.

        Raises:
            LoadError: a leaf could not be read.
        """
        for transfer in self._transfers:
            transfer.synchronize()
        self.done()

    @property
    def progress(self) -> LoadProgress:
        """How far the load is."""
        flights = [transfer.flight for transfer in self._transfers]
        self.done()
        return LoadProgress(
            leaves=len(self._leaves),
            nbytes=sum(leaf.nbytes for leaf in self._leaves),
            moved=sum(flight.moved for flight in flights),
            seconds=time.perf_counter() - self._started if self._seconds is None else self._seconds,
            path="+".join(dict.fromkeys([flight.path for flight in flights] + ([self._path] if self._path else []))),
        )

    def __repr__(self) -> str:
        try:
            at = self.progress
        except TdgpuError as error:
            return f"LoadFuture({error})"
        return f"LoadFuture({at.moved} of {at.nbytes} bytes, {at.path}{'' if self._seconds is None else ', done'})"

    def __reduce__(self) -> Any:
        raise InvalidArgumentType("A load under way cannot be copied or sent to another process: take its result().")
