"""The verification of draft tokens against the tokens that the target draws."""

from __future__ import annotations

from typing import NamedTuple

import torch

from realengine.model.backend import Backend
from realengine.speculation.work import VerifyShape


class Verified(NamedTuple):
    """The tokens of a pass: accepted draft tokens and one more, of the S sequences that draw."""

    accepted_S: torch.Tensor
    """Accepted draft tokens, int64."""
    tokens_SD: torch.Tensor
    """Tokens, int64 [S, D + 1]; those after the first accepted_S + 1 are meaningless."""
    rows_SD: torch.Tensor
    """The verified row at which each token was drawn, int64 [S, D + 1]; for decodes, the row of the pass."""


def verified(
    backend: Backend,
    tokens_T: torch.Tensor,
    drawn_R: torch.Tensor,
    starts_B: torch.Tensor,
    parents: torch.Tensor | None,
    shape: VerifyShape,
) -> Verified:
    """Accepts the draft tokens that equal the tokens drawn at the rows that they continue.

    tokens_T: tokens of the rows. drawn_R: tokens drawn at the verified rows. starts_B: first row of each
    sequence, and the end. parents: with a tree, the row of its sequence that each row of the decodes
    continues; None: each continues the one before it.
    """
    num_ours, depth = shape.num_decode_tokens, shape.max_depth
    prompt_rows = torch.arange(num_ours, shape.num_verified, device=drawn_R.device)
    found = backend.match_drafts(
        tokens_T[:num_ours], drawn_R[:num_ours], starts_B[: shape.num_decodes + 1], depth, parents
    )
    rows_SD = torch.cat([found.rows_BD, prompt_rows[:, None].expand(-1, depth + 1)])
    accepted_S = torch.cat([found.accepted_B, torch.zeros_like(prompt_rows)])
    return Verified(accepted_S, drawn_R[rows_SD], rows_SD)
