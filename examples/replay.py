"""A replay buffer on disk: one thread appends rollouts while another trains on what is committed.

An actor swings pendulums at random and appends every step with ``MemmapAppender``. A learner fits a network that
predicts a pendulum's next state. Before each round it looks for rows that were committed meanwhile, and samples
uniformly from all that there are. Nothing but the path is shared: the actor could as well be another process.

    python examples/replay.py
    python examples/replay.py --rounds 200 --device cuda
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn
from torch.utils.data import RandomSampler

import tdgpu

SECONDS = 0.05  # of a step


def step(state: torch.Tensor, torque: torch.Tensor) -> torch.Tensor:
    """The next states [n, 2] of pendulums: angle and velocity."""
    angle, velocity = state.unbind(1)
    velocity = (velocity + SECONDS * (15 * angle.sin() + 3 * torque)).clamp(-8, 8)
    return torch.stack([angle + SECONDS * velocity, velocity], 1)


def observed(state: torch.Tensor) -> torch.Tensor:
    """What is seen of a state: [n, 3], without a jump where a circle closes."""
    angle, velocity = state.unbind(1)
    return torch.stack([angle.cos(), angle.sin(), velocity / 8], 1)


def rollouts(pendulums: int, steps: int, seed: int) -> Iterator[TensorDict]:
    """Transitions [pendulums * steps] of one rollout after the other."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        state = torch.randn(pendulums, 2, generator=generator) * torch.tensor([3.0, 2.0])
        transitions = []
        for _ in range(steps):
            torque = 4 * torch.rand(pendulums, generator=generator) - 2
            following = step(state, torque)
            transitions.append(
                TensorDict(
                    observation=observed(state), action=torque[:, None], following=observed(following),
                    batch_size=[pendulums],
                )
            )  # fmt: skip
            state = following
        yield torch.cat(transitions)


def act(directory: Path, args: argparse.Namespace, stop: threading.Event) -> int:
    """Appends rollouts until it is told to stop. Returns how many rows there are then."""
    made = rollouts(args.pendulums, args.steps, args.seed)
    rows = next(made)
    with tdgpu.MemmapAppender.create(directory, rows) as appender:
        while not stop.is_set():
            appender.append(rows)
            appender.flush()  # a whole rollout is committed: the learner sees all of it or nothing
            rows = next(made)
            stop.wait(args.pause)
        return len(appender)


def wait_for_rows(directory: Path, actor: Future[int]) -> tdgpu.MemmapDataset:
    """The dataset, as soon as the actor has made it and has committed rows."""
    while not directory.exists():
        look_at(actor)
    dataset = tdgpu.MemmapDataset(directory)
    while not len(dataset):
        look_at(actor)
        dataset.refresh()
    return dataset


def look_at(actor: Future[int]) -> None:
    """Waits a moment; raises what the actor has ended with, if it has."""
    if actor.done():
        actor.result()
    time.sleep(0.01)


def learn(directory: Path, args: argparse.Namespace, actor: Future[int]) -> None:
    device = torch.device(args.device)
    torch.manual_seed(args.seed)  # of the network's weights
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)

    dataset = wait_for_rows(directory, actor)
    # It asks for the dataset's length in every round. Without replacement, over all rows: shuffle="permute" instead.
    uniform = RandomSampler(
        dataset, replacement=True, num_samples=args.batch_size * args.batches,
        generator=torch.Generator().manual_seed(args.seed),
    )  # fmt: skip
    with tdgpu.DeviceLoader(dataset, args.batch_size, sampler=uniform, device=device) as loader:
        for number in range(args.rounds):
            look_at(actor)
            added = dataset.refresh()
            losses = []
            for batch in loader:
                change = network(torch.cat([batch["observation"], batch["action"]], 1))
                loss = nn.functional.mse_loss(batch["observation"] + change, batch["following"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            mean = torch.stack(losses).mean().item()
            print(f"round {number}: {len(dataset):,} rows ({added:,} new), loss {mean:.6f}")
        print(f"the learner's loader: {loader.stats()}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where the buffer is (default: a temporary one)")
    parser.add_argument("--pendulums", type=int, default=32, help="that swing at once (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="of a rollout (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between rollouts (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of learning (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=50, help="of a round (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="of the learner (default: %(default)s)")
    return parser.parse_args()


def run(directory: Path, args: argparse.Namespace) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(1, "actor") as pool:
        actor = pool.submit(act, directory, args, stop)
        try:
            learn(directory, args, actor)
        finally:
            stop.set()
        print(f"the actor has committed {actor.result():,} rows")


def main() -> None:
    args = parse()
    if args.directory is not None:
        run(args.directory, args)
        return
    with tempfile.TemporaryDirectory() as temporary:
        run(Path(temporary, "buffer"), args)


if __name__ == "__main__":
    main()
