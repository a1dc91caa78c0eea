"""Context parallelism of prompts: tokens are those of one rank, plans those of the simulator."""

import os
import signal

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.caching.streaming import StreamingLlm
from policies.core.engine import EngineCore
from policies.scheduling.fcfs import Fcfs
from realengine.model.architecture import Architecture
from realengine.model.context_cut import own_part
from realengine.runner.batch import Batch
from realengine.runner.parallel import Group
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from tests.realengine.runner.test_expert_ranks import MOE
from tests.realengine.simulated import LENGTHS, Noted, simulated_digests, unlike_prompts
from tests.realengine.small_models import CONFIGS, GREEDY, prompts, tokens_of

torch.set_num_threads(1)

WINDOWS = CONFIGS["mistral"] | {"vocab_size": 98}
SETTINGS = {"num_kv_blocks": 40, "max_num_seqs": 6}


def engine(config=WINDOWS, **settings):
    given = {"caching": PrefixCaching(block_size=4), "batching": Chunked(max_num_batched_tokens=24)}
    return LLM(Architecture.from_hf(config), seed=1, device="cpu", **SETTINGS | given | settings)


def core():
    return EngineCore(
        batching=Chunked(max_num_batched_tokens=24),
        scheduling=Fcfs(),
        block_pool=PrefixCaching(block_size=4).pool(KvMemory(SETTINGS["num_kv_blocks"])),
        max_num_seqs=SETTINGS["max_num_seqs"],
        max_model_len=WINDOWS["max_position_embeddings"],
    )


def test_two_ranks_that_divide_prompts_give_the_answers_of_one_and_the_plans_of_the_simulator():
    """Chunks beside decodes, sliding windows, hits of prefixes, preemptions; then a rank dies."""
    one, two = engine(), engine(context_parallel_size=2)
    noted = two.engine.observer = Noted(two.engine.core)
    outputs = two.generate(unlike_prompts(), GREEDY)
    assert tokens_of(outputs) == tokens_of(one.generate(unlike_prompts(), GREEDY))
    assert noted.digests == simulated_digests(LENGTHS, GREEDY.max_tokens, core)
    params = SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=3, logprobs=1, prompt_logprobs=1)
    for output, other in zip(two.generate(prompts(), params), one.generate(prompts(), params), strict=True):
        assert output.error is None
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in other.outputs]
        for logprobs, wanted in zip(output.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert logprobs.logprob == pytest.approx(wanted.logprob, abs=1e-4)
    os.kill(two.engine.runner.execute.func.__self__._processes[0].pid, signal.SIGKILL)
    (output,) = two.generate(prompts()[:1], GREEDY)
    failed = "a rank of the engine has failed: rank 1 (context parallel rank 1) has ended with exit code -9"
    assert output.error == failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "others"),
    [(MOE, {"tensor_parallel_size": 2}), (WINDOWS, {"pipeline_parallel_size": 2})],
    ids=["tensor", "pipeline"],
)
def test_four_ranks_give_the_tokens_of_one(config, others):
    four = engine(config, context_parallel_size=2, **others)
    assert tokens_of(four.generate(prompts(), GREEDY)) == tokens_of(
        engine(config).generate(prompts(), GREEDY)
    )


def batch(num_decodes, counts, contexts):
    num_tokens = num_decodes + sum(counts)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    rows = num_decodes + len(counts)
    return Batch(
        tokens_T=torch.arange(num_tokens),
        positions_T=torch.arange(num_tokens),
        slots_T=torch.arange(num_tokens),
        block_tables_BM=torch.arange(rows)[:, None].int(),
        chunk_starts=starts,
        context_lens_B=torch.tensor(contexts).int(),
        sampled_rows_S=torch.tensor([num_tokens - 1]),
        num_decodes=num_decodes,
        max_query_len=max(counts, default=0),
        max_context_len=max(contexts),
    )


def test_each_rank_has_its_tokens_and_the_keys_before_them():
    """Two decodes, chunks of 5 and 3 tokens behind 10 and 20: the tokens 0 to 4, and 5 to 9."""
    whole = batch(2, [5, 3], [7, 8, 15, 23])
    first, second = (own_part(whole, Group(rank, 2)) for rank in range(2))
    assert first.tokens_T.tolist() == [0, 1, 2, 3, 4]
    assert (first.num_decodes, first.chunk_starts.tolist()) == (2, [0, 3, 3])
    assert first.context_lens_B.tolist() == [7, 8, 13, 20]
    assert second.tokens_T.tolist() == [5, 6, 7, 8, 9]
    assert (second.num_decodes, second.chunk_starts.tolist()) == (0, [0, 2, 5])
    assert second.block_tables_BM[:, 0].tolist() == [2, 3]
    assert second.context_lens_B.tolist() == [15, 23]


def test_steps_of_decodes_and_of_few_tokens_are_not_divided():
    for whole, group in (
        (batch(4, [], [3, 4, 5, 6]), Group(0, 2)),
        (batch(0, [2], [3]), Group(0, 3)),
        (batch(0, [2], [3]), Group()),
    ):
        assert own_part(whole, group) is whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_parallel_size": 0}, "context_parallel_size=0: must be >= 1"),
        (
            {"tensor_parallel_size": 2, "expert_parallel_size": 2},
            "expert_parallel_size=2: must be 1 with context_parallel_size=2",
        ),
        (
            {"attention_data_parallel_size": 2},
            "attention_data_parallel_size=2: must be 1 with context_parallel_size=2",
        ),
        (
            {"caching": StreamingLlm(block_size=4, num_sink_tokens=4, num_recent_tokens=8)},
            "context_parallel_size=2: must be 1 with caching=StreamingLlm",
        ),
        (
            {"cudagraph_mode": "FULL_DECODE_ONLY"},
            "cudagraph_mode=FULL_DECODE_ONLY: must be NONE or None with context_parallel_size=2",
        ),
    ],
)
def test_rejects_divided_prompts_that_cannot_be_computed(settings, message):
    with pytest.raises(ValueError, match=message):
        engine(MOE, **{"context_parallel_size": 2} | settings)
