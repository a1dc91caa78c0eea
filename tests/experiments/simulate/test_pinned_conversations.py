"""Conversations with pinned system prompts: leaping equals stepping, and cached prompts are on the bill."""

from dataclasses import replace

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.cluster.settings import SimSettings
from sim.settings.scenario import build_run

SETTINGS = (
    "workload=conversation",
    "workload.num_conversations=12",
    "workload.pins_system_prompt=true",
    "caching=prefix_pinned",
    "caching.pin_s=20",
    "engine.num_kv_blocks=900",
    "tariff=cached_prompts",
    "tariff.usd_per_million_token_hours=4.5",
)


def test_leap_equals_step_with_pins_that_expire():
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(list(SETTINGS))
    scenario, source = build_run(cfg)
    leapt = scenario.run(source).in_pandas()
    stepped = replace(scenario, sim=SimSettings(leap=False)).run().in_pandas()
    assert leapt.requests.equals(stepped.requests)
    assert leapt.records.iterations.equals(stepped.records.iterations)
    assert leapt.records.pinned_token_s == stepped.records.pinned_token_s > 0
    assert leapt.summary["bill_usd"] > 0
    assert leapt.records.requests["cached_tokens"].sum() > 0
