"""A pass that has been verified, as the rows that advance its sequences: what a drafter follows."""

from __future__ import annotations

from dataclasses import replace

import torch

from realengine.model.decoder import States
from realengine.runner.batch import Batch
from realengine.speculation.drafter import DecodedRows, Passed
from realengine.speculation.verification import Verified
from realengine.speculation.work import VerifyShape, VerifyWords


def passed_rows(
    found: Verified,
    batch: Batch,
    states: States | None,
    newest_S: torch.Tensor,
    views: VerifyWords,
    shape: VerifyShape,
) -> tuple[Passed, torch.Tensor]:
    """Returns the rows that advance the sequences, and the row before each newest token.

    newest_S: newest tokens of the sequences that draw.
    """
    num_decodes, num_ours = shape.num_decodes, shape.num_decode_tokens
    starts_B, accepted_B = views.starts_B.long(), found.accepted_S[:num_decodes]
    first_B, contexts_B, last_rows = (
        starts_B[:num_decodes],
        batch.context_lens_B,
        views.rows_R[num_ours:].long(),
    )
    tokens_T, positions_T, slots_T = batch.tokens_T, batch.positions_T, batch.slots_T
    sequences, levels = views.sequences_R[:num_ours].long(), views.places_T[:num_ours].long()
    if shape.num_path_rows:  # the rows of a tree, by level instead of by node
        sequences, levels = views.path_sequences_P.long(), views.path_levels_P.long()
        first = first_B[sequences]
        others = torch.arange(num_ours, shape.num_tokens, device=newest_S.device)
        rows = torch.cat([found.rows_SD[sequences, levels], others])
        tokens_T, positions_T = (
            tokens_T[rows],
            torch.cat([positions_T[first] + levels, positions_T[others]]),
        )
        slots_T = slots_T[torch.cat([first + levels, others])]
        if states is not None:
            states = States(states.hidden_TH[rows], tuple(tap[rows] for tap in states.taps))
        by_level_B = views.path_starts_B.long()
        contexts_B = contexts_B - (starts_B.diff() - by_level_B.diff()).int()
        last_rows = last_rows - num_ours + shape.num_path_rows
        starts_B = by_level_B
    rows_N = torch.cat([starts_B[:num_decodes] + accepted_B, last_rows])
    is_rejected = levels > accepted_B[sequences]
    slots_T = torch.cat([torch.where(is_rejected, -1, slots_T[: len(levels)]), slots_T[len(levels) :]])
    following_T = torch.cat([tokens_T[1:], tokens_T[:1]])
    following_T[starts_B[num_decodes + 1 :] - 1] = views.following_C.long()
    following_T[rows_N] = newest_S
    rows_of_passed = replace(
        batch,
        tokens_T=tokens_T,
        positions_T=positions_T,
        slots_T=slots_T,
        chunk_starts=starts_B.int(),
        context_lens_B=contexts_B,
        num_decodes=0,
        sampled_rows_S=None,
        adapters=None,
        tree=None,
    )
    passed = Passed(
        batch=rows_of_passed,
        following_T=following_T,
        states=states,
        decoded=DecodedRows(num_decodes, len(levels), rows_N[:num_decodes]),
        begun_slots=views.started_N3[::3].long() if shape.num_started else None,
        drafts_next=shape.num_levels > 0 and shape.num_drawn > 0,
    )
    return passed, rows_N
