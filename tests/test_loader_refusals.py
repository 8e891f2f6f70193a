"""What DeviceLoader refuses, and with which words; and that its arguments are DataLoader's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from saves import BUILDERS
from tensordict import TensorDict
from torch.utils.data import DataLoader, Subset, TensorDataset

from tdgpu import DeviceLoader
from tdgpu.errors import InvalidArgument, InvalidArgumentType, SaveNotFound


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Rows 0 to 9."""
    TensorDict({"i": torch.arange(10), "n": {"x": torch.zeros(10)}}, [10]).memmap(tmp_path / "save")
    return tmp_path / "save"


REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"worker_init_fn": print}, InvalidArgument, "worker_init_fn has nothing to initialise.*transform"),
    ({"multiprocessing_context": "spawn"}, InvalidArgument, "multiprocessing_context has no meaning.*threads"),
    ({"pin_memory_device": "cuda"}, InvalidArgument, "pin_memory_device has no meaning: say device="),
    ({"batch_size": 0}, InvalidArgument, "batch_size must be at least 1, got 0"),
    ({"batch_size": -1}, InvalidArgument, "batch_size must be at least 1, got -1"),
    ({"batch_size": 2.0}, InvalidArgumentType, r"batch_size must be a whole number, got 2\.0"),
    ({"batch_size": True}, InvalidArgumentType, "batch_size must be a whole number, got True"),
    ({"batch_size": None, "drop_last": True}, InvalidArgument, "no last batch to drop"),
    ({"drop_last": 1}, InvalidArgumentType, "drop_last must be a bool"),
    ({"shuffle": "yes"}, InvalidArgument, "shuffle must be True, False or \"permute\", got 'yes'"),
    ({"shuffle": True, "sampler": [0]}, InvalidArgument, "sampler and shuffle exclude each other"),
    ({"shuffle": "permute", "sampler": [0]}, InvalidArgument, "sampler and shuffle exclude each other"),
    ({"batch_sampler": [[0]], "batch_size": 2}, InvalidArgument, "batch_sampler excludes batch_size"),
    ({"batch_sampler": [[0]], "shuffle": True}, InvalidArgument, "batch_sampler excludes"),
    ({"batch_sampler": [[0]], "sampler": [0]}, InvalidArgument, "batch_sampler excludes"),
    ({"batch_sampler": [[0]], "drop_last": True}, InvalidArgument, "batch_sampler excludes"),
    ({"shuffle": "permute", "generator": torch.Generator()}, InvalidArgument, "it draws from no generator"),
    ({"generator": 3}, InvalidArgumentType, r"generator must be a torch\.Generator, got 3"),
    ({"num_workers": -1}, InvalidArgument, "num_workers must be at least 0, got -1"),
    ({"num_workers": 1.5}, InvalidArgumentType, "num_workers must be a whole number"),
    ({"prefetch_factor": 0}, InvalidArgument, "prefetch_factor must be at least 1, got 0"),
    ({"timeout": -1}, InvalidArgument, "timeout must be at least 0 seconds, got -1"),
    ({"timeout": float("nan")}, InvalidArgument, "timeout must be at least 0 seconds, got nan"),
    ({"timeout": float("inf")}, InvalidArgument, "timeout must be at least 0 seconds, got inf"),
    ({"timeout": "1"}, InvalidArgumentType, "timeout must be a number of seconds"),
    ({"device": "meta"}, InvalidArgument, "meta device would have no bytes"),
    ({"resident": True}, InvalidArgument, "resident=True.*say device="),
    ({"resident": True, "device": "cpu"}, InvalidArgument, "resident=True.*say device="),
    ({"resident": True, "device": "cuda", "collate_fn": list}, InvalidArgument, r"on the CPU here \(collate_fn\)"),
    ({"resident": "yes"}, InvalidArgument, "resident must be True, False or \"auto\", got 'yes'"),
    ({"seed": 1.5}, InvalidArgumentType, r"seed must be a whole number, got 1\.5"),
    ({"seed": True}, InvalidArgumentType, "seed must be a whole number, got True"),
    ({"rank": 0}, InvalidArgument, "rank and world_size belong together"),
    ({"world_size": 2}, InvalidArgument, "rank and world_size belong together"),
    ({"rank": 2, "world_size": 2}, InvalidArgument, "rank must be below world_size, got 2 of 2"),
    ({"rank": -1, "world_size": 2}, InvalidArgument, "rank must be at least 0, got -1"),
    ({"rank": 0, "world_size": 0}, InvalidArgument, "world_size must be at least 1, got 0"),
    ({"rank": 0, "world_size": 1, "sampler": [0]}, InvalidArgument, "A sampler says which rows are whose"),
    ({"padding": "mask", "sampler": [0]}, InvalidArgument, "A sampler says which rows are whose"),
    ({"padding": "zeros"}, InvalidArgument, 'padding must be "repeat" or "mask", got \'zeros\''),
    ({"padding": "mask", "mask_key": 3}, InvalidArgumentType, "mask_key must be a string, got 3"),
    ({"padding": "mask", "mask_key": "i"}, InvalidArgument, "has an entry 'i': give the mask another mask_key"),
    ({"padding": "mask", "mask_key": "n"}, InvalidArgument, "has an entry 'n'"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), REFUSALS)
def test_what_means_nothing_is_refused(save, arguments, error, words):
    with pytest.raises(error, match=words):
        DeviceLoader(save, **arguments)


def test_datasets_that_are_not_saves_are_refused(tmp_path):
    for dataset in (TensorDataset(torch.zeros(3)), [1, 2], Subset(TensorDataset(torch.zeros(3)), [0]), None):
        with pytest.raises(InvalidArgumentType, match=r"takes a MemmapDataset, a Subset of one, or a path, not a"):
            DeviceLoader(dataset)  # type: ignore[arg-type]
    with pytest.raises(SaveNotFound, match="nowhere"):
        DeviceLoader(tmp_path / "nowhere")
    TensorDict(a=torch.tensor(1.0)).memmap(tmp_path / "scalar")
    with pytest.raises(InvalidArgument, match="no batch dimension"):
        DeviceLoader(tmp_path / "scalar")


def test_a_mask_needs_a_tensordict(tmp_path):
    BUILDERS["point"]().memmap(tmp_path)
    with pytest.raises(InvalidArgument, match="a Point has the fields that it has"):
        DeviceLoader(tmp_path, padding="mask")


def test_arguments_come_in_dataloaders_order(save):
    theirs = list(inspect.signature(DataLoader.__init__).parameters)
    ours = inspect.signature(DeviceLoader.__init__).parameters
    positional = [name for name, parameter in ours.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    assert positional == theirs[: len(positional)] and set(theirs) <= set(ours)
    loader = DeviceLoader(save, 4, False, None, None, 1, None, False, True)
    assert [batch["i"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert str(save) in repr(loader) and "batch_size=4, sequential, on the CPU" in repr(loader)
