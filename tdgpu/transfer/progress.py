"""A progress bar for loads that are waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(what: str, nbytes: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that disappears at the end, and is not there at all where stderr is no terminal.

    Args:
        what: said in front of the bar.
        nbytes: bytes in all.
        enabled: False for no bar.

    Yields:
        A function that takes the bytes moved so far.
    """
    if not enabled:
        yield lambda moved: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=nbytes)
        yield lambda moved: progress.update(task, completed=moved)
