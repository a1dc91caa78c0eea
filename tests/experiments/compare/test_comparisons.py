"""The shipped comparisons as a set: well-known results are among them, with sources and expectations."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from sim.settings.config_groups import CONFIG_DIR

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
