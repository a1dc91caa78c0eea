"""The shipped comparisons as a set: well-known results are among them, with sources and expectations."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_run

SHIPPED = {path.stem: OmegaConf.load(path) for path in sorted((CONFIG_DIR / "experiment").glob("*.yaml"))}


def test_the_comparisons_that_the_field_knows_are_shipped():
    assert {
        "static_vs_continuous",
        "orca_vllm_sarathi_fastgen",
        "fcfs_mlfq_s3_sjf",
        "contiguous_vs_paged",
        "prefix_caches_on_mooncake",
        "gqa_mqa_mla",
        "online_batch_mixing",
        "radix_lpm",
        "tiers",
        "kv_eviction",
        "kv_sharing",
        "expert_balance",
        "crash_recovery",
        "rag_prefix_sharing",
        "agent_tasks",
        "model_turns",
        "live_migration",
    } <= SHIPPED.keys()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_comparison_names_its_source_and_expects_what_its_claim_says(name):
    experiment = SHIPPED[name]
    assert experiment.claim
    assert experiment.source
    assert len(experiment.seeds) >= 5
    expected = {expectation.metric for expectation in experiment.expect}
    assert expected
    assert expected <= {metric.key for metric in experiment.metrics}


def test_the_bound_is_compared_to_every_order_of_eviction():
    arms = SHIPPED["prefix_caches_on_mooncake"].arms
    orders = {
        str(setting).partition("=")[2] for own in arms.values() for setting in own if "eviction" in setting
    }
    assert orders == {"lfu", "fifo", "size_aware", "two_q", "s3_fifo", "belady"}
    assert "caching.eviction=lru" not in arms.radix_lru, "it is the default"


def happened(name: str, arm: str, *more: str) -> dict:
    """Returns the summary of an arm of a shipped comparison, with seed 0 and its whole traffic."""
    experiment = SHIPPED[name]
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    scenario, traffic = build_run(source.compose([*experiment.base, *experiment.arms[arm], *more, "seed=0"]))
    return scenario.run(traffic).summary


EVENTS = [
    ("fcfs_mlfq_s3_sjf", "mlfq", "preemption.recompute"),
    ("fcfs_mlfq_s3_sjf", "mlfq_swaps", "preemption.swap"),
    ("fcfs_mlfq_s3_sjf", "mlfq_swaps", "preemption.swapped_in_tokens"),
    ("fcfs_mlfq_s3_sjf", "srpt_noisy", "preemption.recompute"),
    ("online_batch_mixing", "online_batch", "preemptions"),
    ("contiguous_vs_paged", "paged", "preemptions"),
    ("crash_recovery", "scratch", "troubles.crashes"),
    ("crash_recovery", "scratch", "troubles.lost_tokens"),
    ("crash_recovery", "tokens", "troubles.resumed"),
    ("crash_recovery", "kv", "troubles.restored_tokens"),
    ("rag_prefix_sharing", "prefix_round_robin", "cache.hit_share"),
    ("agent_tasks", "fcfs", "waiting.by_cause_s.slot"),
    ("agent_tasks", "progress", "by_priority.-9.requests.finished"),
    ("model_turns", "turns_level_1", "waiting.by_cause_s.gateway"),
    pytest.param("live_migration", "freest", "preemptions", marks=pytest.mark.slow),
    pytest.param("live_migration", "llumnix", "migrations.count", marks=pytest.mark.slow),
    pytest.param("retry_storm", "immediate", "retries.retries", marks=pytest.mark.slow),
    pytest.param("retry_storm", "budget_and_bound", "requests.rejected", marks=pytest.mark.slow),
    pytest.param("autoscaling_day", "utilisation", "scaling.starts", marks=pytest.mark.slow),
    pytest.param("autoscaling_day", "concurrency", "scaling.drains", marks=pytest.mark.slow),
    pytest.param("autoscaling_day", "scheduled", "scaling.starts", marks=pytest.mark.slow),
    pytest.param("autoscaling_day", "predictive", "scaling.drains", marks=pytest.mark.slow),
]
"""Events without which a comparison would show nothing: comparison, arm, count in the summary."""


@pytest.mark.sampled(fast=7, slow=4)
@pytest.mark.parametrize(("name", "arm", "count"), EVENTS)
def test_what_a_comparison_is_about_happens_in_it(name, arm, count):
    figure = happened(name, arm)
    for key in count.split("."):
        figure = figure[key]
    assert figure > 0


@pytest.mark.parametrize("arm", ["rate_limit", "outstanding", "queued_tokens", "deadline"])
def test_admission_control_refuses_requests_above_capacity(arm):
    counts = happened("admission_overload", arm, "workload.arrivals.rate_per_s=44")["requests"]
    assert counts["rejected"] > 100
