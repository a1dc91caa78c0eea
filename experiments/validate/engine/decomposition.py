"""Decomposes a simulated run's error: one ingredient after the other changes from recorded to modelled.

    the engine             measured
    decisions              the simulator, with the recorded times, learning of requests as the engine did
    queueing               ... learning of requests when the model says
    compute                ... with the model's time of the executor; host time as recorded
    host                   ... with the model's host time as well
    clients                ... with clients that react to the simulated outputs: the free simulation

Each step's change is one part of the error, so the parts sum to the whole. If the host works beside the
device (overlap), host time is not visible in the recording, and iteration times are a single step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from experiments.validate.engine.from_recording import measured
from experiments.validate.engine.recording import Recording
from experiments.validate.engine.swapped import RecordedTimes, num_equal, replay_in_simulator
from experiments.validate.fidelity.errors import Part
from experiments.validate.fidelity.measured import Measured, of_records
from hwmodels.host import HostOverhead
from sim.metrics.dialects import MetricsSettings
from sim.setup.scenario import Scenario

METRICS = {"ttft_s": "TTFT mean", "tpot_s": "TPOT mean", "e2e_s": "E2E mean"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Decomposition:
    """Parts of the error, in the order above. num_equal of num_steps: plans that equal the engine's."""

    parts: tuple[Part, ...]
    num_equal: int
    num_steps: int


def decompose(recordings: Sequence[Recording], scenario: Scenario, simulated: Measured) -> Decomposition:
    """Computes the parts of the recordings' mean error. simulated: the free run.

    Raises as `RecordedSource`.
    """
    model, has_host = scenario.iteration_model(), all(_knows_host(one) for one in recordings)
    names = ["decisions", "queueing", *(("compute", "host") if has_host else ("iteration times",)), "clients"]
    trim = scenario.metrics
    means = [np.mean([_means(measured(one), trim) for one in recordings], axis=0)]
    chains = []
    equal = 0
    for one in recordings:
        as_seen = replay_in_simulator(one, scenario, RecordedTimes(one, model), as_seen=True)
        equal += num_equal(one, as_seen.digests)
        chain = [as_seen, replay_in_simulator(one, scenario, RecordedTimes(one, model), as_seen=False)]
        if has_host:
            with_host = RecordedTimes(one, without_host(scenario).iteration_model(), host_only=True)
            chain.append(replay_in_simulator(one, scenario, with_host, as_seen=False))
        chain.append(replay_in_simulator(one, scenario, model, as_seen=False))
        chains.append([_means(of_records(replayed.records), trim) for replayed in chain])
    means += [np.mean(column, axis=0) for column in zip(*chains, strict=True)]
    means.append(_means(simulated, trim))
    changes = ((after - before) / means[0] for before, after in pairwise(means))
    parts = tuple(
        Part(name=name, errors=dict(zip(METRICS.values(), change.tolist(), strict=True)))
        for name, change in zip(names, changes, strict=True)
    )
    return Decomposition(parts=parts, num_equal=equal, num_steps=sum(len(one.steps) for one in recordings))


def without_host(scenario: Scenario) -> Scenario:
    """Returns the scenario with zero host time."""
    host = HostOverhead(iteration_s=0.0, sequence_s=0.0, launch_s=0.0, graph_replay_s=0.0)
    return replace(scenario, engine=replace(scenario.engine, host=host, draft_host={}))


def _knows_host(recording: Recording) -> bool:
    return not recording.engine.get("overlapped") and bool(recording.steps["compute_s"].notna().all())


def _means(run: Measured, trim: MetricsSettings) -> np.ndarray:
    table = run.trimmed(warmup_s=trim.known_warmup_s, cooldown_s=trim.cooldown_s).latencies
    return table[list(METRICS)].mean().to_numpy(dtype=np.float64)
