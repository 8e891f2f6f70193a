"""What the commands print, and how."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

__all__ = ["Json", "print_json", "say", "stdout"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def stdout() -> Console:
    """Where tables go."""
    # rich fits its tables to 80 columns where there is no terminal, and a path that is broken over lines cannot be
    # searched for: there a table is as wide as its content.
    console = Console()
    return console if console.is_terminal else Console(width=1 << 16)


def print_json(report: dict[str, Any]) -> None:
    """Prints a report as one JSON object."""
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


def say(report: dict[str, Any], line: str, *, as_json: bool) -> None:
    """Prints a report: as JSON, or in a line that has its fields in braces."""
    if as_json:
        print_json(report)
    else:
        sys.stdout.write(line.format(**report) + "\n")
