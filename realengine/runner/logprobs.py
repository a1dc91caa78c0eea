"""Log-probabilities of drawn tokens and of the tokens of prompts, on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from realengine.runner.graphs import Drawn, Logprobs


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
