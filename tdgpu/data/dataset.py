"""A save as a dataset of its rows: :class:`MemmapDataset`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

from tdgpu.data import convert
from tdgpu.data.arguments import refuse_fake_mode
from tdgpu.data.form import BatchForm
from tdgpu.data.indexing import RowIndexError, row_at, rows_at
from tdgpu.data.mapped_rows import MappedRows
from tdgpu.data.renaming import Names, rename, renamed
from tdgpu.data.rows import Rows
from tdgpu.data.selection import check_keys, select
from tdgpu.data.transforms import Made, Transforms
from tdgpu.data.views import Index, Step
from tdgpu.errors import FormatError, InvalidArgument, NotSupported
from tdgpu.growing import MemmapReader
from tdgpu.layout.files import Where
from tdgpu.layout.rows import narrow
from tdgpu.layout.save import Save
from tdgpu.layout.tree import Key, Kind, Level
from tdgpu.load import Request

__all__ = ["MemmapDataset"]

_D = TypeVar("_D", bound="MemmapDataset")


class MemmapDataset(Transforms):
    """The rows of a save, along its first batch dimension, as a map-style dataset.

    What it gives is of the saved class, on the CPU, and the caller's own: never a view of a file. It works as it is in
    :class:`torch.utils.data.DataLoader`, with worker processes, and under every sampler and every dataset of torch.

    Args:
        prefix: the saved directory, or an archive. Leaves that an archive stores uncompressed are mapped. Compressed
            ones are inflated into memory, all of them, when a process first needs a row: each worker process has its
            own copy then.
        keys: a list of nested keys, strings or tuples of strings, of leaves or of subtrees: only these are in the rows,
            and no other leaf is opened. A tensorclass has None for the others. None: all.
        subpath, robust_key, allow_pickle: as in :func:`tdgpu.load_memmap`. Non-tensor contents are read once; they are
            not copied, so all rows and batches of a process share them.

    Raises:
        InvalidArgumentType: ``keys`` is no list of keys, an ``allow_pickle`` that is no bool (a TypeError).
        UnknownKeyError: a key that the save does not have (a KeyError).
        InvalidArgument: what is read has no batch dimension, and so no rows (a ValueError).
        NotSupported: only the rebuilt object knows whether it has rows; or a leaf is a strided nested tensor, of which
            torch cannot take rows: leave it out with ``keys`` (a NotImplementedError).
        TdgpuError: the save cannot be read: see :func:`tdgpu.load_memmap`.

    Indexing:
        - ``dataset[i]``: one row, as ``td[i]`` gives it: without the first batch dimension.
        - ``dataset[rows]``: a batch of batch size ``[n, ...]``, for a slice, a range, a list of ints, a one-dimensional
          tensor or array of them, or a mask of ``len(dataset)`` bools.

        Negative indices count from the end. Out of range is an IndexError, which names the index; anything else (a
        tuple, None, ``...``, a bool) is a TypeError. Iterating gives the rows, one by one.

    In a DataLoader:
        - With ``batch_size=n``, a batch is read at once. Without a ``collate_fn`` it is handed out as it is, in the
          saved class. (tensordict tells torch to, from 0.15.3 on.) A ``collate_fn`` gets that same object, which is a
          sequence of rows, too: ``len(rows)``, ``rows[i]``, ``for row in rows``.
        - With ``batch_size=None``, the sampler's items are the indices: ints, or lists of ints for whole batches.
        - ``pin_memory=True`` pins every leaf, and keeps the class and its batch size.
        - A dataset pickles as its path and arguments. Each process opens the leaves for itself, when it first needs a
          row, and sees the number of rows that the dataset had when it was pickled; if another save stands at the path
          by then, that is an error.

    A save that grows:
        A dataset has the rows that were committed when it was made. :meth:`refresh` looks again. A loader sees the new
        length when it is iterated the next time, and its persistent workers look for themselves when they are asked for
        a row that they do not know.

    Transforms:
        - :meth:`select`, :meth:`shuffle`, :meth:`sort`, :meth:`shard`, :meth:`train_test_split` and :meth:`rename_keys`
          give a view of the same save, and copy no rows.
        - :meth:`map`, :meth:`filter`, :meth:`flatten` and :meth:`concatenate` compute or copy rows, once: the result is
          found again in the cache, also by another process, as long as rows, function and arguments are the same.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict
    >>> from torch.utils.data import DataLoader
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = TensorDict(obs=torch.arange(12).view(6, 2), action=torch.arange(6), batch_size=[6]).memmap(path)
    ...     dataset = MemmapDataset(path, keys=["obs"])
    ...     print(len(dataset), dataset[-1]["obs"], dataset[[4, 0]]["obs"])
    ...     for batch in DataLoader(dataset, batch_size=4):
    ...         print(type(batch).__name__, batch.batch_size, batch["obs"][:, 0])
    6 tensor([10, 11]) tensor([[8, 9],
            [0, 1]])
    TensorDict torch.Size([4]) tensor([0, 2, 4, 6])
    TensorDict torch.Size([2]) tensor([ 8, 10])
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        keys: Iterable[str | tuple[Any, ...]] | None = None,
        *,
        subpath: Any = None,
        robust_key: bool | None = True,
        allow_pickle: bool | None = None,
    ) -> None:
        convert.install()
        # A working directory that changes later, or in a worker, does not matter.
        self._prefix = str(Path(prefix).absolute())
        self._keys = check_keys(keys)
        self._arguments = {"subpath": subpath, "robust_key": robust_key, "allow_pickle": allow_pickle}
        self._mark: _Mark | None = None  # of the save, once this has been pickled
        self._classes: list[type] = []
        self._seen: _Seen | None = None
        self._rows: int | None = None  # of the save
        # A view: of each of its rows that of the save, and what was changed about the keys, one after the other: some
        # that are renamed, or those that are left.
        self._index: Index | None = None
        self._changes: tuple[Names | list[Key], ...] = ()
        self._steps: tuple[Step, ...] = ()
        self._made: Made | None = None
        self._rows = self._see().rows

    # --- what it is ---

    @property
    def prefix(self) -> Path:
        """The directory or archive."""
        return Path(self._prefix)

    @property
    def keys(self) -> list[Key] | None:
        """The nested keys that the rows have, as tuples; None: all."""
        keys = None if self._keys is None else list(self._keys)
        for change in self._changes:
            if isinstance(change, list):
                keys = list(change)
            elif keys is not None:
                keys = renamed(keys, change)
        return keys

    @property
    def batch_size(self) -> torch.Size:
        """The batch size of all rows together; a row has it without the first dimension."""
        return torch.Size((len(self), *(self._see().save.root.batch_size or ())[1:]))

    def __len__(self) -> int:
        """Rows that were committed when the save was last looked at; of a view, those that it has."""
        if self._index is not None:
            return len(self._index)
        assert self._rows is not None
        return self._rows

    def __repr__(self) -> str:
        shown = self.keys
        keys = "" if shown is None else f", keys={[key[0] if len(key) == 1 else key for key in shown]!r}"
        subpath = self._arguments["subpath"]
        below = "" if subpath is None else f", subpath={subpath!r}"
        of = "" if self._index is None else f" of {self._rows}"
        return f"{type(self).__name__}({self._prefix!r}{keys}{below}, {len(self)}{of} rows)"

    # --- rows ---

    def __getitem__(self, index: Any) -> Any:
        rows = self._known(row_at, index)
        return self._one(rows) if isinstance(rows, int) else self._take(rows)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """A batch of rows, as a DataLoader asks for it.

        Args:
            indices: integers, which may be negative: a list, or a one-dimensional tensor or array.

        Returns:
            The saved class, of batch size ``[len(indices), ...]``.

        Raises:
            RowIndexError: there is no such row (an IndexError).
            InvalidArgumentType: these are no integers (a TypeError).
        """
        return self._take(self._known(rows_at, indices))

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def _known(self, find: Callable[[Any, int], Any], index: Any) -> Any:
        try:
            return find(index, len(self))
        except RowIndexError as error:
            # The main process may have refreshed its dataset since it gave this worker a copy of it.
            if get_worker_info() is not None and self._index is None and self.refresh():
                return find(index, len(self))
            error.save = self._prefix
            raise

    def _one(self, index: int) -> Any:
        """One row, of which it is known that it is there."""
        refuse_fake_mode(self._prefix)
        if self._index is not None:
            index = int(self._index[index])
        return self._see().opened().one(index)

    def _take(self, index: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        """A batch of rows, of which it is known that they are there."""
        refuse_fake_mode(self._prefix)
        if self._index is not None:
            index = self._index[index]
        return self._see().opened().take(index)

    # --- the save ---

    def refresh(self) -> int:
        """Looks at the save again. If nothing was committed since, that costs one ``stat``.

        Returns:
            How many rows were added since.

        Raises:
            InvalidArgument: it is a view with an index, which has the rows that it was made of (a ValueError).
            FormatError: another save stands there now (a RuntimeError).
            SaveNotFound: it is gone (a FileNotFoundError).
            TdgpuError: it cannot be read: see :func:`tdgpu.load_memmap`.

        After an error the dataset is what it was before. Copies of it in worker processes do not know of the refresh;
        but see the note on saves that grow, above.
        """
        if self._index is not None:
            raise InvalidArgument(
                "A view has the rows that it was made of: refresh the dataset, and make the view of it again.",
                save=self._prefix,
            )
        seen = self._see()
        seen.reader.refresh()
        added = len(seen.reader) - seen.rows
        if added:
            self._seen = self._look(seen.reader, None)
            self._rows = self._seen.rows
        return added

    def _see(self) -> _Seen:
        """The save as it was last looked at. A dataset that was unpickled does so now, for the first time."""
        seen = self._seen
        if seen is None:
            reader = MemmapReader(self._prefix, **self._arguments)
            if self._rows is not None and len(reader) < self._rows:
                raise self._another(f"it has {len(reader)} rows, and had {self._rows}")
            seen = self._look(reader, self._rows)
            how = None if self._mark is None else self._mark.difference(_Mark.of(seen))
            if how is not None:
                raise self._another(how)
            self._seen = seen
        return seen

    def _look(self, reader: MemmapReader, rows: int | None) -> _Seen:
        """What is wanted of what the reader has seen: the first ``rows`` rows; None: all."""
        state = reader._seen
        rows = state.rows if rows is None else rows
        save = state.save if self._keys is None else select(state.save, self._keys)
        for change in self._changes:
            save = select(save, change) if isinstance(change, list) else rename(save, change)
        for level in save.root.walk():
            for leaf in level.leaves.values():
                if leaf.is_nested:
                    raise Where(save.prefix, leaf.key, level.path).error(
                        NotSupported,
                        "torch cannot take rows of a strided nested tensor: name the other leaves with `keys`.",
                    )
        if rows != state.rows or not save.foreign():
            # It also checks that every level and leaf has the rows of what holds it.
            save = narrow(save, slice(0, rows))
        return _Seen(reader, save, rows, dataclasses.replace(state, save=save), self._arguments)

    # --- views ---

    def _viewed(self: _D, step: Step, *, rows: Index | None = None, names: Names | None = None) -> _D:
        """A view: of these rows, whose numbers are known to be right; or under these names."""
        view = self._again() if names is None else self._changed(names)
        view._steps = (*self._steps, step)
        if rows is not None:
            view._index = rows if self._index is None else self._index[rows]
        return view

    def _only(self: _D, keys: list[Any]) -> _D:
        """The same rows with some of their keys."""
        return self._changed(keys)

    def _whole(self: _D) -> _D:
        """What this is a view of: all rows, under the keys that they had."""
        whole = self._again()
        whole._index, whole._steps = None, ()
        if self._changes:
            seen = self._see()
            whole._changes = ()
            whole._seen = whole._look(seen.reader, seen.rows)
        return whole

    def _changed(self: _D, change: Names | list[Key]) -> _D:
        seen = self._see()
        view = self._again()
        view._changes = (*self._changes, change)
        # Of the save as this has seen it, and not as another view may have.
        view._seen = view._look(seen.reader, seen.rows)
        view._mark = None
        return view

    def _again(self: _D) -> _D:
        """Another one of the same save, which shares with this what has been opened."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        return view

    def _another(self, how: str) -> FormatError:
        return FormatError(
            f"This is no longer the save that the dataset was made of: {how}. Make the dataset anew.",
            save=self._prefix,
        )

    # --- pickling ---

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        seen = state.pop("_seen")
        if seen is not None:
            state["_mark"] = _Mark.of(seen)
            # Unpickling a class imports its module: the other process then knows the classes of the save.
            state["_classes"] = _importable({level.cls for level in seen.save.root.walk(into_foreign=True)})
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        convert.install()
        self.__dict__.update(state, _seen=None)


class _Seen:
    """A save as a dataset has looked at it.

    Attributes:
        reader: what looked.
        save: the tree, of the rows and keys that are wanted.
        rows: how many rows.
        place: device and inode of the directory or archive.
    """

    def __init__(self, reader: MemmapReader, save: Save, rows: int, files: Any, arguments: dict[str, Any]) -> None:
        self.reader = reader
        self.save = save
        self.rows = rows
        status = os.stat(save.prefix)
        self.place = status.st_dev, status.st_ino
        self._files = files
        self._arguments = arguments
        self._opened: tuple[int, Rows | MappedRows] | None = None

    def opened(self) -> Rows | MappedRows:
        """The leaves, opened in this process: what another one has opened before a fork is left to it.

        Raises:
            LoadError: a file is no longer the one that was looked at, or is shorter.
            TdgpuError: see :func:`tdgpu.load_memmap`.
        """
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            self._files.check()
            # Threads that come here at once open it each for itself: a lock could be another's during a fork.
            opened = self._opened = (os.getpid(), self._open())
        return opened[1]

    def _open(self) -> Rows | MappedRows:
        try:
            form = BatchForm(self.save)
        except NotSupported:  # its rows do not lie one behind the other: tensordict finds them
            request = Request.checked(
                None, False, out=None, robust_key=self._arguments["robust_key"], mode="r", num_threads=_threads(),
                allow_pickle=self._arguments["allow_pickle"], return_early=False, rows=None, verify=False,
                progress=False, keep_prefix=False,
            )  # fmt: skip
            return MappedRows(self.save, request)
        return Rows(form, _threads())


def _threads() -> int:
    """Threads that inflate: many workers share a machine."""
    return 1 if get_worker_info() is not None else torch.get_num_threads()


@dataclasses.dataclass(frozen=True)
class _Mark:
    """What tells in another process whether a save is the same.

    Attributes:
        structure: a hash of the tree: keys, classes, dtypes and shapes.
        machine: the running system, on which alone inodes mean anything.
        files: a hash of the inodes.
    """

    structure: str
    machine: str
    files: str

    @classmethod
    def of(cls, seen: _Seen) -> _Mark:
        levels = list(seen.save.root.walk(into_foreign=True))
        leaves = [leaf for level in levels for leaf in level.leaves.values()]
        structure = [[_facts(level) for level in levels], [(leaf.key, leaf.shape, str(leaf.dtype)) for leaf in leaves]]
        files = [seen.place, [leaf.extent.inode for leaf in leaves if leaf.extent is not None]]
        return cls(_hash(structure), _machine(), _hash(files))

    def difference(self, now: _Mark) -> str | None:
        """What another save is told by; None if this is the same one."""
        if self.structure != now.structure:
            return "its keys, classes, dtypes or shapes differ"
        if self.machine == now.machine and self.files != now.files:
            return "its files are others"
        return None


def _facts(level: Level) -> tuple[object, ...]:
    # The metadata of a tensordict has the shapes before they were narrowed to the rows that are wanted.
    rest = None if level.kind in (Kind.TENSORDICT, Kind.TYPED) else level.meta
    return level.key, level.kind.value, level.meta.get("_type"), level.batch_size, level.names, rest


def _hash(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _importable(classes: set[type]) -> list[type]:
    """Those that another process can import. The others, as of a function's inside, it must define for itself."""
    found = []
    for cls in classes:
        with contextlib.suppress(pickle.PicklingError, AttributeError):
            pickle.dumps(cls)
            found.append(cls)
    return sorted(found, key=str)
