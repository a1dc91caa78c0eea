"""Prompts that wait for prompts of other attention ranks, worked out on paper."""

import pytest

from policies.batching.prefill_delayer import PrefillDelayer
from policies.prediction.oracles import OracleWithNoise
from policies.scheduling.s3 import S3

A, B, C, D = range(4)


def delayer(num_ranks=2, max_delay_passes=3, budget=16):
    return PrefillDelayer(
        max_num_batched_tokens=budget, num_ranks=num_ranks, max_delay_passes=max_delay_passes
    )


def test_a_prompt_waits_for_one_of_every_rank(make_core, make_request, run_step):
    core = make_core(batching=delayer())
    core.add(make_request(A, 4), stop_after=9)
    assert run_step(core)[0] == {A: 4}  # nothing decodes: there is no pass for which it could wait
    core.add(make_request(B, 5))
    assert [run_step(core)[0] for _ in range(2)] == [{A: 1}, {A: 1}]
    core.add(make_request(C, 6))
    assert run_step(core)[0] == {A: 1, B: 5, C: 6}


def test_prompts_that_the_scheduling_holds_back_are_not_delayed(make_core, make_request, run_step):
    """S3 allots all 8 blocks to the first sequence, so that its queue offers no other one."""
    core = make_core(
        batching=delayer(),
        scheduling=S3(),
        num_blocks=8,
        block_size=4,
        predictor=OracleWithNoise(error=0),
        max_model_len=32,
    )
    core.add(make_request(A, 4, max_tokens=28), stop_after=28)
    run_step(core)
    core.add(make_request(B, 4, max_tokens=4), stop_after=4)
    assert run_step(core)[0] == {A: 1}


def test_a_delay_ends_after_max_delay_passes(make_core, make_request, run_step):
    core = make_core(batching=delayer())
    core.add(make_request(A, 4), stop_after=20)
    run_step(core)
    core.add(make_request(B, 5))
    assert [run_step(core)[0] for _ in range(4)] == [{A: 1}, {A: 1}, {A: 1}, {A: 1, B: 5}]
    core.add(make_request(C, 5))
    assert [run_step(core)[0] for _ in range(4)] == [{A: 1, B: 1}] * 3 + [{A: 1, B: 1, C: 5}]


def test_every_rank_has_its_share_of_the_budget(make_core, make_request, run_step):
    """Shares of 8 tokens; the third prompt gets what is left, as a rank of the pool is free of decodes."""
    core = make_core(batching=delayer())
    core.add(make_request(A, 20))
    core.add(make_request(B, 20))
    core.add(make_request(C, 20))
    assert run_step(core)[0] == {A: 8, B: 8}


def test_no_delay_is_chunked_with_shares(make_core, make_request, run_step):
    core = make_core(batching=delayer(max_delay_passes=0))
    core.add(make_request(A, 4), stop_after=9)
    run_step(core)
    core.add(make_request(B, 5))
    assert run_step(core)[0] == {A: 1, B: 5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_ranks": 0}, "num_ranks=0: must be >= 1"),
        ({"max_delay_passes": -1}, "max_delay_passes=-1: must be >= 0 iterations"),
        ({"budget": 1}, "max_num_batched_tokens=1: must be >= num_ranks=2, a token for each rank"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        delayer(**settings)
