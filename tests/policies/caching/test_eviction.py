"""Eviction orders: textbook reference strings, and the entries that each order is meant to keep."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.caching.content import FutureUses, extend_history
from policies.caching.eviction import (
    MAIN,
    PROBATION,
    SMALL,
    Belady,
    Fifo,
    Lfu,
    Lru,
    Priority,
    S3Fifo,
    SizeAware,
    TwoQ,
)
from policies.caching.radix_tree import RadixTree
from policies.core.request import Segment

ONLINE = [Lru(), Lfu(), Fifo(), Priority(), SizeAware(), TwoQ(), S3Fifo()]


def names(orders):
    return [type(order).__name__ for order in orders]


def misses(order, references, capacity):
    """Counts the faults of single-token prompts in a cache of `capacity` tokens (textbook paging)."""
    prompts = [(Segment(page, 1),) for page in references]
    future = FutureUses(prompts)
    tree = RadixTree(eviction=order, future=future)
    num_misses = 0
    for index, prompt in enumerate(prompts):
        future.begin(index)
        if tree.match(prompt).num_tokens == 0:
            num_misses += 1
            tree.evict(tree.num_tokens + 1 - capacity)
        tree.insert(prompt)
    return num_misses


def fewest_misses(references, capacity):
    """Computes the misses of Belady's MIN, which evicts what is used furthest ahead."""
    cached, num_misses = set(), 0
    for index, page in enumerate(references):
        if page in cached:
            continue
        num_misses += 1
        if len(cached) == capacity:
            ahead = references[index + 1 :]
            cached.remove(max(cached, key=lambda c: ahead.index(c) if c in ahead else math.inf))
        cached.add(page)
    return num_misses


def cached(tree, content_ids):
    """Returns which of these single runs are in the tree; does not touch them."""
    present = {node.segments[0][0] for node in tree.nodes()}
    return [content_id for content_id in content_ids if content_id in present]


def single(content_id, num_tokens=1):
    return (Segment(content_id, num_tokens),)


@pytest.mark.parametrize(
    ("order", "frames", "faults"),
    # Belady's reference string; FIFO is the one with more faults for more frames (Belady's anomaly).
    [(Fifo(), 3, 9), (Fifo(), 4, 10), (Lru(), 3, 10), (Lru(), 4, 8), (Belady(), 3, 7), (Belady(), 4, 6)],
    ids=lambda value: type(value).__name__ if hasattr(value, "key") else None,
)
def test_textbook_faults(order, frames, faults):
    assert misses(order, [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5], frames) == faults


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 5))
def test_belady_reaches_the_fewest_misses_and_no_order_beats_it(references, capacity):
    fewest = fewest_misses(references, capacity)
    assert misses(Belady(), references, capacity) == fewest
    for order in ONLINE:
        assert misses(order, references, capacity) >= fewest


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 5))
def test_lru_and_fifo_are_their_definitions(references, capacity):
    for order, moves_up in ((Lru(), True), (Fifo(), False)):
        queue, num_misses = [], 0
        for page in references:
            if page in queue:
                if moves_up:
                    queue.append(queue.pop(queue.index(page)))
                continue
            num_misses += 1
            queue.append(page)
            del queue[:-capacity]
        assert misses(order, references, capacity) == num_misses


def test_lfu_keeps_what_was_asked_for_often():
    tree = RadixTree(eviction=Lfu())
    for content_id in (1, 1, 1, 2, 2, 3, 4):
        tree.insert(single(content_id))
    tree.evict(2)
    assert cached(tree, [1, 2, 3, 4]) == [1, 2]


def test_priority_keeps_the_important_and_shares_it_with_the_prefix():
    tree = RadixTree(eviction=Priority())
    tree.insert((Segment(1, 4), Segment(2, 4)), priority=5)
    tree.insert(single(3), priority=3)
    tree.insert(single(4), priority=4)
    tree.match(single(3))
    tree.evict(1)
    assert cached(tree, [1, 3, 4]) == [1, 4]
    tree.insert((Segment(1, 4), Segment(9, 4)), priority=0)
    tree.evict(4)  # the new branch: its prefix has inherited 5, itself it has 0
    assert sorted((node.depth, node.num_tokens, node.priority) for node in tree.nodes()) == [
        (0, 1, 4),
        (0, 4, 5),
        (4, 4, 5),
    ]


def test_size_aware_keeps_many_small_over_one_big():
    tree = RadixTree(eviction=SizeAware(fixed_cost_tokens=100))
    tree.insert(single(1, 10))
    tree.insert(single(2, 1000))
    assert tree.evict(1) == 1000
    assert cached(tree, [1, 2]) == [1]


def test_size_aware_weighs_frequency_against_size():
    """Small: 1 hit x (100 / 10 + 1) = 11. Big: 12 hits x (100 / 1000 + 1) = 13.2."""
    tree = RadixTree(eviction=SizeAware(fixed_cost_tokens=100))
    for _ in range(12):
        tree.insert(single(2, 1000))
    tree.insert(single(1, 10))
    assert tree.evict(1) == 10


@pytest.mark.parametrize(("order", "kept"), [(SizeAware(fixed_cost_tokens=1), []), (Lfu(), [0])])
def test_size_aware_forgets_old_fame_and_lfu_does_not(order, kept):
    """20 hits are worth 20 x 2 = 40, the k-th newcomer 2k: 2 more than the victim before it."""
    tree = RadixTree(eviction=order)
    for _ in range(20):
        tree.insert(single(0))
    for content_id in range(1, 22):
        assert cached(tree, [0]) == [0]
        tree.evict(tree.num_tokens + 1 - 2)
        tree.insert(single(content_id))
    assert cached(tree, [0]) == kept  # the 20th was worth as much and younger


def test_two_q_lets_a_scan_pass_by():
    """Content that came back after probation stays, while 1,000 one-time prompts go through."""
    tree = RadixTree(eviction=TwoQ(probation_share=0.25, ghost_share=1.0))
    capacity = 20

    def ask(content_id):
        tree.insert(single(content_id))
        tree.evict(tree.num_tokens - capacity)

    hot = list(range(5))
    for content_id in [*hot, *range(100, 120)]:  # the hot ones leave probation
        ask(content_id)
    assert cached(tree, hot) == []
    for content_id in hot:  # remembered: they come back to the main queue
        ask(content_id)
    for content_id in range(1000, 2000):
        ask(content_id)
    assert cached(tree, hot) == hot
    assert {node.segments[0][0] for node in tree.nodes() if node.queue == MAIN} == set(hot)
    tree.check_integrity()
    plain = RadixTree(eviction=Lru())
    for content_id in [*hot, *hot, *range(1000, 2000)]:
        plain.insert(single(content_id))
        plain.evict(plain.num_tokens - capacity)
    assert cached(plain, hot) == []


def test_two_q_remembers_no_more_than_its_ghosts_share():
    order = TwoQ(ghost_share=0.5)
    tree = RadixTree(eviction=order)
    for content_id in range(200):
        tree.insert(single(content_id))
        tree.evict(tree.num_tokens - 20)
    # 180 to 199 are cached, and half of 21 whole tokens are remembered: 170 to 179.
    assert tree.insert(single(169)).node.queue == PROBATION
    assert tree.insert(single(170)).node.queue == MAIN
    assert not order._ghosts  # what was given stays blank: two caches share no memory


class PaperS3Fifo:
    """S3-FIFO for objects of one size, written from algorithm 1 of the paper, heads of queues first.

    The paper's evictS continues until an object of the small queue has gone, too, after "if M is full:
    evictM()"; here the first eviction ends it.
    """

    def __init__(self, capacity, small_share=0.1, ghost_share=0.9):
        self.capacity, self.small_share, self.num_ghosts = capacity, small_share, ghost_share * capacity
        self.small, self.main, self.ghost, self.freq = [], [], [], {}

    def read(self, x):
        if x in self.small or x in self.main:
            self.freq[x] = min(self.freq[x] + 1, 3)
            return True
        while len(self.small) + len(self.main) >= self.capacity:
            self.evict()
        if x in self.ghost:
            self.ghost.remove(x)
            self.main.insert(0, x)
        else:
            self.small.insert(0, x)
        self.freq[x] = 0
        return False

    def evict(self):
        if len(self.small) >= self.small_share * self.capacity:
            self.evict_small()
        else:
            self.evict_main()

    def evict_small(self):
        while self.small:
            tail = self.small.pop()
            if self.freq[tail] <= 1:
                self.ghost.insert(0, tail)
                while len(self.ghost) > self.num_ghosts:
                    self.ghost.pop()
                return
            self.freq[tail] = 0  # "its access bits are cleared during the move"
            self.main.insert(0, tail)
            if len(self.main) > self.capacity - self.small_share * self.capacity:
                self.evict_main()
                return
        self.evict_main()

    def evict_main(self):
        while True:
            tail = self.main.pop()
            if not self.freq[tail]:
                return
            self.freq[tail] -= 1
            self.main.insert(0, tail)


@given(st.lists(st.integers(0, 9), max_size=120), st.integers(1, 8), st.sampled_from([0.1, 0.25, 0.5]))
@example([0, 1, 2, 3, 0, 0, 1, 1, 4], 4, 0.5)  # exactly its share: the small queue gives
def test_s3_fifo_holds_what_the_papers_algorithm_holds(references, capacity, small_share):
    tree = RadixTree(eviction=S3Fifo(small_share=small_share))
    paper = PaperS3Fifo(capacity, small_share)
    for content_id in references:
        is_hit = tree.match(single(content_id)).num_tokens == 1
        if not is_hit:
            tree.evict(tree.num_tokens + 1 - capacity)
        tree.insert(single(content_id))
        assert is_hit == paper.read(content_id)
        queues = {node.segments[0][0]: node.queue for node in tree.nodes()}
        assert queues == dict.fromkeys(paper.small, SMALL) | dict.fromkeys(paper.main, MAIN)


def test_s3_fifo_by_hand():
    """Ten places, one of them small: 0 is used twice there, 1 once; 2 to 9 never."""
    order = S3Fifo()
    tree = RadixTree(eviction=order)
    for content_id in [*range(10), 0, 0, 1]:
        tree.insert(single(content_id))
    tree.evict(1)  # 0 goes to main, 1 is evicted: a single use does not count
    assert cached(tree, range(10)) == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    assert tree.insert(single(1)).node.queue == MAIN  # it was remembered
    for content_id in range(20, 28):  # 2 to 9 are evicted unused
        tree.evict(1)
        tree.insert(single(content_id))
    assert cached(tree, range(10)) == [0, 1]
    tree.insert(single(0))
    while len(cached(tree, [0, 1])) == 2:  # the small queue gives until it holds less than its share
        tree.evict(1)
    assert cached(tree, [0, 1]) == [0]  # main: 0 came first, but was used, and joined anew behind 1


def test_s3_fifo_spares_an_entry_of_the_main_queue_once_a_use_and_three_times_at_the_most():
    """A hundred uses of 0 are counted as 3: it is passed over three times by newcomers, not a fourth time."""
    tree = RadixTree(eviction=S3Fifo(small_share=1.0, ghost_share=100.0))
    newcomers = range(1, 8)
    for content_id in [0, *newcomers]:
        tree.insert(single(content_id))
        tree.evict(1)  # remembered: it will come to the main queue
    for content_id in [0] * 101:
        tree.insert(single(content_id))
    survived = 0
    for content_id in newcomers:
        tree.insert(single(content_id))
        tree.evict(1)
        if not cached(tree, [0]):
            break
        assert cached(tree, newcomers) == []
        survived += 1
    assert survived == 3


def test_s3_fifo_lets_a_scan_pass_by():
    """Content used every 35th time stays in 20 places, while 2,000 one-time prompts go through."""
    tree = RadixTree(eviction=S3Fifo())
    plain = RadixTree(eviction=Lru())
    hot = list(range(5))
    hits = {id(tree): 0, id(plain): 0}
    for one in (tree, plain):
        for index in range(2000):
            for content_id in (1000 + index, *([hot[index // 6 % 5]] if index % 6 == 0 else ())):
                hits[id(one)] += content_id in hot and one.match(single(content_id)).num_tokens
                one.insert(single(content_id))
                one.evict(one.num_tokens - 20)
    assert hits[id(plain)] == 0
    assert hits[id(tree)] > 320  # of 334: once each was forgotten
    assert cached(tree, hot) == hot


def test_s3_fifo_forgets_what_is_gone():
    """Its memory of entries ends with them; ghosts are bounded; what was given stays blank."""
    given_order = S3Fifo(ghost_share=0.5)
    tree = RadixTree(eviction=given_order)
    for content_id in range(200):
        tree.insert((Segment(content_id, 2), Segment(content_id % 7, 3)))
        tree.match((Segment(content_id, 1),))  # splits: a node that no one has admitted
        tree.evict(tree.num_tokens - 50)
        order = tree._candidates.eviction
        assert set(order._joined) <= {node.inserted for node in tree.nodes()}
        assert order._ghosts._num_tokens <= 0.5 * 60
    tree.evict(tree.num_tokens)
    assert not order._joined
    assert not given_order._joined
    assert not given_order._ghosts


def test_both_halves_of_a_split_stay_in_their_queue():
    tree = RadixTree(eviction=TwoQ(ghost_share=10.0))
    tree.insert(single(1, 8))
    tree.evict(1)
    tree.insert(single(1, 8))
    tree.match(single(1, 3))
    assert [(node.num_tokens, node.queue) for node in tree.nodes()] == [(3, MAIN), (5, MAIN)]


def test_all_candidates_locked_in_one_queue_leaves_the_other():
    tree = RadixTree(eviction=TwoQ(probation_share=0.0, ghost_share=10.0))
    tree.insert(single(1))
    tree.evict(1)
    tree.insert(single(1))  # main
    tree.lock(tree.insert(single(2)).node)  # probation, locked
    assert tree.evict(1) == 1
    assert cached(tree, [1, 2]) == [2]


@pytest.mark.parametrize("order", ONLINE, ids=names(ONLINE))
@given(prompts=st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30), capacity=st.integers(1, 12))
def test_every_order_frees_what_is_asked_and_keeps_the_tree_whole(order, prompts, capacity):
    tree = RadixTree(eviction=order)
    for prompt in prompts:
        tree.insert(tuple(Segment(content_id, 1 + content_id) for content_id in prompt))
        tree.evict(tree.num_tokens - capacity)
        assert tree.num_tokens <= capacity
        tree.check_integrity()
    tree.evict(tree.num_tokens)
    assert tree.num_tokens == 0


def test_only_belady_is_offline():
    assert Belady.is_offline
    assert not any(order.is_offline for order in ONLINE)


def test_a_future_use_needs_a_run_that_reaches_so_far():
    history = extend_history(0, [Segment(1, 4)])
    future = FutureUses(
        [(Segment(1, 4), Segment(2, 3)), (Segment(1, 4), Segment(2, 9)), (Segment(2, 9),), (Segment(1, 4),)]
    )
    assert future.next_use(history, 2, 3) == 0
    assert future.next_use(history, 2, 4) == 1
    assert future.next_use(0, 1, 1) == 0
    future.begin(1)
    assert future.next_use(history, 2, 1) == math.inf  # request 2 has it with another history
    assert future.next_use(0, 1, 1) == 3


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"probation_share=1.5: must be a share, >= 0 and <= 1"):
        TwoQ(probation_share=1.5)
    with pytest.raises(ValueError, match="ghost_share=-1: must be a finite number >= 0"):
        TwoQ(ghost_share=-1)
    with pytest.raises(ValueError, match=r"small_share=1\.5: must be a share, >= 0 and <= 1"):
        S3Fifo(small_share=1.5)
    with pytest.raises(ValueError, match="ghost_share=inf: must be a finite number >= 0"):
        S3Fifo(ghost_share=math.inf)
    with pytest.raises(ValueError, match="fixed_cost_tokens=nan: must be a finite number >= 0"):
        SizeAware(fixed_cost_tokens=math.nan)
