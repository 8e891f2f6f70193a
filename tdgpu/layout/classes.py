"""Which class was saved, and so how a level is stored."""

from __future__ import annotations

import sys
from typing import Any

import tensordict.base
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase, TypedTensorDict

from tdgpu.errors import UnknownClassError
from tdgpu.layout.files import Where
from tdgpu.layout.tree import Kind

__all__ = ["class_id", "is_tensorclass_name", "kind_of", "resolve"]


# The module, which ``import tensordict.tensorclass`` does not give: that attribute is the decorator of the same name.
TENSORCLASS = sys.modules["tensordict.tensorclass"]


def class_id(cls: type) -> str:
    """The identifier of a class in ``meta.json``: ``tensordict:`` for what tensordict exports, else its module."""
    module = "tensordict" if getattr(tensordict, cls.__qualname__, None) is cls else cls.__module__
    return f"{module}:{cls.__qualname__}"


_TENSORDICT_TYPE = str(TensorDict)
_TENSORDICT_ID = class_id(TensorDict)


def _registered() -> tuple[type, ...]:
    # Rebound by tensordict whenever a class is defined: read it each time.
    return tensordict.base._ACCEPTED_CLASSES


def resolve(meta: dict[str, Any], where: Where) -> type:
    """The class that ``meta`` names: by identifier, then by type name, then by the rule for ``__main__``.

    Raises:
        FormatError: there is no type name.
        UnknownClassError: no class of that name is defined in this process.
    """
    type_name = meta.get("_type")
    if not isinstance(type_name, str):
        raise where.malformed("The metadata has no type name (_type).")
    identifier = meta.get("_class")
    if type_name == _TENSORDICT_TYPE or identifier == _TENSORDICT_ID:
        return TensorDict
    by_id = [cls for cls in _registered() if identifier is not None and class_id(cls) == identifier]
    # A process that multiprocessing has spawned calls the main script so.
    by_name = [cls for cls in _registered() if str(cls).replace("'__mp_main__.", "'__main__.") == type_name]
    for cls in by_id + by_name:
        if hasattr(cls, "_load_memmap"):
            return cls
    # tensordict's rule for a class saved from a script: what is called TensorDict in a module that is not __main__'s
    # inner scope is TensorDict itself, which older versions defined in other modules.
    name = type_name.removeprefix("<class '").removesuffix("'>")
    module = name.removesuffix(".TensorDict")
    if module != name and not module.startswith("__main__.") and "<locals>" not in module:
        return TensorDict
    raise where.error(
        UnknownClassError,
        f"The class {name} that was saved is not defined in this process: import the module that defines it first.",
    )


def is_tensorclass_name(type_name: object) -> bool:
    """Whether a saved type name is that of a tensorclass that this process knows."""
    return any(str(cls) == type_name and tensordict.is_tensorclass(cls) for cls in _registered())


def _loader(cls: type) -> Any:
    method = getattr(cls, "_load_memmap", None)
    return getattr(method, "__func__", method)


_KINDS = {
    _loader(TensorDict): Kind.TENSORDICT,
    _loader(TensorDictBase): Kind.TENSORDICT,  # the classes without a layout of their own: read as a TensorDict
    _loader(TypedTensorDict): Kind.TYPED,
    _loader(LazyStackedTensorDict): Kind.LAZY_STACK,
    _loader(NonTensorStack): Kind.NON_TENSOR_STACK,
    TENSORCLASS._load_memmap: Kind.TENSORCLASS,
}


def kind_of(cls: type, meta: dict[str, Any]) -> Kind:
    """How a level of class ``cls`` is stored: told by which of tensordict's loaders the class uses.

    Whoever brings a loader of their own, or one that tdgpu does not know, is foreign: only that loader can read it.
    """
    kind = _KINDS.get(_loader(cls), Kind.FOREIGN)
    if kind is Kind.TENSORCLASS and issubclass(cls, TENSORCLASS.NonTensorDataBase):
        return Kind.NON_TENSOR_DATA
    if kind is Kind.NON_TENSOR_STACK and meta.get("data") is None:
        return Kind.LAZY_STACK  # its members are on disk, as those of any lazy stack
    return kind
