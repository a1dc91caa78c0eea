"""Runs that speculate: recorded, decided again, simulated again, and their acceptance as a file."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from experiments.validate.engine.acceptances import (  # noqa: E402
    RecordedAcceptance,
    as_measured,
    check_written,
    write_acceptance,
)
from experiments.validate.engine.from_recording import measured  # noqa: E402
from experiments.validate.engine.recording import load  # noqa: E402
from experiments.validate.engine.replay import replay  # noqa: E402
from experiments.validate.engine.swapped import RecordedTimes, num_equal, replay_in_simulator  # noqa: E402
from hwmodels.speculation.draft import (  # noqa: E402
    HeadDraft,
    HostDraft,
    LayerDraft,
    ModelDraft,
    PassDraft,
    SeveralDrafts,
    SkipDraft,
)
from policies.batching.chunked import Chunked  # noqa: E402
from policies.caching.paged import Paged  # noqa: E402
from policies.caching.radix import Radix  # noqa: E402
from policies.scheduling.fcfs import Fcfs  # noqa: E402
from policies.speculation import TokenTree  # noqa: E402
from policies.speculation.draft_lengths import (  # noqa: E402
    Adaptive,
    Backoff,
    ByBatchSize,
    Fixed,
    NoDrafts,
    SloAware,
)
from policies.speculation.proposers import (  # noqa: E402
    DraftModel,
    Eagle,
    Eagle3,
    Lookahead,
    Medusa,
    Mtp,
    Ngram,
    SelfSpeculative,
    SpecinferTree,
    Suffix,
)
from sim.speculation.acceptance.iid import Iid  # noqa: E402
from sim.speculation.acceptance.table import Table  # noqa: E402
from tests.experiments.validate.engine.engine_runs import run_engine, scenario_of, traffic  # noqa: E402
from tests.realengine.small_models import LLAMA  # noqa: E402

NGRAM = Ngram(draft=HostDraft(), num_speculative_tokens=4, prompt_lookup_max=2, prompt_lookup_min=1)
SUFFIX = Suffix(draft=HostDraft(), num_speculative_tokens=5)
SKIPPING = SelfSpeculative(draft=SkipDraft(num_layers=1, start_s=0.0, step_s=0.0), num_speculative_tokens=3)
LOOKAHEAD = Lookahead(draft=PassDraft.of_window(window=3, ngram=3), window=3, ngram=3, guesses=3)
LAYER = {"start_s": 0.0, "step_s": 0.0}
TREE = TokenTree.of_widths([2, 2, 1])
SMALL = ModelDraft(model=scenario_of().model, **LAYER)
DEVICE = {
    "draft_model": DraftModel(draft=SMALL, num_speculative_tokens=3),
    "specinfer_tree": SpecinferTree(draft=SMALL, widths=(2, 2, 1)),
    "specinfer_drafts": SpecinferTree(draft=SeveralDrafts(drafts={"a": SMALL, "b": SMALL}), widths=(2, 1)),
    "medusa": Medusa(draft=HeadDraft(num_heads=3, start_s=0.0), num_speculative_tokens=3),
    "medusa_tree": Medusa(
        draft=HeadDraft(num_heads=3, start_s=0.0), num_speculative_tokens=TREE.num_nodes, tree=TREE
    ),
    "eagle": Eagle(draft=LayerDraft(kind="eagle", **LAYER), num_speculative_tokens=3),
    "eagle_tree": Eagle(
        draft=LayerDraft(kind="eagle", **LAYER), num_speculative_tokens=TREE.num_nodes, tree=TREE
    ),
    "eagle3": Eagle3(draft=LayerDraft(kind="eagle3", vocab_size=48, **LAYER), num_speculative_tokens=3),
    "mtp": Mtp(draft=LayerDraft(kind="mtp", **LAYER), num_speculative_tokens=2),
}
"""Proposers whose drafts are on the device; of their random drafts few tokens are accepted."""
MODEL = {"config": LLAMA}
CONFIG = {
    "model": MODEL,
    "speculation": {
        "draft": {"model": MODEL, "drafts": {"first": {"model": MODEL}, "second": {"model": MODEL}}}
    },
}
LENGTHS = {
    "fixed": Fixed(),
    "none": NoDrafts(),
    "slo_aware": SloAware(tpot_s=1e-6),  # all are behind: else it decides by a clock that has no host's time
    "by_batch_size": ByBatchSize(num_speculative_tokens_per_batch_size=((1, 3, 4), (4, 8, 1))),
    "adaptive": Adaptive(),
    "backoff": Backoff(),
}
KEPT = {
    "plain": {},
    "tight": {"num_kv_blocks": 30},
    "swapping": {
        "num_kv_blocks": 30,
        "scheduling": Fcfs(preemption_mode="swap"),
        "caching": Paged(block_size=4),
    },
    "chunks": {"batching": Chunked(max_num_batched_tokens=40)},
    "radix": {"caching": Radix()},
}


def speculating(proposer=NGRAM, draft_length=None, **changes):
    length = draft_length or Fixed()
    return scenario_of(speculation=proposer, draft_length=length, acceptance=Iid(rate=0.5), **changes)


@pytest.mark.sampled(fast=6, slow=12)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "proposer", [NGRAM, SUFFIX, SKIPPING, LOOKAHEAD], ids=lambda proposer: proposer.method
)
def test_every_proposer_and_policy_is_decided_again(proposer, length):
    scenario = speculating(proposer, LENGTHS[length])
    recording = run_engine(scenario, traffic())
    accepted = sum(sum(event.value[2:]) for event in recording.events if event.kind == "pass")
    assert (accepted > 0) == (length != "none")
    core = scenario.core(int(recording.engine["num_kv_blocks"]))
    found = replay(recording, core)
    assert found.difference is None, found.difference
    assert found.num_equal == len(recording.steps) > 20


@pytest.mark.sampled(fast=6, slow=16)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("proposer", DEVICE)
def test_every_drafter_on_the_device_is_decided_again_also_in_the_simulator(proposer, length):
    model = replace(scenario_of().model, num_mtp_modules=1)
    scenario = speculating(DEVICE[proposer], LENGTHS[length], model=model)
    recording = run_engine(scenario, traffic(gap_s=2e-4), config=CONFIG)
    found = replay(recording, scenario.core(int(recording.engine["num_kv_blocks"])))
    assert found.difference is None, found.difference
    times = RecordedTimes(recording, scenario.iteration_model())
    replayed = replay_in_simulator(recording, scenario, times, as_seen=True)
    assert num_equal(recording, replayed.digests) == len(recording.steps) > 10
    drafted = sum(event.value[1] for event in recording.events if event.kind == "pass")
    assert (drafted > 0) == (length != "none")


@pytest.mark.parametrize("kept", KEPT)
def test_the_simulator_with_recorded_acceptances_makes_the_recorded_plans(kept):
    scenario = speculating(**KEPT[kept])
    recording = run_engine(scenario, traffic(gap_s=2e-4))
    model = scenario.iteration_model()
    times = RecordedTimes(recording, model)
    replayed = replay_in_simulator(recording, scenario, times, as_seen=True)
    assert num_equal(recording, replayed.digests) == len(recording.steps)
    tokens = replayed.records.requests["output_tokens"]
    assert np.array_equal(tokens, recording.requests["output_tokens"].to_numpy())


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("kept", KEPT)
def test_a_draft_model_is_decided_again_also_where_acceptances_are_read_late(overlap, kept):
    draft = ModelDraft(model=scenario_of().model, start_s=0.0, step_s=0.0)
    proposer = DraftModel(draft=draft, num_speculative_tokens=3)
    scenario = speculating(proposer, overlap=overlap, **KEPT[kept])
    config = {"speculation": {"draft": {"model": {"config": LLAMA}}}}
    recording = run_engine(scenario, traffic(gap_s=2e-4), config=config)
    assert any(event.kind == "pass" and sum(event.value[2:]) for event in recording.events)
    found = replay(recording, scenario.core(int(recording.engine["num_kv_blocks"])))
    assert found.difference is None, found.difference
    times = RecordedTimes(recording, scenario.iteration_model())
    replayed = replay_in_simulator(recording, scenario, times, as_seen=True)
    assert num_equal(recording, replayed.digests) == len(recording.steps)


def test_a_wrong_acceptance_is_found():
    scenario = speculating()
    recording = run_engine(scenario, traffic())
    event = next(e for e in recording.events if e.kind == "pass" and sum(e.value[2:]))
    event.value[2] -= 1
    found = replay(recording, scenario.core(int(recording.engine["num_kv_blocks"])))
    assert found.difference is not None


def test_a_recording_is_read_as_it_was_written_also_one_without_drafts(tmp_path):
    scenario = speculating()
    recording = run_engine(scenario, traffic())
    recording.save(tmp_path / "new")
    again = load(tmp_path / "new")
    assert again.events == recording.events
    assert replay(again, scenario.core(int(recording.engine["num_kv_blocks"]))).difference is None
    assert {"draft_tokens", "drafted_tokens"} <= set(measured(again).iterations)
    plain = run_engine(scenario_of(), traffic())
    plain.save(tmp_path / "old")
    steps = tmp_path / "old" / "steps.parquet"
    pd.read_parquet(steps).iloc[:, :-5].to_parquet(steps)  # as before draft tokens were recorded
    old = load(tmp_path / "old")
    assert replay(old, scenario_of().core(int(plain.engine["num_kv_blocks"]))).difference is None
    assert "draft_tokens" not in measured(old).iterations


def test_gaps_between_tokens_are_those_between_bursts():
    recording = run_engine(speculating(), traffic())
    gaps = measured(recording).gaps
    assert (gaps.gap_s > 0).all()
    bursts = sum(len(set(times_s)) - 1 for times_s in recording.token_times_s.values())
    assert len(gaps.gap_s) == bursts


def test_the_written_acceptance_is_the_counted_one(tmp_path):
    recording = run_engine(speculating(), traffic())
    write_acceptance(tmp_path / "a.csv", [recording], NGRAM)
    counts = pd.read_csv(tmp_path / "a.csv")
    passes = [event.value for event in recording.events if event.kind == "pass"]
    assert counts["passes"].tolist() == [len(passes)] * 4
    for place, row in counts.iterrows():
        assert row["drafted"] == sum(num_drafts > place for _, num_drafts, _ in passes)
        assert row["accepted"] == sum(accepted > place for *_, accepted in passes)
    table = Table(path=tmp_path / "a.csv")
    table.check(NGRAM)
    simulated = replace(speculating(), acceptance=table)
    records = simulated.simulate(traffic(200))
    wanted = counts["accepted"].sum() / counts["drafted"].sum()
    sums = {name: records.iterations[name].sum() for name in ("accepted_tokens", "verified_tokens")}
    assert sums["accepted_tokens"] / sums["verified_tokens"] == pytest.approx(wanted, abs=0.05)


def test_the_free_simulation_accepts_the_share_of_each_request():
    recording = run_engine(speculating(), traffic(40))
    simulated = as_measured(speculating(), [recording])
    records = simulated.simulate(traffic(40))
    shares = {}
    for event in recording.events:
        if event.kind == "pass":
            _, num_drafts, accepted = event.value
            own = shares.setdefault(event.request_id, [0, 0])
            own[0] += accepted
            own[1] += num_drafts
    nothing = [request_id for request_id, (accepted, _) in shares.items() if not accepted]
    assert nothing
    requests = {event.request_id: event.value for event in recording.events if event.kind == "enter"}
    for request_id in nothing:
        verdicts = simulated.acceptance.verdicts(requests[request_id], 3, 50, NGRAM)
        assert not verdicts.accepted.any()
    sums = {name: records.iterations[name].sum() for name in ("accepted_tokens", "verified_tokens")}
    wanted = np.sum(list(shares.values()), axis=0)
    assert sums["accepted_tokens"] / sums["verified_tokens"] == pytest.approx(wanted[0] / wanted[1], abs=0.1)


def test_recorded_acceptances_belong_to_output_positions():
    recording = run_engine(speculating(), traffic())
    acceptance = RecordedAcceptance(recording)
    requests = {event.request_id: event.value for event in recording.events if event.kind == "enter"}
    for event in recording.events:
        if event.kind == "pass":
            position, num_drafts, accepted = event.value
            verdicts = acceptance.verdicts(requests[event.request_id], 0, 40, NGRAM)
            assert verdicts.accepted[position] == accepted
            assert verdicts.proposed[position] >= num_drafts


@pytest.mark.parametrize(
    ("file", "scenarios", "message"),
    [
        (
            "a.csv",
            2,
            "write_acceptance=a.csv: is for one run, and the suite has 2 cases; choose suite=single",
        ),
        ("a.csv", 0, "write_acceptance=a.csv: nothing is drafted; choose a speculation="),
        ("none/a.csv", 1, "write_acceptance=none/a.csv: its folder does not exist; create it first"),
    ],
)
def test_an_acceptance_that_cannot_be_written_is_refused(file, scenarios, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [speculating()] * scenarios or [scenario_of()]
    with pytest.raises(ValueError, match=message):
        check_written(file, given)


def test_nothing_drafted_is_no_acceptance(tmp_path):
    with pytest.raises(ValueError, match="no draft token was verified"):
        write_acceptance(tmp_path / "a.csv", [run_engine(scenario_of(), traffic())], NGRAM)
