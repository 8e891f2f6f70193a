"""Rows drawn by weight: exact probabilities for any number of rows, and draws that follow them.

Statistics are those of ``test_orders``: fixed seeds, and deviations of 5 or more fail.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from test_orders import LIMIT, assert_random, chi_square, philox_words
from torch.utils.data import DataLoader

from tdgpu.data import randomness
from tdgpu.data.orders import WeightedSampler
from tdgpu.errors import InvalidArgument, InvalidArgumentType

EDGES: list[list[float]] = [
    [1.0],
    [5e-324],
    [1.7e308, 1.7e308, 1.7e308],
    [0.0, 0.0, 3.0, 0.0],
    [1e-300, 1.0, 1e300],
    [1.0] * 64,
    [1.0] * 65,
    [0.1, 0.2, 0.3, 0.4],
    [2.0**-i for i in range(200)],
    [2.0**i for i in range(-1074, 1023)],
]


def many(n: int, seed: int = 0) -> np.ndarray:
    """Weights of very different sizes, a quarter of them zero."""
    generator = np.random.default_rng(seed)
    return np.where(generator.random(n) < 0.25, 0, np.exp(generator.normal(0, 4, n)))


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [*EDGES, many(1000).tolist(), many(4097, 1).tolist()], ids=range(12))
def test_probabilities_are_exact_within_what_is_documented(weights):
    array = np.array(weights)
    assert randomness.check_weights(array) == np.count_nonzero(array)
    table = randomness.make_table(array).tolist()
    found = [0] * len(weights)  # of len(weights) * 2**64
    for row, (threshold, alias) in enumerate(table):
        found[row] += threshold
        found[alias] += 2**64 - threshold
    total = sum(map(Fraction, weights))
    for row, weight in enumerate(weights):
        assert abs(Fraction(found[row], len(weights) << 64) - Fraction(weight) / total) < Fraction(1, 2**62), row
        assert weight or not found[row]


def test_draws_are_of_the_columns_that_their_words_name():
    weights = many(3000)
    table, key = randomness.make_table(weights), randomness.key_of("draws", 5, 7)
    expected = []
    for position in range(200):
        column, coin = philox_words(key, position, 2)
        column = column * len(weights) >> 64
        expected.append(column if coin < int(table[column, 0]) else int(table[column, 1]))
    sampler = WeightedSampler(weights, 200, seed=5)
    sampler.set_epoch(7)
    assert list(sampler) == expected


def exponential(key: np.ndarray, row: int) -> float:
    """By von Neumann's method, from the words of the row."""
    words = iter(philox_words(key, row, 400))
    for whole in range(50):
        run = [next(words)]
        while (word := next(words)) < run[-1]:
            run.append(word)
        if len(run) % 2:
            return whole + (float(run[0]) + 0.5) * 2.0**-64
    raise AssertionError("50 or more: once in 10**21")


def test_ranks_are_exponential_numbers_as_described():
    weights, key = many(500), randomness.key_of("ranks", 3, 1)
    expected = [exponential(key, row) / weight if weight else math.inf for row, weight in enumerate(weights.tolist())]
    assert randomness.ranks(weights, key).tolist() == expected
    sampler = WeightedSampler(weights, 200, replacement=False, seed=3)
    sampler.set_epoch(1)
    assert list(sampler) == sorted(range(500), key=expected.__getitem__)[:200]


def test_draws_stay_those_that_were_published():
    """As the words above gave them once: draws must not change with a release."""
    weights = [0.0, 1.0, 3.0, 0.5, 7.25]
    assert list(WeightedSampler(weights, 12, seed=1)) == [4, 2, 1, 4, 4, 2, 4, 2, 4, 1, 4, 2]
    assert list(WeightedSampler([*weights, 2.0, 2.0, 2.0], 7, replacement=False, seed=1)) == [1, 2, 3, 6, 4, 7, 5]


# --- with replacement -------------------------------------------------------------------------------------------------


def deviation(rows: np.ndarray, weights: np.ndarray) -> float:
    drawable = weights > 0
    counts = np.bincount(rows, minlength=len(weights))
    assert not counts[~drawable].any(), "a weight of zero was drawn"
    return chi_square(counts[drawable], weights[drawable] / weights.sum(), int(drawable.sum()) - 1)


@pytest.mark.parametrize("n", [2, 5, 1000])
def test_draws_follow_the_weights(n):
    weights = np.random.default_rng(n).random(n) + 0.01
    weights[n // 2] = 0 if n > 2 else 0.5
    found = []
    for epoch in range(3):
        sampler = WeightedSampler(weights, 300_000, seed=1)
        sampler.set_epoch(epoch)
        rows = sampler.take(0, 300_000)
        found.append(deviation(rows, weights))
        # Draws know nothing of those before them.
        found.append(float(np.corrcoef(rows[:-1], rows[1:])[0, 1]) * math.sqrt(len(rows)))
    over_epochs = []
    for epoch in range(20_000):
        sampler.set_epoch(epoch)
        over_epochs.append(sampler.take(8, 1)[0])
    assert_random([*found, deviation(np.array(over_epochs), weights)])


def test_the_statistic_finds_fault():
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    assert deviation(WeightedSampler([1.03, 2.0, 3.0, 4.0], 300_000).take(0, 300_000), weights) > LIMIT


@pytest.mark.parametrize("replacement", [True, False])
def test_rows_beyond_2_to_the_24_are_drawn_by_their_weights(replacement):
    """torch.multinomial, on which torch's WeightedRandomSampler depends, refuses so many."""
    n, last = 2**24 + 100, np.arange(1.0, 101)
    weights = torch.ones(n, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        torch.multinomial(weights, 1)
    weights[-100:] = torch.from_numpy(last) * (2**24 / last.sum())
    # Without replacement, the first draws are all but independent: the last rows are half of the weight.
    count = 200_000 if replacement else 20
    sampler = WeightedSampler(weights, count, replacement=replacement, seed=3)
    if replacement:
        rows = sampler.take(0, count)
        beyond = rows[rows >= 2**24] - 2**24
        evenly = np.bincount(rows[rows < 2**24] >> 18, minlength=64)
        assert_random([deviation(beyond, last), (len(beyond) - count / 2) / math.sqrt(count / 4)])
        assert_random([chi_square(evenly, 1 / 64, 63)])
    else:
        rows = sampler.take(0, count)
        assert len(set(rows.tolist())) == count
        assert 2 < np.count_nonzero(rows >= 2**24) < 18


@pytest.mark.parametrize("replacement", [True, False])
def test_a_sampler_resumes_at_any_position(replacement):
    weights = many(20_000)
    count = 10_000
    whole = list(WeightedSampler(weights, count, replacement, seed=8))
    for given in (0, 1, 4095, 4096, 5000, count):
        sampler = WeightedSampler(weights, count, replacement, seed=8)
        rows = iter(sampler)
        assert [next(rows) for _ in range(given)] == whole[:given]
        resumed = WeightedSampler(weights, count, replacement)
        resumed.load_state_dict(sampler.state_dict())
        assert resumed.take(given, count - given).tolist() == whole[given:]
        assert list(resumed) == whole[given:]
        assert sampler.epoch == resumed.epoch == 1 and list(sampler) == list(resumed) != whole
        sampler.load_state_dict(sampler.state_dict())
        rows = iter(sampler)
        for _ in range(count):
            next(rows)
    assert sampler.state_dict() == {
        "seed": 8, "epoch": 2, "position": count, "rows": 20_000, "num_samples": count, "replacement": replacement,
    }  # fmt: skip


def test_states_of_other_draws_are_refused():
    state = WeightedSampler([1.0, 2.0], 2).state_dict()
    for other, fact in (
        (WeightedSampler([1.0, 2.0, 3.0], 2), "rows"),
        (WeightedSampler([1.0, 2.0], 3), "num_samples"),
        (WeightedSampler([1.0, 2.0], 2, replacement=False), "replacement"),
    ):
        with pytest.raises(InvalidArgument, match=f"its {fact} is"):
            other.load_state_dict(state)


# --- without replacement ----------------------------------------------------------------------------------------------


def test_orders_without_replacement_are_as_likely_as_successive_draws_make_them():
    weights = [1.0, 4.0, 0.0, 2.0, 9.0]
    for count in (1, 2, 4):
        sampler, times = WeightedSampler(weights, count, replacement=False, seed=2), 10_000
        counts: Counter[tuple[int, ...]] = Counter()
        for epoch in range(times):
            sampler.set_epoch(epoch)
            counts[tuple(sampler)] += 1
        orders = list(permutations((0, 1, 3, 4), count))
        shares = []
        for order in orders:
            share, left = 1.0, 16.0
            for row in order:
                share *= weights[row] / left
                left -= weights[row]
            shares.append(share)
        assert sum(counts[order] for order in orders) == times
        assert_random([chi_square(np.array([counts[order] for order in orders]), np.array(shares), len(orders) - 1)])


def test_ranks_of_weight_one_are_exponential():
    ranks = randomness.ranks(np.ones(400_000), randomness.key_of("ranks", 0, 0))
    assert_random([chi_square(np.bincount(((1 - np.exp(-ranks)) * 100).astype(int), minlength=100), 1 / 100, 99)])
    assert_random([float(np.corrcoef(ranks[:-1], ranks[1:])[0, 1]) * math.sqrt(len(ranks))])
    small = ranks[ranks < 1e-2] * 1e4  # where those are that decide who comes first
    assert_random([chi_square(np.bincount(small.astype(int), minlength=100), 1 / 100, 99)])


def test_all_rows_that_can_be_drawn_are_drawn_once():
    weights = many(20_000)
    rows = list(WeightedSampler(weights, int(np.count_nonzero(weights)), replacement=False))
    assert sorted(rows) == np.flatnonzero(weights).tolist()
    assert list(WeightedSampler(weights, 100, replacement=False)) == rows[:100]
    for extreme in EDGES:
        drawable = np.flatnonzero(extreme)
        assert sorted(WeightedSampler(extreme, len(drawable), replacement=False)) == drawable.tolist()


def test_more_rows_than_can_be_drawn_are_refused():
    with pytest.raises(InvalidArgument, match="2 of 3 rows can be drawn, not 3"):
        WeightedSampler([1.0, 0.0, 1.0], 3, replacement=False)


def test_what_take_gives_is_the_callers():
    sampler = WeightedSampler([1.0, 2.0, 3.0], 3, replacement=False)
    rows = sampler.take(0, 3)
    rows[:] = -1
    assert sorted(sampler.take(0, 3)) == [0, 1, 2]


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("bad", [-1.0, -5e-324, math.inf, -math.inf, math.nan])
def test_bad_weights_are_refused_with_their_row(bad, replacement):
    weights = [1.0] * 1000
    weights[777] = bad
    with pytest.raises(InvalidArgument, match="the weight of row 777 is"):
        WeightedSampler(weights, 1, replacement)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.0, 0.0], "no weight is above zero"),
        ([], "There are no weights"),
        ([[1.0]], r"one dimension, not the shape \(1, 1\)"),
        (1.0, "one dimension"),
    ],
)
def test_weights_that_draw_no_row_are_refused(weights, message):
    with pytest.raises(InvalidArgument, match=message):
        WeightedSampler(weights, 1)


@pytest.mark.parametrize(
    "weights", [["a"], [1j], torch.ones(3, dtype=torch.complex64), None, [None], [[1.0], [1.0, 2.0]]]
)
def test_weights_that_are_no_numbers_are_refused(weights):
    with pytest.raises(InvalidArgumentType, match="no real numbers"):
        WeightedSampler(weights, 1)


def test_other_bad_arguments_are_refused():
    for count in (0, -1, 2**63, True):
        with pytest.raises(InvalidArgument, match="num_samples must be from 1"):
            WeightedSampler([1.0], count)
    with pytest.raises(InvalidArgumentType, match="num_samples"):
        WeightedSampler([1.0], 1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentType, match="replacement must be a bool"):
        WeightedSampler([1.0], 1, replacement=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="There are 5 positions"):
        WeightedSampler([1.0], 5).take(0, 6)
    with pytest.raises(InvalidArgument, match="There are 1 positions"):
        WeightedSampler([1.0], 1, replacement=False).take(1, 1)


def test_weights_of_every_kind_mean_the_same():
    kinds: list[Any] = [
        [1, 2, 0, 5],
        np.array([1, 2, 0, 5], np.uint8),
        np.array([1, 9, 2, 9, 0, 9, 5], np.float32)[::2],
        torch.tensor([1, 2, 0, 5], dtype=torch.bfloat16),
        torch.tensor([1.0, 2.0, 0.0, 5.0], requires_grad=True),
        torch.tensor([1, 9, 2, 9, 0, 9, 5])[::2],
    ]
    assert len({tuple(WeightedSampler(weights, 50)) for weights in kinds}) == 1
    assert set(WeightedSampler(torch.tensor([False, True, True]), 50)) == {1, 2}


@pytest.mark.parametrize("replacement", [True, False])
def test_weights_are_copied(replacement):
    weights = np.array([1.0, 2.0, 3.0, 0.0])
    sampler = WeightedSampler(weights, 3, replacement)
    expected = list(sampler)
    weights[:] = [0, 0, 0, 1]
    sampler.set_epoch(1)
    sampler.set_epoch(0)
    assert list(sampler) == expected


def test_it_serves_a_dataloader():
    sampler = WeightedSampler([0.0, 1.0, 0.0, 3.0], 10, seed=4)
    loader: DataLoader[int] = DataLoader(range(4), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    epochs = []
    for _ in range(3):
        wanted = sampler.take(0, 10).tolist()
        assert [row for batch in loader for row in batch.tolist()] == wanted
        epochs.append(wanted)
    assert len(set(map(tuple, epochs))) == 3
    assert len(loader) == 3
