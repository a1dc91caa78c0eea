"""When Text Generation Inference's router lets waiting requests join, worked out on paper."""

import pytest

from policies.batching.tgi import Tgi

A, B, C, D, E, F, G = range(7)
RUNNING = {A: 1, B: 1, C: 1, D: 1}


def running_four(make_core, make_request, run_step, **settings):
    """Returns a core after the first iteration of four requests.

    By default at least two requests must be able to join, or two iterations must have passed.
    """
    settings = {"waiting_served_ratio": 0.5, "max_waiting_tokens": 3} | settings
    core = make_core(batching=Tgi(**settings))
    for request_id in (A, B, C, D):
        core.add(make_request(request_id), stop_after=20)
    assert run_step(core)[0] == {A: 4, B: 4, C: 4, D: 4}
    return core


def test_one_request_joins_when_it_has_waited_long_enough(make_core, make_request, run_step):
    """The counter stands at 1 after the prompts; at 3 any request may join, so two decodes come before."""
    core = running_four(make_core, make_request, run_step)
    core.add(make_request(E), stop_after=20)
    assert run_step(core)[0] == RUNNING
    assert run_step(core)[0] == RUNNING
    assert run_step(core)[0] == {E: 4}


def test_the_decodes_until_then_are_one_leap(make_core, make_request, run_step):
    core = running_four(make_core, make_request, run_step)
    core.add(make_request(E), stop_after=20)
    assert core.plan(0.0).horizon == 2


def test_enough_requests_join_at_once_and_then_a_decode_comes_first(make_core, make_request, run_step):
    """E and F are half of four. The next three are half of six, but wait for one decode."""
    core = running_four(make_core, make_request, run_step)
    core.add(make_request(E), stop_after=20)
    core.add(make_request(F), stop_after=20)
    assert run_step(core)[0] == {E: 4, F: 4}
    for request_id in (G, G + 1, G + 2):
        core.add(make_request(request_id), stop_after=20)
    assert run_step(core)[0] == {**RUNNING, E: 1, F: 1}
    assert run_step(core)[0] == {G: 4, G + 1: 4}, "the third finds no slot"


def test_a_group_counts_only_as_far_as_the_prompt_budget_goes(make_core, make_request, run_step):
    """Two prompts of 9 exceed 16: one alone is no group of two, and waits."""
    core = running_four(make_core, make_request, run_step, max_batch_prefill_tokens=16)
    core.add(make_request(E, 9), stop_after=20)
    core.add(make_request(F, 9), stop_after=20)
    assert run_step(core)[0] == RUNNING
    assert run_step(core)[0] == RUNNING
    assert run_step(core)[0] == {E: 9}


def test_decodes_are_not_limited_by_the_prompt_budget(make_core, make_request, run_step):
    core = make_core(batching=Tgi(max_batch_prefill_tokens=4, waiting_served_ratio=0.0))
    for request_id in range(6):
        core.add(make_request(request_id), stop_after=20)
    for _ in range(12):
        tokens, _ = run_step(core)
    assert tokens == dict.fromkeys(range(6), 1)


def test_a_total_budget_reserves_the_longest_answers(make_core, make_request, run_step):
    """Each may reach 20 tokens: two fit into 40, the third joins when one has ended."""
    core = make_core(
        batching=Tgi(max_batch_total_tokens=40, max_batch_prefill_tokens=40, waiting_served_ratio=0.0)
    )
    for request_id in (A, B, C):
        core.add(make_request(request_id, max_tokens=16), stop_after=2 if request_id == A else 9)
    assert run_step(core)[0] == {A: 4, B: 4}
    assert run_step(core)[0] == {A: 1, B: 1}
    assert run_step(core)[0] == {C: 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"waiting_served_ratio": -0.1}, "waiting_served_ratio=-0.1: must be a finite number >= 0"),
        ({"max_waiting_tokens": -1}, "max_waiting_tokens=-1: must be >= 0"),
        ({"max_batch_prefill_tokens": 0}, "max_batch_prefill_tokens=0: must be >= 1"),
        ({"max_batch_total_tokens": 100}, "max_batch_total_tokens=100: must be >= max_batch_prefill_tokens"),
    ],
)
def test_rejects_limits_that_contradict_each_other(settings, message):
    with pytest.raises(ValueError, match=message):
        Tgi(**settings)
