"""Logits and greedy tokens of transformers' own models: small, random, saved by it and loaded by us.

These find mistakes that our textbook model and our engine have in common.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

hf = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.models.bloom.modeling_bloom import build_alibi_tensor  # noqa: E402

from kernels.mxfp4_weight import Mxfp4Weight, dense_mxfp4, quantise_mxfp4  # noqa: E402
from policies.batching.chunked import Chunked  # noqa: E402
from realengine.build import build_engine  # noqa: E402
from realengine.model.architecture import Architecture  # noqa: E402
from realengine.model.backend import TORCH  # noqa: E402
from realengine.model.decoders import decoder_of  # noqa: E402
from realengine.model.kv_cache import KvCache  # noqa: E402
from realengine.serving.model import Model  # noqa: E402
from realengine.serving.sampling_params import SamplingParams  # noqa: E402
from realengine.settings import EngineSettings  # noqa: E402
from realengine.weights.load import load_weights  # noqa: E402
from tests.realengine.steps import all_logits, prompts  # noqa: E402

torch.set_num_threads(1)

CPU = torch.device("cpu")
VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,  # attention far from uniform
}
# Short enough for the prompts to reach the wavelengths that are stretched.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
CAPS = {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.1, 1.3, 0.9, 1.5, 1.0, 2.0],
    "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0],
    "attention_factor": 1.1,
}
MODELS = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama, tied, llama3 rope": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "mistral, window": ("Mistral", {"sliding_window": 7, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "head_dim": 8}),
    "qwen2, window from layer 1": (
        "Qwen2",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}),
    "gemma2": ("Gemma2", CAPS | {"sliding_window": 7, "attn_implementation": "eager"}),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "rope_parameters": TWO_ROPES,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "sliding_window": 7,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,
            "hidden_size": 64,
            "rope_parameters": YARN | {"truncate": False},
            "attn_implementation": "eager",
        },
    ),
    "glm": ("Glm", {"tie_word_embeddings": False}),
    "glm, whole heads rotated, no biases": (
        "Glm",
        {"partial_rotary_factor": 1.0, "attention_bias": False, "tie_word_embeddings": True},
    ),
    "phi3": ("Phi3", {"tie_word_embeddings": False, "sliding_window": 7}),
    "phi3, part of a head rotated, short factors": (
        "Phi3",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 128,
            "rope_parameters": LONGROPE | {"original_max_position_embeddings": 128},
        },
    ),
    "phi3, part of a head rotated, long factors": (
        "Phi3",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 1,  # longer than that is any prompt that rotates a key
            "rope_parameters": LONGROPE | {"original_max_position_embeddings": 1},
        },
    ),
    "deepseek-v2-lite": ("DeepseekV2", LATENT | {"norm_topk_prob": False}),
    "deepseek-v2, groups, factored queries, yarn": (
        "DeepseekV2",
        LATENT
        | GROUPS
        | {
            "q_lora_rank": 24,
            "v_head_dim": 24,
            "topk_method": "group_limited_greedy",
            "rope_parameters": YARN,
        },
    ),
    "deepseek-v3": ("DeepseekV3", LATENT | GROUPS | {"q_lora_rank": 24, "norm_topk_prob": True}),
    "qwen3-moe, weights as routed": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": False}),
}


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    """Returns (transformers' model, the folder to which it was saved)."""
    family, settings = MODELS[request.param]
    torch.manual_seed(1)
    text = "Text" if family == "Gemma3" else ""
    config = getattr(hf, f"{family}{text}Config")(**COMMON | settings)
    model = getattr(hf, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "bias", "sinks")):  # ones and zeros, as they are made
                weight.add_(torch.randn_like(weight), alpha=0.3)
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder)
    return model, folder


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def test_logits_of_mixed_batches_are_those_of_transformers(saved):
    model, folder = saved
    spec = Architecture.from_path(folder)
    decoder = decoder_of(spec, load_weights(folder, spec, torch.float32, CPU), TORCH, 128)
    sequences = prompts(VOCAB)
    found = all_logits(decoder, KvCache(spec, 70, 4, torch.float32, CPU), sequences)
    for tokens, logits in zip(sequences, found, strict=True):
        torch.testing.assert_close(logits, logits_of(model, tokens), rtol=1e-4, atol=1e-4)


def test_greedy_tokens_are_those_of_transformers(saved):
    """The requests are served together, their prompts in chunks, by an engine that runs out of memory."""
    model, folder = saved
    settings = EngineSettings(device="cpu", num_kv_blocks=7, batching=Chunked(max_num_batched_tokens=24))
    engine = build_engine(Model(Architecture.from_path(folder), folder, None), settings)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = [engine.add(tokens, params) for tokens in prompts(VOCAB)]
    engine.run()
    assert engine.core.num_preemptions
    for answer in answers:
        made = model.generate(
            torch.tensor([answer.prompt_tokens]), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert answer.outputs[0].tokens == made[0, len(answer.prompt_tokens) :].tolist()


def test_logits_are_far_from_those_of_a_model_with_another_rope(saved):
    """The tolerance above can tell: one setting of the rotation is worth a thousand times as much."""
    model, folder = saved
    spec = Architecture.from_path(folder)
    other = Architecture.from_hf({**model.config.to_dict(), "rope_parameters": {"rope_theta": 500.0}})
    weights = load_weights(folder, spec, torch.float32, CPU)
    tokens = prompts(VOCAB)[2]
    found = all_logits(
        decoder_of(other, weights, TORCH, 128), KvCache(spec, 70, 4, torch.float32, CPU), [tokens]
    )[0]
    assert (found - logits_of(model, tokens)).abs().max() > 0.1


def test_experts_in_mxfp4_are_those_that_transformers_has_unpacked(tmp_path):
    """The published layout, written tensor by tensor, with numbers that 4 bits can hold."""
    family, settings = MODELS["gpt-oss"]
    torch.manual_seed(1)
    config = getattr(hf, f"{family}Config")(**COMMON | settings)
    model = getattr(hf, f"{family}ForCausalLM")(config).eval()
    stored = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "bias", "sinks")):
                weight.add_(torch.randn_like(weight), alpha=0.3)
            if not name.endswith(("gate_up_proj", "down_proj")):
                stored[name] = weight.clone()
                continue
            packed = quantise_mxfp4(weight.transpose(1, 2))
            weight.copy_(dense_mxfp4(packed).transpose(1, 2))
            stored[f"{name}_blocks"] = packed.codes.unflatten(2, (-1, 16))
            stored[f"{name}_scales"] = packed.scales
    save_file(stored, tmp_path / "model.safetensors")
    fields = {**config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    spec = Architecture.from_path(tmp_path)
    weights = load_weights(tmp_path, spec, torch.float32, CPU)
    assert isinstance(weights["layers.0.experts_down.weight"], Mxfp4Weight)
    sequences = prompts(VOCAB)
    cache = KvCache(spec, 70, 4, torch.float32, CPU)
    found = all_logits(decoder_of(spec, weights, TORCH, 128), cache, sequences)
    for tokens, logits in zip(sequences, found, strict=True):
        torch.testing.assert_close(logits, logits_of(model, tokens), rtol=1e-4, atol=1e-4)


def test_linear_biases_are_those_of_bloom(tmp_path):
    """transformers has no Baichuan: Llama with its heads not rotated and Bloom's biases computes the same.

    Six heads are no power of two, so two of the slopes lie between the others.
    """
    torch.manual_seed(1)
    config = hf.LlamaConfig(**COMMON | {"num_key_value_heads": 6}, attn_implementation="eager")
    model = hf.LlamaForCausalLM(config).eval()
    stored = model.state_dict()
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}.self_attn."
        stored[f"{name}W_pack.weight"] = torch.cat([stored.pop(f"{name}{of}_proj.weight") for of in "qkv"])
    save_file(stored, tmp_path / "model.safetensors")
    fields = {**config.to_dict(), "model_type": "baichuan", "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    spec = Architecture.from_path(tmp_path)
    weights = load_weights(tmp_path, spec, torch.float32, CPU)
    sequences = prompts(VOCAB)
    cache = KvCache(spec, 70, 4, torch.float32, CPU)
    found = all_logits(decoder_of(spec, weights, TORCH, 128), cache, sequences)
    for tokens, logits in zip(sequences, found, strict=True):
        biases = build_alibi_tensor(torch.ones(1, len(tokens)), 6, torch.float32)  # [6, 1, T]
        unbiased = torch.zeros_like(biases)
        wanted, far = (_unrotated_logits(model, tokens, each) for each in (biases, unbiased))
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        assert len(tokens) == 1 or (logits - far).abs().max() > 0.1


def _unrotated_logits(model, tokens, biases_H1T):
    """Returns logits of a Llama without rotation, as of tokens at position 0, and with biases of its keys."""
    later = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(
            torch.tensor([tokens]),
            position_ids=torch.zeros(1, len(tokens), dtype=torch.long),
            attention_mask=biases_H1T.masked_fill(later, float("-inf"))[None],
        ).logits[0]
