"""Simulates a recorded run with recorded quantities in place of modelled ones.

Besides the policies, a run needs the times of iterations, the host's part of them, and the times at which the
engine learns of requests. Each comes from the recording or from the model;
`experiments.validate.engine.decomposition` swaps one after the other.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from experiments.validate.engine.acceptances import replaying
from experiments.validate.engine.from_recording import LOADED_S, measured, plan_calls, speculates, until_s
from experiments.validate.engine.recording import Recording
from hwmodels.exact import Num
from hwmodels.iterations import COUNTED, Explained, IterationModel, IterationShape
from policies.core.plan import StepPlan, Transfer
from policies.core.request import Request
from policies.routing.load_balancing import RoundRobin
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.cluster.simulation import Simulation
from sim.engine.replica_pool import Links, ReplicaPool
from sim.metrics.figure import iteration_shape
from sim.records.requests import Status
from sim.records.run import RunRecords
from sim.setup.scenario import Scenario
from sim.speculation.log import DRAFT_WORK_COLUMNS
from sim.workload.base import Arrival, WorkloadNotes

NEVER = 1 << 30  # tokens; the context ends an output earlier


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A simulated replay. digests: of every plan, one per iteration."""

    records: RunRecords
    digests: list[str]


def replay_in_simulator(
    recording: Recording, scenario: Scenario, model: IterationModel, *, as_seen: bool
) -> Replayed:
    """Simulates the recorded requests on the scenario's engine, iteration by iteration.

    as_seen: the engine learns of each request before the same plan as in the recording; otherwise when the
    scenario says. Raises ValueError for a recording in which requests were aborted.
    """
    digests: list[str] = []

    def note(plan: StepPlan) -> None:
        digests.append(plan.digest())

    start_s = float(recording.engine["start_s"])
    plan_call_s = [one.time_s - start_s for one in plan_calls(recording)]
    simulation = Simulation(
        source=RecordedSource(recording, as_seen=as_seen),
        pools=[
            ReplicaPool(
                core=lambda: scenario.core(int(recording.engine["num_kv_blocks"]), tpot_s=scenario.tpot_s),
                model=model,
                frontend_s=0.0 if as_seen else scenario.engine.frontend_s,
                frontend=None if as_seen else scenario.engine.frontend,
                plans_ahead=not as_seen and scenario.host.overlapped,
                links=lambda: _RecordedLinks(plan_call_s=plan_call_s),
                new_passes=replaying(scenario, recording),
            )
        ],
        cluster=ClusterSettings(routing=RoundRobin(), seed=scenario.seed),
        sim=SimSettings(leap=False, until_s=until_s(recording)),
        on_plan=note,
    )
    records = simulation.run()
    if records.interrupted:
        raise KeyboardInterrupt
    return Replayed(records=records, digests=digests)


def num_equal(recording: Recording, digests: list[str]) -> int:
    """Returns the number of launches with equal plans, up to the first difference."""
    first = np.cumsum(recording.steps["num_iterations"]) - recording.steps["num_iterations"]
    for count, (place, digest) in enumerate(zip(first, recording.steps["digest"], strict=True)):
        if place >= len(digests) or digests[place] != digest:
            return count
    return len(first)


class RecordedSource:
    """Source of a recording's requests, with times from the start of its run."""

    def __init__(self, recording: Recording, *, as_seen: bool) -> None:
        if any(event.kind == "leave" for event in recording.events):
            raise ValueError(
                "the recording contains aborted requests, whose ends the policies did not decide"
            )
        start_s = float(recording.engine["start_s"])
        seen_s = _seen_s(recording) if as_seen else {}
        ended = recording.requests.set_index("request_id")
        arrivals = []
        for event in recording.events:
            if event.kind != "enter" or event.request_id not in ended.index:
                continue
            request: Request = event.value
            shifted = request._replace(arrival_s=request.arrival_s - start_s)
            if request.deadline_s is not None:
                shifted = shifted._replace(deadline_s=request.deadline_s - start_s)
            if ended["status"][event.request_id] == Status.finished.name:
                num_tokens = int(ended["longest_tokens"][event.request_id])
            else:  # it had not finished at the end of the recording
                num_tokens = request.max_tokens or NEVER
            time_s = seen_s[event.request_id] - start_s if as_seen else None
            arrivals.append(Arrival(shifted, num_tokens, time_s=time_s))
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival.at_s)
        self.num_requests: int | None = len(arrivals)
        self.last_arrival_s: float | None = self._arrivals[-1].at_s if arrivals else None
        self.patience_s: float | None = None
        self.notes = WorkloadNotes()

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return ()


def _seen_s(recording: Recording) -> dict[int, float]:
    """Returns by request id a time at which a simulated engine sees it before the same plan."""
    return {request_id: one.seen_s for one in plan_calls(recording) for request_id in one.request_ids}


@dataclass(kw_only=True, slots=True)
class _RecordedLinks(Links):
    """Transfers that take no time, or, if the engine waited for them, last until the next call.

    Their durations are part of the recorded times. plan_call_s: times of the policies' calls.
    """

    plan_call_s: list[float]

    def begin(self, transfer: Transfer, now: float) -> float:
        place = bisect(self.plan_call_s, now + LOADED_S / 2)
        next_s = self.plan_call_s[place] if place < len(self.plan_call_s) else inf
        return next_s if next_s < now + 2 * LOADED_S else now


class RecordedTimes:
    """An `IterationModel` that gives each iteration the recorded time of its shape, in order.

    Shapes that were not recorded get the base model's time, scaled by the recorded iterations' mean ratio to
    it. host_only: the recorded time outside of the executor is added to the time of the base model, which has
    no host.
    """

    def __init__(self, recording: Recording, base: IterationModel, *, host_only: bool = False) -> None:
        iterations = measured(recording).iterations
        assert iterations is not None
        times_s = iterations["duration_s"].to_numpy(dtype=np.float64)
        if host_only:
            steps = recording.steps
            compute_s = (steps["compute_s"] / steps["num_iterations"]).to_numpy(dtype=np.float64)
            times_s = np.maximum(times_s - np.repeat(compute_s, steps["num_iterations"]), 0.0)
        counts = iterations[list(COUNTED)].to_numpy(dtype=np.int64).tolist()
        drafts: list[list[int]] = [[]] * len(counts)
        if speculates(recording):
            drafts = iterations[list(DRAFT_WORK_COLUMNS)].to_numpy(dtype=np.int64).tolist()
        self._times_s: dict[tuple[int, ...], deque[float]] = {}
        for of_shape, of_drafts, time_s in zip(counts, drafts, times_s.tolist(), strict=True):
            self._times_s.setdefault(_key(of_shape, of_drafts), deque()).append(time_s)
        self._base = base
        self._host_only = host_only
        self._mean_s = float(times_s.mean())
        priced_s = float(np.sum(base.seconds(iteration_shape(iterations, base))))
        self._scale = float(times_s.sum()) / priced_s
        self.peak_flops_per_s = base.peak_flops_per_s
        self.peak_bytes_per_s = base.peak_bytes_per_s

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of one iteration, and uses up its recorded time."""
        recorded_s = self._times_s.get(_key(shape.counts, shape.drafts or ()))
        base_s = float(self._base.seconds(shape)) if self._host_only or not recorded_s else 0.0
        if self._host_only:
            return base_s + (recorded_s.popleft() if recorded_s else self._mean_s)
        return recorded_s.popleft() if recorded_s else base_s * self._scale

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive iterations; see `IterationModel`."""
        ends_s = []
        for i in range(num_iterations):
            context = num_context_tokens + i * num_seqs
            start_s += self.seconds(IterationShape(num_seqs, context, 0, 0, 0, 0, num_seqs))
            ends_s.append(start_s)
        return ends_s

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        return self._base.breakdown(shape)

    def explain(self, shape: IterationShape) -> list[Explained]:
        return self._base.explain(shape)

    def flops(self, shape: IterationShape) -> Num:
        return self._base.flops(shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        return self._base.bytes_moved(shape)


def _key(counts: Iterable[Num], drafts: Iterable[Num]) -> tuple[int, ...]:
    """Returns the whole numbers of a shape; of its drafts only if there are any."""
    of_drafts = [int(number) for number in drafts]
    return *(int(number) for number in counts), *(of_drafts if any(of_drafts) else ())
