"""The shuffle in O(1) memory: a bijection, the same everywhere, and random by the statistics below.

Each statistic gives numbers that are about normal, with mean 0 and deviation 1, for orders that are random. Seeds are
fixed, so they do not vary between runs; a deviation of 5 or more fails. That they find fault is shown on the order as
saved and on networks of two and four rounds.
"""

from __future__ import annotations

import math
import pickle
import random
from collections import Counter
from collections.abc import Callable
from itertools import chain, permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from tdgpu.data import randomness
from tdgpu.data.orders import Permutation, PermutationSampler, WeightedSampler
from tdgpu.errors import InvalidArgument, InvalidArgumentType

LIMIT = 5
MOST = 2**63 - 1

# Where the shuffle ends and the network begins, powers of two, and their neighbours.
NETWORK_SIZES = (4097, 4098, 5000, 8191, 8192, 8193, 16_385, 65_535, 65_537, 2**18, 500_009)


# --- an independent implementation ------------------------------------------------------------------------------------


def philox_words(key: np.ndarray, place: int, count: int) -> list[int]:
    """The first words of a place, by numpy's generator (which counts up before it makes the first)."""
    words: list[int] = []
    for subplace in range(-(-count // 4)):
        counter = (place + (subplace << 64) - 1) % 2**256
        generator = np.random.Philox(
            key=key, counter=np.array([(counter >> 64 * i) % 2**64 for i in range(4)], np.uint64)
        )
        words += generator.random_raw(4).tolist()
    return words[:count]


def network(n: int, positions: np.ndarray, key: np.ndarray, rounds: int = 8) -> np.ndarray:
    """What csrc/permutation.h describes, from the description."""
    low_bits = max(1, (n - 1).bit_length() // 2)
    highs = ((n - 1) >> low_bits) + 1
    keys = philox_words(key, 0, 8)

    def mixed(part: int, k: int) -> int:
        t = (part ^ k) * 0xBF58476D1CE4E5B9 % 2**64
        return (t ^ t >> 31) * 0x94D049BB133111EB % 2**64

    def once(x: int) -> int:
        high, low = x >> low_bits, x % 2**low_bits
        for i in range(0, rounds, 2):
            high = (high + (mixed(low, keys[i]) * highs >> 64)) % highs
            low ^= mixed(high, keys[i + 1]) >> 64 - low_bits
        return high << low_bits | low

    rows = []
    for x in positions.tolist():
        x = once(x)
        while x >= n:
            x = once(x)
        rows.append(x)
    return np.array(rows, np.int64)


def shuffle(n: int, key: np.ndarray) -> list[int]:
    rows, words = list(range(n)), iter(philox_words(key, 1, 2 * n + 10))
    for i in range(n, 1, -1):
        product = next(words) * i
        while product % 2**64 < 2**64 % i:
            product = next(words) * i
        j = product >> 64
        rows[i - 1], rows[j] = rows[j], rows[i - 1]
    return rows


def key_array(seed: int, epoch: int = 0) -> np.ndarray:
    return randomness.key_of("permutation", seed, epoch)


def test_the_random_words_are_numpys_philox():
    for seed, place, subplace in ((0, 0, 0), (1, 5, 0), (-3, MOST, 2), (2**70, 2**64 - 1, 2**64 - 1)):
        key = randomness.key_of("words", seed, 0)
        expected = philox_words(key, place + (subplace << 64), 4)
        assert randomness.words(key, place, subplace).tolist() == expected


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000, 4095, 4096])
def test_short_orders_are_the_shuffle_as_described(n):
    for seed in range(3):
        assert list(Permutation(n, seed)) == shuffle(n, key_array(seed))


@pytest.mark.parametrize("n", [4097, 4100, 65_537, 10**6, 2**31, 2**32 + 1, 10**15, MOST])
def test_long_orders_are_the_network_as_described(n):
    for seed, epoch in ((0, 0), (7, 1), (-1, 10**30)):
        first, stride = n // 3, max(1, n // 5000)
        positions = first + stride * np.arange(300)
        expected = network(n, positions, key_array(seed, epoch))
        assert Permutation(n, seed, epoch).take(first, 300, stride).tolist() == expected.tolist()


def test_rows_stay_those_that_were_published():
    """As the implementations above computed them once: an order must not change with a release."""
    assert list(Permutation(10, seed=0)) == [5, 1, 2, 9, 6, 4, 7, 3, 8, 0]
    assert Permutation(5000, seed=1, epoch=2).take(0, 5).tolist() == [4278, 768, 4337, 1940, 617]
    rows = Permutation(10**12, seed=-1, epoch=3).take(10**11, 4, stride=7).tolist()
    assert rows == [520760891225, 152059469945, 888675260897, 477338878362]
    rows = Permutation(MOST, seed=2**100).take(MOST - 3, 3).tolist()
    assert rows == [6998490410537196076, 8255946173510047323, 4737579870082372279]


# --- a bijection ------------------------------------------------------------------------------------------------------


def test_every_row_once_up_to_3000_rows():
    for n in range(1, 3001):
        assert np.array_equal(np.sort(Permutation(n, seed=n).take(0, n)), np.arange(n)), n


@pytest.mark.parametrize("n", NETWORK_SIZES)
def test_every_row_once(n):
    for seed in range(3):
        assert np.array_equal(np.bincount(Permutation(n, seed).take(0, n), minlength=n), np.ones(n)), (n, seed)


def test_every_row_once_in_blocks():
    n, order, seen = 10**7 + 19, Permutation(10**7 + 19, seed=4), np.zeros(10**7 + 19, bool)
    for first in range(0, n, 10**6):
        seen[order.take(first, min(10**6, n - first))] = True
    assert seen.all()


@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1, 2**62, MOST])
def test_large_orders_have_distinct_rows_within_their_ends(n):
    order = Permutation(n, seed=9)
    samples = [
        order.take(0, 10**5),
        order.take(n - 10**5, 10**5),
        order.take(2 * 10**5, 10**5, stride=(n - 3) // 10**6),
    ]
    rows = np.concatenate(samples)
    assert rows.min() >= 0
    assert rows.max() < n
    assert len(np.unique(rows)) == len(rows)
    assert len(order) == n
    assert order[-1] == order[n - 1] == samples[1][-1]


@pytest.mark.parametrize("n", [1, 6, 4096, 4097, 20_000])
def test_any_way_to_ask_gives_the_same_rows(n):
    order = Permutation(n, seed=11, epoch=5)
    rows = order.take(0, n)
    assert rows.dtype == np.int64
    assert list(order) == rows.tolist()
    assert [order[i] for i in range(0, n, 1 + n // 50)] == rows[:: 1 + n // 50].tolist()
    assert [order[-1 - i] for i in range(min(n, 5))] == rows[::-1][:5].tolist()
    for stride in (1, 2, 3, 7):
        parts = [order.take(rank, len(range(rank, n, stride)), stride) for rank in range(min(stride, n))]
        assert all(np.array_equal(part, rows[rank::stride]) for rank, part in enumerate(parts))
    assert order.take(n, 0).shape == (0,)
    assert np.array_equal(
        pickle.loads(pickle.dumps(PermutationSampler(n, 11))).take(0, n), Permutation(n, 11).take(0, n)
    )


def test_more_rows_than_one_call_of_the_core_takes():
    order, count = Permutation(10**10, seed=2), randomness.SLICE + 77
    rows = order.take(5, count, stride=3)
    ends = slice(randomness.SLICE - 2, randomness.SLICE + 3)
    assert rows[ends].tolist() == [order[5 + 3 * i] for i in range(ends.start, ends.stop)]


# --- statistics -------------------------------------------------------------------------------------------------------

Take = Callable[[int, int, int], np.ndarray]
Make = Callable[[int, int, int], Take]  # of n, seed, epoch


def make_permutation(n: int, seed: int, epoch: int) -> Take:
    return Permutation(n, seed, epoch).take


def make_two_rounds(n: int, seed: int, epoch: int) -> Take:
    key = key_array(seed, epoch)
    return lambda first, count, stride: network(n, first + stride * np.arange(count), key, rounds=2)


def make_four_rounds(n: int, seed: int, epoch: int) -> Take:
    key = key_array(seed, epoch)
    return lambda first, count, stride: network(n, first + stride * np.arange(count), key, rounds=4)


def make_identity(n: int, seed: int, epoch: int) -> Take:
    return lambda first, count, stride: first + stride * np.arange(count)


def chi_square(counts: np.ndarray, share: np.ndarray | float, freedom: int) -> float:
    """How far counts are from the shares that are expected, in deviations of the chi-square distribution."""
    expected = share * counts.sum()
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def evenness(numbers: np.ndarray, n: int, bins: int) -> float:
    """Whether numbers are spread evenly over [0, n)."""
    width = -(-n // min(n, bins))
    bins = -(-n // width)
    share = np.array([(min(n, (i + 1) * width) - i * width) / n for i in range(bins)])
    return chi_square(np.bincount(numbers // width, minlength=bins), share, bins - 1)


def of_positions(make: Make, n: int, times: int = 2000) -> list[float]:
    """Whether each of some positions gets all rows, over seeds and over epochs."""
    return [
        evenness(np.array([make(n, *key)(position, 1, 1)[0] for key in keys]), n, 40)
        for position in (0, 1, n // 2, n - 1)
        for keys in ([(seed, 5) for seed in range(times)], [(5, epoch) for epoch in range(times)])
    ]


def of_pairs(make: Make, n: int, count: int = 2**16) -> list[float]:
    """Whether positions some way apart have rows that know nothing of each other: pairs, differences, correlation."""
    take, count = make(n, 1, 2), min(n, count)
    freedom = 225 if count == n else 255  # where all rows are there, each takes its place on both sides
    rows, found = take(0, count, 1), []
    width = -(-n // 16)
    for lag in (1, 2, 3, *(2**i for i in range(2, (n // 2).bit_length()))):
        size = min(count, n - lag)
        a, b = rows[:size], take(lag, size, 1)
        found.append(chi_square(np.bincount(a // width * 16 + b // width, minlength=256), 1 / 256, freedom))
        found.append(evenness((b - a) % n, n, 64))
        found.append(float(np.corrcoef(a, b)[0, 1]) * math.sqrt(size))
    found.append(float(np.corrcoef(np.arange(count), rows)[0, 1]) * math.sqrt(count))
    return found


def of_bits(make: Make, bits: int) -> list[float]:
    """Whether any bit of the position changes any bit of the row in half of the cases."""
    positions, rows, found = np.arange(2**bits), make(2**bits, 3, 3)(0, 2**bits, 1), []
    for bit in 1 << np.arange(bits):
        unset = positions[positions & bit == 0]
        changes = rows[unset] ^ rows[unset | bit]
        for other in range(bits):
            flips = np.count_nonzero(changes >> other & 1)
            found.append((flips - len(unset) / 2) / math.sqrt(len(unset) / 4))
    return found


def of_agreement(make: Make, n: int, times: int = 500) -> list[float]:
    """Whether two orders have as many rows at the same position as two random ones: Poisson's distribution, mean 1."""
    share = np.array([math.exp(-1) / math.factorial(k) for k in range(4)])
    share = np.append(share, 1 - share.sum())
    found = []
    for one, other in (((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, 1), (1, 0)), ((0, 0), (2**64, 0)), ((0, 0), (0, -1))):
        agreeing = []
        for i in range(times):
            a, b = (make(n, seed + 3 * i, epoch + 5 * i)(0, n, 1) for seed, epoch in (one, other))
            agreeing.append(min(4, int(np.count_nonzero(a == b))))
        found.append(chi_square(np.bincount(agreeing, minlength=5), share, 4))
    return found


def assert_random(found: list[float]) -> None:
    assert all(abs(deviation) < LIMIT for deviation in found), [round(deviation, 1) for deviation in found]


@pytest.mark.parametrize("n", [2, 7, 1000, 4096, 4097, 6000, 2**40 + 3, MOST])
def test_a_position_gets_every_row(n):
    assert_random(of_positions(make_permutation, n))


@pytest.mark.parametrize("n", [4096, 4097, 8192, 2**16, 2**16 + 1, 2**31, 2**40 + 3, MOST])
def test_rows_at_positions_some_way_apart_know_nothing_of_each_other(n):
    assert_random(of_pairs(make_permutation, n))


@pytest.mark.parametrize("bits", [12, 13, 16, 17])
def test_every_bit_of_a_position_changes_every_bit_of_the_row(bits):
    assert_random(of_bits(make_permutation, bits))


@pytest.mark.parametrize("n", [200, 4097, 6000])
def test_seeds_and_epochs_agree_no_more_than_chance(n):
    assert_random(of_agreement(make_permutation, n))


@pytest.mark.parametrize("n", [3, 4, 5])
def test_all_orders_of_a_few_rows_are_as_likely(n):
    for keys in ([(seed, 0) for seed in range(12_000)], [(0, epoch) for epoch in range(12_000)]):
        counts = Counter(tuple(Permutation(n, seed, epoch)) for seed, epoch in keys)
        found = np.array([counts[order] for order in permutations(range(n))])
        assert found.sum() == 12_000
        assert_random([chi_square(found, 1 / len(found), len(found) - 1)])


def test_half_of_the_shuffles_are_odd():
    for n in (50, 1000):
        odd = 0
        for seed in range(400):
            rows, cycles, seen = Permutation(n, seed).take(0, n).tolist(), 0, bytearray(n)
            for start in range(n):
                at = start
                cycles += not seen[start]
                while not seen[at]:
                    seen[at] = 1
                    at = rows[at]
            odd += (n - cycles) % 2
        assert_random([(odd - 200) / 10])


@pytest.mark.parametrize(
    ("statistic", "weak"),
    [
        (of_positions, make_identity),
        (of_pairs, make_identity),
        (of_agreement, make_identity),
        (of_pairs, make_two_rounds),
        (of_pairs, make_four_rounds),
    ],
)
def test_the_statistics_find_fault(statistic, weak):
    with pytest.raises(AssertionError):
        assert_random(statistic(weak, 8192))


@pytest.mark.parametrize("weak", [make_identity, make_two_rounds])
def test_the_statistic_of_bits_finds_fault(weak):
    assert max(map(abs, of_bits(weak, 13))) > 10 * LIMIT


# --- the sampler ------------------------------------------------------------------------------------------------------


def test_the_sampler_gives_the_permutation_of_its_epoch():
    sampler = PermutationSampler(range(10_000), seed=7)
    assert len(sampler) == 10_000
    for epoch in (0, 3, -1):
        sampler.set_epoch(epoch)
        taken = sampler.take(5, 4, stride=10).tolist()
        rows = list(sampler)
        assert all(type(row) is int for row in rows)
        assert rows == list(Permutation(10_000, 7, epoch)) and taken == rows[5:45:10]


def test_epochs_of_a_sampler_count_by_themselves():
    """As those of RandomSampler do, from the one that set_epoch says on; an iteration counts as it begins."""
    sampler = PermutationSampler(100, seed=7)
    loader: Any = DataLoader(range(100), batch_size=8, sampler=sampler)  # type: ignore[arg-type]
    for epoch in range(3):
        assert [row for batch in loader for row in batch.tolist()] == list(Permutation(100, 7, epoch))
    assert sampler.epoch == 3
    sampler.set_epoch(8)
    first, second = iter(sampler), iter(sampler)
    sampler.set_epoch(8)
    third = iter(sampler)
    for rows, epoch in ((second, 9), (first, 8), (third, 8), (sampler, 9), (sampler, 10)):
        assert list(rows) == list(Permutation(100, 7, epoch))


@pytest.mark.parametrize("n", [10, 4096, 10_000])
@pytest.mark.parametrize("given", [0, 1, 7, 4095, 4096, 4097, 9_999, 10_000])
def test_a_sampler_resumes_where_the_other_was(n, given):
    given = min(given, n)
    first = PermutationSampler(n, seed=3)
    first.set_epoch(2)
    rows = iter(first)
    begun = [next(rows) for _ in range(given)]
    resumed = PermutationSampler(n, seed=99)
    resumed.load_state_dict(first.state_dict())
    assert begun + list(resumed) == begun + list(rows) == list(Permutation(n, 3, 2))
    assert list(resumed) == list(Permutation(n, 3, 3))  # whole again


def test_an_epoch_that_is_over_is_neither_repeated_nor_skipped():
    sampler = PermutationSampler(10)
    rows = iter(sampler)
    assert sorted(next(rows) for _ in range(10)) == list(range(10))
    for with_set_epoch in (True, False):
        resumed = PermutationSampler(10)
        resumed.load_state_dict(sampler.state_dict())
        if with_set_epoch:
            resumed.set_epoch(0)  # as a loop does that begins with the epoch that was saved
        assert list(resumed) == []
        assert list(resumed) == list(Permutation(10, 0, 1))
    assert next(rows, None) is None  # only now it is over
    assert sampler.state_dict() == {"seed": 0, "epoch": 1, "position": 0, "rows": 10}
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == list(Permutation(10, 0, 1))


def test_a_dataloader_resumes_after_whole_batches():
    sampler = PermutationSampler(range(103), seed=1)
    batches = iter(DataLoader(range(103), batch_size=10, sampler=sampler))  # type: ignore[arg-type]
    begun = [next(batches).tolist() for _ in range(4)]
    resumed = PermutationSampler(range(103), seed=1)
    resumed.load_state_dict(sampler.state_dict())
    assert [*chain(*begun), *resumed] == list(Permutation(103, 1))
    assert [len(batch) for batch in BatchSampler(resumed, 10, drop_last=False)] == [10] * 10 + [3]


def test_an_iteration_that_was_left_does_not_move_the_state():
    sampler = PermutationSampler(100)
    left = iter(sampler)
    next(left)
    latest = iter(sampler)
    next(latest), next(latest), next(left)
    assert sampler.state_dict()["position"] == 2
    assert sampler.state_dict() == {"seed": 0, "epoch": 1, "position": 2, "rows": 100}
    sampler.set_epoch(2)
    assert next(latest) == Permutation(100, 0, 1)[2]  # of the epoch in which it began
    assert sampler.state_dict() == {"seed": 0, "epoch": 2, "position": 0, "rows": 100}
    assert list(left) == list(Permutation(100, 0))[2:] and sampler.state_dict()["epoch"] == 2


def test_a_dataset_may_grow_between_epochs():
    dataset = [0] * 10
    sampler = PermutationSampler(dataset)
    rows = iter(sampler)
    next(rows)
    dataset += [0] * 10
    assert len(list(rows)) == 9
    assert sorted(sampler) == list(range(20))
    with pytest.raises(InvalidArgument, match="its rows is 20, and here 10"):
        PermutationSampler(10).load_state_dict(sampler.state_dict())


def test_no_rows_are_an_empty_order():
    assert list(PermutationSampler([])) == []
    assert len(Permutation(0, 0)) == 0
    with pytest.raises(IndexError, match="position 0 of a permutation of 0 rows"):
        Permutation(0, 0)[0]


def test_seeds_of_any_size_and_sign_are_different():
    seeds = (0, 1, -1, 2**63, 2**64, 2**64 + 1, -(2**64), 10**5000)
    orders = {tuple(Permutation(100, seed)) for seed in seeds} | {
        tuple(Permutation(100, 0, seed)) for seed in seeds[1:]
    }
    assert len(orders) == 2 * len(seeds) - 1
    assert list(Permutation(100, np.int64(5))) == list(Permutation(100, torch.tensor(5))) == list(Permutation(100, 5))  # type: ignore[arg-type]


def test_global_generators_are_left_alone():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    numpy_state = np.random.get_state()[1].tolist()  # type: ignore[index]
    before = (random.getstate(), numpy_state, torch.get_rng_state().tolist())
    orders = [list(PermutationSampler(5000)), list(WeightedSampler([1.0, 2.0], 9))]
    orders.append(list(WeightedSampler([1.0, 2.0], 2, replacement=False)))
    numpy_state = np.random.get_state()[1].tolist()  # type: ignore[index]
    assert (random.getstate(), numpy_state, torch.get_rng_state().tolist()) == before
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    assert [list(PermutationSampler(5000)), list(WeightedSampler([1.0, 2.0], 9))] == orders[:2]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_positions_beyond_the_ends_are_refused():
    for n in (10, 5000, MOST):
        order = Permutation(n, 0)
        for first, count, stride in ((n, 1, 1), (0, n + 1, 1), (n - 2, 2, 2), (-1, 1, 1), (0, -1, 1), (0, 1, 0)):
            with pytest.raises(InvalidArgument):
                order.take(first, count, stride)
        with pytest.raises(IndexError, match=f"position {n} of a permutation of {n} rows"):
            order[n]
        with pytest.raises(IndexError, match=f"position {-n - 1} of"):
            order[-n - 1]
        with pytest.raises(TypeError):
            order["0"]  # type: ignore[index]


def test_bad_arguments_are_refused():
    for n in (-1, 2**63):
        with pytest.raises(InvalidArgument, match="from 0 to"):
            Permutation(n, 0)
        with pytest.raises(InvalidArgument, match="from 0 to"):
            PermutationSampler(n)
    for call in (lambda: Permutation(10, 0.5), lambda: Permutation(1.0, 0), lambda: PermutationSampler(None)):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentType, match="must be an integer"):
            call()


def test_states_that_are_not_its_own_are_refused():
    sampler = PermutationSampler(10)
    state = sampler.state_dict()
    bad: Any
    for bad in ({}, None, [], {**state, "more": 1}, WeightedSampler([1.0], 10).state_dict()):
        with pytest.raises(InvalidArgument, match="no state of a PermutationSampler"):
            sampler.load_state_dict(bad)
    for position in (-1, 11):
        with pytest.raises(InvalidArgument, match=f"position is {position}, of 10"):
            sampler.load_state_dict({**state, "position": position})
    assert sampler.state_dict() == state
