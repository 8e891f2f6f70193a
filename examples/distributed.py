"""Trains on several processes, is interrupted in the middle of an epoch, and goes on from a checkpoint.

Each rank's ``DeviceLoader`` gives it its share of the rows, gradients and losses are averaged, and the evaluation
counts every row once, although ranks get equally many. The state of the loader is in the checkpoint: the second run
begins with the batch behind the last one that the first run has trained with, and ends with the same weights as a run
that nothing interrupts (``--stop-after 0``).

    torchrun --standalone --nproc-per-node 2 examples/distributed.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tdgpu

CLASSES, WIDTH = 5, 16


def make_rows(directory: Path, train: int, test: int, seed: int) -> None:
    """Saves points around the centres of classes, in two parts."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, WIDTH, generator=generator)

    def part(count: int) -> TensorDict:
        labels = torch.randint(CLASSES, (count,), generator=generator)
        points = centres[labels] + torch.randn(count, WIDTH, generator=generator)
        return TensorDict(points=points, labels=labels, batch_size=[count])

    TensorDict(train=part(train), test=part(test)).memmap(directory)


def mean_of_ranks(value: torch.Tensor) -> float:
    total = value.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(directory: Path, args: argparse.Namespace, stop_after: int) -> nn.Module:
    """Trains from the checkpoint on, if there is one.

    Args:
        directory: of the save ``rows`` and the file ``checkpoint.pt``, which all ranks see.
        args: of the program.
        stop_after: write a checkpoint after so many steps, and return; 0: train to the end.
    """
    torch.manual_seed(args.seed)  # of the network's weights
    network = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES)))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    dataset = tdgpu.MemmapDataset(directory / "rows", subpath="train")
    # The ranks are those of the process group. "repeat", the default, would give some rows of the last batch twice.
    with tdgpu.DeviceLoader(dataset, args.batch_size, shuffle=True, drop_last=True, seed=args.seed) as loader:
        first, steps = 0, 0
        if (directory / "checkpoint.pt").exists():
            checkpoint = torch.load(directory / "checkpoint.pt", weights_only=True)
            network.load_state_dict(checkpoint["network"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            loader.load_state_dict(checkpoint["loader"])
            first, steps = checkpoint["loader"]["epoch"], checkpoint["steps"]
            say(f"goes on in epoch {first}, at row {checkpoint['loader']['position']:,}")
        for epoch in range(first, args.epochs):
            losses = []  # none, if the run before has stopped at the end of the epoch
            for batch in loader:
                loss = nn.functional.cross_entropy(network(batch["points"]), batch["labels"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
                steps += 1
                if steps == stop_after:
                    save_checkpoint(directory, network, optimizer, loader, steps)
                    return network
            if losses:
                say(f"epoch {epoch}: loss {mean_of_ranks(torch.stack(losses).mean()):.4f} in {len(losses)} steps")
        say(f"{steps} steps; loader of rank 0: {loader.stats()}")
    return network


def save_checkpoint(
    directory: Path, network: nn.Module, optimizer: torch.optim.Optimizer, loader: tdgpu.DeviceLoader, steps: int
) -> None:
    """One file for all ranks: all of them are at the same position of the same order."""
    if dist.get_rank() == 0:
        state = {
            "network": network.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
            "steps": steps,
        }
        torch.save(state, directory / "checkpoint.pt")
    say(f"stops after {steps} steps")
    dist.barrier()


@torch.no_grad()
def evaluate(network: nn.Module, directory: Path, batch_size: int) -> tuple[int, int]:
    """How many rows of the test are classified right, of how many. Every row counts once, whatever the ranks."""
    dataset = tdgpu.MemmapDataset(directory / "rows", subpath="test")
    counts = torch.zeros(2, dtype=torch.int64)
    with tdgpu.DeviceLoader(dataset, batch_size, padding="mask") as loader:
        for batch in loader:
            is_right = network(batch["points"]).argmax(1) == batch["labels"]
            counts += torch.stack([(is_right & batch["mask"]).sum(), batch["mask"].sum()])
    dist.all_reduce(counts)
    right, rows = counts.tolist()
    return right, rows


def say(message: str) -> None:
    if dist.get_rank() == 0:
        print(message, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_001, help="to train with (default: %(default)s)")
    parser.add_argument("--test-rows", type=int, default=4_001, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="of each rank (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--stop-after", type=int, default=100, help="steps; 0: never (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse()
    dist.init_process_group("gloo")
    try:
        # On several machines, this would be a directory that all of them see.
        with tempfile.TemporaryDirectory() as temporary:
            shared = [temporary]
            dist.broadcast_object_list(shared)
            directory = Path(shared[0])
            if dist.get_rank() == 0:
                make_rows(directory / "rows", args.rows, args.test_rows, args.seed)
            dist.barrier()
            if args.stop_after:
                train(directory, args, args.stop_after)
            network = train(directory, args, 0)
            right, rows = evaluate(network, directory, args.batch_size)
            weights = sum(parameter.double().sum().item() for parameter in network.parameters())
            say(f"{right:,} of {rows:,} test rows are classified right; sum of all weights {weights:.9f}")
            dist.barrier()  # rank 0 removes the directory
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
