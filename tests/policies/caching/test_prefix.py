"""Prefix caching against a pool that works block by block and token by token, as vLLM's does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.core.decode_set import DecodeSet
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Branching, Prompt, Request, Segment
from policies.core.sequence import FinishReason, Sequence
from policies.scheduling.fcfs import Fcfs

BLOCK_SIZE = 4


def tokens_of(request, num_tokens):
    """Returns made-up token ids, equal exactly where contents are equal."""
    tokens = []
    for content_id, n in request.prompt.segments:
        tokens += [(content_id, i) for i in range(n)]
    tokens += [("tail", request.request_id, i) for i in range(request.prompt.num_tokens - len(tokens))]
    tokens = tokens[: request.prompt.num_tokens]
    answer = ("answer", request.request_id) if request.answer_id is None else request.answer_id
    tokens += [(answer, i) for i in range(num_tokens - len(tokens))]
    return tokens[:num_tokens]


class BlockByBlock:
    """A slow model of vLLM's block pool: one list of free blocks, one dictionary of keys."""

    def __init__(self, num_blocks):
        self.free = [(None, i) for i in range(num_blocks)]  # (key, name) in the order of reuse
        self.stored = {}  # key -> names, the offered one first
        self.owners = {}  # name -> number of owners
        self.tables = {}  # request id -> [(key, name)]
        self.loose = []
        self.num_evicted = 0

    def keys(self, request, num_tokens):
        tokens = tokens_of(request, num_tokens)
        return [tuple(tokens[: end + 1]) for end in range(BLOCK_SIZE - 1, num_tokens, BLOCK_SIZE)]

    def num_found(self, request, num_known):
        keys = self.keys(request, num_known - 1)
        return next((i for i, key in enumerate(keys) if key not in self.stored), len(keys))

    def admit(self, request, num_found):
        table = self.tables[request.request_id] = []
        for key in self.keys(request, num_found * BLOCK_SIZE):
            name = self.stored[key][0]
            if (key, name) in self.free:
                self.free.remove((key, name))
            self.owners[name] = self.owners.get(name, 0) + 1
            table.append((key, name))

    def hand_out(self, num_blocks):
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        for key, name in taken:
            if key is not None:
                self.num_evicted += 1
                self.stored[key].remove(name)
                if not self.stored[key]:
                    del self.stored[key]
        return [name for _, name in taken]

    def grow(self, request, num_tokens):
        table = self.tables[request.request_id]
        for name in self.hand_out(-(-num_tokens // BLOCK_SIZE) - len(table)):
            self.owners[name] = 1
            table.append((None, name))
        self.offer(request, num_tokens)

    def offer(self, request, num_tokens):
        table = self.tables[request.request_id]
        for i, key in enumerate(self.keys(request, num_tokens)):
            if table[i][0] is None:
                table[i] = (key, table[i][1])
                self.stored.setdefault(key, []).append(table[i][1])

    def take(self, num_blocks):
        self.loose += self.hand_out(num_blocks)

    def release(self, request, num_tokens, num_planned):
        table = self.tables.pop(request.request_id)
        while len(table) < -(-num_tokens // BLOCK_SIZE):
            table.append((None, self.loose.pop()))
            self.owners[table[-1][1]] = 1
        self.tables[request.request_id] = table
        self.offer(request, num_tokens - num_planned)
        del self.tables[request.request_id]
        for i in range((num_tokens - num_planned) // BLOCK_SIZE, len(table)):
            key, name = table[i]
            if key is not None:
                self.stored[key].remove(name)
                if not self.stored[key]:
                    del self.stored[key]
                table[i] = (None, name)
        for key, name in reversed(table):
            self.owners[name] -= 1
            if not self.owners[name]:
                if key is None:
                    self.free.insert(0, (None, name))
                else:
                    self.free.append((key, name))


class Heard:
    """Keeps the names of the stored blocks, with their tokens and all before them, as a router's index."""

    def __init__(self, requests, block_size=BLOCK_SIZE):
        self.requests = requests
        self.block_size = block_size
        self.keys = {}

    def stored(self, request_id, first, names):
        for number, name in enumerate(names, first):
            assert name not in self.keys, "a block was stored twice"
            self.keys[name] = tuple(tokens_of(self.requests[request_id], (number + 1) * self.block_size))

    def removed(self, names):
        for name in names:
            del self.keys[name]


def is_private(key):
    """Returns whether only its own request can find a block."""
    return key[-1][0] == "tail" or isinstance(key[-1][0], tuple)


contents = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 3, 4, 8, 11, 16])), max_size=4)
asks = st.tuples(contents, st.integers(1, 9), st.none() | st.integers(0, 2))
actions = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 7), st.sampled_from([0, 1, 3, 5, 12, 100])), max_size=60
)


@given(st.integers(6, 40), st.lists(asks, min_size=1, max_size=8), actions, st.booleans())
def test_prefix_caching_behaves_as_a_pool_that_goes_block_by_block(num_blocks, asks, actions, reports):
    """Admissions, chunks, decodes, ends and preemptions of plans that were not run, in any order.

    What the pool reports to a listener is what it holds at any time.
    """
    pool = PrefixCaching(block_size=BLOCK_SIZE).pool(KvMemory(num_blocks))
    heard = Heard({})
    assert not reports or pool.report_to(heard)
    naive = BlockByBlock(num_blocks)
    decodes = DecodeSet(8, BLOCK_SIZE, {})
    seqs = []
    for request_id, (segments, rest, answer_id) in enumerate(asks):
        prompt = Prompt(
            sum(n for _, n in segments) + rest, tuple(Segment(content_id, n) for content_id, n in segments)
        )
        request = Request(request_id, 0.0, prompt, answer_id=answer_id)
        seqs.append(Sequence(request, decodes, 10**6, FinishReason.stop, 10**6))
        heard.requests[request_id] = request
    held = {}  # request id -> tokens held
    for number, which, amount in actions:
        seq = seqs[which % len(seqs)]
        request_id = seq.request_id
        if request_id not in held:
            admit_to_both(pool, naive, seq, held)
        elif number == 0:
            pool.release(seq, held[request_id])
            naive.release(seq.request, held.pop(request_id), 0)
        elif not grow_both(pool, naive, seq, held, held[request_id] + amount, is_undone=number == 1):
            continue
        elif number == 2:
            ids = pool.block_ids(seq, held[request_id])
            assert len(ids) == len(set(ids)) == -(-held[request_id] // BLOCK_SIZE)
        assert pool.num_free == len(naive.free)
        assert pool.num_evicted == naive.num_evicted
        if reports:
            pool.report_delayed([])
            assert set(heard.keys.values()) == {key for key in naive.stored if not is_private(key)}
            assert len(set(heard.keys.values())) == len(heard.keys)
        pool.check_integrity((seqs[request_id], tokens) for request_id, tokens in held.items())
        for seq in seqs:
            if seq.request_id not in held:
                assert pool.num_cached(seq) == naive.num_found(seq.request, seq.num_known) * BLOCK_SIZE
    check_shared_blocks(pool, seqs, held)


def admit_to_both(pool, naive, seq, held):
    """Admits a sequence to both if it fits; what is found and what fits must be equal."""
    num_cached = pool.num_cached(seq)
    num_found = naive.num_found(seq.request, seq.num_known)
    assert num_cached == num_found * BLOCK_SIZE
    revived = sum((key, naive.stored[key][0]) in naive.free for key in naive.keys(seq.request, num_cached))
    fits = -(-seq.num_known // BLOCK_SIZE) - num_found + revived <= len(naive.free)
    assert pool.can_admit(seq, num_cached, is_alone=True) == fits
    if fits:
        pool.admit(seq, num_cached)
        naive.admit(seq.request, num_found)
        held[seq.request_id] = num_cached


def grow_both(pool, naive, seq, held, wanted, is_undone):
    """Grows a sequence to that many tokens, unless blocks are missing; returns whether it has grown.

    is_undone: the step is taken back, as if the sequence had been preempted.
    """
    num_held = held[seq.request_id]
    need = pool.blocks_to_grow(seq, num_held, wanted)
    assert need == -(-wanted // BLOCK_SIZE) - -(-num_held // BLOCK_SIZE)
    if need > pool.num_free:
        return False
    if num_held < seq.num_known:
        wanted = min(wanted, seq.num_known)
        pool.grow(seq, num_held, wanted)
        naive.grow(seq.request, wanted)
    else:
        pool.take(need)
        naive.take(need)
    if is_undone:
        planned = wanted - held.pop(seq.request_id)
        pool.release(seq, wanted, planned)
        naive.release(seq.request, wanted, planned)
    else:
        held[seq.request_id] = wanted
    return True


def check_shared_blocks(pool, seqs, held):
    """Checks that sequences share a block only if all their tokens up to its end are equal."""
    ids_of = {request_id: pool.block_ids(seqs[request_id], tokens) for request_id, tokens in held.items()}
    for one, ids in ids_of.items():
        for other, others in ids_of.items():
            shared = [i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a == b]
            mine = tokens_of(seqs[one].request, held[one])
            theirs = tokens_of(seqs[other].request, held[other])
            for i in shared:
                end = (i + 1) * BLOCK_SIZE
                assert mine[:end] == theirs[:end], "two sequences share a block of different content"


def make_engine(num_blocks=20, budget=64):
    return EngineCore(
        batching=Chunked(max_num_batched_tokens=budget),
        scheduling=Fcfs(),
        block_pool=PrefixCaching(block_size=BLOCK_SIZE).pool(KvMemory(num_blocks)),
        max_num_seqs=8,
        max_model_len=4096,
    )


def serve(core, request, answer):
    """Runs one request to its end; returns the cached tokens that it found."""
    core.add(request, stop_after=answer)
    while (plan := core.plan(0.0)) is not None:
        found = {seq.request_id: seq.num_found for seq in plan.admitted}
        core.commit(plan, StepOutcome(), 0.0)
        if request.request_id in found:
            num_found = found[request.request_id]
    return num_found


def test_the_next_turn_finds_prompt_and_answer_of_the_last():
    """Turn 0: 10 prompt tokens, 7 of answer; the last of them has no KV: 16 computed tokens, four blocks."""
    core = make_engine()
    first = Request(0, 0.0, Prompt(10, (Segment(5, 10),)), answer_id=6)
    assert serve(core, first, 7) == 0
    said = (Segment(5, 10), Segment(6, 7), Segment(7, 4))
    assert serve(core, Request(1, 0.0, Prompt(21, said)), 2) == 16


@pytest.mark.parametrize(("num_tokens", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_hit_is_full_blocks_and_leaves_a_token_to_compute(num_tokens, found):
    core = make_engine()
    prompt = Prompt(num_tokens, (Segment(0, num_tokens),))
    assert serve(core, Request(0, 0.0, prompt), 1) == 0
    assert serve(core, Request(1, 0.0, prompt), 1) == found


def test_a_prompt_in_which_no_block_ends_is_served_with_several_answers():
    core = make_engine()
    core.add(Request(0, 0.0, Prompt(3), branching=Branching(2)))
    assert core.plan(0.0).tokens_by_request == {0: 3}
    assert core.block_pool.num_used == 1


def test_equal_prompts_of_one_step_share_their_blocks():
    """The first is handed three full blocks of 13 tokens; the second, in the same step, finds them."""
    core = make_engine()
    prompt = Prompt(13, (Segment(0, 13),))
    core.add(Request(0, 0.0, prompt))
    core.add(Request(1, 0.0, prompt))
    plan = core.plan(0.0)
    assert plan.tokens_by_request == {0: 13, 1: 1}
    assert core.block_pool.num_used == 4 + 1


def test_of_a_prompt_in_pieces_the_last_piece_goes_first():
    core = make_engine(num_blocks=10)
    pieces = tuple(Segment(content_id, 8) for content_id in range(4))
    serve(core, Request(0, 0.0, Prompt(32, pieces)), 1)
    serve(core, Request(1, 0.0, Prompt(20)), 1)  # five blocks: two unused ones, three of the eight
    probe = Sequence(Request(9, 0.0, Prompt(33, pieces)), core.decodes, 99, FinishReason.stop, 99)
    assert core.block_pool.num_cached(probe) == 20


def test_a_tail_is_evicted_before_its_head_and_the_oldest_first():
    """Ten blocks: A leaves 4, B leaves 4. C takes 5: two that were never used, then the last three of A."""
    core = make_engine(num_blocks=10)
    for request_id in (0, 1):
        serve(core, Request(request_id, 0.0, Prompt(16, (Segment(request_id, 16),))), 1)
    assert core.block_pool.num_evicted == 0
    serve(core, Request(2, 0.0, Prompt(20)), 1)
    assert core.block_pool.num_evicted == 3
    probes = {
        n: Sequence(Request(9, 0.0, Prompt(17, (Segment(n, 16),))), core.decodes, 99, FinishReason.stop, 99)
        for n in (0, 1)
    }
    assert {n: core.block_pool.num_cached(probe) for n, probe in probes.items()} == {0: 4, 1: 16}


@given(asks=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=30))
def test_what_a_cache_finds_does_not_depend_on_the_places_it_has_forgotten(asks):
    """Pieces shorter than a block among them: no block ends there, but other pieces lie behind."""
    pieces_given = [(1, 10), (2, 1), (3, 8), (4, 2), (5, 1), (6, 9)]
    forgetful, mindful = make_engine(), make_engine()
    for request_id, (text, num_pieces) in enumerate(asks):
        pieces = tuple(Segment(10 * text + content, tokens) for content, tokens in pieces_given[:num_pieces])
        request = Request(request_id, 0.0, Prompt(sum(n for _, n in pieces), pieces))
        forgetful.block_pool._places.forget_unused(forgetful.block_pool._used_places())
        assert serve(forgetful, request, 3) == serve(mindful, request, 3)
    forgetful.block_pool._places.forget_unused(forgetful.block_pool._used_places())
    assert len(forgetful.block_pool._places._chains) <= 20 + 3 * len(
        pieces_given
    )  # a place a block, those new, their way
