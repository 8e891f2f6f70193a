"""Trains a small convolutional network on images that are on disk, with batches that are cropped on the device.

The images have the size of ImageNet's and are made up: waves of eight frequencies under noise. They are saved with
``TensorDict.memmap``; ``DeviceLoader`` gathers the rows of each batch, and copies their bytes to the device while the
network works on the batch before. Crops, flips and floating-point numbers are made there, of bytes that are there
already.

    python examples/images.py
    python examples/images.py --directory /data/images --images 100000 --epochs 5 --device cuda
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn
from torch.utils.data import random_split

import tdgpu

CLASSES = 8


def make_images(directory: Path, count: int, size: int, seed: int) -> None:
    """Saves ``count`` images [3, size, size] (uint8) with their labels (int64).

    They are appended in pieces, so that their number is limited by the disk and not by the memory.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 2 * torch.pi, size)
    for first in range(0, count, 256):
        n = min(256, count - first)
        labels = torch.randint(CLASSES, (n,), generator=generator)
        phase = 2 * torch.pi * torch.rand(n, 1, generator=generator)
        waves = 64 + 63 * torch.sin(4 * (labels[:, None] + 1) * x + phase)
        noise = torch.randint(128, (n, 3, size, size), dtype=torch.uint8, generator=generator)
        piece = TensorDict(images=noise + waves.to(torch.uint8)[:, None, None, :], labels=labels, batch_size=[n])
        if first == 0:
            piece.memmap(directory)
        else:
            tdgpu.append_memmap(directory, piece)


class Augment:
    """Crops each image elsewhere, mirrors half of them, and normalises: a transform for batches on a device.

    Its random numbers are its own, so that they do not depend on what else draws some.
    """

    def __init__(self, crop: int, device: torch.device, seed: int) -> None:
        self.crop = crop
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, batch: TensorDict) -> TensorDict:
        images = batch["images"]
        n, channels, height, width = images.shape
        device = images.device
        span = torch.arange(self.crop, device=device)

        def offset(most: int) -> torch.Tensor:
            return torch.randint(most + 1, (n, 1), generator=self.generator, device=device)

        rows = offset(height - self.crop) + span
        columns = offset(width - self.crop) + span
        is_mirrored = torch.rand(n, 1, generator=self.generator, device=device) < 0.5
        columns = torch.where(is_mirrored, columns.flip(1), columns)
        # One gather does both, and moves bytes; floating-point numbers are made of what is left of the image.
        image = torch.arange(n, device=device)[:, None, None, None]
        channel = torch.arange(channels, device=device)[:, None, None]
        batch["images"] = normalised(images[image, channel, rows[:, None, :, None], columns[:, None, None, :]])
        return batch


class CentreCrop:
    """The middle of each image, normalised."""

    def __init__(self, crop: int) -> None:
        self.crop = crop

    def __call__(self, batch: TensorDict) -> TensorDict:
        top, left = ((length - self.crop) // 2 for length in batch["images"].shape[2:])
        batch["images"] = normalised(batch["images"][:, :, top : top + self.crop, left : left + self.crop])
        return batch


def normalised(images: torch.Tensor) -> torch.Tensor:
    return images.float().sub_(127.5).div_(64)


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=4), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip


def train(network: nn.Module, loader: tdgpu.DeviceLoader, epochs: int) -> None:
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    network.train()
    for epoch in range(epochs):
        begun, total = time.perf_counter(), 0
        losses = []
        for batch in tdgpu.progress(loader, f"epoch {epoch}"):
            loss = nn.functional.cross_entropy(network(batch["images"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())  # reading its value here would wait for the device in every step
            total += len(batch)
        mean = torch.stack(losses).mean().item()
        print(f"epoch {epoch}: loss {mean:.3f}, {total / (time.perf_counter() - begun):,.0f} rows/s")


@torch.no_grad()
def accuracy(network: nn.Module, loader: tdgpu.DeviceLoader) -> float:
    network.eval()
    right = [network(batch["images"]).argmax(1) == batch["labels"] for batch in loader]
    return torch.cat(right).float().mean().item()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where the save is, or is to be made (default: a temporary one)")
    parser.add_argument("--images", type=int, default=512, help="how many to make (default: %(default)s)")
    parser.add_argument("--size", type=int, default=224, help="their height and width (default: %(default)s)")
    parser.add_argument("--crop", type=int, default=192, help="height and width of the crops (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--device", help="(default: an accelerator, else the CPU)")
    return parser.parse_args()


def run(directory: Path, args: argparse.Namespace) -> None:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(args.device) if args.device else accelerator or torch.device("cpu")
    torch.manual_seed(args.seed)  # of the network's weights; the loaders draw from no global generator

    if not directory.exists():
        make_images(directory, args.images, args.size, args.seed)
    dataset = tdgpu.MemmapDataset(directory)
    parts = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(args.seed))
    print(f"{len(dataset):,} images in {directory}: {len(parts[0]):,} to train with, {len(parts[1]):,} to test")

    network = make_network().to(device)
    augment = Augment(args.crop, device, args.seed)
    with (
        tdgpu.DeviceLoader(
            parts[0], args.batch_size, shuffle=True, drop_last=True, seed=args.seed, device=device, transform=augment
        ) as train_loader,
        tdgpu.DeviceLoader(
            parts[1], args.batch_size, device=device, transform=CentreCrop(args.crop)
        ) as test_loader,
    ):  # fmt: skip
        train(network, train_loader, args.epochs)
        print(f"{accuracy(network, test_loader):.1%} of the test images are classified right")
        print(f"training's loader: {train_loader.stats()}")


def main() -> None:
    args = parse()
    if args.directory is not None:
        run(args.directory, args)
        return
    with tempfile.TemporaryDirectory() as temporary:
        run(Path(temporary, "images"), args)


if __name__ == "__main__":
    main()
