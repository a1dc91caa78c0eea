"""What a policy must promise, each as a check of one world: an AssertionError says how it was broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from math import inf
from typing import Any

from experiments.conformance.days import Asked, Day
from experiments.conformance.recording_core import Decision
from experiments.conformance.same_run import assert_leap_equals_step, assert_same_records
from experiments.conformance.worlds import Traffic, World, WorldRun
from policies.core.request import Request
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.routing import ReplicaView


def leap_equals_step(world: World) -> None:
    """Running a plan's whole horizon at once changes nothing: neither times nor decisions."""
    assert_leap_equals_step(world)


def same_again(world: World) -> None:
    """A second run decides what the first did: no clock, no shared random numbers, no state kept between."""
    first, second = world.simulate(), world.simulate()
    for one, other in zip(first.cores, second.cores, strict=True):
        _assert_equal_decisions(one.decisions, other.decisions, "run", "run again")
    assert_same_records(first.records, second.records)


def everybody_ends(world: World) -> None:
    """Of a finite number of requests each one ends: no request waits, stalls or is preempted for ever."""
    _assert_all_ended(world.simulate())


def no_leaked_blocks(world: World) -> None:
    """Every block has its owners while the run lasts and none at the end; so have slots and host memory."""
    run = world.simulate(leap=False)
    for core in run.cores:
        if core.num_unfinished:
            continue
        num_used = core.block_pool.num_used - (0 if core.residents is None else core.residents.num_blocks)
        assert num_used == 0, f"all have ended, and {num_used} blocks are still in use"
        assert len(core.free_slots) == core.max_num_seqs, "all have ended, and a slot is still taken"
        num_swapped = world.num_swap_blocks - core.num_free_swap_blocks
        assert num_swapped == 0, f"all have ended, and {num_swapped} blocks of host memory are still taken"


def budget_respected(world: World) -> None:
    """No iteration has more tokens than the batching policy's max_num_batched_tokens."""
    limit = getattr(world.batching, "max_num_batched_tokens", inf)
    for core in world.simulate().cores:
        for decision in core.decisions:
            num_tokens = sum(decision.tokens_by_request.values())
            assert num_tokens <= limit, (
                f"iteration {decision.iteration} has {num_tokens} tokens, max_num_batched_tokens is {limit}"
            )


class AskedAlways:
    """A batching policy that is asked for every step, as `fill` without a declaration of its own is."""

    def __init__(self, batching: Any) -> None:
        self._batching = batching

    def __repr__(self) -> str:
        return repr(self._batching)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while a copy is being made, which has nothing yet
            raise AttributeError(name)
        return getattr(self._batching, name)

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Let the policy decide."""
        self._batching.fill(view, step, now)


def unasked_equals_asked(world: World) -> None:
    """A step that `max_unasked_decodes` leaves to the engine is the step that `fill` would have decided."""
    unasked = world.simulate(leap=False)
    asked = replace(world, batching=AskedAlways(world.batching)).simulate(leap=False)
    for one, other in zip(unasked.cores, asked.cores, strict=True):
        _assert_equal_decisions(one.decisions, other.decisions, "left to the engine", "asked of the policy")
    assert_same_records(unasked.records, asked.records)


def blind_to_the_truth(world: World) -> None:
    """Two runs that differ in nothing but the true lengths decide the same until the first answer ends."""
    asks = tuple(ask._replace(num_output_tokens=max(1, 61 - ask.num_output_tokens)) for ask in world.asks)
    one, other = world.simulate(leap=False), replace(world, asks=asks).simulate(leap=False)
    first_end_s = min(_first_end_s(one), _first_end_s(other))
    for mine, others in zip(one.cores, other.cores, strict=True):
        one_s, other_s = (
            [decision for decision in core.decisions if decision.start_s < first_end_s]
            for core in (mine, others)
        )
        _assert_equal_decisions(one_s, other_s, "with these answers", "with answers of 61 tokens less these")


def overtaken_at_most(world: World, bound: int) -> None:
    """Nobody sees more than `bound` requests admitted that came after it."""
    for core in world.simulate().cores:
        admitted = core.first_admitted
        for place, request_id in enumerate(admitted):
            arrival_s = core.arrival_s[request_id]
            overtakers = [other for other in admitted[:place] if core.arrival_s[other] > arrival_s]
            assert len(overtakers) <= bound, (
                f"request {request_id} was overtaken by {overtakers}, starvation_bound is {bound}"
            )


def overtaken_within(world: World, bound_s: float) -> None:
    """Nobody sees a request admitted before it that came more than `bound_s` after it."""
    for core in world.simulate().cores:
        admitted = core.first_admitted
        for place, request_id in enumerate(admitted):
            until_s = core.arrival_s[request_id] + bound_s
            overtakers = [other for other in admitted[:place] if core.arrival_s[other] > until_s]
            assert not overtakers, (
                f"request {request_id} was overtaken by {overtakers}, starvation_bound_s is {bound_s}"
            )


class Routed:
    """A routing policy whose every choice is looked at."""

    def __init__(self, routing: Any) -> None:
        self._routing = routing

    def __repr__(self) -> str:
        return repr(self._routing)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while a copy is being made, which has nothing yet
            raise AttributeError(name)
        return getattr(self._routing, name)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The policy's choice, which must be the index of a replica."""
        index: int = self._routing.choose(request, replicas, now)
        is_index = isinstance(index, int) and 0 <= index < len(replicas)
        assert is_index, f"choose() gave {index!r}: must be a whole number from 0 to {len(replicas) - 1}"
        return index


def chooses_a_replica(world: World) -> None:
    """What it chooses is the index of a replica, for every request."""
    replace(world, routing=Routed(world.routing)).simulate()


def asks_within_bounds(day: Day) -> None:
    """It asks for a whole number of replicas, from its min_replicas to its max_replicas."""
    low, high = day.scaling.min_replicas, day.scaling.max_replicas
    for asked in day.live():
        allowed = isinstance(asked.target, int) and low <= asked.target <= high
        assert allowed, f"{_describe(asked)}: must be a whole number from {low} to {high}"


def asks_the_same_again(day: Day) -> None:
    """A second pool on the same day is asked for the same: no clock, no shared random numbers or state."""
    for one, other in zip(day.live(), day.live(), strict=True):
        assert one == other, f"{_describe(one)}; in another pool {_describe(other)}"


def predicts_within_limits(world: World) -> None:
    """A prediction is a whole number of tokens, at least 1 and at most the client's max_tokens."""
    predictor = deepcopy(world.prediction)
    for request, true_num_tokens in _in_turn(world):
        predicted = predictor.predict(request, true_num_tokens)
        assert isinstance(predicted, int), f"predict() gave {predicted!r}: must be a whole number"
        limit = inf if request.max_tokens is None else request.max_tokens
        assert 1 <= predicted <= limit, f"predict() gave {predicted}: must be >= 1 and <= {limit}"
        predictor.observe(request, true_num_tokens)


def copies_share_nothing(world: World) -> None:
    """What one copy observes changes no prediction of another: each replica has a predictor of its own."""
    pristine, taught = deepcopy(world.prediction), deepcopy(world.prediction)
    before = [pristine.predict(request, truth) for request, truth in _in_turn(world)]
    for request, truth in _in_turn(world):
        taught.observe(request, truth)
    after = [pristine.predict(request, truth) for request, truth in _in_turn(world)]
    assert before == after, f"it predicted {before}, and {after} after a copy of it had observed the answers"


def honest_about_the_truth(world: World) -> None:
    """needs_truth=False: the true length changes nothing. True: without it, ValueError."""
    predictor = deepcopy(world.prediction)
    for request, truth in _in_turn(world):
        if predictor.needs_truth:
            try:
                predictor.predict(request, None)
            except ValueError:
                continue
            raise AssertionError("needs_truth is set, and predict(request, None) did not raise ValueError")
        with_truth, without = predictor.predict(request, truth), predictor.predict(request, None)
        assert with_truth == without, (
            f"needs_truth=False, but predict() gives {with_truth} for the true length {truth}, else {without}"
        )
        predictor.observe(request, truth)


def _in_turn(world: World) -> list[tuple[Request, int]]:
    """The requests that come by themselves, and the true lengths of their answers."""
    arrivals = Traffic(world.asks).arrivals()
    return [
        (a.request, min(a.num_output_tokens, a.request.max_tokens or a.num_output_tokens)) for a in arrivals
    ]


def _assert_all_ended(run: WorldRun) -> None:
    requests = run.records.requests
    left = requests[requests.status == "unfinished"]
    assert left.empty, f"the engines have stopped, and requests {left.request_id.tolist()} have not ended"


def _first_end_s(run: WorldRun) -> float:
    requests = run.records.requests
    return min(requests.finished_s[requests.status == "finished"].tolist(), default=inf)


def _assert_equal_decisions(one: list[Decision], other: list[Decision], this: str, that: str) -> None:
    for mine, others in zip(one, other, strict=False):
        assert mine == others, (
            f"iteration {mine.iteration}\n  {this}: {_shown(mine)}\n  {that}: {_shown(others)}"
        )
    assert len(one) == len(other), f"{len(one)} steps {this}, {len(other)} {that}"


def _shown(decision: Decision) -> str:
    return (
        f"at {decision.start_s:.6g} s, tokens by request {decision.tokens_by_request}, admitted "
        f"{decision.admitted}, preempted {decision.preempted}, {decision.num_iterations} iterations"
    )


def _describe(asked: Asked) -> str:
    return (
        f"at {asked.now:.6g} s, with {asked.num_replicas} replicas up, {asked.num_starting} starting and "
        f"{asked.num_waiting} requests waiting, target() gave {asked.target!r}"
    )


Promise = Callable[[Any], None]
