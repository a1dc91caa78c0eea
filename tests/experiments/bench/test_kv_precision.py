"""The perplexities of KV in fewer bits: exact for the model's dtype, and near it with 8 bits."""

import math

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from experiments.bench.kv_precision import predictions
from realengine.model.architecture import Architecture
from tests.realengine.checkpoints import LLAMA
from tests.realengine.steps import prompts


def test_fewer_bits_change_predictions_more():
    (text,) = prompts(40, (60,))
    plain, eight, four = (
        predictions(Architecture.from_hf(LLAMA), text, 50, kv) for kv in ("auto", "int8", "int4")
    )
    assert len(plain.likeliest) == 49
    assert plain.perplexity == pytest.approx(LLAMA["vocab_size"], rel=0.5)  # random weights predict nothing
    off = [abs(math.log(each.perplexity / plain.perplexity)) for each in (eight, four)]
    assert 0 < off[0] < off[1] < 0.1
