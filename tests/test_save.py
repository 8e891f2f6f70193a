"""Saving from memory and from devices: what tensordict would write, from tensors of every sort."""

from __future__ import annotations

import os
import pickle
import threading
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensordict
import torch
from compare import assert_same
from forked import in_process
from saves import BUILDERS, LEGACY, NESTED, Point, random_bytes
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor
from tensordict.base import _register_tensor_class
from torch._subclasses import FakeTensorMode

import tdgpu
from tdgpu.archives import sources
from tdgpu.errors import (
    CaptureError,
    InvalidArgument,
    InvalidArgumentType,
    KeyEscapeError,
    NotSupported,
    SaveExists,
    TransferError,
)  # fmt: skip
from tdgpu.transfer import fetch

MiB = 1 << 20


def entries_of(archive: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as zip_file:
        assert zip_file.testzip() is None
        return [(name, zip_file.read(name)) for name in zip_file.namelist()]


def save_upstream(value: Any, path: Path, **arguments: Any) -> Path:
    """As ``value.save(path)``, also where tensordict cannot load again what it has written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value.save(path, **arguments)
        except (KeyError, TypeError):
            assert path.exists()
    return path


@pytest.mark.parametrize("kind", BUILDERS)
def test_every_kind_is_written_as_tensordict_writes_it(tmp_path, kind):
    robust = kind not in LEGACY
    theirs = save_upstream(BUILDERS[kind](), tmp_path / "theirs.tdz", robust_key=robust)
    ways: list[dict[str, Any]] = [{}, {"compression": "deflate", "block_size": 4096}]
    for arguments in ways:
        ours = tdgpu.save(BUILDERS[kind](), tmp_path / "ours.tdz", robust_key=robust, **arguments)
        assert entries_of(ours) == entries_of(theirs)


def test_what_is_saved_is_not_changed(tmp_path):
    td = BUILDERS["nested"]()
    before = td.clone()
    tdgpu.save(td, tmp_path / "a.tdz")
    assert not td.is_locked and not td.is_memmap()
    assert_same(td, before, devices=True)


# --- leaves -----------------------------------------------------------------------------------------------------------


def odd_leaves(device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Tensors whose bytes do not lie one after another, of up to 500 kB."""
    base = torch.randn(300, 400, generator=torch.Generator().manual_seed(3)).to(device)
    return {
        "transposed": base.t(),
        "columns": base[:, ::3],
        "backwards": base.view(3, 100, 400).permute(2, 0, 1),
        "expanded": base[0].expand(200, 400),
        "one row": base[3:4, 1::2],
        "offset": base.view(-1)[5:],
        "scalar": base[7, 7],
        "grad": base[:10].clone().requires_grad_(),
        "bytes": base.view(torch.uint8)[:, 1::5],
    }


def host_only_leaves() -> dict[str, torch.Tensor]:
    base = torch.randn(60, 1000, dtype=torch.complex64, generator=torch.Generator().manual_seed(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "conjugated": base.conj(),
            "negated": torch._neg_view(base.real),
            "both": base.t().conj().imag,
            "fp8": random_bytes(torch.float8_e5m2, 40, 50).t(),
            "half complex": random_bytes(torch.complex32, 40, 50).t(),
            "wide": torch.randn(300, 400, dtype=torch.complex128).t().conj(),
        }


@pytest.mark.parametrize("block_size", [4096, 64 << 10, 16 * MiB])
@pytest.mark.parametrize("compression", [None, "deflate"])
def test_tensors_of_every_layout(tmp_path, monkeypatch, compression, block_size):
    monkeypatch.setattr(sources, "PIECE_BYTES", 100_000)
    leaves = {**odd_leaves(), **host_only_leaves()}
    archive = tdgpu.save(
        TensorDict(leaves), tmp_path / "a.tdz", compression=compression, block_size=block_size, compresslevel=1
    )
    written = dict(entries_of(archive))
    for key, tensor in leaves.items():
        with torch.no_grad():
            plain = tensor.detach().resolve_conj().resolve_neg()
            wanted = plain.view(torch.uint8) if plain.itemsize == 1 else plain
            assert (
                written[f"{key.replace(' ', '%20')}.memmap"]
                == wanted.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            ), key


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (5, 1, 3), (1, 1, 9), (2, 3, 4, 5)])
@pytest.mark.parametrize("nbytes", [1, 8, 20, 1000])
def test_windows_cover_a_tensor_in_order(shape, nbytes):
    plain = torch.arange(int(np.prod(shape)), dtype=torch.int32).view(shape)
    backwards = plain.view(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
    for tensor in (plain, backwards):
        parts = list(fetch.windows(tensor, nbytes))
        assert all(part.numel() and (part.numel() * 4 <= nbytes or part.numel() == 1) for part in parts)
        flat = [part.reshape(-1) for part in parts]
        assert torch.equal(torch.cat(flat) if flat else torch.empty(0, dtype=torch.int32), tensor.reshape(-1))


def test_a_mapped_save_can_be_saved_over_itself(tmp_path):
    td = BUILDERS["nested"]()
    archive = tdgpu.save(td, tmp_path / "a.tdz")
    mapped = TensorDict.load_memmap(archive)
    tdgpu.save(mapped, archive, compression="deflate")
    assert_same(TensorDict.load_memmap(archive), mapped)
    assert torch.equal(mapped["z"], td["z"])
    tdgpu.save(td.memmap(tmp_path / "dir"), archive)
    assert_same(TensorDict.load_memmap(archive), mapped)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: torch.empty(3, device="meta"), "no data"),
        (lambda: torch.eye(3).to_sparse(), "layout"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "jagged"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quantized"),
        (lambda: FakeTensorMode().from_tensor(torch.ones(3)), "no data"),
        (lambda: UnbatchedTensor(torch.ones(3)), "UnbatchedTensor"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_leaf_without_plain_bytes_is_refused_by_its_key(tmp_path, make, match):
    td = TensorDict({"n": {"leaf": make()}})
    with pytest.raises(NotSupported, match=rf"{match}.*n/leaf"):
        tdgpu.save(td, tmp_path / "a.tdz")
    assert list(tmp_path.iterdir()) == []


def test_a_fake_mode_is_refused(tmp_path):
    td = TensorDict(a=torch.ones(3))
    with FakeTensorMode(), pytest.raises(NotSupported, match="FakeTensorMode"):
        tdgpu.save(td, tmp_path / "a.tdz")


# --- levels -----------------------------------------------------------------------------------------------------------


class OwnWriter(TensorDict):
    """A class that writes its files itself."""

    def _memmap_(self, *, prefix: Any, **arguments: Any) -> Any:
        result = super()._memmap_(prefix=prefix, **arguments)
        (Path(prefix) / "signature").write_text("own")
        return result


_register_tensor_class(OwnWriter)


def test_a_class_with_a_writer_of_its_own_writes_its_level(tmp_path):
    td = TensorDict({"a": torch.ones(3), "own": OwnWriter({"b": torch.ones(2)}, [2])})
    archive = tdgpu.save(td, tmp_path / "a.tdz")
    written = dict(entries_of(archive))
    assert list(written) == ["meta.json", "a.memmap", "own/meta.json", "own/b.memmap", "own/signature"]
    assert written["own/signature"] == b"own"
    assert [path.name for path in tmp_path.iterdir()] == ["a.tdz"]


@pytest.mark.parametrize("index", [slice(1, 3), 2, torch.tensor([3, 0]), torch.tensor([True, False, True, True])])
def test_a_view_is_saved_as_what_it_shows(tmp_path, index):
    view = BUILDERS["nested"]()._get_sub_tensordict(index)
    td = TensorDict(
        {"view": view, "stack": LazyStackedTensorDict(TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(2)))}
    )
    assert entries_of(tdgpu.save(td, tmp_path / "a.tdz")) == entries_of(save_upstream(td, tmp_path / "b.tdz"))


def test_values_shared_with_other_processes(tmp_path):
    td = TensorDict({"t": torch.ones(2)}, [2])
    for key, value in {"text": "abc", "number": 3, "flag": True, "list": [1, 2], "dict": {"a": 1}}.items():
        td.set_non_tensor(key, value)
    shared = td.memmap(tmp_path / "shared", share_non_tensor=True)
    assert entries_of(tdgpu.save(shared, tmp_path / "a.tdz")) == entries_of(tdgpu.save(td, tmp_path / "b.tdz"))


@pytest.mark.parametrize(
    "td",
    [
        TensorDict({"a": torch.ones(2), "a.memmap": TensorDict(b=torch.ones(1))}),
        TensorDict({"meta.json": TensorDict(b=torch.ones(1))}),
        TensorDict({"n": {"a.shape": torch.ones(2), "a": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])}}),
    ],
)
def test_keys_that_lead_to_one_file_are_refused(tmp_path, td):
    with pytest.raises(InvalidArgument, match="same file"):
        tdgpu.save(td, tmp_path / "a.tdz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["../x", "/x", "a//b", "./a"])
def test_raw_keys_must_stay_inside(tmp_path, key):
    with pytest.raises((KeyEscapeError, InvalidArgument), match="path"):
        tdgpu.save(TensorDict({key: torch.ones(1)}), tmp_path / "a.tdz", robust_key=False)


def test_levels_must_end(tmp_path):
    td = TensorDict()
    td._tensordict["self"] = td
    with pytest.raises(InvalidArgument, match="deep"):
        tdgpu.save(td, tmp_path / "a.tdz")


@pytest.mark.parametrize("value", [threading.Lock(), lambda: None])
def test_what_cannot_be_pickled_is_refused_by_its_key(tmp_path, value):
    for holder in (NonTensorData(value), NonTensorStack(NonTensorData(value), NonTensorData("other"))):
        with pytest.raises(InvalidArgument, match=r"pickled.*n/x"):
            tdgpu.save(TensorDict({"n": {"x": holder}}), tmp_path / "a.tdz")
    assert list(tmp_path.iterdir()) == []


# --- its place --------------------------------------------------------------------------------------------------------


def test_the_suffix_says_what_is_written(tmp_path):
    with pytest.raises(InvalidArgument, match=r"td\.memmap"):
        tdgpu.save(TensorDict(a=torch.ones(1)), tmp_path / "directory")


def test_an_existing_file_is_replaced_only_if_that_is_wanted(tmp_path):
    archive = tdgpu.save(TensorDict(a=torch.ones(1)), tmp_path / "new" / "dir" / "a.tdz")
    with pytest.raises(SaveExists, match=r"a\.tdz"):
        tdgpu.save(TensorDict(a=torch.zeros(1)), archive, existsok=False)
    assert TensorDict.load_memmap(archive)["a"] == 1
    assert pickle.loads(pickle.dumps(SaveExists("x", file="y"))).file == "y"
    tdgpu.save(TensorDict(a=torch.zeros(1)), archive)
    assert TensorDict.load_memmap(archive)["a"] == 0
    (tmp_path / "d.tdz").mkdir()
    with pytest.raises(InvalidArgument, match="directory"):
        tdgpu.save(TensorDict(a=torch.zeros(1)), tmp_path / "d.tdz")


def test_only_collections_are_saved(tmp_path):
    for value in ({"a": torch.ones(1)}, torch.ones(1), None):
        with pytest.raises(InvalidArgumentType):
            tdgpu.save(value, tmp_path / "a.tdz")


def test_memory_does_not_grow_with_a_strided_leaf(tmp_path):
    """What has no plain bytes, 128 MiB of it, is never there as a whole."""
    code = """
        import resource, sys, torch, tdgpu
        from tensordict import TensorDict
        td = TensorDict(a=torch.zeros(1024).expand(32 << 10, 1024), b=torch.zeros(1).expand(16 << 20))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for arguments in ({}, {'compression': 'deflate'}, {'compression': 'deflate', 'block_size': None}):
            tdgpu.save(td, sys.argv[1], num_threads=2, compresslevel=1, **arguments)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    assert int(in_process(code, tmp_path / "a.tdz", timeout=240)) < 56 << 10


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ring_bytes", [64 << 10, 16 * MiB])
@pytest.mark.parametrize("compression", [None, "deflate", "bzip2"])
def test_leaves_on_a_device(device, tmp_path, compression, ring_bytes):
    leaves = odd_leaves(device)
    td = TensorDict({**{key: leaf.to(device) for key, leaf in leaves.items()}, "host": {"a": torch.arange(5)}})
    with tdgpu.options(ring_bytes=ring_bytes):
        archive = tdgpu.save(td, tmp_path / "a.tdz", compression=compression, compresslevel=1 if compression else None)
    wanted = tdgpu.save(td.to("cpu"), tmp_path / "b.tdz")
    ours, theirs = dict(entries_of(archive)), dict(entries_of(wanted))
    assert {k: v for k, v in ours.items() if k.endswith("memmap")} == {
        k: v for k, v in theirs.items() if k.endswith("memmap")
    }
    assert f'"device": "{device}"'.encode() in ours["meta.json"]


@pytest.mark.parametrize("kind", sorted(set(BUILDERS) - NESTED - {"float8", "third_party"}))
def test_every_kind_from_a_device(device, tmp_path, kind):
    value = BUILDERS[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy views are deprecated
        there = value.to(device)
    robust = kind not in LEGACY
    ours = dict(entries_of(tdgpu.save(there, tmp_path / "a.tdz", robust_key=robust)))
    theirs = dict(entries_of(tdgpu.save(there.to("cpu"), tmp_path / "b.tdz", robust_key=robust)))
    assert list(ours) == list(theirs)
    assert [v for k, v in ours.items() if k.endswith("memmap")] == [
        v for k, v in theirs.items() if k.endswith("memmap")
    ]


def test_work_that_is_queued_on_the_current_stream_is_seen(sim, tmp_path):
    """The archive holds what the next kernel on the current stream would see, also on a stream of the user's own."""
    sim.set(delay_us=3000)
    source = [torch.full((100_000,), float(i)).pin_memory() for i in range(4)]
    for make in (lambda: None, lambda: torch.Stream("simgpu")):
        stream = make()
        if stream is not None:
            before = torch.accelerator.current_stream()
            torch.accelerator.set_stream(stream)
        try:
            tensor = torch.zeros(100_000, device="simgpu")
            for host in source:
                tensor.copy_(host, non_blocking=True)
            archive = tdgpu.save(TensorDict(a=tensor), tmp_path / "a.tdz")
        finally:
            if stream is not None:
                torch.accelerator.set_stream(before)
        assert (TensorDict.load_memmap(archive)["a"] == 3).all()


def test_a_missing_wait_would_be_seen(sim, tmp_path):
    sim.set(delay_us=20_000)
    hosts = [torch.full((100_000,), float(i)).pin_memory() for i in range(10)]
    tensor = torch.zeros(100_000, device="simgpu")
    torch.accelerator.synchronize()
    for host in hosts:
        tensor.copy_(host, non_blocking=True)
    sim.skip("cuStreamWaitEvent", 1)
    archive = tdgpu.save(TensorDict(a=tensor), tmp_path / "a.tdz")
    right = bool((TensorDict.load_memmap(archive)["a"] == 9).all())
    found = sim.violations()
    sim.reset()
    assert not right or found


def test_a_copy_that_fails_names_the_leaf_and_leaves_nothing(sim, tmp_path):
    td = TensorDict({"n": {"leaf": torch.ones(100_000, device="simgpu")}})
    torch.accelerator.synchronize()
    sim.fail("cuMemcpyDtoHAsync", 1, 700)
    with pytest.raises(TransferError, match="n/leaf"):
        tdgpu.save(td, tmp_path / "a.tdz")
    assert list(tmp_path.iterdir()) == []
    tdgpu.save(td, tmp_path / "a.tdz")


def test_without_pinned_memory(sim, tmp_path):
    sim.set(pinned_limit=sim.pinned_bytes())
    td = TensorDict(a=torch.arange(100_000, device="simgpu"))
    archive = tdgpu.save(td, tmp_path / "a.tdz")
    assert torch.equal(TensorDict.load_memmap(archive)["a"], torch.arange(100_000))


def test_the_current_device_stays_current(device, tmp_path):
    before = torch.accelerator.current_device_index()
    stream = torch.accelerator.current_stream()
    last = torch.device(device.type, torch.accelerator.device_count() - 1)
    tdgpu.save(TensorDict(a=torch.ones(3, device=last), b=torch.ones(3, device=device)), tmp_path / "a.tdz")
    assert torch.accelerator.current_device_index() == before
    assert torch.accelerator.current_stream() == stream


def test_a_capture_is_refused(device, tmp_path, monkeypatch):
    td = TensorDict(a=torch.ones(3, device=device))
    module = torch.get_device_module(device.type)
    monkeypatch.setattr(module, "is_current_stream_capturing", lambda: True, raising=False)
    with pytest.raises(CaptureError, match="capturing"):
        tdgpu.save(td, tmp_path / "a.tdz")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing_in_flight(sim, tmp_path, monkeypatch):
    """Ctrl-C while copies are under way: they are waited for, since they write to memory that goes."""
    sim.set(delay_us=20_000)
    td = TensorDict(a=torch.ones(1 << 20, device="simgpu"))
    real = fetch.Fetcher._landed

    def interrupt(self, *arguments):
        real(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch.Fetcher, "_landed", interrupt)
    with tdgpu.options(ring_bytes=256 << 10), pytest.raises(KeyboardInterrupt):
        tdgpu.save(td, tmp_path / "a.tdz")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    tdgpu.save(td, tmp_path / "a.tdz")
    assert os.listdir(tmp_path) == ["a.tdz"]


def test_point_is_what_plain_tensordict_loads(tmp_path):
    loaded = tensordict.load(tdgpu.save(BUILDERS["point"](), tmp_path / "a.tdz", compression="lzma"))
    assert type(loaded) is Point


@pytest.mark.parametrize("compression", [None, "deflate", "bzip2"])
def test_a_leaf_that_changes_meanwhile_leaves_a_sound_archive(tmp_path, compression):
    """Its values may be of two moments; but the CRC-32 is that of the bytes that were written."""
    n = 200_000 if compression == "bzip2" else 1_000_000
    td = TensorDict(a=torch.zeros(n), b=torch.zeros(3, n).t())
    stop = threading.Event()

    def change():
        value = 0
        while not stop.is_set():
            value += 1
            td["a"].fill_(value)
            td["b"].fill_(value)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(2):
            archive = tdgpu.save(td, tmp_path / "x.tdz", compression=compression, compresslevel=1)
            assert tdgpu.verify_memmap(archive).problems == ()
    finally:
        stop.set()
        thread.join()


def test_a_failed_save_removes_the_directories_that_it_made(tmp_path):
    (tmp_path / "kept").mkdir()
    with pytest.raises(NotImplementedError):
        tdgpu.save(TensorDict(a=torch.empty(3, device="meta")), tmp_path / "kept" / "y" / "z" / "x.tdz")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]
