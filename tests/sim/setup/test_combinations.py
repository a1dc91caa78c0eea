"""The table of combinations: its rules name its features, and a run with both of a rule is refused."""

import re

import pytest

from experiments.app.settings.compose import resolved
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario
from sim.setup.combinations import FEATURES, OF_RUN, OF_RUN_AND_POOL, RULES, remedies
from tests.worlds.fuzz.drawing import VARIANTS

PLAIN = ("workload=poisson", "replicas=4", "workload.num_requests=5")
OTHERWISE = {
    "failures": "failures=crash",
    "recovered_kv": "recovery=kv",
    "recovered": "recovery=tokens",
    "no_slo": "slo=none",
}
"""Features whose example is no override of a plain run -> one that is."""


def build(*overrides):
    return build_scenario(resolved(VARIANTS.config([*PLAIN, *overrides])))


def override(name):
    return OTHERWISE.get(name, FEATURES[name].example)


def test_every_rule_has_two_features_and_every_feature_a_rule():
    used = {name for rule in RULES for name in (rule.one, rule.other)}
    assert used == set(FEATURES)
    assert len({(rule.one, rule.other) for rule in RULES}) == len(RULES)


ALONE = [
    rule
    for rule in (*OF_RUN, *OF_RUN_AND_POOL)
    if {rule.one, rule.other}
    <= {
        "shards", "thin", "migration", "scaling", "admission", "encoders", "stop_missed", "no_slo", "warmup",
        "cooldown", "stop_overloaded", "failures", "recovered_kv", "speculation", "static_batches",
        "no_block_by_block", "retries", "routing_by_replicas",
    }
]  # fmt: skip


@pytest.mark.parametrize("rule", ALONE, ids=lambda rule: f"{rule.one}-{rule.other}")
def test_a_run_with_both_features_of_a_rule_is_refused_with_the_reason(rule):
    other = rule.other
    needs_replicas = ["routing=round_robin"] if other != "routing_by_replicas" else []
    with pytest.raises(ConfigError, match=re.escape(f": {rule.reason}; ")) as refusal:
        build(*needs_replicas, override(rule.one), override(other))
    advice = list(remedies(str(refusal.value)))
    assert FEATURES[other].without in advice
    assert FEATURES[rule.one].without in advice


def test_a_refusal_names_both_settings_and_what_to_set_instead():
    with pytest.raises(ConfigError) as refusal:
        build("sim.shards=2", "admission=queue_bound")
    assert str(refusal.value) == (
        "sim.shards=2, admission=queue_bound: it admits by the load of all replicas; choose admission=none, "
        "or set sim.shards=null"
    )


def test_the_setting_of_a_pool_is_named_with_its_pool():
    with pytest.raises(ConfigError, match=r"^sim.shards=2, pools.\w+.role=prefill: KV goes from replica to"):
        build_scenario(resolved(VARIANTS.config(["pools=disaggregated", "sim.shards=2"])))


def test_a_plain_run_is_built():
    assert build().num_replicas == 4
