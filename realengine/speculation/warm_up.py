"""The passes of a warm-up: their times are the first estimates of an engine that speculates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from policies.speculation import Proposer
from policies.speculation.engine.drafts import Shapes
from realengine.runner.graphs import Drawn
from realengine.runner.launch import Launch
from realengine.runner.work import SAMPLING, Draw, Work, pack, pack_sampling
from realengine.speculation.pass_times import MeasuredPass
from realengine.speculation.work import VerifyShape, VerifyWork

NUM_SEQS = (1, 8)
"""Numbers of sequences of the passes, as far as the engine has slots."""
NUM_RUNS = 3
"""Times that a pass runs; the fastest counts, as the first ones compile kernels."""


def warm_up(
    execute: Callable[[Work], Drawn | None],
    now: Callable[[], float],
    proposer: Proposer,
    *,
    slot: int,
    max_num_seqs: int,
    max_model_len: int,
) -> Iterator[tuple[MeasuredPass, float]]:
    """Runs passes without drafts and with as many as there are; yields each with its seconds.

    Their contexts are so short that they count as 0 tokens: what a long one costs is measured in service.
    slot: that of padding rows, whose KV and tokens do not matter.
    """
    shapes = Shapes(proposer)
    levels = {0, min(shapes.max_depth, (max_model_len - 1) // 2)}
    for num_seqs in sorted({min(num, max_num_seqs) for num in NUM_SEQS}):
        for num_levels in sorted(levels):
            num_drafts = int(shapes.rows[num_levels])
            work = _pass(num_seqs, num_drafts, num_levels, slot, has_tree=not shapes.is_chain)
            seconds = []
            for _ in range(NUM_RUNS):
                begin_s = now()
                Launch([], execute(work), 1).tokens()
                seconds.append(now() - begin_s)
            if min(seconds) > 0:
                yield MeasuredPass(num_seqs, num_seqs * num_drafts, 0, num_levels), min(seconds)


def _pass(num_seqs: int, num_drafts: int, num_levels: int, slot: int, *, has_tree: bool) -> VerifyWork:
    """Returns a pass of equal sequences at the beginning of their context, all in one slot."""
    num_rows = 1 + num_drafts
    num_tokens = num_seqs * num_rows
    paths = 1 + num_levels if has_tree else 0
    slots = np.full(num_seqs, slot)
    shape = VerifyShape(
        num_tokens=num_tokens,
        num_decodes=num_seqs,
        num_decode_tokens=num_tokens,
        num_chunks=0,
        num_drawn=num_seqs,
        max_query_len=num_rows,
        max_context_len=num_rows + num_drafts,
        max_depth=num_levels,
        num_levels=num_levels,
        draw=Draw.greedy,
        num_path_rows=num_seqs * paths,
        num_started=1,
    )
    sections: list[np.ndarray] = [
        pack_sampling(np.zeros(num_seqs, SAMPLING)),
        np.zeros(num_tokens),
        np.tile(np.arange(num_rows), num_seqs),
        np.full(num_tokens, slot),
        slots,
        np.full(num_seqs, num_rows),
        np.arange(num_seqs + 1) * num_rows,
        np.arange(num_tokens),
        np.repeat(np.arange(num_seqs), num_rows),
        slots,
        np.repeat(np.arange(num_seqs), paths),
        np.tile(np.arange(paths), num_seqs),
        np.arange(num_seqs + 1) * paths if paths else np.zeros(0),
        np.array([slot, 0, 0]),
    ]
    return VerifyWork(verify=shape, words=pack(sections))
