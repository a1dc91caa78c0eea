"""Variants of attention and of experts that some families of models have, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSizes:
    """Multi-head latent attention (DeepSeek-V2, 2024): all heads' keys and values come from one row."""

    query_rank: int | None
    """Rank of the queries' projection; None: it is not factored."""
    rank: int
    """Numbers of a token's latent row without its rotated key."""
    nope_dim: int
    """Numbers of a head's query and key that are not rotated."""
    rope_dim: int
    """Numbers of a head's query that are rotated, and of the key that all heads share."""
    value_dim: int
    scale: float
    """Factor of the scores, that of a scaled RoPE included."""
    interleaved: bool = True
    """Whether RoPE rotates pairs (2i, 2i + 1); otherwise i and i + rope_dim / 2."""

    @property
    def width(self) -> int:
        """Numbers of a token's row in the cache."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmaParts:
    """Parts of Gemma 2 and 3: norms after each part, GELU, and embeddings times the root of H."""

    query_scale: float
    """Factor of the scores."""
    attention_softcap: float | None
    """Soft cap of the scores; None: none."""
    logits_softcap: float | None
    """Soft cap of the logits; None: none."""
    local_rope_theta: float | None
    """Base of the rotary positions of layers with a window; None: as in the other layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GptOssParts:
    """Parts of gpt-oss: attention sinks, biases, and experts with a clamped activation."""

    alpha: float
    limit: float
    is_packed: bool
    """Whether the checkpoint has the experts in MXFP4."""


class Scoring(Enum):
    """Function that turns the logits of a router into scores."""

    softmax = 0
    sigmoid = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRouting:
    """Rule by which a token's experts are chosen: those of the largest scores, in the best groups only."""

    scoring: Scoring = Scoring.softmax
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_choices: int = 1
    """Number of a group's largest scores whose sum is the group's score."""
    has_correction: bool = False
    """Whether a bias per expert is added to the scores for the choice, but not for the weights."""
    scale: float = 1.0
    """Factor of the weights."""
    epsilon: float = 0.0
    """Added to the sum by which weights are divided."""

    @property
    def is_greedy(self) -> bool:
        """True if the experts are those of the largest softmax scores."""
        return self.scoring is Scoring.softmax and self.num_chosen_groups == self.num_groups


GREEDY = ExpertRouting()
