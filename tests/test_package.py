"""What pip installs, and that the pages about it are true."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tdgpu

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = ["pip install '.[demo]' && python -m tdgpu demo", "pip install '.[test]' && python -m pytest -n 2"]


@pytest.fixture(scope="module")
def installed() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("tdgpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.fail("tdgpu is not installed. Run: pip install '.[test]'")


def test_the_version_stands_in_one_place(installed):
    assert installed.version == tdgpu.__version__


def test_every_module_is_installed_with_its_types_and_the_native_core(installed):
    files = {str(file) for file in installed.files or []}
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "tdgpu").rglob("*.py")}
    assert modules | {"tdgpu/py.typed", "tdgpu/_core/libtdgpu_core.so"} <= files
    assert not {file for file in files if file.startswith(("tests", "benchmarks", "csrc", "include", "lib"))}


def test_one_wheel_serves_every_python(installed):
    tags = re.findall(r"^Tag: (.*)$", installed.read_text("WHEEL") or "", re.MULTILINE)
    assert tags
    assert all(tag.startswith(("py3-none-linux_", "py3-none-manylinux")) for tag in tags)


def test_the_native_core_needs_no_torch_no_cuda_and_no_python(installed):
    library = installed.locate_file("tdgpu/_core/libtdgpu_core.so")
    loads = f"import ctypes; ctypes.CDLL({str(library)!r}); print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-S", "-c", loads], capture_output=True, text=True, check=True).stdout
    assert "libtdgpu_core.so" in maps
    assert not re.search(r"libtorch|libc10|libcuda|libcudart|numpy", maps)


def test_an_import_touches_no_accelerator_and_nothing_that_only_commands_need():
    code = (
        "import sys, tdgpu, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "extra = {'rich', 'typer', 'cupy', 'sklearn', 'tdgpu.cli'} & set(sys.modules)\n"
        "assert not extra, extra\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libcuda.so' not in maps and 'libtdgpu_core' not in maps\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_the_readme_shows_the_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("pip install")] == COMMANDS


def blocks() -> list[ParameterSet]:
    """The Python examples of all pages, with the line they begin at."""
    found = []
    for page in PAGES:
        for match in re.finditer(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            line = page.read_text()[: match.start()].count("\n") + 1
            name = f"{page.relative_to(ROOT)}:{line}"
            found.append(pytest.param(page, line, match[1], id=name))
    return found


@pytest.mark.parametrize(("page", "line", "code"), blocks())
def test_the_examples_run(page, line, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile("\n" * line + code, str(page), "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []
