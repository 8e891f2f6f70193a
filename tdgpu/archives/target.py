"""A file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator

from tdgpu.errors import InvalidArgument

__all__ = ["LEFT_BEHIND", "check_target", "hidden_name", "replacing"]

#: The names of :func:`hidden_name`, which only a process that was killed leaves behind.
LEFT_BEHIND = re.compile(r"\.tdz-[0-9a-f]{16}")

# What "this file system has no nameless files" looks like. EISDIR: a kernel that does not know the flag.
_NO_NAMELESS_FILES = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS})


def hidden_name() -> str:
    """A new name for what is not complete yet."""
    return f".tdz-{secrets.token_hex(8)}"


def check_target(path: str) -> str:
    """Looks at what is to be replaced, before anything is written.

    Args:
        path: the file to write; a symbolic link is followed.

    Returns:
        The path of the file itself.

    Raises:
        InvalidArgument: something other than a regular file is there.
        PermissionError: a file that cannot be written is there. (Replacing it would need no such permission, but
            whoever took the permission away did not want it replaced.)
    """
    target = os.path.realpath(path)
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return target
    if not stat.S_ISREG(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise InvalidArgument(f"No archive can be written here: this is {what}.", file=path)
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return target


@contextlib.contextmanager
def replacing(path: str) -> Iterator[int]:
    """A descriptor for the new contents of a file, which takes its name when the block ends without an error.

    Until then the contents have no name at all, where the file system can do that: nothing is left behind even if the
    process is killed. Elsewhere they are a hidden file beside the target, which is removed if the block fails. What is
    mapped from, or linked to, the old file keeps the old contents.

    Args:
        path: the file to write; a symbolic link is followed. The new file has the mode of the one that it replaces.

    Raises:
        InvalidArgument, PermissionError: as :func:`check_target`.
        OSError: the file system refused, with the file's name.
    """
    target = check_target(path)
    directory = os.path.dirname(target)
    hidden = os.path.join(directory, hidden_name())
    fd = -1
    try:
        fd, has_name = _open(directory, hidden)
        yield fd
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(fd, stat.S_IMODE(os.stat(target).st_mode))
        if not has_name:
            _give_name(fd, hidden)
        os.rename(hidden, target)
    except OSError as error:
        # A full disk names no file, and a refusal names the hidden one: what the user named says more.
        if error.errno is not None and error.filename in (None, hidden, directory, f"/proc/self/fd/{fd}"):
            raise OSError(error.errno, error.strerror, path) from error
        raise
    finally:
        if fd >= 0:
            os.close(fd)
        # Tried in any case: an interrupt can come between any two lines.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(hidden)


def _open(directory: str, hidden: str) -> tuple[int, bool]:
    """A new file, and whether it has the name ``hidden``."""
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), False
        except OSError as error:
            if error.errno not in _NO_NAMELESS_FILES:
                raise
    return os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666), True


def _give_name(fd: int, path: str) -> None:
    # With a directory descriptor Python calls linkat, which follows the link in /proc as link does not.
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", os.path.basename(path), dst_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)
