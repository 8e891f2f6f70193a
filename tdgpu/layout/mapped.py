"""Leaves as memory-mapped CPU tensors: what ``device=None`` and ``device="cpu"`` give."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from tensordict import MemoryMappedTensor

from tdgpu.errors import ArchiveNotSupported, LoadError
from tdgpu.layout.files import Where
from tdgpu.layout.save import Save
from tdgpu.layout.store import ArchiveStore
from tdgpu.layout.tree import Extent, Leaf

__all__ = ["Mapper", "check_mode", "nested_view"]


def check_mode(save: Save, mode: str | None, *, structure_only: bool = False) -> None:
    """Raises what speaks against mapping an archive so that writes reach it; of a directory, mapping its files tells.

    Args:
        save: the save.
        mode: as in :func:`tdgpu.load_memmap`.
        structure_only: whether no leaf will be mapped.

    Raises:
        PermissionError: ``mode="r+"``, and the archive is not writable.
        ArchiveNotSupported: ``mode="r+"``, and a leaf is compressed, nested, or not aligned in the archive. Its tensor
            would be a copy.
    """
    if mode != "r+" or not save.is_archive:
        return
    if not os.access(save.prefix, os.W_OK):
        raise PermissionError(f"Cannot open {save.prefix} with mode='r+': the file is not writable.")
    for leaf in () if structure_only else save.leaves():
        if leaf.extent is None:
            continue
        if leaf.extent.is_compressed:
            why = "is compressed"
        elif leaf.is_nested:
            why = "is a nested tensor"
        elif leaf.extent.offset % leaf.dtype.itemsize:
            why = "is not aligned in the archive, as that of another zip tool may be"
        else:
            continue
        raise Where(save.prefix, leaf.key, _file(leaf.extent)).error(
            ArchiveNotSupported,
            f"With mode='r+' writes must reach the archive, but this leaf {why}, and can only be copied. Save the"
            " archive with tensordict, without compression, to make it writable.",
        )


class Mapper:
    """Maps leaves of one save. All stored leaves of an archive are views of one mapping.

    Args:
        save: the save, checked, because mapping a file shorter than its tensor would grow it.
        mode: ``"r"``: writes stay in memory. ``"r+"``: they reach the file. None: of a directory ``"r+"`` where the
            file is writable, else ``"r"``; of an archive ``"r"``.

    Calling it with a leaf gives the leaf's tensor: of a directory a :class:`tensordict.MemoryMappedTensor`; of an
    archive a plain one, which is a copy where the leaf is nested or not aligned. The leaf has elements and is not
    compressed.

    Raises:
        LoadError: a file cannot be opened or mapped, or is not the one that was checked.
        PermissionError: ``mode="r+"``, and a file is not writable.

    >>> import tempfile
    >>> from tensordict import TensorDict
    >>> from tdgpu.layout import reader
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = TensorDict(a=torch.arange(3)).save(path + "/a.tdz")
    ...     save = reader.read(path + "/a.tdz")
    ...     save.close()
    ...     print(Mapper(save, "r")(save.root.leaves["a"]))
    tensor([0, 1, 2])
    """

    def __init__(self, save: Save, mode: str | None = None) -> None:
        self._save = save
        self._mode = mode
        self._archive: torch.Tensor | None = None

    def __call__(self, leaf: Leaf) -> torch.Tensor:
        extent = leaf.extent
        assert extent is not None and not extent.is_compressed
        try:
            if extent.packed is not None:
                return self._stored(leaf, extent)
            if leaf.nested_sizes is not None:
                return _nested_file(leaf, extent, self._mode)
            return _file_rows(leaf, extent, self._mode)
        except PermissionError:
            raise
        except (RuntimeError, OSError) as error:  # torch's own words name the file at best
            if isinstance(error, LoadError):
                raise
            raise self._error(f"A leaf's file cannot be mapped: {error}", leaf) from error

    def _error(self, message: str, leaf: Leaf) -> LoadError:
        assert leaf.extent is not None
        return LoadError(message, save=self._save.prefix, key=leaf.key, file=_file(leaf.extent))

    def _stored(self, leaf: Leaf, extent: Extent) -> torch.Tensor:
        if self._archive is None:
            self._archive = self._whole(leaf)
        begin = extent.offset + leaf.first
        values = self._archive[begin : begin + leaf.nbytes]
        # A nested tensor needs a storage of its own, see nested_view.
        if leaf.nested_sizes is not None or begin % leaf.dtype.itemsize:
            values = values.clone()
        values = values.view(leaf.dtype)
        return values.view(leaf.shape) if leaf.nested_sizes is None else nested_view(values, leaf.nested_sizes)

    def _whole(self, leaf: Leaf) -> torch.Tensor:
        """The bytes of the archive."""
        path, store = self._save.prefix, self._save.store
        assert isinstance(store, ArchiveStore)

        def check() -> None:
            status = os.stat(path)
            if (status.st_ino, status.st_size) != (store.inode, store.size):
                raise self._error("The archive has changed since it was checked.", leaf)

        check()  # mapping for mode="r+" would grow a shorter file
        whole = torch.from_file(
            path,
            shared=self._mode == "r+",
            size=store.size,
            dtype=torch.uint8,
            device=torch.device("cpu"),  # whatever the default device is
        )
        check()  # the path may lead to another file now
        return whole


def _file(extent: Extent) -> str:
    return extent.file if extent.packed is None else f"{extent.file}::/{extent.packed.name}"


def _file_rows(leaf: Leaf, extent: Extent, mode: str | None) -> torch.Tensor:
    if leaf.nbytes == extent.nbytes:
        return MemoryMappedTensor.from_filename(extent.file, leaf.dtype, torch.Size(leaf.shape), mode=mode)
    rows, *row = leaf.shape
    row_bytes = leaf.nbytes // rows
    whole = torch.Size((extent.nbytes // row_bytes, *row))
    first = leaf.first // row_bytes
    # As indexing the whole leaf gives them: such a tensor remembers which rows of the file it is.
    return MemoryMappedTensor.from_filename(extent.file, leaf.dtype, whole, mode=mode)[first : first + rows]


def _nested_file(leaf: Leaf, extent: Extent, mode: str | None) -> torch.Tensor:
    # tensordict computes the number of values as an int32, which wraps around: build the same object here.
    assert leaf.nested_sizes is not None
    file = extent.file
    writable = mode != "r" and os.access(file, os.W_OK)
    if mode == "r+" and not writable:
        raise PermissionError(f"Cannot open {file} with mode='r+': the file is not writable.")
    values = torch.from_file(
        file,
        shared=writable,
        size=extent.nbytes // leaf.dtype.itemsize,
        dtype=leaf.dtype,
        device=torch.device("cpu"),  # whatever the default device is
    )
    if leaf.nbytes != extent.nbytes:
        # Some components. The storage must begin where they do, see nested_view: by way of numpy, one may.
        part = values.view(torch.uint8).numpy()[leaf.first : leaf.first + leaf.nbytes]
        return nested_view(torch.from_numpy(part).view(leaf.dtype), leaf.nested_sizes)
    tensor: Any = MemoryMappedTensor(nested_view(values, leaf.nested_sizes))
    tensor.filename = file
    tensor._handler = None
    tensor._mode = mode
    tensor._index = None
    tensor._index_chain = ()
    tensor._parent_shape = leaf.nested_sizes
    return cast(torch.Tensor, tensor)


def nested_view(values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """The strided nested tensor over ``values``, as tensordict builds it.

    Args:
        values: all elements of all components, one-dimensional and contiguous, at the beginning of a storage: torch
            counts the offsets of a nested tensor from there, not from where ``values`` begins.
        sizes: int64 on the host, one row per component.

    Raises:
        ValueError: ``values`` begins inside its storage.

    >>> nested = nested_view(torch.arange(5), torch.tensor([[2], [3]]))
    >>> [part.tolist() for part in nested.unbind()]
    [[0, 1], [2, 3, 4]]
    """
    if not len(sizes):
        return torch.nested.nested_tensor([], dtype=values.dtype, device=values.device)  # of a view, torch would crash
    if values.storage_offset():
        raise ValueError("The values of a nested tensor must lie at the beginning of their storage.")
    strides, offsets = torch._nested_compute_contiguous_strides_offsets(sizes)
    return torch._nested_view_from_buffer(values, sizes, strides, offsets)
