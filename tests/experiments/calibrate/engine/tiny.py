"""A model of two layers whose measurement takes little time."""

from __future__ import annotations

from omegaconf import OmegaConf

from hwmodels.model import ModelSpec
from sim.settings.build import build

TINY = {
    "_target_": "hwmodels.hf.config.from_hf_fields",
    "name": "tiny",
    "source": "windtunnel/tiny",
    "dtype": "fp32",
    "weights": None,
    "config": {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 97,
        "max_position_embeddings": 256,
        "torch_dtype": "float32",
    },
}


def quiet(text: str) -> None:
    pass


def spec(**changes) -> ModelSpec:
    return build(OmegaConf.create({**TINY, **changes}), "model")
