"""The way back: what tensordict would write for an object, as a list of files, without writing them.

Every kind of level that tensordict has a layout for is described here, byte for byte as its own ``td.save("x.tdz")``
writes it. (A view of a tensordict becomes a tensordict of the values that it shows.) A level whose class brings a
writer of its own, an HDF5 file or a third-party class, is written by that class into a directory that the caller
provides, and described by the files that it left there.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TypedTensorDict, is_tensor_collection
from tensordict._lazy import _CustomOpTensorDict
from tensordict._td import _SubTensorDict

from tdgpu.errors import InvalidArgument, NotSupported, TdgpuError
from tdgpu.layout import keys
from tdgpu.layout.classes import TENSORCLASS, class_id
from tdgpu.layout.files import Where
from tdgpu.layout.placeholders import fake_is_active
from tdgpu.layout.reader import MAX_DEPTH
from tdgpu.layout.tree import Key

__all__ = ["File", "describe", "in_order"]

FORMAT_VERSION = 1


class File:
    """One file of a save that has not been written.

    Attributes:
        name: its path below the save, with ``/``.
        key: the nested key of the leaf or level that it belongs to.
        data: its contents; or the tensors whose bytes, one tensor after another, are its contents; or the path of a
            file that holds them.
    """

    __slots__ = ("data", "key", "name")

    def __init__(self, name: str, key: Key, data: bytes | tuple[torch.Tensor, ...] | os.PathLike[str]) -> None:
        self.name = name
        self.key = key
        self.data = data

    def __repr__(self) -> str:
        return f"File({self.name!r})"


def describe(value: Any, save: str, *, robust_key: bool | None = True, scratch: Callable[[], str]) -> list[File]:
    """The files that make up a save of a tensor collection.

    Args:
        value: a tensordict, tensorclass, stack, ...; its leaves may be on any device.
        save: where it will be saved, for messages.
        robust_key: whether keys are percent-encoded in file names (True, None) or used as they are.
        scratch: gives a new, empty directory, for a level that only its own class can write.

    Returns:
        The files, in the order in which tensordict puts them into an archive. Leaves without elements have none. The
        tensors are ``value``'s own, detached.

    Raises:
        NotSupported: a leaf that has no plain bytes: jagged, sparse, quantized, distributed, meta, fake.
        InvalidArgument: keys that lead to the same file, a field that cannot be pickled, too many levels.
        KeyEscapeError: with ``robust_key=False``, a key that leads out of the save.

    >>> files = describe(TensorDict(a=torch.zeros(2), b=TensorDict(c=torch.ones(3))), "x.tdz", scratch=str)
    >>> [file.name for file in files]
    ['meta.json', 'a.memmap', 'b/meta.json', 'b/c.memmap']
    """
    if fake_is_active():
        raise NotSupported("Under an active FakeTensorMode no tensor has bytes to save.", save=save)
    writer = _Describer(save, robust=robust_key is None or bool(robust_key), scratch=scratch)
    writer.level(value, "", ())
    _check_names(writer.files, save)
    return sorted(writer.files, key=lambda file: in_order(file.name))


def in_order(name: str) -> tuple[tuple[bool, bool, str], ...]:
    """A sorting key for names: the files of a level before its directories, ``meta.json`` first, then by name."""
    *directories, file = name.split("/")
    return (*((True, True, part) for part in directories), (False, file != "meta.json", file))


class _Describer:
    """One description of one object."""

    def __init__(self, save: str, *, robust: bool, scratch: Callable[[], str]) -> None:
        self.save = save
        self.robust = robust
        self.scratch = scratch
        self.files: list[File] = []

    def level(self, value: Any, path: str, key: Key) -> None:
        """Describes ``value``, whose directory below the save is ``path`` (with a slash at its end)."""
        if path.count("/") > MAX_DEPTH:
            raise self._error(InvalidArgument, f"The levels lie more than {MAX_DEPTH} deep, or in themselves.", key)
        value = _seen_through(value)
        # Told by the method that would write it, so that a class of the user's own that inherits one is known, too.
        method = getattr(type(value), "_memmap_", None)
        describe = _WRITERS.get(method)
        if describe is None:
            self._foreign(value, path, key)
        else:
            describe(self, value, path, key)

    # --- kinds of levels ---

    def tensordict(self, value: Any, path: str, key: Key) -> None:
        meta: dict[str, Any] = {}
        for name, entry in value.items():
            full = (*key, name)
            entry = _seen_through(entry)
            if is_tensor_collection(entry):
                meta[name] = {"type": type(entry).__name__}
                self.level(entry, f"{path}{self._name(name, full)}/", full)
            else:
                meta[name] = self._leaf(entry, f"{path}{self._name(name, full)}", full)
        # What it is loaded as: an empty copy, whose class need not be this one (parameters are saved as a tensordict).
        copy = value.empty(device=torch.device("cpu"))
        meta.update({"shape": list(copy.shape), "device": "cpu", "_type": str(type(copy))})
        for name, field in _format_fields(type(copy)).items():
            meta.setdefault(name, field)  # a key of that name stays
        if not isinstance(meta.get("_names"), dict) and copy._has_names():
            meta["_names"] = list(copy.names)
        self._meta(path, key, meta)

    def typed(self, value: Any, path: str, key: Key) -> None:
        self.level(value._source, path, key)

    def lazy_stack(self, value: Any, path: str, key: Key) -> None:
        fields = {"_type": str(type(value)), **_format_fields(type(value))}
        fields.update({"stack_dim": value.stack_dim, "stack_dim_name": value._td_dim_name})
        self._meta(path, key, fields)
        for i, member in enumerate(value.tensordicts):
            self.level(member, f"{path}{i}/", (*key, str(i)))

    def tensorclass(self, value: Any, path: str, key: Key) -> None:
        self._fields(value, value._non_tensordict, path, key)
        self.level(value._tensordict, f"{path}_tensordict/", key)

    def non_tensor_data(self, value: Any, path: str, key: Key) -> None:
        fields = dict(value._non_tensordict)
        if value._metadata is not None:
            # Less what says where it is mapped now.
            mapped = ("memmap_prefix", "memmaped", "_share_non_tensor")
            fields["_metadata"] = {name: item for name, item in value._metadata.items() if name not in mapped} or None
        self._fields(value, fields, path, key)

    def non_tensor_stack(self, value: Any, path: str, key: Key) -> None:
        data = value.tolist()
        inline = _is_json(data)
        if not inline:
            self._add(f"{path}pickle.pkl", key, self._pickled(data, key))
        fields = {"_type": str(type(value)), **_format_fields(type(value)), "stack_dim": value.stack_dim}
        fields["device"] = None if value.device is None else str(value.device)
        fields["data"] = data if inline else "pickle.pkl"
        self._add(f"{path}meta.json", key, json.dumps(fields, separators=(",", ":")).encode())

    def _fields(self, value: Any, fields: dict[str, Any], path: str, key: Key) -> None:
        meta: dict[str, Any] = {"_type": str(type(value))}
        others: dict[str, Any] = {}
        for name, field in fields.items():
            plain = TENSORCLASS._from_shared_nontensor(field)
            (meta if _is_json(plain) else others)[name] = plain
        self._meta(path, key, meta)
        if not others:
            return
        pickled = self._pickled(others, key)
        self._add(f"{path}other.pickle", key, pickled)
        names = TENSORCLASS._JSON_TYPE_NAMES
        if all(isinstance(field, type) and field in names for field in others.values()):
            types = {name: names[field] for name, field in others.items()}
            record = {"types": types, "pickle_sha256": hashlib.sha256(pickled).hexdigest()}
            self._add(f"{path}json_types.json", key, json.dumps(record).encode())

    def _foreign(self, value: Any, path: str, key: Key) -> None:
        directory = self.scratch()
        value.memmap(directory, copy_existing=True, robust_key=self.robust)
        for parent, _, names in os.walk(directory):
            for name in names:
                file = os.path.join(parent, name)
                inner = os.path.relpath(file, directory)
                self.files.append(File(path + inner, key, Path(file)))

    # --- leaves ---

    def _leaf(self, value: Any, stem: str, key: Key) -> dict[str, Any]:
        """Describes a leaf whose file is ``stem`` plus ``.memmap``; returns its entry in ``meta.json``."""
        self._check_leaf(value, key)
        tensor = _plain(value)
        name = f"{stem}.memmap"
        shape = list(value.shape) if not value.is_nested else []
        if value.is_nested:
            sizes = value._nested_tensor_size()
            shape = list(sizes.shape)
            parts = tuple(_as_bytes(part) for part in tensor.unbind() if part.numel())
            if sizes.numel():
                self._add(str(PurePosixPath(name).with_suffix(".shape.memmap")), key, (sizes,))
        else:
            parts = (_as_bytes(tensor),) if tensor.numel() else ()
        if parts:
            self._add(name, key, parts)
        return {
            "device": str(value.device), "shape": shape, "dtype": str(value.dtype), "is_nested": value.is_nested,
        }  # fmt: skip

    def _check_leaf(self, value: Any, key: Key) -> None:
        what = None
        if not isinstance(value, torch.Tensor):
            what = f"is a {type(value).__name__}"
        elif getattr(type(value), "_pass_through", False):
            what = f"is an {type(value).__name__}, whose class a save cannot record"
        elif value.layout != torch.strided:
            what = f"has the layout {value.layout}"
        elif value.is_quantized:
            what = "is quantized"
        elif value.device.type == "meta" or isinstance(value, torch._subclasses.FakeTensor):
            what = "has no data (meta or fake)"
        elif hasattr(value, "__tensor_flatten__") or hasattr(value, "full_tensor"):
            what = f"is a {type(value).__name__}, which is made of other tensors"
        if what is not None:
            raise self._error(NotSupported, f"This leaf {what}: convert it to a plain strided tensor first.", key)

    # --- helpers ---

    def _name(self, key: str, full: Key) -> str:
        if self.robust:
            return keys.encode(key)
        return keys.stay_inside(key, Where(self.save, full, self.save))

    def _add(self, name: str, key: Key, data: bytes | tuple[torch.Tensor, ...]) -> None:
        self.files.append(File(name, key, data))

    def _meta(self, path: str, key: Key, meta: dict[str, Any]) -> None:
        self._add(f"{path}meta.json", key, json.dumps(meta).encode())

    def _pickled(self, value: Any, key: Key) -> bytes:
        try:
            return pickle.dumps(value)
        except Exception as error:
            raise self._error(InvalidArgument, f"A field cannot be pickled: {error}", key) from error

    def _error(self, cause: type[TdgpuError], message: str, key: Key) -> TdgpuError:
        return cause(message, save=self.save, key=key)


_WRITERS: dict[Any, Callable[[_Describer, Any, str, Key], None]] = {
    TensorDict._memmap_: _Describer.tensordict,
    TypedTensorDict._memmap_: _Describer.typed,
    LazyStackedTensorDict._memmap_: _Describer.lazy_stack,
    NonTensorStack._memmap_: _Describer.non_tensor_stack,
    TENSORCLASS.NonTensorDataBase._memmap_: _Describer.non_tensor_data,
    TENSORCLASS._memmap_: _Describer.tensorclass,
}


# Views, each with its way to look at another tensordict. Tensors and slices of them are not copied.
_VIEWS = (_SubTensorDict._memmap_, _CustomOpTensorDict._memmap_)


def _seen_through(value: Any) -> Any:
    """A tensordict of what a view shows; anything else as it is."""
    if getattr(type(value), "_memmap_", None) not in _VIEWS:
        return value
    return value.apply(lambda tensor: tensor)


def _format_fields(cls: type) -> dict[str, Any]:
    return {"_format_version": FORMAT_VERSION, "_class": class_id(cls)}


def _is_json(value: Any) -> bool:
    """Whether JSON gives back what it is given (tuples apart, as for tensordict)."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(item) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, (str, int, float, bool))


def _plain(value: torch.Tensor) -> torch.Tensor:
    """The tensor without gradient and without its Python class, whose operations may be slow or of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch thinks of nested tensors
        detached = value.detach()
        return detached if type(detached) is torch.Tensor else detached.as_subclass(torch.Tensor)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of one byte as what they are: torch cannot copy all of them by their dtype."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _check_names(files: list[File], save: str) -> None:
    """Raises InvalidArgument if two files have one name, or one has the name of a directory."""
    seen: dict[str, File] = {}
    directories: dict[str, File] = {}
    for file in files:
        for parent in _parents(file.name):
            directories.setdefault(parent, file)
    for file in files:
        if not {"", ".", ".."}.isdisjoint(file.name.split("/")):
            raise InvalidArgument(
                "Used as a path (robust_key=False), this key has an empty part.", save=save, key=file.key
            )
        other = seen.setdefault(file.name, file)
        other = directories.get(file.name, file) if other is file else other
        if other is not file:
            raise InvalidArgument(
                f"The keys {'/'.join(other.key)!r} and {'/'.join(file.key)!r} lead to the same file: rename one.",
                save=save, file=file.name,
            )  # fmt: skip


def _parents(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name
