"""Use of the time: kinds of iteration, components, the share of prompts."""

from math import inf

import numpy as np
import pandas as pd
import pytest

from sim.metrics.figure import iteration_kind, iteration_shape
from sim.metrics.plots import KindTimes
from tests.sim.metrics.figures_of import prefill_time_share

NAMES = ("decode_context_tokens", "prefill_seqs", "prefill_pairs", "prefill_context_tokens", "sampled_seqs")


def iterations(*rows):
    """Returns iterations given as (duration_s, decode_seqs, prefill_tokens)."""
    duration, decodes, prefills = zip(*rows, strict=True)
    table = pd.DataFrame({"duration_s": duration, "decode_seqs": decodes, "prefill_tokens": prefills})
    return table.assign(**dict.fromkeys(NAMES, 0))


class HalfAttention:
    """Prices an iteration at a second a token, half of it attention."""

    def breakdown(self, shape):
        tokens = shape.decode_seqs + shape.prefill_tokens
        return {"gemm": 0.5 * tokens, "attention": 0.5 * tokens}


def seconds_by_kind(iterations, inside_s):
    """Returns the seconds of all iterations of one pool, of which none is left out."""
    times = KindTimes(1, inf)
    number = np.arange(len(iterations))
    times.add(0, iterations.assign(iteration=number, replica=0), inside_s, HalfAttention())
    return times.seconds()


TABLE = iterations((0.010, 10, 0), (0.030, 10, 90), (0.020, 0, 50))


def test_iterations_are_decode_mixed_or_prefill():
    assert iteration_kind(TABLE).tolist() == [0, 1, 2]


def test_a_mixed_iterations_time_is_split_by_its_tokens():
    assert prefill_time_share(TABLE[:2], np.array([0.010, 0.030])) == pytest.approx(27 / 40)


def test_components_are_scaled_to_the_time_that_each_kind_really_took():
    seconds = seconds_by_kind(TABLE, TABLE["duration_s"].to_numpy())
    assert {kind: sum(parts.values()) for kind, parts in seconds.items()} == pytest.approx(
        {"decode": 0.010, "mixed": 0.030, "prefill": 0.020}, rel=1e-6
    )
    assert seconds["mixed"] == pytest.approx({"gemm": 0.015, "attention": 0.015}, rel=1e-6)


def test_time_outside_the_window_does_not_count():
    seconds = seconds_by_kind(TABLE, np.array([0.010, 0.0, 0.005]))
    assert seconds == {
        "decode": pytest.approx({"gemm": 0.005, "attention": 0.005}, rel=1e-6),
        "mixed": {"gemm": 0.0, "attention": 0.0},
        "prefill": pytest.approx({"gemm": 0.0025, "attention": 0.0025}, rel=1e-6),
    }


def test_pieces_of_a_long_table_add_up():
    many = pd.concat([TABLE] * 30_000, ignore_index=True)  # more rows than are priced at once
    seconds = seconds_by_kind(many, many["duration_s"].to_numpy())
    assert seconds["prefill"]["gemm"] == pytest.approx(30_000 * 0.010, rel=1e-6)


def test_shapes_come_from_columns_of_the_same_name():
    assert iteration_shape(TABLE, HalfAttention()).prefill_tokens.tolist() == [0, 90, 50]
