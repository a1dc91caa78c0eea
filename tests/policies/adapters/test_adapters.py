"""LoRA adapters: which are resident, which requests wait for them, and which are evicted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.adapters.exchange import Exchange
from policies.adapters.fixed_slots import FixedSlots
from policies.adapters.merged import Merged
from policies.adapters.registry import Adapter, AdapterMemory, Registry
from policies.adapters.unified_paging import UnifiedPaging
from policies.batching.chunked import Chunked
from policies.caching.contiguous import Contiguous
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.caching.settings import KvMemory
from policies.core.engine import EngineCore
from policies.core.limits import RejectedError
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request, Segment
from policies.core.sequence import SequenceState
from policies.scheduling.fcfs import Fcfs


def registry_of(names="abcd", rank=4, **memory):
    """Returns adapters of one rank; by default a rank takes one byte, and a block has four."""
    adapters = [Adapter(name=name, rank=rank) for name in names]
    return Registry(adapters, "base", AdapterMemory(**{"bytes_per_rank": 1.0, "block_bytes": 4.0} | memory))


class Machine:
    """An engine whose adapters arrive when the test says so."""

    def __init__(self, serving, registry=None, *, num_blocks=100, caching=None, max_num_seqs=8):
        pool = (caching or Paged(block_size=4)).pool(KvMemory(num_blocks))
        self.core = EngineCore(
            batching=Chunked(),
            scheduling=Fcfs(),
            block_pool=pool,
            max_num_seqs=max_num_seqs,
            max_model_len=400,
            residents=serving.residents(registry or registry_of(), pool),
        )
        self.residents = self.core.residents
        self.loads = []  # on their way
        self.log = []  # (name, where from)
        self.now = 0.0
        self._next_id = 0

    def ask(self, adapter=None, num_prompt_tokens=4, num_output_tokens=3, segments=()):
        prompt = Prompt(num_prompt_tokens, tuple(Segment(*segment) for segment in segments))
        request = Request(self._next_id, self.now, prompt, adapter=adapter)
        self._next_id += 1
        return self.core.add(request, num_output_tokens)

    def step(self, come=True, now=None):
        """Runs one step; if `come`, requested adapters arrive before its end. Returns its plan, or None."""
        self.now = self.now + 1.0 if now is None else now
        plan = self.core.plan(self.now)
        loads = self.core.take_adapter_loads()
        self.log += [(load.name, load.source) for load in loads]
        self.loads += loads
        if come:
            self.come()
        self.served = set() if plan is None else set(plan.tokens_by_request)
        if plan is not None:
            self.core.commit(plan, StepOutcome(), self.now)
            self.core.check_integrity()
        return plan

    def come(self):
        for load in self.loads:
            self.core.adapter_loaded(load.name)
        self.loads = []

    def run(self, max_steps=300):
        for _ in range(max_steps):
            if not self.core.num_unfinished:
                return
            self.step()
        raise AssertionError("the requests do not end")


# What there is.


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
        (lambda: Exchange(cycle_time_s=0.0), "cycle_time_s=0.0: must be a finite time > 0 s"),
        (lambda: Exchange(max_active_adapters=9), "max_active_adapters=9: must be >= 1 and <= max_loras=8"),
        (lambda: Exchange(pinned=("a",)), r"pinned=\['a'\]: must be \[\]"),
        (lambda: Merged(max_serve_s=-1.0), "max_serve_s=-1.0: must be a finite time > 0 s"),
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


# Slots.


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


# One pool.


def test_an_adapter_takes_blocks_of_kv_memory_by_its_rank():
    machine = Machine(UnifiedPaging(), registry_of("a", rank=9))  # 9 bytes: 3 blocks of 4
    machine.ask("a", num_prompt_tokens=4, num_output_tokens=9)
    machine.step()
    machine.step()
    assert machine.residents.num_blocks == 3
    assert machine.core.block_pool.num_used == 3 + 1
    machine.run()
    assert machine.core.block_pool.num_used == 3  # it is unused, and it stays


def test_an_idle_adapter_gives_way_to_the_kv_of_a_prompt_and_of_an_answer():
    for num_prompt, num_output in ((24, 2), (4, 22)):
        machine = Machine(UnifiedPaging(), registry_of("a"), num_blocks=6)
        machine.ask("a")
        machine.run()
        assert machine.residents.num_blocks == 1
        machine.ask(None, num_prompt, num_output)
        machine.run()
        assert machine.residents.counts.num_evicted == 1
        assert machine.residents.num_blocks == machine.core.block_pool.num_used == 0


def test_an_adapter_in_use_makes_sequences_go_not_itself():
    machine = Machine(UnifiedPaging(), registry_of("a"), num_blocks=8)
    first, second = machine.ask("a", 8, 20), machine.ask(None, 8, 20)
    machine.run()
    assert machine.core.num_preemptions > 0
    assert first.num_preemptions == 0 < second.num_preemptions
    assert machine.residents.counts.num_evicted == 0


def test_a_prompt_that_fits_only_without_its_adapter_is_rejected():
    machine = Machine(UnifiedPaging(), registry_of("a"), num_blocks=6)
    machine.ask(None, 24, 1)
    machine.ask("a", 20, 1)
    with pytest.raises(
        RejectedError, match=r"prompt of 21 tokens: the KV cache holds at most 20 .* its adapter"
    ):
        machine.ask("a", 21, 1)
    machine.run()


def test_a_wanted_adapter_is_evicted_last():
    machine = Machine(UnifiedPaging(), registry_of("abc"), num_blocks=6, max_num_seqs=1)
    for name in "ab":
        machine.ask(name)
        machine.run()
    machine.ask(None, 4, 14)  # takes five blocks in the end; a and b have one each
    machine.ask("a")
    machine.run()
    assert [name for name, _ in machine.log] == ["a", "b"]  # b, used later, had to go


@given(
    asks=st.lists(
        st.tuples(st.sampled_from([None, *"abcd"]), st.integers(1, 20), st.integers(1, 20)),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(12, 24),
    block_size=st.sampled_from([1, 4]),
    cache=st.sampled_from([Paged, PrefixCaching, Radix]),
    prefetch=st.integers(0, 3),
    data=st.data(),
)
def test_no_block_is_leaked_and_every_request_ends(asks, num_blocks, block_size, cache, prefetch, data):
    """After every commit, as `Machine.step` checks: blocks free + owned + of adapters = all."""
    ranks = {name: data.draw(st.sampled_from([1, 4, 9])) for name in "abcd"}
    adapters = [Adapter(name=name, rank=rank) for name, rank in ranks.items()]
    registry = Registry(adapters, "base", AdapterMemory(1.0, 4.0))
    caching = cache(block_size=block_size)
    machine = Machine(UnifiedPaging(prefetch=prefetch), registry, num_blocks=num_blocks, caching=caching)
    for adapter, num_prompt, num_output in asks:
        try:
            machine.ask(adapter, num_prompt, num_output)
        except RejectedError:
            continue
        machine.step(come=data.draw(st.booleans()))
    for _ in range(2000):
        if not machine.core.num_unfinished:
            break
        machine.step(
            come=data.draw(st.booleans()) or not machine.core.running or not machine.core.decodes.size
        )
    assert not machine.core.num_unfinished
    machine.come()
    pool = machine.core.block_pool
    assert pool.num_used == machine.residents.num_blocks
    machine.residents.evict_until(lambda: False)
    assert pool.num_used == machine.residents.num_blocks == 0
    machine.core.check_integrity()


# Turns.


def test_adapters_that_always_have_requests_all_get_their_turns():
    """Four, two of them active at a time for two steps: they start about equally often."""
    machine = Machine(Exchange(max_loras=3, max_active_adapters=2, cycle_time_s=2.0), max_num_seqs=4)
    starts = {name: [] for name in "abcd"}
    sequences = []
    for step in range(120):
        for name in "abcd":  # never an empty queue
            num_waiting = sum(s.request.adapter == name and s.state.name == "waiting" for s in sequences)
            for _ in range(3 - num_waiting):
                sequences.append(machine.ask(name, 4, 2))
        machine.step()
        for seq in sequences:
            if seq.state.name != "waiting" and seq.request_id not in starts[seq.request.adapter]:
                starts[seq.request.adapter].append(seq.request_id)
        sequences = [seq for seq in sequences if seq.state.name != "ended"]
        assert len(machine.residents.active) <= 2
        assert step < 20 or all(starts.values())
    counts = sorted(len(started) for started in starts.values())
    assert counts[0] >= 0.7 * counts[-1]


def test_no_adapter_leaves_while_no_other_is_waited_for():
    machine = Machine(Exchange(max_loras=2, max_active_adapters=1, cycle_time_s=2.0))
    machine.ask("a", 4, 50)
    for _ in range(30):
        machine.step()
    assert machine.residents.active == ("a",)
    machine.ask("b")
    machine.step()
    assert machine.residents.active == ("b",)  # its time was over, and a request waits
    assert machine.residents.is_resident("a")  # it still runs


# Merged weights.


def test_merged_weights_serve_one_adapter_at_a_time_and_the_next_in_line_comes_then():
    machine = Machine(Merged(max_serve_s=None))
    for name in (None, "a", "b", "a", "b"):
        machine.ask(name)
    together = []
    for _ in range(60):
        plan = machine.step()
        if plan is not None:
            together.append(machine.served)
            assert plan.adapters is None
    assert max(map(len, together)) == 2
    order = [frozenset(group) for group in together]
    assert [group for i, group in enumerate(order) if group not in order[:i]] == [{0}, {1, 3}, {2, 4}]
    assert [name for name, _ in machine.log] == ["a", "b"]


def test_an_adapter_whose_time_is_over_lets_others_in():
    machine = Machine(Merged(max_serve_s=3.0), max_num_seqs=1)
    first = [machine.ask("a", 4, 2) for _ in range(6)]
    other = machine.ask("b", 4, 2)
    machine.run()
    assert [name for name, _ in machine.log] == ["a", "b", "a"]
    assert other.finish_reason is not None
    assert all(seq.finish_reason is not None for seq in first)


# All ways of serving adapters.


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
