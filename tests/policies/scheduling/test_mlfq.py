"""FastServe's queue, token by token."""

import pytest

from policies.core.plan import StepOutcome
from policies.scheduling.mlfq import Mlfq


def one_step(core, now=0.0):
    """Runs one iteration with instant transfers; returns (tokens by request, preempted ids)."""
    plan = core.plan(now)
    decision = plan.tokens_by_request, [seq.request_id for seq in plan.preempted]
    core.commit(plan, StepOutcome(), now)
    for transfer in core.take_transfers():
        if transfer.seq is not None:
            core.loaded(transfer.seq.request_id)
    core.check_integrity()
    return decision


@pytest.mark.parametrize(("num_tokens", "level"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (16, 2), (999, 2)])
def test_a_prompt_skips_the_levels_whose_quantum_it_exceeds(num_tokens, level):
    """Quanta 4, 8, and no end."""
    assert Mlfq(quantum_tokens=4, num_levels=3).level_of(num_tokens) == level


def test_a_sequence_goes_down_when_its_quantum_is_used_up(make_core, make_request):
    """Quanta 4, 8, ...: a prompt of 2 is level 0 up to 4 tokens, level 1 up to 12, level 2 from then on."""
    core = make_core(scheduling=Mlfq(quantum_tokens=4))
    core.add(make_request(0, 2), stop_after=50)
    levels = []
    for _ in range(13):
        plan = core.plan(0.0)
        levels.append((plan.num_tokens and core.find(0).num_known, core.find(0).rank[0]))
        core.commit(plan, StepOutcome(), 0.0)
    assert [level for _, level in levels] == [0] * 2 + [1] * 8 + [2] * 3


def test_a_new_short_request_takes_the_slot_of_one_that_has_gone_down(make_core, make_request):
    core = make_core(scheduling=Mlfq(quantum_tokens=4), max_num_seqs=1)
    core.add(make_request(0, 2), stop_after=50)
    one_step(core)
    core.add(make_request(1, 2), stop_after=2)
    assert one_step(core) == ({0: 1}, [])  # 3 of 4 tokens: same level, came first
    assert one_step(core) == ({1: 2}, [0])
    assert one_step(core) == ({1: 1}, [])
    assert one_step(core) == ({0: 4}, [])


def test_a_loaded_sequence_computes_a_token_before_it_is_displaced(make_core, make_request):
    """One slot. 0 is swapped out for 1 and comes back; 2, of a better level, came while it was loaded.

    Otherwise two that are promoted in turn could swap each other out for ever.
    """
    policy = Mlfq(quantum_tokens=4, preemption_mode="swap")
    core = make_core(scheduling=policy, max_num_seqs=1, num_swap_blocks=10)
    core.add(make_request(0, 2), stop_after=50)
    one_step(core)
    core.add(make_request(1, 2), stop_after=1)
    assert one_step(core) == ({0: 1}, [])
    assert one_step(core) == ({1: 2}, [0])
    assert core.plan(0.0) is None, "0 is being loaded"
    core.add(make_request(2, 2), stop_after=1)
    for transfer in core.take_transfers():
        if transfer.seq is not None:
            core.loaded(transfer.seq.request_id)
    plan = core.plan(0.0)
    assert (plan.tokens_by_request, plan.horizon) == ({0: 1}, 1)
    core.commit(plan, StepOutcome(), 0.0)
    assert one_step(core) == ({2: 2}, [0])


def test_a_plan_holds_until_the_first_quantum_in_use_ends(make_core, make_request):
    """13 known tokens entered level 2 (16 tokens) with 12: 15 more. Without a waiting request, no bound."""
    core = make_core(scheduling=Mlfq(quantum_tokens=4), max_num_seqs=1)
    core.add(make_request(0, 12), stop_after=50)
    one_step(core)
    assert core.plan(0.0).horizon == 49
    core = make_core(scheduling=Mlfq(quantum_tokens=4), max_num_seqs=1)
    core.add(make_request(0, 12), stop_after=50)
    core.add(make_request(1, 12, arrival_s=1.0), stop_after=50)
    one_step(core)
    assert core.plan(0.0).horizon == 16 - 13


def test_with_room_for_its_kv_a_displaced_decode_is_paused_and_goes_on_without_loss(make_core, make_request):
    core = make_core(scheduling=Mlfq(quantum_tokens=4, max_active=1))
    core.add(make_request(0, 8), stop_after=50)
    one_step(core)
    core.add(make_request(1, 2), stop_after=3)
    assert one_step(core) == ({0: 1, 1: 2}, [])  # the first iteration is shared
    assert one_step(core) == ({1: 1}, [])
    assert [seq.request_id for seq in core.view.paused] == [0]
    assert one_step(core) == ({1: 1}, [])
    assert one_step(core) == ({0: 1}, [])
    assert core.num_preemptions == 0


def test_paused_kv_moves_to_the_host_before_blocks_run_out(make_core, make_request):
    """10 blocks, a floor of 6: 0 holds 3, 1 holds 1, and with its second 5 are free. 0 goes, and returns
    with all its tokens: it decodes on.
    """
    policy = Mlfq(quantum_tokens=8, max_active=1, min_free_share=0.6, preemption_mode="swap")
    core = make_core(scheduling=policy, num_blocks=10, num_swap_blocks=10)
    core.add(make_request(0, 9), stop_after=50)
    one_step(core)
    core.add(make_request(1, 4), stop_after=4)
    assert one_step(core) == ({0: 1, 1: 4}, [])
    assert one_step(core) == ({1: 1}, [])
    assert one_step(core) == ({1: 1}, [0])
    assert (core.find(0).num_swapped, core.num_free_swap_blocks) == (10, 7)
    assert one_step(core) == ({1: 1}, [])
    assert core.plan(0.0) is None
    (transfer,) = core.take_transfers()
    core.loaded(transfer.seq.request_id)
    assert core.num_free_swap_blocks == 10
    assert one_step(core) == ({0: 1}, [])


def test_without_host_memory_paused_kv_stays(make_core, make_request):
    policy = Mlfq(quantum_tokens=8, max_active=1, min_free_share=0.6, preemption_mode="swap")
    core = make_core(scheduling=policy, num_blocks=10, num_swap_blocks=0)
    core.add(make_request(0, 9), stop_after=50)
    one_step(core)
    core.add(make_request(1, 4), stop_after=4)
    for _ in range(4):
        assert one_step(core)[1] == []


def test_a_prompt_token_may_be_less_service_than_an_output_token(make_core, make_request):
    """Quanta 3, 6, ...: a prompt of 40 is one token of service. With 2 outputs, 0 goes behind 1."""
    policy = Mlfq(quantum_tokens=3, prompt_token_service=0.025)
    core = make_core(scheduling=policy, max_num_seqs=1)
    first = core.add(make_request(0, 40), stop_after=50)
    assert policy.rank(first)[0] == 0
    assert one_step(core) == ({0: 40}, [])
    second = core.add(make_request(1, 40), stop_after=50)
    assert (policy.rank(first)[0], policy.rank(second)[0]) == (0, 0)
    one_step(core)
    assert policy.rank(first)[0] == 1
    assert one_step(core) == ({1: 40}, [0])
    assert Mlfq(quantum_tokens=3).level_of(40) == 4  # the level if prompt tokens count as outputs


def test_a_request_that_waits_too_long_goes_to_the_first_level(make_core, make_request):
    """Two long requests, one slot. 1 has waited for 30 s at 31 s, and then goes before 0."""
    core = make_core(scheduling=Mlfq(quantum_tokens=4, starvation_s=30.0), max_num_seqs=1)
    core.add(make_request(0, 12), stop_after=500)
    core.add(make_request(1, 16, arrival_s=1.0), stop_after=500)
    one_step(core, 1.0)
    plan = core.plan(1.0)
    assert plan.until_s == 30.0  # an alarm of 0, which does not stand still
    core.commit(plan, StepOutcome(), 30.0)
    assert one_step(core, 30.0) == ({0: 1}, [])
    assert one_step(core, 31.0) == ({1: 16}, [0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantum_tokens": 0}, "quantum_tokens=0: must be >= 1"),
        ({"num_levels": 0}, "num_levels=0: must be >= 1"),
        ({"prompt_token_service": -0.1}, "prompt_token_service=-0.1: must be a finite number >= 0"),
        ({"prompt_token_service": float("nan")}, "prompt_token_service=nan: must be a finite number >= 0"),
        ({"starvation_s": 0.0}, "starvation_s=0.0: must be > 0 s"),
        ({"max_active": 0}, "max_active=0: must be >= 1"),
        ({"min_free_share": 1.0}, "min_free_share=1.0: must be a share"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Mlfq(**settings)
