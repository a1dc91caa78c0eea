"""Promises of policies, each a check of one world that raises AssertionError if the promise is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from math import inf
from typing import Any

from experiments.conformance.days import Asked, Day
from experiments.conformance.recording_core import Decision
from experiments.conformance.renamed import promise_by_old_name
from experiments.conformance.same_run import assert_leap_equals_step, assert_same_records
from experiments.conformance.worlds import Traffic, World, WorldRun
from policies.batching import BatchingTraits
from policies.core.request import Request
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.routing import ReplicaView, index_views
from policies.user_code import traits_of
from sim.records.table import to_pandas


def leap_equals_step(world: World) -> None:
    """Requires that computing the whole horizon of a plan at once changes neither times nor decisions."""
    assert_leap_equals_step(world)


def run_is_reproducible(world: World) -> None:
    """Requires an equal second run: no clock, no shared random numbers, no state kept between runs."""
    first, second = world.simulate(), world.simulate()
    for one, other in zip(first.cores, second.cores, strict=True):
        _assert_equal_decisions(one.decisions, other.decisions, "first run", "second run")
    assert_same_records(first.records, second.records)


def every_request_ends(world: World) -> None:
    """Requires that every request ends: no request waits, stalls or is preempted forever."""
    _assert_all_ended(world.simulate())


def no_leaked_blocks(world: World) -> None:
    """Requires that KV blocks have owners while they are in use, and that all memory is free at the end."""
    run = world.simulate(leap=False)
    for core in run.cores:
        if core.num_unfinished:
            continue
        num_used = core.block_pool.num_used - (0 if core.residents is None else core.residents.num_blocks)
        ended = "all requests have ended, but"
        assert num_used == 0, f"{ended} KV blocks are still in use: {num_used}"
        num_taken = core.max_num_seqs - len(core.free_slots)
        assert num_taken == 0, f"{ended} slots are still in use: {num_taken}"
        num_swapped = world.num_swap_blocks - core.num_free_swap_blocks
        assert num_swapped == 0, f"{ended} blocks of host memory are still in use: {num_swapped}"


def budget_respected(world: World) -> None:
    """Requires that no iteration has more tokens than max_num_batched_tokens of the batching policy."""
    limit = traits_of(world.batching, BatchingTraits).max_num_batched_tokens or inf
    for core in world.simulate().cores:
        for decision in core.decisions:
            num_tokens = sum(decision.tokens_by_request.values())
            assert num_tokens <= limit, (
                f"iteration {decision.iteration} has {num_tokens} tokens, max_num_batched_tokens is {limit}"
            )


class AskedAlways:
    """Batching policy without declarations, so that the engine calls `fill` for every step."""

    def __init__(self, batching: Any) -> None:
        self._batching = batching

    def __repr__(self) -> str:
        return repr(self._batching)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while deepcopy builds a copy, which has no attributes yet
            raise AttributeError(name)
        return getattr(self._batching, name)

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Calls `fill` of the policy."""
        self._batching.fill(view, step, now)


def unasked_decodes_equal_fill(world: World) -> None:
    """Requires that steps which `max_unasked_decodes` leaves to the engine are those that `fill` decides."""
    unasked = world.simulate(leap=False)
    asked = replace(world, batching=AskedAlways(world.batching)).simulate(leap=False)
    for one, other in zip(unasked.cores, asked.cores, strict=True):
        _assert_equal_decisions(one.decisions, other.decisions, "decided by the engine", "decided by fill()")
    assert_same_records(unasked.records, asked.records)


def independent_of_true_lengths(world: World) -> None:
    """Requires equal decisions with other true output lengths, until the first output ends."""
    asks = tuple(ask._replace(num_output_tokens=max(1, 61 - ask.num_output_tokens)) for ask in world.asks)
    one, other = world.simulate(leap=False), replace(world, asks=asks).simulate(leap=False)
    first_end_s = min(_first_end_s(one), _first_end_s(other))
    for mine, others in zip(one.cores, other.cores, strict=True):
        one_s, other_s = (
            [decision for decision in core.decisions if decision.start_s < first_end_s]
            for core in (mine, others)
        )
        _assert_equal_decisions(one_s, other_s, "with these lengths", "with 61 tokens minus these lengths")


def starvation_bound_holds(world: World, bound: int) -> None:
    """Requires that at most `bound` later requests are admitted before a request."""
    for core in world.simulate().cores:
        admitted = core.first_admitted
        for place, request_id in enumerate(admitted):
            arrival_s = core.arrival_s[request_id]
            overtakers = [other for other in admitted[:place] if core.arrival_s[other] > arrival_s]
            assert len(overtakers) <= bound, (
                f"requests {overtakers} were admitted before request {request_id}, which arrived earlier; "
                f"starvation_bound is {bound}"
            )


def starvation_bound_s_holds(world: World, bound_s: float) -> None:
    """Requires that no request is admitted before one that arrived more than `bound_s` seconds earlier."""
    for core in world.simulate().cores:
        admitted = core.first_admitted
        for place, request_id in enumerate(admitted):
            until_s = core.arrival_s[request_id] + bound_s
            overtakers = [other for other in admitted[:place] if core.arrival_s[other] > until_s]
            assert not overtakers, (
                f"requests {overtakers} were admitted before request {request_id}, which arrived more than "
                f"{bound_s} s (starvation_bound_s) earlier"
            )


class Routed:
    """Routing policy whose choices are checked."""

    def __init__(self, routing: Any) -> None:
        self._routing = routing

    def __repr__(self) -> str:
        return repr(self._routing)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while deepcopy builds a copy, which has no attributes yet
            raise AttributeError(name)
        return getattr(self._routing, name)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the policy's choice; asserts that it is the index of a replica."""
        index: int = self._routing.choose(request, replicas, now)
        is_index = isinstance(index, int) and 0 <= index < len(replicas)
        assert is_index, f"choose() returned {index!r}: must be a whole number from 0 to {len(replicas) - 1}"
        return index


def chooses_a_replica(world: World) -> None:
    """Requires that choose() returns the index of a replica for every request."""
    replace(world, routing=Routed(world.routing)).simulate()


class Blind(Routed):
    """Routing policy that gets views of replicas with their index only."""

    def __init__(self, routing: Any) -> None:
        super().__init__(routing)
        self._seen: Sequence[ReplicaView] = ()
        self._views: list[ReplicaView] = []

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the policy's choice."""
        if replicas is not self._seen:
            self._seen, self._views = replicas, index_views([view.index for view in replicas], self._routing)
        return super().choose(request, self._views, now)


def choices_need_no_replica(world: World) -> None:
    """Requires that a policy with reads_replicas = False reads only the index of replicas."""
    blind = replace(world, routing=Blind(world.routing))
    assert_same_records(world.simulate().records, blind.simulate().records)


def target_within_bounds(day: Day) -> None:
    """Requires that the target is a whole number of replicas from min_replicas to max_replicas."""
    low, high = day.scaling.min_replicas, day.scaling.max_replicas
    for asked in day.simulate():
        allowed = isinstance(asked.target, int) and low <= asked.target <= high
        assert allowed, f"{_describe(asked)}: must be a whole number from {low} to {high}"


def target_is_reproducible(day: Day) -> None:
    """Requires equal targets for a second pool on the same day: no clock, no shared random numbers."""
    for one, other in zip(day.simulate(), day.simulate(), strict=True):
        assert one == other, f"{_describe(one)}; in another pool {_describe(other)}"


def predicts_within_limits(world: World) -> None:
    """Requires that a prediction is a whole number of tokens from 1 to the request's max_tokens."""
    predictor = deepcopy(world.prediction)
    for request, true_num_tokens in _in_turn(world):
        predicted = predictor.predict(request, true_num_tokens)
        assert isinstance(predicted, int), f"predict() returned {predicted!r}: must be a whole number"
        limit = inf if request.max_tokens is None else request.max_tokens
        assert 1 <= predicted <= limit, f"predict() returned {predicted}: must be >= 1 and <= {limit}"
        predictor.observe(request, true_num_tokens)


def copies_share_nothing(world: World) -> None:
    """Requires that copies of a predictor are independent, because each replica has its own."""
    predictor, observer = deepcopy(world.prediction), deepcopy(world.prediction)
    before = [predictor.predict(request, truth) for request, truth in _in_turn(world)]
    for request, truth in _in_turn(world):
        observer.observe(request, truth)
    after = [predictor.predict(request, truth) for request, truth in _in_turn(world)]
    assert before == after, f"predictions are {before}, and {after} after a copy has observed the outputs"


def needs_truth_is_declared(world: World) -> None:
    """Requires that predict() ignores the true length, or declares needs_truth and refuses None."""
    predictor = deepcopy(world.prediction)
    for request, truth in _in_turn(world):
        if predictor.needs_truth:
            try:
                predictor.predict(request, None)
            except ValueError:
                continue
            raise AssertionError("needs_truth is set, but predict(request, None) did not raise ValueError")
        with_truth, without = predictor.predict(request, truth), predictor.predict(request, None)
        assert with_truth == without, (
            f"needs_truth=False, but predict() returns {with_truth} for the true length {truth}, and "
            f"{without} for None"
        )
        predictor.observe(request, truth)


def _in_turn(world: World) -> list[tuple[Request, int]]:
    """Returns the requests of the world that do not depend on others, with their true output lengths."""
    arrivals = Traffic(world.asks).arrivals()
    return [
        (a.request, min(a.num_output_tokens, a.request.max_tokens or a.num_output_tokens)) for a in arrivals
    ]


def _assert_all_ended(run: WorldRun) -> None:
    requests = to_pandas(run.records.requests)
    left = requests[requests.status == "unfinished"]
    assert left.empty, f"the engines have stopped, but requests {left.request_id.tolist()} have not ended"


def _first_end_s(run: WorldRun) -> float:
    requests = to_pandas(run.records.requests)
    return min(requests.finished_s[requests.status == "finished"].tolist(), default=inf)


def _assert_equal_decisions(one: list[Decision], other: list[Decision], this: str, that: str) -> None:
    for mine, others in zip(one, other, strict=False):
        assert mine == others, (
            f"iteration {mine.iteration}\n  {this}: {_shown(mine)}\n  {that}: {_shown(others)}"
        )
    assert len(one) == len(other), f"number of steps\n  {this}: {len(one)}\n  {that}: {len(other)}"


def _shown(decision: Decision) -> str:
    return (
        f"at {decision.start_s:.6g} s, tokens by request {decision.tokens_by_request}, admitted "
        f"{decision.admitted}, preempted {decision.preempted}, iterations {decision.num_iterations}"
    )


def _describe(asked: Asked) -> str:
    return (
        f"at {asked.now:.6g} s, with replicas running: {asked.num_replicas}, starting: {asked.num_starting}, "
        f"requests waiting: {asked.num_waiting}, target() returned {asked.target!r}"
    )


def __getattr__(name: str) -> Any:
    """Returns a promise by its old name."""
    return promise_by_old_name(name, globals())


Promise = Callable[[Any], None]
"""Check of a world (or of a day); the first line of its docstring says what it requires."""
