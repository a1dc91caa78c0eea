"""Our radix tree against SGLang's RadixCache (0.5.23): the same calls, the same answers, the same evictions.

Runs in an environment that has `sglang` (`make parity` makes one), and is skipped elsewhere. Nothing of
SGLang is replaced but two things around the cache:
- its clock. RadixCache stamps nodes with time.monotonic(), whose resolution lets two stamps be equal; it gets
  a counter, so that its least recently used leaf is always one certain leaf.
- the KV pool that it gives evicted slots back to: a list that notes them. Without indices given, RadixCache
  stores the token ids themselves, so what comes back names the evicted tokens.
"""

import importlib
import itertools
import time
from array import array
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

from policies.caching.eviction import Fifo, Lfu, Lru, Priority
from policies.caching.radix_tree import RadixTree
from policies.core.request import Segment

pytestmark = pytest.mark.parity

ORDERS = {"lru": Lru(), "lfu": Lfu(), "fifo": Fifo(), "priority": Priority()}
MAX_RUN = 64  # a run's tokens have ids of their own: content_id * MAX_RUN + place in the run


@pytest.fixture(scope="module")
def radix_cache():
    """Imports SGLang's module of that name, with a counter instead of the clock."""
    if find_spec("sglang") is None or find_spec("torch") is None:
        pytest.skip("sglang is not installed here; `make parity` makes an environment that has it")
    module = importlib.import_module("sglang.srt.mem_cache.radix_cache")
    count = itertools.count()
    module.time = SimpleNamespace(monotonic=lambda: next(count), perf_counter=time.perf_counter)
    return module


class Theirs:
    """RadixCache behind our calls."""

    def __init__(self, module, page_size, order):
        self.base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        self.module = module
        self.evicted = []
        pool = SimpleNamespace(device="cpu", free_segment=self._note)
        if order == "lru":
            self.cache = module.RadixCache.create_simulated(mock_allocator=pool, page_size=page_size)
        else:
            params = module.CacheInitParams(False, None, pool, page_size, eviction_policy=order)
            self.cache = module.RadixCache(params)

    def match(self, runs):
        result = self.cache.match_prefix(self.base.MatchPrefixParams(key=self._key(runs)))
        return result.device_prefix_len, result.last_device_node

    def insert(self, runs, priority, num_counted):
        params = self.base.InsertParams(key=self._key(runs), priority=priority, inserted_len=num_counted)
        result = self.cache.insert(params)
        return result.prefix_len, result.last_device_node

    def lock(self, node):
        self.cache.inc_lock_ref(node)

    def unlock(self, node):
        self.cache.dec_lock_ref(node)

    def evict(self, num_tokens):
        self.evicted.clear()
        num_freed = self.cache.evict(self.base.EvictParams(num_tokens=num_tokens)).num_tokens_evicted
        return num_freed, tuple(self.evicted)

    def sizes(self):
        return self.cache.evictable_size(), self.cache.protected_size()

    def nodes(self):
        stack, found = [(self.cache.root_node, ())], []
        while stack:
            node, path = stack.pop()
            path = (*path, tuple(node.key.token_ids))
            found.append((path, node.lock_ref, node.hit_count))
            stack.extend((child, path) for child in node.children.values())
        return sorted(found[1:])

    def _key(self, runs):
        return self.module.RadixKey(array("q", token_ids(runs)))

    def _note(self, values, start_pos):
        self.evicted.append(tuple(values.tolist()))


class Ours:
    """RadixTree behind the same calls."""

    def __init__(self, page_size, eviction):
        self.evicted = []
        self.tree = RadixTree(page_size=page_size, eviction=eviction, on_evict=self._note)

    def match(self, runs):
        return self.tree.match(runs)

    def insert(self, runs, priority, num_counted):
        num_new, node = self.tree.insert(runs, priority=priority, num_counted_tokens=num_counted)
        return node.num_prefix_tokens - num_new, node

    def lock(self, node):
        self.tree.lock(node)

    def unlock(self, node):
        self.tree.unlock(node)

    def evict(self, num_tokens):
        self.evicted.clear()
        return self.tree.evict(num_tokens), tuple(self.evicted)

    def sizes(self):
        return self.tree.num_evictable, self.tree.num_locked

    def nodes(self):
        found = []
        for node in self.tree.nodes():
            path, upwards = [], node
            while upwards.parent is not None:
                path.insert(0, node_token_ids(upwards))
                upwards = upwards.parent
            found.append((((), *path), node.lock_count, node.hits))
        return sorted(found)

    def _note(self, leaf):
        self.evicted.append(node_token_ids(leaf))


def token_ids(runs):
    return [content_id * MAX_RUN + place for content_id, length in runs for place in range(length)]


def node_token_ids(node):
    return tuple(token_ids(node.segments)[node.skip :])


def random_runs(rng, pool, max_run, page_size):
    """Draws a part of an earlier prompt, often cut within a run, followed by tokens that may be known."""
    runs = list(pool[rng.integers(len(pool))]) if pool else []
    runs = runs[: rng.integers(len(runs) + 1)]
    if runs and rng.random() < 0.5:
        content_id, length = runs[-1]
        runs[-1] = Segment(content_id, int(rng.integers(1, min(length + 5, MAX_RUN))))
    num_tokens = rng.integers(0, 3 * max(page_size, 8))
    while num_tokens > 0:
        length = int(rng.integers(1, max_run + 1))
        runs.append(Segment(int(rng.integers(3)), length))
        num_tokens -= length
    return tuple(runs[:200])


def play(theirs, ours, seed, stream, page_size, num_calls=50):
    """Plays one stream of calls on both; returns the tokens matched and evicted on the way."""
    rng = np.random.default_rng([seed, stream])
    max_run = int(rng.choice([1, 1, 3, 20, MAX_RUN - 1]))
    pool, held, num_matched, num_evicted = [], [], 0, 0
    for call in range(num_calls):
        where = f"stream {stream}, call {call}"
        runs = random_runs(rng, pool, max_run, page_size)
        action = rng.choice(["match", "start", "insert", "end", "evict"], p=[0.1, 0.3, 0.2, 0.25, 0.15])
        if action in ("match", "start"):
            (num_theirs, their_node), (num_ours, our_node) = theirs.match(runs), ours.match(runs)
            assert num_ours == num_theirs, where
            num_matched += num_ours
            if action == "start":  # a request: its prefix is locked until what it computed is inserted
                theirs.lock(their_node)
                ours.lock(our_node)
                held.append((runs, their_node, our_node))
        elif action == "insert" or (action == "end" and held):
            locked = held.pop(rng.integers(len(held))) if action == "end" else None
            if locked is not None:
                runs = (*locked[0], *runs[:2])
            pool.append(runs)
            priority, num_counted = int(rng.integers(3)), int(rng.choice([0, 0, 10]))
            (num_theirs, their_node) = theirs.insert(runs, priority, num_counted)
            (num_ours, our_node) = ours.insert(runs, priority, num_counted)
            assert num_ours == num_theirs, where
            if locked is not None and rng.random() < 0.5:  # it goes on, like a chunk of a prompt
                theirs.lock(their_node)
                ours.lock(our_node)
                held.append((runs, their_node, our_node))
            if locked is not None:
                theirs.unlock(locked[1])
                ours.unlock(locked[2])
        elif action == "evict":
            wanted = int(rng.integers(0, 4 * max(page_size, 8)))
            num_freed, evicted = theirs.evict(wanted)
            assert ours.evict(wanted) == (num_freed, evicted), where
            num_evicted += num_freed
        assert ours.sizes() == theirs.sizes(), where
    assert ours.nodes() == theirs.nodes(), f"stream {stream}, at its end"
    ours.tree.check_integrity()
    for _, their_node, our_node in held:
        theirs.unlock(their_node)
        ours.unlock(our_node)
    everything = 10**9
    assert ours.evict(everything) == theirs.evict(everything), f"stream {stream}, emptied"
    assert ours.sizes() == theirs.sizes() == (0, 0)
    return num_matched, num_evicted


CASES = {(order, page_size): 300 for order in ORDERS for page_size in (1, 16)}
CASES |= {("lru", 1): 1000, ("lru", 16): 1000}


@pytest.mark.parametrize(("order", "page_size", "num_streams"), [(*case, n) for case, n in CASES.items()])
def test_every_answer_and_every_eviction_is_sglangs(radix_cache, order, page_size, num_streams):
    num_matched = num_evicted = 0
    for stream in range(num_streams):
        theirs, ours = Theirs(radix_cache, page_size, order), Ours(page_size, ORDERS[order])
        matched, evicted = play(theirs, ours, 2023, stream, page_size)
        num_matched += matched
        num_evicted += evicted
    # The streams do share prefixes, and evict before their ends.
    assert num_matched > 100 * num_streams
    assert num_evicted > 100 * num_streams


def test_the_comparison_notices_another_order(radix_cache):
    def play_fifo_against_lru():
        for stream in range(50):
            play(Theirs(radix_cache, 1, "lru"), Ours(1, Fifo()), 2023, stream, 1)

    with pytest.raises(AssertionError, match="stream"):
        play_fifo_against_lru()
