"""torch's ``default_convert``, told to leave tensor collections as they are.

A DataLoader with ``batch_size=None`` and without a ``collate_fn`` passes everything that it fetches through
``default_convert``. That takes a TensorDict for a mapping, iterates it to get its keys, gets rows, and raises a
TypeError, whatever the TensorDict holds. For ``default_collate`` torch has a registry, in which tensordict has entered
itself; for ``default_convert`` it has none, so the function itself is replaced. All else it does as before.
"""

from __future__ import annotations

from typing import Any

from tensordict import is_tensor_collection
from torch.utils.data._utils import collate

__all__ = ["default_convert", "install"]

_torchs = collate.default_convert


def default_convert(data: Any) -> Any:
    """``data``, its numpy arrays as tensors: see :func:`torch.utils.data.default_convert`.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> rows = TensorDict(a=torch.arange(3), batch_size=[3])
    >>> default_convert(rows) is rows
    True
    """
    # torch's calls itself by its name in that module, so this one sees what lies in lists and dicts, too.
    return data if is_tensor_collection(data) else _torchs(data)


def install() -> None:
    """Lets the DataLoaders that are made from now on use it."""
    collate.default_convert = default_convert
