"""Iterations of ranks of data-parallel attention: they wait for the slowest, and share the experts' work."""

from __future__ import annotations

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from hwmodels.iterations import Gathered, IterationShape
from hwmodels.iterations.layout import ParallelLayout
from policies.batching import DataParallel
from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request
from policies.scheduling.fcfs import Fcfs
from sim import simulate
from sim.engine.iteration_times import seconds_of, shape_of, shapes_of_ranks
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario
from tests.tables import assert_equal_tables

MOE = (
    "model=deepseek_v2_lite", "hardware=h100_sxm", "attention_data_parallel_size=4", "expert_parallel_size=4",
    "workload=poisson",
)  # fmt: skip
TRAFFIC = ("workload.num_requests=30", "workload.arrivals.rate_per_s=30")
SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])


def plan_of(*prompts, size=2, budget=200):
    """Returns the first plan of ranks to which these prompts go in turn."""
    core = EngineCore(
        batching=Chunked(max_num_batched_tokens=budget * size),
        scheduling=Fcfs(),
        block_pool=Paged(block_size=16).pool(KvMemory(400)),
        max_num_seqs=16,
        max_model_len=1000,
        data_parallel=DataParallel(size=size, load_balance_method="round_robin"),
    )
    for request_id, num_tokens in enumerate(prompts):
        core.add(Request(request_id, 0.0, Prompt(num_tokens), 50), 50)
    return core, core.plan(0.0)


def test_a_prompt_in_one_rank_is_whole_there_and_alone_in_the_experts():
    _, plan = plan_of(100)
    (fullest,) = shapes_of_ranks(plan, shape_of(plan, 0), 0)
    assert fullest == IterationShape(0, 0, 2, 200, 2 * 5050, 200, 2, None, None, Gathered(0, 1, 100))
    layout = ParallelLayout(attention_data_parallel_size=2, expert_parallel_size=2)
    batch = layout.rank_batch(fullest)
    assert (batch.tokens, batch.all_tokens, batch.prefill_seqs, batch.prefill_pairs) == (100, 100, 1, 5050)
    padded = ParallelLayout(attention_data_parallel_size=2, attention_data_parallel_padding=True)
    assert padded.rank_batch(fullest).all_tokens == 200


def test_ranks_with_unequal_work_are_priced_one_by_one():
    """Rank 0 has two prompts of 60 tokens, rank 1 has one of 100: either may be the slowest."""
    core, plan = plan_of(60, 100, 60)
    shapes = shapes_of_ranks(plan, shape_of(plan, 0), 0)
    assert [(shape.prefill_seqs, shape.prefill_tokens) for shape in shapes] == [(4, 240), (2, 200)]
    assert {shape.gathered for shape in shapes} == {Gathered(0, 3, 220)}
    core.commit(plan, StepOutcome(), 1.0)
    plan = core.plan(1.0)
    # They decode with contexts of 61 + 61 and of 101 tokens: rank 0 has more of everything.
    (fullest,) = shapes_of_ranks(plan, shape_of(plan, 0), 0)
    assert fullest[:2] == (4, 2 * 122)
    later = shapes_of_ranks(plan, shape_of(plan, 3), 3)[0]
    assert later.decode_context_tokens == 2 * (122 + 3 * 2)


def test_the_slowest_rank_decides_and_equal_ranks_cost_what_a_mean_does():
    model = build_scenario(SOURCE.compose(list(MOE))).iteration_model()

    def seconds(*prompts, by_rank=True):
        _, plan = plan_of(*prompts, size=4, budget=4096)
        return seconds_of(model, plan, shape_of(plan, 0), 0, by_rank)

    assert seconds(800, 800, 800, 800) == pytest.approx(seconds(800, 800, 800, 800, by_rank=False), rel=1e-12)
    crowded = seconds(800, 16, 16, 16, 800)  # the fifth is in the rank of the first
    assert crowded > 1.2 * seconds(800, 800, 16, 16, 16)
    assert crowded > seconds(800, 16, 16, 16, 800, by_rank=False)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("engine=sglang",),
        ("engine.num_kv_blocks=600",),
        ("speculation=ngram",),
        ("pipeline_parallel_size=2",),
        ("latency/jitter=vllm",),
        ("attention_data_parallel_padding=true", "caching=paged"),
    ],
    ids=str,
)
def test_a_leap_is_many_steps(overrides):
    frames = [simulate(*MOE, *TRAFFIC, *overrides, f"sim.leap={leap}").requests for leap in ("true", "false")]
    assert_equal_tables(*frames)


def test_more_prompts_than_ranks_take_more_iterations():
    """Eight prompts at once in four ranks with 1,000 tokens each: four in each of two iterations."""
    run = simulate(
        *MOE, "workload=offline_batch", "workload.num_requests=8", "workload/lengths=fixed",
        "workload.lengths.prompt_tokens.value=1000", "workload.lengths.output_tokens.value=1",
        "engine.max_num_batched_tokens=4000", "engine.max_num_seqs=64", "engine.frontend=null",
        "engine.host.overlapped=false",
    )  # fmt: skip
    assert list(run.iterations["prefill_tokens"]) == [4000, 4000]
    assert list(run.iterations["prefill_seqs"]) == [4, 4]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("engine.max_num_seqs=3",), r"engine\.max_num_seqs=3: must be >= 4, one for each rank"),
        (
            ("batching.max_num_batched_tokens=3",),
            r"batching\.max_num_batched_tokens=3: must be >= 4, one",
        ),
        (("engine.num_kv_blocks=3",), r"engine\.num_kv_blocks=3: must be >= 4, one for each rank"),
        (("engine.load_balance_method=fair",), r"load_balance_method=fair: must be one of total_requests"),
    ],
)
def test_ranks_without_a_share_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        simulate(*MOE, *TRAFFIC, *overrides)
