"""Models with other parts than Llama's, with every way to serve: the tokens are those of a plain run.

Plain runs are held against transformers in test_transformers.py; here policies, memory, ranks, kernels and
drafts must change no token.
"""

import gc

import pytest
import torch

from kernels.mxfp4_weight import Mxfp4Weight, dense_mxfp4, quantise_mxfp4
from policies.batching.chunked import Chunked
from policies.caching.prefix import PrefixCaching
from policies.scheduling.fcfs import Fcfs
from realengine.model.architecture import Architecture
from realengine.model.backend import TORCH
from realengine.model.decoders import decoder_of
from realengine.model.kv_cache import KvCache
from realengine.model.latent_attention import LatentDecoder
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.weights.load import load_weights
from tests.realengine.adapters import random_adapter
from tests.realengine.recorded import record_on_cpu
from tests.realengine.small_models import LLAMA, prompts, tokens_of
from tests.realengine.steps import all_logits

torch.set_num_threads(1)

CPU = torch.device("cpu")
LATENT = LLAMA | {
    "model_type": "deepseek_v2",
    "vocab_size": 98,
    "head_dim": None,
    "num_hidden_layers": 2,
    "num_key_value_heads": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
CONFIGS = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}
CONFIGS |= {
    "gemma2": LLAMA
    | {
        "model_type": "gemma2",
        "vocab_size": 98,
        "sliding_window": 7,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3_text": LLAMA
    | {
        "model_type": "gemma3_text",
        "vocab_size": 98,
        "sliding_window": 7,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 20,
        "rope_local_base_freq": 500.0,
    },
    "gpt_oss": LLAMA
    | {
        "model_type": "gpt_oss",
        "vocab_size": 98,
        "sliding_window": 7,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "swiglu_limit": 1.0,
    },
    "baichuan": LLAMA
    | {
        "model_type": "baichuan",
        "architectures": ["BaichuanForCausalLM"],
        "vocab_size": 98,
        "num_key_value_heads": 6,
    },
    "glm": LLAMA
    | {
        "model_type": "glm",
        "architectures": ["GlmForCausalLM"],
        "vocab_size": 98,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "phi3": LLAMA
    | {
        "model_type": "phi3",
        "vocab_size": 98,
        "sliding_window": 7,
        "partial_rotary_factor": 0.5,
    },
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WAYS = {
    "chunks, swapped out": {
        "batching": Chunked(max_num_batched_tokens=24),
        "num_kv_blocks": 7,
        "scheduling": Fcfs(preemption_mode="swap"),
    },
    "chunks, recomputed": {"batching": Chunked(max_num_batched_tokens=9), "num_kv_blocks": 7},
    "hits in the cache": {"caching": PrefixCaching(block_size=4), "num_kv_blocks": 60},
    "overlapped": {"overlap": True, "max_iterations": 1},
    "several iterations": {"max_iterations": 3},
    "drafts": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    },
    "drafts of the model itself": {
        "speculative_config": {
            "method": "self_speculative",
            "num_speculative_tokens": 2,
            "skipped_layers": [1],
        },
    },
}
REFUSED_DRAFTS = {
    "deepseek_v2": "token trees are not computed",
    "deepseek_v3": "token trees",
    "baichuan": "token trees",
}


def make(config, **settings):
    settings = {"device": "cpu", "num_kv_blocks": 200, "max_num_seqs": 8} | settings
    return LLM(Architecture.from_hf(CONFIGS[config]), seed=1, **settings)


@pytest.fixture(autouse=True)
def wide_weights(monkeypatch):
    """Draws weights with which attention is far from uniform, so that a wrong key changes tokens."""
    monkeypatch.setattr("realengine.weights.load.STANDARD_DEVIATION", 0.2)


@pytest.fixture(scope="module")
def expected():
    known = {}

    def of(config):
        if config not in known:
            known[config] = tokens_of(make(config).generate(prompts(), GREEDY))
        return known[config]

    return of


def test_kimi_k2_is_deepseek_v3_under_another_name():
    kimi = CONFIGS["deepseek_v3"] | {"model_type": "kimi_k2"}
    assert Architecture.from_hf(kimi) == Architecture.from_hf(CONFIGS["deepseek_v3"])
    with pytest.raises(ValueError, match=r"model_type=kimi_k25: unknown architecture; supported: .*kimi_k2"):
        Architecture.from_hf(kimi | {"model_type": "kimi_k25"})


@pytest.mark.sampled(fast=16, slow=24)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_way_to_serve_gives_the_same_tokens(config, way, expected):
    llm = make(config, **WAYS[way])
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected(config)
    if "num_kv_blocks" in WAYS[way] and "caching" not in WAYS[way]:
        assert llm.engine.core.num_preemptions


@pytest.mark.parametrize("drafts", [False, True], ids=["decodes", "drafts"])
@pytest.mark.parametrize("config", CONFIGS)
def test_steps_replayed_as_graphs_give_the_same_tokens(config, drafts, expected, monkeypatch):
    recorders = record_on_cpu(monkeypatch)
    more = {"speculative_config": WAYS["drafts"]["speculative_config"]} if drafts else {}
    llm = make(config, cudagraph_mode="FULL_DECODE_ONLY", **more)
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected(config)
    assert sum(recorder.num_replayed for recorder in recorders)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_draft_of_the_same_family_changes_no_token(config, expected):
    draft = {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "model": Architecture.from_hf(CONFIGS[config]),
    }
    llm = make(config, speculative_config=draft, scheduling=Fcfs(preemption_mode="swap"), num_kv_blocks=9)
    outputs = llm.generate(prompts(), GREEDY)
    assert tokens_of(outputs) == expected(config)
    assert any(output.drafts for output in outputs)
    assert llm.engine.core.num_preemptions


@pytest.mark.parametrize("config", CONFIGS)
def test_several_outputs_share_their_prompt_s_kv(config):
    params = SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=3)
    one, other = make(config), make(config, num_kv_blocks=9, max_num_seqs=4)
    asked = [prompts()[place] for place in (1, 2, 5)]
    assert [output.outputs for output in one.generate(asked, params)] == [
        output.outputs for output in other.generate(asked, params)
    ]


@pytest.mark.sampled(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_two_ranks_give_the_same_tokens(config, monkeypatch):
    if config == "gpt_oss":
        with pytest.raises(ValueError, match="experts of gpt_oss are not divided among ranks; set it to 1"):
            make(config, tensor_parallel_size=2)
        return
    monkeypatch.undo()  # the other rank draws its weights in a process of its own
    two = make(config, tensor_parallel_size=2)
    found = tokens_of(two.generate(prompts(), GREEDY))
    del two
    gc.collect()  # ends the other rank, so that the next test can have one
    assert found == tokens_of(make(config).generate(prompts(), GREEDY))


@pytest.mark.sampled(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_triton_s_kernels_give_the_same_tokens(config, expected):
    """In fp16, as experts need, so tokens may differ where two logits are nearly equal: most must not."""
    settings = {"backend": "triton", "dtype": "float16", "batching": Chunked(max_num_batched_tokens=32)}
    asked = [prompts()[place] for place in (0, 1, 4)]
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found = tokens_of(make(config, **settings).generate(asked, short))
    wanted = tokens_of(make(config, dtype="float16").generate(asked, short))
    same = [a == b for one, two in zip(found, wanted, strict=True) for a, b in zip(one, two, strict=True)]
    assert sum(same) >= 0.9 * len(same)


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_not_computed_is_refused_by_name(config):
    if config in REFUSED_DRAFTS:
        tree = {"method": "specinfer_tree", "widths": [2, 1], "model": Architecture.from_hf(CONFIGS[config])}
        with pytest.raises(ValueError, match=REFUSED_DRAFTS[config]):
            make(config, speculative_config=tree)
        if Architecture.from_hf(CONFIGS[config]).latent is not None:
            with pytest.raises(
                ValueError, match="kv_cache_dtype=int4: latent rows are kept in the model's dtype"
            ):
                make(config, kv_cache_dtype="int4")
    for method in ("eagle", "eagle3", "mtp"):
        layer = {"method": method, "num_speculative_tokens": 2}
        layer |= {} if method == "mtp" else {"model": "nowhere"}
        with pytest.raises(ValueError, match=f"method={method}: layers that draft are not computed"):
            make(config, speculative_config=layer)
    with pytest.raises(ValueError, match=f"LoRA is not computed for model_type={config}"):
        make(config, lora_adapters={"a": random_adapter(Architecture.from_hf(LLAMA), rank=2, seed=1)})


@pytest.mark.parametrize("config", ["deepseek_v2", "gpt_oss"])
def test_experts_in_4_bits_are_those_of_the_dequantised_weights(config):
    hidden = {"hidden_size": 64, "head_dim": None if config == "deepseek_v2" else 16}
    spec = Architecture.from_hf(CONFIGS[config] | hidden)
    weights, packed = (
        load_weights(None, spec, torch.float32, "cpu", seed=1, quantization=name) for name in (None, "mxfp4")
    )
    for name, weight in packed.items():
        if isinstance(weight, Mxfp4Weight):
            assert torch.equal(weight.codes, quantise_mxfp4(weights[name]).codes)
            weights[name] = dense_mxfp4(weight)
    sequences = prompts(4)
    found, wanted = (
        all_logits(decoder_of(spec, each, TORCH, 128), KvCache(spec, 90, 4, torch.float32, CPU), sequences)
        for each in (packed, weights)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert sum(isinstance(weight, Mxfp4Weight) for weight in packed.values()) >= 2
    with pytest.raises(ValueError, match="experts only are kept in 4 bits, and this model has none"):
        make("gemma2", quantization="mxfp4")


def test_both_forms_of_latent_attention_are_used_and_agree(expected, monkeypatch):
    calls = {"_expanded": 0, "_absorbed_chunks": 0}

    def counted(name):
        form = getattr(LatentDecoder, name)

        def call(*args):
            calls[name] += 1
            return form(*args)

        monkeypatch.setattr(LatentDecoder, name, call)

    for name in calls:
        counted(name)
    places = [place for place, prompt in enumerate(prompts()) if len(prompt) > 30]
    asked, wanted = [prompts()[i] for i in places], [expected("deepseek_v2")[i] for i in places]
    assert tokens_of(make("deepseek_v2").generate(asked, GREEDY)) == wanted
    used = dict(calls)
    assert used["_expanded"] > 0
    monkeypatch.setattr("realengine.model.latent_attention.EXPANDED_BYTES", 0)
    assert tokens_of(make("deepseek_v2").generate(asked, GREEDY)) == wanted
    assert calls["_expanded"] == used["_expanded"]
    assert calls["_absorbed_chunks"] > used["_absorbed_chunks"]
