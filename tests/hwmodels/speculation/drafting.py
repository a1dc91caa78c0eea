"""Hosts and methods of iterations with drafting."""

from hwmodels.host import HostOverhead
from hwmodels.iterations import DraftWork
from hwmodels.speculation.steps import DraftHost

IDLE = HostOverhead(iteration_s=0.0, sequence_s=0.0, launch_s=0.0, graph_replay_s=0.0)
QUICK = {"start_s": 0.0, "step_s": 0.0}
MEASURED = DraftHost(iteration_s=2e-3, sequence_s=3e-5, token_s=7e-6, kilotoken_s=1e-5)


def shaped(make_shape, drawn):
    seqs, chunks, steps = drawn
    shape = make_shape([context for context, _ in seqs], chunks)
    tokens = sum(rows for _, rows in seqs)
    pairs = sum(rows * context + rows * (rows + 1) // 2 for context, rows in seqs)
    drafting = len(seqs) + len(chunks) if steps else 0
    drafts = DraftWork(tokens, pairs, drafting, steps, steps * drafting)
    return shape._replace(sampled_seqs=shape.sampled_seqs + tokens, drafts=drafts)


def drafting(model, shape):
    """Returns the seconds that drafting adds to a pass."""
    return model.seconds(shape) - model._base.seconds(shape)
