"""What changes the fingerprint of a function, and what does not: each case is two sources of one module."""

from __future__ import annotations

import functools
import itertools
import random
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tdgpu.cache.fingerprint import combine
from tdgpu.cache.hasher import FingerprintWarning, Hasher

NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """A random fingerprint would differ from any other, and a test that expects a difference would see nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FingerprintWarning)
        yield


def module(source: str, *, name: str = "users", file: str = "/somewhere/users.py", above: int = 0) -> types.ModuleType:
    """A module of the user, of a source whose first line is on another one."""
    made = types.ModuleType(name)
    made.__file__ = file
    code = compile("\n" * above + textwrap.dedent(source), file, "exec", dont_inherit=True)
    exec(code, made.__dict__)
    return made


def digest(source: str, **where: Any) -> str:
    return Hasher.hash(module(source, **where).f)


SAME = {
    "a comment": ("def f(x):\n    return x + 1", "def f(x):\n    # one more\n    return x + 1  # here"),
    "empty lines": ("def f(x):\n    y = x\n    return y", "\n\ndef f(x):\n\n    y = x\n\n    return y\n"),
    "line breaks": (
        "def f(x): return g(x, [1, 2])\ndef g(*a): return a",
        "def f(x):\n  return g(\n    x,\n    [\n  1,\n  2\n],\n  )\ndef g(*a):\n  return a",
    ),
    "quotes and numbers": ("def f(x): return 'a', 16, 1000.0", 'def f(x): return "a", 0x10, 1e3'),
    "where a helper stands": (
        "def g(x): return x\ndef f(x): return g(x)",
        "def f(x): return g(x)\n\n\ndef g(x): return x",
    ),
    "what it does not read": (
        "A = 1\ndef h(): return 1\ndef f(x): return x",
        "A = 2\ndef h(): return 2\ndef f(x): return x",
    ),
    "the order of assignments": ("A = 1\nB = 2\ndef f(x): return A + B", "B = 2\nA = 1\ndef f(x): return A + B"),
    "an if over lines": (
        "def f(x):\n  if x > 1 and x < 3:\n    return 1\n  return 2",
        "def f(x):\n  if (\n    x > 1\n    and x < 3\n  ):\n    return 1\n  return 2",
    ),
    "a set's order": ("S = {'a', 'b', 'c'}\ndef f(x): return x in S", "S = {'c', 'b', 'a'}\ndef f(x): return x in S"),
    "where a class stands": (
        "class C:\n  def m(self): return 1\ndef f(x): return C().m()",
        "# more\n\nclass C:\n\n  def m(self):\n     return 1\ndef f(x): return C().m()",
    ),
    "what it reads of a module of its own": (
        "import types\nm = types.ModuleType('m')\nm.a = 1\nm.b = 1\ndef f(x): return m.a",
        "import types\nm = types.ModuleType('m')\nm.a = 1\nm.b = 2\ndef f(x): return m.a",
    ),
    "a nested class": (
        "def f(x):\n  class C:\n    def m(self): return x\n  return C",
        "\n\ndef f(x):\n  # it\n  class C:\n\n    def m(self): return x\n  return C",
    ),
}

DIFFERENT = {
    "a constant": ("def f(x): return x + 1", "def f(x): return x + 2"),
    "1 and True": ("def f(x): return 1", "def f(x): return True"),
    "1 and 1.0": ("def f(x): return 1", "def f(x): return 1.0"),
    "0.0 and -0.0": ("def f(x): return 0.0", "def f(x): return -0.0"),
    "a text and bytes": ("def f(x): return 'a'", "def f(x): return b'a'"),
    "a constant in a tuple": ("def f(x): return (1, (2, 3))", "def f(x): return (1, (2, 4))"),
    "a constant in a frozenset": ("def f(x): return x in {1, 2}", "def f(x): return x in {1, 3}"),
    "an operator": ("def f(x): return x + 1", "def f(x): return x - 1"),
    "a comparison": ("def f(x): return x < 1", "def f(x): return x <= 1"),
    "a called method": ("def f(x): return x.sin()", "def f(x): return x.cos()"),
    "the order of arguments": ("def f(x, y): return x - y", "def f(y, x): return x - y"),
    "a default": ("def f(x, a=1): return a", "def f(x, a=2): return a"),
    "a mutable default": ("def f(x, a=[1]): return a", "def f(x, a=[2]): return a"),
    "a keyword default": ("def f(x, *, a=1): return a", "def f(x, *, a=2): return a"),
    "which argument has the default": ("def f(x, *, a=1, b): return a", "def f(x, *, a, b=1): return a"),
    "a global": ("A = 1\ndef f(x): return A", "A = 2\ndef f(x): return A"),
    "a global in a list": ("A = [1, [2]]\ndef f(x): return A", "A = [1, [3]]\ndef f(x): return A"),
    "a global that was missing": ("def f(x): return A", "A = 1\ndef f(x): return A"),
    "a builtin that is shadowed": ("def f(x): return len(x)", "def len(x): return 1\ndef f(x): return len(x)"),
    "a global of a nested function": ("A = 1\ndef f(x): return (lambda: A)()", "A = 2\ndef f(x): return (lambda: A)()"),
    "a global of a comprehension": ("A = 1\ndef f(x): return [A for _ in x]", "A = 2\ndef f(x): return [A for _ in x]"),
    "a global of a class in it": (
        "A = 1\ndef f(x):\n  class C:\n    a = A\n  return C",
        "A = 2\ndef f(x):\n  class C:\n    a = A\n  return C",
    ),
    "the order of a dict": (
        "D = {'a': 1, 'b': 2}\ndef f(x): return list(D)",
        "D = {'b': 2, 'a': 1}\ndef f(x): return list(D)",
    ),
    "the order of a dict inside": (
        "D = [{'a': 1, 'b': 2}]\ndef f(x): return D",
        "D = [{'b': 2, 'a': 1}]\ndef f(x): return D",
    ),
    "a helper": ("def g(x): return x\ndef f(x): return g(x)", "def g(x): return -x\ndef f(x): return g(x)"),
    "a helper's helper": (
        "def h(x): return x\ndef g(x): return h(x)\ndef f(x): return g(x)",
        "def h(x): return -x\ndef g(x): return h(x)\ndef f(x): return g(x)",
    ),
    "a helper that calls back": (
        "def g(x): return f(x) + 1\ndef f(x): return g(x)",
        "def g(x): return f(x) + 2\ndef f(x): return g(x)",
    ),
    "a closure": (
        "def make(n):\n  def g(x): return n\n  return g\nf = make(1)",
        "def make(n):\n  def g(x): return n\n  return g\nf = make(2)",
    ),
    "a closure of a closure": (
        "def make(n):\n  h = lambda: n\n  def g(x): return h()\n  return g\nf = make(1)",
        "def make(n):\n  h = lambda: n\n  def g(x): return h()\n  return g\nf = make(2)",
    ),
    "an empty closure": (
        "def make():\n  def g(x): return n\n  n = 1\n  return g\nf = make()",
        "def make():\n  def g(x): return n\n  if f: n = 1\n  return g\nf = None\nf = make()",
    ),
    "two lambdas on one line": ("f, g = lambda x: x + 1, lambda x: x + 2", "g, f = lambda x: x + 1, lambda x: x + 2"),
    "which of two lambdas": ("f = (lambda x: 1, lambda x: 2)[0]", "f = (lambda x: 1, lambda x: 2)[1]"),
    "a generator and a function": ("def f(x):\n  return x", "def f(x):\n  return x\n  yield"),
    "a star": ("def f(x, *a): return a", "def f(x, **a): return a"),
    "keyword-only": ("def f(x, a): return a", "def f(x, *, a): return a"),
    "positional-only": ("def f(x, a): return a", "def f(x, a, /): return a"),
    "an except clause": (
        "def f(x):\n  try: return x\n  except KeyError: return 1",
        "def f(x):\n  try: return x\n  except ValueError: return 1",
    ),
    "what is tried": (
        "def f(x):\n  try:\n    a = x()\n    b = x()\n  except KeyError: return 1\n  return a, b",
        "def f(x):\n  a = x()\n  try:\n    b = x()\n  except KeyError: return 1\n  return a, b",
    ),
    "a loop's end": (
        "def f(x):\n  for i in x:\n    if i: break\n  else: return 1",
        "def f(x):\n  for i in x:\n    if i: continue\n  else: return 1",
    ),
    "an f-string": ("def f(x): return f'{x:.2f}'", "def f(x): return f'{x:.3f}'"),
    "a decorator": (
        "def d(g): return lambda x: g(x)\n@d\ndef f(x): return x",
        "def d(g): return lambda x: -g(x)\n@d\ndef f(x): return x",
    ),
    "what is decorated": (
        "def d(g): return lambda x: g(x)\n@d\ndef f(x): return x",
        "def d(g): return lambda x: g(x)\n@d\ndef f(x): return -x",
    ),
    "what wraps hides": (
        "import functools\ndef d(g):\n  @functools.wraps(g)\n  def w(x): return 1\n  return w\n@d\ndef f(x): return x",
        "import functools\ndef d(g):\n  @functools.wraps(g)\n  def w(x): return 2\n  return w\n@d\ndef f(x): return x",
    ),
    "what a wrapper of a library has": (
        "import functools, torch\ndef d(g):\n  @functools.wraps(torch.nn.functional.relu)\n"
        "  def w(x): return g(x)\n  return w\n"
        "f = d(lambda x: 1)",
        "import functools, torch\ndef d(g):\n  @functools.wraps(torch.nn.functional.relu)\n"
        "  def w(x): return g(x)\n  return w\n"
        "f = d(lambda x: 2)",
    ),
    "under no_grad": (
        "import torch\n@torch.no_grad()\ndef f(x): return 1",
        "import torch\n@torch.no_grad()\ndef f(x): return 2",
    ),
    "behind a cache": (
        "import functools\n@functools.lru_cache\ndef f(x): return 1",
        "import functools\n@functools.lru_cache\ndef f(x): return 2",
    ),
    "an attribute of the function": ("def f(x): return f.n\nf.n = 1", "def f(x): return f.n\nf.n = 2"),
    "a method": (
        "class C:\n  def m(self): return 1\ndef f(x): return C().m()",
        "class C:\n  def m(self): return 2\ndef f(x): return C().m()",
    ),
    "a method of a base": (
        "class B:\n  def m(self): return 1\nclass C(B): pass\ndef f(x): return C().m()",
        "class B:\n  def m(self): return 2\nclass C(B): pass\ndef f(x): return C().m()",
    ),
    "the order of bases": (
        "class A:\n  a = 1\nclass B:\n  b = 1\nclass C(A, B): pass\ndef f(x): return C()",
        "class A:\n  a = 1\nclass B:\n  b = 1\nclass C(B, A): pass\ndef f(x): return C()",
    ),
    "a base of a library": (
        "import torch\nclass C(torch.nn.ReLU): pass\ndef f(x): return C()(x)",
        "import torch\nclass C(torch.nn.GELU): pass\ndef f(x): return C()(x)",
    ),
    "a class attribute": ("class C:\n  a = 1\ndef f(x): return C.a", "class C:\n  a = 2\ndef f(x): return C.a"),
    "a property": (
        "class C:\n  @property\n  def p(self): return 1\ndef f(x): return C().p",
        "class C:\n  @property\n  def p(self): return 2\ndef f(x): return C().p",
    ),
    "a static and a class method": (
        "class C:\n  @staticmethod\n  def m(a): return a\ndef f(x): return C.m",
        "class C:\n  @classmethod\n  def m(a): return a\ndef f(x): return C.m",
    ),
    "a metaclass": (
        "class M(type):\n  a = 1\nclass C(metaclass=M): pass\ndef f(x): return C.a",
        "class M(type):\n  a = 2\nclass C(metaclass=M): pass\ndef f(x): return C.a",
    ),
    "an instance": (
        "class C: pass\nc = C()\nc.a = 1\ndef f(x): return c.a",
        "class C: pass\nc = C()\nc.a = 2\ndef f(x): return c.a",
    ),
    "an instance with slots": (
        "class C:\n  __slots__ = ('a',)\nc = C()\nc.a = 1\ndef f(x): return c.a",
        "class C:\n  __slots__ = ('a',)\nc = C()\nc.a = 2\ndef f(x): return c.a",
    ),
    "an object that is called": (
        "class C:\n  def __call__(self, x): return 1\nf = C()",
        "class C:\n  def __call__(self, x): return 2\nf = C()",
    ),
    "the self of a bound method": (
        "class C:\n  def __init__(self, a): self.a = a\n  def m(self, x): return self.a\nf = C(1).m",
        "class C:\n  def __init__(self, a): self.a = a\n  def m(self, x): return self.a\nf = C(2).m",
    ),
    "a partial's argument": (
        "import functools\ndef g(a, x): return a\nf = functools.partial(g, 1)",
        "import functools\ndef g(a, x): return a\nf = functools.partial(g, 2)",
    ),
    "a partial's keyword": (
        "import functools\ndef g(x, a): return a\nf = functools.partial(g, a=1)",
        "import functools\ndef g(x, a): return a\nf = functools.partial(g, a=2)",
    ),
    "what is dispatched": (
        "import functools\n@functools.singledispatch\ndef f(x): return 1\n@f.register(int)\ndef _(x): return 2",
        "import functools\n@functools.singledispatch\ndef f(x): return 1\n@f.register(int)\ndef _(x): return 3",
    ),
    "a dataclass": (
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n  a: int = 1\ndef f(x): return C()",
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n  a: int = 2\ndef f(x): return C()",
    ),
    "an enum": (
        "import enum\nclass E(enum.Enum):\n  A = 1\n  B = 2\ndef f(x): return E.A.value",
        "import enum\nclass E(enum.Enum):\n  A = 3\n  B = 2\ndef f(x): return E.A.value",
    ),
    "a named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'a b')\ndef f(x): return P(1, 2)",
        "from collections import namedtuple\nP = namedtuple('P', 'b a')\ndef f(x): return P(1, 2)",
    ),
    "a module of the user": (
        "import types\nm = types.ModuleType('m')\nm.a = 1\ndef f(x): return m.a",
        "import types\nm = types.ModuleType('m')\nm.a = 2\ndef f(x): return m.a",
    ),
    "a module that is handed on": (
        "import types\nm = types.ModuleType('m')\nm.a = 1\ndef f(x): return getattr(m, 'a')",
        "import types\nm = types.ModuleType('m')\nm.a = 2\ndef f(x): return getattr(m, 'a')",
    ),
    "a module in a closure": (
        "import types\ndef make(a):\n  m = types.ModuleType('m')\n  m.a = a\n  def g(x): return m.a\n"
        "  return g\nf = make(1)",
        "import types\ndef make(a):\n  m = types.ModuleType('m')\n  m.a = a\n  def g(x): return m.a\n"
        "  return g\nf = make(2)",
    ),
    "what globals() gives": ("A = 1\ndef f(x): return globals()['A']", "A = 2\ndef f(x): return globals()['A']"),
    "what eval reads": ("A = 1\ndef f(x): return eval('A')", "A = 2\ndef f(x): return eval('A')"),
    "a function of a library": (
        "import torch\ndef f(x): return torch.sin(x)",
        "import torch\ndef f(x): return torch.cos(x)",
    ),
    "a function of a library, imported": (
        "from torch import sin as g\ndef f(x): return g(x)",
        "from torch import cos as g\ndef f(x): return g(x)",
    ),
    "what is imported inside": (
        "def f(x):\n  from math import pi\n  return pi",
        "def f(x):\n  from math import e\n  return e",
    ),
    "a tensor": (
        "import torch\nT = torch.tensor([1.0])\ndef f(x): return T",
        "import torch\nT = torch.tensor([-1.0])\ndef f(x): return T",
    ),
    "a pattern": (
        "import re\nR = re.compile('a')\ndef f(x): return R",
        "import re\nR = re.compile('a', re.I)\ndef f(x): return R",
    ),
    "an annotation": ("def f(x: int): return x", "def f(x: float): return x"),
    "a docstring": ("def f(x):\n  'one'\n  return x", "def f(x):\n  'two'\n  return x"),
    "its name": ("def f(x): return x", "def g(x): return x\nf = g"),
}


@pytest.mark.parametrize("case", SAME)
def test_does_not_change_it(case):
    one, other = SAME[case]
    assert digest(one) == digest(other)


@pytest.mark.parametrize("case", DIFFERENT)
def test_changes_it(case):
    one, other = DIFFERENT[case]
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


RECURSIVE = """
class Tree:
    children = []
    def walk(self): return [walk(child) for child in self.children] + [Tree]
def walk(tree): return even(3) and tree.walk()
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
def f(x): return walk(x), TABLE
TABLE = {"walk": walk, "f": f, "tree": Tree()}
"""


def test_it_does_not_depend_on_the_file_the_lines_and_the_module():
    places: list[dict[str, Any]] = [
        {},
        {"name": "__main__"},
        {"name": "a.b.c", "file": "/elsewhere/c.py"},
        {"above": 100},
    ]
    for source in [RECURSIVE, *(source for case in DIFFERENT.values() for source in case)]:
        assert len({digest(source, **place) for place in places}) == 1


def test_functions_that_call_each_other_are_told_by_all_of_them():
    assert digest(RECURSIVE) == digest(RECURSIVE)
    for change in ("n - 1", "[Tree]", '"f": f'):
        assert digest(
            RECURSIVE.replace(change, change.replace("1", "2").replace("[", "2 * [").replace('"f"', '"g"'))
        ) != (digest(RECURSIVE))


def test_a_hundred_functions_that_all_call_each_other_take_no_time():
    names = [f"g{i}" for i in range(100)]
    calls = ", ".join(f"{name}(x)" for name in names)
    source = "\n".join(f"def {name}(x): return {i}, {calls}" for i, name in enumerate(names)) + "\nf = g0"
    assert digest(source) == digest(source)
    assert digest(source) != digest(source.replace("return 99,", "return 98,"))


def test_it_does_not_depend_on_whether_the_function_has_run():
    made = module("A = [1]\ndef f(x): return sum(a + x for a in A)")
    before = Hasher.hash(made.f)
    for i in range(3000):
        made.f(i)  # the interpreter specialises its instructions meanwhile
    assert Hasher.hash(made.f) == before


def test_it_does_not_depend_on_a_tracer():
    made = module("def f(x): return x + 1")
    before = Hasher.hash(made.f)
    traced = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        made.f(1)
        assert Hasher.hash(made.f) == before
    finally:
        sys.settrace(traced)


def test_the_order_of_keyword_arguments_of_a_partial_does_not_matter():
    def function(x: int, a: int = 0, b: int = 0) -> int:
        return x + a + b

    assert Hasher.hash(functools.partial(function, a=1, b=2)) == Hasher.hash(functools.partial(function, b=2, a=1))


def test_a_dispatching_function_does_not_change_when_it_is_called():
    made = module(
        "import functools\n@functools.singledispatch\ndef f(x): return 1\n@f.register(int)\ndef _(x): return 2"
    )
    before = Hasher.hash(made.f)
    made.f(1), made.f("text")
    assert Hasher.hash(made.f) == before


def test_the_global_generators_that_a_function_draws_from_have_no_part_in_it():
    drawing: list[Callable[[], Any]] = [
        lambda: random.random(),
        lambda: np.random.rand(),
        lambda: torch.rand(2),
        random.random,
        np.random.rand,
    ]
    for function in drawing:
        before = Hasher.hash(function)
        function()
        assert Hasher.hash(function) == before


def test_hashing_draws_from_no_generator():
    module_with_weights = torch.nn.Linear(2, 2)
    states = random.getstate(), torch.get_rng_state(), repr(np.random.get_state())
    combine("0" * 16, "map", {"function": lambda x: module_with_weights(x), "generator": torch.Generator()})
    with pytest.warns(FingerprintWarning):
        Hasher.hash(x for x in [1])
    now = random.getstate(), torch.get_rng_state(), repr(np.random.get_state())
    assert now[0] == states[0] and torch.equal(now[1], states[1]) and now[2] == states[2]


# --- imports of the user's --------------------------------------------------------------------------------------------

IMPORTING = {
    "a module": "def f(x):\n  import helpers\n  return helpers.g(x)",
    "a name": "def f(x):\n  from helpers import g\n  return g(x)",
    "all of a package": "def f(x):\n  import pack.inner\n  return pack.inner.g(x)",
    "of a package": "def f(x):\n  from pack import inner\n  return inner.g(x)",
    "by import_module": "import importlib\ndef f(x): return importlib.import_module('helpers').g(x)",
    "by __import__": "def f(x): return __import__('helpers').g(x)",
}
HELPERS = "import below\ndef g(x): return below.h(x)\n"


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes the user's modules, in one of which a constant is 1, or another text."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "pack").mkdir()

    def write(constant: str) -> None:
        for name in ("helpers", "below", "pack", "pack.inner"):
            sys.modules.pop(name, None)
        (tmp_path / "helpers.py").write_text(HELPERS)
        (tmp_path / "below.py").write_text(f"def h(x): return {constant}\n")
        (tmp_path / "pack" / "__init__.py").write_text("")
        (tmp_path / "pack" / "inner.py").write_text(f"from helpers import g\nA = {constant}\n")

    write("1")
    return write


@pytest.mark.parametrize("case", IMPORTING)
def test_what_a_function_imports_when_it_runs_counts_and_is_not_imported(case, helpers):
    before = digest(IMPORTING[case])
    helpers("1  # a comment")
    assert digest(IMPORTING[case]) == before
    helpers("2")
    assert digest(IMPORTING[case]) != before
    assert not {"helpers", "below", "pack", "pack.inner"} & sys.modules.keys()


@pytest.mark.parametrize("case", IMPORTING)
def test_what_has_been_imported_counts_as_it_is_in_memory(case, helpers):
    made = module(IMPORTING[case])
    made.f(1)
    before = Hasher.hash(made.f)
    assert Hasher.hash(made.f) == before
    sys.modules["below"].h = lambda x: 2  # type: ignore[attr-defined]
    assert Hasher.hash(made.f) != before


def test_what_the_user_puts_into_a_library_counts(monkeypatch):
    source = "import torch\ndef f(x): return torch.nn.functional.relu(x)"
    before = digest(source)
    monkeypatch.setattr(torch.nn.functional, "relu", module("def f(x): return x").f)
    one = digest(source)
    monkeypatch.setattr(torch.nn.functional, "relu", module("def f(x): return -x").f)
    assert len({before, one, digest(source)}) == 3


def test_a_setting_of_a_library_that_the_function_reads_counts(monkeypatch):
    library = sys.modules["torch.utils.data.dataloader"]
    source = "import torch.utils.data.dataloader as d\ndef f(x): return d.default_timeout"
    monkeypatch.setattr(library, "default_timeout", 1, raising=False)
    before = digest(source)
    monkeypatch.setattr(library, "default_timeout", 2, raising=False)
    assert digest(source) != before


def test_the_version_of_a_library_counts(monkeypatch):
    from tdgpu.cache import origin

    def versions() -> list[str]:
        return [
            digest("import torch\nf = torch.nn.functional.relu"),
            digest("import torch\ndef f(x): return torch.sin(x)"),
        ]

    before = versions()
    real = origin.release_of
    monkeypatch.setattr(origin, "release_of", lambda name: real(name) and f"{real(name)}.post1")
    assert all(new != old for new, old in zip(versions(), before, strict=True))


def test_torch_and_its_defaults_count_although_the_function_names_none_of_them(monkeypatch):
    def result() -> str:
        return combine("0" * 16, "map", {"function": test_the_version_of_a_library_counts.__name__}).digest

    before = result()
    assert result() == before
    torch.set_default_dtype(torch.float64)
    try:
        assert result() != before
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(torch, "__version__", "99.0.0+cpu")
    one = result()
    monkeypatch.setattr(torch, "__version__", "99.0.0+cu999")
    assert before != one == result()
