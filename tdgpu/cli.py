"""The command line: ``python -m tdgpu``, or ``tdgpu`` where pip put the script on the path.

Exit codes: 0 done; 1 a :class:`~tdgpu.errors.TdgpuError` or a file that the system refused, the message on stderr, or
``doctor`` with settings that cannot be read, the message in its report, or ``verify`` with a save that is damaged; 2
wrong usage. With ``--json`` a command prints one JSON object on stdout and nothing else there.
"""

from __future__ import annotations

import errno
import sys
import time
from typing import Annotated

import typer
from rich.console import Console

from tdgpu.cli_cache import cache
from tdgpu.cli_output import Json, print_json, say, stdout
from tdgpu.errors import TdgpuError
from tdgpu.options import parse_size

# Each command imports what it needs when it runs: `--help` and `doctor` work where torch or the core does not load.

app = typer.Typer(
    help="Moves tensordict's memory-mapped saves between disk and GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(cache, name="cache")

Threads = Annotated[
    int | None, typer.Option(min=0, help="Threads that work. Default: one for each core that the process may use.")
]


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
        print_json(report)
    else:
        render(report, stdout())


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
        print_json(report)
    else:
        render(report, stdout())
    if "error" in report["options"]:
        raise typer.Exit(1)


@app.command()
def pack(
    directory: Annotated[str, typer.Argument(help="A saved directory.")],
    archive: Annotated[str, typer.Argument(help="The archive to write, such as run.tdz.")],
    compression: Annotated[str, typer.Option(help="stored, deflate, bzip2 or lzma.")] = "stored",
    level: Annotated[int | None, typer.Option(help="Compression level. Default: the method's own.")] = None,
    block_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes per block of deflate, such as 4M; 'none' for plain streams.")
    ] = "1M",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Packs a saved directory into one archive.

    Example: tdgpu pack runs/7 runs/7.tdz --compression deflate --level 3
    """
    from tdgpu.archives.packing import pack_memmap

    started = time.perf_counter()
    path = pack_memmap(
        directory, archive, compression=compression, compresslevel=level, block_size=_block_size(block_size),
        num_threads=threads, progress=True,
    )  # fmt: skip
    report = {"archive": str(path), "bytes": path.stat().st_size, "seconds": round(time.perf_counter() - started, 3)}
    say(report, "{archive}: {bytes} bytes in {seconds} s", as_json=as_json)


@app.command()
def unpack(
    archive: Annotated[str, typer.Argument(help="An archive, such as run.tdz.")],
    directory: Annotated[str, typer.Argument(help="Where its files go. Made if it does not exist.")],
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Unpacks an archive into a directory, once all of it has been checked.

    Example: tdgpu unpack runs/7.tdz runs/7
    """
    from tdgpu.archives.unpacking import unpack_memmap

    started = time.perf_counter()
    path = unpack_memmap(archive, directory, num_threads=threads, progress=True)
    report = {"directory": str(path), "seconds": round(time.perf_counter() - started, 3)}
    say(report, "{directory}: unpacked in {seconds} s", as_json=as_json)


@app.command()
def verify(
    path: Annotated[str, typer.Argument(help="An archive or a saved directory.")],
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Checks a save: of an archive every byte, of a directory its structure and sizes. Exits with 1 if it is damaged.

    Example: tdgpu verify runs/7.tdz
    """
    from tdgpu.archives.verifying import verify_memmap

    found = verify_memmap(path, num_threads=threads, progress=True)
    report = {
        "path": str(found.path), "kind": found.kind, "entries": found.entries, "bytes": found.nbytes,
        "is_sound": found.is_sound, "notes": list(found.notes),
        "problems": [{"type": type(problem).__name__, "message": str(problem)} for problem in found.problems],
    }  # fmt: skip
    for problem in found.problems:
        sys.stderr.write(f"problem: {problem}\n")
    for note in found.notes:
        sys.stderr.write(f"note: {note}\n")
    verdict = "sound" if found.is_sound else "damaged"
    say(report, f"{{path}}: {verdict}, {{entries}} entries, {{bytes}} bytes", as_json=as_json)
    if not found.is_sound:
        raise typer.Exit(1)


@app.command()
def append(
    directory: Annotated[str, typer.Argument(metavar="DEST", help="The saved directory that grows.")],
    source: Annotated[str, typer.Argument(help="The rows: another saved directory or an archive.")],
    rows: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only these rows of it, as a slice: 100:200, :50, -10: .")
    ] = None,
    no_durable: Annotated[
        bool, typer.Option("--no-durable", help="Do not wait for the disk: a power failure may lose or damage rows.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Appends the rows of another save to a saved directory, all of them or none.

    Example: tdgpu append runs/all runs/7.tdz --rows 0:1000
    """
    from tdgpu.append.copying import append_save

    wanted = None if rows is None else _rows(rows)
    started = time.perf_counter()
    added = append_save(directory, source, rows=wanted, durable=False if no_durable else None, progress=True)
    report = {
        "directory": directory, "source": source, "rows": added, "seconds": round(time.perf_counter() - started, 3)
    }  # fmt: skip
    say(report, "{directory}: {rows} rows appended in {seconds} s", as_json=as_json)


@app.command()
def recover(
    directory: Annotated[str, typer.Argument(help="A saved directory.")],
    as_json: Json = False,
) -> None:
    """Undoes or completes what a killed append has left. (The next append does so by itself.)

    Example: tdgpu recover runs/all
    """
    from tdgpu.append.once import recover_memmap

    found = recover_memmap(directory)
    report = {
        "path": str(found.path), "state": found.state, "rows": found.rows, "completed": list(found.completed),
        "removed": list(found.removed), "surplus": found.surplus,
    }  # fmt: skip
    for file in found.completed:
        sys.stderr.write(f"completed: {file}\n")
    for file in found.removed:
        sys.stderr.write(f"removed: {file}\n")
    if found.surplus:
        sys.stderr.write(f"note: {found.surplus} bytes behind the rows, which the next append overwrites\n")
    say(report, "{path}: {state}, {rows} rows", as_json=as_json)


def _rows(text: str) -> slice:
    bounds = text.split(":")
    try:
        start, stop = (int(bound) if bound.strip() else None for bound in bounds)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no range of rows, such as 100:200, :50 or -10: .", param_hint="--rows"
        ) from None
    return slice(start, stop)


def _block_size(text: str) -> int | None:
    if text.lower() == "none":
        return None
    try:
        return parse_size(text)
    except (ValueError, KeyError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is no size in bytes, such as 1048576 or 1M.", param_hint="--block-size"
        ) from None


def main() -> None:
    """Runs the command line with the arguments of the process, and exits."""
    try:
        app()
    except TdgpuError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except OSError as error:
        # One that is not about a file that the user named: a traceback tells more, unless the output cannot be written.
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            raise
        sys.stderr.write(f"error: {error.strerror}: {error.filename or 'the output'}\n")
        sys.exit(1)
