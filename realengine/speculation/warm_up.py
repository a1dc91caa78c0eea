"""The passes of a warm-up: they launch what no graph does, and their times are the first estimates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from policies.speculation import Proposer
from policies.speculation.engine.drafts import Shapes
from realengine.runner.graphs import Drawn
from realengine.runner.launch import Launch
from realengine.runner.work import Draw, Padding, Work
from realengine.speculation.graphs import PassGraphs
from realengine.speculation.pass_times import MeasuredPass
from realengine.speculation.uniform import uniform_shape, uniform_words
from realengine.speculation.work import PassSize, VerifyWork

NUM_SEQS = (1, 8)
"""Numbers of sequences of the passes, as far as the engine has slots."""
NUM_RUNS = 3
"""Times that a pass runs; the fastest counts, as the first ones compile kernels."""


def warm_up(
    execute: Callable[[Work], Drawn | None],
    now: Callable[[], float],
    proposer: Proposer,
    *,
    graphs: PassGraphs | None,
    padding: Padding,
    max_num_seqs: int,
    max_model_len: int,
) -> Iterator[tuple[MeasuredPass, float]]:
    """Runs passes without drafts and with as many as there are; yields each with its seconds.

    They run as in service: as graphs, if there are any of their size. Their contexts are so short that they
    count as 0 tokens: what a long one costs is measured in service. Their sequences are all in the padding
    slot, whose KV and tokens do not matter.
    """
    shapes = Shapes(proposer)
    for num_seqs in sorted({min(num, max_num_seqs) for num in NUM_SEQS}):
        for num_levels in _levels(shapes, max_model_len):
            num_drafts = int(shapes.rows[num_levels])
            num_rows = num_seqs * (1 + num_drafts)
            graph = None if graphs is None else graphs.fit(num_seqs, num_rows, num_drafts, num_levels)
            size = graph or PassSize(num_seqs, num_drafts, num_levels, None)
            room = _room(num_drafts, shapes, max_model_len)
            work = _pass(size, num_levels, room, padding, has_tree=not shapes.is_chain)
            seconds = []
            for _ in range(NUM_RUNS):
                begin_s = now()
                Launch([], execute(replace(work, size=graph)), 1).tokens()
                seconds.append(now() - begin_s)
            if min(seconds) > 0:
                yield MeasuredPass(num_seqs, num_seqs * num_drafts, 0, num_levels), min(seconds)


def eager_passes(shapes: Shapes, padding: Padding, max_model_len: int) -> Iterator[VerifyWork]:
    """Yields passes of one sequence, with and without drafts, for short and for long contexts.

    Attention splits long contexts only, and graphs are captured for long ones: eager passes need both.
    """
    for num_levels in _levels(shapes, max_model_len):
        num_drafts = int(shapes.rows[num_levels])
        size = PassSize(1, num_drafts, num_levels, None)
        for longest in sorted({_room(num_drafts, shapes, max_model_len), max_model_len}):
            yield _pass(size, num_levels, longest, padding, has_tree=not shapes.is_chain)


def _levels(shapes: Shapes, max_model_len: int) -> list[int]:
    """Returns 0 and the most levels of drafts for which a sequence has room."""
    return sorted({0, int(shapes.depth[min(shapes.num_rows, (max_model_len - 1) // 2)])})


def _room(num_drafts: int, shapes: Shapes, max_model_len: int) -> int:
    """Returns the most tokens of a sequence that runs a pass and is drafted for."""
    return min(2 + num_drafts + shapes.num_rows, max_model_len)


def _pass(size: PassSize, num_levels: int, room: int, padding: Padding, *, has_tree: bool) -> VerifyWork:
    """Returns a pass of equal sequences at the beginning of their context, all in one slot.

    room: tokens of the pass and of the draft after it, at most.
    """
    shape = uniform_shape(size, room, Draw.greedy, has_tree=has_tree)
    shape = shape._replace(num_levels=num_levels)
    return VerifyWork(verify=shape, words=uniform_words(shape, padding, token=0))
