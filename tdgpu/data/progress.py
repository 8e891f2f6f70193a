"""A progress bar for a loader's batches."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tdgpu.data.loader import DeviceLoader
from tdgpu.data.stats import LoaderStats
from tdgpu.errors import InvalidArgumentType

if TYPE_CHECKING:  # importing tdgpu does not take the time that importing this takes
    from rich.console import Console

__all__ = ["progress"]


def progress(loader: DeviceLoader, what: str = "training") -> Iterator[Any]:
    """The batches of a loader's next epoch, with a bar on stderr that says how far it is and what it waits for.

    The bar shows batches that were handed out, of all that this epoch has left; rows per second; and the share of the
    time that the program waited for data. It disappears at the end, at a ``break`` and at an exception, and it is not
    there at all where stderr is no terminal. The loader stays open, and goes on behind the last batch that was handed
    out, as without a bar.

    Args:
        loader: whose batches.
        what: said in front of the bar.

    Returns:
        The loader's batches.

    Raises:
        InvalidArgumentType: it is no loader.
        What iterating the loader raises: see :class:`tdgpu.DeviceLoader`.

    Example:
        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = TensorDict(x=torch.arange(10.0), batch_size=[10]).memmap(path)
        ...     loader = tdgpu.DeviceLoader(path, batch_size=4)
        ...     for batch in progress(loader, "adding up"):
        ...         print(batch["x"].sum().item())
        6.0
        22.0
        17.0
    """
    if not isinstance(loader, DeviceLoader):
        raise InvalidArgumentType(f"progress goes through a DeviceLoader's batches, not through {loader!r:.200}.")
    return _gone_through(loader, what)


def _gone_through(loader: DeviceLoader, what: str) -> Iterator[Any]:
    from rich.console import Console

    console = Console(stderr=True)
    iterator: Any = iter(loader)
    try:
        if console.is_terminal:
            yield from _shown(loader, iterator, what, console)
        else:
            yield from iterator
    finally:
        iterator.close()


def _shown(loader: DeviceLoader, iterator: Any, what: str, console: Console) -> Iterator[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}"),
    )
    bar = Progress(*columns, console=console, transient=True)
    # Who keeps a generator half used in a variable may end the program with it, and the terminal without its cursor.
    atexit.register(bar.stop)
    try:
        with bar:
            task = bar.add_task(what, total=_length(iterator), pace=_Pace(loader))
            for batch in iterator:
                bar.advance(task)
                yield batch
    finally:
        atexit.unregister(bar.stop)


def _length(iterator: Any) -> int | None:
    try:
        return len(iterator)
    except TypeError:  # a sampler without a length
        return None


class _Pace:
    """As a string, what a loader has done since this was made, and how much of the time the program waited for it.

    So the loader is asked when the bar is drawn, and not for every batch.
    """

    def __init__(self, loader: DeviceLoader) -> None:
        self._loader = loader
        self._before = loader.stats()

    def __str__(self) -> str:
        return pace(self._before, self._loader.stats())


def pace(before: LoaderStats, now: LoaderStats) -> str:
    """What was done between two looks at a loader: rows per second, and the share of the time that was waiting."""
    waiting = now.waiting - before.waiting
    seconds = waiting + now.working - before.working
    if not seconds:
        return ""
    return f"{(now.rows - before.rows) / seconds:,.0f} rows/s, {waiting / seconds:.0%} waiting for data"
