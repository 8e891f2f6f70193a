"""The names in an archive: refused where they could lead elsewhere, and looked up as a tree of directories."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable

from tdgpu.errors import TdgpuError

__all__ = ["MAX_DEPTH", "Names"]

#: Directories below one another. The levels of a save lie no deeper, and a tensorclass takes two directories.
MAX_DEPTH = 512

# What a name has only if it leads elsewhere, or if there is another way to write it; \0 stands for its ends.
_SUSPECT = ("\\", "//", "\0/", "/./", "/../", "\0./", "\0../", "/.\0", "/..\0", "\0.\0", "\0..\0", "\0\0")
_DRIVE = re.compile(r"\0[^\W\d_]:[/\\]")


class Names:
    """The names of all entries.

    Args:
        names: they, those of directories with a ``/`` at the end.
        refuse: makes the error from the name that is refused and the reason.

    Raises:
        ArchiveError: a name is absolute, has an empty part, ``.``, ``..`` or NUL, or is absolute or goes up where a
            backslash separates, too; or two entries have one name; or a name is that of a file and of a directory.
    """

    def __init__(self, names: list[str], refuse: Callable[[str, str], TdgpuError]) -> None:
        joined = "\0" + "\0".join(names) + "\0"
        # One search of all for what almost no archive has, and only then name by name.
        suspicious = any(part in joined for part in _SUSPECT) or joined.count("\0") != len(names) + 1
        suspicious = suspicious or any(name.count("/") > MAX_DEPTH for name in names)
        if suspicious or _DRIVE.search(joined):
            for name in names:
                reason = _reason(name)
                if reason is not None:
                    raise refuse(name, reason)
        # With \0 for /, what lies in a directory comes right after it. A set of all directories would take memory that
        # grows with the square of a name's length.
        self._sorted = ordered = sorted(name.replace("/", "\0") for name in names)
        for i in range(1, len(ordered)):
            if ordered[i].startswith(ordered[i - 1]):
                name, longer = (text.replace("\0", "/") for text in ordered[i - 1 : i + 1])
                if name == longer:
                    raise refuse(name, "There are two entries of this name")
                if longer[len(name)] == "/" and not name.endswith("/"):
                    raise refuse(name, f"This is both a file and a directory, that of {longer!r}")

    def is_dir(self, name: str) -> bool:
        """Whether ``name`` is a directory: there is an entry below it, or its own. ``""`` is the root."""
        below = name.replace("/", "\0") + "\0"
        at = bisect_left(self._sorted, below)
        return not name or (at < len(self._sorted) and self._sorted[at].startswith(below))

    def members(self, name: str) -> list[str]:
        """What lies in the directory ``name``: files and directories, sorted."""
        below = name.replace("/", "\0") + "\0" if name else ""
        found: list[str] = []
        at = bisect_left(self._sorted, below)
        while at < len(self._sorted) and self._sorted[at].startswith(below):
            member = self._sorted[at][len(below) :].partition("\0")[0]
            if member:  # else it is the entry of the directory itself
                found.append(member)
            at = bisect_left(self._sorted, f"{below}{member}\1", at + 1)
        return found


def _reason(name: str) -> str | None:
    """Why ``name`` is refused, or None."""
    if "\0" in name:
        return "A name must not hold NUL"
    # A backslash may be part of a key, but there are tools that take it for a separator.
    if not name or name[0] in "/\\" or _DRIVE.match(f"\0{name}"):
        return "A name must be relative to the archive"
    if ".." in re.split(r"[/\\]", name):
        return "A name must not have the part '..'"
    if name.count("/") > MAX_DEPTH:
        return f"A name must not lie more than {MAX_DEPTH} directories deep"
    for part in name.removesuffix("/").split("/"):
        if part in ("", "."):
            return f"A name must not have the part {part!r}"
    return None
