"""DeviceLoader's arguments: the right rows of every save, on the CPU, through a device's ring, and resident there."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_same
from saves import BUILDERS, LEGACY, Frame, Point, random_bytes
from tensordict import NonTensorStack, TensorDict, is_tensor_collection, is_tensorclass
from test_load_device import MACHINES, machine
from torch.utils.data import DataLoader, Subset, random_split

import tdgpu
from tdgpu import DeviceLoader, MemmapDataset
from tdgpu.errors import BatchTimeout, InvalidArgumentType, NotSupported, UnknownKeyError
from tdgpu.transfer.gather import GatheredRead

PLACES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "device": {"device": "simgpu", "resident": False},
    "resident": {"device": "simgpu", "resident": True},
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments that say where batches go."""
    if request.param != "cpu":
        request.getfixturevalue("sim")
    return PLACES[request.param]


# What the saves of every kind do not have.
MORE = {
    "no width": lambda: TensorDict({"w": torch.empty(5, 0, 3), "b": torch.ones(5, dtype=torch.bool)}, [5]),
    "only no width": lambda: TensorDict({"w": torch.empty(5, 0), "n": {"v": torch.empty(5, 0, 2)}}, [5]),
    "two dimensions": lambda: TensorDict({"a": torch.arange(30).view(5, 3, 2), "n": {"b": torch.ones(5, 3)}}, [5, 3]),
    "one large row": lambda: TensorDict({"a": torch.randn(3, 300, 100), "b": torch.arange(3)}, [3]),
    "odd rows": lambda: TensorDict({f"w{i}": random_bytes(torch.uint8, 9, i, seed=i) for i in range(1, 40)}, [9]),
}
GATHERED = {
    **{name: BUILDERS[name] for name in (
        "flat", "nested", "names", "empty_levels", "zero_size", "dtypes", "keys", "legacy_keys", "point", "tensorclass",
        "tensorclass_pickle", "tensorclass_types", "non_tensor", "non_tensor_pickle", "typed", "subclass",
    )},
    **MORE,
}  # fmt: skip
REFUSED = (
    "tensorclass_stack", "non_tensor_stack", "non_tensor_stack_deep", "non_tensor_stack_pickle", "lazy_stack",
    "lazy_stack_named", "lazy_stack_dim1", "lazy_stack_of_stacks",
)  # fmt: skip


def numbered(count: int, width: int = 3) -> TensorDict:
    numbers = torch.arange(count)
    return TensorDict({"i": numbers, "n": {"x": numbers.float().view(-1, 1).repeat(1, width)}}, [count])


def numbers(batch: Any) -> list[int]:
    """The rows of a batch, on which all leaves agree."""
    rows = batch["i"].tolist()
    assert batch["n", "x"].tolist() == [[float(row)] * batch["n", "x"].shape[1] for row in rows]
    return rows


def read(loader: DeviceLoader) -> list[list[int]]:
    return [numbers(batch) for batch in loader]


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Rows 0 to 9."""
    numbered(10).memmap(tmp_path / "save")
    return tmp_path / "save"


def with_sorted_fields(collection: Any) -> Any:
    """tensordict's indexing changes the order of a tensorclass's fields, which means nothing."""
    if is_tensorclass(collection):
        fields = collection._non_tensordict
        for key in sorted(fields):
            fields[key] = fields.pop(key)
        with_sorted_fields(collection._tensordict)
    elif is_tensor_collection(collection):
        for value in getattr(collection, "_tensordict", {}).values():
            with_sorted_fields(value)
    return collection


def check_against_tensordict(path: Path, place: dict[str, Any], robust_key: bool = True) -> None:
    """The rows are those that tensordict takes of the whole save, loaded."""
    whole = tdgpu.load_memmap(path, robust_key=robust_key)
    rows = len(whole)
    indices = [[0], list(range(rows)), [-1, 0, 0, -1]] if rows else []
    loader = DeviceLoader(MemmapDataset(path, robust_key=robust_key), batch_sampler=indices, **place)
    batches = list(loader)
    assert len(batches) == len(loader) == len(indices)
    for batch, index in zip(batches, indices, strict=True):
        wanted = whole[torch.tensor(index)]
        if place:
            wanted = wanted.to("simgpu:0")
        assert_same(with_sorted_fields(batch), with_sorted_fields(wanted), devices=True)
        assert all(type(leaf) is torch.Tensor for leaf in batch.values(True, True) if isinstance(leaf, torch.Tensor))


# --- every save -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:Loading pickled:FutureWarning")
def test_every_kind_of_save_gives_its_rows(tmp_path, place):
    for name, build in GATHERED.items():
        build().memmap(tmp_path / name, robust_key=name not in LEGACY)
        check_against_tensordict(tmp_path / name, place, robust_key=name not in LEGACY)


def test_bytes_of_dtypes_that_torch_cannot_index(tmp_path, place):
    td = BUILDERS["float8"]()
    td.memmap(tmp_path)
    (batch,) = DeviceLoader(tmp_path, batch_sampler=[[4, 0, 4]], **place)
    for key, leaf in td.items():
        assert batch[key].dtype == leaf.dtype
        assert torch.equal(batch[key].view(torch.uint8).cpu(), leaf.view(torch.uint8)[[4, 0, 4]]), key


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", [{}, {"compression": "deflate", "block_size": 65536}, {"compression": "deflate"}])
def test_archives_give_their_rows(tmp_path, place, how):
    for name in ("nested", "tensorclass", "dtypes", "two dimensions", "one large row", "no width"):
        archive = tdgpu.save(GATHERED[name](), tmp_path / f"{name}.tdz", **how)
        check_against_tensordict(archive, place)


@pytest.mark.parametrize("name", MACHINES)
def test_every_road_to_the_device(sim, tmp_path, name):
    td = TensorDict(
        {"a": torch.randn(300, 500), "b": torch.arange(300), "c": random_bytes(torch.uint8, 300, 77)}, [300]
    )
    td.memmap(tmp_path / "save")
    with machine(sim, name):
        with DeviceLoader(tmp_path / "save", 64, shuffle=True, seed=3, device="simgpu", resident=False) as loader:
            for _ in range(2):
                batches = list(loader)
                rows = torch.cat([batch["b"].cpu() for batch in batches])
                assert sorted(rows.tolist()) == list(range(300))
                for key, leaf in td.items():
                    assert torch.equal(torch.cat([batch[key].cpu() for batch in batches]), leaf[rows])
        if name == "small chunks":  # a ring of 64 KiB, a quarter of which is the most that one row may have
            TensorDict(wide=torch.ones(3, 5000), batch_size=[3]).memmap(tmp_path / "wide")
            with pytest.raises(NotSupported, match=r"20000 bytes does not fit.*ring_bytes.*80000.*key 'wide'"):
                next(iter(DeviceLoader(tmp_path / "wide", device="simgpu", resident=False)))


@pytest.mark.filterwarnings("ignore:Loading pickled:FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_gathered_are_refused(tmp_path, name):
    BUILDERS[name]().memmap(tmp_path)
    with pytest.raises(NotSupported, match=r"stack.*do not lie one behind the other.*MemmapDataset.*\["):
        iter(DeviceLoader(tmp_path))


def test_keys_leave_leaves_out(save, place):
    (batch,) = DeviceLoader(MemmapDataset(save, keys=[("n", "x")]), 10, **place)
    assert list(batch.keys(True, True)) == [("n", "x")] and batch["n", "x"][:, 1].tolist() == list(range(10))
    # What cannot be gathered is left out likewise.
    path = save.parent / "mixed"
    TensorDict({"s": NonTensorStack("a", "b"), "t": torch.arange(2)}, [2]).memmap(path)
    assert [batch["t"].tolist() for batch in DeviceLoader(MemmapDataset(path, ["t"]), 2, **place)] == [[0, 1]]
    with pytest.raises(UnknownKeyError, match="nothing"):
        MemmapDataset(save, keys=["nothing"])


# --- batches ----------------------------------------------------------------------------------------------------------


def test_batches_are_of_the_size_that_was_asked_for(save, place):
    assert read(DeviceLoader(save, 4, **place)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert read(DeviceLoader(save, 4, drop_last=True, **place)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert read(DeviceLoader(save, 5, drop_last=True, **place)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert read(DeviceLoader(save, 100, **place)) == [list(range(10))]
    assert read(DeviceLoader(save, 100, drop_last=True, **place)) == []
    assert read(DeviceLoader(save, **place)) == [[i] for i in range(10)]
    assert read(DeviceLoader(save, batch_sampler=[[], [3, -1], list(range(2))], **place)) == [[], [3, 9], [0, 1]]


def test_single_rows_have_no_batch_dimension(save, place):
    rows = list(DeviceLoader(save, batch_size=None, **place))
    assert [row["i"].item() for row in rows] == list(range(10))
    assert rows[3].batch_size == torch.Size([]) and rows[3]["n", "x"].tolist() == [3.0] * 3
    given: list[Any] = [3, torch.tensor(-1), np.int32(5)]
    assert [row["i"].item() for row in DeviceLoader(save, None, sampler=given, **place)] == [3, 9, 5]
    lists: list[Any] = [[3, 4], torch.tensor([5]), np.array([1, -1], np.int8), (2, 0)]
    assert read(DeviceLoader(save, None, sampler=lists, **place)) == [[3, 4], [5], [1, 9], [2, 0]]


@pytest.mark.parametrize("save_class", [Point, Frame])
def test_the_saved_class_is_kept(tmp_path, place, save_class):
    BUILDERS["point" if save_class is Point else "tensorclass"]().memmap(tmp_path)
    batches = list(DeviceLoader(tmp_path, 2, **place))
    assert [type(batch) for batch in batches] == [save_class] * 2
    assert [batch.batch_size for batch in batches] == [torch.Size([2]), torch.Size([1])]


def test_subsets(save, place):
    dataset = MemmapDataset(save)
    assert read(DeviceLoader(Subset(dataset, [7, -2, 7]), 2, **place)) == [[7, 8], [7]]
    assert read(DeviceLoader(Subset(Subset(dataset, range(9, -1, -1)), [0, 2]), 2, **place)) == [[9, 7]]
    assert read(DeviceLoader(Subset(dataset, torch.tensor([1, 4]).tolist()), 2, sampler=[-1], **place)) == [[4]]
    parts = random_split(dataset, [6, 4], generator=torch.Generator().manual_seed(1))
    for part in parts:
        rows = read(DeviceLoader(part, 3, shuffle=True, seed=0, **place))
        assert sorted(itertools.chain(*rows)) == sorted(part.indices)
    subset = Subset(dataset, [1, 2])
    loader = DeviceLoader(subset, 2, **place)
    assert read(loader) == [[1, 2]]
    subset.indices = [5, 6, 8]
    assert read(loader) == [[5, 6], [8]] and len(loader) == 2
    with pytest.raises(IndexError, match="row 10 is out of range: there are 10 rows"):
        read(DeviceLoader(Subset(dataset, [0, 10]), 1, **place))


def test_indices_out_of_range_come_after_the_batches_before(save, place):
    for bad in (10, -11, 2**64 - 1, 2**63):
        iterator = iter(DeviceLoader(save, 2, sampler=[0, 1, 2, bad], prefetch_factor=3, **place))
        assert numbers(next(iterator)) == [0, 1]
        with pytest.raises(IndexError, match=rf"row {bad} is out of range: there are 10 rows"):
            next(iterator)
        assert list(iterator) == []
    for odd in ([1.5], ["1"], [True], [None], [[0, 1]]):
        with pytest.raises(InvalidArgumentType, match=r"integer|gives lists of indices"):
            read(DeviceLoader(save, 1, sampler=odd, **place))
    with pytest.raises(InvalidArgumentType, match="A batch sampler gives lists of indices, not 3"):
        read(DeviceLoader(save, batch_sampler=[3], **place))  # type: ignore[list-item]


def test_batches_belong_to_who_gets_them(save, place):
    loader = DeviceLoader(save, 4, num_workers=2, prefetch_factor=3, **place)
    kept = []
    for batch in loader:
        batch["i"].add_(100)  # neither the save nor another batch is changed
        kept.append(batch)
    for batch in loader:
        batch["i"].zero_()
    assert [(batch["i"] - 100).tolist() for batch in kept] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert read(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    # On a device the leaves of a batch are in one piece of memory, without autograd minding that. On the CPU each has
    # its own: torch.multiprocessing moves all of a storage into shared memory, and must not move other batches.
    leaves = [leaf for batch in kept for leaf in (batch["i"], batch["n", "x"])]
    storages = {leaf.untyped_storage().data_ptr() for leaf in (leaves[:2] if place.get("device") else leaves)}
    assert place.get("resident") or len(storages) == (1 if place.get("device") else len(leaves))
    assert not any(leaf._is_view() or leaf.requires_grad for leaf in leaves)


# --- what is called ---------------------------------------------------------------------------------------------------


def test_collate_fn_gets_rows_on_the_cpu(save, place):
    seen: list[Any] = []

    def collate(rows: list[Any]) -> tuple[Any, ...]:
        seen.append(rows)
        return (
            torch.stack([row["i"] for row in rows]),
            {"x": rows[0]["n", "x"], "name": "a"},
            TensorDict(r=rows[0]["i"]),
        )

    arguments = {**place, **({"resident": "auto"} if place else {})}
    batches: list[Any] = list(DeviceLoader(save, 4, collate_fn=collate, **arguments))
    kind = "simgpu" if place else "cpu"
    assert [[row["i"].item() for row in rows] for rows in seen] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(row.batch_size == () and row["i"].device.type == "cpu" for rows in seen for row in rows)
    for numbers_, others, td in batches:
        assert numbers_.device.type == others["x"].device.type == td["r"].device.type == kind
        assert others["name"] == "a" and numbers_[0].item() == td["r"].item()
    theirs: list[Any] = list(DataLoader(MemmapDataset(save), 4, collate_fn=collate))
    assert [batch[0].tolist() for batch in theirs] == [batch[0].tolist() for batch in batches]
    single = list(DeviceLoader(save, None, collate_fn=lambda row: row["i"], **arguments))
    assert [row.item() for row in single] == list(range(10)) and {row.device.type for row in single} == {kind}


def test_transform_gets_the_batch_on_its_device(save, place):
    devices = []

    def transform(batch: TensorDict) -> torch.Tensor:
        devices.append(batch["i"].device.type)
        return batch["i"] * 2

    results = list(DeviceLoader(save, 4, transform=transform, **place))
    assert [result.tolist() for result in results] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
    assert set(devices) == {"simgpu" if place else "cpu"} == {result.device.type for result in results}


def test_an_error_in_a_transform_ends_the_iterator_and_no_more(save, place):
    def transform(batch: TensorDict) -> TensorDict:
        if 4 in batch["i"].tolist():
            raise ZeroDivisionError("mine")
        return batch

    loader = DeviceLoader(save, 4, transform=transform, **place)
    iterator = iter(loader)
    assert numbers(next(iterator)) == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError, match="mine"):
        next(iterator)
    assert list(iterator) == []
    assert loader.state_dict()["position"] == 4  # what failed was not handed out
    loader.transform = None
    assert read(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# --- where batches go, and how ----------------------------------------------------------------------------------------


def test_pinned_batches_on_the_cpu(sim, save):
    batches = list(DeviceLoader(save, 4, pin_memory=True))
    assert all(batch["i"].is_pinned() and batch["n", "x"].is_pinned() for batch in batches)
    assert [numbers(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert not next(iter(DeviceLoader(save, 4)))["i"].is_pinned()


def test_without_an_accelerator_pinning_is_a_warning(save, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.warns(RuntimeWarning, match="pin_memory=True has no effect: there is no accelerator"):
        assert read(DeviceLoader(save, 5, pin_memory=True)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_the_device_that_is_meant(sim, save):
    assert next(iter(DeviceLoader(save, device="cpu")))["i"].device.type == "cpu"
    assert next(iter(DeviceLoader(save, device=torch.device("simgpu", 1))))["i"].device == torch.device("simgpu", 1)
    torch.accelerator.set_device_index(1)
    try:
        assert next(iter(DeviceLoader(save, device="simgpu")))["i"].device == torch.device("simgpu", 1)
    finally:
        torch.accelerator.set_device_index(0)


def test_a_default_device_is_not_meant(sim, save):
    for place in PLACES.values():
        for arguments in ({"shuffle": True}, {"shuffle": True, "generator": torch.Generator()}, {"padding": "mask"}):
            torch.set_default_device("simgpu")
            try:
                batches = list(DeviceLoader(save, 4, **arguments, **place))
            finally:
                torch.set_default_device(None)
            assert {batch["i"].device.type for batch in batches} == {"simgpu" if place else "cpu"}
            assert sorted(itertools.chain(*map(numbers, batches))) == list(range(10))


def test_auto_residence_depends_on_the_memory_that_is_free(sim, save, monkeypatch):
    from tdgpu.data import loader as module
    from tdgpu.data.fetch import DeviceFetcher, ResidentFetcher

    nbytes = 10 * (8 + 3 * 4)
    for free, kind in ((8 * nbytes, ResidentFetcher), (8 * nbytes - 1, DeviceFetcher), (None, DeviceFetcher)):
        monkeypatch.setattr(module.streams, "free_memory", lambda device, free=free: free)
        loader = DeviceLoader(save, 4, device="simgpu")
        assert read(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and type(loader._fetcher) is kind


def test_a_resident_save_is_read_once(sim, save):
    loader = DeviceLoader(save, 4, device="simgpu", resident=True)
    first = read(loader)
    (save / "i.memmap").rename(save / "gone")
    assert read(loader) == first


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("factor", [None, 1, 7])
@pytest.mark.parametrize("persistent", [True, False])
def test_any_number_of_threads_and_batches_ahead(save, workers, factor, persistent):
    loader = DeviceLoader(
        save, 3, num_workers=workers, prefetch_factor=factor, persistent_workers=persistent, in_order=False
    )
    for _ in range(2):
        assert read(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_batches_are_under_way_ahead(save):
    asked: list[int] = []

    class Sampler:
        def __iter__(self):
            for row in range(10):
                asked.append(row)
                yield row

    iterator = iter(DeviceLoader(save, 1, sampler=Sampler(), num_workers=2, prefetch_factor=2))
    assert asked == []
    assert numbers(next(iterator)) == [0] and asked == [0, 1, 2, 3, 4]
    assert numbers(next(iterator)) == [1] and asked == [0, 1, 2, 3, 4, 5]
    assert [numbers(batch) for batch in iterator] == [[i] for i in range(2, 10)]


def test_a_growing_save(tmp_path, place):
    numbered(4).memmap(tmp_path)
    dataset = MemmapDataset(tmp_path)
    loader = DeviceLoader(dataset, 2, **place)
    before = iter(loader)
    assert numbers(next(before)) == [0, 1]
    tdgpu.append_memmap(tmp_path, numbered(7)[4:])
    assert len(loader) == 2 and dataset.refresh() == 3 and len(loader) == 4
    assert [numbers(batch) for batch in before] == [[2, 3]]
    assert read(loader) == [[0, 1], [2, 3], [4, 5], [6]]
    # An iterator that began with fewer rows never reads beyond them.
    listed = iter(DeviceLoader(dataset, 1, sampler=[0, 9, 0], prefetch_factor=1, **place))
    tdgpu.append_memmap(tmp_path, numbered(12)[7:])
    dataset.refresh()
    assert numbers(next(listed)) == [0]
    with pytest.raises(IndexError, match="row 9 is out of range: there are 7 rows"):
        next(listed)


# --- timeouts ---------------------------------------------------------------------------------------------------------


def test_a_timeout_on_the_cpu_may_be_asked_again(save, monkeypatch):
    loader = DeviceLoader(save, 4, timeout=0.05)
    iterator = iter(loader)
    assert numbers(next(iterator)) == [0, 1, 2, 3]
    with monkeypatch.context() as slow:
        slow.setattr(GatheredRead, "is_over", lambda *_: False)
        for _ in range(2):
            with pytest.raises(BatchTimeout, match=r"A batch was not there within 0\.05 s"):
                next(iterator)
    assert [numbers(batch) for batch in iterator] == [[4, 5, 6, 7], [8, 9]]


def test_a_timeout_of_something_else_ends_the_loop_where_it_is(save):
    """One that transform raises, of a loader of its own: that batch was not handed out, and none comes behind it."""

    def transform(batch):
        if batch["i"][0] == 4:
            raise BatchTimeout("of another loader")
        return batch

    loader = DeviceLoader(save, 4, transform=transform)
    iterator = iter(loader)
    assert numbers(next(iterator)) == [0, 1, 2, 3]
    with pytest.raises(BatchTimeout, match="of another loader"):
        next(iterator)
    assert next(iterator, None) is None and loader.state_dict()["position"] == 4


def test_a_timeout_on_the_device_may_be_asked_again(sim, tmp_path):
    td = numbered(64, width=1000)
    td.memmap(tmp_path)
    with tdgpu.options(ring_bytes=64 << 10, chunk_bytes=16 << 10):
        loader = DeviceLoader(tmp_path, 64, device="simgpu", resident=False, timeout=0.01)
        sim.set(delay_us=20_000, fixed_delay=1)  # the ring is full for far longer than that
        iterator = iter(loader)
        timeouts, rows = 0, list[int]()
        while not rows:
            try:
                rows = numbers(next(iterator))
            except BatchTimeout:
                timeouts += 1
        assert timeouts and rows == list(range(64)) and list(iterator) == []
