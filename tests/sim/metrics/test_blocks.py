"""Intervals of a trace from blocks of its requests: their coverage, copies, pairs and what has none."""

import math

import numpy as np
import pytest

from sim.metrics.blocks import MIN_BLOCKS, Blocks, blocks_of, figure_of
from sim.metrics.confidence import Outcome
from sim.metrics.steady import percentile


def correlated(seed, num, correlation=0.5):
    draws = np.random.default_rng(seed).standard_normal(num + 200)
    values = np.zeros(num + 200)
    for i in range(1, num + 200):
        values[i] = correlation * values[i - 1] + draws[i]
    return values[200:]


def test_about_95_of_100_intervals_contain_the_true_mean():
    series = [correlated(seed, 500) for seed in range(100)]
    found = [blocks_of([values]).interval(figure_of(values)) for values in series]
    held = sum(one.low <= 0 <= one.high for one in found)
    assert 86 <= held <= 99
    # As if requests were independent, the interval would be 1.7 times too narrow.
    naive = np.mean([2 * 1.96 * values.std() / math.sqrt(500) for values in series])
    assert np.mean([one.high - one.low for one in found]) > 1.4 * naive


def test_blocks_are_long_compared_with_the_memory_and_too_few_have_no_interval():
    short, long = (blocks_of([correlated(1, 2000, correlation)]) for correlation in (0.0, 0.9))
    assert 13 <= short.length < 30 < long.length
    trend = np.arange(300.0)
    blocks = blocks_of([trend])
    assert blocks.count < MIN_BLOCKS
    found = blocks.interval(figure_of(trend))
    assert found.mean == trend.mean()
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_copies_of_a_trace_add_no_knowledge():
    once = correlated(3, 400, 0.0)
    alone = blocks_of([once]).interval(figure_of(once))
    tenfold = np.tile(once, 10)
    repeated = blocks_of([tenfold], period=400).interval(figure_of(tenfold))
    assert repeated == pytest.approx(alone, rel=1e-6)
    as_if_new = blocks_of([tenfold]).interval(figure_of(tenfold))
    assert as_if_new.high - as_if_new.low < 0.5 * (alone.high - alone.low)
    part = blocks_of([tenfold[:900]], period=400)
    assert all(rows.max() < 900 for rows in part.resamples())


def test_pairs_of_one_trace_cancel_what_both_share():
    base = np.exp(correlated(5, 1000))
    better = 0.9 * base * np.exp(0.02 * np.random.default_rng(1).standard_normal(1000))
    blocks = blocks_of([better, base])
    found = blocks.compared(figure_of(better), figure_of(base))
    assert found.outcome("lower") is Outcome.BETTER
    assert found.num_pairs == blocks.count
    assert found.ratio.low < 0.9 < found.ratio.high
    alone = blocks.interval(figure_of(base))
    assert found.ratio.high - found.ratio.low < 0.3 * (alone.high - alone.low) / alone.mean
    same = blocks.compared(figure_of(base), figure_of(base))
    assert same.same
    assert same.outcome("lower") is Outcome.EQUAL


def test_missing_values_are_left_out_and_a_figure_without_any_is_missing():
    values = np.where(np.arange(600) % 3 == 0, math.nan, correlated(7, 600, 0.0))
    assert blocks_of([values]).interval(figure_of(values)).mean == pytest.approx(np.nanmean(values))
    p90 = blocks_of([values]).interval(figure_of(values, percentile(90)))
    assert p90.low < np.nanpercentile(values, 90) < p90.high
    none = np.full(600, math.nan)
    assert math.isnan(blocks_of([none]).interval(figure_of(none)).mean)
    assert math.isnan(
        Blocks(num_rows=600, period=600, length=10).compared(*2 * [figure_of(none)]).difference.mean
    )


def test_the_fast_intervals_of_means_are_those_of_the_resamples():
    values = np.where(np.arange(900) % 7 == 0, math.nan, correlated(9, 900))
    blocks = blocks_of([values], period=600)
    assert blocks.of_values(values) == pytest.approx(blocks.interval(figure_of(values)), rel=1e-9)
    fast, slow = blocks.of_values(values, percentile(90)), blocks.interval(figure_of(values, percentile(90)))
    assert fast.mean == slow.mean
    assert 0.5 < (fast.high - fast.low) / (slow.high - slow.low) < 2
    assert math.isnan(blocks.of_values(values, percentile(99.9)).low)
