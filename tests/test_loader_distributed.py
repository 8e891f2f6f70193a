"""Shares of ranks: by DistributedSampler, and a DeviceLoader's own; in one process, and under torchrun with gloo."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, DistributedSampler

from tdgpu import DeviceLoader, MemmapDataset

ROWS = 23


def make(path: Path, rows: int = ROWS) -> Path:
    TensorDict({"i": torch.arange(rows), "x": torch.arange(rows * 2.0).view(rows, 2)}, [rows]).memmap(path)
    return path


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("ranks") / "save")


def read(loader: Iterable[Any]) -> list[list[int]]:
    return [batch["i"].tolist() for batch in loader]


def joined(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


# --- in one process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4, 5, ROWS])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_without_a_shuffle_it_is_distributed_samplers_share(tmp_path, rows, world_size):
    dataset = MemmapDataset(make(tmp_path, rows))
    for rank, batch_size, drop_last in itertools.product(range(world_size), (1, 3), (False, True)):
        sampler: Any = DistributedSampler(dataset, world_size, rank, shuffle=False, drop_last=drop_last)
        # Where there are fewer rows than ranks, torch's sampler repeats rows even with drop_last.
        theirs = read(DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last))
        loader = DeviceLoader(dataset, batch_size, rank=rank, world_size=world_size, drop_last=drop_last)
        if rows >= world_size or not drop_last:
            assert read(loader) == theirs and len(loader) == len(theirs)
        else:
            assert read(loader) == [] and len(loader) == 0


@pytest.mark.parametrize("shuffle", [False, True, "permute"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_ranks_together_have_every_row(save, shuffle, world_size):
    def loaders(**arguments: Any) -> list[DeviceLoader]:
        return [
            DeviceLoader(save, 4, shuffle=shuffle, rank=rank, world_size=world_size, **arguments)
            for rank in range(world_size)
        ]

    for epoch in range(2):
        whole = DeviceLoader(save, 1, shuffle=shuffle)
        whole.set_epoch(epoch)
        order = joined(read(whole))
        repeated, dropped, masked = loaders(seed=torch.initial_seed()), loaders(drop_last=True), loaders(padding="mask")
        for loader in itertools.chain(repeated, dropped, masked):
            loader.set_epoch(epoch)
        shares = [joined(read(loader)) for loader in repeated]
        each = -(-ROWS // world_size)
        assert [len(share) for share in shares] == [each] * world_size
        # Position by position they take turns, and begin again at the end.
        assert joined(zip(*shares, strict=True)) == (order + order)[: each * world_size]

        batches = [read(loader) for loader in dropped]
        assert {len(batch) for batch in joined(batches)} == {4}
        assert {len(share) for share in batches} == {ROWS // world_size // 4} == {len(loader) for loader in dropped}
        assert len(set(joined(joined(batches)))) == len(joined(joined(batches)))

        masks = [list(loader) for loader in masked]
        assert all(batch["mask"].dtype == torch.bool for batch in joined(masks))
        assert all([len(batch["i"]) for batch in share] == [len(rows["i"]) for rows in masks[0]] for share in masks)
        real = joined(batch["i"][batch["mask"]].tolist() for batch in joined(masks))
        assert sorted(real) == list(range(ROWS))


def test_ranks_agree_whatever_each_ones_global_seed_is(save):
    shares = []
    for rank in range(2):
        torch.manual_seed(rank)
        shares.append(joined(read(DeviceLoader(save, 4, shuffle=True, rank=rank, world_size=2, padding="mask"))))
    assert set(joined(shares)) == set(range(ROWS))


@pytest.mark.parametrize("place", [{}, {"device": "simgpu", "resident": False}, {"device": "simgpu", "resident": True}])
def test_masks_of_every_form(request, tmp_path, place):
    if place:
        request.getfixturevalue("sim")
    TensorDict({"i": torch.arange(15).view(5, 3)}, [5, 3], names=["row", "t"]).memmap(tmp_path / "two")
    share = {"rank": 1, "world_size": 2, **place}
    batches = list(DeviceLoader(tmp_path / "two", 2, padding="mask", mask_key="is real", **share))
    assert [batch["is real"].cpu().tolist() for batch in batches] == [[[True] * 3] * 2, [[False] * 3]]
    assert [batch["i"].cpu()[:, 0].tolist() for batch in batches] == [[3, 9], [0]]
    assert all(batch["is real"].device == batch["i"].device and batch.names == ["row", "t"] for batch in batches)
    singles = list(DeviceLoader(make(tmp_path / "one", 3), None, padding="mask", **share))
    assert [(row["i"].item(), row["mask"].item()) for row in singles] == [(1, True), (0, False)]
    seen = list(DeviceLoader(tmp_path / "one", 2, padding="mask", collate_fn=list, rank=1, world_size=2))
    assert [[row["mask"].item() for row in rows] for rows in seen] == [[True, False]]
    alone = list(DeviceLoader(tmp_path / "one", 2, padding="mask", **place))
    assert [batch["mask"].tolist() for batch in alone] == [[True, True], [True]]


# --- under torchrun ---------------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from tdgpu import DeviceLoader, MemmapDataset

save, out, old = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)  # as many programs do: the order must not depend on it
dataset = MemmapDataset(save)
found = {"rank": rank, "world_size": world_size}

def read(loader):
    return [batch["i"].tolist() for batch in loader]

def real(loader):
    return [row for batch in loader for row in batch["i"][batch["mask"]].tolist()]

for shuffle in (False, True, "permute"):
    loader = DeviceLoader(dataset, 4, shuffle=shuffle)
    found[f"repeat {shuffle}"] = [read(loader) for _ in range(2)]
    loader = DeviceLoader(dataset, 4, shuffle=shuffle, drop_last=True)
    found[f"drop_last {shuffle}"] = [read(loader) for _ in range(2)]
    found[f"mask {shuffle}"] = real(DeviceLoader(dataset, 4, shuffle=shuffle, padding="mask"))
found["alone"] = read(DeviceLoader(dataset, 100, rank=0, world_size=1))

sampler, other = DistributedSampler(dataset, seed=3), DistributedSampler(dataset, seed=3)
loader, theirs = DeviceLoader(dataset, 4, sampler=sampler), DataLoader(dataset, 4, sampler=other)
found["sampler"] = []
for epoch in range(3):
    loader.set_epoch(epoch)
    other.set_epoch(epoch)
    found["sampler"].append([read(loader), read(theirs), len(loader), len(theirs)])

# An evaluation: every rank takes as many steps, or this hangs; every row counts once.
totals = torch.zeros(2, dtype=torch.float64)
for batch in DeviceLoader(dataset, 3, padding="mask"):
    step = torch.tensor([batch["x"][batch["mask"]].sum().item(), batch["mask"].sum().item()], dtype=torch.float64)
    dist.all_reduce(step)
    totals += step
found["evaluation"] = totals.tolist()

# Some steps of an epoch, whose rest another number of ranks takes.
elastic = DeviceLoader(dataset, 2, shuffle="permute", seed=11, padding="mask")
if old.exists():
    elastic.load_state_dict(torch.load(old))
    found["rest"] = real(elastic)
    found["next epoch"] = real(elastic)
else:
    steps = [batch for _, batch in zip(range(3), elastic)]
    found["begun"] = real(steps)
    if rank == 0:
        torch.save(elastic.state_dict(), old)

(out / f"{world_size}.{rank}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def runs(save: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each of 2 and then 3 processes has found."""
    folder = tmp_path_factory.mktemp("ranks")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    arguments = (str(save), str(folder), str(folder / "state.pt"))
    for world_size in ("2", "3"):
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world_size)
        done = subprocess.run(
            [*torchrun, str(program), *arguments], env=env, capture_output=True, text=True, timeout=140, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return {
        world_size: [json.loads((folder / f"{world_size}.{rank}.json").read_text()) for rank in range(world_size)]
        for world_size in (2, 3)
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2, 3])
def test_with_a_process_group(runs, world_size):
    ranks = runs[world_size]
    assert [(found["rank"], found["world_size"]) for found in ranks] == [(i, world_size) for i in range(world_size)]
    for shuffle in (False, True, "permute"):
        for epoch in range(2):
            rows = joined(joined(found[f"repeat {shuffle}"][epoch]) for found in ranks)
            assert set(rows) == set(range(ROWS)) and len(rows) == -(-ROWS // world_size) * world_size
            batches = joined(found[f"drop_last {shuffle}"][epoch] for found in ranks)
            rows = joined(batches)
            assert {len(batch) for batch in batches} == {4} and len(rows) == ROWS // world_size // 4 * 4 * world_size
            assert len(set(rows)) == len(rows)
        assert sorted(joined(found[f"mask {shuffle}"] for found in ranks)) == list(range(ROWS))
        assert not shuffle or ranks[0][f"repeat {shuffle}"][0] != ranks[0][f"repeat {shuffle}"][1]
    for found in ranks:
        assert found["alone"] == [list(range(ROWS))]
        assert all(ours == theirs and length == other for ours, theirs, length, other in found["sampler"])
        assert found["evaluation"] == [sum(range(2 * ROWS)), ROWS]


@pytest.mark.timeout(300)
def test_three_ranks_go_on_where_two_were(runs, save):
    begun = joined(found["begun"] for found in runs[2])
    rest = joined(found["rest"] for found in runs[3])
    assert len(begun) == 3 * 2 * 2 and sorted(begun + rest) == list(range(ROWS))
    # The order is that of one process: the first rows of it were taken first.
    order = DeviceLoader(save, 1, shuffle="permute", seed=11)
    first, second = joined(read(order)), joined(read(order))
    assert set(begun) == set(first[:12])
    assert sorted(joined(found["next epoch"] for found in runs[3])) == list(range(ROWS))
    assert runs[3][0]["next epoch"] == second[::3]
