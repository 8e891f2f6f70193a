"""Loads to a device: the right bytes on every road, in stream order, and a device that stays usable."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from saves import SAVES
from tensordict import LazyStackedTensorDict, TensorDict

import tdgpu
from tdgpu.transfer import native, registry

MiB = 1 << 20

# What the machine lets a load do, and the road that it must take then.
MACHINES: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "gated": ({}, {}, "gated"),
    "full queue": ({"queue_depth": 8}, {}, "gated"),
    "one hardware queue": ({"connections": 1}, {}, "gated"),
    "no memory operations": ({"memops": 0}, {}, "host"),
    "half the ring": ({"pinned_limit": 160 << 10}, {"ring_bytes": 256 << 10}, "gated"),
    "no pinned memory": ({"pinned_limit": 0}, {"ring_bytes": 256 << 10}, "host"),
    "host road wanted": ({}, {"path": "host"}, "host"),
    "generic road wanted": ({}, {"path": "generic"}, "generic"),
    "small chunks": ({}, {"chunk_bytes": 4096, "ring_bytes": 64 << 10}, "gated"),
    "direct reads": ({}, {"direct_io": True}, "gated"),
}


@contextlib.contextmanager
def machine(sim, name: str) -> Iterator[str]:
    """The simulation and the options of MACHINES; warnings about pinned memory are expected there."""
    settings, options, road = MACHINES[name]
    limit = settings.get("pinned_limit")
    sim.set(**{**settings, **({} if limit is None else {"pinned_limit": sim.pinned_bytes() + limit})})
    with tdgpu.options(**options), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pinned host memory.*", category=RuntimeWarning)
        yield road


def save_random(path: Path, seed: int = 0, leaves: int = 5, large: int = 1) -> TensorDict:
    """A save with small leaves and `large` ones of about 1.5 MiB."""
    generator = torch.Generator().manual_seed(seed)
    td = TensorDict({f"small{i}": torch.randn(100 + i, generator=generator) for i in range(leaves)})
    for i in range(large):
        td["nested", f"large{i}"] = torch.randn(400_000 + i, generator=generator)
    td.memmap(path)
    return td


def same_values(loaded: TensorDict, wanted: TensorDict) -> bool:
    return all(torch.equal(loaded[key].cpu(), value) for key, value in wanted.items(True, True))


@pytest.mark.parametrize("name", MACHINES)
def test_every_kind_of_save_arrives(sim, tmp_path, name):
    with machine(sim, name) as road:
        for kind, build in SAVES.items():
            path = tmp_path / kind
            build(path)
            ways: list[dict[str, Any]] = [{}, {"non_blocking": True}, {"return_early": True}]
            for arguments in ways:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # pickles, and torch's opinion of complex32
                    loaded = tdgpu.load_memmap(path, device="simgpu", **arguments)
                    wanted = tdgpu.load_memmap(path, device="cpu")
                if arguments.get("return_early"):
                    assert set(loaded.progress.path.split("+")) <= {road, "mapped"}, kind
                    loaded = loaded.result()
                assert_same(loaded, wanted)


@pytest.mark.parametrize("name", MACHINES)
def test_large_and_small_leaves_together(sim, tmp_path, name):
    td = save_random(tmp_path, leaves=200, large=3)
    with machine(sim, name):
        before = sim.stat("pageable_copies")
        loaded = [tdgpu.load_memmap(tmp_path, device="simgpu", non_blocking=True) for _ in range(3)]
        tdgpu.synchronize()
        assert sim.stat("pageable_copies") == before or name == "no pinned memory"
        assert all(same_values(one, td) for one in loaded)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bug", ["the consumer does not wait", "a place is freed early"])
def test_seeded_bugs_are_caught(sim, tmp_path, bug, seed):
    """The tests above can fail: a driver that leaves out what a bug would leave out is noticed."""
    td = save_random(tmp_path, seed, large=4)
    sim.set(delay_us=2000, seed=seed)
    with tdgpu.options(ring_bytes=256 << 10, chunk_bytes=32 << 10):
        tdgpu.load_memmap(tmp_path, device="simgpu")  # makes the engine, whose own calls are not meant
        if bug == "the consumer does not wait":
            sim.skip("cuStreamWaitEvent", 2)  # 1 is the copy stream's wait for the consumer
        else:
            sim.set(early_write=1)
        loaded = tdgpu.load_memmap(tmp_path, device="simgpu", non_blocking=True)
        right = same_values(loaded, td)
    found = sim.violations()
    sim.reset()
    assert not right or found


@pytest.mark.parametrize("arguments", [{"non_blocking": True}, {"return_early": True}])
def test_the_call_returns_while_the_device_still_waits(sim, tmp_path, arguments):
    td = TensorDict({f"w{i}": torch.full((MiB // 4,), float(i)) for i in range(4)})
    td.memmap(tmp_path)
    with tdgpu.options(ring_bytes=MiB, chunk_bytes=64 << 10):
        tdgpu.load_memmap(tmp_path, device="simgpu", subpath="")  # the engine is made, and the page cache warm
        sim.set(delay_us=20_000, fixed_delay=1)
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            loaded = tdgpu.load_memmap(tmp_path, device="simgpu", **arguments)
            seconds.append(time.perf_counter() - begin)
        assert min(seconds) < 0.020  # one copy alone takes that long, and there are more than sixty
        if arguments.get("return_early"):
            assert not loaded.done()
            loaded = loaded.result()
        assert same_values(loaded, td)


def test_a_load_comes_after_work_that_used_its_memory(sim, tmp_path):
    """The destinations are memory that the caller's stream may still be writing to."""
    td = TensorDict(a=torch.arange(400_000.0))
    td.memmap(tmp_path)
    sim.set(delay_us=3000)
    for _ in range(5):
        scratch = torch.zeros(400_000, device="simgpu")
        scratch.copy_(torch.full((400_000,), 7.0).pin_memory(), non_blocking=True)
        del scratch  # its memory goes to the next tensor on this stream, at once
        assert same_values(tdgpu.load_memmap(tmp_path, device="simgpu", non_blocking=True), td)


def test_the_program_may_change_its_directory_meanwhile(sim, tmp_path, monkeypatch):
    td = save_random(tmp_path / "save", large=6)
    native.set_pread(sim.io.pread_address)
    sim.io.set(delay_us=5000)
    try:
        monkeypatch.chdir(tmp_path)
        with tdgpu.options(ring_bytes=256 << 10):
            loaded = tdgpu.load_memmap("save", device="simgpu", non_blocking=True)
            monkeypatch.chdir("/")
            tdgpu.synchronize()
    finally:
        native.set_pread(None)
    assert same_values(loaded, td)


def test_on_a_side_stream(device, tmp_path):
    td = save_random(tmp_path)
    stream = torch.Stream(device)
    previous = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        loaded = tdgpu.load_memmap(tmp_path, device=device, non_blocking=True)
        doubled = loaded["nested", "large0"] * 2
    finally:
        torch.accelerator.set_stream(previous)
    previous.wait_stream(stream)
    assert torch.equal(doubled.cpu(), td["nested", "large0"] * 2)


def test_a_future_is_waited_for_leaf_by_leaf(device, tmp_path):
    td = save_random(tmp_path, leaves=50, large=6)
    for _ in range(3):
        future = tdgpu.load_memmap(tmp_path, device=device, return_early=True)
        for key in ["small3", ("nested", "large4"), ("nested", "large0"), "small49"]:
            assert torch.equal(future.wait(key).cpu(), td[key])
        assert same_values(future.wait("nested"), td["nested"])
        assert same_values(future.result(), td)
        future.synchronize()
        assert future.done()
        progress = future.progress
        assert progress.moved == progress.nbytes == sum(value.nbytes for value in td.values(True, True))
        assert progress.leaves == 56 and progress.seconds > 0 and progress.gbps > 0


def test_a_future_of_a_lazy_stack_waits_for_every_member(sim, tmp_path):
    members = [TensorDict(a=torch.full((300_000,), float(i)), b=torch.zeros(i + 1)) for i in range(3)]
    LazyStackedTensorDict.lazy_stack(members).memmap(tmp_path)
    sim.set(delay_us=3000)
    for _ in range(3):
        future = tdgpu.load_memmap(tmp_path, device="simgpu", return_early=True)
        assert torch.equal(future.wait("a").cpu(), torch.stack([member["a"] for member in members]))
        with pytest.raises(tdgpu.errors.UnknownKeyError):
            future.wait("c")


def test_waiting_for_what_is_not_there(device, tmp_path):
    save_random(tmp_path)
    future = tdgpu.load_memmap(tmp_path, device=device, return_early=True)
    with pytest.raises(tdgpu.errors.UnknownKeyError, match="nothing"):
        future.wait(("nested", "nothing"))
    with pytest.raises(KeyError):
        future.wait(("small0", "deeper"))
    with pytest.raises(KeyError):
        future.wait("0")
    future.synchronize()


def test_a_future_used_on_another_stream(sim, tmp_path):
    td = save_random(tmp_path, large=3)
    sim.set(delay_us=2000)
    for _ in range(3):
        future = tdgpu.load_memmap(tmp_path, device="simgpu", return_early=True)
        stream = torch.Stream("simgpu")
        previous = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            loaded = future.result()
            del future
            assert same_values(loaded, td)
        finally:
            torch.accelerator.set_stream(previous)


def test_a_dropped_future_does_not_free_memory_in_flight(sim, tmp_path):
    save_random(tmp_path, large=4)
    sim.set(delay_us=3000)
    for path in ("auto", "generic"):
        for _ in range(3):
            with tdgpu.options(path=path):
                tdgpu.load_memmap(tmp_path, device="simgpu", return_early=True)
            gc.collect()
            # The allocator hands the same memory out again.
            again = [torch.full((400_000 + i,), 5.0).pin_memory() for i in range(4)]
            ours = [torch.empty(400_000 + i, device="simgpu") for i in range(4)]
            for mine, host in zip(ours, again, strict=True):
                mine.copy_(host, non_blocking=True)
            torch.accelerator.synchronize()
            assert all(torch.equal(mine.cpu(), host) for mine, host in zip(ours, again, strict=True))
    registry.synchronize()


def test_the_current_device_is_meant(sim, tmp_path):
    td = save_random(tmp_path)
    before = sim.stat("contexts:0")
    torch.accelerator.set_device_index(1)
    try:
        loaded = tdgpu.load_memmap(tmp_path, device="simgpu")
        assert loaded.device == torch.device("simgpu", 1) == loaded["small0"].device
        assert same_values(loaded, td)
    finally:
        torch.accelerator.set_device_index(0)
    assert tdgpu.load_memmap(tmp_path, device="simgpu:0")["small0"].device == torch.device("simgpu", 0)
    assert sim.stat("contexts:0") >= before


def test_leaves_of_a_segment_are_independent(device, tmp_path):
    """Packed leaves share storage, but not what autograd counts: an in-place update of one leaves the others alone."""
    TensorDict(w=torch.ones(3, 3), b=torch.ones(3)).memmap(tmp_path)
    loaded = tdgpu.load_memmap(tmp_path, device=device)
    w, b = loaded["w"].requires_grad_(), loaded["b"].requires_grad_()
    assert w.is_leaf and not w._is_view() and w.data_ptr() % 256 == 0 and b.data_ptr() % 256 == 0
    y = (b * b).sum()
    with torch.no_grad():
        w.add_(1)
    y.backward()
    assert torch.equal(b.grad.cpu(), torch.full((3,), 2.0))


def test_a_large_leaf_keeps_no_others_alive(device, tmp_path):
    td = save_random(tmp_path, leaves=20)
    large = tdgpu.load_memmap(tmp_path, device=device)["nested", "large0"]
    assert large.untyped_storage().nbytes() == large.nbytes == td["nested", "large0"].nbytes


def test_one_byte_beside_eight_byte_elements(device, tmp_path):
    td = TensorDict(
        {
            f"{i:02}": torch.tensor([i], dtype=torch.uint8) if i % 2 else torch.tensor(1.5 + i, dtype=torch.float64)
            for i in range(9)
        }
    )
    td.memmap(tmp_path)
    assert same_values(tdgpu.load_memmap(tmp_path, device=device), td)


def test_ten_thousand_leaves(sim, tmp_path):
    td = TensorDict({f"k{i}": torch.tensor([i, -i]) for i in range(10_000)})
    td.memmap(tmp_path)
    loaded = tdgpu.load_memmap(tmp_path, device="simgpu", non_blocking=True)
    assert list(loaded.keys()) == list(td.keys())
    sim.set(delay_us=0)  # the delays were for the load, not for ten thousand small copies back
    assert torch.equal(torch.stack([value.cpu() for value in loaded.values()]), torch.stack(list(td.values())))


def test_a_leaf_of_more_than_four_gibibytes(sim, tmp_path):
    sim.set(delay_us=0, poison=0)
    n = 4 * 1024 * MiB + 12_345
    TensorDict(a=torch.zeros(2, dtype=torch.uint8)).memmap(tmp_path)
    meta = tmp_path / "meta.json"
    meta.write_text(meta.read_text().replace("[2]", f"[{n}]"))
    with open(tmp_path / "a.memmap", "r+b") as file:
        file.truncate(n)  # sparse
        for at in (0, 4 * 1024 * MiB - 3, n - 5):
            file.seek(at)
            file.write(b"12345")
    loaded = tdgpu.load_memmap(tmp_path, device="simgpu")["a"]
    assert loaded.shape == (n,)
    for at in (0, 4 * 1024 * MiB - 3, n - 5):
        assert bytes(loaded[at : at + 5].cpu().tolist()) == b"12345"
    assert not loaded[5:4096].cpu().any() and not loaded[-4096:-5].cpu().any()


def test_out_is_filled_on_the_device(device, tmp_path):
    td = save_random(tmp_path)
    out = TensorDict({"stale": torch.zeros(1, device=device), "nested": TensorDict({}, device=device)}, device=device)
    nested = out["nested"]
    loaded = tdgpu.load_memmap(tmp_path, out=out)
    assert loaded is out and out["nested"] is nested and "stale" not in out.keys()  # noqa: SIM118
    assert same_values(out, td) and out["small0"].device == device


def test_a_result_on_a_device_has_no_prefix(device, tmp_path):
    save_random(tmp_path)
    loaded = tdgpu.load_memmap(tmp_path, device=device)
    assert loaded._memmap_prefix is None and loaded["nested"]._memmap_prefix is None and not loaded.is_locked


def test_loads_in_a_training_loop_do_not_grow(sim, tmp_path):
    sim.set(delay_us=0)
    save_random(tmp_path, leaves=20, large=2)

    def step() -> None:
        tdgpu.load_memmap(tmp_path, device="simgpu", non_blocking=True)["small0"].sum().item()

    for _ in range(5):
        step()
    names = ("device_bytes", "pinned_bytes", "streams", "events")
    before = {name: sim.stat(name) for name in names}
    for _ in range(60):
        step()
    after = {name: sim.stat(name) for name in names}
    # Events are kept for the next load, as many as were in use at once; one lost per load would be sixty.
    assert after.pop("events") < before.pop("events") + 10
    assert after == before


def test_pinned_memory_that_cannot_be_had_is_said_in_those_words(sim, tmp_path):
    td = save_random(tmp_path)
    before = sim.pinned_bytes()
    sim.set(pinned_limit=before + (6 << 20))
    with pytest.warns(RuntimeWarning, match="pinned host memory") as caught:
        assert same_values(tdgpu.load_memmap(tmp_path, device="simgpu"), td)
    assert len(caught) == 1 and "out of memory" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tdgpu.load_memmap(tmp_path, device="simgpu")  # said once
    assert before + (3 << 20) <= sim.pinned_bytes() <= before + (6 << 20)


def test_insisting_on_a_road_that_is_not_there(sim, tmp_path):
    save_random(tmp_path)
    sim.set(memops=0)
    with tdgpu.options(path="gated"), pytest.raises(tdgpu.errors.DeviceError, match="memory operations"):
        tdgpu.load_memmap(tmp_path, device="simgpu")


def test_a_progress_bar_does_not_change_the_result(device, tmp_path, capsys):
    td = save_random(tmp_path)
    assert same_values(tdgpu.load_memmap(tmp_path, device=device, progress=True), td)
    assert capsys.readouterr().out == ""
