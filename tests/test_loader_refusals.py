"""What DeviceLoader refuses, and with which words; and that its arguments are DataLoader's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from saves import BUILDERS
from tensordict import TensorDict
from torch._subclasses import FakeTensorMode
from torch.utils.data import BatchSampler, DataLoader, Subset, TensorDataset

from tdgpu import DeviceLoader, MemmapDataset
from tdgpu.data.progress import progress
from tdgpu.errors import DeviceError, InvalidArgument, InvalidArgumentType, NotSupported, SaveNotFound


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
    ({"mask_key": "m"}, InvalidArgument, 'mask_key names the entry of padding="mask"'),
    ({"sampler": 3}, InvalidArgumentType, "sampler must be a Sampler.*iterated for indices, got 3"),
    ({"sampler": "012"}, InvalidArgumentType, "sampler must be a Sampler.*got '012'"),
    ({"sampler": torch.tensor(3)}, InvalidArgumentType, r"sampler must be a Sampler.*got tensor\(3\)"),
    ({"batch_sampler": 3}, InvalidArgumentType, "batch_sampler must be a Sampler.*for lists of indices, got 3"),
    ({"sampler": BatchSampler(range(10), 2, False)}, InvalidArgument, "gives lists of indices.*batch_size=None"),
    ({"sampler": BatchSampler(range(10), 2, False), "batch_size": 2}, InvalidArgument, "gives lists of indices"),
    ({"shuffle": True, "generator": torch.Generator(), "seed": 1}, InvalidArgument, "generator= or follows from seed="),
    ({"pin_memory": "no"}, InvalidArgumentType, "pin_memory must be a bool, got 'no'"),
    ({"persistent_workers": 1}, InvalidArgumentType, "persistent_workers must be a bool, got 1"),
    ({"in_order": None}, InvalidArgumentType, "in_order must be a bool, got None"),
    ({"num_workers": 257}, InvalidArgument, "num_workers must be at most 256, got 257"),
    ({"device": "nonsense"}, InvalidArgument, "device='nonsense' is no device here: Expected one of"),
    ({"device": 3.5}, InvalidArgumentType, r"device must be a torch\.device.*got 3\.5"),
    ({"device": "hpu"}, DeviceError, "The device hpu cannot be used"),
    ({"device": "mps:7"}, DeviceError, "The device mps:7 cannot be used: torch .* finds .* devices of that type"),
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_at_once(save):
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(DeviceError, match="finds no devices of that type"):
            DeviceLoader(save, device=device)
    assert not torch.cuda.is_initialized()


def test_a_device_index_beyond_the_last_is_refused(sim, save):
    with pytest.raises(DeviceError, match=r"The device simgpu:2 cannot be used: torch .* finds 2 devices"):
        DeviceLoader(save, device="simgpu:2")
    DeviceLoader(save, device="simgpu:1")


BAD_INDICES: list[tuple[Any, type[Exception], str]] = [
    ([0, 10], IndexError, "The row 10 is out of range: there are 10 rows"),
    ([0, -11], IndexError, "The row -11 is out of range"),
    ([0, "1"], InvalidArgumentType, "not by '1'"),
    ([[0, 1], [2]], InvalidArgumentType, "gives lists of indices, which are batches: say batch_size=None"),
    ([(0, 1)], InvalidArgumentType, "gives lists of indices"),
    ([torch.tensor([0, 1])], InvalidArgumentType, "gives lists of indices"),
]


@pytest.mark.parametrize(("sampler", "error", "words"), BAD_INDICES)
def test_what_a_sampler_gives_that_is_no_row_names_the_save(save, sampler, error, words):
    with pytest.raises(error, match=f"{words}.*save {save}"):
        list(DeviceLoader(save, 2, sampler=sampler))
    if error is IndexError:
        with pytest.raises(error, match=f"{words}.*save {save}"):
            list(DeviceLoader(save, batch_sampler=[sampler]))
        with pytest.raises(error, match=f"{words}.*save {save}"):
            list(DeviceLoader(Subset(MemmapDataset(save), sampler)))


def test_a_loop_under_a_fake_tensor_mode_is_refused(save):
    loader, dataset = DeviceLoader(save, 4), MemmapDataset(save)
    iterator = iter(loader)
    first = next(iterator)["i"].tolist()
    with FakeTensorMode():
        for call in (lambda: iter(loader), lambda: next(iterator), lambda: dataset[0], lambda: dataset[[1, 2]]):
            with pytest.raises(NotSupported, match=f"Under a FakeTensorMode.*save {save}"):
                call()
    assert first + [row for batch in iterator for row in batch["i"].tolist()] == list(range(10))


def test_progress_takes_a_loader():
    with pytest.raises(InvalidArgumentType, match=r"progress goes through a DeviceLoader's batches, not through \[1\]"):
        progress([1])  # type: ignore[arg-type]
