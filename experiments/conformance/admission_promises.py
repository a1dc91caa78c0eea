"""Promises of an admission policy, each a check of one world that is played at a `ToyGateway`."""

from __future__ import annotations

from copy import deepcopy
from itertools import count
from math import inf, isfinite
from typing import Any

from experiments.conformance.renamed import promise_by_old_name
from experiments.conformance.toy_gateway import ToyGateway, num_remembered, play
from experiments.conformance.worlds import Traffic, World
from policies.admission import Refusal
from policies.core.request import Request

DAY_S = 86_400.0
NUM_ROUNDS = 24
NUM_FIRST_ROUNDS = 6
"""First of these rounds, whose largest memory is the limit for later rounds."""


def returns_none_or_refusal(world: World) -> None:
    """Requires that refusal() returns None or a Refusal, and reads only declared signals of replicas."""
    for asked in play(world).asked:
        refusal = asked.refusal
        if refusal is None:
            continue
        what = f"refusal() returned {refusal!r}"
        assert isinstance(refusal, Refusal), f"{what}: must be None or a Refusal"
        assert isinstance(refusal.reason, str), f"{what}: reason must be a string"
        assert refusal.reason, f"{what}: reason must not be empty"
        after_s = refusal.retry_after_s
        assert after_s is None or after_s >= 0, f"{what}: retry_after_s must be None or >= 0 s"


def admission_is_reproducible(world: World) -> None:
    """Requires equal decisions in a second run: no clock, no shared random numbers, no state kept between."""
    for one, other in zip(play(world).asked, play(world).asked, strict=True):
        assert one == other, (
            f"{_shown(one.request, one.now)}: {one.refusal} in one run, {other.refusal} in a second"
        )


def admits_when_idle(world: World) -> None:
    """Requires that a request to a service that is idle for a day is admitted or refused permanently."""
    fresh, busy = ToyGateway(world, deepcopy(world.admission)), play(world)
    numbers = count(len(world.asks))
    for days, arrival in enumerate(Traffic(world.asks).arrivals(), start=1):
        for gateway, when in ((fresh, "in a new service"), (busy, "after all requests have ended")):
            request = _like(arrival.request, next(numbers), _last_s(busy) + days * DAY_S)
            refusal = gateway.ask(request, arrival.num_output_tokens, request.arrival_s)
            is_right = refusal is None or refusal.retry_after_s == inf
            assert is_right, f"{when}, {_shown(request, request.arrival_s)} gets {refusal}"
            gateway.until(inf)


def permanent_refusals_stay(world: World) -> None:
    """Requires that a request refused with retry_after_s=inf is refused so at every later attempt."""
    gateway = play(world)
    refused = [asked for asked in gateway.asked if asked.refusal and asked.refusal.retry_after_s == inf]
    now = _last_s(gateway)
    for asked in refused:
        now += DAY_S
        again = gateway.ask(asked.request, 1, now)
        is_same = again is not None and again.retry_after_s == inf
        assert is_same, f"{_shown(asked.request, asked.now)}: {asked.refusal}, but at {now:.6g} s: {again}"


def retry_after_holds(world: World) -> None:
    """Requires that an equal request is admitted retry_after_s later if the service is idle by then."""
    gateway = ToyGateway(world, deepcopy(world.admission))
    for arrival in Traffic(world.asks).arrivals():
        refusal = gateway.ask(arrival.request, arrival.num_output_tokens, arrival.at_s)
        if refusal is None or refusal.retry_after_s is None or not isfinite(refusal.retry_after_s):
            continue
        then_s = arrival.at_s + refusal.retry_after_s
        other = deepcopy(gateway)
        other.end_all(arrival.at_s)
        request = _like(arrival.request, len(world.asks), then_s)
        answer = other.ask(request, arrival.num_output_tokens, then_s)
        assert answer is None, (
            f"{_shown(arrival.request, arrival.at_s)}: {refusal}, but at {then_s:.6g} s: {answer}"
        )


def forgets_ended_requests(world: World) -> None:
    """Requires that the policy's memory does not grow with ended requests, sessions and tenants."""
    gateway = ToyGateway(world, deepcopy(world.admission))
    numbers, sizes, start_s = count(), [], 0.0
    for number in range(NUM_ROUNDS):
        for arrival in Traffic(world.asks).arrivals():
            like = _like(arrival.request, next(numbers), start_s + arrival.at_s)
            request = like._replace(tenant=f"{like.tenant}/{number}", session_id=like.request_id)
            gateway.ask(request, arrival.num_output_tokens, request.arrival_s)
        gateway.until(inf)
        sizes.append(num_remembered(gateway.policy))
        start_s = _last_s(gateway) + DAY_S
    most = max(sizes[:NUM_FIRST_ROUNDS])
    assert sizes[-1] <= most, (
        f"after {NUM_ROUNDS} rounds in which all requests have ended, the policy holds {sizes[-1]} objects; "
        f"after each of the first {NUM_FIRST_ROUNDS} rounds it held at most {most}"
    )


def __getattr__(name: str) -> Any:
    """Returns a promise by its old name."""
    return promise_by_old_name(name, globals())


def _like(request: Request, request_id: int, arrival_s: float) -> Request:
    """Copies a request with another id and arrival time, in seconds."""
    deadline_s = request.deadline_s
    if deadline_s is not None:
        deadline_s += arrival_s - request.arrival_s
    return request._replace(request_id=request_id, arrival_s=arrival_s, deadline_s=deadline_s)


def _last_s(gateway: ToyGateway) -> float:
    """Returns the time by which all requests have ended, in seconds."""
    return max([asked.now for asked in gateway.asked[-1:]] + [replica.free_s for replica in gateway.replicas])


def _shown(request: Request, now: float) -> str:
    return f"request {request.request_id} of {request.prompt.num_tokens} tokens at {now:.6g} s"
