"""A layer on hidden states of three depths drafts, with a vocabulary of its own.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025.
The target's hidden states are those that enter the layers 2, n / 2 and n - 3 of n, as in vLLM, unless the
draft's config.json names others. The attention reads [norm(embedding); norm(feature)]; the layer's output
before its last norm is the next feature.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from realengine.model.decoder import States
from realengine.model.kv_cache import KvCache
from realengine.model.linear import head_logits
from realengine.runner.batch import Batch
from realengine.speculation.checkpoints import LayerWeights, load_eagle3
from realengine.speculation.drafter import DrafterContext, LoadedDraft
from realengine.speculation.drafters.layer_steps import decoder_of, loaded_layers
from realengine.speculation.settings import SpeculationSettings

INPUT_NORM = "layers.0.attention_norm.weight"


def load(settings: SpeculationSettings, context: DrafterContext) -> LoadedDraft:
    """Loads the layer. Raises ValueError if it does not fit the target."""
    (source,) = settings.models
    return loaded_layers(Eagle3Layer, load_eagle3(source, context), settings, context)


class Eagle3Layer:
    """The layer of EAGLE-3, a `FeatureModel`."""

    def __init__(self, weights: LayerWeights, cache: KvCache, context: DrafterContext) -> None:
        self.cache = cache
        assert weights.options is not None
        self.taps: tuple[int, ...] = weights.options.taps
        self._norm_before_residual = weights.options.norm_before_residual
        self._kernels = context.backend
        self._eps = weights.architecture.rms_norm_eps
        self._decoder = decoder_of(weights, context)
        self._weights = weights.tensors
        self.vocab_size = len(weights.tensors["head.weight"])
        self._offsets = weights.token_offsets

    def features_of(self, states: States) -> torch.Tensor:
        """Returns the combination of the hidden states."""
        return F.linear(torch.cat(states.taps, dim=-1), self._weights["fc.weight"])

    def step(
        self, tokens_T: torch.Tensor, features_TH: torch.Tensor, batch: Batch, number: int
    ) -> torch.Tensor:
        """Computes the layer for tokens and the features before them."""
        kernels, eps, weights = self._kernels, self._eps, self._weights
        embedded = kernels.rms_norm(self._decoder.embed(tokens_T), weights[INPUT_NORM], eps)
        normed = kernels.rms_norm(features_TH, weights["layers.0.hidden_norm.weight"], eps)
        both = torch.cat([embedded, normed], dim=-1)
        attended = self._decoder.attend(0, both, batch, self.cache.layers[0])
        before_TH = normed if self._norm_before_residual else features_TH
        hidden, residual = kernels.add_rms_norm(attended, before_TH, weights["layers.0.mlp_norm.weight"], eps)
        output: torch.Tensor = self._decoder.mlp(0, hidden, batch) + residual
        return output

    def logits(self, features_NH: torch.Tensor, number: int) -> torch.Tensor:
        """Computes the logits of the draft's vocabulary."""
        normed = self._kernels.rms_norm(features_NH, self._weights["norm.weight"], self._eps)
        return head_logits(normed, self._weights["head.weight"])

    def tokens(self, drafted: torch.Tensor) -> torch.Tensor:
        """Returns the target's ids of draft tokens."""
        return drafted if self._offsets is None else drafted + self._offsets[drafted]
