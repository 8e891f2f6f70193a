"""The commands ``cache ls``, ``cache rm``, ``cache explain`` and ``cache gc``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tdgpu.cli_output import Json, print_json, say, stdout
from tdgpu.options import parse_size

if TYPE_CHECKING:
    from tdgpu.cache.budget import Stored

# As in tdgpu.cli: what needs torch is imported when a command runs.

cache = typer.Typer(
    help="Shows and removes results in the cache directory (TDGPU_CACHE).", no_args_is_help=True, add_completion=False
)


@cache.command("ls")
def list_results(as_json: Json = False) -> None:
    """Lists the results, those first that were used last."""
    from tdgpu.cache import budget, place

    root = place.directory()
    rows = [_row(one) for one in budget.stored(root)]
    report = {"directory": str(root), "bytes": sum(row["bytes"] for row in rows), "entries": rows}
    if as_json:
        print_json(report)
        return
    if rows:
        _table(rows)
    count = f"{len(rows)} result{'' if len(rows) == 1 else 's'}"
    sys.stdout.write(f"{root}: {count}, {_bytes(report['bytes'])}\n")


@cache.command("rm")
def remove(
    digests: Annotated[list[str] | None, typer.Argument(metavar="DIGEST...", help="Results, as ls names them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every result that is not in use.")] = False,
    as_json: Json = False,
) -> None:
    """Removes results, but none in use. Exits with 1 if one of them is in use, or is not there.

    Example: tdgpu cache rm 0a1b2c3d4e5f6071
    """
    from tdgpu.cache import budget, place

    if bool(digests) == everything:
        raise typer.BadParameter("Give either the names of results or --all.", param_hint="DIGEST...")
    root = place.directory()
    found = budget.stored(root)
    wanted = found if everything else [one for one in found if one.digest in (digests or [])]
    missing = [] if everything else sorted(set(digests or []) - {one.digest for one in found})
    gone: list[Stored] = []
    kept: list[Stored] = []
    for one in wanted:
        (gone if _removed(root, one.directory) else kept).append(one)
    for digest in missing:
        sys.stderr.write(f"error: There is no result {digest} in {root}\n")
    for one in kept:
        sys.stderr.write(f"error: {one.digest} is in use, and stays\n")
    _report_removed(root, gone, as_json=as_json)
    if missing or kept:
        raise typer.Exit(1)


@cache.command()
def explain(
    digest: Annotated[str | None, typer.Argument(help="A result. Default: the one that was built last.")] = None,
    as_json: Json = False,
) -> None:
    """Says why a result was built: what of it is not as in the closest one that was there before.

    Example: tdgpu cache explain 0a1b2c3d4e5f6071
    """
    from tdgpu.cache import budget, place
    from tdgpu.cache.explain import explain as why
    from tdgpu.cache.record import Record

    root = place.directory()
    if digest is None:
        built = [one.record for one in budget.stored(root) if isinstance(one.record, Record)]
        if not built:
            sys.stderr.write(f"error: There are no results in {root}\n")
            raise typer.Exit(1)
        digest = max(built, key=lambda one: one.built).digest
    elif not budget.is_name(digest) or not budget.stored(root, digest):
        sys.stderr.write(f"error: There is no result {digest} in {root}\n")
        raise typer.Exit(1)
    found = why(digest)
    if as_json:
        print_json(found.as_dict())
    else:
        sys.stdout.write(f"{found}\n")


@cache.command("gc")
def collect(
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes that may stay, such as 10G. Default: TDGPU_CACHE_MAX_BYTES, or all."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Removes what killed processes have left, and the results that were not used for longest, down to a size.

    Example: tdgpu cache gc --max-size 10G
    """
    from tdgpu.cache import budget, place, switch
    from tdgpu.options import get

    limit = get().cache_max_bytes if max_size is None else _size(max_size)
    root = place.directory()
    left_behind = switch.sweep_temporary()
    gone: list[Stored] = []
    if root.is_dir():
        left_behind += budget.sweep(budget.leftovers(root))
        with _naming(root):
            (root / budget.LOCKS).mkdir(exist_ok=True)
            gone = budget.keep_within(root, limit)
        budget.forget_locks(root)
    for path in left_behind:
        sys.stderr.write(f"left by a killed process: {path}\n")
    left = sum(one.nbytes for one in budget.stored(root))
    if limit is not None and left > limit:
        sys.stderr.write(f"note: what is in use stays: {_bytes(left)}, and {_bytes(limit)} were asked for\n")
    _report_removed(root, gone, as_json=as_json, left_behind=[str(path) for path in left_behind], left=left)


def _removed(root: Path, directory: Path) -> bool:
    from tdgpu.cache import budget

    with _naming(root):
        return budget.remove(root, directory)


def _naming(root: Path) -> Any:
    from tdgpu.cache.directory import naming

    return naming(root)


def _report_removed(root: Path, gone: list[Stored], *, as_json: bool, **more: Any) -> None:
    for one in gone:
        sys.stderr.write(f"removed: {one.digest}, {_bytes(one.nbytes)}\n")
    report: dict[str, Any] = {"directory": str(root), "removed": [one.digest for one in gone]}
    report |= {"bytes": sum(one.nbytes for one in gone), **more}
    count = f"{len(gone)} result{'' if len(gone) == 1 else 's'}"
    say(report, f"{{directory}}: {count} removed, {{bytes}} bytes", as_json=as_json)


def _row(one: Stored) -> dict[str, Any]:
    from tdgpu.cache import budget
    from tdgpu.cache.record import Record

    known = one.record
    state = "kept" if isinstance(known, Record) else "replaced" if known is None else f"not used: {known}"
    return {
        "digest": one.digest,
        "transform": known.transform if isinstance(known, Record) else None,
        "bytes": one.nbytes,
        "built": known.built if isinstance(known, Record) else None,
        "used": one.used,
        "is_in_use": budget.in_use(one.directory),
        "state": state,
        "path": str(one.directory),
    }


def _table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("digest", "transform", "size", "built", "used", "state", box=None)
    for row in rows:
        state = "in use" if row["is_in_use"] else "" if row["state"] == "kept" else row["state"]
        table.add_row(
            row["digest"], row["transform"] or "", _bytes(row["bytes"]), _age(row["built"]), _age(row["used"]), state
        )
    stdout().print(table, markup=False)


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except (ValueError, KeyError, OverflowError):
        size = -1
    if size < 0:
        raise typer.BadParameter(f"{text!r} is no size in bytes, such as 10737418240 or 10G.", param_hint="--max-size")
    return size


def _bytes(count: int) -> str:
    """Bytes, as people read them.

    >>> _bytes(512), _bytes(3 << 19), _bytes(10 << 30)
    ('512 B', '1.5 MiB', '10.0 GiB')
    """
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _age(when: float | None, now: float | None = None) -> str:
    """How long ago something was, as people read it.

    >>> _age(0.0, 59.0), _age(0.0, 7200.0), _age(0.0, 864000.0)
    ('59 s ago', '2 h ago', '10 d ago')
    """
    if when is None:
        return ""
    seconds = max(0, int((time.time() if now is None else now) - when))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"
