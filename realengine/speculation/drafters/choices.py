"""The choice of draft tokens from a draft's logits: the likeliest, or drawn from its distribution.

Drawn tokens come with the distribution q = softmax(logits / temperature) that they were drawn from, which
rejection sampling needs (Leviathan et al., ICML 2023, section 2.3). Filters of the request (top-k and others)
do not apply to q: the target's distribution has them. A draw depends on seed, request and position only, and
its seed is another one than that of the target's draw at the same position.

Letters of array names: N sequences, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from kernels.sampling import Sampling
from realengine.model.backend import Backend

DRAFT_SEED = 0x5DEECE66D1F1A7C3
"""Differs from the seeds of requests in as many bits as two random numbers do; combined by exclusive or."""


class Choice(Protocol):
    """Chooses the draft tokens of the steps of one draft, in their order."""

    @property
    def probs_NKV(self) -> torch.Tensor | None:
        """The distributions from which the tokens were drawn; None: they were the likeliest."""
        ...

    def tokens(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Chooses the tokens [N] of the next step."""
        ...


class Likeliest:
    """Chooses the likeliest tokens."""

    probs_NKV: None = None

    def __init__(self, backend: Backend) -> None:
        self._greedy: Callable[[torch.Tensor], torch.Tensor] = backend.greedy

    def tokens(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Returns the index of each row's largest logit."""
        return self._greedy(logits_NV)


class Drawn:
    """Draws tokens; at temperature 0 it chooses the likeliest.

    sampling: settings of the sequences, with the positions of their first draft tokens.
    """

    def __init__(self, backend: Backend, sampling: Sampling) -> None:
        self._sample = backend.sample
        self._sampling = replace(
            sampling,
            top_k=torch.zeros_like(sampling.top_k),
            top_p=torch.ones_like(sampling.top_p),
            min_p=torch.zeros_like(sampling.min_p),
            seed=sampling.seed ^ DRAFT_SEED,
        )
        self._probs: list[torch.Tensor] = []

    @property
    def probs_NKV(self) -> torch.Tensor:
        """The distributions from which the tokens of all steps were drawn."""
        return torch.stack(self._probs, dim=1)

    def tokens(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Draws the tokens of the next step, with the random numbers of their positions."""
        position = self._sampling.position + len(self._probs)
        drawn_N: torch.Tensor = self._sample(logits_NV, replace(self._sampling, position=position))
        temperature = self._sampling.temperature[:, None]
        is_drawn = temperature > 0
        probs_NV = torch.softmax(logits_NV.float() / torch.where(is_drawn, temperature, 1.0), dim=-1)
        certain_NV = torch.zeros_like(probs_NV).scatter_(1, drawn_N[:, None], 1.0)
        self._probs.append(torch.where(is_drawn, probs_NV, certain_NV))
        return drawn_N


def choice_of(backend: Backend, sampling: Sampling | None, *, is_drawn: bool) -> Choice:
    """Returns the choice for sequences; sampling: their settings, None if all of them are greedy."""
    return Drawn(backend, sampling) if is_drawn and sampling is not None else Likeliest(backend)
