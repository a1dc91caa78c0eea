"""Expert routing: the number of tokens per expert of a layer, on the busiest expert-parallel rank.

All values are expectations; nothing is drawn at random.

The placement of experts on ranks decides the probabilities that a token is routed to the busiest rank's
experts:

    dealt one by one over the ranks, the most popular first; the result of a load balancer without copies
    in_order by expert number, as engines load them: rank 0 has the first experts
    scattered  at random with respect to popularity: no load balancing. The busiest rank is taken from the
    median of `NUM_DRAWS` placements, drawn with a fixed seed
    eplb       redundant experts: DeepSeek-V3 (2024), section 3.4, and its balancer EPLB (2025). Each copy
    goes to the expert with the most tokens per replica; then the replicas, the most loaded first, go to the
    rank with space that has the fewest tokens

All ranks wait for the busiest one, so only its experts are priced. Replicas of an expert share its tokens
evenly.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwmodels.checks import check_whole, is_finite, is_whole

Floats = NDArray[np.float64]

PLACEMENTS = ("dealt", "in_order", "scattered", "eplb")

NUM_DRAWS = 31
"""Number of random placements of `scattered`; their median represents a typical placement."""


def busiest_rank(chances: Floats, ep_size: int, placement: str, num_redundant: int = 0) -> Floats:
    """Returns the probability, descending, that a token is routed to each of the busiest rank's experts.

    chances: probability of each expert, by its number [E]; num_redundant: copies on all ranks in total, with
    eplb. The number of replicas must be a multiple of ep_size.
    """
    if placement == "dealt":
        return descending(chances)[::ep_size]
    if placement == "eplb":
        ranks = packed(replicated(chances, num_redundant), ep_size)
    elif placement == "in_order":
        ranks = chances.reshape(ep_size, -1)
    else:
        ranks = _scattered(chances, ep_size)
    return descending(ranks[np.argmax(ranks.sum(axis=1))])


def descending(chances: Floats) -> Floats:
    """Returns the chances, the largest first."""
    return np.asarray(-np.sort(-chances, kind="stable"))


def replicated(chances: Floats, num_redundant: int) -> Floats:
    """Returns the probability of each replica, descending; every copy goes to the most loaded replica.

    Chances 0.6, 0.3, 0.1 and two copies: 0.3, 0.3, 0.3, 0.1, then 0.2, 0.2, 0.2, 0.3, 0.1 in descending
    order.
    """
    counts = [(-chance, expert, 1) for expert, chance in enumerate(chances.tolist())]
    heapq.heapify(counts)
    for _ in range(num_redundant):
        _, expert, count = counts[0]
        heapq.heapreplace(counts, (-chances[expert] / (count + 1), expert, count + 1))
    return descending(np.array([-negative for negative, _, count in counts for _ in range(count)]))


def packed(replicas: Floats, ep_size: int) -> Floats:
    """Returns the replicas' probabilities per rank [ep_size, replicas per rank]; most loaded first.

    Chances 0.5, 0.3, 0.3, 0.1 on two ranks: 0.5 and 0.1; 0.3 and 0.3.
    """
    size = len(replicas) // ep_size
    ranks: list[list[float]] = [[] for _ in range(ep_size)]
    with_space = [(0.0, rank) for rank in range(ep_size)]
    for chance in descending(replicas).tolist():
        load, rank = heapq.heappop(with_space)
        ranks[rank].append(chance)
        if len(ranks[rank]) < size:
            heapq.heappush(with_space, (load + chance, rank))
    return np.array(ranks)


def _scattered(chances: Floats, ep_size: int) -> Floats:
    """Returns the random placement whose busiest rank is the median of all draws."""
    rng = np.random.default_rng(0)
    draws = [rng.permutation(chances).reshape(ep_size, -1) for _ in range(NUM_DRAWS)]
    return sorted(draws, key=lambda ranks: float(ranks.sum(axis=1).max()))[NUM_DRAWS // 2]


ROUTINGS = ("balanced", "uniform", "zipf", "measured", "power_law")

SKEWED = ("zipf", "power_law")
"""Kinds of `ROUTINGS` that have an exponent."""

PLACED = ("zipf", "measured")
"""Kinds of `ROUTINGS` with popular experts, whose placement matters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Distribution of tokens over experts by the router.

    balanced: as evenly as integer token counts allow. uniform: each token picks top_k experts at random.
    zipf: a token picks the i-th most popular expert with a probability proportional to i^-exponent, capped at
    1 because its top_k experts differ; 0 is uniform. Used for engines, because prices are smooth in
    num_tokens. measured: as zipf, with the counted tokens of each expert (`loads`) instead of i^-exponent.
    power_law: for benchmark rows only. The popularity x of an expert has density x^-exponent on [1, 0.8
    num_tokens], or on [0.01, 2] if there are no more assignments than experts. NVIDIA's aiconfigurator draws
    its benchmark tokens like this, with 1.01 as in DeepSeek-R1 or 1.2 as in Qwen3-235B. The switch comes from
    its generator: with one more assignment nearly all experts have work. No router does that.
    """

    kind: str = "balanced"
    exponent: float | None = None
    """Exponent of zipf, >= 0, or of power_law, > 0 and not 1."""
    loads: tuple[float, ...] | None = None
    """Tokens (or shares) of each expert of a layer, by expert number, for measured routing."""
    placement: str = "dealt"
    """Placement of experts on expert-parallel ranks: see `hwmodels.operators.moe_routing`."""
    num_redundant_experts: int = 0
    """Copies of popular experts in a layer, on all expert-parallel ranks in total, with placement eplb."""

    def __post_init__(self) -> None:
        if self.kind not in ROUTINGS:
            raise ValueError(f"kind={self.kind}: must be one of {', '.join(ROUTINGS)}")
        self._check_placement()
        if self.loads is not None:
            object.__setattr__(self, "loads", tuple(self.loads))
        if (self.loads is None) == (self.kind == "measured"):
            rule = "the tokens of each expert" if self.kind == "measured" else "null"
            raise ValueError(f"loads={self.loads}: must be {rule} for {self.kind} routing")
        for i, load in enumerate(self.loads or ()):
            if not (is_finite(load) and load > 0):
                raise ValueError(f"loads[{i}]={load}: must be a finite number > 0")
        if self.exponent is None:
            if self.kind in SKEWED:
                usual = 0.5 if self.kind == "zipf" else 1.2
                raise ValueError(f"exponent=None: must be set for {self.kind} routing; {usual} is typical")
            return
        if self.kind not in SKEWED:
            raise ValueError(f"exponent={self.exponent}: must be null for {self.kind} routing")
        if self.kind == "zipf" and not 0 <= self.exponent < 10:
            raise ValueError(f"exponent={self.exponent}: must be >= 0 and < 10; 0 is uniform routing")
        if self.kind == "power_law" and not (0 < self.exponent < 10 and self.exponent != 1):
            raise ValueError(f"exponent={self.exponent}: must be > 0, < 10 and not 1; use 1.01 for 1")

    def _check_placement(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement={self.placement}: must be one of {', '.join(PLACEMENTS)}")
        if self.placement != "dealt" and self.kind not in PLACED:
            raise ValueError(
                f"placement={self.placement}: must be dealt for {self.kind} routing, which says nothing "
                "about single experts; choose kind=zipf or measured"
            )
        copies = self.num_redundant_experts
        if not is_whole(copies) or copies < 0:
            raise ValueError(f"num_redundant_experts={copies}: must be a whole number >= 0")
        if copies and self.placement != "eplb":
            raise ValueError(
                f"num_redundant_experts={copies}: must be 0 for placement={self.placement}; choose "
                "placement=eplb, which balances with copies"
            )

    def check(self, layer: ExpertLayer) -> None:
        """Raises ValueError if the layer's number of experts differs, or copies do not fill its ranks."""
        if self.loads is not None and len(self.loads) != layer.num_experts:
            raise ValueError(
                f"routing.loads: {len(self.loads)} numbers are given; must be one for each of the "
                f"{layer.num_experts} experts"
            )
        if self.num_redundant_experts % layer.ep_size:
            raise ValueError(
                f"routing.num_redundant_experts={self.num_redundant_experts}: must be a multiple of "
                f"expert_parallel_size={layer.ep_size}, so that all ranks have as many"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """Routed experts of one layer, as one rank sees them."""

    hidden_size: int
    intermediate_size: int
    """Width of one expert on one rank: the model's width divided by the tensor parallelism of the experts."""
    top_k: int
    num_experts: int
    """Number of routed experts on all ranks in total."""
    ep_size: int = 1
    """Number of expert-parallel ranks; each holds num_experts / ep_size whole experts."""
    gated: bool = True
    """Gate and up projection (SwiGLU), or only up if false."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "top_k", "num_experts", "ep_size"):
            check_whole(name, getattr(self, name))
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k}: must be at most num_experts={self.num_experts}")
        if self.num_experts % self.ep_size:
            raise ValueError(f"ep_size={self.ep_size}: must divide num_experts={self.num_experts}")

    @property
    def num_rank_experts(self) -> int:
        return self.num_experts // self.ep_size

    @property
    def num_matrices(self) -> int:
        """Number of matrices of hidden_size x intermediate_size weights in one expert."""
        return 3 if self.gated else 2

    @property
    def expert_weights(self) -> int:
        """Number of weights of one expert on one rank."""
        return self.num_matrices * self.hidden_size * self.intermediate_size


class RankLoads(NamedTuple):
    """Expected tokens of the experts on the busiest rank, in groups of equal experts.

    Shapes are [..., G]: the leading dimensions of num_tokens, G groups (1, or one per expert of the rank).
    """

    tokens: Floats
    """Tokens of each expert of the group; below 1, the probability that it gets a token."""
    num_experts: Floats
    """Experts in the group; uniform and zipf: expected number of experts that get a token."""
    spread: Floats
    """Standard deviation of the tokens of an expert that gets any; 0 if routing is deterministic."""

    @property
    def active_experts(self) -> Floats:
        return np.asarray((self.num_experts * np.minimum(1.0, self.tokens)).sum(axis=-1))

    @property
    def assignments(self) -> Floats:
        """Token-expert pairs of this rank; balanced: num_tokens top_k / ep_size."""
        return np.asarray((self.num_experts * self.tokens).sum(axis=-1))


def rank_loads(num_tokens: ArrayLike, layer: ExpertLayer, routing: Routing) -> RankLoads:
    """Returns the numbers of tokens that the experts of the busiest expert-parallel rank receive.

    num_tokens counts the tokens that enter the layer on all ranks, >= 1 each; this rank computes the
    assignments to its own experts. It gets at least one, because some rank does.

    zipf, measured: by default experts are distributed over ranks one by one, the most popular first, as a
    load balancer would. The first rank, with experts 1, 1 + ep_size, ..., is then the busiest for any number
    of tokens. For other placements and copies of experts see `hwmodels.operators.moe_routing`. An expert
    picked with probability p gets m p of m tokens, and at least one token with probability 1 - (1 - p)^m.
    power_law: popularities are the quantiles u of the density; on the busiest rank they are u^(1 / theta)
    with theta = ep_size^(n^-0.45) for n experts per rank. With one expert per rank this is the likely maximum
    of ep_size experts; ranks with many experts even out. Within 10 % (standard deviation) of the mean of
    draws with 8 to 512 experts on 2 to 128 ranks.
    """
    m = np.asarray(num_tokens, dtype=np.float64)[..., None]
    if routing.kind == "power_law":
        return _power_law_loads(m, layer, routing.exponent or 0.0)
    if routing.kind in ("uniform", "zipf", "measured"):
        return _drawn_loads(m, layer, routing)
    assignments = np.maximum(1.0, m * layer.top_k / layer.ep_size)
    return RankLoads(
        assignments / layer.num_rank_experts, np.full_like(m, layer.num_rank_experts), np.zeros_like(m)
    )


def _drawn_loads(m: Floats, layer: ExpertLayer, routing: Routing) -> RankLoads:
    """Returns loads of random draws: tokens of an expert are binomial; m [..., 1], see `_groups`."""
    chance, log_missed, num_experts = _groups(layer.num_experts, layer.top_k, layer.ep_size, routing)
    none = np.exp(m * log_missed)
    some = -np.expm1(m * log_missed)
    tokens = m * chance / some
    # variance of a binomial number, given that it is not 0
    variance = np.maximum(0.0, tokens * (1 - chance) - tokens * tokens * none)
    active = num_experts * some
    at_least_one = active / np.minimum(1.0, active.sum(axis=-1, keepdims=True))
    return RankLoads(tokens, at_least_one, np.sqrt(variance))


@lru_cache(maxsize=256)
def _groups(num_experts: int, top_k: int, ep_size: int, routing: Routing) -> tuple[Floats, Floats, Floats]:
    """Returns the probability p that a token picks an expert, log(1 - p), and experts by group [G].

    Experts are those of the busiest rank. Each of the first 16 experts is its own group. After that,
    neighbours whose popularity ranks differ by at most a 16th share their mean probability: 512 experts make
    66 groups. The number of active experts changes by at most about 0.1 %.
    """
    if routing.loads is None:
        of_all = zipf_chances(num_experts, top_k, routing.exponent or 0.0)
    else:
        of_all = measured_chances(routing.loads, top_k)
    chances = busiest_rank(of_all, ep_size, routing.placement, routing.num_redundant_experts)
    starts = [0]
    while (following := starts[-1] + 1 + starts[-1] // 16) < len(chances):
        starts.append(following)
    members = np.diff([*starts, len(chances)]).astype(np.float64)
    chance = np.minimum(1.0, np.add.reduceat(chances, starts) / members)
    with np.errstate(divide="ignore"):  # probability 1: log 0
        log_missed = np.log1p(-chance)
    for array in (chance, log_missed, members):
        array.flags.writeable = False  # all calls share it
    return chance, log_missed, members


def zipf_chances(num_experts: int, top_k: int, exponent: float) -> Floats:
    """Returns the probability that a token picks each expert, the most popular first; they sum to top_k.

    They are proportional to i^-exponent, at most 1; the excess goes to the other experts in proportion.
    Example: three experts, top 2, exponent 1. 2 (6, 3, 2) / 11 would give 12 / 11 to the first, so the result
    is 1, 3 / 5 and 2 / 5.
    """
    return _capped(np.arange(1.0, num_experts + 1) ** -exponent, top_k)


def measured_chances(loads: tuple[float, ...], top_k: int) -> Floats:
    """Returns the probability that a token picks each expert, in proportion to its counted tokens."""
    counted = np.array(loads, dtype=np.float64)
    order = np.argsort(-counted, kind="stable")
    chances = np.empty_like(counted)
    chances[order] = _capped(counted[order], top_k)
    return chances


def _capped(weights: Floats, top_k: int) -> Floats:
    """Returns top_k picks in proportion to descending weights, capped at 1: see `zipf_chances`."""
    from_rank_on = np.cumsum(weights[::-1])[::-1]
    # with the first i experts at the cap: (top_k - i) / the sum of the others' weights
    scale = (top_k - np.arange(top_k)) / from_rank_on[:top_k]
    capped = int(np.argmax(scale * weights[:top_k] <= 1))
    chances = scale[capped] * weights
    chances[:capped] = 1.0
    return np.asarray(chances)


def _power_law_loads(m: Floats, layer: ExpertLayer, exponent: float) -> RankLoads:
    """Returns loads by a power law, m [..., 1]; the popularity at quantile u inverts the distribution."""
    many = m * layer.top_k > layer.num_experts
    low = np.where(many, 1.0, 0.01) ** (1 - exponent)
    high = np.where(many, 0.8 * m, 2.0) ** (1 - exponent)

    def popularity(u: Floats) -> Floats:
        return np.asarray((low + (high - low) * u) ** (1 / (1 - exponent)))

    all_experts = popularity(_midpoints(layer.num_experts))
    summed = np.cumsum(all_experts, axis=-1)
    tokens_per_popularity = m * layer.top_k / summed[..., -1:]
    for crowded in range(1, layer.top_k):
        # no expert gets a token twice, so the excess of the most popular experts goes to the rest
        too_much = tokens_per_popularity * all_experts[..., -crowded, None] > m
        rest = m * (layer.top_k - crowded) / summed[..., -crowded - 1, None]
        tokens_per_popularity = np.where(too_much, rest, tokens_per_popularity)
    theta = layer.ep_size ** (layer.num_rank_experts**-0.45)
    on_rank = popularity(_midpoints(layer.num_rank_experts) ** (1 / theta))
    tokens = np.minimum(m, tokens_per_popularity * on_rank)
    tokens = tokens / np.minimum(1.0, tokens.sum(axis=-1, keepdims=True))
    return RankLoads(tokens, np.ones_like(tokens), np.zeros_like(tokens))


def _midpoints(count: int) -> Floats:
    return (np.arange(count) + 0.5) / count


def expected_active_experts(num_tokens: ArrayLike, layer: ExpertLayer, routing: Routing) -> Floats:
    """Returns the expected number of the busiest rank's experts with tokens, of num_tokens on all ranks.

    uniform, one rank: E (1 - (1 - k / E)^m); Mixtral (8 experts, top 2), 4 tokens: 8 (1 - 0.75^4) = 5.47.
    balanced: min(E, k m) / ep_size. zipf: the sum over its experts of 1 - (1 - p)^m, which with one rank is
    at most uniform's. power_law: the sum over its experts of min(1, expected tokens).
    """
    return rank_loads(num_tokens, layer, routing).active_experts
