"""The demo: it learns, it says what was moved, and it leaves nothing behind that it was not asked to."""

from __future__ import annotations

import builtins
import io
import tempfile
from typing import Any

import pytest
import torch
from rich.console import Console
from tensordict import TensorDict

from tdgpu import demo
from tdgpu.errors import DeviceError, InvalidArgument, TdgpuError

BYTES = 1797 * (64 + 8)


@pytest.fixture(scope="module")
def mapped() -> dict[str, Any]:
    return demo.run("cpu")


def printed(report: dict[str, Any]) -> str:
    text = io.StringIO()
    demo.render(report, Console(file=text, width=300))
    return text.getvalue()


def test_on_the_cpu_it_learns_and_claims_no_transfer(mapped):
    assert mapped["accuracy"] >= 0.95
    assert (mapped["device"], mapped["path"], mapped["leaves"], mapped["bytes"]) == ("cpu", "mapped", 4, BYTES)
    assert (mapped["bytes_moved"], mapped["load_seconds"], mapped["gbps"]) == (0, None, None)
    assert 0 < mapped["waiting"] < 1
    text = printed(mapped)
    assert f"{mapped['waiting']:.1%} of the training" in text
    assert "bytes mapped" in text
    assert "bytes moved" not in text


def test_on_an_accelerator_it_learns_and_says_what_was_moved(device):
    report = demo.run(str(device))
    assert report["accuracy"] >= 0.95
    assert (report["path"], report["leaves"], report["bytes"], report["bytes_moved"]) == ("gated", 4, BYTES, BYTES)
    assert report["gbps"] == pytest.approx(BYTES / report["load_seconds"] / 1e9)
    assert "gated copy stream" in printed(report)


def test_it_trains_on_the_batches_of_a_loader(monkeypatch):
    """On every image once an epoch, on the device, and on nothing else."""
    loaders = []

    class Watched(demo.DeviceLoader):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options, transform=self.count)
            self.labels: list[torch.Tensor] = []
            loaders.append(self)

        def count(self, batch: TensorDict) -> TensorDict:
            self.labels.append(batch["labels"])
            return batch

    monkeypatch.setattr(demo, "DeviceLoader", Watched)
    demo.run("cpu")
    (loader,) = loaders
    assert loader.stats().rows == 1437 * demo.EPOCHS
    epochs = torch.cat(loader.labels).view(demo.EPOCHS, 1437)
    assert (epochs.sort(1).values == epochs[0].sort().values).all()
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == demo.EPOCHS  # each in an order of its own


def test_the_copy_that_was_loaded_half_way_serves_for_the_test(monkeypatch):
    real, loads = demo.load_memmap, []

    def load(*args, **kwargs):
        loads.append(kwargs)
        future = real(*args, **kwargs)
        if len(loads) == 2:
            future.result()["test", "labels"].fill_(10)  # right is nothing then
        return future

    monkeypatch.setattr(demo, "load_memmap", load)
    with pytest.raises(TdgpuError, match=r"^0\.0% of the test images"):
        demo.run("cpu")
    assert [(load["non_blocking"], load["return_early"]) for load in loads] == [(True, True)] * 2


def test_it_repeats_and_leaves_the_global_random_state_alone(mapped):
    before = torch.get_rng_state()
    again = demo.run("cpu")
    assert again["accuracy"] == mapped["accuracy"]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_save_is_kept_where_it_was_asked_for(tmp_path):
    report = demo.run("cpu", tmp_path / "digits")
    assert report["save"] == str(tmp_path / "digits")
    assert str(tmp_path / "digits") in printed({**report, "save": str(tmp_path / "digits")}).replace("\n", "")
    kept = TensorDict.load_memmap(tmp_path / "digits")
    assert kept["train", "images"].shape == (1437, 8, 8)
    assert kept["test", "labels"].shape == (360,)


def test_a_temporary_save_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    demo.run("cpu")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_nothing_is_written_over(tmp_path, kind):
    target = tmp_path if kind == "directory" else tmp_path / "mine"
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InvalidArgument, match="new or an empty directory"):
        demo.run("cpu", target)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("mine", "mine")]


def test_a_device_that_cannot_be_used_is_named():
    # Types that torch has a name for, without a build that has both.
    absent = "xpu" if torch.version.xpu is None else "hpu"
    with pytest.raises(DeviceError, match=f"'{absent}' cannot be used here: .+"):
        demo.run(absent)


def test_meta_is_refused():
    with pytest.raises(InvalidArgument, match="'meta'"):
        demo.run("meta")


def test_a_save_without_a_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # empty: Path("") would be taken
    with pytest.raises(InvalidArgument, match="--save"):
        demo.run("cpu", "")
    assert list(tmp_path.iterdir()) == []


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TdgpuError, match=r"pip install 'tdgpu\[demo\]'"):
        demo.run("cpu")


def test_a_network_that_did_not_learn_is_an_error(monkeypatch):
    monkeypatch.setattr(demo, "EPOCHS", 0)
    with pytest.raises(TdgpuError, match="95% were expected"):
        demo.run("cpu")


def test_wrong_bytes_are_an_error(monkeypatch):
    real = demo.load_memmap

    def flip(*args, **kwargs):
        future = real(*args, **kwargs)
        future.result()["test", "labels"][7] += 1
        return future

    monkeypatch.setattr(demo, "load_memmap", flip)
    with pytest.raises(TdgpuError, match=r"not those that were saved.*test/labels"):
        demo.run("cpu")


def test_the_bar_shows_on_a_terminal_only(mapped):
    texts = []
    for terminal in (True, False):
        text = io.StringIO()
        demo.run("cpu", console=Console(file=text, force_terminal=terminal))
        texts.append(text.getvalue())
    assert "training" in texts[0]
    assert texts[1] == ""
