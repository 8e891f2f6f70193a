"""MemmapDataset by itself: what an index gives, which leaves are opened, how it pickles, and how it follows a save."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import tensordict
import torch
from compare import assert_same
from forked import in_process
from saves import BUILDERS, Point
from tensordict import TensorDict

import tdgpu
from tdgpu.data.dataset import MemmapDataset
from tdgpu.data.indexing import RowIndexError
from tdgpu.data.rows import Rows
from tdgpu.errors import (
    FormatError,
    InvalidArgumentType,
    LoadError,
    MissingLeafError,
    SaveNotFound,
)


def rows_of(*values: int) -> TensorDict:
    numbers = torch.tensor(values, dtype=torch.int64)
    return TensorDict({"a": numbers, "n": {"b": numbers.reshape(len(values), 1).repeat(1, 3)}}, [len(values)])


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Rows 0 to 9."""
    rows_of(*range(10)).memmap(tmp_path / "save")
    return tmp_path / "save"


@pytest.fixture
def dataset(save: Path) -> MemmapDataset:
    return MemmapDataset(save)


def numbers(batch: TensorDict) -> list[int]:
    """The numbers in the rows, which all leaves agree on."""
    values = batch["a"].tolist()
    assert batch["n", "b"].tolist() == [[value] * 3 for value in values]
    return values


# --- indices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 9, -1, -10, np.int64(3), np.uint8(3), torch.tensor(4), np.array(-2)])
def test_an_integer_gives_one_row(dataset, index):
    row = dataset[index]
    assert type(row) is TensorDict
    assert (row.batch_size, row["a"].shape, row["n", "b"].shape) == (torch.Size([]), (), (3,))
    assert row["a"].item() == list(range(10))[int(index)]


MASK = [i in (2, 5, 9) for i in range(10)]
BATCHES = {
    "slice": (slice(2, 5), [2, 3, 4]),
    "slice of all": (slice(None), list(range(10))),
    "slice past the end": (slice(8, 99), [8, 9]),
    "slice backwards": (slice(None, None, -3), [9, 6, 3, 0]),
    "empty slice": (slice(5, 2), []),
    "list": ([3, -1, 3], [3, 9, 3]),
    "empty list": ([], []),
    "list of numpy and torch": ([np.int32(1), torch.tensor(2), 3], [1, 2, 3]),
    "range": (range(8, 0, -4), [8, 4]),
    "empty range": (range(0), []),
    "range of one": (range(4, 5), [4]),
    "tensor": (torch.tensor([7, 0, -2]), [7, 0, 8]),
    "int16 tensor": (torch.tensor([7, 0], dtype=torch.int16), [7, 0]),
    "empty tensor": (torch.empty(0, dtype=torch.int64), []),
    "array": (np.array([7, 0, -2]), [7, 0, 8]),
    "uint64 array": (np.array([7, 0], dtype=np.uint64), [7, 0]),
    "uint8 array": (np.array([7, 0], dtype=np.uint8), [7, 0]),
    "strided array": (np.arange(10)[::-4], [9, 5, 1]),
    "list of bools": (MASK, [2, 5, 9]),
    "mask": (torch.tensor(MASK), [2, 5, 9]),
    "numpy mask": (np.array(MASK), [2, 5, 9]),
    "mask of nothing": (torch.zeros(10, dtype=torch.bool), []),
}


@pytest.mark.parametrize("name", BATCHES)
def test_several_rows(dataset, name):
    index, expected = BATCHES[name]
    batch = dataset[index]
    assert type(batch) is TensorDict
    assert batch.batch_size == torch.Size([len(expected)])
    assert batch["n", "b"].shape == (len(expected), 3)
    assert numbers(batch) == expected


@pytest.mark.parametrize("index", [10, -11, 2**70, [0, 10], [-11], [2**70], torch.tensor([3, 10]), range(8, 12),
                                   range(2**70, 2**70 + 1), np.array([2**63], dtype=np.uint64),
                                   np.array(2**64 - 1, dtype=np.uint64)])  # fmt: skip
def test_out_of_range_names_the_index_the_length_and_the_save(dataset, save, index):
    with pytest.raises(IndexError, match=r"row (10|-11|\d{19,}) is out of range: there are 10 rows") as error:
        dataset[index]
    assert isinstance(error.value, RowIndexError)
    assert error.value.save == str(save)
    assert numbers(dataset[:]) == list(range(10))


@pytest.mark.parametrize("mask", [[True], [], torch.zeros(11, dtype=torch.bool), np.ones(9, dtype=bool)])
def test_a_mask_of_another_length(dataset, mask):
    if not len(mask):
        mask = np.empty(0, dtype=bool)
    with pytest.raises(IndexError, match=f"mask of {len(mask)} does not fit the 10 rows"):
        dataset[mask]


@pytest.mark.parametrize("index", [
    None, ..., (1,), (0, 1), (slice(1), 2), "a", b"a", {1}, {1: 2}, 1.0, True, False, np.True_, torch.tensor(True),
    torch.tensor(1.0), [True, 2], [1, False], [1, 2.0], ["a"], [[1, 2]], [None], torch.tensor([1.0]), np.array([1.0]),
    np.array(["a"]), torch.tensor([[1, 2]]), np.zeros((10, 1), dtype=bool), torch.tensor([1, 0], dtype=torch.uint8),
    slice(0.5), slice("a"), object, [torch.tensor(1.5)], torch.tensor([1j]),
], ids=repr)  # fmt: skip
def test_what_is_no_index_is_a_type_error(dataset, index):
    with pytest.raises(TypeError) as error:
        dataset[index]
    assert isinstance(error.value, InvalidArgumentType)


def test_a_step_of_zero_is_refused(dataset):
    with pytest.raises(TypeError, match="zero"):
        dataset[::0]


def test_the_index_is_not_changed(dataset):
    tensor, array = torch.tensor([-1, 2]), np.array([-1, 2])
    assert numbers(dataset[tensor]) == numbers(dataset[array]) == [9, 2]
    assert tensor.tolist() == array.tolist() == [-1, 2]


def test_getitems_takes_integers_only(dataset):
    assert numbers(dataset.__getitems__([3, -1, 3])) == [3, 9, 3]
    assert numbers(dataset.__getitems__(torch.tensor([1, 2]))) == [1, 2]
    assert numbers(dataset.__getitems__((1, 2))) == [1, 2]
    assert numbers(dataset.__getitems__([])) == []
    for wrong in (MASK, torch.tensor(MASK), torch.tensor(3), [True], ["a"]):
        with pytest.raises(TypeError):
            dataset.__getitems__(wrong)
    with pytest.raises(IndexError, match="row 10 is out of range"):
        dataset.__getitems__([1, 10])


def test_iterating_gives_the_rows_and_ends(dataset):
    assert [row["a"].item() for row in dataset] == list(range(10))
    assert [row["a"].item() for row in reversed(dataset)] == list(range(9, -1, -1))


def test_no_batch_is_a_view(dataset, save):
    before = {file: file.read_bytes() for file in save.rglob("*.memmap")}
    for index in (3, slice(None), [1, 2], slice(2, 3), torch.arange(10)):
        first, second = dataset[index], dataset[index]
        first.apply_(lambda leaf: leaf.fill_(77))
        assert_same(dataset[index], second)
        assert not second.is_locked
        for leaf in second.values(True, True):
            assert type(leaf) is torch.Tensor
    assert before == {file: file.read_bytes() for file in save.rglob("*.memmap")}


# --- archives, keys, what is damaged ----------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "deflate"])
def test_archives(save, tmp_path, compression):
    archive = tmp_path / "save.tdz"
    tdgpu.pack_memmap(save, archive, compression=compression)
    dataset = MemmapDataset(archive)
    assert (len(dataset), dataset.refresh(), dataset.prefix) == (10, 0, archive)
    assert numbers(dataset[[5, 1]]) == [5, 1]
    assert numbers(pickle.loads(pickle.dumps(dataset))[-2:]) == [8, 9]


def test_a_compressed_archive_is_inflated_once_and_only_what_is_wanted(save, tmp_path, monkeypatch):
    archive = tmp_path / "save.tdz"
    tdgpu.pack_memmap(save, archive, compression="deflate")
    made = []
    original = Rows.__init__

    def counted(self, form, threads):
        made.append([leaf.key for leaf in form.leaves])
        original(self, form, threads)

    monkeypatch.setattr(Rows, "__init__", counted)
    dataset = MemmapDataset(archive, keys=["a"])
    assert made == []
    for i in range(10):
        assert dataset[i]["a"].item() == i
    assert made == [[("a",)]]


def test_a_leaf_of_another_number_of_rows_is_malformed(save):
    meta = save / "meta.json"
    meta.write_text(
        meta.read_text().replace('"shape":[10]', '"shape":[9]', 1).replace('"shape": [10]', '"shape": [9]', 1)
    )
    with pytest.raises(FormatError):
        MemmapDataset(save)


@pytest.mark.parametrize("keys", ["a", b"a", 1, [1], [()], [("a", 1)], [None], [["a"]]])
def test_what_is_no_list_of_keys(save, keys):
    with pytest.raises(InvalidArgumentType):
        MemmapDataset(save, keys=keys)


def test_a_subpath(save):
    assert MemmapDataset(save, subpath="n")[[4]]["b"].tolist() == [[4, 4, 4]]
    assert MemmapDataset(save, keys=["b"], subpath="n")[4]["b"].tolist() == [4, 4, 4]


# --- opening and pickling ---------------------------------------------------------------------------------------------


def test_a_missing_or_damaged_save_is_an_error_at_once(save, tmp_path):
    with pytest.raises(SaveNotFound, match="nowhere"):
        MemmapDataset(tmp_path / "nowhere")
    (save / "n" / "b.memmap").unlink()
    with pytest.raises(MissingLeafError, match=r"b\.memmap"):
        MemmapDataset(save)


def test_leaves_are_opened_with_the_first_row(save):
    def mapped() -> bool:
        return str(save) in Path("/proc/self/maps").read_text()

    dataset = MemmapDataset(save)
    assert (len(dataset), mapped()) == (10, False)
    row = dataset[0]
    assert mapped()
    del dataset
    assert not mapped()
    assert row["a"].item() == 0


def test_it_says_what_it_is(save):
    dataset = MemmapDataset(save, keys=["a", ("n", "b")])
    assert repr(dataset) == f"MemmapDataset('{save}', keys=['a', ('n', 'b')], 10 rows)"
    assert repr(MemmapDataset(save, subpath="n")) == f"MemmapDataset('{save}', subpath='n', 10 rows)"


def test_it_pickles_by_path(save):
    large = TensorDict({"x": torch.zeros(100, 1000)}, [100])
    large.memmap(save.parent / "large")
    dataset = MemmapDataset(save.parent / "large")
    dataset[:]
    data = pickle.dumps(dataset)
    assert len(data) < 2000
    assert pickle.dumps(pickle.loads(data)) == data
    assert pickle.loads(data)[:]["x"].shape == (100, 1000)
    assert copy.deepcopy(dataset)[5]["x"].shape == (1000,)


def test_the_working_directory_may_change(save, tmp_path, monkeypatch):
    monkeypatch.chdir(save)
    dataset = MemmapDataset(".")
    data = pickle.dumps(dataset)
    monkeypatch.chdir(tmp_path)
    assert numbers(dataset[:2]) == numbers(pickle.loads(data)[:2]) == [0, 1]


def test_a_copy_keeps_the_length_until_it_refreshes(save):
    dataset = MemmapDataset(save)
    data = pickle.dumps(dataset)
    tensordict.append_memmap(save, rows_of(10, 11))
    clone = pickle.loads(data)
    assert len(clone) == 10
    assert numbers(clone[-2:]) == [8, 9]
    with pytest.raises(IndexError, match="row 10 is out of range: there are 10 rows"):
        clone[10]
    again = pickle.loads(pickle.dumps(clone))
    assert (clone.refresh(), len(clone), clone.refresh()) == (2, 12, 0)
    assert numbers(clone[-2:]) == [10, 11]
    assert numbers(again[:]) == list(range(10))


def test_a_copy_of_another_save_is_an_error_that_names_it(save):
    data = pickle.dumps(MemmapDataset(save))

    def refused(match: str) -> None:
        clone = pickle.loads(data)
        assert len(clone) == 10
        for use in (lambda: clone[0], lambda: clone.__getitems__([0]), lambda: clone.refresh()):
            with pytest.raises(FormatError, match=match) as error:
                use()
            assert str(save) in str(error.value)

    original = save.parent / "original"
    save.rename(original)
    rows_of(*range(10, 20)).memmap(save)
    refused("its files are others")
    shutil.rmtree(save)
    rows_of(*range(5)).memmap(save)
    refused("it has 5 rows, and had 10")
    shutil.rmtree(save)
    TensorDict({"a": torch.zeros(10), "n": {"b": torch.zeros(10, 3)}}, [10]).memmap(save)
    refused("dtypes or shapes differ")
    shutil.rmtree(save)
    with pytest.raises(SaveNotFound):
        pickle.loads(data)[0]
    original.rename(save)
    assert numbers(pickle.loads(data)[:]) == list(range(10))


def test_a_copy_on_another_machine_is_told_by_its_structure(save, monkeypatch):
    data = pickle.dumps(MemmapDataset(save))
    save.rename(save.parent / "original")
    shutil.copytree(save.parent / "original", save)
    monkeypatch.setattr("tdgpu.data.dataset._machine", lambda: "another")
    assert numbers(pickle.loads(data)[:]) == list(range(10))


def test_a_new_process_learns_the_classes_from_the_pickle(tmp_path):
    Point(x=torch.arange(4.0), y=torch.zeros(4, 2), batch_size=[4]).memmap(tmp_path / "save")
    (tmp_path / "pickle").write_bytes(pickle.dumps(MemmapDataset(tmp_path / "save")))
    program = """
        import pickle, sys
        assert "saves" not in sys.modules
        print(pickle.load(open(sys.argv[1], 'rb'))[1:3].x.tolist())
    """
    assert in_process(program, tmp_path / "pickle") == "[1.0, 2.0]\n"


def test_a_forked_process_opens_the_leaves_for_itself(save):
    dataset = MemmapDataset(save)
    dataset[0]
    mine = dataset._see().opened()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            same = dataset._see().opened() is mine
            os.write(write, pickle.dumps((same, dataset[3]["a"].item())))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as results:
        assert pickle.loads(results.read()) == (False, 3)
    assert os.waitpid(child, 0)[1] == 0
    assert dataset._see().opened() is mine


def test_threads_share_a_dataset(save):
    dataset = MemmapDataset(save)
    wrong = []

    def read(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(50):
            index = generator.integers(0, 10, 7)
            if numbers(dataset[index]) != index.tolist():
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- a save that changes ----------------------------------------------------------------------------------------------


def test_refresh_shows_the_rows_that_were_added(save):
    dataset = MemmapDataset(save, keys=["a"])
    early = dataset[:]
    tensordict.append_memmap(save, rows_of(10, 11))
    assert (len(dataset), dataset[-1]["a"].item()) == (10, 9)
    assert (dataset.refresh(), len(dataset), dataset.batch_size) == (2, 12, torch.Size([12]))
    assert dataset[[11, 0]]["a"].tolist() == [11, 0]
    assert list(dataset[0].keys()) == ["a"]
    tdgpu.append_memmap(save, rows_of(12))
    assert (dataset.refresh(), dataset.refresh()) == (1, 0)
    assert dataset[:]["a"].tolist() == list(range(13))
    assert early["a"].tolist() == list(range(10))


def test_rows_that_are_appended_while_it_is_iterated(save):
    dataset = MemmapDataset(save)
    seen = []
    for row in dataset:
        seen.append(row["a"].item())
        if len(seen) in (3, 7):
            tdgpu.append_memmap(save, rows_of(9 + len(seen)))
            assert dataset.refresh() == 1
    assert seen == list(range(10))
    assert len(list(dataset)) == 12


def test_another_save_at_its_path(save):
    opened, unopened = MemmapDataset(save), MemmapDataset(save)
    assert numbers(opened[:2]) == [0, 1]
    save.rename(save.parent / "original")
    rows_of(*range(20, 32)).memmap(save)
    # What is mapped is still the save that it was made of.
    assert numbers(opened[:2]) == [0, 1]
    for dataset in (opened, unopened):
        with pytest.raises(FormatError, match="replaced") as error:
            dataset.refresh()
        assert error.value.save == str(save)
        assert len(dataset) == 10
    with pytest.raises(LoadError, match="another one has taken its place") as refused:
        unopened[0]
    assert refused.value.save == str(save)
    assert numbers(opened[-1:]) == [9]


def test_a_leaf_that_became_shorter_before_it_was_opened(save):
    dataset = MemmapDataset(save)
    os.truncate(save / "n" / "b.memmap", 8)
    with pytest.raises(LoadError, match=r"shorter.*wanted 240 bytes, found 8") as error:
        dataset[0]
    assert (error.value.key, error.value.file) == (("n", "b"), str(save / "n" / "b.memmap"))
    assert (save / "n" / "b.memmap").stat().st_size == 8


def test_pickled_contents_are_refused_when_asked(tmp_path):
    BUILDERS["tensorclass_pickle"]().memmap(tmp_path)
    with pytest.raises(tdgpu.errors.PickleRefused):
        MemmapDataset(tmp_path, allow_pickle=False)
    with pytest.warns(FutureWarning, match="pickled"):
        MemmapDataset(tmp_path)


def test_a_batch_can_be_saved_by_torch(save):
    """Which refuses tensors of several dtypes in one memory."""
    batch = MemmapDataset(save)[[3, 1]]
    file = io.BytesIO()
    torch.save(batch.to_dict(), file)
    assert len(file.getvalue()) < 10_000
    storages = {leaf.untyped_storage().data_ptr() for leaf in batch.values(True, True)}
    assert len(storages) == len(list(batch.keys(True, True)))
