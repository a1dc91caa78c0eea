import numpy as np
from scipy import stats

from sim.speculation.acceptance.rates import split_mix, start_state, uniforms


def test_split_mix_is_the_published_generator():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert split_mix(1234567, 4).tolist() == published


def test_numbers_do_not_depend_on_how_many_are_drawn():
    assert uniforms(3, "a", 7, 1000)[:10].tolist() == uniforms(3, "a", 7, 10).tolist()
    assert len(uniforms(3, "a", 7, 0)) == 0


def test_every_seed_stream_and_request_has_numbers_of_its_own():
    rows = [uniforms(*key, 50) for key in [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a", 21)]]
    assert len({row.tobytes() for row in rows}) == len(rows)
    assert start_state(1, "a", 11) != start_state(11, "a", 1)


def test_numbers_are_uniform_and_independent_over_positions_and_requests():
    u = np.array([uniforms(0, "acceptance", request, 64) for request in range(2000)])
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 4 / np.sqrt(u.size)
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 4 / np.sqrt(u.size)
