"""``python -m tdgpu demo``: a save, a load and a training loop on real data, in a few seconds.

scikit-learn's digits (1,797 images of 8 x 8 pixels) are written with ``TensorDict.memmap``, loaded with
:func:`tdgpu.load_memmap` and classified by a small network. It is trained on the batches of a
:class:`tdgpu.DeviceLoader`, which takes them from the save. In the middle of the training the save is loaded once more
with ``non_blocking=True``; with that copy the network is tested.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from tensordict import TensorDict
from torch import nn

from tdgpu.data.dataset import MemmapDataset
from tdgpu.data.loader import DeviceLoader
from tdgpu.data.stats import LoaderStats
from tdgpu.errors import DeviceError, InvalidArgument, TdgpuError
from tdgpu.load import load_memmap
from tdgpu.transfer import LoadFuture

__all__ = ["render", "run"]

EPOCHS = 20
BATCH_SIZE = 64
TEST_IMAGES = 360
GOAL = 0.95
SEED = 0

PATHS = {
    "gated": "gated copy stream",
    "host": "host-enqueued copies",
    "generic": "torch's own copies",
    "mapped": "mapped, nothing moved",
}


def run(device: str | None = None, save: str | Path | None = None, *, console: Console | None = None) -> dict[str, Any]:
    """Runs the demo.

    Args:
        device: where to load and train. Default: torch's accelerator, else the CPU.
        save: a new or empty directory that keeps the save. Default: a temporary one, removed at the end.
        console: shows a progress bar, if it is a terminal.

    Returns:
        What :func:`render` prints: ``device``, ``path``, ``leaves``, ``bytes`` of the save, ``bytes_moved``,
        ``returned_seconds`` (until the call gave the future back), ``load_seconds`` and ``gbps`` (1e9 bytes per second;
        both None where nothing was moved), ``epochs``, ``train_seconds``, ``waiting`` (the share of the training in
        which the program waited for data, from 0 to 1), ``accuracy`` (of the test images), ``save``.

    Raises:
        InvalidArgument: no such device, the device ``"meta"``, or ``save`` is empty or holds something already.
        DeviceError: no tensor can be made on the device.
        OSError: the system refused to make or write ``save``.
        TdgpuError: no scikit-learn, wrong bytes, or under 95% of the test images right.
    """
    target = _device(device)
    if save == "":
        raise InvalidArgument("--save needs the name of a new or an empty directory, got ''.")
    data = _digits()
    if save is not None:
        save = Path(save)
        if save.exists() and not (save.is_dir() and not any(save.iterdir())):
            raise InvalidArgument("--save needs a new or an empty directory.", save=save)
        return _run(data, target, save, save, console)
    with tempfile.TemporaryDirectory(prefix="tdgpu-demo-") as temporary:
        return _run(data, target, Path(temporary), None, console)


def _run(
    data: TensorDict, device: torch.device, directory: Path, kept: Path | None, console: Console | None
) -> dict[str, Any]:
    data.memmap(directory)

    begun = time.perf_counter()
    future = load_memmap(directory, device=device, non_blocking=True, return_early=True)
    returned = time.perf_counter() - begun
    loaded = future.result()
    future.synchronize()
    _check_bytes(loaded, data, directory)
    progress = future.progress
    moved = progress.path != "mapped"

    begun = time.perf_counter()
    with _one_thread():
        model, again, stats = _train(directory, device, console)
        accuracy = _accuracy(model, (again or future).result()["test"])
    trained = time.perf_counter() - begun
    if accuracy < GOAL:
        raise TdgpuError(
            f"{accuracy:.1%} of the test images were classified right on {device}; {GOAL:.0%} were expected.",
            save=directory,
        )
    return {
        "device": str(device),
        "path": progress.path,
        "leaves": progress.leaves,
        "bytes": progress.nbytes,
        "bytes_moved": progress.moved if moved else 0,
        "returned_seconds": returned,
        "load_seconds": progress.seconds if moved else None,
        "gbps": progress.gbps if moved else None,
        "epochs": EPOCHS,
        "train_seconds": trained,
        "waiting": stats.stalled,
        "accuracy": accuracy,
        "save": None if kept is None else str(kept),
    }


def render(report: dict[str, Any], console: Console) -> None:
    """Prints the report of :func:`run` as a table."""
    table = Table(title="tdgpu demo: 1,797 digits", show_header=False)
    mapped = report["load_seconds"] is None
    table.add_row("device", report["device"])
    table.add_row("path", PATHS.get(report["path"], report["path"]))
    table.add_row("leaves", f"{report['leaves']:,}")
    table.add_row("bytes mapped" if mapped else "bytes moved", f"{report['bytes']:,}")
    table.add_row("call returned after", f"{report['returned_seconds'] * 1e3:.1f} ms")
    table.add_row("loaded after", "n/a" if mapped else f"{report['load_seconds'] * 1e3:.1f} ms")
    table.add_row("GB/s", "n/a" if mapped else f"{report['gbps']:.3f}")
    table.add_row("trained", f"{report['epochs']} epochs in {report['train_seconds']:.1f} s")
    table.add_row("waited for data", f"{report['waiting']:.1%} of the training")
    table.add_row("test accuracy", f"{report['accuracy']:.1%}")
    if report["save"] is not None:
        table.add_row("save", Text(report["save"], overflow="fold"))
    console.print(table)
    if mapped:
        console.print("On the CPU a save is mapped: its bytes are read when they are used, and none move up front.")
    else:
        console.print("So few bytes measure what a load costs, not what the link carries.")


def _device(name: str | None) -> torch.device:
    if name is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = accelerator or torch.device("cpu")
    else:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise InvalidArgument(f"--device {name!r} is no device that torch knows: {error}") from None
    if device.type == "meta":
        raise InvalidArgument("--device 'meta' holds no data, and the demo trains on data.")
    try:
        torch.empty(1, device=device)
    except Exception as error:  # AssertionError, RuntimeError or ImportError, as the device's type has it
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DeviceError(f"The device {str(device)!r} cannot be used here: {reason}") from error
    return device


def _digits() -> TensorDict:
    """The digits as they are saved: train and test parts, each with images (uint8) and labels (int64)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise TdgpuError("The demo needs scikit-learn. Run: pip install 'tdgpu[demo]'") from None
    digits = load_digits()
    images = torch.from_numpy(digits.images).to(torch.uint8)
    labels = torch.from_numpy(digits.target).to(torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    parts = {"test": order[:TEST_IMAGES], "train": order[TEST_IMAGES:]}
    return TensorDict(
        {
            name: TensorDict({"images": images[rows], "labels": labels[rows]}, batch_size=[len(rows)])
            for name, rows in parts.items()
        }
    )


def _check_bytes(loaded: TensorDict, data: TensorDict, directory: Path) -> None:
    for part in ("train", "test"):
        for name in ("images", "labels"):
            if not torch.equal(loaded[part, name].cpu(), data[part, name]):
                raise TdgpuError(
                    "The bytes on the device are not those that were saved.", save=directory, key=(part, name)
                )


def _model(generator: torch.Generator) -> nn.Sequential:
    # skip_init and our own initialisation: the global random state stays as the caller left it.
    hidden = nn.utils.skip_init(nn.Linear, 64, 128)
    output = nn.utils.skip_init(nn.Linear, 128, 10)
    for layer in (hidden, output):
        nn.init.kaiming_normal_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(hidden, nn.ReLU(), output)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    # A network this small gains nothing from more threads, which wait for each other at every step of a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _inputs(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1).float() / 16  # a pixel is 0 to 16


def _train(
    directory: Path, device: torch.device, console: Console | None
) -> tuple[nn.Sequential, LoadFuture | None, LoaderStats]:
    """The trained network, the load from half-way (None without any epochs), and what the loader did."""
    model = _model(torch.Generator().manual_seed(SEED)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    reload = None
    # Without a terminal there is no bar: a log file wants none.
    silent = console is None or not console.is_terminal
    # The save as a whole has no batch dimension; each of its parts has one.
    train = MemmapDataset(directory, subpath="train")
    with DeviceLoader(train, BATCH_SIZE, shuffle=True, seed=SEED, device=device) as loader:
        for epoch in track(range(EPOCHS), "training", console=console, disable=silent, transient=True):
            if epoch == EPOCHS // 2:
                # The save is loaded again while this epoch trains.
                reload = load_memmap(directory, device=device, non_blocking=True, return_early=True)
            for batch in loader:
                loss = nn.functional.cross_entropy(model(_inputs(batch["images"])), batch["labels"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return model, reload, loader.stats()


@torch.no_grad()
def _accuracy(model: nn.Sequential, test: TensorDict) -> float:
    right = model(_inputs(test["images"])).argmax(1) == test["labels"]
    return right.float().mean().item()
