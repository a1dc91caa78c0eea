"""Times that are sums of terms: what the rows determine, and what they do not."""

import numpy as np
import pytest

from hwmodels.fitting.robust import fit_terms

SEQS = np.array([1.0, 2, 4, 8, 16, 32, 64])
TRUE = {"iteration_s": 2e-4, "sequence_s": 3e-6, "token_s": 5e-6}


def times(terms, noise=0.0, seed=0):
    total = sum(TRUE[name] * term for name, term in terms.items())
    return total * np.exp(noise * np.random.default_rng(seed).standard_normal(len(SEQS)))


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("seed", range(5))
def test_figures_that_the_rows_determine_come_back_without_a_range(noise, seed):
    tokens = SEQS * np.array([4, 1, 2, 8, 1, 4, 2])
    terms = {"iteration_s": np.ones(7), "sequence_s": SEQS, "token_s": tokens}
    found = fit_terms(terms, times(terms, noise, seed))
    assert found.undetermined == {}
    for name, value in found.values.items():
        assert value == pytest.approx(TRUE[name], rel=1e-6 if noise == 0 else 0.6)


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("seed", range(5))
def test_terms_that_always_grow_together_are_not_determined_and_the_range_has_the_truth(noise, seed):
    """Two draft tokens a sequence in all rows: only their sum is seen."""
    terms = {"iteration_s": np.ones(7), "sequence_s": SEQS, "token_s": 2 * SEQS}
    found = fit_terms(terms, times(terms, noise, seed))
    assert set(found.undetermined) == {"sequence_s", "token_s"}
    for name in ("sequence_s", "token_s"):
        low, high = found.undetermined[name]
        assert low <= found.values[name] <= high
        assert 0.9 * low <= TRUE[name] <= 1.1 * high
    whole = found.values["sequence_s"] + 2 * found.values["token_s"]
    assert whole == pytest.approx(13e-6, rel=0.05)


def test_a_term_too_small_to_be_seen_and_one_that_no_row_has_are_not_determined():
    terms = {"iteration_s": np.ones(7), "sequence_s": 1e-6 * SEQS, "token_s": np.zeros(7)}
    found = fit_terms(terms, np.full(7, 2e-4) * np.exp(0.02 * np.array([1, -1, 1, 1, -1, -1, 1])))
    assert found.undetermined["token_s"] == (0.0, float("inf"))
    assert "iteration_s" not in found.undetermined


def test_one_row_determines_one_figure_alone():
    assert fit_terms({"iteration_s": 1.0}, [2e-4]).undetermined == {}
    found = fit_terms({"iteration_s": 1.0, "sequence_s": 1.0}, [2e-4])
    assert set(found.undetermined) == {"iteration_s", "sequence_s"}
    assert found.undetermined["iteration_s"][1] == pytest.approx(2e-4)


def test_what_is_known_counts_and_rows_below_it_are_equal_to_it():
    found = fit_terms({"token_s": SEQS}, 1e-3 + 2e-6 * SEQS, known=1e-3)
    assert found.values["token_s"] == pytest.approx(2e-6)
    assert fit_terms({"token_s": SEQS}, np.full(7, 1e-3), known=2e-3).values["token_s"] == 0.0
