"""Names of engines for quantised weights (vLLM's --quantization), and what they mean for a checkpoint.

An engine loads a checkpoint that is quantised in the way that the name says, or quantises one of 16 bits
while it loads it ("online"), or refuses. The names are those of vLLM 0.32, SGLang 0.5 and TensorRT-LLM, and
those of earlier versions that posted commands still have.
"""

from __future__ import annotations

import difflib
from typing import NamedTuple

from hwmodels.hf.quantizers import MODELOPT
from hwmodels.model.quantization import WEIGHT_FORMATS


class Meaning(NamedTuple):
    """Meaning of an engine's name."""

    weights: str | None = None
    """Format of all weights; None: the name does not say, the checkpoint does."""
    moe_weights: str | None = None
    """Format of routed experts; None: as `weights`."""
    methods: tuple[str, ...] = ()
    """quant_method of the checkpoints that have it."""
    is_online: bool = False
    """Whether the engine quantises a checkpoint of 16 bits in this way while it loads it."""


AWQ, GPTQ = ("awq", "auto_awq", "awq_marlin"), ("gptq", "auto_gptq", "gptq_marlin", "gptqmodel")
FP8 = ("fp8", "finegrained_fp8", "fbgemm_fp8", "deepseek_v4_fp8")
OF_MODELOPT = ("modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "petit_nvfp4")
MXFP4 = ("mxfp4", "gpt_oss_mxfp4")
AUTO_ROUND = ("auto-round", "intel/auto-round", "inc")

ENGINE_NAMES: dict[str, Meaning] = {
    # vLLM 0.32: QUANTIZATION_METHODS.
    "awq": Meaning("int4_wo", methods=AWQ),
    "auto_awq": Meaning("int4_wo", methods=AWQ),
    "fp8": Meaning("fp8", methods=FP8, is_online=True),
    "fbgemm_fp8": Meaning("fp8", methods=FP8),
    "fp_quant": Meaning(methods=("fp_quant",)),
    "modelopt": Meaning("fp8", methods=OF_MODELOPT),
    "modelopt_fp4": Meaning("nvfp4", methods=OF_MODELOPT),
    "modelopt_mxfp8": Meaning("mxfp8", methods=OF_MODELOPT),
    "modelopt_mixed": Meaning(methods=OF_MODELOPT),
    "auto_gptq": Meaning("int4_wo", methods=GPTQ),
    "gptq": Meaning("int4_wo", methods=GPTQ),
    "gptq_marlin": Meaning("int4_wo", methods=GPTQ),
    "awq_marlin": Meaning("int4_wo", methods=AWQ),
    "humming": Meaning(methods=(*AWQ, *GPTQ, *FP8, *OF_MODELOPT, *MXFP4, "compressed-tensors")),
    "compressed-tensors": Meaning(methods=("compressed-tensors",)),
    "experts_int8": Meaning(moe_weights="int8_wo", methods=("experts_int8",), is_online=True),
    "quark": Meaning(methods=("quark",)),
    "moe_wna16": Meaning("int4_wo", methods=(*AWQ, *GPTQ)),
    "torchao": Meaning(methods=("torchao",)),
    "inc": Meaning(methods=AUTO_ROUND),
    "mxfp4": Meaning("mxfp4", methods=MXFP4, is_online=True),
    "gpt_oss_mxfp4": Meaning(moe_weights="mxfp4", methods=MXFP4),
    "deepseek_v4_fp8": Meaning("fp8_block", "mxfp4_mxfp8", methods=FP8),
    "online": Meaning(),
    "fp8_per_tensor": Meaning("fp8", methods=FP8, is_online=True),
    "fp8_per_block": Meaning("fp8_block", methods=FP8, is_online=True),
    "fp8_per_channel": Meaning("fp8", methods=FP8, is_online=True),
    "int8_per_channel_weight_only": Meaning(moe_weights="int8_wo", is_online=True),
    "nvfp4_per_token": Meaning(moe_weights="nvfp4", is_online=True),
    "mxfp8": Meaning("mxfp8", methods=("mxfp8", *OF_MODELOPT), is_online=True),
    # Earlier versions of vLLM.
    "bitsandbytes": Meaning("nf4", methods=("bitsandbytes",), is_online=True),
    "auto-round": Meaning("int4_wo", methods=AUTO_ROUND),
    "hqq": Meaning(methods=("hqq",)),
    "aqlm": Meaning("int2_wo", methods=("aqlm",)),
    "ptpc_fp8": Meaning("fp8", is_online=True),
    "tpu_int8": Meaning("int8_wo", is_online=True),
    "qqq": Meaning("int4_int8", methods=("qqq",)),
    "bitblas": Meaning("int4_wo", methods=(*AWQ, *GPTQ)),
    "gptq_bitblas": Meaning("int4_wo", methods=GPTQ),
    # SGLang 0.5.
    "modelopt_fp8": Meaning("fp8", methods=OF_MODELOPT),
    "nvfp4_online": Meaning("nvfp4", is_online=True),
    "blockwise_int8": Meaning("int8", methods=("blockwise_int8",)),
    "w8a8_int8": Meaning("int8", methods=("w8a8_int8",)),
    "w8a8_fp8": Meaning("fp8", methods=("w8a8_fp8",), is_online=True),
    "w4afp8": Meaning("fp8", "int4_fp8", methods=("w4afp8",)),
    "petit_nvfp4": Meaning("nvfp4_wo", methods=OF_MODELOPT),
    "quark_mxfp4": Meaning("mxfp4_mxfp4", is_online=True),
    "quark_int4fp8_moe": Meaning(moe_weights="int4_fp8", is_online=True),
    "auto-round-int8": Meaning("int8", methods=AUTO_ROUND),
    # TensorRT-LLM: quant_algo.
    **{name.lower(): Meaning(stored) for name, stored in MODELOPT.items() if name != "FP8"},
}
"""Engine's name -> its meaning. Those that are also formats of ours are taken as formats (`hf.asked`)."""

REFUSED = {
    "squeezellm": ("engines no longer serve it", "gptq"),
    "marlin": ("engines no longer serve it", "gptq_marlin"),
    "gptq_marlin_24": ("engines no longer serve 2:4 sparse weights in 4 bits", "gptq_marlin"),
    "deepspeedfp": ("engines no longer serve it", "fp8"),
    "neuron_quant": ("it is for chips that are not priced", "int8_wo"),
    "ipex": ("it is for CPUs", "awq"),
    "cpu_awq": ("it is for CPUs", "awq"),
    "gguf": ("the file says the format of each tensor", "int4_wo"),
    "modelslim": ("it is for chips that are not priced", "w8a8_int8"),
    "mxfp_w4a8": ("it is for chips that are not priced", "mxfp4_mxfp8"),
    "qoq": ("engines no longer serve it", "int4_int8"),
}
"""Names of engines that have no price: the reason, and the nearest name that has one."""

DESCRIBED = ("fp8", "int8", "int4_wo", "nvfp4")
"""Formats to choose from where a name leaves the format to the checkpoint."""


def meaning_of(name: str) -> Meaning | None:
    """Returns the meaning of an engine's name; None for a format of ours that is no engine's name.

    Raises ValueError for a name that has no price, and for one that is neither, with the nearest.
    """
    if name in REFUSED:
        reason, nearest = REFUSED[name]
        raise ValueError(f"weights={name}: cannot be priced, since {reason}; nearest: {nearest}")
    return ENGINE_NAMES.get(name)


def nearest_to(name: str) -> str:
    """Returns "; nearest: NAME" for a name that is not known, or nothing if none is like it."""
    found = difflib.get_close_matches(
        name.lower().replace("-", "_"), [*ENGINE_NAMES, *WEIGHT_FORMATS], 1, 0.5
    )
    return f"; nearest: {found[0]}" if found else ""
