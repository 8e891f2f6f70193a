"""How a transform's errors name rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tdgpu.errors import TdgpuError, TransformError

__all__ = ["named", "writing"]


def named(first: int, count: int) -> str:
    """How rows are called in messages.

    >>> named(3, 1), named(0, 1000)
    ('row 3', 'rows 0 to 999')
    """
    return f"row {first}" if count == 1 else f"rows {first} to {first + count - 1}"


@contextlib.contextmanager
def writing(rows: str) -> Iterator[None]:
    """What cannot be stored is an error that names the rows, and not the place where they would have been stored."""
    try:
        yield
    except TransformError:
        raise
    except OSError:
        raise  # no space: it is not these rows' fault
    except TdgpuError as error:
        raise TransformError(f"The results of {rows} cannot be stored: {error.message}", key=error.key) from error
    except (RuntimeError, ValueError, TypeError) as error:  # of torch and tensordict, which name the key
        raise TransformError(
            f"The results of {rows} cannot be stored: {type(error).__name__}: {error!s:.500}"
        ) from error
