"""Models without weights at their real dimensions, but with two layers: the others make the same launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from realengine.model.architecture import Architecture
from realengine.model.backend import TRITON, Backend
from realengine.model.decoder import Decoder
from realengine.model.decoders import decoder_of
from realengine.model.kv_cache import KvCache
from realengine.model.lora import AdapterBank
from realengine.model.quantization import QuantisedWeight, Weights, quantised
from realengine.runner.parallel import Group
from realengine.weights.table import expected, shard

CPU = torch.device("cpu")
LAYERS = 2
INTEGERS = (torch.int32, torch.int64)


class Step(NamedTuple):
    """A named operation of the engine, whose launches are compiled."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShape:
    """The sizes and formats on which the launches of one rank depend. max_num_tokens: of the largest step."""

    architecture: Architecture
    dtype: torch.dtype
    kv_dtype: torch.dtype
    quantization: str | None
    world_size: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_tokens: int
    max_loras: int = 0
    max_rank: int = 0
    backend: Backend = TRITON

    def bank(self) -> AdapterBank | None:
        """Returns the slots of the adapters; None if none are served."""
        if not self.max_loras:
            return None
        sizes = {"max_loras": self.max_loras, "max_rank": self.max_rank}
        return AdapterBank(cut(self.architecture), self.backend, self.dtype, CPU, **sizes)

    def model(self, bank: AdapterBank | None = None) -> tuple[Decoder, KvCache]:
        """Returns the decoder, and the KV cache of all its layers, which block copies need."""
        architecture = cut(self.architecture)
        quantization = "w4a16" if architecture.packed is not None else self.quantization
        weights = zero_weights(architecture, self.dtype, quantization, self.world_size)
        group = FirstOf(0, self.world_size)
        decoder = decoder_of(architecture, weights, self.backend, self.max_model_len, group, bank)
        return decoder, KvCache(self.architecture, 4, self.block_size, self.kv_dtype, CPU, self.world_size)


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
    """Skips matrix products and look-ups of libraries, and makes integer tensors and random weights zero.

    Drawn tokens must be zero, because they are indices of the next step; drawn weights take time and memory.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.linear, F.embedding, torch.mm, torch.bmm):
            x, y = args[:2]
            if func is F.embedding:
                return y.new_empty(*x.shape, y.shape[1])
            return x.new_empty(*x.shape[:-1], len(y) if func is F.linear else y.shape[-1])
        if func is torch.Tensor.normal_:
            return args[0].new_zeros(args[0].shape)
        if func is torch.empty and kwargs.get("dtype") in INTEGERS:
            func = torch.zeros
        if func is torch.Tensor.new_empty and args[0].dtype in INTEGERS:
            func = torch.Tensor.new_zeros
        return func(*args, **kwargs)
