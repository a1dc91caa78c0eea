"""A layer on the target's last hidden states drafts.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", ICML 2024. The layer reads
fc([embedding of the token; hidden state before it]); its output stands for the target's next hidden state,
so the target's head gives the logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from realengine.model.decoder import States
from realengine.model.kv_cache import KvCache
from realengine.runner.batch import Batch
from realengine.speculation.checkpoints import LayerWeights, load_eagle
from realengine.speculation.drafter import DrafterContext, LoadedDraft
from realengine.speculation.drafters.layer_steps import decoder_of, loaded_layers
from realengine.speculation.settings import SpeculationSettings


def load(settings: SpeculationSettings, context: DrafterContext) -> LoadedDraft:
    """Loads the layer. Raises ValueError if it does not fit the target."""
    (source,) = settings.models
    return loaded_layers(EagleLayer, load_eagle(source, context), settings, context)


class EagleLayer:
    """The layer of EAGLE, a `FeatureModel`."""

    taps: tuple[int, ...] = ()

    def __init__(self, weights: LayerWeights, cache: KvCache, context: DrafterContext) -> None:
        self.cache = cache
        self.vocab_size = context.architecture.vocab_size
        self._target = context.target
        self._decoder = decoder_of(weights, context)
        self._fc, self._bias = weights.tensors["fc.weight"], weights.tensors.get("fc.bias")

    def features_of(self, states: States) -> torch.Tensor:
        """Returns the target's last hidden states."""
        return states.hidden_TH

    def step(
        self, tokens_T: torch.Tensor, features_TH: torch.Tensor, batch: Batch, number: int
    ) -> torch.Tensor:
        """Computes the layer for tokens and the features before them."""
        both = torch.cat([self._decoder.embed(tokens_T), features_TH], dim=-1)
        inputs_TH = F.linear(both, self._fc, self._bias)
        return self._decoder.states(batch, self.cache, taps=(1,), inputs_TH=inputs_TH).taps[0]

    def logits(self, features_NH: torch.Tensor, number: int) -> torch.Tensor:
        """Computes the logits with the target's head."""
        return self._target.head(features_NH)

    def tokens(self, drafted: torch.Tensor) -> torch.Tensor:
        """Returns the tokens: the vocabulary is the target's."""
        return drafted
