"""What a code object does, whatever line and file it stands on; and which names outside of it it reads.

The bytes of two compilations of one source can differ: file and line numbers are in the code object, constants and
names are numbered, and a statement that begins a line can leave a NOP behind. So code is told by its instructions, in
order, with the names, constants and instructions that they refer to. A change of formatting can still show where the
compiler lets a line break decide how jumps are laid out: then what was cached is computed once more.
"""

from __future__ import annotations

import bisect
import dis
import functools
import sys
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from tdgpu.cache.encode import digest, scalar

__all__ = ["Reads", "code_digest", "reads"]

#: Instructions that do nothing by themselves.
_NOTHING = frozenset({"NOP", "CACHE", "EXTENDED_ARG", "RESUME", "PRECALL", "NOT_TAKEN"})
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs, *getattr(dis, "hasjump", ())})
_UNCONDITIONAL = frozenset({"JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP"})
_NAMED = frozenset({*dis.hasname, *dis.haslocal, *dis.hasfree})
# Arguments, and whether it is a generator or a coroutine: not how deep it is nested or which __future__ is in force.
_FLAGS = 0x3AF
# What the body of a class says of where it stands (the last two from Python 3.13 on).
_OF_THE_SOURCE = frozenset({"__module__", "__qualname__", "__firstlineno__", "__static_attributes__"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_FREE = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_THROUGH = 64  # jumps that lead to jumps


@functools.lru_cache(maxsize=4096)
def code_digest(code: CodeType) -> bytes:
    """The digest of a code object, and of those inside it.

    It depends on the minor version of Python, whose instructions these are; not on file, lines, module and class.

    >>> one, other = (compile(text, name, "eval") for text, name in (("a + 1", "x.py"), ("(a +\\n  1)", "y.py")))
    >>> code_digest(one) == code_digest(other), code_digest(one) == code_digest(compile("a + 2", "x.py", "eval"))
    (True, False)
    """
    found = [
        bytes(sys.version_info[:2]),
        code.co_name.encode(),
        *(
            str(number).encode()
            for number in (
                code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & _FLAGS
            )
        ),
        _constant(code.co_varnames),
        _constant(code.co_freevars),
        _constant(code.co_cellvars),
        _constant(next((text for text in code.co_consts[:1] if isinstance(text, str)), None)),  # its docstring
    ]  # fmt: skip
    instructions = _instructions(code)
    places = _Places(instructions)
    for instruction in instructions:
        found.append(instruction.opname.encode())
        found.append(_argument(instruction, places))
    for start, end, target, depth, lasti in _exceptions(code):
        handler = (places.at(start), places.at(end), places.at(target), depth, lasti)
        found.append(repr(handler).encode())
    return digest(*found)


@functools.lru_cache(maxsize=64)  # both of the above come for them
def _instructions(code: CodeType) -> list[dis.Instruction]:
    found = [instruction for instruction in dis.get_instructions(code) if instruction.opname not in _NOTHING]
    dropped = {
        number
        for i, instruction in enumerate(found)
        if instruction.opname == "STORE_NAME"
        and instruction.argval in _OF_THE_SOURCE
        and found[i - 1].opname in ("LOAD_CONST", "LOAD_NAME")
        for number in (i - 1, i)
    }
    return [instruction for i, instruction in enumerate(found) if i not in dropped]


class _Places:
    """Which instruction an offset means."""

    def __init__(self, instructions: list[dis.Instruction]) -> None:
        self._instructions = instructions
        self._offsets = [instruction.offset for instruction in instructions]

    def at(self, offset: int) -> int:
        return bisect.bisect_left(self._offsets, offset)

    def target(self, offset: int) -> int:
        place = self.at(offset)
        for _ in range(_THROUGH):
            if place >= len(self._instructions) or self._instructions[place].opname not in _UNCONDITIONAL:
                break
            place = self.at(self._instructions[place].argval)
        return place


def _argument(instruction: dis.Instruction, places: _Places) -> bytes:
    if instruction.opcode in _JUMPS:
        return str(places.target(instruction.argval)).encode()
    if instruction.opcode in dis.hasconst:
        return _constant(instruction.argval)
    if instruction.opcode in _NAMED:
        return f"{instruction.argval} {_flag(instruction)}".encode()
    return str(instruction.arg).encode()


# Bits of the number of a name that say what is done with it, as whether it is called.
_FLAG_BITS = {
    "LOAD_GLOBAL": 1 if sys.version_info >= (3, 11) else 0,
    "LOAD_ATTR": 1 if sys.version_info >= (3, 12) else 0,
    "LOAD_SUPER_ATTR": 3,
}


def _flag(instruction: dis.Instruction) -> int:
    return (instruction.arg or 0) & _FLAG_BITS.get(instruction.opname, 0)


def _constant(value: Any) -> bytes:
    token = scalar(value)
    if token is not None:
        return token
    if isinstance(value, CodeType):
        return b"code" + code_digest(value)
    if isinstance(value, tuple):
        return b"tuple" + digest(*map(_constant, value))
    if isinstance(value, frozenset):
        return b"frozenset" + digest(*sorted(map(_constant, value)))
    if isinstance(value, slice):
        return b"slice" + digest(*map(_constant, (value.start, value.stop, value.step)))
    return b"other" + digest(type(value).__qualname__.encode(), repr(value).encode())


def _exceptions(code: CodeType) -> list[tuple[int, int, int, int, bool]]:
    entries: Any = getattr(dis.Bytecode(code), "exception_entries", ())  # Python 3.10 jumps to its handlers
    return [(entry.start, entry.end, entry.target, entry.depth, entry.lasti) for entry in entries or ()]


# --- names ------------------------------------------------------------------------------------------------------------


@dataclass
class Reads:
    """The names outside of itself that code reads.

    Attributes:
        globals, free: of each global, and each variable of an enclosing function: the chains of attributes that are
            read of it. The empty chain means the object itself.
        imports: module and level of each import statement, and the names taken from it; none: the module itself.
        texts: the constants that are texts.
    """

    globals: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)
    free: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)
    imports: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    texts: set[str] = field(default_factory=set)


@functools.lru_cache(maxsize=4096)
def reads(code: CodeType) -> Reads:
    """What a code object, and those inside it, read.

    >>> reads(compile("lambda x: torch.nn.functional.relu(x) + len(x)", "", "eval")).globals
    {'torch': {('nn', 'functional', 'relu')}, 'len': {()}}
    """
    found = Reads()
    _collect(code, found)
    return found


def _collect(code: CodeType, found: Reads) -> None:
    instructions = _instructions(code)
    for i, instruction in enumerate(instructions):
        name = instruction.opname
        if name in _GLOBALS:
            found.globals.setdefault(instruction.argval, set()).add(_chain(instructions, i + 1))
        elif name in _FREE:
            found.free.setdefault(instruction.argval, set()).add(_chain(instructions, i + 1))
        elif name == "IMPORT_NAME":
            names, level = instructions[i - 1].argval, instructions[i - 2].argval
            taken = found.imports.setdefault((instruction.argval, level if isinstance(level, int) else 0), set())
            taken.update(names if isinstance(names, tuple) else ())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _collect(constant, found)
        elif isinstance(constant, str):
            found.texts.add(constant)


def _chain(instructions: list[dis.Instruction], i: int) -> tuple[str, ...]:
    names = []
    while i < len(instructions) and instructions[i].opname in _ATTRIBUTES:
        names.append(instructions[i].argval)
        i += 1
    return tuple(names)
