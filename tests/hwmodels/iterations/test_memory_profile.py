"""The rules of vLLM, SGLang and TensorRT-LLM for KV memory, part by part, and figures that they logged."""

from dataclasses import replace

import pytest

from hwmodels.host import GIB, CudaGraphs
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.iterations.memory import ERAS, MIB, MemoryProfile, padding_bytes, plan_memory, weight_bytes
from hwmodels.model import Block, DenseMlp, GroupedQueryAttention, MixtureOfExperts, ModelSpec

NEWEST = MemoryProfile()
SORTING = MemoryProfile(version="0.16.0")
ONE = ParallelLayout()


def tp(size, **given):
    return ParallelLayout(tensor_parallel_size=size, **given)


def make_model(mlp, vocab_size=1000):
    attention = GroupedQueryAttention(num_heads=8, num_kv_heads=4, head_dim=16)
    return ModelSpec(
        name="tiny",
        hidden_size=64,
        vocab_size=vocab_size,
        max_position_embeddings=4096,
        blocks=(Block(count=1, attention=attention, mlp=mlp),),
    )


def test_activations_by_hand(models):
    """In a layer 4,096 tokens x (4 x 4,096 + 3 x 14,336) x 2 bytes; in the sampler states and logits."""
    model = models["llama3_1_8b"]
    assert NEWEST.activation_bytes(model, ONE, 4096, 64) == 4096 * (4 * 4096 + 3 * 14_336) * 2
    assert NEWEST.activation_bytes(model, ONE, 2048, 256) == 2048 * 4096 * 2 + 256 * 128_256 * 15
    assert SORTING.activation_bytes(model, ONE, 2048, 256) == pytest.approx(
        2048 * 4096 * 2 + 256 * 128_256 * 38.4
    )
    cut = NEWEST.activation_bytes(model, tp(4), 4096, 64)
    assert cut == 4096 * (4 * 4096 + 3 * 14_336 / 4) * 2


def test_flashinfer_samples_without_sorting(models):
    """15 bytes per logit in place of 38.4: gpt-oss-120b on an H100 gets 4.5 GiB more for KV."""
    model = models["llama3_1_8b"]
    fast = MemoryProfile(version="0.10.2", flashinfer_sampler=True)
    assert fast.activation_bytes(model, ONE, 2048, 256) == 2048 * 4096 * 2 + 256 * 128_256 * 15
    newest = replace(NEWEST, flashinfer_sampler=True)
    assert newest.activation_bytes(model, ONE, 2048, 256) == NEWEST.activation_bytes(model, ONE, 2048, 256)


def test_a_batch_samples_no_more_rows_than_it_has_tokens(models):
    model = models["llama3_1_8b"]
    assert NEWEST.activation_bytes(model, ONE, 512, 1024) == NEWEST.activation_bytes(model, ONE, 512, 512)


def test_experts_keep_their_buffers_while_the_newest_vllm_samples():
    """100 tokens, 2 experts of 40: 2 copies x (80 + 40) x 2 bytes, beside hidden states and logits."""
    model = make_model(MixtureOfExperts(num_experts=8, top_k=2, intermediate_size=40))
    experts, hidden = 100 * 2 * (80 + 40) * 2, 100 * 64 * 2
    assert NEWEST.activation_bytes(model, ONE, 100, 100) == hidden + 100 * 1000 * 15 + experts
    assert SORTING.activation_bytes(model, ONE, 100, 100) == pytest.approx(hidden + 100 * 1000 * 38.4)
    assert NEWEST.activation_bytes(model, ONE, 100, 1) == 4 * hidden + experts


def test_experts_of_several_attention_groups_get_the_tokens_of_all():
    """4 groups of 25 tokens: slices of every expert see all 100, whole experts a quarter of the copies."""
    model = make_model(MixtureOfExperts(num_experts=8, top_k=2, intermediate_size=40), vocab_size=100)
    hidden = 25 * 64 * 2
    sliced = ParallelLayout(attention_data_parallel_size=4)
    assert NEWEST.activation_bytes(model, sliced, 100, 4) == 4 * hidden + 100 * 2 * (64 + 10) * 2
    whole = ParallelLayout(attention_data_parallel_size=4, expert_parallel_size=4)
    assert NEWEST.activation_bytes(model, whole, 100, 4) == 4 * hidden + 25 * 2 * (80 + 40) * 2


def test_sglang_takes_a_share_of_what_is_free_before_the_weights(models, devices):
    """H100: 79.12 - 0.75 GiB, and 1.6 GiB less with several devices; nothing else is subtracted."""
    rule, device = MemoryProfile(rule="sglang"), devices["h100_sxm"]
    alone, pair = rule.total_bytes(device, ONE) / GIB, rule.total_bytes(device, tp(2)) / GIB
    assert (round(alone, 2), round(pair, 2)) == (78.37, 76.77)
    plan = plan_memory(
        model=models["llama3_1_8b"], device=device, gpu_memory_utilization=0.85, profile=rule, block_size=1
    )
    assert plan.fixed_bytes == plan.weights_bytes
    assert plan.usable_bytes == pytest.approx(0.85 * alone * GIB)


def test_sglang_computes_its_own_share(devices):
    """Qwen3-32B on two H100 got 0.828 (sgl-project/sglang issue 29092)."""
    rule = MemoryProfile(rule="sglang")
    asked = {"max_num_batched_tokens": 8192, "graphs": CudaGraphs(max_capture_size=256)}
    assert rule.share(None, devices["h100_sxm"], tp(2), **asked) == 0.828
    assert rule.share(0.7, devices["h100_sxm"], tp(2), **asked) == 0.7
    small = rule.share(None, devices["rtx_4090"], ONE, max_num_batched_tokens=4096, graphs=CudaGraphs())
    assert 0.5 < small < 0.828
    with pytest.raises(ValueError, match="only memory_profile=sglang computes it"):
        NEWEST.share(None, devices["h100_sxm"], ONE, **asked)


def test_tensorrt_llm_takes_a_share_of_what_is_left(models, devices):
    rule = MemoryProfile(rule="tensorrt_llm")
    asked = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"], "profile": rule}
    half, all_of_it = (plan_memory(**asked, gpu_memory_utilization=share) for share in (0.5, 1.0))
    assert half.fixed_bytes == all_of_it.fixed_bytes
    assert half.num_blocks == pytest.approx(all_of_it.num_blocks / 2, abs=1)


def test_graphs_count_since_0_21_only(models):
    """51 sizes, each for both kinds of batches, 32 layers; 35 of them have at most 256 rows."""
    model, graphs = models["llama3_1_8b"], CudaGraphs(max_capture_size=512)
    assert MemoryProfile(version="0.20.0").cuda_graph_bytes(model, graphs, 1024) == 0
    all_rows = MemoryProfile(version="0.21.0").cuda_graph_bytes(model, graphs, 1024)
    assert all_rows == pytest.approx(0.25 * GIB + 102 * 32 * 0.17 * MIB)
    assert NEWEST.cuda_graph_bytes(model, graphs, 256) == pytest.approx(0.25 * GIB + 86 * 32 * 0.17 * MIB)
    assert NEWEST.cuda_graph_bytes(model, CudaGraphs(enabled=False), 256) == 0


def test_only_tensor_parallelism_over_nvlink_has_buffers_of_all_reduces(devices):
    library, buffers = ERAS[-1].library_bytes, ERAS[-1].all_reduce_bytes
    assert NEWEST.runtime_bytes(devices["h100_sxm"], ONE) == library
    assert NEWEST.runtime_bytes(devices["h100_sxm"], tp(2)) == library + buffers
    assert NEWEST.runtime_bytes(devices["h100_sxm"], tp(1, pipeline_parallel_size=2)) == library
    assert NEWEST.runtime_bytes(devices["l40s"], tp(2)) == library


@pytest.mark.parametrize(
    ("size", "model", "gib"),
    [(1, "gpt_oss_20b", 13.64), (2, "gpt_oss_20b", 7.01), (1, "gpt_oss_120b", 65.97)],
)
def test_weights_of_gpt_oss_are_those_that_vllm_loaded(models, size, model, gib):
    """vLLM 0.19, and 0.10 with Marlin's kernels (issue 23278): 2,880 columns take 3,072, rows 2,944."""
    assert weight_bytes(models[model], tp(size)) / GIB == pytest.approx(gib, rel=0.01)


def test_padding_by_hand(models):
    """Hidden 2,880 to 3,072, intermediate 2,880 to 2,944, on two devices 1,440 to 1,536; 24 x 32 experts."""
    model = models["gpt_oss_20b"]
    more = 24 * 32 * 3 * (3072 * 2944 - 2880 * 2880)
    assert padding_bytes(model, ONE) == pytest.approx(more * 4.25 / 8)
    halves = 24 * 32 * 3 * (3072 * 1536 - 2880 * 1440)
    assert padding_bytes(model, tp(2)) == pytest.approx(halves * 4.25 / 8)
    assert padding_bytes(models["mixtral_8x7b"], ONE) == 0
    assert padding_bytes(make_model(DenseMlp(intermediate_size=160)), ONE) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rule": "orca"}, "rule=orca: must be one of vllm, sglang, tensorrt_llm"),
        ({"version": "0.8.5"}, "version=0.8.5: must be a version of vLLM with three parts, 0.9.0 or later"),
        ({"version": "0.1"}, "version=0.1: must be a version of vLLM with three parts"),
        ({"rule": "sglang", "flashinfer_sampler": True}, "flashinfer_sampler=true: only memory_profile=vllm"),
        ({"rule": "sglang", "version": "0.11.0"}, "version=0.11.0: only memory_profile=vllm knows versions"),
    ],
)
def test_rejects_rules_and_versions_that_do_not_exist(given, message):
    with pytest.raises(ValueError, match=message):
        MemoryProfile(**given)


def test_every_version_since_an_era_began_belongs_to_it():
    assert MemoryProfile(version="v0.10.2").era is ERAS[0]
    assert MemoryProfile(version="0.18.1rc1").era is ERAS[2]
    assert MemoryProfile(version="0.32.0").era is NEWEST.era is ERAS[-1]


def test_less_memory_is_left_where_more_rows_are_sampled(models, devices):
    asked = {"model": models["qwen3_32b"], "device": devices["h100_sxm"], "max_num_batched_tokens": 8192}
    newest, old = (
        plan_memory(**asked, max_num_seqs=1024, profile=replace(NEWEST, version=version))
        for version in ("0.19.0", "0.11.0")
    )
    assert newest.kv_bytes - old.kv_bytes == pytest.approx(3.2 * GIB, rel=0.1)
