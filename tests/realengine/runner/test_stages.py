"""Pipeline stages: tokens are those of one rank, plans those of the simulator."""

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.core.engine import EngineCore
from policies.scheduling.fcfs import Fcfs
from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.settings import EngineSettings
from realengine.weights.load import load_weights
from realengine.weights.table import expected, of_stage
from tests.realengine.adapters import random_adapter
from tests.realengine.simulated import Noted, simulated_digests, unlike_prompts
from tests.realengine.small_models import CONFIGS, GREEDY, counted_loads, prompts, tokens_of

pytestmark = pytest.mark.xdist_group("stages")  # its tests share two processes

THREE_LAYERS = CONFIGS["even"] | {"num_hidden_layers": 3}
ARCHITECTURE = Architecture.from_hf(THREE_LAYERS)
SETTINGS = {"num_kv_blocks": 40, "max_num_seqs": 6, "seed": 1, "device": "cpu"}
UNEVEN = {"pipeline_parallel_size": 2, "pp_layer_partition": [2, 1]}


def caching():
    return PrefixCaching(block_size=4)


def batching():
    return Chunked(max_num_batched_tokens=24)


def engine(config=THREE_LAYERS, **settings):
    given = SETTINGS | {"caching": caching(), "batching": batching()} | settings
    return LLM(Architecture.from_hf(config), **given)


@pytest.fixture(scope="module")
def one():
    return engine()


@pytest.fixture(scope="module")
def stages():
    return engine(**UNEVEN)


def core():
    return EngineCore(
        batching=batching(),
        scheduling=Fcfs(),
        block_pool=caching().pool(KvMemory(SETTINGS["num_kv_blocks"])),
        max_num_seqs=SETTINGS["max_num_seqs"],
        max_model_len=THREE_LAYERS["max_position_embeddings"],
        max_batches=2,
    )


def test_adapters_and_swapped_sequences_come_back_while_steps_are_in_flight():
    """KV for few sequences, which is kept in host memory; one slot for two adapters."""
    adapters = {
        name: random_adapter(ARCHITECTURE, 4, seed=seed, scaling=8.0) for seed, name in enumerate("ab")
    }
    settings = {"lora_adapters": adapters, "max_loras": 1, "scheduling": Fcfs(preemption_mode="swap")}
    asked = prompts(), GREEDY, ["a", "b", None] * 4
    stages = engine(**UNEVEN, **settings, num_kv_blocks=30)
    moved = counted_loads(stages)
    found = tokens_of(stages.generate(*asked))
    assert moved
    assert found == tokens_of(engine(**settings).generate(*asked))


def test_plans_are_those_of_the_simulator(stages):
    """Twelve prompts, KV for fewer: chunks, preemptions, two batches in flight."""
    asked = unlike_prompts()
    noted = Noted(stages.engine.core)
    stages.engine.observer = noted
    first = stages.engine._next_id
    outputs = stages.generate(asked, GREEDY)
    stages.engine.observer = None
    assert first == 0, "the digests have the numbers of requests"
    assert all(output.error is None for output in outputs)
    digests = simulated_digests([len(prompt) for prompt in asked], GREEDY.max_tokens, core, num_stages=2)
    assert noted.digests == digests
    assert max(noted.in_flight) == 1, "the second step is launched before the first one is read"
    assert stages.engine.core.num_preemptions


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=3, presence_penalty=0.4, logprobs=2),
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1),
    ],
    ids=["greedy", "branches", "scores"],
)
def test_two_stages_give_the_answers_of_one_rank(one, stages, params):
    """Stages of two layers and of one; prompts in chunks, hits of prefixes, preemptions."""
    found, wanted = stages.generate(prompts(), params), one.generate(prompts(), params)
    for output, other in zip(found, wanted, strict=True):
        assert output.error is None
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in other.outputs]
        assert [each.logprobs is None for each in output.outputs] == [
            each.logprobs is None for each in other.outputs
        ]
        assert (output.prompt_logprobs is None) == (other.prompt_logprobs is None)


def test_a_request_that_is_aborted_on_its_way_leaves_the_others_as_they_are(one, stages):
    (wanted,) = tokens_of(one.generate(prompts()[1:2], GREEDY))
    engine = stages.engine
    lost, kept = (engine.add(prompts()[place], GREEDY) for place in (2, 1))
    for _ in range(3):
        engine.step()
    engine.abort(lost.request_id)
    engine.run()
    engine.core.check_integrity()
    assert tuple(kept.outputs[0].tokens) == wanted
    assert lost.outputs[0].finish_reason == "aborted"


def test_a_stage_has_its_layers_and_only_the_last_one_the_head():
    architecture = Architecture.from_hf(THREE_LAYERS)
    whole = expected(architecture)
    parts = [of_stage(whole, layers, 3) for layers in (range(2), range(2, 3))]
    of_layers = [[w.name for w in part if w.name.startswith("layers.")] for part in parts]
    assert of_layers[0] + of_layers[1] == [w.name for w in whole if w.name.startswith("layers.")]
    sizes = [{w.name: w.shape[0] for w in part} for part in parts]
    assert (sizes[0]["embedding.weight"], sizes[0]["head.weight"]) == (98, 0)
    assert (sizes[1]["embedding.weight"], sizes[1]["head.weight"]) == (0, 98)
    weights = load_weights(None, architecture, torch.float32, "cpu", layers=range(2, 3))
    assert "layers.2.qkv.weight" in weights
    assert "layers.1.qkv.weight" not in weights


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size=4: must be <= 3, the layers of the model"),
        (
            {"pipeline_parallel_size": 2, "pp_layer_partition": [2, 2]},
            r"pp_layer_partition=\[2, 2\]: the sum is 4; must be 3, the layers of the model",
        ),
        (
            {"pipeline_parallel_size": 2, "pp_layer_partition": [3]},
            r"pp_layer_partition=\[3\]: must have one number for each of the pipeline_parallel_size=2 stages",
        ),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0: must be >= 1"),
        (
            {"pipeline_parallel_size": 2, "speculative_config": {"method": "ngram"}},
            "speculative_config: pipeline_parallel_size=2 must be 1",
        ),
        (
            {"pipeline_parallel_size": 2, "cudagraph_mode": "PIECEWISE"},
            "cudagraph_mode=PIECEWISE: must be NONE or None with pipeline_parallel_size=2",
        ),
        (
            {"pipeline_parallel_size": 2, "enable_sleep_mode": True},
            "enable_sleep_mode: pipeline_parallel_size=2 must be 1",
        ),
    ],
)
def test_rejects_stages_that_cannot_be_made(settings, message):
    with pytest.raises(ValueError, match=message):
        engine(**settings)


def test_settings_take_the_stages_of_a_layout():
    settings = EngineSettings(**UNEVEN)
    assert settings.layout.stage_layers(3) == (2, 1)
