"""The target's modules for multi-token prediction draft: one after the other, each for one token.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2. A module is a layer of the target's kind on
proj([norm(embedding); norm(feature)]); its output is the next feature, and normed, the input of the head. As
in vLLM the first module computes all rows of a pass, and step s uses module s modulo their number.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from policies.speculation.proposers import Mtp as Proposer
from realengine.model.decoder import States
from realengine.model.kv_cache import KvCache
from realengine.runner.batch import Batch
from realengine.speculation.checkpoints import LayerWeights, load_mtp
from realengine.speculation.drafter import DrafterContext, LoadedDraft
from realengine.speculation.drafters.layer_steps import decoder_of, loaded_layers
from realengine.speculation.settings import SpeculationSettings


def load(settings: SpeculationSettings, context: DrafterContext) -> LoadedDraft:
    """Loads the modules. Raises ValueError if they do not fit the target."""
    assert isinstance(settings.proposer, Proposer)
    source = settings.models[0] if settings.models else context.source or context.architecture
    num_modules = settings.proposer.num_nextn_predict_layers
    model_of = partial(MtpModules, num_modules=num_modules)
    return loaded_layers(model_of, load_mtp(source, context, num_modules), settings, context)


class MtpModules:
    """Modules for multi-token prediction, a `FeatureModel`."""

    taps: tuple[int, ...] = ()

    def __init__(
        self, weights: LayerWeights, cache: KvCache, context: DrafterContext, *, num_modules: int
    ) -> None:
        self.cache = cache
        self.vocab_size = context.architecture.vocab_size
        self._target = context.target
        self._kernels = context.backend
        self._eps = weights.architecture.rms_norm_eps
        self._decoder = decoder_of(weights, context)
        self._weights = weights.tensors
        self._num_modules = num_modules

    def features_of(self, states: States) -> torch.Tensor:
        """Returns the target's last hidden states."""
        return states.hidden_TH

    def step(
        self, tokens_T: torch.Tensor, features_TH: torch.Tensor, batch: Batch, number: int
    ) -> torch.Tensor:
        """Computes a module for tokens and the features before them."""
        module = number % self._num_modules
        embedded = self._normed(self._decoder.embed(tokens_T), f"{module}.enorm.weight")
        features = self._normed(features_TH, f"{module}.hnorm.weight")
        inputs_TH = F.linear(torch.cat([embedded, features], dim=-1), self._weights[f"{module}.proj.weight"])
        after = (self._num_modules,)
        states = self._decoder.states(batch, self.cache, layers=(module,), taps=after, inputs_TH=inputs_TH)
        return states.taps[0]

    def logits(self, features_NH: torch.Tensor, number: int) -> torch.Tensor:
        """Computes the logits with the target's head."""
        module = number % self._num_modules
        return self._target.head(self._normed(features_NH, f"{module}.norm.weight"))

    def tokens(self, drafted: torch.Tensor) -> torch.Tensor:
        """Returns the tokens: the vocabulary is the target's."""
        return drafted

    def _normed(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        normed: torch.Tensor = self._kernels.rms_norm(hidden, self._weights[name], self._eps)
        return normed
