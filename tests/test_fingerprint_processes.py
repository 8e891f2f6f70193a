"""Fingerprints in processes of their own: another hash seed, working directory, place of the script."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
from __future__ import annotations
import collections, dataclasses, enum, functools, json, logging, re, sys
import numpy as np
import torch
from tensordict import TensorClass, TensorDict, tensorclass
import helpers
from helpers import scale

log = logging.getLogger(__name__)
RATE = 0.5
WORDS = {"a", "b", "c", "d", "e"}
TABLE = {"one": 1, "two": [2, {"three": WORDS}]}

class Colour(enum.Enum):
    RED = 1
    BLUE = 2

class Flags(enum.Flag):
    A = 1
    B = 2

@dataclasses.dataclass(frozen=True)
class Settings:
    name: str = "x"
    words: frozenset = frozenset("abcdef")
    more: dict = dataclasses.field(default_factory=dict)

@tensorclass
class Old:
    a: torch.Tensor
    def twice(self): return self.a * 2

class Frame(TensorClass):
    image: torch.Tensor
    label: str = "cat"
    def halved(self): return self.image / 2

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.rand(3, generator=generator))
        self.register_forward_hook(lambda *_: None)
    def forward(self, x): return super().forward(x) if x is None else x * self.weight

class Processor:
    def __init__(self):
        self.net, self.table, self.pattern = Net(), TABLE, re.compile("a+")
    def run(self, row):
        log.info("here")
        return helpers.deep(self.net(row["a"])) * RATE, Settings(), Colour.RED, Flags.A | Flags.B
    __call__ = run

def closure(n):
    words = set(WORDS)
    def inner(row): return row["a"] * n if row in words else outer(row)
    return inner

def outer(row): return scale(row), inner_loop(row)
def inner_loop(row): return outer(row)

@functools.wraps(outer)
def wrapped(row): return [outer(word) for word in WORDS if row > {1, 2, 3}]

OBJECTS = {
    "function": outer, "closure": closure(3), "method": Processor().run, "object": Processor(),
    "lambda": lambda x: x + RATE,
    "wrapped": wrapped, "words": WORDS, "table": TABLE, "settings": Settings(),
    "enum": Colour.BLUE, "flag": Flags.A,
    "classes": [Old, Frame, Net, Processor, Settings, Colour], "net": Net(),
    "partial": functools.partial(outer, row=WORDS),
    "arrays": [np.arange(3), torch.arange(3), TensorDict(a=torch.arange(3), batch_size=[3])],
    "frame": Frame(image=torch.zeros(3), batch_size=[3]), "old": Old(a=torch.zeros(3), batch_size=[3]),
    "no_grad": torch.no_grad()(outer), "generator": torch.Generator().manual_seed(3),
    "dispatch": functools.singledispatch(outer),
}
"""
HELPERS = """
import math
FACTOR = {"a": 2.0}
def deep(x): return below(x) * math.pi
def below(x): return x * FACTOR["a"]
def scale(x): return deep(x)
"""
MAIN = """
def digests(made):
    import warnings
    from tdgpu.cache.fingerprint import combine
    from tdgpu.cache.hasher import FingerprintWarning, Hasher
    warnings.simplefilter("error", FingerprintWarning)
    found = {name: Hasher.hash(value) for name, value in made["OBJECTS"].items()}
    found["combined"] = combine("0" * 16, "map", {"function": made["outer"], "more": made["TABLE"]}).digest
    return found

if __name__ == "__main__":
    results = {"main": digests(globals())}
    # Variants of the script, each with modules of its own, imported one after the other.
    import importlib
    for directory in sys.argv[1:]:
        for name in ("helpers", "script"):
            sys.modules.pop(name, None)
        sys.path.insert(0, directory)
        importlib.invalidate_caches()
        results[directory.rpartition("/")[2]] = digests(vars(importlib.import_module("script")))
        sys.path.remove(directory)
    print(json.dumps(results))
"""


def write(directory: Path, script: str = SCRIPT, helpers: str = HELPERS) -> Path:
    directory.mkdir(parents=True)
    (directory / "helpers.py").write_text(helpers)
    (directory / "script.py").write_text(script + MAIN)
    return directory


def run(directory: Path, *variants: Path, seed: str, cwd: Path) -> dict[str, dict[str, str]]:
    """The fingerprints of what a script makes in a process of its own, and of what it makes when it is imported."""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(directory / "script.py"), *map(str, variants)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


FORMATTED = SCRIPT.replace("\ndef ", "\n\n# a comment\n\ndef ").replace("RATE = 0.5", "RATE = (\n    0.5  # half\n)")
CHANGES: dict[str, tuple[str, str, set[str]]] = {
    "a global": ("RATE = 0.5", "RATE = 0.25", {"method", "object", "lambda"}),
    "a method": ("return self.image / 2", "return self.image / 3", {"classes", "frame"}),
    "a weight": ("manual_seed(0)", "manual_seed(1)", {"method", "object", "net"}),
    "a closure": ("closure(3)", "closure(4)", {"closure"}),
    "a set": (
        'WORDS = {"a",',
        'WORDS = {"z",',
        {"closure", "wrapped", "words", "table", "partial", "object", "method"},
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Of two processes: the first one's, and all that the second one has."""
    root = tmp_path_factory.mktemp("scripts")
    assert all(SCRIPT.count(before) == 1 for before, _, _ in CHANGES.values()) and HELPERS.count("2.0") == 1
    first = run(write(root / "first"), seed="0", cwd=root)["main"]
    variants = [
        write(root / "the same"),
        write(
            root / "formatted", FORMATTED, re.sub(r"\): (return .*)", r"):\n\n    # what comes back\n    \1", HELPERS)
        ),
        write(root / "a helper", helpers=HELPERS.replace("2.0", "3.0")),
        *(write(root / name, SCRIPT.replace(before, after)) for name, (before, after, _) in CHANGES.items()),
    ]
    second = run(write(root / "elsewhere" / "deep"), *variants, seed="12345", cwd=Path("/"))
    return {"first": first, **second}


def test_another_process_hash_seed_directory_and_place_of_the_script_give_the_same(found):
    assert found["main"] == found["first"]


def test_an_imported_module_gives_what_the_script_itself_gives(found):
    assert found["the same"] == found["first"]


def test_comments_and_formatting_give_the_same(found):
    assert found["formatted"] == found["first"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_what_it_has_a_part_in_and_nothing_else(change, found):
    wanted = CHANGES[change][2]
    changed = {name for name, digest in found["first"].items() if found[change][name] != digest}
    assert wanted <= changed <= wanted | {"classes", "combined"}


def test_an_edited_helper_changes_all_that_call_it_however_far_away(found):
    changed = {name for name, digest in found["first"].items() if found["a helper"][name] != digest}
    assert {
        "function",
        "closure",
        "method",
        "object",
        "wrapped",
        "partial",
        "no_grad",
        "dispatch",
        "combined",
    } <= changed
    assert not {"lambda", "words", "table", "settings", "net", "frame", "generator"} & changed


CONTENT = """
import json, sys, threading
import torch, tdgpu, saves
from tdgpu.cache.fingerprint import fingerprint
assert not torch.cuda.is_initialized() and threading.active_count() == 1
print(json.dumps([fingerprint(tdgpu.MemmapDataset(path, allow_pickle=True)) for path in sys.argv[1:]]))
"""


def test_a_save_has_the_same_fingerprint_in_another_process_and_place_and_as_an_archive(tmp_path):
    from saves import SAVES

    import tdgpu
    from tdgpu.cache.fingerprint import fingerprint

    names = ["nested", "tensorclass", "non_tensor_stack", "lazy_stack", "tensorclass_pickle"]
    paths, here = [], []
    for name in names:
        one = tmp_path / "here" / name
        SAVES[name](one)
        other = tmp_path / "there" / f"{name} moved"
        shutil.copytree(one, other)
        paths += [one, other, tdgpu.pack_memmap(one, tmp_path / f"{name}.tdz", compression="deflate")]
        here += [fingerprint(tdgpu.MemmapDataset(one, allow_pickle=True))] * 3
    environment: dict[str, Any] = {
        **os.environ,
        "PYTHONHASHSEED": "9",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "TDGPU_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", CONTENT, *map(str, paths)], capture_output=True, text=True, env=environment, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == here
    assert len(set(here)) == len(names)
