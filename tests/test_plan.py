"""Plans: every byte of every leaf is read once, to where its tensor is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tdgpu.layout.tree import Extent, Leaf
from tdgpu.transfer.plan import ALIGNMENT, EVENTS_WANTED, OWN_STORAGE, chunk_size, make_plan

KiB, MiB = 1 << 10, 1 << 20
CPU = torch.device("cpu")  # plans need addresses only


def leaf(name: str, n: int, dtype: torch.dtype = torch.uint8, offset: int = 0) -> Leaf:
    size = n * dtype.itemsize
    return Leaf((name,), (n,), dtype, Extent(f"/{name}", offset, size), None, size)


def offset_of(one: Leaf) -> int:
    assert one.extent is not None
    return one.extent.offset


def plan(leaves, early=False, ring_bytes=16 * MiB, chunk_bytes=MiB, direct=False):
    return make_plan(leaves, CPU, chunk_bytes=chunk_bytes, ring_bytes=ring_bytes, threads=2, early=early, direct=direct)


def carry_out(made, contents: dict[str, bytes]) -> None:
    """Does with plain Python what the core does."""
    for chunk, (storage, offset) in zip(made.chunks, made.targets, strict=True):
        assert storage.data_ptr() + offset == chunk["destination"]
        slot = np.zeros(chunk["bytes"], np.uint8)
        for piece in made.pieces[chunk["first_piece"] : chunk["first_piece"] + chunk["piece_count"]]:
            data = contents[made.files[piece["file"]][0]][int(piece["offset"]) :][: int(piece["bytes"])]
            at = int(piece["chunk_offset"])
            assert len(data) == piece["bytes"] and not slot[at : at + len(data)].any()
            slot[at : at + len(data)] = np.frombuffer(data, np.uint8)
        whole = torch.empty(0, dtype=torch.uint8).set_(storage, offset, (len(slot),), (1,))
        whole.copy_(torch.from_numpy(slot))


@pytest.mark.parametrize("seed", range(6))
def test_every_byte_goes_to_its_tensor(seed):
    random = np.random.default_rng(seed)
    dtypes = [torch.uint8, torch.float16, torch.float32, torch.int64, torch.complex128, torch.bool]
    sizes = [1, 3, 100, 5000, 70_000, 300_000]
    leaves = [
        leaf(f"l{i}", int(random.choice(sizes)), dtypes[int(random.integers(len(dtypes)))], int(random.integers(9)))
        for i in range(60)
    ]
    contents = {
        f"/{one.key[0]}": bytes(offset_of(one)) + random.integers(1, 2, one.nbytes, np.uint8).tobytes()
        for one in leaves
    }
    made = plan(leaves, early=bool(seed % 2), chunk_bytes=int(random.choice([4096, 64 * KiB, MiB])))
    carry_out(made, contents)
    tensors = made.tensors()
    for one in leaves:
        tensor = tensors[one]
        assert tensor.shape == one.shape and tensor.dtype == one.dtype and tensor.data_ptr() % tensor.itemsize == 0
        assert bytes(tensor.view(torch.uint8).tolist()) == contents[f"/{one.key[0]}"][offset_of(one) :]
    assert made.nbytes == sum(one.nbytes for one in leaves)


def test_small_leaves_are_packed_and_large_ones_are_not():
    leaves = [leaf(f"s{i}", 1000) for i in range(500)] + [leaf("big", OWN_STORAGE)]
    made = plan(leaves)
    assert len(made.chunks) == 2
    tensors = made.tensors()
    storages = {tensors[one].untyped_storage().data_ptr() for one in leaves[:-1]}
    assert len(storages) == 1 and tensors[leaves[-1]].untyped_storage().nbytes() == OWN_STORAGE
    offsets = [tensors[one].storage_offset() for one in leaves[:-1]]
    assert all(offset % ALIGNMENT == 0 for offset in offsets) and sorted(set(offsets)) == offsets


@pytest.mark.parametrize("total", [1, MiB, 100 * MiB, 1 << 30, 1 << 36])
@pytest.mark.parametrize("ring", [64 * KiB, 100_000, 16 * MiB])
def test_chunks_fit_the_ring(total, ring):
    size = chunk_size(total, MiB, ring)
    assert size % 4096 == 0 and 4096 <= size <= ring // 4
    if total <= 1 << 30 and ring == 16 * MiB:
        assert total / size <= 400  # within what a stream's queue holds


def test_chunks_are_aligned_for_direct_reads():
    made = plan([leaf("a", 5 * MiB + 1)], direct=True)
    assert made.pieces["direct"].all()
    assert not (made.pieces["chunk_offset"] % 4096).any() and not (made.pieces["offset"] % 4096).any()


def test_events_are_spread_by_bytes():
    made = plan([leaf(f"l{i}", MiB) for i in range(200)], early=True)
    numbers = made.chunks["event"][made.chunks["event"] > 0]
    assert list(numbers) == list(range(1, made.events + 1)) and EVENTS_WANTED // 2 <= made.events <= EVENTS_WANTED
    assert made.chunks["event"][-1] == 0  # the end has its own
    assert plan([leaf("a", MiB)], early=True).events == 0 and plan([leaf("a", 9 * MiB)]).events == 0


def test_a_piece_names_its_leaf():
    leaves = [leaf("a", 10), leaf("b", 3 * MiB), leaf("c", 20)]
    made = plan(leaves)
    named = {made.leaf_of(piece).key[0]: made.files[made.pieces["file"][piece]][0] for piece in range(len(made.pieces))}
    assert named == {"a": "/a", "b": "/b", "c": "/c"}
