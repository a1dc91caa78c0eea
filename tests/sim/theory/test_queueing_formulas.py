"""The formulas that the simulation is compared with: special cases, limits, published figures."""

import pytest
from scipy import optimize

from tests.sim.theory.queueing_formulas import (
    cyclic_sojourn_s,
    erlang_c,
    in_step_sojourn_s,
    lindley_wait_s,
    mean_field_sojourn_s,
    mg1_wait_s,
    mmk_wait_s,
    shorter_of_two_sojourn_s,
)


def test_lindley_by_hand():
    """The second comes 1 s into a service of 3 s, the third after all have ended, the fourth with it."""
    assert lindley_wait_s([0.0, 1.0, 9.0, 9.0], [3.0, 2.0, 1.0, 5.0]).tolist() == [0.0, 2.0, 0.0, 1.0]


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_erlang_c_of_one_and_two_servers(load):
    """rho, and 2 rho^2 / (1 + rho); the mean wait of one server is that of M/M/1."""
    assert erlang_c(1, load) == pytest.approx(load)
    assert erlang_c(2, load) == pytest.approx(2 * load**2 / (1 + load))
    assert mmk_wait_s(1, load) == pytest.approx(mg1_wait_s(load, 2.0))


@pytest.mark.parametrize("num_servers", [1, 3])
def test_servers_in_step_approach_mmk_as_tokens_become_short(num_servers):
    """Each halving of the token halves the distance."""
    off = [
        in_step_sojourn_s(0.6 * num_servers, lambda n: min(n, num_servers), lambda n, m=m: 1 / m, m)
        - (1 + mmk_wait_s(num_servers, 0.6))
        for m in (100, 200, 400)
    ]
    assert off[0] / off[1] == pytest.approx(2, rel=0.02)
    assert off[1] / off[2] == pytest.approx(2, rel=0.02)


def test_every_third_arrival_makes_e3_m_1():
    """Its sojourn is 1 / (1 - s) with s = (3 rate / (3 rate + 1 - s))^3 at `rate` arrivals a second."""
    root = optimize.brentq(lambda s: (1.8 / (1.8 + 1 - s)) ** 3 - s, 0.0, 0.99)
    assert cyclic_sojourn_s(1.8, (1, 0, 0)) == pytest.approx(1 / (1 - root))
    assert cyclic_sojourn_s(0.6, (1,)) == pytest.approx(2.5)


def test_the_shorter_of_two_lies_between_one_queue_for_both_and_two_apart():
    assert 1 + mmk_wait_s(2, 0.7) < shorter_of_two_sojourn_s(1.4) < cyclic_sojourn_s(1.4, (1, 0))


def test_mitzenmachers_table():
    """TPDS 2001, table 1: the prediction for two choices."""
    table = {0.5: 1.2657, 0.7: 1.6145, 0.9: 2.6141, 0.99: 5.4320}
    for load, sojourn_s in table.items():
        assert mean_field_sojourn_s(load, 2) == pytest.approx(sojourn_s, abs=1e-4)
