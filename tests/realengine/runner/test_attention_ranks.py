"""Data-parallel attention: tokens are those of one rank, plans those of the simulator."""

import os
import signal

import pytest
import torch

from policies.batching import DataParallel
from policies.batching.chunked import Chunked
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.caching.streaming import StreamingLlm
from policies.core.engine import EngineCore
from policies.placement.experts import Eplb
from policies.scheduling.fcfs import Fcfs
from realengine.model.architecture import Architecture
from realengine.model.token_exchange import MOST_GATHERED
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from tests.realengine.runner.test_expert_ranks import MOE
from tests.realengine.simulated import LENGTHS, Noted, simulated_digests, unlike_prompts
from tests.realengine.small_models import GREEDY, LLAMA, prompts, tokens_of

SETTINGS = {"num_kv_blocks": 60, "max_num_seqs": 6}
TWO = {"attention_data_parallel_size": 2, "expert_parallel_size": 2}


def engine(config=MOE, **settings):
    given = {"caching": PrefixCaching(block_size=4), "batching": Chunked(max_num_batched_tokens=48)}
    return LLM(Architecture.from_hf(config), seed=1, device="cpu", **SETTINGS | given | settings)


def core():
    return EngineCore(
        batching=Chunked(max_num_batched_tokens=48),
        scheduling=Fcfs(),
        block_pool=PrefixCaching(block_size=4).pool(KvMemory(SETTINGS["num_kv_blocks"])),
        max_num_seqs=SETTINGS["max_num_seqs"],
        max_model_len=MOE["max_position_embeddings"],
        data_parallel=DataParallel(size=2),
    )


def test_two_ranks_decide_as_the_simulator_does_and_give_the_tokens_of_one():
    """Each has 24 tokens a step, three slots and 30 blocks; experts have copies, and move every 7 steps."""
    two = engine(**TWO, expert_placement=Eplb(num_redundant_experts=2, step_interval=7))
    one = engine()
    noted = two.engine.observer = Noted(two.engine.core)
    outputs = two.generate(unlike_prompts(), GREEDY)
    assert tokens_of(outputs) == tokens_of(one.generate(unlike_prompts(), GREEDY))
    assert noted.digests == simulated_digests(LENGTHS, GREEDY.max_tokens, core)
    assert two.engine.runner.execute.args[0].balance.num_moved
    two.engine.core.check_integrity()
    params = SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=3, presence_penalty=0.4, logprobs=2)
    for output, other in zip(two.generate(prompts(), params), one.generate(prompts(), params), strict=True):
        assert output.error is None
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in other.outputs]
        for logprobs, wanted in zip(output.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert logprobs.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_tokens_are_sent_to_the_ranks_of_their_experts_and_a_lost_rank_is_named():
    two = engine(**TWO, all2all_backend="all_to_all")
    assert tokens_of(two.generate(prompts(), GREEDY)) == tokens_of(engine().generate(prompts(), GREEDY))
    os.kill(two.engine.runner.execute.func.__self__._processes[0].pid, signal.SIGKILL)
    (output,) = two.generate(prompts()[:1], GREEDY)
    assert output.error == (
        "a rank of the engine has failed: rank 1 (attention data parallel rank 1) has ended with exit code -9"
    )


def test_two_ranks_that_share_each_expert_give_the_tokens_of_one():
    """Every rank has a half of the matrices; a step of many tokens is not gathered."""
    long = [list(range(96)) * 3] * 3
    config = MOE | {"max_position_embeddings": 512}
    settings = {"batching": Chunked(max_num_batched_tokens=4 * MOST_GATHERED), "num_kv_blocks": 1000}
    two = engine(config, attention_data_parallel_size=2, **settings)
    one = engine(config, **settings)
    assert tokens_of(two.generate(long, GREEDY)) == tokens_of(one.generate(long, GREEDY))


@pytest.mark.slow
@pytest.mark.parametrize("others", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_four_ranks_give_the_tokens_of_one(others):
    four = engine(**TWO, **others, all2all_backend="all_to_all")
    assert tokens_of(four.generate(prompts(), GREEDY)) == tokens_of(engine().generate(prompts(), GREEDY))


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (LLAMA, {}, "attention_data_parallel_size=2: the model has no experts; must be 1"),
        (MOE, {"attention_data_parallel_size": 0}, "attention_data_parallel_size=0: must be >= 1"),
        (
            MOE,
            {"all2all_backend": "pplx"},
            "all2all_backend=pplx: must be one of allgather_reducescatter,",
        ),
        (MOE, {"load_balance_method": "random"}, "load_balance_method=random"),
        (
            MOE,
            {"scheduling": Fcfs(preemption_mode="swap")},
            "attention_data_parallel_size=2: must be 1 with KV in host memory",
        ),
        (
            MOE,
            {"caching": StreamingLlm(block_size=4, num_sink_tokens=4, num_recent_tokens=8)},
            "attention_data_parallel_size=2: must be 1 with caching=StreamingLlm",
        ),
        (
            MOE,
            {"speculative_config": {"method": "ngram"}},
            "speculative_config: attention_data_parallel_size=2 must be 1",
        ),
    ],
)
def test_rejects_ranks_that_cannot_be_made(config, settings, message):
    with pytest.raises(ValueError, match=message):
        engine(config, **{"attention_data_parallel_size": 2} | settings)


torch.set_num_threads(1)
