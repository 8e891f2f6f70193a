"""The command line: ``python -m tdgpu``, or ``tdgpu`` where pip put the script on the path.

Exit codes: 0 done; 1 a :class:`~tdgpu.errors.TdgpuError` or a file that the system refused, the message on stderr, or
``doctor`` with settings that cannot be read, the message in its report; 2 wrong usage. With ``--json`` a command prints
one JSON object on stdout and nothing else there.
"""

from __future__ import annotations

import json
import sys
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


def _stdout() -> Console:
    # rich fits its tables to 80 columns where there is no terminal, and a path that is broken over lines cannot be
    # searched for: there a table is as wide as its content.
    console = Console()
    return console if console.is_terminal else Console(width=1 << 16)


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
        # A str: Path("") is the working directory, which nobody who writes --save '' means.
        str | None,
        typer.Option(
            metavar="DIRECTORY", help="Keep the save in this new or empty directory. Default: a temporary one."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Saves scikit-learn's digits, loads them onto a device and trains a classifier on them."""
    from tdgpu.demo import render, run

    report = run(device, save, console=Console(stderr=True))
    if as_json:
        _print_json(report)
    else:
        render(report, _stdout())


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
        render(report, _stdout())
    if "error" in report["options"]:
        raise typer.Exit(1)


def main() -> None:
    """Runs the command line with the arguments of the process, and exits."""
    try:
        app()
    except TdgpuError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except OSError as error:
        if error.filename is None:  # not about a file that the user named: a traceback tells more
            raise
        sys.stderr.write(f"error: {error.strerror}: {error.filename}\n")
        sys.exit(1)
