"""Transforms of a dataset whose results are kept: what they take and give. How they do it is in :mod:`tdgpu.cache`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tdgpu.data.views import Views

if TYPE_CHECKING:
    from tdgpu.data.dataset import MemmapDataset

__all__ = ["Made", "Transforms"]

_T = TypeVar("_T", bound="Transforms")


@dataclass(frozen=True)
class Made:
    """Where the save of a dataset comes from, if a transform has made it.

    Attributes:
        entry: the entry of the cache, which is in use as long as this is there.
        digest: the fingerprint of what was computed.
        origin: the fingerprint of the save that it was computed from, in however many steps.
    """

    entry: Any
    digest: str
    origin: str


# The cache hashes datasets, and so comes after them: it is imported by who computes something. That also keeps what
# hashing needs out of programs that only load.
class Transforms(Views):
    """The transforms of :class:`tdgpu.MemmapDataset` that compute or copy rows, and keep the result in the cache.

    A result is found again by its fingerprint: that of the dataset, the function with all that it uses, and every
    argument that the result depends on. What it is found in the cache by is never what it is called or where it lies.
    """

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that name these rows: of a save, what its bytes are; of a transform's result, what it
        was computed from and how.

        The bytes are looked at each time, and hashed unless it is sure that they are the same as the last time; so a
        save that is changed in place has another fingerprint, and so have its views.

        Raises:
            LoadError: a leaf cannot be read (an OSError).
            ChecksumError: a compressed leaf is damaged.
        """
        from tdgpu.cache import lineage

        return lineage.digest(self)

    def map(
        self,
        function: Callable[..., Any],
        batched: bool = False,
        batch_size: int = 1000,
        *,
        with_indices: bool = False,
        input_keys: Iterable[Any] | None = None,
        remove_keys: Iterable[Any] | None = None,
        device: torch.device | str | int | None = None,
        num_threads: int | None = None,
        progress: bool = False,
        new_fingerprint: str | None = None,
        load_from_cache: bool = True,
    ) -> MemmapDataset:
        """The dataset with what a function computes of its rows; computed once, and found in the cache from then on.

        Rows come through a :class:`tdgpu.DeviceLoader`, and results go to the disk as they come: memory in use is a few
        batches, however many rows there are.

        Args:
            function: called with each row, or each batch. It returns a dict or TensorDict: these entries are added to
                the row, or take the place of those it has. A tensorclass is the new row. None: it is called for what
                else it does, each time, and the dataset stays as it is. Values of a dict may be tensors, arrays,
                numbers, nested dicts, and any other objects, which become non-tensor data. Each key must have one
                dtype and shape in all rows.
            batched: whether it is called with batches, of batch size ``[batch_size, ...]`` (the last one may be
                shorter), and returns batches. These may have another number of rows, if nothing is left of what was
                given: ``remove_keys`` names what the function does not return.
            batch_size: rows of a batch.
            with_indices: whether it gets, as second argument, the index of the row in this dataset: an int, or a tensor
                of int64 on the device of the batch.
            input_keys: what it gets of the rows; None: all of it. What it does not get stays in the result.
            remove_keys: what is not in the result, unless the function returns it.
            device: where it gets the rows: an accelerator; None: the CPU. Results on a device are fetched from there.
            num_threads: native threads that gather the rows; None: as many as the option ``threads`` says.
            progress: show a progress bar on stderr, if that is a terminal.
            new_fingerprint: the fingerprint of the result instead of the computed one, up to 64 letters, digits, ``-``
                and ``_``: the result is then found by it alone, whatever rows and function are.
            load_from_cache: whether a result that is there is taken; else it is computed again.

        Returns:
            A dataset of the result, a save of its own. Without rows, the function is not called.

        Raises:
            TransformError: the function has raised an exception, which is ``error.__cause__``, or has returned what
                cannot be stored; the message says of which rows (a RuntimeError). Nothing is left in the cache.
            UnknownKeyError: a key that the rows do not have (a KeyError).
            InvalidArgument, InvalidArgumentType: other arguments that make no sense.
            TdgpuError: the rows cannot be read: see :class:`tdgpu.DeviceLoader`.

        Warns:
            FingerprintWarning: something cannot be hashed, so the result will not be found again.

        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path, tdgpu.options(cache=path + "/cache"):
        ...     _ = TensorDict(x=torch.arange(6), batch_size=[6]).memmap(path + "/rows")
        ...     doubled = tdgpu.MemmapDataset(path + "/rows").map(lambda rows: {"y": rows["x"] * 2}, batched=True)
        ...     print(doubled[4]["x"].item(), doubled[4]["y"].item())
        4 8
        """
        from tdgpu.cache import mapping

        return mapping.map_rows(
            self, function, batched=batched, batch_size=batch_size, with_indices=with_indices, input_keys=input_keys,
            remove_keys=remove_keys, device=device, num_threads=num_threads, progress=progress,
            new_fingerprint=new_fingerprint, load_from_cache=load_from_cache,
        )  # fmt: skip

    def filter(
        self: _T,
        function: Callable[..., Any],
        batched: bool = False,
        batch_size: int = 1000,
        *,
        with_indices: bool = False,
        input_keys: Iterable[Any] | None = None,
        device: torch.device | str | int | None = None,
        num_threads: int | None = None,
        progress: bool = False,
        new_fingerprint: str | None = None,
        load_from_cache: bool = True,
    ) -> _T:
        """A view of the rows for which a function is true. Which ones these are is kept in the cache; no row is copied.

        Args:
            function: called as that of :meth:`map`; returns a bool, or for a batch one bool per row: a tensor, an
                array or a list.
            batched, batch_size, with_indices, input_keys, device, num_threads, progress, new_fingerprint,
                load_from_cache: as in :meth:`map`.

        Raises:
            What :meth:`map` raises.

        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path, tdgpu.options(cache=path + "/cache"):
        ...     _ = TensorDict(x=torch.arange(6), batch_size=[6]).memmap(path + "/rows")
        ...     odd = tdgpu.MemmapDataset(path + "/rows").filter(lambda rows: rows["x"] % 2 == 1, batched=True)
        ...     print(odd[:]["x"].tolist())
        [1, 3, 5]
        """
        from tdgpu.cache import mapping

        return mapping.filter_rows(
            self, function, batched=batched, batch_size=batch_size, with_indices=with_indices, input_keys=input_keys,
            device=device, num_threads=num_threads, progress=progress, new_fingerprint=new_fingerprint,
            load_from_cache=load_from_cache,
        )  # fmt: skip

    def flatten(self, *, progress: bool = False) -> MemmapDataset:
        """The rows of a view as a save of their own in the cache, in their order: reading them goes through no index.

        A dataset that is no view is returned as it is. Memory in use does not grow with the rows.

        Raises:
            TransformError: rows that cannot be stored one behind the other, such as those of a lazy stack of different
                shapes (a RuntimeError).
            TdgpuError: the rows cannot be read.
        """
        from tdgpu.cache import copying

        return copying.flatten(self, progress=progress)

    def concatenate(self, *others: MemmapDataset, progress: bool = False) -> MemmapDataset:
        """The rows of this dataset and then those of others, copied into one save in the cache.

        Memory in use does not grow with the rows; the disk must have room for them. To read several saves without a
        copy, there is ``torch.utils.data.ConcatDataset``.

        Args:
            others: datasets of the same keys, dtypes and row shapes.

        Raises:
            InvalidArgumentType: what is no MemmapDataset (a TypeError).
            TransformError: a dataset whose rows do not fit behind the others; it names the key (a RuntimeError).
            TdgpuError: rows cannot be read.

        >>> import tempfile, torch, tdgpu
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as path, tdgpu.options(cache=path + "/cache"):
        ...     _ = TensorDict(x=torch.arange(4), batch_size=[4]).memmap(path + "/rows")
        ...     rows = tdgpu.MemmapDataset(path + "/rows")
        ...     print(rows.concatenate(rows.select([2]))[:]["x"].tolist())
        [0, 1, 2, 3, 2]
        """
        from tdgpu.cache import copying

        return copying.concatenate(self, others, progress=progress)

    def save_to_disk(self, path: str | os.PathLike[str], *, progress: bool = False) -> None:
        """Writes the rows, in their order, as a saved directory that stays: :func:`tdgpu.load_memmap` opens it.

        It appears whole or not at all. With the option ``durable`` (the default) it also survives a power failure.

        Args:
            path: where; missing directories above it are made.
            progress: show a progress bar on stderr, if that is a terminal.

        Raises:
            SaveExists: there is something already (a RuntimeError).
            TransformError: rows that cannot be stored one behind the other (a RuntimeError).
            TdgpuError: the rows cannot be read.
            OSError: there is no room, or no permission.
        """
        from tdgpu.cache import copying

        copying.save_to_disk(self, path, progress=progress)

    def cleanup_cache_files(self) -> int:
        """Removes from the cache everything that was computed from the save that this dataset comes from, in however
        many steps, except what is in use: by a dataset of any process.

        Returns:
            How many results were removed.
        """
        from tdgpu.cache import lineage

        return lineage.clean_up(self)
