"""Acceptance by a coin, for timings with random weights, whose own acceptance is close to nil.

Passes, drafts and the kernels of acceptance are those of the engine, but a coin decides how many draft tokens
of a chain are accepted. So outputs mean nothing, and such an engine is good for timings alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from kernels.rejection import Matched
from policies.speculation.proposers.ngram import Ngram
from realengine.model.backend import Backend
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.runner import rank
from realengine.speculation.executor import SpeculativeExecutor
from realengine.speculation.host import NgramDrafter


class Coin:
    """Accepts draft tokens one after the other, each with probability `rate`, which may be changed.

    The rate is on the device, so that graphs which have been captured read the new one.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._on_device: torch.Tensor | None = None

    @property
    def rate(self) -> float:
        """Probability that a draft token is accepted after those before it."""
        return self._rate

    @rate.setter
    @torch.inference_mode()
    def rate(self, rate: float) -> None:
        self._rate = rate
        if self._on_device is not None:
            self._on_device.fill_(rate)

    def match(
        self,
        match_drafts: Callable[..., Matched],
        tokens_T: torch.Tensor,
        drawn_R: torch.Tensor,
        starts_B: torch.Tensor,
        max_depth: int,
        parents_R: torch.Tensor | None = None,
    ) -> Matched:
        """Runs match_drafts, for its time, and returns the coin's verdict. Raises ValueError for trees."""
        if parents_R is not None:
            raise ValueError("parents_R: the coin accepts chains only; measure a proposer without a tree")
        match_drafts(tokens_T, drawn_R, starts_B, max_depth, parents_R)
        if self._on_device is None:
            self._on_device = torch.full((), self._rate, device=drawn_R.device)
        levels = torch.arange(max_depth + 1, device=drawn_R.device)
        rows_BK = starts_B[:-1, None].long() + levels[1:]
        is_draft = (rows_BK < starts_B[1:, None]) & (tokens_T[rows_BK.clamp(max=len(drawn_R) - 1)] >= 0)
        is_right = is_draft & (torch.rand(rows_BK.shape, device=drawn_R.device) < self._on_device)
        accepted_B = is_right.long().cumprod(dim=1).sum(dim=1)
        rows_BD = starts_B[:-1, None].long() + torch.minimum(levels, accepted_B[:, None])
        return Matched(accepted_B, drawn_R[rows_BD], rows_BD)


class ScriptedExecutor(SpeculativeExecutor):
    """A `SpeculativeExecutor` whose draft tokens are accepted by a coin."""

    def __init__(
        self, decoder: Decoder, cache: KvCache, backend: Backend, *, coin: Coin, **settings: Any
    ) -> None:
        by_coin = backend._replace(match_drafts=partial(coin.match, backend.match_drafts))
        super().__init__(decoder, cache, by_coin, **settings)


@contextmanager
def accepting(coin: Coin) -> Iterator[None]:
    """Makes the engines that are built within accept draft tokens by a coin."""
    with mock.patch.object(rank, "SpeculativeExecutor", partial(ScriptedExecutor, coin=coin)):
        yield


class CopiedStream:
    """Looks up n-grams as if the output copied the prompt, over and over: each lookup finds draft tokens.

    Random weights copy nothing, so the lookup would hardly ever draft on their own output.
    """

    def __init__(self, proposer: Ngram) -> None:
        self._lookup = NgramDrafter(proposer)

    def draft(
        self, request_id: int, prompt: Sequence[int], output: Sequence[int], num_tokens: int
    ) -> list[int]:
        """Returns the draft tokens that the lookup finds."""
        num_copies = -(-len(output) // len(prompt))
        return self._lookup.draft(request_id, prompt, (list(prompt) * num_copies)[: len(output)], num_tokens)

    def forget(self, request_id: int, output: Sequence[int]) -> None:
        """Forgets a request."""
        self._lookup.forget(request_id, output)
