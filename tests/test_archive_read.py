"""Trees of archives: every kind of save, read and assembled as tensordict does, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from archives.makers import MAKERS, blocked
from archives.payloads import DEFLATE
from archives.raw import Entry, write
from compare import assert_same
from saves import BUILDERS, LEGACY, PICKLED, SAVES, UPSTREAM_CANNOT_LOAD, Thing
from tensordict import MemoryMappedTensor, TensorDict, pack_memmap
from torch._subclasses import FakeTensorMode

from tdgpu import options
from tdgpu.errors import (
    ArchiveError,
    ArchiveNotSupported,
    ChecksumError,
    FormatError,
    InvalidArgument,
    LeafSizeError,
    LoadError,
    MissingLeafError,
    PickleRefused,
    SaveNotFound,
    SubpathError,
    TdgpuError,
)
from tdgpu.layout import objects, reader
from tdgpu.layout.archive.inflate import inflate
from tdgpu.layout.assemble import assemble
from tdgpu.layout.mapped import Mapper, check_mode, nested_view
from tdgpu.layout.placeholders import Placeholders
from tdgpu.layout.rows import narrow
from tdgpu.layout.save import Save
from tdgpu.layout.tree import Leaf

# tensordict looks for sizes that were not written, since they have no elements.
UPSTREAM_CANNOT_LOAD_ARCHIVED = UPSTREAM_CANNOT_LOAD | {"nested_of_scalars"}
METHODS = ("stored", "deflate", "bzip2", "lzma")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every save, as a directory."""
    top = tmp_path_factory.mktemp("saves")
    for name, save in SAVES.items():
        save(top / name)
    return {name: top / name for name in SAVES}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _inflated(leaf: Leaf) -> torch.Tensor:
    """A compressed leaf, inflated by Python."""
    extent = leaf.extent
    assert extent is not None
    assert extent.packed is not None
    with open(extent.file, "rb") as file:
        file.seek(extent.offset)
        data = inflate(extent.packed.method, file.read(extent.nbytes), extent.packed.nbytes)
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8)[leaf.first : leaf.first + leaf.nbytes]
    if leaf.nested_sizes is not None:
        return nested_view(values.clone().view(leaf.dtype), leaf.nested_sizes)
    return values.clone().view(leaf.dtype).view(leaf.shape)


def load(
    path: Path,
    *,
    subpath: Any = None,
    rows: slice | None = None,
    device: torch.device | None = None,
    mode: str | None = None,
    robust_key: bool | None = True,
    allow_pickle: bool | None = True,
) -> Any:
    """Reads, maps and assembles; and that nothing stays open."""
    before = descriptors()
    structure_only = device is not None and device.type == "meta"
    save = reader.read(path, subpath=subpath, robust_key=robust_key, check=not structure_only)
    try:
        check_mode(save, mode, structure_only=structure_only)
        objects.resolve(save, allow_pickle)
        save = save if rows is None else narrow(save, rows)
        mapper = Placeholders(device, save.prefix) if structure_only else Mapper(save, mode)

        def provide(leaf: Leaf) -> torch.Tensor:
            compressed = leaf.extent is not None and leaf.extent.is_compressed and not structure_only
            return _inflated(leaf) if compressed else mapper(leaf)

        # The loader of a third party may not know allow_pickle.
        foreign = None if save.foreign() else allow_pickle
        return assemble(
            save, provide, device=device, allow_pickle=foreign, robust_key=robust_key, mode=mode, keep_prefix=True
        )
    finally:
        save.close()
        assert descriptors() == before


def packed(directory: Path, path: Path, compression: str = "stored") -> Path:
    return pack_memmap(directory, path / f"{compression}.tdz", compression=compression)


# --- every kind of save -----------------------------------------------------------------------------------------------


def _policy(name: str) -> bool | None:
    return True if name in PICKLED else None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", sorted(set(SAVES) - UPSTREAM_CANNOT_LOAD_ARCHIVED))
def test_archives_equal_tensordicts(saved: dict[str, Path], tmp_path: Path, name: str, method: str) -> None:
    archive = packed(saved[name], tmp_path, method)
    how: dict[str, Any] = {"robust_key": name not in LEGACY, "allow_pickle": _policy(name)}
    assert_same(load(archive, **how), TensorDict.load_memmap(archive, **how), devices=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", sorted(UPSTREAM_CANNOT_LOAD_ARCHIVED))
def test_what_tensordict_cannot_load(saved: dict[str, Path], tmp_path: Path, name: str, method: str) -> None:
    assert_same(load(packed(saved[name], tmp_path, method)), BUILDERS[name]())


# Of the tools, those that are here: the others' archives are kept as fixtures.
TOOLS = [maker for maker in ("zip -0", "zip -6", "zip to a pipe", "7z", "zipfile with directories") if maker in MAKERS]


@pytest.mark.parametrize("maker", TOOLS)
@pytest.mark.parametrize("name", sorted(set(SAVES) - UPSTREAM_CANNOT_LOAD_ARCHIVED))
def test_other_tools_archives(saved: dict[str, Path], tmp_path: Path, name: str, maker: str) -> None:
    archive = tmp_path / "a.zip"
    MAKERS[maker](saved[name], archive)
    how: dict[str, Any] = {"robust_key": name not in LEGACY, "allow_pickle": _policy(name)}
    ours = load(archive, **how)
    assert_same(ours, load(saved[name], **how))
    if name != "keys":  # of which tensordict drops those that zip did not mark as UTF-8
        assert_same(ours, TensorDict.load_memmap(archive, **how), devices=True)


@pytest.mark.parametrize("name", ["nested", "tensorclass", "lazy_stack", "non_tensor", "sub_tensordict", "keys"])
@pytest.mark.parametrize("method", ["stored", "deflate"])
def test_meta_loads(saved: dict[str, Path], tmp_path: Path, name: str, method: str) -> None:
    archive = packed(saved[name], tmp_path, method)
    ours = load(archive, device=torch.device("meta"), allow_pickle=None)
    assert_same(ours, TensorDict.load_memmap(archive, device="meta"), devices=True)


def test_an_archive_behind_a_link_and_a_relative_path(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(saved["nested"], tmp_path)
    monkeypatch.chdir(tmp_path)
    os.symlink("stored.tdz", "link")
    assert_same(load(Path("link")), load(saved["nested"]))
    assert reader.read("stored.tdz").prefix == "stored.tdz"


# --- the tree ---------------------------------------------------------------------------------------------------------


def test_leaves_say_where_their_bytes_are(saved: dict[str, Path], tmp_path: Path) -> None:
    for method, number in (("stored", 0), ("deflate", 8)):
        archive = packed(saved["nested"], tmp_path, method)
        save = reader.read(archive)
        save.close()
        assert save.is_archive
        assert save.root.path == f"{archive}::"
        assert save.root.children["inner"].path == f"{archive}::/inner"
        with zipfile.ZipFile(archive) as file:
            infos = {info.filename: info for info in file.infolist()}
        for leaf in save.leaves():
            extent = leaf.extent
            assert extent is not None
            assert extent.packed is not None
            info = infos["/".join(leaf.key) + ".memmap"]
            assert (extent.file, extent.inode) == (str(archive), archive.stat().st_ino)
            assert (extent.nbytes, extent.packed.nbytes) == (info.compress_size, leaf.nbytes)
            assert (extent.packed.name, extent.packed.crc) == (info.filename, info.CRC)
            assert (extent.packed.method, extent.is_compressed) == (number, number != 0)
            assert extent.packed.blocks is None


@pytest.mark.parametrize("sidecar", [False, True])
def test_leaves_have_their_block_index(saved: dict[str, Path], tmp_path: Path, sidecar: bool) -> None:
    archive = tmp_path / "a.tdz"
    blocked(4096, sidecar=sidecar)(saved["large"], archive)
    for check in (True, False):
        save = reader.read(archive, check=check)
        save.close()
        extent = save.root.leaves["big"].extent
        assert extent is not None
        assert extent.packed is not None
        if not check:
            assert extent.packed.blocks is None
            continue
        assert extent.packed.blocks is not None
        assert extent.packed.blocks.nbytes == 4096
        assert len(extent.packed.blocks.sizes) == -(-1_200_000 // 4096)
        assert extent.packed.blocks.sizes.sum() == extent.nbytes
    assert_same(load(archive), BUILDERS["large"]())


def test_without_checks_no_header_of_a_leaf_is_read(saved: dict[str, Path], tmp_path: Path) -> None:
    archive = packed(saved["nested"], tmp_path)
    with zipfile.ZipFile(archive) as file:
        at = file.getinfo("inner/b.memmap").header_offset
    with open(archive, "r+b") as stream:
        stream.seek(at)
        stream.write(b"gone")
    save = reader.read(archive, check=False)
    save.close()
    assert {leaf.extent.offset for leaf in save.leaves() if leaf.extent} == {-1}
    with pytest.raises(ArchiveError, match=r"inner/b\.memmap"):
        reader.read(archive)


def test_nested_sizes_of_an_archive_are_real_under_a_fake_mode(saved: dict[str, Path], tmp_path: Path) -> None:
    archive = packed(saved["nested_tensor"], tmp_path, "deflate")
    with FakeTensorMode(), torch.device("meta"):
        save = reader.read(archive, check=False)
    save.close()
    sizes = save.root.leaves["ragged"].nested_sizes
    assert sizes is not None
    assert type(sizes) is torch.Tensor
    assert sizes.tolist() == [[3, 2], [1, 2], [0, 2], [4, 2]]


@pytest.mark.parametrize(
    ("name", "subpath"),
    [
        ("nested", "inner/deep"),
        ("nested", ("inner", ("deep",))),
        ("nested", "/inner//deep/"),
        ("nested", ""),
        ("keys", ("na/b",)),
        ("keys", ("n..",)),
        ("keys", ("n\u00fc\u4e16",)),
        ("keys", ("child of dots", "..", ".")),
        ("tensorclass", "at"),
        ("tensorclass", "_tensordict/at"),
        ("lazy_stack", "1/n"),
        ("legacy_keys", "n n"),
    ],
)
def test_subpaths(saved: dict[str, Path], tmp_path: Path, name: str, subpath: Any) -> None:
    archive = packed(saved[name], tmp_path)
    for robust in (True, False) if name == "legacy_keys" else (True,):
        ours = load(archive, subpath=subpath, robust_key=robust, allow_pickle=None)
        assert_same(ours, TensorDict.load_memmap(archive, subpath=subpath, robust_key=robust), devices=True)


def test_subpaths_that_are_not_there(saved: dict[str, Path], tmp_path: Path) -> None:
    archive = packed(saved["nested"], tmp_path)
    before = descriptors()
    for subpath in ("nothing", "z", "inner/b", ("inner/deep",), ("..",), ()):
        with pytest.raises(SubpathError):
            reader.read(archive, subpath=subpath)
    with pytest.raises(SubpathError, match="outside"):
        reader.read(archive, subpath="../stored.tdz", robust_key=False)
    assert descriptors() == before


@pytest.mark.parametrize("method", METHODS)
def test_pickles_of_archives(saved: dict[str, Path], tmp_path: Path, method: str) -> None:
    for name in sorted(PICKLED):
        archive = tmp_path / f"{name}.tdz"
        with zipfile.ZipFile(archive, "w", {"stored": 0, "deflate": 8, "bzip2": 12, "lzma": 14}[method]) as file:
            for path in sorted(saved[name].rglob("*")):
                file.write(path, path.relative_to(saved[name]))
        with pytest.raises(PickleRefused, match=r"\.tdz::/"):
            load(archive, allow_pickle=False)
        with pytest.warns(FutureWarning, match=r"\.tdz::/"):
            assert_same(load(archive, allow_pickle=None), BUILDERS[name]())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        archive = packed(saved["tensorclass_types"], tmp_path)
        assert_same(load(archive, allow_pickle=False), BUILDERS["tensorclass_types"]())
    assert load(tmp_path / "tensorclass_pickle.tdz")["f"].extra == Thing(3)


# --- mapping ----------------------------------------------------------------------------------------------------------


def test_stored_leaves_are_views_of_one_mapping(saved: dict[str, Path], tmp_path: Path) -> None:
    archive = packed(saved["dtypes"], tmp_path)
    before = archive.read_bytes()
    for mode in (None, "r"):
        ours = load(archive, mode=mode)
        leaves = list(ours.values())
        assert {leaf.untyped_storage().data_ptr() for leaf in leaves} == {leaves[0].untyped_storage().data_ptr()}
        assert not any(isinstance(leaf, MemoryMappedTensor) for leaf in leaves)
        ours.zero_()
        assert archive.read_bytes() == before


def test_unaligned_leaves_are_copies(saved: dict[str, Path], tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    MAKERS["raw unaligned"](saved["dtypes"], archive)
    ours = load(archive)
    assert_same(ours, TensorDict.load_memmap(archive), devices=True)
    owners = {key: leaf.untyped_storage().nbytes() == archive.stat().st_size for key, leaf in ours.items()}
    assert {key for key, is_view in owners.items() if is_view} == {
        key for key, leaf in ours.items() if leaf.dtype.itemsize == 1
    }


def test_with_mode_r_plus_writes_reach_the_archive(saved: dict[str, Path], tmp_path: Path) -> None:
    archive = packed(saved["nested"], tmp_path)
    ours = load(archive, mode="r+")
    ours["inner", "b"].fill_(7.5)
    again = load(archive)
    assert again["inner", "b"].tolist() == [7.5] * 4
    assert_same(again.exclude(("inner", "b")), BUILDERS["nested"]().select("z", "a", "inner").exclude(("inner", "b")))


@pytest.mark.parametrize(
    ("name", "maker", "words"),
    [
        ("nested", "tensordict deflate", "is compressed"),
        ("nested", "raw unaligned", "is not aligned"),
        ("nested_tensor", "tensordict stored", "is a nested tensor"),
    ],
)
def test_what_cannot_be_written_through(
    saved: dict[str, Path], tmp_path: Path, name: str, maker: str, words: str
) -> None:
    archive = tmp_path / "a.tdz"
    MAKERS[maker](saved[name], archive)
    with pytest.raises(RuntimeError):
        TensorDict.load_memmap(archive, mode="r+")
    with pytest.raises(ArchiveNotSupported, match=words) as caught:
        load(archive, mode="r+")
    assert caught.value.key is not None
    assert "a.tdz::/" in str(caught.value)
    if name == "nested":
        meta = torch.device("meta")
        assert_same(load(archive, mode="r+", device=meta), TensorDict.load_memmap(archive, mode="r+", device="meta"))


def test_an_archive_that_cannot_be_written(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = packed(saved["nested"], tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # as for a user who is not root
    for device in (None, torch.device("meta")):
        with pytest.raises(PermissionError, match=r"stored\.tdz"):
            load(archive, mode="r+", device=device)
    assert_same(load(archive), load(saved["nested"]))


def test_saving_over_a_mapped_archive(tmp_path: Path) -> None:
    archive = tmp_path / "a.tdz"
    TensorDict({"a": torch.arange(1000)}).save(archive)
    old = load(archive)
    TensorDict({"a": torch.zeros(5)}).save(archive)
    assert old["a"].tolist() == list(range(1000))
    assert load(archive)["a"].tolist() == [0.0] * 5


@pytest.mark.parametrize("mode", [None, "r+"])
def test_an_archive_that_changes_before_it_is_mapped(saved: dict[str, Path], tmp_path: Path, mode: str | None) -> None:
    archive = packed(saved["nested"], tmp_path)
    save = reader.read(archive)
    save.close()
    shutil.copy(archive, tmp_path / "copy")
    os.replace(tmp_path / "copy", archive)
    with pytest.raises(LoadError, match="has changed"):
        Mapper(save, mode)(save.leaves()[0])
    save = reader.read(archive)
    save.close()
    os.truncate(archive, 100)
    with pytest.raises(LoadError, match="has changed"):
        Mapper(save, mode)(save.leaves()[0])
    assert archive.stat().st_size == 100


@pytest.mark.parametrize("name", ["flat", "nested", "lazy_stack_named", "tensorclass", "names"])
@pytest.mark.parametrize("where", ["directory", "stored", "deflate"])
@pytest.mark.parametrize("rows", [slice(1, 3), slice(0, 1), slice(1, None), slice(2, 2)])
def test_rows_of_leaves(saved: dict[str, Path], tmp_path: Path, name: str, where: str, rows: slice) -> None:
    path = saved[name] if where == "directory" else packed(saved[name], tmp_path, where)
    assert_same(load(path, rows=rows), load(path)[rows])


def test_rows_of_a_directory_are_rows_of_its_files(saved: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(saved["flat"], tmp_path / "save")
    ours = load(tmp_path / "save", rows=slice(1, 3))
    expected = TensorDict.load_memmap(tmp_path / "save")["obs"][1:3]
    assert isinstance(ours["obs"], MemoryMappedTensor)
    assert ours["obs"].filename == expected.filename
    ours["obs"].fill_(3)
    assert load(tmp_path / "save")["obs"][:, 0].eq(3).tolist() == [False, True, True, False]
    load(tmp_path / "save", rows=slice(0, 2), mode="r")["obs"].fill_(9)
    assert not load(tmp_path / "save")["obs"].eq(9).any()


@pytest.mark.parametrize("where", ["directory", "stored", "deflate"])
@pytest.mark.parametrize("mode", [None, "r"])
def test_components_of_a_nested_leaf(tmp_path: Path, where: str, mode: str | None) -> None:
    parts = [torch.arange(n * 2.0).view(n, 2) + n for n in (3, 1, 0, 4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are called a prototype
        TensorDict({"r": torch.nested.nested_tensor(parts)}, [4]).memmap(tmp_path / "save")
    path = tmp_path / "save" if where == "directory" else packed(tmp_path / "save", tmp_path, where)
    for rows in (slice(1, 4), slice(0, 2), slice(1, 2)):
        found = load(path, rows=rows, mode=mode)["r"]
        assert [part.tolist() for part in found.unbind(0)] == [part.tolist() for part in parts[rows]]
        assert found.clone().unbind(0)[0].tolist() == parts[rows][0].tolist()
        found.unbind(0)[0].add_(1)
        written = load(path)["r"].unbind(0)[rows.start] - parts[rows.start]
        assert written.eq(1 if where == "directory" and mode is None else 0).all()
        found.unbind(0)[0].sub_(1)


# --- classes with loaders of their own --------------------------------------------------------------------------------


def test_foreign_levels_share_one_mapping(tmp_path: Path) -> None:
    source = TensorDict({"a": torch.arange(8).view(4, 2)}, [4])
    views = {f"v{i}": source._get_sub_tensordict(slice(i, i + 2)) for i in range(2)}
    TensorDict(views, [2]).memmap(tmp_path / "save")
    archive = packed(tmp_path / "save", tmp_path)
    ours, theirs = load(archive), TensorDict.load_memmap(archive)
    assert_same(ours, theirs, devices=True)
    storages = {ours[key]._source["a"].untyped_storage().data_ptr() for key in views}
    assert len(storages) == 1
    load(archive, mode="r+")["v1"]._source["a"].fill_(5)
    assert load(archive)["v1"]["a"].tolist() == [[5, 5], [5, 5]]


def test_what_lies_below_a_foreign_level_is_checked(saved: dict[str, Path], tmp_path: Path) -> None:
    archive = packed(saved["sub_tensordict"], tmp_path)
    broken = tmp_path / "broken.tdz"
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(broken, "w") as new:
        for info in old.infolist():
            if info.filename != "_source/a.memmap":
                new.writestr(info, old.read(info))
    with pytest.raises(MissingLeafError, match=r"_source/a\.memmap"):
        load(broken)


# --- refusals ---------------------------------------------------------------------------------------------------------


def _leaf(shape: list[int]) -> dict[str, Any]:
    return {"device": "cpu", "shape": shape, "dtype": "torch.int8", "is_nested": False}


def _level(**entries: Any) -> bytes:
    level = {"shape": [], "device": "None", "_type": "<class 'tensordict._td.TensorDict'>", **entries}
    return json.dumps(level).encode()


def _lazy() -> bytes:
    name = "<class 'tensordict._lazy.LazyStackedTensorDict'>"
    return json.dumps({"_type": name, "stack_dim": 0, "stack_dim_name": None}).encode()


NESTED_ENTRY = {"a": {**_leaf([1, 1]), "is_nested": True}}
CHILD = {"n": {"type": "TensorDict"}}
ROOT = ("meta.json", _level(a=_leaf([5])))

BROKEN: dict[str, tuple[list[tuple[str, bytes]], type[TdgpuError], str]] = {
    "no leaf": ([ROOT], MissingLeafError, "a.memmap"),
    "a short leaf": ([ROOT, ("a.memmap", b"1234")], LeafSizeError, "too short"),
    "a long leaf": ([ROOT, ("a.memmap", b"123456")], LeafSizeError, "wanted 5 bytes, found 6"),
    "a leaf that is a directory": ([ROOT, ("a.memmap/x", b"12345")], MissingLeafError, "a directory"),
    "no child": ([("meta.json", _level(**CHILD))], MissingLeafError, "tdz::/n;"),
    "a child without metadata": ([("meta.json", _level(**CHILD)), ("n/x", b"")], SaveNotFound, "n/meta.json"),
    "an empty child": ([("meta.json", _level(**CHILD)), ("n/", b"")], SaveNotFound, "n/meta.json"),
    "a child that is a file": ([("meta.json", _level(**CHILD)), ("n", b"")], MissingLeafError, "this is a file"),
    "no member": ([("meta.json", _lazy())], MissingLeafError, "member 0"),
    "a gap between members": (
        [("meta.json", _lazy()), ("0/meta.json", _level()), ("2/meta.json", _level())], MissingLeafError, "member 1"
    ),
    "metadata that is no JSON": ([("meta.json", b"{")], FormatError, "not JSON"),
    "no nested sizes": (
        [("meta.json", _level(**NESTED_ENTRY)), ("a.memmap", b"12")], MissingLeafError, "a.shape.memmap"
    ),
    "long nested sizes": (
        [("meta.json", _level(**NESTED_ENTRY)), ("a.memmap", b"1"), ("a.shape.memmap", bytes(9))],
        LeafSizeError,
        "a.shape.memmap",
    ),
    "nested sizes for other values": (
        [("meta.json", _level(**NESTED_ENTRY)), ("a.memmap", b"12"), ("a.shape.memmap", (3).to_bytes(8, "little"))],
        LeafSizeError,
        "wanted 3 bytes, found 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_saves_in_archives(tmp_path: Path, name: str, compressed: bool) -> None:
    contents, cause, words = BROKEN[name]
    archive = tmp_path / "a.tdz"
    method = DEFLATE if compressed else 0
    archive.write_bytes(write([Entry(entry, data, method) for entry, data in contents]).data)
    before = descriptors()
    for check in (True, False):
        with pytest.raises(cause) as caught:
            reader.read(archive, check=check)
        assert type(caught.value) is cause
        assert words in str(caught.value)
        assert caught.value.save == str(archive)
    assert descriptors() == before


def test_damaged_metadata_is_noticed(tmp_path: Path) -> None:
    archive = tmp_path / "a.tdz"
    for method in (0, DEFLATE):
        archive.write_bytes(write([Entry("meta.json", _level(), method, both={"crc": 1})]).data)
        with pytest.raises(ChecksumError, match=r"meta\.json"):
            reader.read(archive)


def test_small_files_are_bounded_together(tmp_path: Path) -> None:
    padding = "x" * 3000
    levels = [("meta.json", _level(**CHILD, pad=padding)), ("n/meta.json", _level(pad=padding))]
    archive = tmp_path / "a.tdz"
    archive.write_bytes(write([Entry(name, data, DEFLATE) for name, data in levels]).data)
    with options(max_metadata_bytes=8000):
        reader.read(archive).close()
    with options(max_metadata_bytes=5000), pytest.raises(FormatError, match=r"n/meta\.json"):
        reader.read(archive)


def test_a_pickle_cannot_be_a_bomb(saved: dict[str, Path], tmp_path: Path) -> None:
    archive = tmp_path / "a.tdz"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_LZMA) as file:
        for path in sorted(saved["tensorclass_pickle"].rglob("*")):
            name = str(path.relative_to(saved["tensorclass_pickle"]))
            file.writestr(name, bytes(1 << 20) if name.endswith("other.pickle") else path.read_bytes()) if (
                path.is_file()
            ) else None
    with options(max_metadata_bytes=1 << 19), pytest.raises(ArchiveError, match="max_metadata_bytes"):
        load(archive)


def test_files_that_are_no_archives(tmp_path: Path) -> None:
    BUILDERS["flat"]().save(tmp_path / "a.tdz")
    whole = (tmp_path / "a.tdz").read_bytes()
    for data in (b"text", whole[:-10], whole[: len(whole) // 2]):
        (tmp_path / "a.tdz").write_bytes(data)
        for subpath in (None, "x"):
            with pytest.raises(InvalidArgument, match=r"a\.tdz"):
                reader.read(tmp_path / "a.tdz", subpath=subpath)
    with pytest.raises(SaveNotFound):
        reader.read(tmp_path / "absent.tdz")


def test_a_save_can_be_closed_twice_and_not_read_after(saved: dict[str, Path], tmp_path: Path) -> None:
    save: Save = reader.read(packed(saved["tensorclass_pickle"], tmp_path))
    save.close()
    save.close()
    with pytest.raises(LoadError, match="cannot be read"):
        objects.resolve(save, True)
