"""A DeviceLoader's state: the same continuation, wherever it was saved and whoever loads it."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import tdgpu
from tdgpu import DeviceLoader, MemmapDataset, PermutationSampler, WeightedSampler
from tdgpu.errors import FormatError, InvalidArgument

ROWS = 22
DATASET: Any = range(ROWS)


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "save"
    TensorDict({"i": torch.arange(ROWS), "x": torch.arange(ROWS * 2.0).view(ROWS, 2)}, [ROWS]).memmap(path)
    return path


def read(loader: Iterable[Any]) -> list[Any]:
    return [batch["i"].tolist() for batch in loader]


def rows_of(loader: Iterable[Any]) -> list[int]:
    return list(itertools.chain.from_iterable(read(loader)))


def seeded(seed: int = 9) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name] for name in a
    )


class Resumable(DistributedSampler):
    """As torchdata's: its own state is how far it is."""

    given = first = 0

    def __iter__(self) -> Iterator[int]:
        self.given, self.first = self.first, 0
        for row in itertools.islice(super().__iter__(), self.given, None):
            self.given += 1
            yield row

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["given"]


class Stateful:
    """A sampler with a state of its own: another order each time it is iterated."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(torch.randperm(ROWS, generator=seeded(self.times)).tolist())

    def __len__(self) -> int:
        return ROWS

    def state_dict(self) -> dict[str, int]:
        return {"times": self.times}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.times = state["times"]


# Makes the arguments of a loader anew, as another process would.
ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"batch_size": 4},
    "drop_last": lambda: {"batch_size": 4, "drop_last": True},
    "rows": lambda: {"batch_size": None, "shuffle": True, "seed": 1},
    "shuffle": lambda: {"batch_size": 4, "shuffle": True, "seed": 1},
    "permute": lambda: {"batch_size": 4, "shuffle": "permute", "seed": 1, "drop_last": True},
    "generator": lambda: {"batch_size": 4, "shuffle": True, "generator": seeded()},
    "one of three ranks": lambda: {"batch_size": 2, "shuffle": True, "seed": 1, "rank": 2, "world_size": 3},
    "list": lambda: {"batch_size": 4, "sampler": list(range(ROWS - 1, -1, -1))},
    "random": lambda: {"batch_size": 4, "sampler": RandomSampler(range(ROWS), generator=seeded())},
    "subset": lambda: {"batch_size": 3, "sampler": SubsetRandomSampler(range(5, 20), generator=seeded())},
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * ROWS, 30, generator=seeded())},
    "distributed": lambda: {"batch_size": 4, "sampler": DistributedSampler(DATASET, 2, 1)},
    "distributed with a state": lambda: {"batch_size": 4, "sampler": Resumable(DATASET, 2, 1)},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(ROWS), generator=seeded()), 4, False)},
    "batches, distributed": lambda: {"batch_sampler": BatchSampler(DistributedSampler(DATASET, 2, 1), 4, False)},
    "batches as items": lambda: {"batch_size": None, "sampler": BatchSampler(range(ROWS), 4, False)},
    "permutation": lambda: {"batch_size": 4, "sampler": PermutationSampler(ROWS, seed=1)},
    "ours, weighted": lambda: {"batch_size": 4, "sampler": WeightedSampler([1.0] * ROWS, 30, seed=1)},
    "ours, weighted, once": lambda: {"batch_size": 4, "sampler": WeightedSampler([1.0] * ROWS, 20, False, seed=1)},
    "ours, rows": lambda: {"batch_size": None, "sampler": PermutationSampler(ROWS, seed=1)},
    "batches, ours": lambda: {"batch_sampler": BatchSampler(PermutationSampler(ROWS, seed=1), 4, False)},
    "its own state": lambda: {"batch_size": 4, "sampler": Stateful()},
}


@pytest.mark.parametrize("with_set_epoch", [True, False])
@pytest.mark.parametrize("name", ORDERS)
def test_a_resumed_loader_goes_on_exactly(save, name, with_set_epoch):
    """From every place in an epoch, with another number of threads and of batches ahead."""

    def epoch_of(loader: DeviceLoader, epoch: int) -> Any:
        if with_set_epoch:
            loader.set_epoch(epoch)
        return loader

    whole = DeviceLoader(save, **ORDERS[name]())
    wanted = [read(epoch_of(whole, epoch)) for epoch in range(4)]
    for cut in range(len(wanted[1]) + 1):
        begun = DeviceLoader(save, prefetch_factor=5, **ORDERS[name]())
        read(epoch_of(begun, 0))
        iterator = iter(epoch_of(begun, 1))
        assert [next(iterator)["i"].tolist() for _ in range(cut)] == wanted[1][:cut]
        state = pickle.dumps(begun.state_dict())

        resumed = DeviceLoader(save, num_workers=2, prefetch_factor=1, **ORDERS[name]())
        resumed.load_state_dict(pickle.loads(state))
        assert same(resumed.state_dict(), pickle.loads(state))
        assert read(epoch_of(resumed, 1)) == wanted[1][cut:]
        assert read(epoch_of(resumed, 2)) == wanted[2]
        assert read(iterator) == wanted[1][cut:]  # saving disturbed nothing


@pytest.mark.parametrize("name", ORDERS)
def test_resumed_twice(save, name):
    wanted = read(DeviceLoader(save, **ORDERS[name]()))
    state, seen = None, []
    for _ in range(0, len(wanted), 2):
        loader = DeviceLoader(save, **ORDERS[name]())
        if state is not None:
            loader.load_state_dict(state)
        seen += [batch["i"].tolist() for _, batch in zip(range(2), loader, strict=False)]
        loader.close()
        state = loader.state_dict()
    assert seen == wanted


@pytest.mark.parametrize("name", ORDERS)
def test_the_end_of_an_epoch(save, name):
    """Behind the last batch the epoch is not over: the one that resumes ends it, and begins the next."""
    begun = DeviceLoader(save, **ORDERS[name]())
    before = begun.state_dict()
    iterator = iter(begun)
    for _ in range(len(begun)):
        next(iterator)
    at_last = begun.state_dict()
    assert list(iterator) == []
    behind = begun.state_dict()
    second = read(begun)

    resumed = DeviceLoader(save, **ORDERS[name]())
    resumed.load_state_dict(at_last)
    assert read(resumed) == []
    assert (resumed.state_dict()["epoch"], resumed.state_dict()["position"]) == (1, 0)
    assert read(resumed) == second
    resumed = DeviceLoader(save, **ORDERS[name]())
    resumed.load_state_dict(behind)
    assert (behind["epoch"], behind["position"]) == (1, 0)
    assert read(resumed) == second
    assert (before["epoch"], before["position"]) == (0, 0)


def test_only_what_was_handed_out_counts(save):
    loader = DeviceLoader(save, 2, prefetch_factor=8, num_workers=1)
    iterator = iter(loader)
    assert loader.state_dict()["position"] == 0
    for batches in range(1, 12):
        next(iterator)
        assert loader.state_dict()["position"] == 2 * batches
    # The latest iterator counts.
    other = iter(loader)
    next(other)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 2)


def test_a_break_or_the_end_of_the_loader_loses_no_place(save):
    wanted = read(DeviceLoader(save, 4, shuffle=True, seed=2))
    with DeviceLoader(save, 4, shuffle=True, seed=2) as loader:
        for batch in loader:
            if batch["i"].tolist() == wanted[1]:
                break
        del batch
        state = loader.state_dict()
    assert state == loader.state_dict()
    resumed = DeviceLoader(save, 4, shuffle=True, seed=2)
    resumed.load_state_dict(state)
    assert read(resumed) == wanted[2:]


def test_the_seed_comes_with_the_state(save):
    first = DeviceLoader(save, 4, shuffle=True, seed=2)
    iterator = iter(first)
    next(iterator)
    second = DeviceLoader(save, 4, shuffle=True, seed=3)
    second.load_state_dict(first.state_dict())
    assert read(second) == read(iterator)
    assert read(second) == read(first)


def test_where_a_sampler_was_before_does_not_count(save):
    """Neither for the epoch that begins: its state tells of an iteration that is over."""
    sampler = PermutationSampler(ROWS, seed=1)
    next(iter(sampler))
    wanted = sampler.take(0, ROWS).tolist()
    loader = DeviceLoader(save, 4, sampler=sampler)
    next(iter(loader))
    resumed = DeviceLoader(save, 4, sampler=PermutationSampler(ROWS))
    resumed.load_state_dict(loader.state_dict())
    assert rows_of(resumed) == wanted[4:]


def test_set_epoch_after_a_load(save):
    loader = DeviceLoader(save, 4, shuffle="permute", seed=0)
    epochs = [read(loader) for _ in range(3)]
    state = {**loader.state_dict(), "epoch": 1, "position": 8}
    for epoch, wanted in ((1, epochs[1][2:]), (2, epochs[2]), (0, epochs[0])):
        loader.load_state_dict(state)
        loader.set_epoch(epoch)
        assert read(loader) == wanted


def test_loading_while_an_iterator_is_alive(save):
    loader = DeviceLoader(save, 4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    next(iterator)
    loader.load_state_dict(state)
    next(iterator)
    assert loader.state_dict() == state
    assert read(loader)[0] == [4, 5, 6, 7]
    assert read(iterator) == [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21]]


def test_a_state_is_a_few_numbers(tmp_path):
    sizes = []
    for rows in (10, 20_000):
        path = tmp_path / str(rows)
        TensorDict({"i": torch.arange(rows)}, [rows]).memmap(path)
        for shuffle, generator in ((True, None), ("permute", None), (True, seeded())):
            loader = DeviceLoader(path, 2, shuffle=shuffle, generator=generator, seed=None if generator else 0)
            iterator = iter(loader)
            for _ in range(5):
                next(iterator)
            sizes.append(len(pickle.dumps(loader.state_dict())))
    assert max(abs(a - b) for a, b in zip(sizes[:3], sizes[3:], strict=True)) < 20
    assert max(sizes[0], sizes[1]) < 300 and sizes[2] < 6000


def test_seeking_asks_for_no_row_before(tmp_path, monkeypatch):
    from tdgpu.data.orders import Permutation

    rows = 2**40
    TensorDict(w=torch.empty(rows, 0), batch_size=[rows]).memmap(tmp_path)
    asked: list[tuple[int, ...]] = []
    take = Permutation.take

    def taken(self: Permutation, *where: int) -> Any:
        asked.append(where)
        return take(self, *where)

    monkeypatch.setattr(Permutation, "take", taken)
    ways: list[dict[str, Any]] = [{"shuffle": "permute"}, {"sampler": PermutationSampler(rows)}]
    for arguments in ways:
        loader = DeviceLoader(tmp_path, 8, prefetch_factor=1, **arguments)
        loader.load_state_dict({**loader.state_dict(), "position": 2**39})
        next(iter(loader))
        assert [where[0] for where in asked][:2] == [2**39, 2**39 + 8] and len(asked) < 5
        asked.clear()


# --- another number of ranks ------------------------------------------------------------------------------------------


def ranks(
    save: Path, world_size: int, batch_size: int, *, state: dict[str, Any] | None = None, **arguments: Any
) -> list[DeviceLoader]:
    loaders = [
        DeviceLoader(save, batch_size, rank=rank, world_size=world_size, padding="mask", **arguments)
        for rank in range(world_size)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def real(batches: Iterable[Any]) -> list[int]:
    return [row for batch in batches for row in batch["i"][batch["mask"]].tolist()]


@pytest.mark.parametrize("shuffle", ["permute", True, False])
@pytest.mark.parametrize(("before", "after"), [((3, 2), (2, 3)), ((2, 3), (3, 1)), ((1, 4), (4, 2)), ((4, 3), (1, 5))])
def test_another_number_of_ranks_takes_the_rows_that_are_left(save, shuffle, before, after):
    for steps in range(4):
        loaders = ranks(save, *before, shuffle=shuffle, seed=5)
        iterators = [iter(loader) for loader in loaders]
        seen = []
        for _ in range(min(steps, len(loaders[0]))):
            for iterator in iterators:
                seen += real([next(iterator)])
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
        resumed = ranks(save, *after, state=states[0], shuffle=shuffle, seed=5)
        lengths = set()
        for loader in resumed:
            batches = list(loader)
            lengths.add((len(batches), sum(len(batch["i"]) for batch in batches)))
            seen += real(batches)
        assert sorted(seen) == list(range(ROWS))
        assert len(lengths) == 1  # every rank has as many batches and rows
        # The next epoch is whole again, and that of the same seed.
        whole = ranks(save, *after, shuffle=shuffle, seed=5)
        for loader, other in zip(resumed, whole, strict=True):
            other.set_epoch(1)
            assert real(loader) == real(other)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_states_of_something_else_are_refused(save, tmp_path):
    loader = DeviceLoader(save, 4)
    state = loader.state_dict()
    others: list[Any] = [None, 3, [], {}, {**state, "version": 2}, {"epoch": 1}]
    for bad in others:
        with pytest.raises(FormatError, match=r"no state of a DeviceLoader of version 1.*save"):
            loader.load_state_dict(bad)
    wrong: list[dict[str, Any]] = [{"epoch": -1}, {"position": None}, {"position": -4}, {"seed": "1"}, {"epoch": 1.5}]
    for bad in wrong:
        with pytest.raises(FormatError, match="epoch, position and seed are no numbers"):
            loader.load_state_dict({**state, **bad})
    with pytest.raises(FormatError, match="epoch, position and seed are no numbers"):
        loader.load_state_dict({name: state[name] for name in ("version", "order", "rows")})
    orders: list[dict[str, Any]] = [
        {"shuffle": True},
        {"shuffle": "permute"},
        {"sampler": [1]},
        {"shuffle": True, "generator": seeded()},
    ]
    for arguments in orders:
        with pytest.raises(FormatError, match="of a loader with order 'sequential', and this one has"):
            DeviceLoader(save, 4, **arguments).load_state_dict(state)
    TensorDict(i=torch.arange(5), batch_size=[5]).memmap(tmp_path)
    with pytest.raises(FormatError, match="of a loader with rows 22, and this one has 5"):
        DeviceLoader(tmp_path, 4).load_state_dict({**state, "position": 4})
    DeviceLoader(tmp_path, 4).load_state_dict(state)  # the begin of an epoch is one of any save
    assert read(loader)[0] == [0, 1, 2, 3] and loader.state_dict()["epoch"] == 1  # nothing was changed by them


def test_positions_of_samplers_fit_only_the_same_batches(save):
    state = DeviceLoader(save, 4, sampler=DistributedSampler(DATASET, 2, 0)).state_dict()
    with pytest.raises(FormatError, match="batch_size 4, and this one has 3"):
        DeviceLoader(save, 3, sampler=DistributedSampler(DATASET, 2, 0)).load_state_dict(state)
    with pytest.raises(FormatError, match="world_size 2, and this one has 3"):
        DeviceLoader(save, 4, sampler=DistributedSampler(DATASET, 3, 0)).load_state_dict(state)
    state = DeviceLoader(save, 4, sampler=PermutationSampler(ROWS)).state_dict()
    with pytest.raises(InvalidArgument, match=f"another order: its rows is 22, and here 5.*{save}"):
        DeviceLoader(save, 4, sampler=PermutationSampler(5)).load_state_dict(state)


SAMPLERS = [name for name in ORDERS if "sampler" in ORDERS[name]()]


@pytest.mark.parametrize("name", SAMPLERS)
def test_states_of_other_samplers_are_refused_and_change_nothing(save, name):
    def classes(arguments: dict[str, Any]) -> list[str]:
        return [key for key in DeviceLoader(save, **arguments)._samplers.state() if "generator" not in key]

    state = DeviceLoader(save, **ORDERS[name]()).state_dict()
    for other in SAMPLERS:
        here, there = DeviceLoader(save, **ORDERS[other]()), DeviceLoader(save, **ORDERS[name]())
        same_class = [type(one.sampler) for one in (here, there)]
        if same_class[0] is same_class[1] or here.batch_size != there.batch_size:
            continue
        if here._world_size() != there._world_size() or not (classes(ORDERS[other]()) or classes(ORDERS[name]())):
            continue
        before = here.state_dict()
        with pytest.raises(FormatError, match=f"of a loader whose sampler is .*, and here it is .*{save}"):
            here.load_state_dict(state)
        assert same(here.state_dict(), before)


@pytest.mark.parametrize(
    "arguments", [{}, {"shuffle": True}, {"sampler": PermutationSampler(ROWS)}, {"sampler": [1, 2]}]
)
def test_positions_behind_the_end_are_refused(save, arguments):
    loader = DeviceLoader(save, 4, **arguments)
    state = loader.state_dict()
    with pytest.raises(FormatError, match=f"position is 10{{30}}, and there are .*{save}"):
        loader.load_state_dict({**state, "position": 10**30})
    if arguments.get("sampler") != [1, 2]:
        with pytest.raises(FormatError, match="position is 23, and there are 22"):
            loader.load_state_dict({**state, "position": 23})
        loader.load_state_dict({**state, "position": 22})
        assert read(loader) == []


class Global(Sampler[int]):
    """A sampler of a user's that draws another order each time, from the global generator."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.rows).tolist())


class Batches(Global):
    """Likewise, batches; as generators, which can be gone through once."""

    def __iter__(self) -> Iterator[Any]:
        for rows in torch.randperm(self.rows).split(4):
            yield (int(row) for row in rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"batch_size": 4, "sampler": Global()},
        lambda: {"batch_size": None, "sampler": Global()},
        lambda: {"batch_sampler": BatchSampler(Global(), 4, False)},
        lambda: {"batch_sampler": Batches()},
        lambda: {"batch_size": None, "sampler": Batches()},
    ],
)
def test_a_sampler_that_gives_other_rows_than_before_is_found_out(save, make):
    begun = DeviceLoader(save, prefetch_factor=3, **make())
    iterator = iter(begun)
    for _ in range(3):
        next(iterator)
    state = pickle.loads(pickle.dumps(begun.state_dict()))
    resumed = DeviceLoader(save, **make())
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    with pytest.raises(FormatError, match=f"The sampler gives other rows than it gave before.*{save}"):
        list(resumed)
    # The same rows as before are what they were.
    torch.manual_seed(5)
    whole = read(DeviceLoader(save, **make()))
    for cut in (1, 2, len(whole)):
        torch.manual_seed(5)
        loader = DeviceLoader(save, **make())
        iterator = iter(loader)
        for _ in range(cut):
            next(iterator)
        resumed.load_state_dict(loader.state_dict())
        torch.manual_seed(5)
        assert read(resumed) == whole[cut:]


def test_a_sampler_that_gives_fewer_rows_than_before_is_found_out(save):
    loader = DeviceLoader(save, 2, sampler=list(range(10)))
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    resumed = DeviceLoader(save, 2, sampler=list(range(6)))
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(FormatError, match="The sampler gives other rows than it gave before"):
        list(resumed)


def test_checksums_are_kept_of_batches_under_way_only(save):
    loader = DeviceLoader(save, 1, sampler=list(range(ROWS)) * 20, prefetch_factor=3)
    for _ in loader:
        assert loader._given is not None and len(loader._given._checksums) <= 6


def test_a_save_that_has_grown(tmp_path):
    TensorDict(i=torch.arange(8), batch_size=[8]).memmap(tmp_path)
    loader = DeviceLoader(tmp_path, 2)
    next(iter(loader))
    state = loader.state_dict()
    tdgpu.append_memmap(tmp_path, TensorDict(i=torch.arange(8, 10), batch_size=[2]))
    with pytest.raises(FormatError, match="rows 8, and this one has 10"):
        DeviceLoader(tmp_path, 2).load_state_dict(state)
    # The rows that there were are still an epoch.
    resumed = DeviceLoader(torch.utils.data.Subset(MemmapDataset(tmp_path), range(8)), 2)
    resumed.load_state_dict(state)
    assert read(resumed) == [[2, 3], [4, 5], [6, 7]]
