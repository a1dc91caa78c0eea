"""Models without weights at their real dimensions, but with two layers: the others make the same launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from realengine.ahead.setups import MODELS, Setup
from realengine.model.architecture import Architecture
from realengine.model.backend import TRITON
from realengine.model.decoder import Decoder
from realengine.model.decoders import decoder_of
from realengine.model.kv_cache import KvCache
from realengine.model.lora import AdapterBank
from realengine.model.quantization import QuantisedWeight, Weights, quantised
from realengine.runner.parallel import Group
from realengine.settings import DTYPES, KV_DTYPES
from realengine.weights.table import expected, shard

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_LORAS = 8
LAYERS = 2
INTEGERS = (torch.int32, torch.int64)


class Step(NamedTuple):
    """A named operation of the engine, whose launches are compiled."""

    name: str
    run: Callable[[], object]


def zero_model(setup: Setup, bank: AdapterBank | None = None) -> tuple[Decoder, KvCache]:
    """Returns the decoder of a setup, and the KV cache of all its layers, which block copies need."""
    architecture, dtype = MODELS[setup.model], DTYPES[setup.dtype]
    weights = zero_weights(cut(architecture), dtype, setup.quantization, setup.world_size)
    group, longest = FirstOf(0, setup.world_size), architecture.max_position_embeddings
    decoder = decoder_of(cut(architecture), weights, TRITON, longest, group, bank)
    kv_dtype = KV_DTYPES.get(setup.kv_cache_dtype, dtype)
    return decoder, KvCache(architecture, 4, BLOCK_SIZE, kv_dtype, CPU, setup.world_size)


def zero_weights(
    architecture: Architecture, dtype: torch.dtype, quantization: str | None, world_size: int
) -> Weights:
    """Returns any weights, integers zero, with the shapes and dtypes of `load_weights` for rank 0."""
    weights: Weights = {}
    for weight in shard(expected(architecture), 0, world_size):
        shape = torch.empty(weight.shape, dtype=dtype, device="meta")
        weights[weight.name] = _zeros(quantised(weight.name, shape, quantization))
    if architecture.tie_word_embeddings:
        embedding = weights["embedding.weight"]
        assert isinstance(embedding, torch.Tensor)
        weights["head.weight"] = embedding[: architecture.vocab_size // world_size]
    return weights


def _zeros(weight: torch.Tensor | QuantisedWeight) -> torch.Tensor | QuantisedWeight:
    if isinstance(weight, torch.Tensor):
        made = torch.empty if weight.is_floating_point() else torch.zeros  # no page of it is touched
        return made(weight.shape, dtype=weight.dtype)
    return type(weight)(*(_zeros(part) if isinstance(part, torch.Tensor) else part for part in weight))


def cut(architecture: Architecture) -> Architecture:
    """Returns an architecture with fewer layers."""
    return replace(architecture, num_layers=LAYERS)


class FirstOf(Group):
    """The first of several ranks, without the other processes."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x_SN: torch.Tensor) -> torch.Tensor:
        return x_SN.new_empty(len(x_SN), self.world_size * x_SN.shape[1])


class WithoutProducts(TorchFunctionMode):
    """Skips matrix products and look-ups of libraries, and makes integer tensors zero.

    Drawn tokens must be zero, because they are indices of the next step.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight = args[:2]
            return x.new_empty(*x.shape[:-1], len(weight))
        if func is F.embedding:
            tokens, weight = args[:2]
            return weight.new_empty(*tokens.shape, weight.shape[1])
        if func is torch.mm:
            return args[0].new_empty(len(args[0]), args[1].shape[1])
        if func is torch.bmm:
            return args[0].new_empty(*args[0].shape[:2], args[1].shape[2])
        if func is torch.empty and kwargs.get("dtype") in INTEGERS:
            func = torch.zeros
        if func is torch.Tensor.new_empty and args[0].dtype in INTEGERS:
            func = torch.Tensor.new_zeros
        return func(*args, **kwargs)
