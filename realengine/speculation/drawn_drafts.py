"""Draft tokens that were drawn from a distribution, beside the rows that accept or reject them."""

from __future__ import annotations

import torch

from kernels.sampling import DraftRows
from realengine.speculation.work import VerifyShape, VerifyWords


def drawn_drafts(
    probs_SKV: torch.Tensor, drafts_T: torch.Tensor, views: VerifyWords, shape: VerifyShape
) -> DraftRows:
    """Returns the draft token after each verified row, -1 for none, and the probabilities of all drafts.

    probs_SKV: the distribution of each draft token, by slot and place in the draft.
    """
    num_ours, num_others = shape.num_decode_tokens, shape.num_verified - shape.num_decode_tokens
    sequences = views.sequences_R[:num_ours]
    following = torch.cat([drafts_T[1:], drafts_T[:1]])[:num_ours]
    is_last = torch.ones_like(sequences, dtype=torch.bool)
    is_last[:-1] = sequences[1:] != sequences[:-1]
    num_places = probs_SKV.shape[1]
    rows = views.slots_T[:num_ours].long() * num_places + views.places_T[:num_ours].clamp(max=num_places - 1)
    none = sequences.new_zeros(num_others, dtype=torch.int64)
    return DraftRows(
        tokens=torch.cat([torch.where(is_last, -1, following), none - 1]),
        row=torch.cat([rows.long(), none]),
        probs=probs_SKV.flatten(0, 1),
    )
