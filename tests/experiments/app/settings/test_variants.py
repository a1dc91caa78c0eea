"""Configs that differ in a few keys equal those that are composed one by one."""

import pytest
from omegaconf import OmegaConf

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from experiments.app.settings.variants import Variants
from sim.settings.errors import ConfigError

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
BASE = ["workload=poisson", "engine.max_num_seqs=32"]


@pytest.fixture(scope="module")
def variants():
    """Returns the variants, which all tests share because none changes another."""
    return Variants(SOURCE, BASE)


@pytest.mark.parametrize(
    "overrides",
    [
        ["hardware=l40s", "engine=sglang", "engine.max_num_seqs=7", "batching.max_num_batched_tokens=512"],
        ["hardware=l40s", "engine=sglang", "tensor_parallel_size=2", "model.weights=fp8"],
        ["workload.lengths.prompt_tokens=null", "slo={_target_: sim.metrics.slo.Slo, ttft_ms: 3}"],
        ["++model.name=mine", "model.name=yours", "load=2"],
        ["failures=crash", "failures.events.0.at_s=5", "failures.events.0.replicas=[1,2]"],
        ["routing@decode_routing=power_of_two", "slo=none", "seed=3"],
        ["pools=two_gpus", "prediction=oracle", "workload.num_requests=7", "engine.max_num_seqs=5", "seed=7"],
        ["slo={ttft_ms: 7}", "slo.ttft_ms=9"],
        [],
    ],
)
def test_a_variant_is_what_is_composed(variants, overrides):
    whole = composed(SOURCE, [*BASE, *overrides])
    assert variants.config(overrides) == OmegaConf.to_container(whole)


@pytest.mark.parametrize(
    "override",
    [
        "hardware=l40x",
        "model.weight=fp8",
        "load=[",
        "decode_routing=random",
        "load=1,2",
        "~seed",
        "workload.lengths.prompt_tokens=100",
    ],
)
def test_mistakes_are_reported_as_by_composing(override):
    with pytest.raises(ConfigError) as composing:
        composed(SOURCE, [*BASE, override])
    with pytest.raises(ConfigError) as varying:
        Variants(SOURCE, BASE).config([override])
    assert str(varying.value) == str(composing.value)
