"""One executor serves engines of several sizes, but none with other settings."""

import pytest

torch = pytest.importorskip("torch")

from dataclasses import replace  # noqa: E402

import experiments.validate.engine.executor_cache as executor_cache  # noqa: E402
from experiments.app.settings.compose import ConfigSource  # noqa: E402
from experiments.app.settings.config_groups import CONFIG_DIR  # noqa: E402
from experiments.validate.engine.engine_run import run_on_engine, settings_of, with_memory_of  # noqa: E402
from experiments.validate.engine.executor_cache import ExecutorCache  # noqa: E402
from experiments.validate.engine.replay import replay  # noqa: E402
from policies.batching.chunked import Chunked  # noqa: E402
from policies.batching.whole_prompts import Orca  # noqa: E402
from policies.caching.paged import Paged  # noqa: E402
from policies.scheduling.fcfs import Fcfs  # noqa: E402
from realengine.model.architecture import Architecture  # noqa: E402
from realengine.runner.memory import GIB  # noqa: E402
from realengine.serving.model import Model  # noqa: E402
from tests.experiments.validate.engine.engine_runs import scenario_of, traffic  # noqa: E402
from tests.realengine.small_models import LLAMA  # noqa: E402

ARCHITECTURE = Architecture.from_hf(LLAMA)
CONFIG = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose_plain([])  # what is recorded of it


class Traffic:
    """A workload of one source."""

    def source(self, *, seed, max_model_len):
        return traffic(20, gap_s=0.0)  # all at once: whatever the clock says, the same is decided


@pytest.fixture
def executors():
    return ExecutorCache.of("cpu")


@pytest.fixture
def builds(monkeypatch):
    """Returns a list that grows by the settings of each engine that is built."""
    found = []
    build = executor_cache.build_executor

    def watched(model, settings, *rest):
        found.append(settings)
        return build(model, settings, *rest)

    monkeypatch.setattr(executor_cache, "build_executor", watched)
    return found


def executor_of(executors, scenario, **changes):
    settings = replace(settings_of(scenario, executors.device), **changes)
    return executors.executor(Model.of(ARCHITECTURE), settings)


@pytest.mark.sampled(fast=2, slow=6)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_blocks": 20},
        {"max_num_seqs": 3},
        {"batching": Chunked(max_num_batched_tokens=16)},
        {"batching": Chunked(max_num_batched_tokens=128)},  # a whole prompt
        {"batching": Orca()},  # which has no limit
        {"caching": Paged()},
        {"swap_space_gib": 1.0},
        {"gpu_memory_utilization": 0.5},  # says nothing where blocks are given
    ],
    ids=lambda changes: "-".join(f"{key}-{value}"[:40] for key, value in changes.items()),
)
def test_an_engine_that_wants_less_gets_a_part_of_the_same_executor(executors, builds, changes):
    scenario = scenario_of(batching=Chunked(max_num_batched_tokens=64))
    first, memory = executor_of(executors, scenario)
    second, part = executor_of(executors, scenario, **changes)
    assert second is first
    assert len(builds) == 1
    assert builds[0].max_num_batched_tokens == 128  # room for a whole prompt
    assert memory.num_blocks == 200
    assert part.num_blocks == changes.get("num_kv_blocks", 200)
    assert part.num_swap_blocks == int(changes.get("swap_space_gib", 4.0) * GIB / memory.block_bytes)


@pytest.mark.sampled(fast=2, slow=6)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_blocks": 201},
        {"num_kv_blocks": None},
        {"max_num_seqs": 9},
        {"max_model_len": 64},
        {"batching": Chunked(max_num_batched_tokens=129)},
        {"caching": Paged(block_size=4)},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
    ],
    ids=lambda changes: "-".join(f"{key}-{value}"[:40] for key, value in changes.items()),
)
def test_what_an_executor_has_not_is_built(executors, builds, changes):
    scenario = scenario_of(batching=Chunked(max_num_batched_tokens=64))
    executor_of(executors, scenario)
    executor_of(executors, scenario, **changes)
    assert len(builds) == 2


def test_all_blocks_that_fit_are_found_again_by_their_number(executors, builds):
    scenario = scenario_of()
    scenario = replace(scenario, engine=replace(scenario.engine, num_kv_blocks=None))
    known = with_memory_of(scenario, ARCHITECTURE, executors)
    assert known.engine.num_kv_blocks > 200
    executor_of(executors, known)
    with_memory_of(scenario, ARCHITECTURE, executors)
    assert len(builds) == 1


def test_a_part_decides_and_answers_as_an_engine_of_its_size(executors, builds):
    """After an engine that has used all slots; few blocks, so that KV is swapped out."""
    swap = {"caching": Paged(), "scheduling": Fcfs(preemption_mode="swap")}
    large = scenario_of(workload=Traffic(), **swap)
    small = scenario_of(workload=Traffic(), num_kv_blocks=8, **swap)
    small = replace(small, engine=replace(small.engine, max_num_seqs=5))
    run_on_engine(large, ARCHITECTURE, executors, CONFIG)
    part = run_on_engine(small, ARCHITECTURE, executors, CONFIG)
    assert len(builds) == 1
    assert part.engine["num_kv_blocks"] == 8
    assert part.steps["running"].max() <= 5
    assert part.steps["preempted"].sum() > 0
    assert replay(part, small.core(8)).num_equal == len(part.steps)


def test_the_padding_row_is_cleared_after_another_engine_used_it(executors):
    scenario = scenario_of(workload=Traffic())
    run_on_engine(scenario, ARCHITECTURE, executors, CONFIG)
    executor, _ = executor_of(executors, scenario)
    assert executor._tables_SM[3].any()
    executor_of(executors, scenario, max_num_seqs=3)
    assert not executor._tables_SM[3].any()


def test_all_engines_have_the_attention_that_was_asked_for(builds):
    executors = ExecutorCache.of("cpu", attention_backend="torch_sdpa")
    executor_of(executors, scenario_of(batching=Chunked(max_num_batched_tokens=64)))
    assert [settings.attention_backend for settings in builds] == ["torch_sdpa"]


@pytest.mark.parametrize(("name", "message"), [("fa4", "must be one of"), ("flashinfer", "needs a GPU")])
def test_an_attention_that_does_not_exist_here_is_refused_before_anything_is_built(name, message):
    with pytest.raises(ValueError, match=f"attention_backend={name}: {message}"):
        ExecutorCache.of("cpu", attention_backend=name)
