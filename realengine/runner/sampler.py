"""Draws tokens from logits with the settings of their requests; keeps the counts and biases of slots."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kernels.sampling import DraftRows, count_tokens, mark_prompt
from realengine.model.backend import Backend
from realengine.runner.batch import Upload
from realengine.runner.graphs import Drawn, Logprobs
from realengine.runner.token_masks import AllowedTokens, Biases, SlotBiases
from realengine.runner.work import SAMPLING, Draw, PenaltyInit, RowSettings, Work, pack_sampling


class Sampler:
    """Draws tokens on one device. num_slots: number of sequences; one more row is for padding."""

    def __init__(
        self, backend: Backend, upload: Upload, device: torch.device, *, num_slots: int, vocab_size: int
    ) -> None:
        self._backend = backend
        self._upload = upload
        self._device = device
        self._size = (num_slots + 1, vocab_size)
        self._counts_SV: torch.Tensor | None = None  # token counts for penalties; allocated on first use
        self._biases: Biases | None = None  # None: no request had any
        self._allowed_now: AllowedTokens | None = None  # of the present step

    def prepare(self, work: Work) -> None:
        """Takes note of what a step changes in slots, and of the tokens that its rows may draw."""
        for init in work.penalty_inits:
            self._init_penalties(init)
        for changed in work.biases:
            self._set_biases(changed)
        self._allowed_now = work.allowed

    def draw(
        self,
        logits_RV: torch.Tensor,
        way: Draw,
        settings: RowSettings | None,
        slots_R: torch.Tensor,
        positions_R: torch.Tensor,
        *,
        counts: tuple[torch.Tensor, torch.Tensor] | None = None,
        drafts: DraftRows | None = None,
    ) -> torch.Tensor:
        """Draws a token for each row of logits.

        settings: None if all rows are greedy. positions_R: of the tokens to draw. counts: token counts
        [rows, V], and the row of each row of logits in them; None: those of its slot. drafts: draft tokens
        that were drawn from a distribution, which are accepted or replaced.
        """
        if way is Draw.greedy:
            return self._backend.greedy(logits_RV)
        assert settings is not None
        penalties = None
        if way is Draw.penalised:
            penalties = settings.penalties(*(counts or (self.counts(), slots_R)))
            if self._biases is not None:
                logits_RV = self._biases.added(logits_RV, slots_R, positions_R)
            if self._allowed_now is not None:
                logits_RV = self._allowed_now.masked(logits_RV)
        return self._backend.sample(logits_RV, settings.sampling(positions_R), penalties, drafts=drafts)

    def counts(self) -> torch.Tensor:
        """Returns the token counts of all slots."""
        if self._counts_SV is None:
            self._counts_SV = torch.zeros(self._size, dtype=torch.int32, device=self._device)
        return self._counts_SV

    @torch.inference_mode()
    def warm_up(self, dtype: torch.dtype) -> None:
        """Draws a token with penalties, whose counts are those of one row. dtype: of the logits."""
        words = self._upload.copied(pack_sampling(np.zeros(1, SAMPLING)))
        settings, row_S = RowSettings.of(words), torch.zeros(1, dtype=torch.int64, device=self._device)
        vocab_size = self._size[1]
        counts_SV = torch.zeros(1, vocab_size, dtype=torch.int32, device=self._device)
        logits_SV = torch.zeros(1, vocab_size, dtype=dtype, device=self._device)
        self._backend.sample(logits_SV, settings.sampling(row_S), settings.penalties(counts_SV, row_S))

    def _init_penalties(self, init: PenaltyInit) -> None:
        """Initialises the token counts of a sequence with penalties in its slot."""
        counts_SV = self.counts()
        tokens = self._upload.copied(init.tokens).long()
        mark_prompt(counts_SV, init.slot, tokens[: init.num_prompt])
        drawn = tokens[init.num_prompt :]
        count_tokens(counts_SV, torch.full_like(drawn, init.slot), drawn)

    def _set_biases(self, changed: SlotBiases) -> None:
        if self._biases is None:
            self._biases = Biases(self._size[0], self._device)
        self._biases.set(changed)


def logprobs_of(logits_SV: torch.Tensor, tokens_S: torch.Tensor, num_top: int) -> Logprobs:
    """Computes log-probabilities of the model's own distribution, before temperature and penalties."""
    logprobs_SV = logits_SV.float().log_softmax(-1)
    top = logprobs_SV.topk(num_top, dim=-1)
    return Logprobs(logprobs_SV.gather(1, tokens_S[:, None])[:, 0], top.values, top.indices)


def with_prompt_logprobs(
    drawn: Drawn | None,
    states_PH: torch.Tensor,
    tokens_P: torch.Tensor,
    num_top: int,
    head: Callable[[torch.Tensor], torch.Tensor],
    max_rows: int,
) -> Drawn:
    """Returns what a step has drawn, with the log-probabilities of tokens of prompts beside it.

    states_PH: final hidden states before these tokens. drawn: None if the step draws none. max_rows: rows of
    logits that exist at once, as those of a whole chunk would take more memory than a step is planned to.
    """
    parts = [
        logprobs_of(head(states_RH), tokens_R, num_top)
        for states_RH, tokens_R in zip(states_PH.split(max_rows), tokens_P.split(max_rows), strict=True)
    ]
    found = Logprobs(*(torch.cat(same) for same in zip(*parts, strict=True)))
    if drawn is None:
        drawn = Drawn(tokens_P.new_empty(1, 0))
    return drawn._replace(prompt=found)
