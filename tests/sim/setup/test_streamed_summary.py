"""The summary of a run that streams has every key of that of the whole tables, for all shipped workloads."""

import json
from pathlib import Path

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.cluster import simulation
from sim.records.table import joined
from sim.settings.scenario import build_run
from sim.setup.streaming import stream
from tests.sim.metrics.test_run_figures import compare
from tests.sim.workload.test_configs import GENERATED, TRACES
from tests.tables import assert_equal_tables

SOURCE = ConfigSource(config_name="scenario", dirs=(CONFIG_DIR,))
GROUP_ROWS = 64
SHORT = {
    "agentic": ["workload.num_tasks=60"],
    "multi_tenant_day": ["sim.until_s=400"],
    "lora": ["adapters=fixed_slots", "workload.of.num_requests=300"],
    "rag": ["sim.until_s=60"],
}
MORE = {
    "classes": ["workload=servegen_like", "workload.duration_s=120"],
    "clients of a conversation": [
        *("workload=clients", "workload@workload.of=conversation", "workload.of.num_conversations=60"),
        *("workload.hidden_share._target_=sim.workload.distributions.Quantiles", "replicas=2"),
        *("+workload.hidden_share.probabilities=[0,1]", "+workload.hidden_share.values=[0.1,0.9]"),
        *("~workload.hidden_share.value", "workload.of.arrivals.rate_per_s=2"),
    ],
    "clients of answers at once": ["workload=clients", "workload.streams=false", "workload.moderation_s=0.1"],
    "clients with several samples": ["workload=clients", "workload.of.branching.width=2"],
    "clients with speculation": ["workload=reasoning", "speculation=eagle3", "model=llama3_1_8b"],
    "clients and crashes": [
        *("workload=clients", "replicas=3", "failures=crash", "failures.events.0.at_s=5"),
        "workload.of.arrivals.rate_per_s=20",
    ],
    "contiguous KV": [
        "workload=poisson",
        "caching=contiguous",
        "workload.arrivals.rate_per_s=30",
        "replicas=2",
    ],
    "contiguous KV, crashes": [
        *("workload=poisson", "caching=contiguous", "workload.arrivals.rate_per_s=20"),
        *("replicas=2", "failures=crash", "failures.events.0.at_s=5"),
    ],
    "disaggregated": ["workload=poisson", "pools=disaggregated"],
    "retries": ["workload=poisson", "retries.timeout_s=2", "retries.max_attempts=2", "replicas=2"],
    "speculation": ["workload=poisson", "speculation=eagle3", "model=llama3_1_8b"],
    "thinned": [
        *("workload=poisson", "replicas=32", "workload.arrivals.rate_per_s=64", "sim.thin=2"),
        "routing=round_robin",
    ],
    "tasks and clients in a mix": [
        *("workload=multi_tenant_day", "+workload@workload.parts.tasks=agentic", "sim.until_s=300"),
        "+workload@workload.parts.people=reasoning",
    ],
    "warm-up": ["workload=reasoning", "metrics.warmup_s=50"],
}


MIX_OF_BOTH = [
    *("workload=multi_tenant_day", "+workload@workload.parts.tasks=agentic", "sim.until_s=100"),
    *(
        "+workload@workload.parts.people=reasoning",
        "workload.parts.tasks.calls.mean=2",
        "workload.parts.tasks.tool_s.mean=0.3",
        "workload.parts.tasks.arrivals.rate_per_s=0.1",
    ),
]
SLO_OF_WORKLOAD = {
    "tasks": ["workload=agentic", "workload.num_tasks=120", "slo=tasks", "slo.task_ms=30000"],
    "tasks that are cut": [
        *("workload=agentic", "workload.num_tasks=80", "slo=tasks", "slo.task_ms=60000", "slo.e2e_ms=5000"),
        *("engine.max_model_len=12000", "workload.patience_s=4", "workload.sub_agent_share=0.5"),
    ],
    "tasks and crashes": [
        *("workload=agentic", "workload.num_tasks=120", "slo=tasks", "slo.task_ms=30000", "replicas=2"),
        *("failures=crash", "failures.events.0.at_s=5"),
    ],
    "tasks that do not end": ["workload=agentic", "workload.num_tasks=100", "slo=tasks", "sim.until_s=400"],
    "publication": ["workload=reasoning", "workload.of.num_requests=300", "slo.publish_ms=4000"],
    "publication in conversations": [*MORE["clients of a conversation"], "slo.publish_ms=2000"],
    "publication at once": [
        *(*MORE["clients of answers at once"], "workload.of.num_requests=300", "slo.publish_ms=3000"),
    ],
    "publication with speculation": [
        *MORE["clients with speculation"],
        *("workload.of.num_requests=300", "slo.publish_ms=2000"),
    ],
    "publication, crashes, warm-up": [
        *(*MORE["clients and crashes"], "workload.of.num_requests=300"),
        *("slo.publish_ms=60", "metrics.warmup_s=5", "engine.frontend=null"),
    ],
    "tasks and publication in a mix": [*MIX_OF_BOTH, "slo=tasks", "slo.publish_ms=5000"],
    "a limit that only some parts have": [*MIX_OF_BOTH, "slo.publish_ms=5000"],
}


class NoTables:
    def __init__(self):
        self.num_chunks = 0

    def add(self, chunk):
        self.num_chunks += 1

    def finish(self, end, sums):
        pass


class Rows(NoTables):
    """Keeps the rows of requests with their latencies."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def add(self, chunk):
        super().add(chunk)
        self.rows.append(chunk.requests)


def summaries(overrides, monkeypatch):
    """Returns the summaries of the whole tables and of a run that streams, and its number of chunks."""
    monkeypatch.setattr(simulation, "EVENTS_BETWEEN_REPORTS", 64)
    scenario, traffic = build_run(SOURCE.compose(overrides))
    whole = scenario.run(traffic).summary
    tables = NoTables()
    run = stream(scenario, scenario.source(), tables, group_rows=GROUP_ROWS)
    return whole, run.summary, tables.num_chunks


def short(name):
    """Returns settings by which a workload takes little time."""
    if name in SHORT:
        return SHORT[name]
    text = (Path(CONFIG_DIR) / "workload" / f"{name}.yaml").read_text()
    for key in ("num_requests", "num_conversations", "num_sessions"):
        if f"\n{key}:" in text:
            return [f"workload.{key}=300"]
    return ["sim.until_s=120"]


def without_intervals(summary):
    """Returns a summary without the intervals of a thinned fleet, which come from groups of requests."""
    text = json.dumps(summary.get("thinned", {}))
    bounds = {"low": None, "high": None}
    own = json.loads(text, object_hook=lambda found: found | (bounds if "low" in found else {}))
    return {**summary, "thinned": own}


def check(overrides, monkeypatch):
    whole, streamed, num_chunks = summaries(overrides, monkeypatch)
    assert streamed["not_computed"] == {}
    assert list(compare(without_intervals(whole), without_intervals(streamed))) == []
    assert whole["intervals"].keys() == streamed["intervals"].keys()
    return streamed, num_chunks


@pytest.mark.parametrize("name", GENERATED)
def test_every_generated_workload(name, monkeypatch):
    streamed, num_chunks = check([f"workload={name}", *short(name)], monkeypatch)
    assert streamed["requests"]["arrived"] >= 20
    assert num_chunks > 1 or streamed["requests"]["arrived"] < 2 * GROUP_ROWS


@pytest.mark.parametrize("name", sorted(TRACES))
def test_every_trace(name, tmp_path, monkeypatch):
    (tmp_path / "trace").write_text(TRACES[name])
    check([f"workload={name}", f"workload.path={tmp_path / 'trace'}"], monkeypatch)


SLOW = {"tasks and clients in a mix", "clients with several samples", "classes", "clients with speculation"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in MORE]
)
def test_other_features(name, monkeypatch):
    overrides = MORE[name]
    if "workload=poisson" in overrides:
        overrides = [*overrides, "workload.num_requests=400"]
    if any(one in overrides for one in ("workload=reasoning", "workload=clients")) and not any(
        one.startswith("workload@") for one in overrides
    ):
        overrides = [*overrides, "workload.of.num_requests=300"]
    streamed, num_chunks = check(overrides, monkeypatch)
    assert num_chunks > 1
    if "caching=contiguous" in overrides:
        assert streamed["kv"]["reserved_share"] > 0
        assert streamed["kv"]["internal_share"] > 0


SLOW_SLO = {"publication with speculation"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_SLO else []) for name in SLO_OF_WORKLOAD],
)
def test_latencies_of_the_workload_are_those_of_whole_tables(name, monkeypatch):
    monkeypatch.setattr(simulation, "EVENTS_BETWEEN_REPORTS", 64)
    scenario, traffic = build_run(SOURCE.compose(SLO_OF_WORKLOAD[name]))
    result = scenario.run(traffic)
    tables = Rows()
    summary = stream(scenario, scenario.source(), tables, group_rows=GROUP_ROWS).summary
    assert list(compare(result.summary, summary)) == []
    assert 0.05 < summary["goodput"]["share"] < 0.995
    assert tables.num_chunks > 1
    assert_equal_tables(joined(tables.rows), result.requests, check_exact=True)
    firsts = [rows["request_id"][0] for rows in tables.rows if len(rows)]
    assert len(firsts) > 1
    assert all(first % GROUP_ROWS == 0 for first in firsts)
