"""Archives as other tools write them: what loads is what tensordict loads from the directory that was packed."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import small
from archives.makers import MAKERS, contents
from archives.payloads import METHODS, STORED
from archives.raw import ALL_32, Entry, write, zip64_field
from archives.tools import NAMES
from compare import assert_same
from fixtures.make_archives import PYTHON, file_name
from saves import BUILDERS, LEGACY, NESTED
from tensordict import TensorDict
from torch._subclasses import FakeTensorMode

import tdgpu
from tdgpu.errors import NotSupported
from tdgpu.load import load_memmap

# Saves, and a level of each to load by itself.
LEVELS: dict[str, Any] = {
    "sized": "n",
    "keys": ("child of dots", "..", "."),
    "tensorclass_pickle": ("f", "at"),
    "nested_tensor": "n",
    "lazy_stack": "1/n",
    "dtypes": "",
    "legacy_keys": "n n",
}
# Ways to load, each tried with some of the makers for each save.
ON_CPU: list[dict[str, Any]] = [
    {}, {"device": "cpu"}, {"num_threads": 2}, {"mode": "r"}, {"verify": True}, {"num_threads": 5, "verify": True},
]  # fmt: skip
ON_DEVICE: list[dict[str, Any]] = [
    {}, {"non_blocking": True}, {"num_threads": 2}, {"verify": True}, {"verify": True, "non_blocking": True},
]  # fmt: skip
FIXTURES = Path(__file__).parent / "fixtures" / "archives"


def sized() -> TensorDict:
    """Leaves of many blocks and of many chunks, quick to compress; and some that are small."""
    noise = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    few = {f"w{i}": torch.full((i, 3), i) for i in range(9)}
    return TensorDict({**few, "big": torch.arange(60_000, dtype=torch.int32), "n": {"noise": noise, **few}}, [])


BUILD: dict[str, Callable[[], Any]] = {**BUILDERS, "sized": sized}


class Packed:
    """Every save in every form, each made when it is first asked for."""

    def __init__(self, top: Path) -> None:
        self.top = top

    def directory(self, save: str) -> Path:
        path = self.top / save
        if not path.exists():
            BUILD[save]().memmap(path, robust_key=save not in LEGACY)
        return path

    def archive(self, save: str, maker: str) -> Path:
        path = self.top / f"{save}, {maker}.tdz"
        if not path.exists():
            MAKERS[maker](self.directory(save), path)
        return path


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return Packed(tmp_path_factory.mktemp("packed"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch has opinions of complex32 and of nested tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        yield


def how(save: str) -> dict[str, Any]:
    """The arguments that a save needs."""
    return {"robust_key": save not in LEGACY, "allow_pickle": True}


def some_of(ways: list[dict[str, Any]], maker: str, save: str) -> list[dict[str, Any]]:
    """One way, another one for each maker and save; and to return early."""
    return [ways[(list(MAKERS).index(maker) + list(LEVELS).index(save)) % len(ways)], {"return_early": True}]


def loaded(archive: Path, save: str, way: dict[str, Any], **arguments: Any) -> Any:
    """What a way to load gives, once it is there."""
    result = load_memmap(archive, **how(save), **way, **arguments)
    return result.result() if isinstance(result, tdgpu.LoadFuture) else result


def pairs(packed: Packed, maker: str) -> Iterator[tuple[str, Path, Path]]:
    for save in LEVELS:
        yield save, packed.archive(save, maker), packed.directory(save)


def outcome(load: Callable[[], Any]) -> Any:
    """What a load gives: a collection, or that torch cannot do it."""
    try:
        return load()
    except NotSupported as error:
        return type(error)


def assert_alike(ours: Any, theirs: Any) -> None:
    if isinstance(ours, type):
        assert ours is theirs
    else:
        assert_same(ours, theirs)


@pytest.mark.parametrize("save", LEVELS)
@pytest.mark.parametrize("maker", MAKERS)
def test_on_the_cpu(packed: Packed, maker: str, save: str) -> None:
    archive, directory = packed.archive(save, maker), packed.directory(save)
    before = archive.read_bytes()
    wanted = TensorDict.load_memmap(directory, **how(save))
    for way in some_of(ON_CPU, maker, save):
        got = loaded(archive, save, way)
        assert_same(got, wanted)
        assert not got.is_locked
    level = LEVELS[save]
    assert_same(
        load_memmap(archive, **how(save), subpath=level, num_threads=2),
        TensorDict.load_memmap(directory, **how(save), subpath=level),
    )
    assert archive.read_bytes() == before
    assert not [name for name in os.listdir(packed.top) if name.startswith(".")]  # nothing was left beside it


@pytest.mark.parametrize("maker", MAKERS)
def test_values_outlive_the_archive(packed: Packed, tmp_path: Path, maker: str) -> None:
    """A mapping, or memory: neither needs the file's name."""
    archive = tmp_path / "x.tdz"
    archive.write_bytes(packed.archive("sized", maker).read_bytes())
    got = load_memmap(archive)
    archive.unlink()
    assert_same(got, TensorDict.load_memmap(packed.directory("sized")))


@pytest.mark.parametrize("maker", MAKERS)
def test_into_what_is_there(packed: Packed, maker: str) -> None:
    for save, archive, directory in pairs(packed, maker):
        out, same = BUILD[save](), BUILD[save]()
        got = load_memmap(archive, out=out, **how(save))
        wanted = load_memmap(directory, out=same, **how(save))
        assert (got is out) == (wanted is same)
        assert_same(got, wanted)


def leaf_payloads(archive: Path) -> Iterator[tuple[int, int]]:
    """First byte and size of the payloads of all leaves, but not of the sizes of nested ones."""
    with zipfile.ZipFile(archive) as file, open(archive, "rb") as raw:
        for info in file.infolist():
            if info.filename.endswith(".memmap") and not info.filename.endswith(".shape.memmap"):
                raw.seek(info.header_offset + 26)
                name, extra = raw.read(2), raw.read(2)
                start = info.header_offset + 30 + int.from_bytes(name, "little") + int.from_bytes(extra, "little")
                yield start, info.compress_size


@pytest.mark.parametrize("maker", MAKERS)
def test_structure_only(packed: Packed, tmp_path: Path, maker: str) -> None:
    """Whatever lies where the leaves were, neither meta nor fake tensors see it: nothing of it is inflated."""
    for i, (save, archive, directory) in enumerate(pairs(packed, maker)):
        data = bytearray(archive.read_bytes())
        for start, size in leaf_payloads(archive):
            data[start : start + size] = b"\xff" * size
        damaged = tmp_path / "damaged.tdz"
        damaged.write_bytes(data)
        ways: list[dict[str, Any]] = [{}, {"subpath": LEVELS[save]}, {"num_threads": 2}]
        way = {**how(save), **ways[(list(MAKERS).index(maker) + i) % len(ways)]}
        ours = outcome(partial(load_memmap, damaged, device="meta", **way))
        assert_alike(ours, outcome(partial(load_memmap, directory, device="meta", **way)))
        if save not in NESTED:
            assert_same(ours, TensorDict.load_memmap(directory, device="meta", **way))
        with FakeTensorMode():
            ours = outcome(partial(load_memmap, damaged, **way))
            assert_alike(ours, outcome(partial(load_memmap, directory, **way)))


@pytest.mark.parametrize("maker", MAKERS)
def test_on_a_device(device: torch.device, packed: Packed, maker: str) -> None:
    for save, archive, directory in pairs(packed, maker):
        wanted = TensorDict.load_memmap(directory, **how(save))
        for way in some_of(ON_DEVICE, maker, save):
            got = loaded(archive, save, way, device=device)
            assert_same(got, wanted)
            assert got.device is None or got.device == device
        level = LEVELS[save]
        assert_same(
            load_memmap(archive, device=device, subpath=level, **how(save)),
            TensorDict.load_memmap(directory, subpath=level, **how(save)),
        )


@pytest.mark.parametrize("options", [{"path": "host"}, {"path": "generic"}, {"chunk_bytes": 4096, "ring_bytes": 65536}])
def test_on_other_roads_to_a_device(device: torch.device, packed: Packed, options: dict[str, Any]) -> None:
    for maker in MAKERS:
        with tdgpu.options(**options):
            got = load_memmap(packed.archive("sized", maker), device=device)
            assert_same(got, TensorDict.load_memmap(packed.directory("sized")))


@pytest.mark.parametrize("maker", ["tensordict stored", "zipfile deflate", "raw unaligned", "blocks of 64 KiB"])
def test_leaves_of_megabytes(device: torch.device, packed: Packed, maker: str) -> None:
    archive, wanted = packed.archive("mixed", maker), TensorDict.load_memmap(packed.directory("mixed"))
    for way in (*ON_CPU, *({"device": device, **way} for way in ON_DEVICE)):
        assert_same(load_memmap(archive, **way), wanted)


@pytest.mark.parametrize("maker", MAKERS)
def test_into_what_is_on_a_device(device: torch.device, packed: Packed, maker: str) -> None:
    for save in ("sized", "keys", "dtypes"):
        out = BUILD[save]().to(device)
        got = load_memmap(packed.archive(save, maker), out=out, **how(save))
        assert got is out
        assert_same(got, TensorDict.load_memmap(packed.directory(save), **how(save)))


# --- metadata ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_metadata_may_be_compressed(device: torch.device, tmp_path: Path, method: str) -> None:
    path = tmp_path / "x.tdz"
    path.write_bytes(write(small.entries(METHODS[method], metadata=METHODS[method])).data)
    for on in (None, device):
        got = load_memmap(path, device=on).cpu()
        assert got["a"].numpy().tobytes() == small.A
        assert got["n", "c"].numpy().tobytes() == small.C
    assert load_memmap(path, device="meta")["n", "c"].shape == (200,)


def holey(path: Path, nbytes: int, end: bytes) -> None:
    """An archive with one leaf ``a`` of so many bytes: a hole in the file, except for its end."""
    sizes = {"csize": ALL_32, "usize": ALL_32, "crc": 0, "zip64": zip64_field(nbytes, nbytes)}
    entries = [
        Entry("meta.json", small.level_meta(batch_size=[nbytes // 4], a=small.leaf_meta([nbytes // 4]))),
        Entry("a.memmap", b"|", both=sizes),
    ]
    # Written with one byte for the leaf; then the hole is put in.
    archive = write(entries, end64={})
    moved = nbytes - 1
    start = archive.span("meta.json", "central", "signature").start + moved
    at = archive.span("", "end64", "signature").start + moved
    archive = write(entries, end64={"central_offset": start}, locator64={"offset": at})
    payload = archive.span("a.memmap", "payload", "payload").start
    with open(path, "wb") as file:
        file.write(archive.data[:payload])
        file.seek(start - len(end))
        file.write(end + archive.data[payload + 1 :])


@pytest.mark.parametrize("gib", [5, 256])
def test_the_structure_of_a_leaf_larger_than_memory(tmp_path: Path, gib: int) -> None:
    path = tmp_path / "huge.tdz"
    holey(path, gib << 30, b"")
    assert load_memmap(path, device="meta")["a"].shape == (gib << 28,)
    with FakeTensorMode():
        assert load_memmap(path)["a"].shape == (gib << 28,)


def test_a_leaf_larger_than_32_bits_count(device: torch.device, tmp_path: Path) -> None:
    path = tmp_path / "large.tdz"
    holey(path, 5 << 30, torch.tensor([1.5, 2.5]).numpy().tobytes())
    got = load_memmap(path)["a"]
    assert got[-2:].tolist() == [1.5, 2.5]
    assert got[12345] == 0
    for on in (None, device):
        assert load_memmap(path, device=on, rows=slice(-3, None))["a"].tolist() == [0, 1.5, 2.5]


# --- what is pinned ---------------------------------------------------------------------------------------------------


def test_every_tool_has_an_archive_in_the_fixtures() -> None:
    assert {file_name(name) for name in (*NAMES, *PYTHON)} == {path.name for path in FIXTURES.glob("*.tdz")}


@pytest.mark.parametrize("name", [*NAMES, *PYTHON])
def test_fixtures(device: torch.device, tmp_path: Path, name: str) -> None:
    """The archives in `tests/fixtures/archives`, whether the tool that wrote one is here or not."""
    archive = FIXTURES / file_name(name)
    small.write_directory(tmp_path / "save")
    wanted = TensorDict.load_memmap(tmp_path / "save")
    for way in ({}, {"num_threads": 2}, {"device": device}, {"device": device, "non_blocking": True}):
        assert_same(load_memmap(archive, **way), wanted)
    for level in ("n", "d d/deep", ("d d",)):
        assert_same(load_memmap(archive, subpath=level), TensorDict.load_memmap(tmp_path / "save", subpath=level))
    meta = load_memmap(archive, device="meta")
    assert_same(meta, TensorDict.load_memmap(tmp_path / "save", device="meta"))


def test_what_tools_are_asked_to_pack_is_packed(packed: Packed) -> None:
    """Of the makers themselves: each packs every file, and Python's zipfile reads the same bytes, where it can."""
    wanted = dict(contents(packed.directory("sized")))
    for maker in MAKERS:
        with zipfile.ZipFile(packed.archive("sized", maker)) as file:
            files = [info for info in file.infolist() if not info.is_dir()]
            names = {info.filename for info in files if not info.filename.endswith(".tdgpu-index")}
            assert names == set(wanted), maker
            for info in files:
                if info.filename in wanted and info.compress_type in (STORED, 8, 12, 14):
                    assert file.read(info) == wanted[info.filename], (maker, info.filename)
