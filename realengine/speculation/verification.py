"""The verification of draft tokens against the tokens that the target draws."""

from __future__ import annotations

from typing import NamedTuple

import torch

from realengine.speculation.tree_rows import TreeShape
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
    tokens_T: torch.Tensor,
    drawn_R: torch.Tensor,
    starts_B: torch.Tensor,
    shape: VerifyShape,
    tree: TreeShape | None,
) -> Verified:
    """Accepts the draft tokens that equal the tokens drawn at the rows that they continue.

    tokens_T: tokens of the rows. drawn_R: tokens drawn at the verified rows. starts_B: first row of each
    sequence, and the end. tree: the tree of the draft tokens; None: each continues the one before it.
    """
    num_decodes, depth = shape.num_decodes, shape.max_depth
    first_B, end_B = starts_B[:num_decodes], starts_B[1 : num_decodes + 1]
    row_B, accepted_B = first_B, torch.zeros_like(first_B)
    alive_B = torch.ones_like(first_B, dtype=torch.bool)
    path = [row_B]
    for _ in range(depth):
        if tree is None:
            child_B = row_B + 1
            matches_B = (child_B < end_B) & (tokens_T[child_B.clamp(max=len(tokens_T) - 1)] == drawn_R[row_B])
        else:
            child_B, matches_B = _child(tokens_T, drawn_R, first_B, end_B, row_B, tree)
        alive_B = alive_B & matches_B
        row_B = torch.where(alive_B, child_B, row_B)
        accepted_B = accepted_B + alive_B
        path.append(row_B)
    rows_BD = torch.stack(path, dim=1)
    first_prompt = shape.num_decode_tokens
    prompt_rows = torch.arange(first_prompt, shape.num_verified, device=drawn_R.device)
    rows_SD = torch.cat([rows_BD, prompt_rows[:, None].expand(-1, depth + 1)])
    accepted_S = torch.cat([accepted_B, torch.zeros_like(prompt_rows)])
    return Verified(accepted_S, drawn_R[rows_SD], rows_SD)


def _child(
    tokens_T: torch.Tensor,
    drawn_R: torch.Tensor,
    first_B: torch.Tensor,
    end_B: torch.Tensor,
    row_B: torch.Tensor,
    tree: TreeShape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first row that continues each row with the token drawn there, and whether there is one."""
    nodes = torch.arange(len(tree.parents), device=row_B.device)
    rows_BN = first_B[:, None] + nodes
    is_row = rows_BN < end_B[:, None]
    rows_BN = rows_BN.clamp(max=len(tokens_T) - 1)
    continues = tree.parents[None] == (row_B - first_B)[:, None]
    matches_BN = is_row & continues & (tokens_T[rows_BN] == drawn_R[row_B][:, None])
    found_B = matches_BN.any(dim=1)
    return first_B + matches_BN.int().argmax(dim=1), found_B
