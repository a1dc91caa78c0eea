"""Routers by prefix, called directly: their trees of prefixes and their weights."""

from hypothesis import given
from hypothesis import strategies as st

from policies.core.request import Segment
from policies.routing.prefix_aware import (
    PrefixAffinity,
    PrefixIndex,
    PrefixTree,
    WeightedScore,
    _below_most,
    _spread,
)
from tests.policies.routing.called import ask, idle, replicas


def test_prefix_affinity_follows_the_prefix_while_load_is_balanced():
    routing, views = PrefixAffinity(balance_abs_threshold=2, unmatched="smallest_tree"), idle(3)

    def choose(*pieces):
        return routing.choose(ask(0, *pieces), views, 0.0)

    assert choose((1, 100), (2, 10)) == 0  # nothing known: the smallest tree, the first of equals
    assert choose((3, 100)) == 1
    assert choose((1, 100), (4, 10)) == 0  # 100 of 110 match
    assert choose((1, 31), (5, 69)) == 0  # 31 of 100
    assert choose((1, 30), (6, 70)) == 2  # 30 of 100 are not more than 0.3: the smallest tree
    views[0].num_outstanding = 3
    assert choose((1, 100)) == 1  # out of balance: the fewest, the first of equals
    views[1].num_outstanding = views[2].num_outstanding = 2
    assert choose((1, 100)) == 0  # 3 - 2 is in balance; of 0 and 1, which hold it alike, the one before
    views[0].num_outstanding, views[1].num_outstanding, views[2].num_outstanding = 9, 7, 6
    assert choose((1, 100)) == 0  # 3 ahead, but no more than 1.5 times as many


def test_prefix_affinity_forgets_what_was_sent_longest_ago():
    routing, views = (
        PrefixAffinity(max_tree_tokens=30, cache_threshold=0.5, unmatched="smallest_tree"),
        idle(2),
    )
    chosen = [routing.choose(ask(i, (content, 20)), views, 0.0) for i, content in enumerate([1, 2, 3, 1, 2])]
    # 1 to 0, 2 to 1, 3 to 0 (forgets 1), 1 is new and goes to the smallest, 0 (forgets 3); 2 is known
    assert chosen == [0, 1, 0, 0, 1]


def test_a_prompt_without_a_match_goes_to_the_fewest_outstanding_requests():
    routing, views = PrefixAffinity(), replicas(2, 1, 1)
    assert routing.choose(ask(0, (1, 100)), views, 0.0) == 1
    views[1].num_outstanding = 2
    assert routing.choose(ask(1, (2, 100)), views, 0.0) == 2
    assert routing.choose(ask(2, (1, 100)), views, 0.0) == 1, "its prefix"


def test_of_replicas_with_the_prefix_the_least_loaded_may_be_chosen():
    routing, views = PrefixAffinity(matched="least_outstanding", balance_abs_threshold=1), idle(3)

    def choose(num_tokens, *loads):
        for view, load in zip(views, loads, strict=True):
            view.num_outstanding = load
        return routing.choose(ask(0, (1, num_tokens)), views, 0.0)

    assert choose(50, 0, 0, 0) == 0
    assert choose(40, 2, 0, 0) == 1, "out of balance"
    assert choose(40, 2, 1, 1) == 1, "both have it"
    assert choose(50, 2, 1, 1) == 0, "only the first has all of it"


def test_of_replicas_with_the_prefix_the_one_that_was_sent_its_last_token_first_is_chosen():
    """Replica 0 is sent 5 tokens, replica 1 then 8, replica 0 then 10: tokens 6 to 8 are replica 1's."""
    tree = PrefixTree(100)
    tree.keep_only(range(2))
    for num_tokens, replica in ((5, 0), (8, 1), (10, 0)):
        tree.insert([Segment(7, num_tokens)], replica)

    def owners():
        return [tree.match([Segment(7, num_tokens)]).replica for num_tokens in (1, 5, 6, 8, 9, 10, 11)]

    assert owners() == [0, 0, 1, 1, 0, 0, 0]
    tree.keep_only([0])
    assert owners() == [0] * 7


pieces = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=4)


def tokens_of(prompt):
    """Returns a prompt as tokens, each identified by its whole past and itself."""
    path, past = [], ()
    for content, num_tokens in prompt:
        for place in range(num_tokens):
            path.append((past, content, place))
        past = (*past, (content, num_tokens))
    return path


def longest_prefix(prompt, known):
    """Computes the longest known prefix in tokens; pieces of one content share the tokens of the shorter."""
    path = tokens_of(prompt)
    return next((n for n in range(len(path), 0, -1) if path[n - 1] in known), 0)


@given(sent=st.lists(st.tuples(pieces, st.integers(0, 2)), max_size=12), asked=pieces)
def test_the_tree_finds_the_longest_prefix_and_the_replicas_that_have_it(sent, asked):
    tree, known = PrefixTree(10**6), [set(), set(), set()]
    tree.keep_only(range(3))
    for prompt, replica in sent:
        tree.insert([Segment(*piece) for piece in prompt], replica)
        known[replica].update(tokens_of(prompt))
    assert tree.num_tokens == {replica: len(tokens) for replica, tokens in enumerate(known)}
    longest = [longest_prefix(asked, tokens) for tokens in known]
    match = tree.match([Segment(*piece) for piece in asked])
    assert match.num_tokens == max(longest)
    if match.num_tokens:
        assert longest[match.replica] == match.num_tokens
    else:
        assert match.replica is None or longest[match.replica] == 0


@given(
    sent=st.lists(st.tuples(pieces, st.integers(0, 3), st.booleans()), max_size=40),
    max_tokens=st.integers(1, 30),
    order=st.permutations(range(4)),
)
def test_the_smallest_tree_is_the_first_of_those_of_fewest_tokens(sent, max_tokens, order):
    tree = PrefixTree(max_tokens)
    tree.keep_only(order)
    for prompt, replica, is_asked in sent:
        tree.insert([Segment(*piece) for piece in prompt], replica)
        if is_asked:
            assert tree.smallest == min(order, key=tree.num_tokens.__getitem__)
    tree.keep_only([*order[1:], 4])
    assert tree.smallest == min([*order[1:], 4], key=tree.num_tokens.__getitem__)


@given(
    sent=st.lists(st.tuples(pieces, st.integers(0, 1)), min_size=1, max_size=20),
    asked=pieces,
    max_tokens=st.integers(1, 30),
)
def test_a_tree_that_forgets_keeps_its_bound_and_only_what_was_sent(sent, asked, max_tokens):
    tree, known = PrefixTree(max_tokens), [set(), set()]
    tree.keep_only(range(2))
    for prompt, replica in sent:
        tree.insert([Segment(*piece) for piece in prompt], replica)
        known[replica].update(tokens_of(prompt))
        assert max(tree.num_tokens.values()) <= max_tokens
    for replica in range(2):  # what the nodes say is what is counted, and every node hangs on its past
        held = list(tree._used[replica])
        assert sum(node.tokens_of(replica) for node in held) == tree.num_tokens[replica]
        before = {node: node.key[0] for node in held}
        assert all(tree._nodes[node.key] is node for node in held)
        assert all(past.key is None or past in held for past in before.values())
        assert all(
            past.key is None or past.tokens_of(replica) >= node.key[1] for node, past in before.items()
        )
        assert all(held.index(node) < held.index(past) for node, past in before.items() if past in held)
    match = tree.match([Segment(*piece) for piece in asked])
    assert match.num_tokens <= max(longest_prefix(asked, tokens) for tokens in known)
    if match.num_tokens:
        assert match.num_tokens <= longest_prefix(asked, known[match.replica])
    if sum(len(tokens) for tokens in known) <= max_tokens:
        assert match.num_tokens == max(longest_prefix(asked, tokens) for tokens in known)


def test_prefix_index_weighs_what_is_cached_against_what_is_there(make_request):
    """100 tokens: nothing cached and idle costs 0 - 0 + 0; 60 cached beside 50 outstanding costs -10."""
    views = replicas(0, 1, 1, num_queued_tokens=[0, 0, 40], num_outstanding_tokens=[0, 50, 40])
    for view, num_cached in zip(views, (0, 60, 100), strict=True):
        view.num_cached = lambda request, found=num_cached: found
    assert PrefixIndex().choose(make_request(0, 100), views, 0.0) == 2  # 40 - 100 + 40
    views[2].num_cached = lambda request: 80
    assert PrefixIndex().choose(make_request(0, 100), views, 0.0) == 1
    assert PrefixIndex(overlap_weight=0).choose(make_request(0, 100), views, 0.0) == 0


def test_weighted_score_adds_up_what_gateways_weigh(make_request):
    """Queues 4, 0, 2: scores 0, 1, 0.5. Free KV 0.5, 0.1, 0.9. Cached of 100 tokens: 80, 0, 0."""
    views = replicas(
        5,
        5,
        5,
        num_waiting=[4, 0, 1],
        num_unseen=[0, 0, 1],
        num_free_kv_tokens=[500, 100, 1000],
        num_unseen_tokens=[0, 0, 100],
        num_kv_tokens=[1000, 1000, 1000],
    )
    for view, num_cached in zip(views, (80, 0, 0), strict=True):
        view.num_cached = lambda request, found=num_cached: found
    request = make_request(0, 100)
    assert WeightedScore().choose(request, views, 0.0) == 0  # 2.4 + 0 + 1 > 2 + 0.2, 1 + 1.8
    assert WeightedScore(prefix_weight=1).choose(request, views, 0.0) == 2  # 1.8, 2.2, 2.8
    assert WeightedScore(prefix_weight=0, kv_weight=0).choose(request, views, 0.0) == 1


def test_weighted_score_does_not_look_up_what_has_no_weight(make_request):
    views = replicas(
        1,
        0,
        num_waiting=[0, 0],
        num_unseen=[0, 0],
        num_free_kv_tokens=[9, 9],
        num_unseen_tokens=[0, 0],
        num_kv_tokens=[9, 9],
    )  # no num_cached
    assert WeightedScore(prefix_weight=0).choose(make_request(0, 100), views, 0.0) == 1


def scored(weight, request, counts):
    """Returns the order of replicas by one scorer of llm-d, the best first.

    Replicas are taken away one after the other, so that each choice is the best of those that remain.
    """
    names = ("num_waiting", "num_running", "num_outstanding_tokens")
    views = replicas(*counts, num_unseen=[0] * len(counts), **dict.fromkeys(names, counts))
    weights = dict.fromkeys(("prefix_weight", "queue_weight", "kv_weight"), 0) | {weight: 1}
    routing = WeightedScore(**weights, corrects_signals=False, token_limit=1000)
    order = []
    while views:
        order.append(views.pop(routing.choose(request, views, 0.0)).index)
    return order


def test_weighted_score_scores_as_the_scorers_of_llm_d(make_request):
    """The numbers of their unit tests (v0.8.0): queues 10, 5, 0 score 0, 0.5, 1; equal ones 1."""
    assert _spread([10, 5, 0]) == [0, 0.5, 1]
    assert _spread([5, 5]) == _spread([0, 0]) == [1, 1]
    assert _below_most([3, 0, 6]) == [0.5, 1, 0]
    assert _below_most([0, 0]) == [1, 1]
    request = make_request(0, 100)
    for weight in ("queue_weight", "running_weight", "active_weight", "token_weight"):
        assert scored(weight, request, [10, 5, 0, 7]) == [2, 1, 3, 0], weight


def test_weighted_score_may_ignore_what_was_sent_since_the_last_signals(make_request):
    views = replicas(3, 0, num_waiting=[0, 1], num_unseen=[3, 0])
    request = make_request(0, 100)
    weights = {"prefix_weight": 0, "kv_weight": 0}
    assert WeightedScore(**weights).choose(request, views, 0.0) == 1
    assert WeightedScore(**weights, corrects_signals=False).choose(request, views, 0.0) == 0
