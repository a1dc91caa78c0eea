"""Prefix-aware routing: by the prefixes sent to a replica, or by the contents of its cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappush, heapreplace
from typing import Annotated, ClassVar, NamedTuple

from fieldlimits import Checked, Ge, NonNegative, NonNegativeInt, OneOf, PositiveInt, Share, Unit, check
from policies.caching.content import prompt_segments
from policies.core.request import Request, Segment
from policies.routing import ReplicaView
from policies.routing.load_balancing import counts_of


class PrefixNode:
    """A segment of content after a given prefix; without a dictionary if only one replica has it.

    A tree can have millions of nodes.
    """

    __slots__ = ("firsts", "key", "longest", "num_longest", "tokens")

    def __init__(self, key: tuple[PrefixNode, int, int] | None) -> None:
        self.key = key  # parent, number of its tokens before this node, content id; None: the root
        self.longest: int | None = None  # the replica with the most tokens sent; ties go to the first
        self.num_longest = 0  # number of tokens sent to that replica
        self.tokens: dict[int, int] | None = None  # tokens sent per replica; None: at most one replica
        self.firsts: tuple[tuple[int, int], ...] = ()
        """(number of tokens, replica) before the longest: the replica to which the tokens up to there were
        sent first.
        """

    def tokens_of(self, replica: int) -> int:
        """Returns the largest number of the segment's tokens sent to a replica; 0: none."""
        if self.tokens is not None:
            return self.tokens.get(replica, 0)
        return self.num_longest if self.longest == replica else 0

    def owner_of(self, num_tokens: int) -> int | None:
        """Returns the replica that first received this many tokens of the segment."""
        for num_first, replica in self.firsts:
            if num_tokens <= num_first:
                return replica
        return self.longest

    def holders_of(self, num_tokens: int) -> list[int]:
        """Returns the replicas that received this many tokens of the segment."""
        if self.tokens is None:
            return [] if self.longest is None else [self.longest]
        return [replica for replica, num_sent in self.tokens.items() if num_sent >= num_tokens]

    def lengthen(self, replica: int, num_tokens: int) -> None:
        """Records that a replica received more tokens of the segment than before."""
        if self.tokens is not None:
            self.tokens[replica] = num_tokens
        elif self.longest is not None and self.longest != replica:
            self.tokens = {self.longest: self.num_longest, replica: num_tokens}
        if num_tokens > self.num_longest:
            if self.longest is not None and self.longest != replica:
                self.firsts = (*self.firsts, (self.num_longest, self.longest))
            self.longest, self.num_longest = replica, num_tokens

    def forget(self, replica: int) -> int:
        """Removes a replica from the node. Returns the number of tokens that it received."""
        if self.tokens is None:
            num_tokens, self.longest, self.num_longest = self.num_longest, None, 0
            return num_tokens
        tokens = self.tokens
        num_tokens = tokens.pop(replica)
        self.firsts = tuple(first for first in self.firsts if first[1] != replica)
        if self.longest == replica:
            self.longest = max(tokens, key=lambda other: (tokens[other], -other))
            self.num_longest = tokens[self.longest]
        if len(tokens) == 1:
            self.tokens, self.firsts = None, ()
        return num_tokens


class Match(NamedTuple):
    """The longest previously sent prefix of a prompt: its tokens, and its end in the tree."""

    num_tokens: int
    node: PrefixNode
    num_in_node: int
    """Number of tokens of the last node that match."""

    @property
    def replica(self) -> int | None:
        """The replica that first received the last matching token; None: nothing matches."""
        return self.node.owner_of(self.num_in_node)

    @property
    def holders(self) -> list[int]:
        """The replicas that have the whole match."""
        return self.node.holders_of(self.num_in_node)


class PrefixTree:
    """The prompts sent to each replica of the last `keep_only` call, at most max_tokens tokens per replica.

    A radix tree of the prompts sent to the replicas: one tree for all replicas.

    A node stands for a segment of prompt content that follows a given prefix. Its key is (parent node, number
    of the parent's tokens before it, content id). It stores for each replica the largest number of the
    segment's tokens sent to it. Segments that branch off after 5 and after 8 tokens of a segment are
    therefore children of the same node, and no node is ever split. Example with content ids 7, 9 and 3:

        sent to replica 0    7 7 7 7 7 9 9         7: {0: 5, 1: 8} --5--> 9: {0: 2}
        sent to replica 1    7 7 7 7 7 7 7 7 3                     --8--> 3: {1: 1}

    A replica's number of tokens counts its distinct prefixes. Above a limit the least recently sent segments
    are removed, the end of a prompt before its beginning. The cost grows with the number of segments of a
    prompt, not with the number of replicas.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens: dict[int, int] = {}
        self._max_tokens = max_tokens
        self._positions: dict[int, int] = {}  # position of each replica in the last `keep_only` call
        self._sizes: list[tuple[int, int, int]] = []
        """A heap of (tokens, position, replica). A replica's smallest entry is its current or an earlier
        size.
        """
        self._root = PrefixNode(None)
        self._nodes: dict[tuple[PrefixNode, int, int], PrefixNode] = {}  # one dict for all nodes saves memory
        self._used: dict[int, OrderedDict[PrefixNode, None]] = {}
        """Nodes of each replica, the least recently used first; children come before their parents."""

    def keep_only(self, replicas: Iterable[int]) -> None:
        """Sets the replicas that exist from now on, and removes the prompts sent to others."""
        kept = dict.fromkeys(replicas)
        for replica in [*self._used.keys() - kept.keys()]:
            for node in [*self._used[replica]]:  # from the leaves up
                self._forget(replica, node)
            del self._used[replica], self.num_tokens[replica]
        self._used = {replica: self._used.get(replica, OrderedDict()) for replica in kept}
        self.num_tokens = {replica: self.num_tokens.get(replica, 0) for replica in kept}
        self._positions = {replica: position for position, replica in enumerate(kept)}
        self._list_sizes()

    def _list_sizes(self) -> None:
        self._sizes = [
            (tokens, self._positions[replica], replica) for replica, tokens in self.num_tokens.items()
        ]
        heapify(self._sizes)

    @property
    def smallest(self) -> int:
        """The replica with the fewest tokens; ties go to the first one of the last `keep_only` call."""
        sizes = self._sizes
        while True:
            num_tokens, position, replica = sizes[0]
            num_now = self.num_tokens[replica]
            if num_now == num_tokens:
                return replica
            heapreplace(sizes, (num_now, position, replica))

    def match(self, segments: Sequence[Segment]) -> Match:
        """Returns the longest previously sent prefix; this does not count as a use."""
        node, before, num_tokens, nodes = self._root, 0, 0, self._nodes
        for content_id, num_in_segment in segments:
            child = nodes.get((node, before, content_id))
            if child is None:
                break
            node, before = child, num_in_segment
            if child.num_longest < num_in_segment:
                num_tokens += child.num_longest
                break
            num_tokens += num_in_segment
        return Match(num_tokens, node, min(before, node.num_longest))

    def insert(self, segments: Sequence[Segment], replica: int) -> None:
        """Records that a prompt was sent to a replica, and marks it as used."""
        node, before, nodes = self._root, 0, self._nodes
        for content_id, num_in_segment in segments:
            key = (node, before, content_id)
            child = nodes.get(key)
            if child is None:
                child = nodes[key] = PrefixNode(key)
            num_before = child.num_longest if child.longest == replica else child.tokens_of(replica)
            if num_in_segment > num_before:
                child.lengthen(replica, num_in_segment)
                self.num_tokens[replica] += num_in_segment - num_before
            node, before = child, num_in_segment
        self._touch(replica, node)
        if self.num_tokens[replica] > self._max_tokens:
            while self.num_tokens[replica] > self._max_tokens:
                self._forget(replica, next(iter(self._used[replica])))
            self._note_smaller(replica)

    def _note_smaller(self, replica: int) -> None:
        """Records that a replica has fewer tokens than before."""
        heappush(self._sizes, (self.num_tokens[replica], self._positions[replica], replica))
        if len(self._sizes) > 4 * len(self._positions):
            self._list_sizes()

    def _touch(self, replica: int, node: PrefixNode) -> None:
        """Marks the path to a node as used, the end first, so the end is removed first."""
        used = self._used[replica]
        while node.key is not None:
            used[node] = None
            used.move_to_end(node)
            node = node.key[0]

    def _forget(self, replica: int, node: PrefixNode) -> None:
        """Removes a replica from a node; the replica must have none of the nodes below it."""
        del self._used[replica][node]
        self.num_tokens[replica] -= node.forget(replica)
        if node.longest is None:
            assert node.key is not None
            del self._nodes[node.key]


@dataclass(kw_only=True, slots=True)
class PrefixAffinity(Checked):
    """Longest matching prefix. Reads only the outstanding requests of all replicas.

    The router does not query the replicas: it keeps a tree of the prompts that it has sent to each, which
    only approximates the contents of their caches. While the load is balanced, a prompt goes to the replica
    with the longest matching prefix if that exceeds the share cache_threshold of the prompt. A prompt without
    such a match, and every prompt while the load is not balanced, goes to the replica with the fewest
    outstanding requests:

        most - fewest > balance_abs_threshold  and  most > balance_rel_threshold * fewest

    Defaults and decisions match `cache_aware` of SGLang's router (sglang-router 0.3.2) or, with
    matched=least_outstanding, vLLM's router (vllm-router 0.1.17). A test compares both with this policy
    (`tests/experiments/serve/clients/test_router_decisions.py`). Differences: SGLang's router counts
    characters, while this policy and vLLM's router count tokens; both routers trim their trees every two
    minutes, this policy immediately. If the replica that first received a token has dropped it, SGLang's
    router takes any replica with the token, this policy the one that received the most tokens of the segment.
    """

    cache_threshold: Share = 0.3
    """Share of the prompt that must match."""
    balance_abs_threshold: Annotated[NonNegativeInt, Unit("requests")] = 64
    """Outstanding requests by which the most loaded replica may exceed the least loaded."""
    balance_rel_threshold: Annotated[float, Ge(1)] = 1.5
    """Ratio of the most to the least loaded replica; the load is unbalanced if both are exceeded."""
    matched: Annotated[str, OneOf(("first", "least_outstanding"))] = "first"
    """The choice among several matching replicas: first (the one that first received the last matching token,
    as in SGLang's router) or least_outstanding (vLLM's).
    """
    unmatched: Annotated[str, OneOf(("least_outstanding", "smallest_tree"))] = "least_outstanding"
    """The replica of a prompt without a match: least_outstanding, or smallest_tree as described in the source
    header of SGLang's router.
    """
    max_tree_tokens: Annotated[PositiveInt, Unit("token")] = 2**24
    """Maximum number of tokens in the tree per replica; about the equivalent of SGLang's 2^26 characters."""
    keeps_together: ClassVar[str] = "prefix"
    _replicas: Sequence[ReplicaView] = field(init=False, default=(), repr=False, compare=False)
    _positions: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    _tree: PrefixTree = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self)
        self._tree = PrefixTree(self.max_tree_tokens)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica with the matching prefix, with the smallest tree, or with the least load."""
        if replicas is not self._replicas:
            self._positions = {replica.index: position for position, replica in enumerate(replicas)}
            self._tree.keep_only(self._positions)
            self._replicas = replicas
        segments = prompt_segments(request)
        position = self._chosen(segments, request.prompt.num_tokens, replicas)
        self._tree.insert(segments, replicas[position].index)
        return position

    def _chosen(self, segments: list[Segment], num_tokens: int, replicas: Sequence[ReplicaView]) -> int:
        counts = counts_of(replicas, "num_outstanding")
        least = int(counts.argmin())
        most, fewest = int(counts[counts.argmax()]), int(counts[least])
        if most - fewest > self.balance_abs_threshold and most > self.balance_rel_threshold * fewest:
            return least
        match = self._tree.match(segments)
        if match.replica is not None and match.num_tokens / num_tokens > self.cache_threshold:
            if self.matched == "first":
                return self._positions[match.replica]
            return min((self._positions[replica] for replica in match.holders), key=lambda i: (counts[i], i))
        return least if self.unmatched == "least_outstanding" else self._positions[self._tree.smallest]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixIndex(Checked):
    """Least cost of computation and load. Ties go to the smallest index.

    Reads loads and caches of all replicas.

    As in NVIDIA Dynamo's KV router, to which the engines report every stored and evicted block:

        cost = overlap_weight * (tokens to compute before the request's first token) + outstanding tokens

    The tokens to compute are the uncached part of the prompt, and the prompts sent to the replica that have
    no output token yet. The replica with the lowest cost gets the request. With overlap_weight=0 the policy
    is least_outstanding by tokens.
    """

    overlap_weight: NonNegative = 1.0
    """Weight of tokens to compute relative to outstanding tokens; Dynamo's default is 1."""

    keeps_together: ClassVar[str] = "prefix"
    reads_caches: ClassVar[bool] = True

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica of least cost."""
        costs = [
            self.overlap_weight * (replica.num_queued_tokens - replica.num_cached(request))
            + replica.num_outstanding_tokens
            for replica in replicas
        ]
        return costs.index(min(costs))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedScore(Checked):
    """Highest weighted score. Ties: fewest outstanding requests, then smallest index. Reads all replicas.

    As in the endpoint pickers of the Gateway API Inference Extension and of llm-d (llm-d-inference-scheduler
    v0.8.0, `plugins/scheduling/scorer`), each replica gets scores from 0 to 1, and the highest sum of weight
    times score is chosen:

        prefix    share of the prompt that the replica has cached
        queue     (longest queue - its queue) / (longest - shortest), 1 where all are equal
        kv        share of the replica's KV memory that is free
        running like queue, for running requests
        active    (most outstanding requests - its own) / most; 1 if it has none
        token     1 - outstanding prompt tokens / token_limit, at least 0

    The weights of the first three are 3, 2, 2 as in the extension's default configuration, the others 0.
    Queue lengths and free memory are as old as the service's signals. With corrects_signals they include the
    requests sent since then. The pickers do not include them, so they send a burst to one replica until the
    next signals. The cache lookup is exact, as in llm-d's precise prefix scorer. The pickers break ties at
    random.
    """

    prefix_weight: NonNegative = 3.0
    queue_weight: NonNegative = 2.0
    kv_weight: NonNegative = 2.0
    running_weight: NonNegative = 0.0
    active_weight: NonNegative = 0.0
    token_weight: NonNegative = 0.0
    token_limit: Annotated[PositiveInt, Unit("token")] = 4_194_304
    """Outstanding prompt tokens at which the token score is 0; llm-d's default, 128 prompts of 32,768."""
    corrects_signals: bool = True
    """Whether queue length and free memory count the requests sent since the last signals."""

    keeps_together: ClassVar[str] = "prefix"
    reads_caches: ClassVar[bool] = True
    reads_signals: ClassVar[bool] = True

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica with the highest score."""
        totals = [0.0] * len(replicas)
        for weight, scores in self._scores(request, replicas):
            if weight:
                totals = [total + weight * score for total, score in zip(totals, scores(), strict=True)]
        keys = [(-total, replica.num_outstanding) for total, replica in zip(totals, replicas, strict=True)]
        return keys.index(min(keys))

    def _scores(
        self, request: Request, replicas: Sequence[ReplicaView]
    ) -> list[tuple[float, Callable[[], Iterable[float]]]]:
        """Returns each weight with a function that computes the scores of the replicas."""
        unseen = int(self.corrects_signals)
        return [
            (
                self.queue_weight,
                lambda: _spread([replica.num_waiting + unseen * replica.num_unseen for replica in replicas]),
            ),
            (
                self.kv_weight,
                lambda: (
                    max(0.0, (each.num_free_kv_tokens - unseen * each.num_unseen_tokens) / each.num_kv_tokens)
                    for each in replicas
                ),
            ),
            (
                self.prefix_weight,
                lambda: (replica.num_cached(request) / request.prompt.num_tokens for replica in replicas),
            ),
            (self.running_weight, lambda: _spread([replica.num_running for replica in replicas])),
            (self.active_weight, lambda: _below_most([replica.num_outstanding for replica in replicas])),
            (
                self.token_weight,
                lambda: (max(0.0, 1 - each.num_outstanding_tokens / self.token_limit) for each in replicas),
            ),
        ]


def _spread(counts: list[int]) -> list[float]:
    """Returns 1 for the smallest count, 0 for the largest, linear in between; 1 if all are equal."""
    most, spread = max(counts), max(counts) - min(counts)
    return [(most - count) / spread if spread else 1.0 for count in counts]


def _below_most(counts: list[int]) -> list[float]:
    """Returns 1 - count / largest count for each count; 1 for a count of zero."""
    most = max(counts)
    return [(most - count) / most if count else 1.0 for count in counts]
