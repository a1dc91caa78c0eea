"""Folders of adapters as PEFT writes them: read, or refused by name."""

from __future__ import annotations

import json
import math

import pytest
import torch

from realengine.model.lora_adapter import linear_layers
from realengine.weights.lora_checkpoint import read_adapter
from tests.realengine.checkpoints import LLAMA
from tests.realengine.model.lora_models import Q0, SIZES, SPEC, delta

safetensors_torch = pytest.importorskip("safetensors.torch", reason="reads the package safetensors")
torch.set_num_threads(1)


def tensors_of(modules, ranks=4):
    """Pairs for modules such as "0.self_attn.q_proj"; ranks: of all, or by module."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for module in modules:
        num_out, num_in = SIZES[module.partition(".")[2]]
        rank = ranks if isinstance(ranks, int) else ranks[module]
        name = f"base_model.model.model.layers.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator)
    return tensors


QV = [f"{i}.self_attn.{x}_proj" for i in range(2) for x in "qv"]
CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "lora_dropout": 0.05,
    "base_model_name_or_path": "some/base",
    "loftq_config": {},
    "modules_to_save": None,
}


def write(folder, config=(), tensors=None):
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **dict(config)}))
    safetensors_torch.save_file(
        tensors_of(QV) if tensors is None else tensors, folder / "adapter_model.safetensors"
    )
    return folder


def test_reads_each_pair_and_scales_by_alpha_over_rank(tmp_path):
    adapter = read_adapter(write(tmp_path), SPEC)
    stored = tensors_of(QV)
    assert adapter.scaling == 2.0
    assert set(adapter.layers) == {f"model.layers.{module}" for module in QV}
    for name, pair in adapter.layers.items():
        assert torch.equal(pair.a_RK, stored[f"base_model.model.{name}.lora_A.weight"])
        assert torch.equal(pair.b_NR, stored[f"base_model.model.{name}.lora_B.weight"])


def test_rslora_scales_by_alpha_over_the_root_of_the_rank(tmp_path):
    assert read_adapter(write(tmp_path, {"use_rslora": True}), SPEC).scaling == 4.0


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_pattern_gives_a_layer_its_own_rank_and_alpha(tmp_path, use_rslora):
    config = {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "^q_proj": 3},
        "alpha_pattern": {"v_proj": 3},
        "use_rslora": use_rslora,
    }
    stored = tensors_of(QV, {module: 2 if module == QV[2] else 4 for module in QV})
    adapter = read_adapter(write(tmp_path, config, stored), SPEC)
    root = math.sqrt if use_rslora else float
    scalings = [8 / root(4), 3 / root(4), 8 / root(2), 3 / root(4)]
    for module, scaling in zip(QV, scalings, strict=True):
        name = f"model.layers.{module}"
        a, b = (stored[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
        torch.testing.assert_close(delta(adapter, name), scaling * b @ a, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        ({"target_modules": "all-linear"}, [f"{i}.{name}" for i in range(2) for name in SIZES]),
        ({"target_modules": r".*layers\.1\..*(q|down)_proj"}, ["1.self_attn.q_proj", "1.mlp.down_proj"]),
        ({"target_modules": ["model.layers.1.mlp.up_proj"]}, ["1.mlp.up_proj"]),
        ({"target_modules": ["up_proj"], "layers_to_transform": 1}, ["1.mlp.up_proj"]),
        ({"target_modules": ["up_proj"], "layers_to_transform": [0]}, ["0.mlp.up_proj"]),
        (
            {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["0.self_attn.v_proj"]},
            [QV[0], *QV[2:]],
        ),
        ({"target_modules": "all-linear", "exclude_modules": ".*mlp.*|.*[kvo]_proj"}, [QV[0], QV[2]]),
    ],
)
def test_reads_what_target_modules_name_and_nothing_else(tmp_path, config, modules):
    adapter = read_adapter(write(tmp_path, config, tensors_of(modules)), SPEC)
    assert set(adapter.layers) == {f"model.layers.{module}" for module in modules}
    stray = tensors_of([*modules, "0.self_attn.k_proj"])
    if "0.self_attn.k_proj" not in modules:
        with pytest.raises(ValueError, match=r"k_proj\.lora_A\.weight: not among the target_modules"):
            read_adapter(write(tmp_path, config, stray), SPEC)
    short = {name: x for name, x in tensors_of(modules).items() if modules[-1] not in name}
    with pytest.raises(ValueError, match=f"missing: .*{modules[-1]}"):
        read_adapter(write(tmp_path, config, short), SPEC)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, 'peft_type="IA3": must be LORA'),
        ({"r": 0}, "r=0: must be a whole number >= 1"),
        ({"r": 65}, "rank 65: must be <= 64"),
        ({"rank_pattern": {"q_proj": 65}}, "rank 65: must be <= 64"),
        ({"rank_pattern": {"q_proj": 0.5}}, "rank_pattern.q_proj=0.5: must be a whole number"),
        ({"rank_pattern": {"(": 1}}, "rank_pattern=.*not a regular expression"),
        ({"lora_alpha": None}, "lora_alpha=null: must be a number > 0"),
        ({"bias": "lora_only"}, 'bias="lora_only": biases are not adapted'),
        ({"use_dora": True}, "use_dora=true: DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*whole modules"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters=.*experts"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=.*embeddings"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights="pissa".*changed weights'),
        ({"some_new_switch": {"a": 1}}, "some_new_switch=.*unknown option"),
        ({"target_modules": None}, "target_modules=null: must be a list of names, or a regular"),
        ({"target_modules": "[a"}, r"target_modules=\"\[a\": not a regular expression"),
        (
            {"target_modules": ["q_proj", "c_attn"]},
            "target_modules=c_attn: matches no linear layer.*q_proj, k_proj",
        ),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules: lm_head: .*not adapted"),
        (
            {"target_modules": r"model\.(embed_tokens|layers\.0\..*q_proj)"},
            "model.embed_tokens: .*not adapted",
        ),
        (
            {"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]},
            "exclude_modules and layers_to_transform exclude all",
        ),
        ({"layers_to_transform": "0"}, 'layers_to_transform="0": must be'),
        ({"layers_to_transform": [7]}, "exclude all of them"),
        ({"layers_to_transform": 0, "layers_pattern": "h"}, "the model's list is called layers"),
        ({"r": 8}, r"q_proj.lora_A.weight has shape \[4, 32\], must have \[8, 32\] for rank 8"),
    ],
)
def test_refuses_what_it_does_not_compute(tmp_path, config, message):
    with pytest.raises(ValueError, match=message) as refused:
        read_adapter(write(tmp_path, config), SPEC)
    assert str(refused.value).startswith(str(tmp_path))


def changed(of, to):
    tensors = tensors_of(QV)
    key = f"base_model.model.{Q0}.{of}.weight"
    return {**tensors, key: to(tensors[key])}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            changed("lora_B", lambda b: b[:-1]),
            r"q_proj.lora_B.weight has shape \[31, 4\], must have \[32, 4\].*some/base",
        ),
        (
            changed("lora_A", lambda a: a[:, :16]),
            r"q_proj.lora_A.weight has shape \[4, 16\], must have \[4, 32\]",
        ),
        (changed("lora_A", lambda a: a[0]), r"q_proj.lora_A.weight has shape \[32\], must have \[4, 32\]"),
        (changed("lora_A", lambda a: a * math.inf), "q_proj.lora_A.weight: contains infinite numbers or NaN"),
        (changed("lora_A", lambda a: a.to(torch.int8)), "q_proj.lora_A.weight is I8"),
        ({"base_model.model.lm_head.weight": torch.ones(2)}, "lm_head.weight: not supported"),
        (
            {
                **tensors_of(QV),
                "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight": torch.ones(2),
            },
            "layers.0.mlp.experts.1.up_proj: not supported",
        ),
        (tensors_of([*QV, "2.self_attn.q_proj"]), "layers.2.self_attn.q_proj: the model has only 2 layers"),
        (tensors_of(QV[:2]), "missing: .*layers.1.self_attn.q_proj.lora_A.weight.* and 1 more"),
    ],
)
def test_refuses_tensors_that_do_not_fit(tmp_path, tensors, message):
    with pytest.raises(ValueError, match=message):
        read_adapter(write(tmp_path, (), {name: x.contiguous() for name, x in tensors.items()}), SPEC)


def test_names_missing_and_truncated_files(tmp_path):
    with pytest.raises(ValueError, match=r"no adapter_config.json; an adapter is a folder"):
        read_adapter(tmp_path, SPEC)
    file = write(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: truncated: .* ends at byte"):
        read_adapter(tmp_path, SPEC)
    file.unlink()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: no such file"):
        read_adapter(tmp_path, SPEC)


@pytest.mark.parametrize("switches", [{}, {"use_rslora": True}, {"target_modules": "all-linear"}])
def test_merged_weights_equal_those_of_the_peft_library(tmp_path, switches):
    peft = pytest.importorskip("peft", reason="compares with the package peft")
    transformers = pytest.importorskip("transformers", reason="compares with the package transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": r".*(q|k|down)_proj",
        "rank_pattern": {"0.self_attn.q_proj": 3, "down_proj": 2},
        "alpha_pattern": {"k_proj": 5},
        "init_lora_weights": False,  # B is random too
    }
    model = peft.get_peft_model(model, peft.LoraConfig(**config | switches))
    model.save_pretrained(tmp_path)
    merged = model.merge_and_unload().state_dict()
    adapter = read_adapter(tmp_path, SPEC)
    for name in linear_layers(SPEC):
        expected = (merged[f"{name}.weight"] - before[f"{name}.weight"]).double()
        found = delta(adapter, name) if name in adapter.layers else torch.zeros_like(expected)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
