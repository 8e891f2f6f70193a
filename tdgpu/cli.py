"""The command line: ``python -m tdgpu``, or ``tdgpu`` where pip put the script on the path.

Exit codes: 0 done; 1 a :class:`~tdgpu.errors.TdgpuError`, its message on stderr; 2 wrong usage. With ``--json`` a
command prints one JSON object on stdout and nothing else there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tdgpu.errors import TdgpuError

# Each command imports what it needs when it runs: `--help` and `doctor` work where torch or the core does not load.

app = typer.Typer(
    help="Moves tensordict's memory-mapped saves between disk and GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def _print_json(report: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


@app.callback()
def _commands() -> None:
    # Its presence makes typer ask for a command's name even while there are few commands.
    pass


@app.command()
def demo(
    device: Annotated[
        str | None, typer.Option(help="Where to load and train, such as cuda:0. Default: the best there is.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Keep the save in this new or empty directory. Default: a temporary one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Saves scikit-learn's digits, loads them onto a device and trains a classifier on them."""
    from tdgpu.demo import render, run

    report = run(device, save, console=Console(stderr=True))
    if as_json:
        _print_json(report)
    else:
        render(report, Console())


@app.command()
def doctor(
    device: Annotated[
        str | None, typer.Option(help="Probe this device too, such as cuda:0. Creates a context on it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Shows what tdgpu finds on this machine and which way a load would take."""
    from tdgpu.doctor import examine, render

    report = examine(device)
    if as_json:
        _print_json(report)
    else:
        render(report, Console())


def main() -> None:
    """Runs the command line with the arguments of the process, and exits."""
    try:
        app()
    except TdgpuError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
