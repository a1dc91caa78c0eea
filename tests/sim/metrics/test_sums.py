"""Weighted sums do not depend on the number of cores."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from sim.metrics.sums import TableTotals, weighted_sum

SUMMARY = """
import hashlib, json
from sim import simulate
result = simulate(workload="poisson", workload__num_requests=1000)
assert len(result.iterations) > 10_000
print(hashlib.sha256(json.dumps(result.summary).encode()).hexdigest())
"""


def test_a_weighted_sum_is_that_of_the_products():
    values, weights = np.random.default_rng(0).random((2, 100_000))
    assert weighted_sum(values, weights) == pytest.approx(math.fsum(values * weights), rel=1e-14)
    assert weighted_sum(2.0, weights) == pytest.approx(2 * math.fsum(weights), rel=1e-14)
    assert weighted_sum([3, 4], np.array([1.0, 0.5])) == 5.0
    assert weighted_sum([], []) == 0.0


def test_the_summary_has_the_same_digits_for_any_number_of_threads():
    found = {
        subprocess.run(
            [sys.executable, "-c", SUMMARY],
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for threads in ("1", "2")
    }
    assert len(found) == 1


def test_totals_of_tables_add_and_keep_the_largest():
    totals = TableTotals()
    for part in ([1.5, 2.0], [0.25]):
        totals.add("seconds", np.array(part))
        totals.raise_to("longest_s", np.array(part))
    totals.add("met", np.array([True, True, False]))
    totals.raise_to("nothing", np.zeros(0))
    assert totals["seconds"] == 3.75
    assert totals.largest("longest_s") == 2.0
    assert totals["met"] == 2
    assert totals["nothing"] == totals.largest("nothing") == 0
