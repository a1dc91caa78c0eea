"""Heads and layers in the layouts in which they are published: read by their names, or refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from realengine.serving.model import Model
from realengine.speculation.checkpoints import Eagle3Options, load_eagle, load_eagle3, load_heads, load_mtp
from realengine.weights.load import load_weights
from realengine.weights.table import expected
from tests.realengine.small_models import CONFIGS
from tests.realengine.small_models import make as make_llm
from tests.realengine.speculation.plain_layers import context_of
from tests.realengine.speculation.test_lossless import GREEDY, prompts, tokens_of

torch.set_num_threads(1)


def drawn(*shape):
    return torch.randn(*shape)


def hf_layer(prefix, spec, *, width=None, input_norm=True):
    """Returns random tensors of a layer with Hugging Face's names."""
    hidden, dim = spec.hidden_size, spec.head_dim
    width = width or hidden
    tensors = {
        "self_attn.q_proj.weight": drawn(spec.num_heads * dim, width),
        "self_attn.k_proj.weight": drawn(spec.num_kv_heads * dim, width),
        "self_attn.v_proj.weight": drawn(spec.num_kv_heads * dim, width),
        "self_attn.o_proj.weight": drawn(hidden, spec.num_heads * dim),
        "post_attention_layernorm.weight": drawn(hidden),
        "mlp.gate_proj.weight": drawn(spec.intermediate_size, hidden),
        "mlp.up_proj.weight": drawn(spec.intermediate_size, hidden),
        "mlp.down_proj.weight": drawn(hidden, spec.intermediate_size),
    }
    if input_norm:
        tensors["input_layernorm.weight"] = drawn(hidden)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def test_eagle_layers_are_read_by_their_published_names(tmp_path):
    context, _ = context_of()
    spec = context.architecture
    tensors = hf_layer("layers.0.", spec, input_norm=False) | {
        "fc.weight": drawn(spec.hidden_size, 2 * spec.hidden_size),
        "fc.bias": drawn(spec.hidden_size),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_eagle(tmp_path, context).tensors
    assert torch.equal(found["fc.bias"], tensors["fc.bias"])
    q = tensors["layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found["layers.0.qkv.weight"][: len(q)], q)
    assert "layers.0.attention_norm.weight" not in found


def test_eagle3_layers_are_read_by_their_published_names(tmp_path):
    context, _ = context_of()
    spec, hidden = context.architecture, context.architecture.hidden_size
    tensors = hf_layer("midlayer.", spec, width=2 * hidden) | {
        "midlayer.hidden_norm.weight": drawn(hidden),
        "fc.weight": drawn(hidden, 3 * hidden),
        "norm.weight": drawn(hidden),
        "lm_head.weight": drawn(40, hidden),
        "d2t": torch.arange(40),
        "t2d": torch.zeros(spec.vocab_size, dtype=torch.bool),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_eagle3(tmp_path, context)
    assert found.tensors["layers.0.qkv.weight"].shape[1] == 2 * hidden
    assert torch.equal(found.tensors["head.weight"], tensors["lm_head.weight"])
    assert found.token_offsets.tolist() == list(range(40))
    save_file(tensors | {"d2t": torch.full((40,), 90)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="d2t names token 129, must be >= 0 and < 97"):
        load_eagle3(tmp_path, context)
    save_file({name: t for name, t in tensors.items() if name != "d2t"}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="d2t is missing: its vocabulary has 40 tokens, and the target's 97"):
        load_eagle3(tmp_path, context)


def test_eagle3_layers_of_speculators_are_read_with_their_options(tmp_path):
    context, _ = context_of()
    spec, hidden = context.architecture, context.architecture.hidden_size
    tensors = hf_layer("layers.0.", spec, width=2 * hidden) | {
        "layers.0.hidden_norm.weight": drawn(hidden),
        "fc.weight": drawn(hidden, 2 * hidden),
        "norm.weight": drawn(hidden),
        "lm_head.weight": drawn(spec.vocab_size, hidden),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    inside = {key: value for key, value in CONFIGS["llama"].items() if key != "architectures"}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "eagle_aux_hidden_state_layer_ids": [1, 2],
        "transformer_layer_config": inside | {"num_hidden_layers": 1},
    }

    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))

    write()
    found = load_eagle3(tmp_path, context)
    assert found.options == Eagle3Options((1, 2), norm_before_residual=True)
    assert torch.equal(found.tensors["fc.weight"], tensors["fc.weight"])
    write(norm_before_residual=False)
    assert not load_eagle3(tmp_path, context).options.norm_before_residual
    write(eagle_aux_hidden_state_layer_ids=[1, 9])
    with pytest.raises(ValueError, match=r"layer_ids=\[1, 9\]: must be a list of layers from 0 to 2"):
        load_eagle3(tmp_path, context)
    write(norm_before_fc=True)
    with pytest.raises(ValueError, match=r"config.json: norm_before_fc=true is not supported"):
        load_eagle3(tmp_path, context)


@pytest.mark.parametrize("layout", ["mtp", "deepseek"])
def test_modules_beside_the_target_s_weights_draft_by_default(tmp_path, layout):
    spec = Architecture.from_hf(CONFIGS["llama"])
    target = load_weights(None, spec, torch.float32, "cpu", seed=1)
    stored = {}
    for weight in expected(spec):
        for part in weight.parts:
            stored[part.name] = target[weight.name][part.into].contiguous()
    prefix = "mtp.layers.0." if layout == "mtp" else f"model.layers.{spec.num_layers}."
    norms = {
        "mtp": ("mtp.pre_fc_norm_embedding.", "mtp.pre_fc_norm_hidden.", "mtp.fc.", "mtp.norm."),
        "deepseek": tuple(prefix + name for name in ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")),
    }[layout]
    hidden = spec.hidden_size
    module = hf_layer(prefix, spec) | {
        f"{name}weight": drawn(hidden, 2 * hidden) if number == 2 else drawn(hidden)
        for number, name in enumerate(norms)
    }
    save_file(stored | module, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    model = Model(Architecture.from_path(tmp_path), tmp_path, None)
    settings = {"device": "cpu", "num_kv_blocks": 200, "max_num_seqs": 8}
    llm = LLM(model, **settings, speculative_config={"method": "mtp"})
    outputs = llm.generate(prompts(), GREEDY)
    assert tokens_of(outputs) == tokens_of(make_llm().generate(prompts(), GREEDY))
    assert all(output.drafts.num_draft_tokens > 0 for output in outputs)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no modules for multi-token prediction, neither mtp"):
        LLM(model, **settings, speculative_config={"method": "mtp"})


@pytest.mark.parametrize("layout", ["mtp", "deepseek"])
def test_modules_are_read_by_their_published_names(tmp_path, layout):
    context, _ = context_of()
    spec, hidden = context.architecture, context.architecture.hidden_size
    n = spec.num_layers
    names = {
        "mtp": (
            "mtp.layers.0.",
            "mtp.pre_fc_norm_embedding.",
            "mtp.pre_fc_norm_hidden.",
            "mtp.fc.",
            "mtp.norm.",
        ),
        "deepseek": tuple(
            f"model.layers.{n}.{each}" for each in ("", "enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")
        ),
    }
    prefix, enorm, hnorm, proj, norm = names[layout]
    tensors = hf_layer(prefix, spec) | {
        f"{enorm}weight": drawn(hidden),
        f"{hnorm}weight": drawn(hidden),
        f"{proj}weight": drawn(hidden, 2 * hidden),
        f"{norm}weight": drawn(hidden),
        "model.layers.0.of.the.target": drawn(3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_mtp(tmp_path, context, 1).tensors
    assert torch.equal(found["0.proj.weight"], tensors[f"{proj}weight"])
    assert torch.equal(found["layers.0.down.weight"], tensors[f"{prefix}mlp.down_proj.weight"])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("before", ["", "medusa_heads."])
def test_heads_in_vllm_s_layout_may_have_biases_and_a_prefix(tmp_path, before, has_bias):
    context, _ = context_of()
    hidden, vocab = context.architecture.hidden_size, context.architecture.vocab_size
    tensors = {}
    for i in range(2):
        tensors[f"{before}blocks.{i}.layers.0.weight"] = drawn(hidden, hidden)
        tensors[f"{before}lm_heads.{i}.weight"] = drawn(vocab, hidden)
        if has_bias:
            tensors[f"{before}blocks.{i}.layers.0.bias"] = drawn(hidden)
    save_file(tensors, tmp_path / "model.safetensors")
    (((weight, bias),), _), _ = load_heads(tmp_path, context, 2)
    assert torch.equal(weight, tensors[f"{before}blocks.0.layers.0.weight"])
    assert (bias is not None) == has_bias


@pytest.mark.parametrize("layout", ["published", "vllm"])
def test_heads_are_read_by_their_published_names(tmp_path, layout):
    context, _ = context_of()
    hidden, vocab = context.architecture.hidden_size, context.architecture.vocab_size
    tensors = {}
    for i in range(3):
        if layout == "published":
            tensors[f"{i}.0.linear.weight"] = drawn(hidden, hidden)
            tensors[f"{i}.0.linear.bias"] = drawn(hidden)
            tensors[f"{i}.1.weight"] = drawn(vocab, hidden)
        else:
            tensors[f"blocks.{i}.layers.0.weight"] = drawn(hidden, hidden)
            tensors[f"lm_heads.{i}.weight"] = drawn(vocab, hidden)
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    heads = load_heads(tmp_path, context, 2)
    assert len(heads) == 3
    ((_, bias),), projection = heads[1]
    assert (bias is None) == (layout == "vllm")
    assert torch.equal(projection, tensors["1.1.weight" if layout == "published" else "lm_heads.1.weight"])
    with pytest.raises(ValueError, match="has 3 heads, and a draft has 4 places; set num_speculative_tokens"):
        load_heads(tmp_path, context, 4)
    save_file(tensors | {next(iter(tensors)): drawn(3, hidden)}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=rf"is \[3, {hidden}\], must be \[{hidden}, {hidden}\]"):
        load_heads(tmp_path, context, 2)


def test_layers_that_do_not_fit_are_refused(tmp_path):
    context, _ = context_of()
    spec = context.architecture
    with pytest.raises(ValueError, match="hidden_size=32: must be 48, the target's"):
        load_eagle(replace(spec, hidden_size=32), context)
    tensors = hf_layer("layers.0.", spec, input_norm=False)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: fc\.weight"):
        load_eagle(tmp_path, context)
    save_file(
        tensors | {"fc.weight": drawn(spec.hidden_size, 2 * spec.hidden_size), "more": drawn(2)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match="unknown to this architecture, so outputs would be wrong: more"):
        load_eagle(tmp_path, context)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="contains no safetensors file"):
        load_heads(tmp_path, context, 2)
