"""What the tests of datasets under torch.utils.data share: points, whose leaves agree on which ones they are."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from saves import Point

ROWS = 10
IN_ORDER = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def rows_of(*values: int) -> Point:
    numbers = torch.tensor(values, dtype=torch.float32)
    return Point(x=numbers, y=numbers.reshape(len(values), 1).repeat(1, 2), batch_size=[len(values)])


def numbers(batch: Any) -> list[int]:
    """The numbers in a batch, which is of the saved class and which all leaves agree on."""
    assert type(batch) is Point
    values = [int(value) for value in batch.x.tolist()]
    assert batch.batch_size == torch.Size([len(values)])
    assert batch.y.tolist() == [[value] * 2 for value in values]
    return values


def batches(loader: Iterable[Any]) -> list[list[int]]:
    return [numbers(batch) for batch in loader]


def joined(lists: Iterable[Iterable[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


@contextlib.contextmanager
def fails(expected: type[Exception], match: str | None = None) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """As ``pytest.raises``, for the error of a loader with workers.

    Its iterator goes with the frames of the error: one that the garbage collector finds waits for its workers for
    seconds.
    """
    with pytest.raises(expected, match=match) as raised:
        yield raised
    traceback.clear_frames(raised.tb)
