"""Sequences that share what another one computes in the same step, and the preemption of that one."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.caching.tiered import GIB, Tiered
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Branching, Prompt, Request, Segment
from policies.core.sequence import FinishReason, SequenceState
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.priority import Priority
from tests.policies.core.labelled_memory import run_core

BLOCK_SIZE = 4
BELOW = {
    "block_size": BLOCK_SIZE,
    "host_gib": 40 * BLOCK_SIZE / GIB,
    "min_load_tokens": 1,
}  # a token is a byte
CACHES = {
    "prefix": PrefixCaching(block_size=BLOCK_SIZE, max_pinned_share=0.2, pin_s=9.0),
    "radix": Radix(block_size=BLOCK_SIZE),
    "tiered back": Tiered(**BELOW, write="back"),
    "tiered through": Tiered(**BELOW, write="through"),
}
SHARING = ["prefix", "tiered back", "tiered through"]  # radix finds what was computed before, not in the step


class Scripted:
    """Runs a given first step, then admits what fits and decodes."""

    def __init__(self, script):
        self._scripts = [script]

    def fill(self, view, step, now):
        if self._scripts:
            self._scripts.pop()(view, step)
            return
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, 99)
        for seq in view.waiting:
            step.admit(seq, 99)


def make_engine(cache, script, num_blocks=40, mode="recompute", scheduling=None, **options):
    return EngineCore(
        batching=Scripted(script),
        scheduling=scheduling or Fcfs(preemption_mode=mode),
        block_pool=CACHES[cache].pool(KvMemory(num_blocks, 1.0)),
        max_num_seqs=8,
        max_model_len=80,
        num_swap_blocks=20,
        **options,
    )


def add(core, request_id, *segments, num_pinned=0, **asks):
    """Adds a request whose prompt is segments (content, tokens) and one token of its own."""
    num_tokens = sum(n for _, n in segments) + 1
    prompt = Prompt(num_tokens, tuple(Segment(*segment) for segment in segments), num_pinned)
    return core.add(Request(request_id, 0.0, prompt, **asks), stop_after=3)


def commit(core, plan):
    core.commit(plan, StepOutcome(), 0.0)
    core.check_integrity()


def admit_all_then(*preempted, swap=None):
    """Returns a step that admits all waiting requests, and then preempts the given ones in their order."""

    def script(view, step):
        seqs = {seq.request_id: seq for seq in view.waiting}
        for seq in list(seqs.values()):
            assert step.admit(seq, 99)
        for request_id in preempted:
            step.preempt(seqs[request_id], swap=swap)

    return script


@pytest.mark.parametrize("cache", SHARING)
def test_sharers_of_what_a_preempted_sequence_was_to_compute_go_with_it(cache):
    """0 is to compute four blocks of text 7. 1 finds them and computes text 8 behind it, which 3 finds, too.
    2 has a text of its own. Of all 40 blocks only its three are in use; then all come back, and share.
    """
    core = make_engine(cache, admit_all_then(0))
    add(core, 0, (7, 16))
    one = add(core, 1, (7, 16), (8, 4))
    add(core, 2, (9, 8))
    three = add(core, 3, (7, 16), (8, 4), (9, 3))
    plan = core.plan(0.0)
    assert plan.tokens_by_request == {2: 9}
    assert [seq.request_id for seq in plan.preempted] == [3, 1, 0]
    assert (plan.admitted, core.block_pool.num_free) == ([core.find(2)], 37)
    assert (one.state, one.displaced_by, one.num_preemptions) == (SequenceState.waiting, None, 1)
    commit(core, plan)
    plan = core.plan(0.0)
    assert plan.tokens_by_request == {2: 1, 0: 17, 1: 5, 3: 4}
    commit(core, plan)
    assert (one.num_found, three.num_found) == (16, 20)


def test_a_radix_cache_does_not_offer_what_is_not_computed_yet():
    core = make_engine("radix", admit_all_then(0))
    add(core, 0, (7, 16))
    add(core, 1, (7, 16))
    plan = core.plan(0.0)
    assert (plan.tokens_by_request, [seq.request_id for seq in plan.preempted]) == ({1: 17}, [0])
    commit(core, plan)


@pytest.mark.parametrize("cache", SHARING)
def test_a_sharer_may_go_alone_and_its_victims_may_be_named_in_any_order(cache):
    """The policy need not know which sequences went with another: preempting them again does nothing."""
    core = make_engine(cache, admit_all_then(1))
    add(core, 0, (7, 16))
    add(core, 1, (7, 16))
    plan = core.plan(0.0)
    assert (plan.tokens_by_request, core.block_pool.num_free) == ({0: 17}, 35)
    commit(core, plan)
    core = make_engine(cache, admit_all_then(0, 1, 0))
    add(core, 0, (7, 16))
    one = add(core, 1, (7, 16))
    add(core, 2, (9, 8))
    assert core.plan(0.0).tokens_by_request == {2: 9}
    assert one.num_preemptions == 1


@pytest.mark.parametrize("cache", SHARING)
def test_what_was_computed_before_is_shared_on(cache):
    """0 computes 8 tokens of text 7 in the first step and has two blocks left, of which 1 finds both, and 2,
    whose prompt is shorter, none.
    """

    def script(view, step):
        step.admit(next(iter(view.waiting)), 8)

    def second(view, step):
        (zero,) = view.prefilling
        step.prefill(zero, 8)
        for seq in list(view.waiting):
            assert step.admit(seq, 99)
        step.preempt(zero)

    core = make_engine(cache, script)
    core.batching._scripts.insert(0, second)
    add(core, 0, (7, 16))
    add(core, 1, (7, 16))
    two = add(core, 2, (7, 8))
    commit(core, core.plan(0.0))
    plan = core.plan(0.0)
    assert [seq.request_id for seq in plan.preempted] == [1, 0]
    assert (plan.tokens_by_request, two.num_found) == ({2: 1}, 8)
    commit(core, plan)


@pytest.mark.parametrize(("last", "lost"), [(1, [1]), (0, [1, 0])])
def test_making_room_displaces_sharers_too(last, lost):
    """Ten blocks: 2 has filled four; 0 takes five, 1 finds four of these and takes the last.
    For a fifth block of 2 the least urgent one goes: 1 alone, or 0 and with it 1.
    """

    def admit_first(view, step):
        step.admit(next(iter(view.waiting)), 99)

    core = make_engine("prefix", admit_first, num_blocks=10, scheduling=Priority())
    two = core.add(Request(2, 0.0, Prompt(16)), stop_after=3)
    commit(core, core.plan(0.0))

    def script(view, step):
        for seq in sorted(view.waiting, key=lambda seq: seq.request_id):
            assert step.admit(seq, 99)
        step.decode(two)

    core.batching._scripts.append(script)
    for request_id in range(2):
        prompt = Prompt(17, (Segment(7, 16),))
        core.add(Request(request_id, 1.0, prompt, priority=1 + (request_id == last)), stop_after=3)
    plan = core.plan(0.0)
    assert [seq.request_id for seq in plan.preempted] == lost
    assert {seq.displaced_by for seq in plan.preempted} == {2}
    commit(core, plan)


def test_a_sequence_preempted_by_the_step_that_admitted_it_is_not_swapped_out():
    """The store would be made before the step that computes what 1 has found."""
    core = make_engine("prefix", admit_all_then(1), mode="swap")
    add(core, 0, (7, 16))
    one = add(core, 1, (7, 16))
    commit(core, core.plan(0.0))
    assert (one.num_swapped, core.take_transfers()) == (0, [])
    commit(core, core.plan(0.0))
    assert one.num_found == 16


def test_what_a_sequence_has_found_and_not_used_is_not_pinned():
    """1 pays for text 7 to be kept. Preempted at once, it has found, and not used, what 0 was to compute."""
    core = make_engine("prefix", admit_all_then(1, 0))
    add(core, 0, (7, 16))
    add(core, 1, (7, 16), num_pinned=16)
    add(core, 2, (9, 8))
    commit(core, core.plan(0.0))
    assert core.block_pool.num_pinned == 0


def below(core, *segments):
    """Puts the last of the segments into host memory, without those before it."""
    tokens = sum(n for _, n in segments)
    path = core.block_pool._places.path(
        Request(99, 0.0, Prompt(tokens, tuple(Segment(*s) for s in segments)))
    )
    core.block_pool._tiers[0].put(path[len(segments) - 1][0], 0, segments[-1][1] // BLOCK_SIZE)


@pytest.mark.parametrize("names_blocks", [False, True])
@pytest.mark.parametrize("branching", [None, Branching(2)])
def test_a_sharer_that_loads_what_comes_behind_that_goes_too_and_loads_nothing(branching, names_blocks):
    """Host memory has text 8 behind text 7, of which 0 is to compute 7, which 1 finds."""
    core = make_engine("tiered back", admit_all_then(0), names_blocks=names_blocks)
    add(core, 0, (7, 16))
    one = add(core, 1, (7, 16), (8, 8), branching=branching)
    add(core, 2, (9, 8))
    below(core, (7, 16), (8, 8))
    plan = core.plan(0.0)
    assert [seq.request_id for seq in plan.preempted] == [1, 0]
    assert (one.state, core.loading, len(core.free_slots)) == (SequenceState.waiting, {}, 7)
    assert (core.block_pool.num_free, [t for t in core.take_transfers() if t.target == "gpu"]) == (37, [])
    commit(core, plan)
    core.loaded(1)  # no sequence waits
    if names_blocks:
        return  # nothing was copied into this host memory
    plan = core.plan(0.0)
    (load,) = core.take_transfers()
    assert (load.seq, load.num_tokens, one.num_found) == (one, 8, 24)
    commit(core, plan)
    core.loaded(1)
    while core.num_unfinished:
        commit(core, core.plan(0.0))
    assert len(core.free_slots) == 8


@pytest.mark.parametrize("cache", CACHES)
def test_after_a_plan_that_is_given_up_no_sequence_keeps_what_it_was_to_compute(cache):
    """0, 1 and 2 took part. 3 waits for text 8, and has found text 7, if the cache offers it beforehand."""
    core = make_engine(cache, admit_all_then())
    add(core, 0, (7, 16), num_pinned=16)
    add(core, 1, (7, 16), num_pinned=16)
    add(core, 2, (9, 8))
    add(core, 3, (7, 16), (8, 8))
    if cache.startswith("tiered"):
        below(core, (7, 16), (8, 8))
    ended = core.cancel(core.plan(0.0))
    assert [(seq.request_id, seq.finish_reason) for seq in ended] == [
        (request_id, FinishReason.aborted) for request_id in range(4)
    ]
    core.check_integrity()
    assert (core.block_pool.num_free, core.num_unfinished) == (40, 0)
    again = add(core, 4, (7, 16))
    commit(core, core.plan(0.0))
    assert again.num_found == 0


class Fickle:
    """Admits what fits, and preempts some running sequences, whether they were admitted just now or not."""

    def __init__(self, seed, swaps):
        self._rng = random.Random(seed)
        self._swaps = swaps

    def fill(self, view, step, now):
        rng = self._rng
        for seq in view.prefilling:
            step.prefill(seq, rng.randint(1, 30))
        if rng.random() < 0.8:
            step.decode_all()
        for seq in view.waiting:
            if not step.admit(seq, rng.randint(1, 30)):
                break
        running = [*view.decoding, *view.prefilling]
        for seq in rng.sample(running, min(len(running), rng.choice([0, 0, 1, 2]))):
            step.preempt(seq, swap=self._swaps and rng.random() < 0.5)
        if not step.num_tokens:
            step.decode_all()
        if not step.num_tokens:
            for seq in [*view.prefilling, *view.waiting][:1]:
                verb = step.admit if seq.state is SequenceState.waiting else step.prefill
                verb(seq, seq.num_uncomputed)
        step.repeat()


def draw_requests(rng):
    """Draws many requests for few texts; some continue where others end."""
    requests = []
    for request_id in range(rng.randint(4, 24)):
        texts = [Segment(rng.randrange(2), rng.choice([8, 16])) for _ in range(rng.randint(1, 3))]
        num_tokens = sum(segment.num_tokens for segment in texts) + rng.randint(0, 5)
        branching = Branching(2) if rng.random() < 0.1 else None
        prompt = Prompt(num_tokens, tuple(texts), rng.choice([0, 0, 8]))
        requests.append((Request(request_id, 0.0, prompt, branching=branching), rng.randint(1, 6)))
    return requests


@pytest.mark.parametrize("cache", CACHES)
@given(st.integers(0, 2**32))
def test_after_any_preemption_behind_an_admission_all_sequences_compute_on_existing_kv(cache, seed):
    """The engine runs on a memory with labelled contents (labelled_memory.py)."""
    rng = random.Random(seed)
    num_swap_blocks, num_blocks = rng.choice([0, 20]), rng.randint(24, 40)
    host_blocks = rng.choice([4, 12, 40])
    caching = CACHES[cache]
    if cache.startswith("tiered"):
        caching = Tiered(**BELOW | {"host_gib": host_blocks * BLOCK_SIZE / GIB}, write=cache.split()[1])

    def make(names_blocks):
        return EngineCore(
            batching=Fickle(seed, swaps=num_swap_blocks > 0),
            scheduling=Fcfs(),
            block_pool=caching.pool(KvMemory(num_blocks, 1.0)),
            max_num_seqs=8,
            max_model_len=80,
            num_swap_blocks=num_swap_blocks,
            names_blocks=names_blocks,
        )

    tiers = (host_blocks, 0) if cache.startswith("tiered") else (0, 0)
    run_core(make, draw_requests(rng), seed, num_steps=60, num_swap_blocks=num_swap_blocks, tiers=tiers)
