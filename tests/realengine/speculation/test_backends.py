"""The Triton kernels draft what their torch references do: decode rows, rows that are joined, and trees."""

import random

import pytest
import torch

from realengine.model.backend import TORCH, TRITON
from realengine.speculation.drafters.draft_model import DraftModel
from realengine.speculation.drafters.specinfer_tree import SpecinferTree
from tests.realengine.model.test_decoder import cache_of, make
from tests.realengine.speculation.passes import Row, Sequences

torch.set_num_threads(1)


def drafted(backend, config, widths):
    """Returns the drafts after two prompts, and after some of them are accepted."""
    spec, _, decoder = make(config, backend=backend)
    drafter = DraftModel(decoder, cache_of(spec), backend, 64, verifies_others=widths is not None)
    if widths is not None:
        drafter = SpecinferTree(drafter, widths)
    seqs, draw = Sequences(70, 4, 64, 2), random.Random(2)
    rows = []
    for seq, length in enumerate((9, 2)):
        seqs.known[seq] = [draw.randrange(96) for _ in range(length)]
        rows.append(Row(seq, list(seqs.known[seq]), length, draw.randrange(96), is_decode=False))
    found = []
    for num_accepted in (1, 0):
        passed = seqs.passed(rows, is_told=True, drafts_next=True)
        drafter.follow(passed)
        found.append(drafter.draft(passed, seqs.start([0, 1], num_padding=1), 2).tokens_NK[:2].tolist())
        rows = [
            Row(seq, [seqs.known[seq][-1], *tokens[:2]], num_accepted + 1, draw.randrange(96), is_decode=True)
            for seq, tokens in enumerate(found[-1])
        ]
    return found


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize(("config", "widths"), [("mistral", None), ("mistral", (2, 2)), ("llama", (1, 2))])
def test_triton_drafts_what_torch_does(config, widths):
    assert drafted(TRITON, config, widths) == drafted(TORCH, config, widths)
