"""The recorded run in the simulator: with the recorded times it equals the run, to the microsecond."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from experiments.validate.engine.decomposition import METRICS, decompose, without_host
from experiments.validate.engine.engine_run import with_memory_of
from experiments.validate.engine.executor_cache import ExecutorCache
from experiments.validate.engine.from_recording import measured
from experiments.validate.engine.recording import load
from experiments.validate.engine.swapped import RecordedSource, RecordedTimes, num_equal, replay_in_simulator
from experiments.validate.fidelity.measured import of_records
from hwmodels.hf.config import from_hf_fields
from hwmodels.host import HostOverhead
from hwmodels.iterations import COUNTED, IterationShape
from policies.batching.chunked import Chunked
from policies.scheduling.shortest_job import LengthAware
from realengine.model.architecture import Architecture
from tests.experiments.validate.engine.engine_runs import UnevenClock, run_engine, scenario_of, traffic
from tests.experiments.validate.engine.test_recording import WORLDS
from tests.realengine.small_models import LLAMA

torch.set_num_threads(1)

MOVES_KV = {"swap", "prefix_swap", "mlfq", "tiered"}
GAPS_S = {"dynamic": 6e-3}  # so that it waits
KINDS = [
    *((name, overlap, 1) for name in WORLDS for overlap in (False, True)),
    # A launch of several iterations does not know of KV that comes meanwhile; the simulator goes one by one.
    *((name, overlap, 4) for name in WORLDS if name not in MOVES_KV for overlap in (False, True)),
]


def named(kind):
    name, overlap, num_iterations = kind
    return f"{name}{' overlapped' * overlap}{f' {num_iterations} a launch' * (num_iterations > 1)}"


def as_recorded(recording, scenario, *, as_seen=True):
    return replay_in_simulator(
        recording, scenario, RecordedTimes(recording, scenario.iteration_model()), as_seen=as_seen
    )


def largest_differences(recording, replayed):
    real, simulated = measured(recording).latencies, of_records(replayed.records).latencies
    assert real["request_id"].tolist() == simulated["request_id"].tolist()
    apart = np.abs(real[list(METRICS)].to_numpy() - simulated[list(METRICS)].to_numpy())
    assert (np.isnan(apart) == real[list(METRICS)].isna()).all(axis=None)
    return np.nanmax(apart, axis=0)


@pytest.mark.sampled(fast=8, slow=16)
@pytest.mark.parametrize("kind", KINDS, ids=named)
def test_what_was_run_is_simulated_plan_by_plan_and_to_the_microsecond(kind):
    name, overlap, num_iterations = kind
    scenario = scenario_of(overlap=overlap, **WORLDS[name])
    source = traffic(priorities=(0, 1), gap_s=GAPS_S.get(name, 3e-4))
    recording = run_engine(scenario, source, max_iterations=num_iterations)
    replayed = as_recorded(recording, scenario)
    assert num_equal(recording, replayed.digests) == len(recording.steps) > 20
    assert len(replayed.digests) == recording.steps["num_iterations"].sum()
    assert (largest_differences(recording, replayed) < 1e-6).all()
    assert (recording.steps["num_iterations"].max() > 1) == (num_iterations > 1)
    if "num_kv_blocks" in WORLDS[name]:
        assert recording.steps["preempted"].sum() > 0
    if name == "dynamic":
        assert any(event.kind == "wait" and event.value for event in recording.events)


def test_kv_in_4_bits_has_the_simulators_bytes_and_plans():
    """Swaps move a token's bytes: 2 layers, keys and values of 2 heads of 16, and their scales."""
    model = from_hf_fields(name="tiny", source="windtunnel/tiny", dtype="fp32", config=LLAMA)
    scenario = scenario_of(**WORLDS["swap"], model=replace(model, kv_cache_dtype="int4"))
    assert scenario.kv_bytes_per_token == 2 * 2 * 2 * (8 + 4)
    executors = ExecutorCache(torch.device("cpu"))
    assert with_memory_of(scenario, Architecture.from_hf(LLAMA), executors) == scenario
    recording = run_engine(scenario, traffic(gap_s=3e-4, priorities=(0, 1)))
    assert recording.steps["preempted"].sum() > 0
    replayed = as_recorded(recording, scenario)
    assert num_equal(recording, replayed.digests) == len(recording.steps) == len(replayed.digests) > 20
    eight = replace(scenario, model=replace(model, kv_cache_dtype="int8"))
    with pytest.raises(ValueError, match="KV has 160 bytes in the engine, 144 in the hardware model"):
        with_memory_of(eight, Architecture.from_hf(LLAMA), executors)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("name", ["swap", "prefix_swap", "mlfq"])
def test_a_request_that_comes_during_a_wait_for_kv_takes_part_in_the_next_plan(name, overlap):
    scenario = scenario_of(overlap=overlap, **WORLDS[name])
    source = traffic(30, seed=4, gap_s=3e-3, priorities=(0, 1))
    recording = run_engine(scenario, source, clock=UnevenClock(4))
    assert any(
        waited.kind == "wait" and waited.value == 0 and (entered.kind, entered.step) == ("enter", waited.step)
        for waited, entered in pairwise(recording.events)
    )
    replayed = as_recorded(recording, scenario)
    assert num_equal(recording, replayed.digests) == len(recording.steps)
    assert (largest_differences(recording, replayed) < 1e-6).all()


def test_priorities_decide_which_requests_wait():
    """Otherwise equal plans would say nothing about priorities."""
    scenario = scenario_of(**WORLDS["priority"])
    recording = run_engine(scenario, traffic(gap_s=3e-4, priorities=(0, 1)))
    waits = recording.requests.assign(waited_s=lambda table: table["scheduled_s"] - table["arrival_s"])
    by_priority = waits.groupby("priority")["waited_s"].mean()
    assert by_priority[0] < by_priority[1] / 2


@pytest.fixture(scope="module")
def crowded():
    """Returns a scenario with preemptions, and its recording."""
    scenario = scenario_of(**WORLDS["recompute"])
    return scenario, run_engine(scenario, traffic(gap_s=3e-4))


@pytest.mark.parametrize(
    "other",
    [
        {"batching": Chunked(max_num_batched_tokens=31)},
        {"scheduling": LengthAware()},
        {"num_kv_blocks": 10},
    ],
    ids=["batching", "scheduling", "blocks"],
)
def test_another_policy_decides_otherwise(crowded, other):
    _, recording = crowded
    about = {**recording.engine, "num_kv_blocks": other.get("num_kv_blocks", 9)}
    replayed = as_recorded(replace(recording, engine=about), scenario_of(**{**WORLDS["recompute"], **other}))
    assert num_equal(recording, replayed.digests) < len(recording.steps)


def test_a_request_that_comes_a_step_later_is_noticed(crowded):
    scenario, recording = crowded
    late = next(event for event in recording.events if event.kind == "enter" and event.step > 5)
    events = [replace(event, step=event.step + (event is late)) for event in recording.events]
    shifted = replace(recording, events=sorted(events, key=lambda event: event.step))
    replayed = as_recorded(shifted, scenario)
    assert num_equal(recording, replayed.digests) <= late.step


def test_a_step_that_took_longer_is_noticed(crowded):
    scenario, recording = crowded
    steps = recording.steps.copy()
    steps.loc[7:, ["start_s", "end_s", "read_s"]] += 2e-3
    replayed = as_recorded(replace(recording, steps=steps), scenario)
    assert (largest_differences(recording, replayed) > 1e-6).any()


def test_a_recording_that_was_cut_short_is_simulated_as_far_as_it_goes(tmp_path):
    scenario = scenario_of(**WORLDS["recompute"])
    recording = run_engine(scenario, traffic(gap_s=2e-3))
    recording.save(tmp_path)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    (tmp_path / "events.jsonl").write_text("\n".join(lines[: len(lines) * 4 // 5]))
    part = load(tmp_path)
    replayed = as_recorded(part, scenario)
    assert num_equal(part, replayed.digests) == len(part.steps) > 20
    assert set(part.requests["status"]) == {"finished", "unfinished"}
    ended = part.requests["status"] == "finished"
    assert (of_records(replayed.records).latencies["status"] == "finished").sum() == ended.sum()


def test_requests_that_were_given_up_are_refused():
    scenario = scenario_of()
    recording = run_engine(scenario, traffic(gap_s=1e-5, patience_s=3e-3))
    assert any(event.kind == "leave" for event in recording.events)
    with pytest.raises(ValueError, match="the recording contains aborted requests"):
        RecordedSource(recording, as_seen=False)


def test_shapes_that_were_not_run_are_priced_in_proportion(crowded):
    """All recorded iterations took twice what the model says of them: so would others."""
    scenario, recording = crowded
    model = scenario.iteration_model()
    times = RecordedTimes(recording, model)
    iterations = measured(recording).iterations
    shapes = [IterationShape(*row) for row in iterations[list(COUNTED)].itertuples(index=False)]
    slowness = iterations["duration_s"].sum() / sum(float(model.seconds(shape)) for shape in shapes)
    unknown = IterationShape(3, 100_000, 0, 0, 0, 0, 3)
    assert times.seconds(unknown) == pytest.approx(slowness * float(model.seconds(unknown)))
    # A shape that came twice gives its two times, in order, and then the model's.
    again = [i for i, shape in enumerate(shapes) if shape == shapes[0]]
    assert [times.seconds(shapes[0]) for _ in again] == iterations["duration_s"].iloc[again].tolist()
    assert times.seconds(shapes[0]) == pytest.approx(slowness * float(model.seconds(shapes[0])))


def test_the_hosts_recorded_time_is_added_to_what_the_model_says_without_one(crowded):
    """The host's time is the iteration's less the executor's; for a shape that was not run, the mean."""
    scenario, recording = crowded
    busy = replace(scenario, engine=replace(scenario.engine, host=HostOverhead(iteration_s=0.5)))
    base = without_host(busy).iteration_model()
    iterations, steps = measured(recording).iterations, recording.steps
    host_s = iterations["duration_s"] - steps["compute_s"]
    assert (host_s > 0).all()
    times = RecordedTimes(recording, base, host_only=True)
    for row, own_s in zip(iterations.itertuples(), host_s, strict=True):
        shape = IterationShape(*(getattr(row, name) for name in COUNTED))
        model_s = float(base.seconds(shape))
        assert model_s < 1e-3
        assert times.seconds(shape) == pytest.approx(model_s + own_s)
    unknown = IterationShape(3, 100_000, 0, 0, 0, 0, 3)
    assert times.seconds(unknown) == pytest.approx(float(base.seconds(unknown)) + host_s.mean())


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapped"])
def two_runs(request):
    """Returns a scenario and two recordings of it."""
    scenario = scenario_of(overlap=request.param, host_s=3e-4)
    clocks = (UnevenClock(seed) for seed in (1, 2))
    return scenario, [run_engine(scenario, traffic(gap_s=6e-3), clock=clock) for clock in clocks]


def decomposed(scenario, recordings):
    simulated = of_records(scenario.simulate(RecordedSource(recordings[0], as_seen=False)))
    return decompose(recordings, scenario, simulated), simulated


def test_the_parts_add_up_to_the_whole_error(two_runs):
    scenario, recordings = two_runs
    found, simulated = decomposed(scenario, recordings)
    for name, label in METRICS.items():
        real = np.mean([measured(one).latencies[name].mean() for one in recordings])
        error = simulated.latencies[name].mean() / real - 1
        assert sum(part.errors[label] for part in found.parts) == pytest.approx(error, rel=1e-9)
        assert found.parts[0].errors[label] == pytest.approx(0, abs=1e-6)  # decisions
    assert found.num_equal == found.num_steps == sum(len(one.steps) for one in recordings)


def test_the_parts_are_those_that_the_recording_knows(two_runs):
    scenario, recordings = two_runs
    names = [part.name for part in decomposed(scenario, recordings)[0].parts]
    times = ["iteration times"] if scenario.engine.host.overlapped else ["compute", "host"]
    assert names == ["decisions", "queueing", *times, "clients"]


def test_what_is_modelled_wrongly_is_the_part_that_grows(two_runs):
    """A frontend of 5 ms is queueing; a slower host is the part of the times that comes last."""
    scenario, recordings = two_runs
    parts = {part.name: part.errors for part in decomposed(scenario, recordings)[0].parts}

    def changed(**engine):
        other = replace(scenario, engine=replace(scenario.engine, **engine))
        found, _ = decomposed(other, recordings)
        return {part.name: part.errors["E2E mean"] - parts[part.name]["E2E mean"] for part in found.parts}

    real_s = np.mean([measured(one).latencies["e2e_s"].mean() for one in recordings])
    late = changed(frontend_s=5e-3)
    assert late["queueing"] == pytest.approx(5e-3 / real_s, rel=0.2)
    assert max(abs(late[name]) for name in late if name != "queueing") < 0.1 * late["queueing"]
    slow = changed(host=replace(scenario.engine.host, iteration_s=2e-3))
    last = [*slow][-2]  # no request depends on the answers
    assert slow[last] > 1
    assert max(abs(slow[name]) for name in slow if name != last) < 0.1 * slow[last]
