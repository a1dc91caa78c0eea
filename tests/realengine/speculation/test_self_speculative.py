"""The target drafts with some of its layers: as a model of these layers would, without harm to its own KV."""

import random
from dataclasses import replace

import pytest
import torch

from realengine.model.backend import TORCH
from realengine.model.decoder import Decoder
from realengine.speculation.drafters.self_speculative import SelfSpeculative, kept_layers
from realengine.weights.load import load_weights
from tests.realengine.model.test_decoder import CPU, cache_of, make
from tests.realengine.speculation.passes import Row, Sequences, continuation, next_logits

torch.set_num_threads(1)


def target_of(num_layers=3):
    spec = replace(make("llama")[0], num_layers=num_layers)
    weights = load_weights(None, spec, torch.float32, CPU, seed=1)
    for name, weight in weights.items():
        if not name.endswith("norm.weight"):
            weight.mul_(10)
    return spec, weights, Decoder(spec, weights, TORCH, 128)


@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 1), (0,)])
def test_the_first_layers_draft_as_a_model_that_ends_there(layers):
    spec, weights, decoder = target_of()
    cache = cache_of(spec)
    drafter = SelfSpeculative(decoder, cache, TORCH, 64, layers)
    shorter = replace(spec, num_layers=len(layers))
    seqs, draw = Sequences(70, 4, 64, 2), random.Random(4)
    rows = []
    for seq, length in enumerate((9, 4)):
        seqs.known[seq] = [draw.randrange(96) for _ in range(length)]
        rows.append(Row(seq, list(seqs.known[seq]), length, draw.randrange(96), is_decode=False))
    for num_accepted in (2, 0, 4, 1):
        passed = seqs.passed(rows)
        decoder.states(passed.batch, cache)
        drafter.follow(passed)
        drafted = drafter.draft(passed, seqs.start([0, 1], num_padding=1), 4).tokens_NK.tolist()
        assert drafted[:2] == [continuation(shorter, weights, known, 4) for known in seqs.known]
        rows = [
            Row(seq, [seqs.known[seq][-1], *drafted[seq]], num_accepted + 1, draw.randrange(96), True)
            for seq in (0, 1)
        ]


@pytest.mark.parametrize("layers", [(0, 2), (1,), (2,)])
def test_the_pass_that_verifies_overwrites_the_drafts_keys_and_values(layers):
    spec, weights, decoder = target_of()
    cache = cache_of(spec)
    drafter = SelfSpeculative(decoder, cache, TORCH, 64, layers)
    seqs = Sequences(70, 4, 64, 1)
    seqs.known[0] = [5, 1, 70, 3, 9]
    passed = seqs.passed([Row(0, list(seqs.known[0]), 5, 8, is_decode=False)])
    decoder.states(passed.batch, cache)
    drafted = drafter.draft(passed, seqs.start([0]), 4).tokens_NK[0].tolist()
    keys = cache.layers[layers[-1]].keys
    written = keys.clone()
    text = [*seqs.known[0], *drafted]
    passed = seqs.passed([Row(0, text[5:], 5, 2, is_decode=True)])
    logits = decoder.logits(passed.batch, cache)
    assert (keys != written).any() == (layers[0] > 0 or len(layers) > 1)
    for place in range(5):
        torch.testing.assert_close(
            logits[place].double(), next_logits(spec, weights, text[: 6 + place]), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("skipped", "num_layers", "kept"),
    [
        ((1, 2), 4, (0, 3)),
        ((), 3, (0, 1, 2)),
        (None, 12, (0, 1, 2, 3, 5, 7, 9, 10, 11)),
        (None, 2, (0,)),
        (None, 1, (0,)),
    ],
)
def test_layers_that_are_not_skipped_draft(skipped, num_layers, kept):
    assert kept_layers(skipped, num_layers) == kept


@pytest.mark.parametrize(
    ("skipped", "message"),
    [
        ((1, 3), r"skipped_layers=\[1, 3\]: the target has no layer 3; choose from 0 to 2"),
        ((-1,), "the target has no layer -1"),
        ((0, 1, 2), "at least one of the target's layers must draft"),
    ],
)
def test_rejects_layers_that_the_target_cannot_skip(skipped, message):
    with pytest.raises(ValueError, match=message):
        kept_layers(skipped, 3)
