"""The tabulated quantiles equal scipy's, to the last bit."""

import pytest
from scipy.special import stdtrit

from sim.cluster.early_stop import LEVEL, PARTS
from sim.metrics.confidence import CONFIDENCE, KNOWN, student_t
from sim.metrics.steady import BATCHES


@pytest.mark.parametrize("asked", [*KNOWN, (2, 0.975), (4, 0.975)])
def test_quantiles_are_those_of_scipy(asked):
    assert student_t(*asked) == float(stdtrit(*asked))


def test_intervals_of_a_run_and_its_overload_ask_for_known_quantiles():
    asked = {(batches - 1, (1 + CONFIDENCE) / 2) for batches in BATCHES} | {(PARTS - 1, LEVEL)}
    assert asked == set(KNOWN)
