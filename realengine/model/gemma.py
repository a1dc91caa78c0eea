"""A decoder for Gemma 2 and 3: norms after each part, GELU, caps, and two kinds of rotary positions."""

from __future__ import annotations

import torch

from kernels.attention import AttentionOptions
from kernels.rope_angles import cos_sin_table
from realengine.model.decoder import Decoder, dense
from realengine.model.quantization import Weights
from realengine.model.variants import GemmaParts
from realengine.runner.batch import Batch


class GemmaDecoder(Decoder):
    """A `Decoder` of Gemma 2 or 3. Its arguments are those of `Decoder`."""

    parts: GemmaParts

    def _prepare(self, weights: Weights, max_model_len: int) -> None:
        parts = self.architecture.gemma
        assert parts is not None
        self.parts = parts
        self._gate = self._backend.gelu_tanh_mul
        layers = range(self.architecture.num_layers)
        self._attention_norms, self._mlp_norms = (
            [dense(weights, f"layers.{i}.{of}.weight") for i in layers]
            for of in ("post_attention_norm", "post_mlp_norm")
        )
        embedding = dense(weights, "embedding.weight")
        self._embedding_scale = torch.tensor(
            self.architecture.hidden_size**0.5, dtype=embedding.dtype, device=embedding.device
        )
        self._local_table: torch.Tensor | None = None
        if parts.local_rope_theta is not None:
            self._local_table = cos_sin_table(
                self.architecture.head_dim,
                max_model_len,
                base=parts.local_rope_theta,
                device=embedding.device,
            )

    def _options(self, index: int, weights: Weights) -> AttentionOptions:
        return AttentionOptions(
            window=self.architecture.window(index),
            scale=self.parts.query_scale,
            softcap=self.parts.attention_softcap,
        )

    def _table(self, index: int) -> torch.Tensor:
        if self._local_table is None or self.architecture.window(index) is None:
            return super()._table(index)
        return self._local_table

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [T, H] of token ids, times the root of H."""
        return super().embed(tokens_T) * self._embedding_scale

    def head(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Computes the logits [T, V] of final hidden states, on every rank, with their cap."""
        logits_TV, cap = super().head(hidden_TH), self.parts.logits_softcap
        return logits_TV if cap is None else torch.tanh(logits_TV / cap) * cap

    def _output(self, index: int, attended_THD: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._normed(super()._output(index, attended_THD, batch), self._attention_norms[index])

    def mlp(self, index: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Computes the MLP of a layer, and normalises its output."""
        return self._normed(super().mlp(index, hidden, batch), self._mlp_norms[index])

    def _normed(self, x_TH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
        y_TH: torch.Tensor = self._backend.rms_norm(x_TH, weight_H, self.architecture.rms_norm_eps)
        return y_TH
