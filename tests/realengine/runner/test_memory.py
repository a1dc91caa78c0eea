"""The memory that an engine plans beside its KV: steps, graphs, distributions of draft tokens."""

from dataclasses import replace

import pytest
import torch

from kernels.prefill_hopper import DENSE_BYTES
from policies.batching.chunked import Chunked
from policies.speculation.draft_lengths import ByBatchSize
from realengine.model.architecture import Architecture
from realengine.runner import memory
from realengine.runner.graph_mode import MODES
from realengine.runner.memory import GIB, GRAPH_BYTES, MemoryPlan
from realengine.settings import EngineSettings
from realengine.speculation.drafter import LoadedDraft
from tests.realengine.small_models import CONFIGS, make

torch.set_num_threads(1)

SPEC = replace(Architecture.from_hf(CONFIGS["llama"]), vocab_size=128_000)
DRAFT = {"method": "draft_model", "model": SPEC, "num_speculative_tokens": 4}
CPU = torch.device("cpu")


def planned(draws=False, mode="FULL_DECODE_ONLY", **settings):
    settings = {"max_num_seqs": 8, "batching": Chunked(max_num_batched_tokens=64)} | settings
    draft = LoadedDraft(0, None, draws=draws) if "speculative_config" in settings else None
    made = EngineSettings(**settings)
    return MemoryPlan.of(SPEC, made, torch.bfloat16, 128, 1 << 20, draft, MODES[mode])


def test_logits_of_draft_tokens_are_counted():
    """40 rows instead of 8, of 128,000 logits with 14 bytes each: 32 x 128,000 x 14 = 57.3e6 bytes more."""
    more = planned(speculative_config=DRAFT).step_bytes - planned().step_bytes
    assert more == 32 * 128_000 * 14


def test_the_copies_of_another_attention_backend_are_counted():
    assert planned(attention_backend="torch_sdpa").step_bytes == planned().step_bytes + DENSE_BYTES


def test_no_more_rows_than_a_step_has_tokens_are_counted():
    most = planned(speculative_config=DRAFT, batching=Chunked(max_num_batched_tokens=16))
    least = planned(batching=Chunked(max_num_batched_tokens=16))
    assert most.step_bytes - least.step_bytes == 8 * 128_000 * 14


def test_graphs_are_counted_for_each_number_of_drafts():
    by_size = ByBatchSize(num_speculative_tokens_per_batch_size=((1, 2, 4), (3, 8, 2)))
    assert planned().graph_bytes == GRAPH_BYTES
    assert planned(speculative_config=DRAFT).graph_bytes == GRAPH_BYTES
    assert planned(speculative_config=DRAFT | {"draft_length": by_size}).graph_bytes == 2 * GRAPH_BYTES
    assert planned(speculative_config=DRAFT, mode="NONE").graph_bytes == 0
    pieces = planned(mode="PIECEWISE").graph_bytes
    assert planned(mode="FULL_AND_PIECEWISE").graph_bytes == pieces + GRAPH_BYTES > GRAPH_BYTES


def test_distributions_of_drawn_drafts_are_counted():
    """9 slots (one of padding) x 4 draft tokens x 128,000 tokens x 4 bytes = 18.4e6 bytes."""
    probs_bytes = 9 * 4 * 128_000 * 4
    drawn, likeliest = planned(draws=True, speculative_config=DRAFT), planned(speculative_config=DRAFT)
    assert (drawn.probs_bytes, likeliest.probs_bytes) == (probs_bytes, 0)
    assert likeliest.num_blocks(CPU) - drawn.num_blocks(CPU) == -(-probs_bytes // (1 << 20))


def test_distributions_that_do_not_fit_are_an_error():
    """513 slots x 4 x 128,000 x 4 bytes = 0.98 GiB, of the 1 GiB that a CPU has."""
    plan = planned(draws=True, speculative_config=DRAFT, max_num_seqs=512)
    assert plan.num_blocks(CPU) == 1023 - -(-513 * 4 * 128_000 * 4 // (1 << 20))
    plan = planned(draws=True, speculative_config=DRAFT, max_num_seqs=600)
    with pytest.raises(
        ValueError, match=r"draft_sample_method=probabilistic: .* need 1.15 GiB, and 1.00 GiB"
    ):
        plan.num_blocks(CPU)


@pytest.mark.parametrize("sample_method", ["greedy", "probabilistic"])
def test_an_engine_has_the_planned_blocks(monkeypatch, sample_method):
    """KV of a block, twice: 2 (keys, values) x 2 layers x 2 heads x 16 numbers x 16 tokens x 4 bytes."""
    monkeypatch.setattr(memory, "CPU_KV_BYTES", 1 << 20)
    model = Architecture.from_hf(CONFIGS["llama"])
    config = {"method": "draft_model", "model": model, "num_speculative_tokens": 4}
    llm = make(num_kv_blocks=None, speculative_config=config | {"draft_sample_method": sample_method})
    probs_bytes = 9 * 4 * 97 * 4 if sample_method == "probabilistic" else 0
    assert llm.engine.core.block_pool.num_blocks == ((1 << 20) - probs_bytes) // (16 << 10) - 1


def test_no_room_names_the_distributions():
    plan = planned(draws=True, speculative_config=DRAFT, max_num_seqs=512)
    error = str(plan.no_room(10**6, CPU))
    assert "beside the weights of the model and of its draft and 0.98 GiB of distributions" in error
    assert error.endswith(f"{plan.num_blocks(CPU)} blocks would fit, as with num_kv_blocks=None")
    assert f"{10**6 * plan.block_bytes / GIB:.2f} GiB of KV" in error
