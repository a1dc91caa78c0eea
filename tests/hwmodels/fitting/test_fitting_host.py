"""The fit of host times recovers planted values; what no row determines stays at its neutral value."""

from __future__ import annotations

import numpy as np
import pytest

from hwmodels.fitting.host import Constant, Response, fit_constants

EXPOSED = Constant(name="exposed_s", neutral=0.0, lower=0.0, upper=10e-3, scale=1e-3)
FRONTEND = Constant(name="frontend_s", neutral=0.0, lower=0.0, upper=2.0, scale=20e-3)
SURE = np.full(60, 1e4)
"""Weights of rows with a standard deviation of 1 %."""

CLOCK = Constant(name="clock", neutral=0.9, lower=0.5, upper=1.0, scale=0.1)


def planted(num_rows: int = 60) -> Response:
    """Returns TTFTs and TPOTs in ms that depend on the three constants as those of engines do."""
    draws = np.random.default_rng(5)
    base = draws.uniform(5, 200, num_rows)
    slopes = np.stack(
        [draws.uniform(500, 1500, num_rows), draws.choice([0.0, 1000.0], num_rows), -0.5 * base], axis=1
    )
    at = np.tile([0.5e-3, 10e-3, 0.8], (num_rows, 1))
    return Response(at=at, base=base, above=slopes, below=0.8 * slopes)


def test_fit_recovers_planted_constants_despite_outliers():
    response, truth = planted(), np.array([1.2e-3, 30e-3, 0.93])
    measured = response.predict(truth)
    measured[::10] *= 3
    measured[5::10] /= 3
    found = fit_constants(response, measured, SURE, [EXPOSED, FRONTEND, CLOCK])
    assert found == pytest.approx(truth, rel=0.1)


def test_fit_without_outliers_is_exact_but_for_the_prior():
    response, truth = planted(), np.array([0.3e-3, 15e-3, 0.7])
    found = fit_constants(response, response.predict(truth), SURE, [EXPOSED, FRONTEND, CLOCK])
    assert found == pytest.approx(truth, rel=0.01)


def test_constant_without_effect_gets_its_neutral_value():
    response = planted()
    blind = Response(
        at=response.at,
        base=response.base,
        above=response.above * [1, 1, 0],
        below=response.below * [1, 1, 0],
    )
    found = fit_constants(blind, 1.1 * blind.base, SURE, [EXPOSED, FRONTEND, CLOCK])
    assert found[2] == pytest.approx(0.9)


def test_prior_pulls_a_constant_with_the_weight_of_its_scale():
    """A row of 100 ms +-1 % asks for 1 ms, the prior for 0 +-1 ms, so that both weigh alike."""
    one = np.ones((1, 1))
    response = Response(at=0 * one, base=np.array([100.0]), above=1000 * one, below=1000 * one)
    found = fit_constants(response, np.array([101.0]), np.array([1e4]), [EXPOSED])
    assert found[0] == pytest.approx(0.5e-3, rel=0.02)


def test_constants_stay_within_their_bounds():
    response = planted()
    found = fit_constants(response, 100 * response.base, SURE, [EXPOSED, FRONTEND, CLOCK])
    assert found[0] == pytest.approx(10e-3)
    assert 0.5 <= found[2] <= 1.0


def test_rows_of_larger_weight_count_more():
    ones = np.ones((2, 1))
    response = Response(at=0 * ones, base=np.array([10.0, 10.0]), above=1000 * ones, below=1000 * ones)
    measured = np.array([11.0, 12.0])
    light, heavy = (
        fit_constants(response, measured, 1e4 * np.array([1.0, w]), [EXPOSED])[0] for w in (0.1, 10)
    )
    assert light < 1.3e-3 < 1.7e-3 < heavy < 2e-3


def test_gradient_is_that_of_the_predictions():
    response, values = planted(), np.array([0.9e-3, 5e-3, 0.85])
    for i, step in enumerate((1e-7, 1e-7, 1e-6)):
        moved = values.copy()
        moved[i] += step
        slope = (response.predict(moved) - response.predict(values)) / step
        assert response.gradient(values)[:, i] == pytest.approx(slope, rel=1e-4, abs=1e-3)


def test_no_figure_falls_below_a_share_of_its_base():
    response = planted()
    assert (response.predict(np.array([0.0, 0.0, 3.0])) >= 0.05 * response.base).all()


def test_refuses_no_rows_and_impossible_bounds():
    response = planted().rows(np.zeros(60, dtype=bool))
    with pytest.raises(ValueError, match="no rows"):
        fit_constants(response, np.array([]), np.array([]), [EXPOSED, FRONTEND, CLOCK])
    with pytest.raises(ValueError, match="neutral=2"):
        Constant(name="x", neutral=2.0, lower=0.0, upper=1.0, scale=1.0)
