"""Runs the benchmarks, prints a table of them, and fails if any byte is wrong."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tensordict
import torch
from rich.console import Console
from rich.table import Table

import tdgpu
from benchmarks import appends, archives, cache, fill, loaders, structure, submit, transforms
from benchmarks.measure import Row

CASES = {
    "fill": fill.run,
    "meta": structure.run,
    "submit": submit.run,
    "inflate": archives.inflate,
    "pack": archives.pack,
    "archive-memory": archives.memory,
    "append-one": appends.one,
    "append-many": appends.many,
    "append-large": appends.large,
    "append-memory": appends.memory,
    "append-fsync": appends.fsync,
    "loader": loaders.run,
    "loader-cold": loaders.cold,
    "loader-memory": loaders.memory,
    "fingerprint": cache.fingerprints,
    "map-hit": transforms.hit,
    "map-datasets": transforms.against_datasets,
    "map-edited": transforms.edited,
}


def machine() -> dict[str, Any]:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tensordict": tensordict.__version__,
        "tdgpu": tdgpu.__version__,
    }


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    table = Table(title=", ".join(f"{name} {value or 'none'}" for name, value in facts.items()))
    for column in ("case", "tdgpu", "reference", "", "ratio", "goal", "checked"):
        table.add_column(column, justify="right" if column in ("tdgpu", "reference", "ratio", "goal") else "left")
    for row in rows:
        table.add_row(
            row.case,
            f"{row.ours:,.2f}",
            f"{row.reference:,.2f}",
            f"{row.unit}, {row.reference_is}",
            f"{row.ratio:.2f}",
            "-"
            if row.goal is None
            else f"{'>=' if row.at_least else '<='} {row.goal:g} {'met' if row.met else 'NOT MET'}",
            row.checked,
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="run only this one (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="small inputs: checks the bytes, its figures mean little")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--dir", type=Path, help="where to make the saves; default: the temporary directory")
    arguments = parser.parse_args()

    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tdgpu-bench-", dir=arguments.dir) as directory:
        for case in arguments.case or CASES:
            rows += CASES[case](Path(directory), quick=arguments.quick)
    facts = machine()
    show(rows, facts)
    if arguments.json is not None:
        report = {"machine": facts, "quick": arguments.quick, "rows": [row.as_dict() for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
