"""Caches chosen on the command line: what a run reports about them, and refused settings."""

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = ("model=smollm2_135m", "workload=poisson", "workload.num_requests=20", "engine.num_kv_blocks=400")


def build(*overrides):
    return build_run(SOURCE.compose([*SMALL, *overrides]))


def run(*overrides):
    scenario, source = build(*overrides)
    return scenario.run(source).summary


@pytest.mark.parametrize("caching", ["streaming_llm", "h2o", "snapkv", "fastgen"])
def test_a_cache_that_changes_answers_says_so(caching):
    notes = run(f"caching={caching}")["notes"]
    assert any("outputs change" in note for note in notes)


@pytest.mark.parametrize("caching", ["paged", "contiguous", "contiguous_pow2", "buddy"])
def test_other_caches_do_not(caching):
    summary = run(f"caching={caching}", "engine.max_model_len=2048")
    assert summary["requests"]["finished"] == 20
    assert not any("outputs change" in note for note in summary["notes"])
    shares = [summary["kv"][f"{use}_share"] for use in ("filled", "reserved", "internal", "external", "free")]
    assert sum(shares) == pytest.approx(1)


def test_a_predicted_reservation_needs_a_prediction():
    with pytest.raises(
        ConfigError, match=r"caching\.reserve=predicted, prediction=none: .*prediction=histogram"
    ):
        build("caching=contiguous", "caching.reserve=predicted")
    assert (
        run("caching=contiguous", "caching.reserve=predicted", "prediction=oracle")["kv"]["wasted_share"] > 0
    )


def test_a_short_window_holds_less_and_reads_less():
    """Prompts of 512, answers of 256: with 128 tokens kept, decodes read a fifth to a sixth."""
    window = run("caching=streaming_llm", "caching.num_recent_tokens=124")
    whole = run("caching=paged")
    assert window["kv"]["mean_use_share"] < 0.5 * whole["kv"]["mean_use_share"]
    assert window["mbu"] < whole["mbu"]


def test_reading_attention_weights_costs_time():
    """The same tokens are kept: heavy hitters pay for their weights in every step, the window does not."""
    window = run("caching=streaming_llm", "caching.num_sink_tokens=64", "caching.num_recent_tokens=64")
    heavy = run("caching=h2o", "caching.num_heavy_tokens=64", "caching.num_recent_tokens=64")
    compressed = run("caching=snapkv", "caching.num_kept_tokens=128")
    assert heavy["tpot"]["mean_s"] > 1.02 * window["tpot"]["mean_s"]
    assert heavy["ttft"]["mean_s"] > window["ttft"]["mean_s"]
    assert compressed["tpot"]["mean_s"] < heavy["tpot"]["mean_s"]


def test_a_pipeline_cannot_read_weights():
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2: a cache that reads attention weights"):
        run("caching=h2o", "pipeline_parallel_size=2")
