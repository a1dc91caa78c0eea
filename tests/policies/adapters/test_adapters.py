"""LoRA adapters: which are resident, which requests wait for them, and which settings are refused."""

from __future__ import annotations

import pytest

from policies.adapters.exchange import Exchange
from policies.adapters.fixed_slots import FixedSlots
from policies.adapters.merged import Merged
from policies.adapters.serving import Adapter, Registry
from policies.adapters.unified_paging import UnifiedPaging
from policies.caching.contiguous import Contiguous
from policies.caching.prefix import PrefixCaching
from policies.core.limits import RejectedError
from policies.core.sequence import SequenceState
from tests.policies.adapters.machine import Machine, registry_of


def test_an_adapter_of_another_base_model_is_refused_with_key_value_and_rule():
    with pytest.raises(ValueError, match="a has base_model=mistral: must be llama, the served model"):
        Registry([Adapter(name="a", rank=8, base_model="mistral")], "llama")


def test_two_adapters_of_one_name_are_refused():
    with pytest.raises(ValueError, match="adapters: the name a occurs twice"):
        registry_of("aa")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "", "rank": 8}, "name=: must not be empty"),
        ({"name": "a", "rank": 0}, "rank=0: must be >= 1"),
    ],
)
def test_an_adapter_without_name_or_rank_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Adapter(**settings)


def test_an_unknown_adapter_is_rejected_by_name_and_leaves_nothing():
    machine = Machine(FixedSlots(), registry_of("abcdefg"))
    with pytest.raises(
        RejectedError, match="adapter=x: must be one of the served adapters: a, b, c, d, e and 2 more"
    ):
        machine.ask("x")
    assert machine.core.num_unfinished == 0


def test_an_engine_without_adapters_rejects_requests_for_them(make_core, make_request):
    with pytest.raises(RejectedError, match="adapter=a: must be null, as the engine serves no adapters"):
        make_core().add(make_request(adapter="a"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedSlots(max_loras=0), "max_loras=0: must be >= 1"),
        (lambda: FixedSlots(max_lora_rank=12), "max_lora_rank=12: must be one of 1, 8, 16"),
        (lambda: FixedSlots(max_cpu_loras=4), "max_cpu_loras=4: must be >= max_loras=8"),
        (
            lambda: FixedSlots(pinned=("a", "a")),
            r"pinned=\['a', 'a'\]: must be at most max_loras=8 different adapters",
        ),
        (lambda: FixedSlots(eviction="fifo"), "eviction=fifo: must be one of lru, lfu"),
        (lambda: FixedSlots(prefetch=-1), "prefetch=-1: must be >= 0"),
        (lambda: UnifiedPaging(max_cpu_loras=0), "max_cpu_loras=0: must be >= 1"),
        (lambda: Exchange(cycle_time_s=0.0), "cycle_time_s=0.0: must be a finite number > 0 s"),
        (lambda: Exchange(max_active_adapters=9), "max_active_adapters=9: must be >= 1 and <= max_loras=8"),
        (lambda: Exchange(pinned=("a",)), r"pinned=\['a'\]: must be \[\]"),
        (lambda: Merged(max_serve_s=-1.0), "max_serve_s=-1.0: must be a finite number > 0 s, or null"),
        (lambda: Merged(prefetch=2), "prefetch=2: must be 0"),
    ],
)
def test_settings_are_refused_with_key_value_and_rule(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("serving", "registry", "message"),
    [
        (FixedSlots(max_lora_rank=8), registry_of(rank=9), "max_lora_rank=8: must be >= 9, the largest rank"),
        (FixedSlots(pinned=("x",)), registry_of(), "pinned=x: must be one of the served adapters"),
        (
            FixedSlots(max_loras=1, pinned=("a",)),
            registry_of(),
            "must leave a slot of max_loras=1 to the other 3",
        ),
        (UnifiedPaging(), registry_of(block_bytes=0.0), "block_bytes=0"),
    ],
)
def test_settings_that_do_not_fit_the_adapters_are_refused(serving, registry, message):
    with pytest.raises(ValueError, match=message):
        Machine(serving, registry)


def test_adapters_need_blocks_not_regions():
    with pytest.raises(ValueError, match="caching: adapters cannot be stored in memory"):
        Machine(UnifiedPaging(), caching=Contiguous(block_size=4))


def test_a_sequence_waits_with_its_slot_until_its_adapter_has_come():
    machine = Machine(FixedSlots(max_loras=1))
    seq = machine.ask("a")
    assert machine.step(come=False) is None
    assert seq.state is SequenceState.loading
    assert machine.step(come=False) is None
    machine.come()
    plan = machine.step()
    assert [chunk.seq for chunk in plan.chunks] == plan.admitted == [seq]
    assert machine.log == [("a", "disk")]


def test_a_request_without_a_slot_is_passed_by_requests_that_need_none():
    machine = Machine(FixedSlots(max_loras=1))
    first, second, plain, same = machine.ask("a", 4, 20), machine.ask("b"), machine.ask(), machine.ask("a")
    machine.step()
    machine.step()
    states = [seq.state.name for seq in (first, second, plain, same)]
    assert states == ["decoding", "waiting", "decoding", "decoding"]
    machine.run()
    assert machine.log == [("a", "disk"), ("b", "disk")]


def served_one_by_one(serving, names, registry=None):
    """Serves requests for these adapters one after the other; returns the machine with its log of loads."""
    machine = Machine(serving, registry)
    for name in names:
        machine.ask(name)
        machine.run()
    return machine


def test_the_least_recently_used_makes_room():
    machine = served_one_by_one(FixedSlots(max_loras=2), "abacb")
    assert [name for name, _ in machine.log] == ["a", "b", "c", "b"]  # c over b, then b over a
    assert machine.residents.resident == {"b", "c"}
    assert (machine.residents.slot_of("c"), machine.residents.slot_of("b")) == (1, 0)


def test_the_least_frequently_used_makes_room():
    machine = served_one_by_one(FixedSlots(max_loras=2, eviction="lfu"), "aaabcbc")
    assert [name for name, _ in machine.log] == ["a", "b", "c", "b", "c"]
    assert "a" in machine.residents.resident


def test_pinned_adapters_are_loaded_first_and_stay():
    machine = served_one_by_one(FixedSlots(max_loras=2, pinned=("d",)), "abca")
    assert [name for name, _ in machine.log] == ["d", "a", "b", "c", "a"]
    assert machine.residents.resident == {"d", "a"}


def test_host_memory_keeps_those_that_were_loaded_last():
    machine = served_one_by_one(FixedSlots(max_loras=1, max_cpu_loras=2), "abacabc")
    tiers = [f"{name} {tier}" for name, tier in machine.log]
    assert tiers == ["a disk", "b disk", "a host", "c disk", "a host", "b disk", "c disk"]


def test_adapters_of_waiting_requests_are_loaded_before_their_turn():
    for prefetch, there in ((0, {"a"}), (1, {"a", "b"}), (2, {"a", "b", "c"})):
        machine = Machine(FixedSlots(max_loras=3, prefetch=prefetch), max_num_seqs=1)
        for name in "abc":
            machine.ask(name, 4, 20)
        machine.step()
        machine.step()
        assert machine.residents.resident == there


def test_an_aborted_wait_leaves_the_adapter_to_others():
    machine = Machine(FixedSlots(max_loras=1))
    seq = machine.ask("a")
    machine.step(come=False)
    machine.core.abort(seq.request_id)
    machine.core.check_integrity()
    machine.ask("b")
    assert machine.step(come=False) is None  # the slot is not free before what comes into it has come
    machine.come()
    machine.run()
    assert [name for name, _ in machine.log] == ["a", "b"]


def test_a_step_says_what_it_computes_with_adapters():
    machine = Machine(FixedSlots(max_loras=2, max_lora_rank=16), registry_of("ab", rank=4))
    for adapter, num_prompt in (("a", 5), ("a", 6), ("b", 7), (None, 8)):
        machine.ask(adapter, num_prompt, 9)
    machine.step()
    assert machine.step().adapters == (2, 18, 18 * 16, 32)  # prompts, padded to the slots' rank
    assert machine.step().adapters == (2, 3, 3 * 16, 32)
    paged = Machine(UnifiedPaging(), registry_of("ab", rank=4))
    paged.ask("a", 5)
    paged.step()
    assert paged.step().adapters == (1, 5, 5 * 4, 4)


def test_what_one_adapter_has_computed_is_not_found_by_another():
    machine = Machine(FixedSlots(max_loras=4), caching=PrefixCaching(block_size=4))
    for adapter in ("a", None, "b"):
        machine.ask(adapter, 13, 1, segments=((7, 13),))
        machine.run()
    seqs = [machine.ask(adapter, 13, 1, segments=((7, 13),)) for adapter in ("a", None, "b", "c")]
    machine.run()
    assert [seq.num_found for seq in seqs] == [12, 12, 12, 0]


def test_a_digest_tells_which_adapter_came_into_which_slot():
    machine = Machine(FixedSlots(max_loras=2))
    machine.ask("a")
    machine.step()
    plan = machine.core.plan(9.0)
    assert plan.adapter_puts == (("a", 0),)
    digest = plan.digest()
    plan.adapter_puts = (("a", 1),)
    assert plan.digest() != digest


def test_slots_of_no_given_rank_are_of_the_smallest_that_fits():
    """vLLM's ranks are 1, 8, 16, ...; its default is 16. A rank that was set stays."""
    for ranks, expected in (((), 16), ((8,), 8), ((1, 9), 16), ((64, 8), 64), ((65,), 128)):
        assert FixedSlots().fitted(ranks).slots == (8, expected)
    assert FixedSlots(max_lora_rank=64).fitted((8,)).slots == (8, 64)
    assert FixedSlots().slots == (8, 16)
    with pytest.raises(ValueError, match="max_lora_rank=512: must be >= 600, the largest rank"):
        FixedSlots().fitted((600,)).check(registry_of(rank=600))
