"""Hostile archives: the right error, in bounded time and memory, that names the archive and the entry; nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import hostile_index, hostile_payload, hostile_structure, small
from archives.hostile import Case
from archives.payloads import DEFLATE, METHODS, STORED
from archives.raw import write
from forked import in_process
from tensordict import TensorDict
from torch._subclasses import FakeTensorMode

import tdgpu
from tdgpu.errors import InvalidArgument, MissingLeafError, NotSupported, SaveNotFound, TdgpuError
from tdgpu.load import load_memmap

CASES = hostile_structure.CASES
assert CASES is hostile_payload.CASES
assert CASES is hostile_index.CASES

SECONDS = 5.0
MiB = 1 << 20
LARGEST_GROWTH = 256 * MiB
HERE = Path(__file__).parent


class Files:
    """The hostile archives, each made when it is first asked for."""

    def __init__(self, top: Path) -> None:
        self.top = top

    def __call__(self, name: str) -> Path:
        path = self.top / f"{list(CASES).index(name):03}.tdz"
        if not path.exists():
            path.write_bytes(CASES[name].make())
        return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("hostile"))


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """What happens inside takes little time of all cores, and memory, and leaves no file open."""
    open_files = len(os.listdir("/proc/self/fd"))
    with contextlib.suppress(OSError):  # where it may not, a peak counts if it is higher than any before
        Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmHWM")
    started = time.process_time()
    yield
    took = time.process_time() - started
    assert took < SECONDS
    assert memory("VmHWM") - before < LARGEST_GROWTH
    assert len(os.listdir("/proc/self/fd")) <= open_files


def memory(field: str) -> int:
    """A size of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field + ":")))


def is_right(loaded: Any) -> bool:
    """Whether it is the small save, with all of its bytes."""
    return bool(
        set(loaded.keys(True, True)) == {"a", ("n", "c")}
        and loaded["a"].cpu().numpy().tobytes() == small.A
        and loaded["n", "c"].cpu().numpy().tobytes() == small.C
    )


def judge(case: Case, path: Path, load: Callable[[], Any], *, finds_out: bool, is_dataless: bool = False) -> None:
    """One load of one case: it is refused as it must be, or right."""
    before = os.stat(path)
    beside = sorted(os.listdir(path.parent))
    caught: TdgpuError | None = None
    with bounded():
        try:
            loaded = load()
        except TdgpuError as error:
            caught = error.with_traceback(None)
    after = os.stat(path)
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    assert sorted(os.listdir(path.parent)) == beside
    if finds_out and case.cause:
        assert caught is not None, "it loads"
    if caught is None:
        if not is_dataless and (finds_out or not case.cause):
            assert is_right(loaded)
        return
    if finds_out and case.cause:
        assert isinstance(caught, case.cause), repr(caught)
    assert str(path) in str(caught)
    assert (case.entry if finds_out else "") in str(caught)
    assert str(pickle.loads(pickle.dumps(caught))) == str(caught)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CASES)
def test_on_the_cpu(files: Files, name: str) -> None:
    case, path = CASES[name], files(name)
    for way in ({}, {"num_threads": 2}, {"verify": True}):
        judge(case, path, lambda: load_memmap(path, device="cpu", **way), finds_out=True)  # noqa: B023


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CASES)
def test_structure_only(files: Files, name: str) -> None:
    case, path = CASES[name], files(name)
    finds_out = case.stage == "central"
    judge(case, path, lambda: load_memmap(path, device="meta"), finds_out=finds_out, is_dataless=True)
    with FakeTensorMode():
        judge(case, path, lambda: load_memmap(path), finds_out=finds_out, is_dataless=True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CASES)
def test_on_a_device(device: torch.device, files: Files, name: str) -> None:
    case, path = CASES[name], files(name)
    judge(case, path, lambda: load_memmap(path, device=device), finds_out=True)

    def early() -> Any:
        future = load_memmap(path, device=device, return_early=True)
        future.synchronize()
        return future.result()

    judge(case, path, early, finds_out=True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", [name for name in CASES if name != "metadata: a gigabyte"]
)  # that much disk it may take
def test_unpacking(files: Files, tmp_path: Path, name: str) -> None:
    """Nothing is written if anything is wrong, and nothing outside ever."""
    case, path = CASES[name], files(name)
    top = tmp_path / "a" / "b" / "c"
    top.mkdir(parents=True)
    try:
        unpack(case, path, top)
        folders = (tmp_path, top.parent.parent, top.parent)
        assert [sorted(os.listdir(folder)) for folder in folders] == [["a"], ["b"], ["c"]]
    finally:
        # What a failure may leave is deeper than Python's own cleaning up can go.
        subprocess.run(["rm", "-rf", str(tmp_path / "a")], check=True)


def unpack(case: Case, path: Path, top: Path) -> None:
    """Unpacks one case below ``top``, and looks at what is there."""
    caught: Exception | None = None
    with bounded():
        try:
            tdgpu.unpack_memmap(path, top / "unpacked")
        except (TdgpuError, OSError) as error:  # of a name that is too long for the file system, as the system says it
            caught = error.with_traceback(None)
    if case.cause and not case.unpacks:
        assert isinstance(caught, TdgpuError), "it was unpacked"
        assert str(path) in str(caught)
    if caught is None:
        assert (top / "unpacked" / "meta.json").exists()
    assert os.listdir(top) == ([] if caught else ["unpacked"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.cause and not case.unpacks])
def test_verifying(files: Files, name: str) -> None:
    """What a load may not see, this does."""
    path = files(name)
    caught: TdgpuError | None = None
    report = None
    with bounded():
        try:
            report = tdgpu.verify_memmap(path)
        except TdgpuError as error:
            caught = error.with_traceback(None)
    if report is None:
        assert str(path) in str(caught)
    else:
        assert not report.is_sound
        assert report.problems


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.stage == "bytes" and case.cause])
def test_an_out_stays_as_it_was(files: Files, name: str) -> None:
    out = TensorDict({"mine": torch.ones(3), "a": torch.zeros(2)})
    before = {key: value.clone() for key, value in out.items()}
    with pytest.raises(TdgpuError):
        load_memmap(files(name), out=out)
    assert list(out.keys()) == list(before)
    assert all(torch.equal(out[key], value) for key, value in before.items())


LIMITED = """
import json, resource, sys, warnings
from pathlib import Path
import torch, tdgpu
from tdgpu.errors import TdgpuError

paths = json.loads(Path(sys.argv[1]).read_text())
tdgpu.load_memmap(paths[0])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit = int(status["VmSize"].split()[0]) * 1024 + (768 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
found = []
for path in paths[1:]:
    for arguments in ({}, {"num_threads": 2}, {"device": "meta"}):
        try:
            tdgpu.load_memmap(path, **arguments)
            found.append("loads")
        except TdgpuError as error:
            found.append(type(error).__name__)
        except BaseException as error:
            found.append(f"{path} {arguments}: {error!r}")
print(json.dumps(found))
"""


@pytest.mark.timeout(300)
def test_all_of_them_with_little_memory(files: Files, tmp_path: Path) -> None:
    """With an address space of 768 MiB more than the process has, nothing but the errors of tdgpu is raised."""
    sound = tmp_path / "sound.tdz"
    sound.write_bytes(write(small.entries(DEFLATE)).data)
    (tmp_path / "paths").write_text(json.dumps([str(sound), *(str(files(name)) for name in CASES)]))
    found = json.loads(in_process(LIMITED, tmp_path / "paths", timeout=240))
    assert [line for line in found if " " in line] == []


# --- indexes ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", hostile_index.PASSED_OVER)
def test_an_index_that_does_not_fit_is_passed_over(device: torch.device, tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.tdz"
    path.write_bytes(hostile_index.PASSED_OVER[name]())
    for way in ({}, {"num_threads": 2}, {"verify": True}, {"device": device}):
        with bounded():
            assert is_right(load_memmap(path, **way))
    assert load_memmap(path, device="meta")["a"].shape == (10_000,)


# --- truncated --------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", METHODS)
def test_truncated_anywhere(tmp_path: Path, method: str) -> None:
    """At every boundary in the file, one byte to each side of it, and at random: it is no archive any more."""
    archive = write(small.entries(METHODS[method]), end64={})
    rng = random.Random(0)
    edges = {span.start + step for span in archive.spans for step in (-1, 0, 1)} - {-1}
    cuts = sorted(edges | {rng.randrange(len(archive.data)) for _ in range(100)})
    path = tmp_path / "x.tdz"
    for cut in cuts:
        path.write_bytes(archive.data[:cut])
        for on in (None, "meta"):
            with pytest.raises(InvalidArgument) as caught:
                load_memmap(path, device=on)
            assert str(path) in str(caught.value)
        with pytest.raises(InvalidArgument):
            tdgpu.unpack_memmap(path, tmp_path / "unpacked")
    assert os.listdir(tmp_path) == ["x.tdz"]


@pytest.mark.timeout(60)
def test_the_beginning_is_missing(tmp_path: Path) -> None:
    """The end of an archive is there, but not all of what it is the end of."""
    archive = write(small.entries(STORED), end64={})
    path = tmp_path / "x.tdz"
    for cut in sorted({span.start for span in archive.spans} | {span.start + 1 for span in archive.spans}):
        path.write_bytes(archive.data[cut:])
        for on in (None, "meta"):
            if cut:
                with pytest.raises(TdgpuError) as caught:
                    load_memmap(path, device=on)
                assert str(path) in str(caught.value)


# --- what is no file --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(20)
def test_what_is_no_file(device: torch.device, tmp_path: Path) -> None:
    fifo, folder = tmp_path / "fifo.tdz", tmp_path / "folder.tdz"
    os.mkfifo(fifo)
    folder.mkdir()
    empty, text = tmp_path / "empty.tdz", tmp_path / "text.tdz"
    empty.write_bytes(b"")
    text.write_text("no archive\n" * 9999)
    loop, broken = tmp_path / "loop.tdz", tmp_path / "broken.tdz"
    loop.symlink_to(loop)
    broken.symlink_to(tmp_path / "nowhere")
    below = text / "x.tdz"
    refused = (InvalidArgument, SaveNotFound, MissingLeafError)
    for path in (fifo, folder, empty, text, loop, broken, below, Path("/dev/zero"), Path("/dev/null")):
        for load in (load_memmap, lambda path: load_memmap(path, "meta"), lambda path: load_memmap(path, device)):
            with bounded(), pytest.raises(TdgpuError) as caught:
                load(path)
            assert path == loop or isinstance(caught.value, refused), repr(caught.value)
            assert str(path) in str(caught.value)
        with bounded(), pytest.raises((TdgpuError, OSError)):
            tdgpu.unpack_memmap(path, tmp_path / "unpacked")
    assert stat.S_ISFIFO(os.stat(fifo).st_mode)
    assert not (tmp_path / "unpacked").exists()


@pytest.mark.timeout(20)
def test_what_cannot_be_read(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        path = Path("/proc/self/mem")  # root may read all files; this one says no by itself
    else:
        path = tmp_path / "x.tdz"
        path.write_bytes(write(small.entries()).data)
        path.chmod(0)
    with pytest.raises((TdgpuError, PermissionError)):
        load_memmap(path)


def test_a_method_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.tdz"
    path.write_bytes(write(small.entries(a={"method": 98, "payload": b"x" * 100})).data)
    with pytest.raises(NotSupported, match=r"method 98(.|\n)*a\.memmap"):
        load_memmap(path)
