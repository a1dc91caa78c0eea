"""The radix tree against flat lists of tokens, on hand-drawn trees, and on the Mooncake trace's own shape."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.caching.content import FutureUses
from policies.caching.eviction import Belady, Lru, Priority
from policies.caching.radix_tree import RadixTree
from policies.core.request import Segment
from tests.examples import examples


def runs(*pairs):
    return tuple(Segment(*pair) for pair in pairs)


def stream(text):
    """Returns a stream of tokens: one run of one token for each letter."""
    return tuple(Segment(ord(letter), 1) for letter in text)


def tokens(of_runs):
    """Returns every token by its identity: (run id, place in the run)."""
    return [(content_id, place) for content_id, length in of_runs for place in range(length)]


def num_common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def shape(tree):
    """Returns (depth, tokens, locks) of every node, sorted."""
    return sorted((node.depth, node.num_tokens, node.lock_count) for node in tree.nodes())


some_runs = st.lists(st.builds(Segment, st.integers(0, 2), st.integers(1, 6)), max_size=5).map(tuple)
page_sizes = st.sampled_from([1, 2, 3, 8])


def test_a_prompt_is_found_up_to_where_it_departs():
    tree = RadixTree()
    assert tree.insert(stream("hello world")).num_new_tokens == 11
    assert tree.match(stream("hello there")).num_tokens == 6
    assert tree.match(stream("jello")).num_tokens == 0
    assert tree.match(stream("hello world!")).num_tokens == 11
    assert tree.match(()).num_tokens == 0


def test_runs_of_one_id_share_the_shorter_length():
    tree = RadixTree()
    tree.insert(runs((7, 4), (9, 6)))
    assert tree.match(runs((7, 4), (9, 2), (5, 8))).num_tokens == 6
    assert tree.match(runs((7, 4), (9, 60))).num_tokens == 10
    assert tree.match(runs((7, 3), (9, 6))).num_tokens == 3  # 9 stands at another place: another token
    assert tree.match(runs((7, 2))).num_tokens == 2


def test_a_run_that_grows_is_inserted_behind_what_is_there():
    tree = RadixTree()
    tree.insert(runs((7, 4)))
    grown = tree.insert(runs((7, 10), (8, 1)))
    assert grown.num_new_tokens == 7
    assert grown.node.num_prefix_tokens == 11
    assert tree.path(grown.node) == runs((7, 10), (8, 1))
    assert tree.match(runs((7, 11))).num_tokens == 10


def test_insert_splits_where_prompts_part():
    tree = RadixTree()
    tree.insert(stream("abcde"))
    assert tree.insert(stream("abxy")).num_new_tokens == 2
    assert shape(tree) == [(0, 2, 0), (2, 2, 0), (2, 3, 0)]
    assert tree.num_tokens == 7


def test_matches_and_inserts_end_at_whole_pages():
    tree = RadixTree(page_size=4)
    assert tree.insert(runs((1, 3), (2, 8))).num_new_tokens == 8
    assert tree.match(runs((1, 3), (2, 8))).num_tokens == 8
    assert tree.match(runs((1, 3), (2, 4))).num_tokens == 4  # 7 tokens are equal
    assert tree.match(runs((1, 2), (2, 8))).num_tokens == 0  # 2 tokens are equal: no page
    assert tree.insert(runs((1, 3))).num_new_tokens == 0


def test_limits_cut_a_match_and_an_insert():
    tree = RadixTree()
    assert tree.insert(runs((1, 5), (2, 5)), 7).num_new_tokens == 7
    assert tree.match(runs((1, 5), (2, 5))).num_tokens == 7
    assert tree.match(runs((1, 5), (2, 5)), 6).num_tokens == 6
    assert tree.match(runs((1, 5), (2, 5)), 5).num_tokens == 5
    assert tree.match(runs((1, 5), (2, 5)), 0).num_tokens == 0
    assert tree.insert(runs((1, 5)), 100).num_new_tokens == 0  # tokens without a name are not inserted


def test_locked_paths_survive_and_their_siblings_go():
    tree = RadixTree()
    tree.insert(stream("abcde"))
    tree.insert(stream("abxy"))
    held = tree.match(stream("abcde")).node
    tree.lock(held)
    assert (tree.num_locked, tree.num_evictable) == (5, 2)
    assert tree.evict(100) == 2
    assert tree.evict(100) == 0
    assert tree.match(stream("abcde")).num_tokens == 5
    tree.unlock(held)
    assert tree.evict(1) == 3  # the leaf "cde"; its parent "ab" was not needed
    assert tree.evict(1) == 2
    assert tree.num_tokens == 0


def test_a_lock_covers_the_path_after_a_split():
    tree = RadixTree()
    node = tree.insert(stream("abcdef")).node
    tree.lock(node)
    tree.match(stream("abc"))
    assert shape(tree) == [(0, 3, 1), (3, 3, 1)]
    tree.unlock(node)
    assert tree.num_locked == 0
    tree.check_integrity()


def test_locks_are_counted():
    tree = RadixTree()
    node = tree.insert(stream("abc")).node
    tree.lock(node)
    tree.lock(node)
    tree.unlock(node)
    assert tree.evict(1) == 0
    tree.unlock(node)
    assert tree.evict(1) == 3


def test_a_lock_too_late_and_an_unlock_too_many_are_refused():
    tree = RadixTree()
    node = tree.insert(stream("abc")).node
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(node)
    tree.evict(1)
    with pytest.raises(ValueError, match="was evicted"):
        tree.lock(node)
    tree.lock(tree.root)  # a match of nothing: no tokens to keep
    tree.unlock(tree.root)


def test_the_owner_learns_what_is_evicted_and_in_which_order():
    gone = []
    tree = RadixTree(on_evict=lambda leaf: gone.append((tree.path(leaf), leaf.num_tokens)))
    tree.insert(runs((1, 4), (2, 4)))
    tree.insert(runs((1, 4), (3, 5)))
    tree.match(runs((1, 4), (2, 4)))
    assert tree.evict(9) == 9
    assert gone == [(runs((1, 4), (3, 5)), 5), (runs((1, 4), (2, 4)), 4)]


def test_hits_count_requests_and_not_their_chunks():
    tree = RadixTree()
    tree.insert(stream("abcd"))
    first = tree.insert(stream("ab"), num_counted_tokens=0).node
    assert first.hits == 2
    tree.insert(stream("abcd"), num_counted_tokens=2)  # the same request's next chunk
    assert [node.hits for node in sorted(tree.nodes(), key=lambda node: node.depth)] == [2, 2]


def test_bad_settings_and_runs_are_refused():
    with pytest.raises(ValueError, match="page_size=0: must be >= 1"):
        RadixTree(page_size=0)
    with pytest.raises(ValueError, match="eviction=belady: needs the future requests"):
        RadixTree(eviction=Belady())
    with pytest.raises(ValueError, match="num_tokens=0: a segment must have >= 1 token"):
        RadixTree().match(runs((1, 3), (2, 0)))


@given(st.lists(some_runs, max_size=8), some_runs, page_sizes, st.integers(0, 40))
def test_a_match_is_the_longest_common_prefix_in_whole_pages(known, prompt, page_size, max_tokens):
    tree = RadixTree(page_size=page_size)
    for each in known:
        tree.insert(each)
        tree.check_integrity()
    longest = max((num_common(tokens(each), tokens(prompt)[:max_tokens]) for each in known), default=0)
    match = tree.match(prompt, max_tokens)
    assert match.num_tokens == longest // page_size * page_size
    assert tokens(tree.path(match.node)) == tokens(prompt)[: match.num_tokens]
    tree.check_integrity()


@given(st.lists(some_runs, max_size=8), page_sizes)
def test_the_tree_holds_every_prefix_once(prompts, page_size):
    tree = RadixTree(page_size=page_size)
    num_new = sum(tree.insert(each).num_new_tokens for each in prompts)
    pages = set()
    for each in prompts:
        flat = tokens(each)
        pages |= {tuple(flat[:end]) for end in range(page_size, len(flat) + 1, page_size)}
    assert tree.num_tokens == num_new == len(pages) * page_size


@given(st.lists(some_runs, min_size=1, max_size=6))
def test_content_is_named_alike_however_the_tree_was_cut(prompts):
    whole, cut = RadixTree(), RadixTree()
    for each in prompts:
        whole.insert(each)
        assert all(node.content_id for node in whole.nodes())  # named before a later prompt cuts it, too
        for end in range(len(tokens(each)) + 1):
            cut.insert(each, end)
    names = {(tuple(tokens(cut.path(node))[: node.depth + 1])): node.content_id for node in cut.nodes()}
    assert len(set(names.values())) == len(names)
    for node in whole.nodes():
        assert names[tuple(tokens(whole.path(node))[: node.depth + 1])] == node.content_id


class TreeAgainstAList(RuleBasedStateMachine):
    """Matches, inserts, locks and evictions in any order; the model is the set of cached token prefixes."""

    page_size = 2

    def __init__(self):
        super().__init__()
        self.gone = []
        self.tree = RadixTree(
            page_size=self.page_size,
            eviction=Lru(),
            on_evict=lambda leaf: self.gone.append((tokens(self.tree.path(leaf)), leaf.depth)),
        )
        self.cached = set()
        self.held = []

    def pages_of(self, flat, begin=0):
        ends = range(begin + self.page_size, len(flat) + 1, self.page_size)
        return {tuple(flat[:end]) for end in ends}

    @rule(prompt=some_runs, keep=st.booleans())
    def insert(self, prompt, keep):
        node = self.tree.insert(prompt).node
        self.cached |= self.pages_of(tokens(prompt))
        if keep:
            self.tree.lock(node)
            self.held.append((node, tokens(self.tree.path(node))))

    @rule(prompt=some_runs, keep=st.booleans())
    def match(self, prompt, keep):
        num_tokens, node = self.tree.match(prompt)
        assert num_tokens == self.page_size * len(self.pages_of(tokens(prompt)) & self.cached)
        if keep:
            self.tree.lock(node)
            self.held.append((node, tokens(prompt)[:num_tokens]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unlock(self, data):
        node, path = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        assert tokens(self.tree.path(node)) == path
        self.tree.unlock(node)

    @rule(num_tokens=st.integers(-1, 12))
    def evict(self, num_tokens):
        could = self.tree.num_evictable
        self.gone.clear()
        freed = self.tree.evict(num_tokens)
        assert freed >= min(max(num_tokens, 0), could)
        if self.gone:  # the last leaf was needed
            assert freed - (len(self.gone[-1][0]) - self.gone[-1][1]) < num_tokens
        for flat, depth in self.gone:
            lost = self.pages_of(flat, depth)
            assert lost <= self.cached
            self.cached -= lost

    @invariant()
    def counts_agree(self):
        self.tree.check_integrity()
        locked = set().union(*(self.pages_of(path) for _, path in self.held))
        assert self.tree.num_tokens == self.page_size * len(self.cached)
        assert self.tree.num_locked == self.page_size * len(locked)


TreeAgainstAList.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestTreeAgainstAList = TreeAgainstAList.TestCase


few_runs = st.lists(st.builds(Segment, st.integers(0, 1), st.integers(2, 5)), min_size=2, max_size=4)
changes = st.tuples(st.sampled_from(["insert", "look up", "look up", "evict"]), st.integers(0, 99))


@examples(25, 100)
@given(
    st.lists(few_runs.map(tuple), min_size=4, max_size=4),
    st.lists(changes, min_size=20, max_size=40),
    st.integers(1, 2),
    st.sampled_from([None, 7]),
)
def test_a_repeated_lookup_does_what_a_new_one_does(prompts, actions, page_size, max_tokens):
    """Two trees: one repeats kept lookups, the other matches anew. Both evict the same leaves."""
    gone, trees = ([], []), []
    for each in gone:
        trees.append(RadixTree(page_size=page_size, on_evict=lambda leaf, each=each: each.append(leaf)))
    kept, anew = trees
    lookups = [kept.lookup(prompt, max_tokens) for prompt in prompts]
    for action, number in actions:
        prompt = prompts[number % 4]
        if action == "look up":
            match = kept.match_again(lookups[number % 4])
            assert (
                match.num_tokens == match.node.num_prefix_tokens == anew.match(prompt, max_tokens).num_tokens
            )
        elif action == "insert":
            assert (
                kept.insert(prompt, number // 4).node.num_tokens
                == anew.insert(prompt, number // 4).node.num_tokens
            )
        else:
            assert kept.evict(number // 4) == anew.evict(number // 4)
        kept.check_integrity()
        assert nodes(kept) == nodes(anew)
    assert [leaf.segments for leaf in gone[0]] == [leaf.segments for leaf in gone[1]]


@examples(25, 100)
@given(
    st.lists(few_runs.map(tuple), min_size=3, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(0, 2)), min_size=4, max_size=20),
    st.integers(1, 2),
)
def test_chunks_may_be_inserted_behind_those_before(prompts, chunks, page_size):
    """Two trees: one visits the whole path for every chunk. In the end both have the same nodes."""
    trees = RadixTree(page_size=page_size), RadixTree(page_size=page_size)
    ends = [[tree.root] * 3 for tree in trees]
    num_tokens = [0, 0, 0]
    for which, num_more, priority in chunks:
        known = {"priority": priority, "num_counted_tokens": ends[0][which].num_prefix_tokens}
        above = ends[0][which] if num_tokens[which] and priority == 0 else None
        num_tokens[which] += num_more
        for tree, locked, start in zip(trees, ends, (above, None), strict=True):
            node = tree.insert(prompts[which], num_tokens[which], above=start, **known).node
            tree.move_lock(locked[which], node)
            locked[which] = node
            tree.check_integrity()
    for which in range(3):
        for tree, locked in zip(trees, ends, strict=True):
            tree.insert(prompts[which], num_counted_tokens=len(tokens(prompts[which])), priority=2)
            tree.unlock(locked[which])
    assert nodes(trees[0]) == nodes(trees[1])
    assert trees[0].evict(1) == trees[1].evict(1)
    trees[0].check_integrity()


def nodes(tree):
    """Returns what eviction reads of every node, sorted."""
    return sorted((tree.path(n), n.depth, n.inserted, n.last_access, n.hits) for n in tree.nodes())


@given(st.lists(some_runs, min_size=1, max_size=10), st.data())
def test_the_next_use_of_a_node_is_the_next_prompt_with_its_first_token(prompts, data):
    future = FutureUses(prompts)
    now = data.draw(st.integers(0, len(prompts) - 1))
    tree = RadixTree(future=future, eviction=Belady())
    for index in range(now + 1):
        future.begin(index)
        tree.insert(prompts[index])
    for node in tree.nodes():
        first = tokens(tree.path(node))[: node.depth + 1]
        uses = [i for i in range(now + 1, len(prompts)) if tokens(prompts[i])[: len(first)] == first]
        assert node.next_use == min(uses, default=float("inf"))


def test_outdated_keys_do_not_pile_up():
    """10,000 touches of what stays leave a heap of 1,024 keys and a few, not of 10,000."""
    tree = RadixTree(eviction=Priority())
    tree.insert(runs((0, 1)), priority=5)
    for content_id in range(1, 10_000):
        tree.match(runs((0, 1)))
        tree.insert(runs((content_id, 1)))
        tree.evict(1)
    assert sum(len(heap) for heap in tree._candidates._heaps) <= 1_026
    assert tree.match(runs((0, 1))).num_tokens == tree.num_tokens == 1
    tree.check_integrity()


def test_prompts_of_many_turns_are_reused_with_their_answers():
    """A conversation: each turn's prompt is the last prompt, its answer, and a new question."""
    turns = [runs(*((i, 10 + i) for i in range(2 * n + 1))) for n in range(5)]
    tree = RadixTree()
    reused = []
    for turn, nxt in pairwise(turns):
        reused.append(tree.match(turn).num_tokens)
        tree.insert(nxt[: len(turn) + 1])  # the prompt and its answer
    assert reused == [0] + [sum(length for _, length in turn[:-1]) for turn in turns[1:4]]
