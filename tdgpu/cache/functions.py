"""Functions, classes and modules: those of libraries by name and version, the user's by what they do."""

from __future__ import annotations

import builtins
import functools
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tdgpu.cache import imports, origin
from tdgpu.cache.bytecode import Reads, code_digest, reads
from tdgpu.cache.encode import raw, scalar
from tdgpu.cache.graph import Description, Ref, Unhashable

__all__ = ["DESCRIBERS", "describe_class", "described", "is_users"]

Chains = set[tuple[str, ...]]

_MISSING = object()
#: What a class or module has for itself, whatever is in it.
_ABOUT_ITSELF = frozenset(
    {
        "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__abstractmethods__", "_abc_impl",
        "__firstlineno__", "__static_attributes__", "__annotations_cache__", "__name__", "__file__", "__cached__",
        "__slotnames__", "__loader__", "__spec__", "__path__", "__package__", "__builtins__", "__warningregistry__",
    }
)  # fmt: skip
#: What is said of types. It is told by its text: evaluating it could run anything.
_ABOUT_TYPES = frozenset({"__annotations__", "__orig_bases__", "__parameters__", "__annotate__", "__annotate_func__"})
#: With these, a function can read any global of its module.
_ALL_GLOBALS = frozenset({"globals", "eval", "exec"})
#: With these, it can import what a text names.
_ANY_IMPORT = frozenset({"__import__", "import_module"})
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


def described(label: str, *items: bytes | Ref, group: int = 0) -> Description:
    """A description whose label is a text."""
    return Description(label.encode(), list(items), group)


def _token(value: Any) -> bytes:
    token = scalar(value)
    assert token is not None
    return token


def is_users(cls: type) -> bool:
    """Whether a class is the user's: no library has it under its name."""
    return _named(cls) is None


# --- what a library has -----------------------------------------------------------------------------------------------


def _named(value: Any, module: str | None = None, name: str | None = None) -> Description | None:
    """What a library has under a name, by that name and the library's version; None if it is not there."""
    module = getattr(value, "__module__", None) if module is None else module
    name = getattr(value, "__qualname__", None) if name is None else name
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    version = origin.release_of(module)
    if version is None:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = _attribute(found, part)
    if found is not value:
        return None
    return described("of a library", _token(version), _token(module), _token(name))


def _attribute(holder: Any, name: str) -> Any:
    """An attribute as it lies there: nothing is computed for it."""
    if isinstance(holder, type):
        for cls in holder.__mro__:
            if name in cls.__dict__:
                found = cls.__dict__[name]
                return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
        return _MISSING
    return holder.__dict__.get(name, _MISSING) if isinstance(holder, types.ModuleType) else _MISSING


# --- functions --------------------------------------------------------------------------------------------------------


def _function(function: types.FunctionType, _ordered: bool) -> Description:
    inner = getattr(function, "_torchdynamo_orig_callable", None)
    if inner is not None:
        return described("compiled", Ref(inner, "._torchdynamo_orig_callable"))
    code = function.__code__
    items: list[bytes | Ref] = [_token(function.__name__), Ref(code, "code"), _token(_doc(function))]
    items += _named_items("default", _defaults(function))
    # From Python 3.14 on they are computed when they are asked for, which could run anything.
    items.append(_token(_annotations(function.__annotations__ if sys.version_info < (3, 14) else {})))
    if function.__globals__ is functools.__dict__ and "registry" in function.__dict__:
        # A singledispatch. Its closure remembers what was dispatched; what it depends on is what is registered.
        return Description(b"function", [*items, Ref(dict(function.__dict__["registry"]), ".registry", False)])
    version = origin.release_of(str(function.__globals__.get("__name__")))
    is_library = version is not None and origin.module_of(function.__globals__) is not None
    found = None if is_library else reads(code)
    items += _closure(function, found)
    items += _named_items("", ((f".{name}", value) for name, value in sorted(function.__dict__.items())))
    if found is None:
        items += [_token(version), _token(str(function.__globals__["__name__"])), _token(function.__qualname__)]
    else:
        items += _globals(function, found)
    return Description(b"function", items)


def _doc(function: types.FunctionType) -> str:
    return function.__doc__ if isinstance(function.__doc__, str) else ""


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    values = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    yield from zip(names[len(names) - len(values) :], values, strict=False)
    yield from sorted((function.__kwdefaults__ or {}).items())


def _annotations(annotations: object) -> str:
    pairs = annotations.items() if isinstance(annotations, dict) else ()
    return ", ".join(f"{name}: {_type_text(value)}" for name, value in pairs)


def _type_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, tuple):
        return ", ".join(map(_type_text, value))
    known = type(value).__module__ in ("typing", "types", "_types", "typing_extensions")
    return _ADDRESS.sub("0x", repr(value)) if known else type(value).__qualname__


def _named_items(kind: str, values: Iterable[tuple[str, Any]]) -> list[bytes | Ref]:
    items: list[bytes | Ref] = []
    for name, value in values:
        items += [_token(name), Ref(value, f"{kind} {name}" if kind else name)]
    return [_token(f"{len(items)} {kind}"), *items]


def _closure(function: types.FunctionType, found: Reads | None) -> list[bytes | Ref]:
    items: list[bytes | Ref] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        items.append(_token(name))
        try:
            value = cell.cell_contents
        except ValueError:
            items.append(raw(b"empty"))
            continue
        chains: Chains = {()} if found is None else found.free.get(name, {()})
        items += _read(value, f"closure {name}", chains)
    return items


def _globals(function: types.FunctionType, found: Reads) -> list[bytes | Ref]:
    """What a function of the user reads of its module, of builtins and of what it imports when it runs."""
    namespace = function.__globals__
    known = namespace.get("__builtins__", builtins)
    known = known.__dict__ if isinstance(known, types.ModuleType) else known
    items: list[bytes | Ref] = []
    for name, chains in sorted(found.globals.items()):
        items.append(_token(name))
        value = namespace.get(name, _MISSING)
        if value is _MISSING:
            value = known.get(name, _MISSING)
        if value is _MISSING:
            items.append(raw(b"missing"))
        else:
            items += _read(value, f"global {name}", chains)
    names = {name for name, chains in found.globals.items() for name in (name, *(part for c in chains for part in c))}
    if not names.isdisjoint(_ALL_GLOBALS):
        items += _contents(namespace, "global ")
    wanted = dict(found.imports)
    if not names.isdisjoint(_ANY_IMPORT):
        wanted |= {(text, 0): set() for text in found.texts if imports.is_name(text)}
    for (name, level), taken in sorted(wanted.items()):
        items += _import(name, level, taken, namespace)
    return items


def _import(name: str, level: int, taken: set[str], namespace: dict[str, Any]) -> list[bytes | Ref]:
    """What an import statement inside a function gives, without importing anything."""
    absolute = imports.absolute(name, level, namespace)
    module = sys.modules.get(absolute)
    items: list[bytes | Ref] = [_token(name), _token(level)]
    if module is None:
        items.append(raw(imports.digest_of_source(absolute)))
    else:
        chains: Chains = {(part,) for part in taken} if taken and "*" not in taken else {()}
        items += _read(module, f"import {absolute}", chains)
    for part in sorted(taken):
        full = f"{absolute}.{part}"
        if full not in sys.modules and _attribute(module, part) is _MISSING:
            items += [_token(full), raw(imports.digest_of_source(full))]
    return items


def _read(value: Any, edge: str, chains: Chains) -> list[bytes | Ref]:
    """What is read of a value: of modules only the attributes, of anything else all of it."""
    if not isinstance(value, types.ModuleType):
        return [Ref(value, edge)]
    items: list[bytes | Ref] = []
    for chain in sorted(chains):
        items.append(_token(".".join(chain)))
        items += _through(value, edge, chain)
    return items


def _through(module: types.ModuleType, edge: str, chain: tuple[str, ...]) -> list[bytes | Ref]:
    found: Any = module
    for name in chain:
        if type(found).__name__ == "_OpNamespace":
            refuse_operator(found, found.__name__.rpartition(".")[2])
        below = found.__dict__.get(name, _MISSING)
        if below is _MISSING and f"{found.__name__}.{name}" in sys.modules:
            below = sys.modules[f"{found.__name__}.{name}"]
        if below is _MISSING:
            # Made when it is asked for, or not at all.
            maker = found.__dict__.get("__getattr__", _MISSING)
            return [Ref(found, edge), raw(b"missing")] if maker is _MISSING else [*_of_module(found, maker, edge)]
        edge = f"{edge}.{name}"
        if not isinstance(below, types.ModuleType):
            return [*_of_module(found, below, edge)]
        found = below
    return [Ref(found, edge)]


def _of_module(module: types.ModuleType, value: Any, edge: str) -> Iterator[bytes | Ref]:
    """What a module has under a name: of a library, its constants, and what the user has put there."""
    version = origin.release_of(module.__name__)
    if version is None:
        yield Ref(value, edge)
        return
    yield _token(f"{version} {module.__name__}")
    home = value.__globals__.get("__name__") if isinstance(value, types.FunctionType) else None
    if isinstance(value, type):
        home = value.__module__
    if scalar(value) is not None or (home is not None and origin.release_of(str(home)) is None):
        yield Ref(value, edge)


# --- callables that are no plain functions ----------------------------------------------------------------------------


def _method(method: types.MethodType, _ordered: bool) -> Description:
    named = _bound_in_module(method)
    return named or described("method", Ref(method.__func__, ".__func__"), Ref(method.__self__, ".__self__"))


def _builtin(function: types.BuiltinFunctionType, _ordered: bool) -> Description:
    owner = function.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        module = str(function.__module__ or getattr(owner, "__name__", ""))
        return described("builtin", _token(origin.release_of(module)), _token(module), _token(function.__qualname__))
    if isinstance(owner, type) and owner.__module__ is not None:
        version = origin.release_of(owner.__module__)
        if version is not None:
            return described("builtin of a class", _token(version), _token(owner.__module__),
                             _token(owner.__qualname__), _token(function.__name__))  # fmt: skip
    named = _bound_in_module(function)
    return named or described("builtin method", _token(function.__name__), Ref(owner, ".__self__"))


def _bound_in_module(method: Any) -> Description | None:
    """A method that a library offers as a function of its own, such as ``random.random``: by that name."""
    module = getattr(type(method.__self__), "__module__", None)
    if not isinstance(module, str):
        return None
    names = {module, module.partition(".")[0], ".".join(module.split(".")[:2])}
    for name in sorted(names):
        offered = _attribute(sys.modules.get(name), method.__name__)
        version = origin.release_of(name)
        if version is not None and type(offered) is type(method) and offered == method:
            return described("of a library", _token(version), _token(name), _token(method.__name__))
    return None


def _descriptor(value: Any, _ordered: bool) -> Description:
    return described("descriptor", _token(value.__name__), Ref(value.__objclass__, ".__objclass__"))


def _method_wrapper(value: Any, _ordered: bool) -> Description:
    return described("method wrapper", _token(value.__name__), Ref(value.__self__, ".__self__"))


def _slot(value: Any, _ordered: bool) -> Description:
    return described("slot", _token(value.__name__))


def _wrapping(value: Any, _ordered: bool) -> Description:
    return described(type(value).__name__, Ref(value.__func__, ".__func__"))


def _property(value: property, _ordered: bool) -> Description:
    return described("property", Ref(value.fget, ".fget"), Ref(value.fset, ".fset"), Ref(value.fdel, ".fdel"))


def _partial(value: functools.partial[Any], _ordered: bool) -> Description:
    arguments = [Ref(argument, f".args[{i}]") for i, argument in enumerate(value.args)]
    keywords = _named_items("", ((f".keywords[{name!r}]", value) for name, value in sorted(value.keywords.items())))
    extra = _named_items("", ((f".{name}", value) for name, value in sorted(value.__dict__.items())))
    return described("partial", Ref(value.func, ".func"), _token(len(arguments)), *arguments, *keywords, *extra)


def _cached(value: Any, _ordered: bool) -> Description:
    return described("lru_cache", Ref(value.__wrapped__, ".__wrapped__"))


def _cached_property(value: functools.cached_property[Any], _ordered: bool) -> Description:
    return described("cached_property", Ref(value.func, ".func"))


def _code(value: types.CodeType, _ordered: bool) -> Description:
    return Description(b"code", [raw(code_digest(value))])


def _cell(value: types.CellType, _ordered: bool) -> Description:
    try:
        return described("cell", Ref(value.cell_contents, ".cell_contents"))
    except ValueError:
        return described("empty cell")


# --- classes and modules ----------------------------------------------------------------------------------------------


def describe_class(cls: type, _ordered: bool) -> Description:
    """A class of a library by name; one of the user by its bases and all that it has."""
    named = _named(cls)
    if named is not None:
        return named
    if cls.__flags__ & (1 << 9) == 0:  # not made by a class statement: a module in C has it, and no place names it
        version = origin.release_of(str(cls.__module__)) or ""
        return described("class in C", _token(version), _token(str(cls.__module__)), _token(cls.__qualname__))
    bases = (Ref(base, f".__bases__[{i}]") for i, base in enumerate(cls.__bases__))
    return described(f"class {cls.__name__}", *_contents(dict(cls.__dict__), "."), Ref(type(cls), ".__class__"), *bases)


def _module(module: types.ModuleType, _ordered: bool) -> Description:
    version = origin.release_of(module.__name__)
    if version is not None:
        return described("library", _token(version), _token(module.__name__))
    return Description(b"module", _contents(module.__dict__, "."))


def _contents(namespace: dict[str, Any], prefix: str) -> list[bytes | Ref]:
    items: list[bytes | Ref] = []
    for name, value in sorted(namespace.items(), key=lambda item: str(item[0])):
        if name in _ABOUT_TYPES:
            text = _annotations(value) if isinstance(value, dict) else _type_text(value)
            items += [_token(name), _token(text)]
        elif name not in _ABOUT_ITSELF:
            items += [_token(str(name)), Ref(value, f"{prefix}{name}")]
    return [_token(len(items)), *items]


#: The namespaces of torch's own operators.
_OPERATORS = frozenset({"aten", "prim", "prims"})


def refuse_operator(value: Any, namespace: str) -> None:
    """Raises Unhashable for an operator of torch that anybody may have registered, with any code behind it."""
    if namespace not in _OPERATORS:
        raise Unhashable(f"what is registered as an operator in torch.ops.{namespace} cannot be looked into", value)


def _operator(value: Any, _ordered: bool) -> Description:
    name = str(value)
    refuse_operator(value, name.partition(".")[0])
    return described("operator", _token(origin.release_of("torch")), _token(name))


def _refuse(value: Any, _ordered: bool) -> Description:
    raise Unhashable(f"a {type(value).__name__} is in the middle of something that cannot be named", value)


DESCRIBERS: dict[type, Callable[[Any, bool], Description]] = {
    types.FunctionType: _function,
    types.MethodType: _method,
    types.BuiltinFunctionType: _builtin,
    types.MethodDescriptorType: _descriptor,
    types.WrapperDescriptorType: _descriptor,
    types.ClassMethodDescriptorType: _descriptor,
    types.MethodWrapperType: _method_wrapper,
    types.GetSetDescriptorType: _slot,
    types.MemberDescriptorType: _slot,
    types.CodeType: _code,
    types.CellType: _cell,
    types.ModuleType: _module,
    types.GeneratorType: _refuse,
    types.CoroutineType: _refuse,
    types.AsyncGeneratorType: _refuse,
    types.FrameType: _refuse,
    types.TracebackType: _refuse,
    torch._ops.OpOverload: _operator,
    torch._ops.OpOverloadPacket: _operator,
    staticmethod: _wrapping,
    classmethod: _wrapping,
    property: _property,
    functools.partial: _partial,
    functools.cached_property: _cached_property,
    type(functools.lru_cache(lambda: None)): _cached,
}
