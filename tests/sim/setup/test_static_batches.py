"""Runs with static batches that end as a whole: finish times, first tokens, and tight memory."""

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
BASE = (
    "model=smollm2_135m",
    "workload=offline_batch",
    "workload/lengths=uniform",
    "workload.num_requests=40",
    "workload.lengths.prompt_tokens.low=10",
    "workload.lengths.prompt_tokens.high=100",
    "workload.lengths.output_tokens.low=1",
    "workload.lengths.output_tokens.high=60",
    "engine.max_model_len=200",
    "batching=static",
    "batching.batch_size=8",
    "engine.frontend=null",
    "slo=none",
)


def build(*overrides):
    return build_run(SOURCE.compose([*BASE, *overrides]))


def run(*overrides):
    scenario, source = build(*overrides)
    return scenario.run(source).in_pandas()


def test_a_batch_finishes_at_one_time_with_its_first_tokens_where_they_were():
    """40 requests in batches of 8, some with one output token: five times at which requests finish."""
    whole, single = (
        run("engine=vllm_sync", *BASE, f"batching.until_last={held}") for held in ("true", "false")
    )
    assert whole.requests["finished_s"].nunique() == 5 < single.requests["finished_s"].nunique()
    assert (whole.requests["first_token_s"] == single.requests["first_token_s"]).all()
    assert whole.summary["e2e"]["mean_s"] > single.summary["e2e"]["mean_s"]
    assert whole.summary["kv"]["mean_use_share"] > single.summary["kv"]["mean_use_share"]
    assert whole.requests["finished_s"].max() == single.requests["finished_s"].max()


@pytest.mark.parametrize("num_blocks", [14, 20, 40])
@pytest.mark.parametrize("engine", ["vllm engine.host.overlapped=false", "vllm_sync"])
def test_every_request_finishes_however_little_memory_there_is(num_blocks, engine):
    tight = ("batching.until_last=true", f"engine.num_kv_blocks={num_blocks}", "caching=paged")
    results = [
        run(*f"engine={engine}".split(), *BASE, *tight, f"sim.leap={leap}") for leap in ("true", "false")
    ]
    assert results[0].summary["preemptions"] > 0
    assert results[0].summary["requests"]["finished"] == 40
    assert (results[0].requests["finished_s"] == results[1].requests["finished_s"]).all()


def test_batches_that_end_as_a_whole_are_not_scheduled_asynchronously():
    with pytest.raises(
        ConfigError,
        match=r"until_last=true, engine\.host\.overlapped=true: .*set engine\.host\.overlapped=false",
    ):
        build("batching.until_last=true")


def test_batches_that_end_as_a_whole_do_not_speculate():
    with pytest.raises(
        ConfigError, match=r"batching\.until_last=true, speculation=ngram: .*until_last=false"
    ):
        build(
            "batching.until_last=true",
            "engine.host.overlapped=false",
            "speculation=ngram",
            "acceptance=iid",
            "acceptance.rate=0.5",
        )
