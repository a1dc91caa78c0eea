"""Speculative decoding over another level: seconds per token of passes that verify several tokens."""

import numpy as np
import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from hwmodels.iterations import IterationShape, causal_pairs
from hwmodels.levels import Spec
from hwmodels.levels.speculative import Speculative
from hwmodels.speculation import SpeculativeModel, decodes_with_drafts
from hwmodels.speculation.draft import LayerDraft
from sim.settings.scenario import build_scenario

DECODES = IterationShape(8, 8 * 1000, 0, 0, 0, 0, 8)
CHUNK = IterationShape(0, 0, 1, 500, causal_pairs(500), 500, 1)
BOTH = IterationShape(8, 8 * 1000, 1, 500, causal_pairs(500), 500, 9)


@pytest.fixture(scope="module")
def replica():
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    return build_scenario(source.compose(["model=llama3_1_8b", "hardware=h100_sxm"])).replica


LAYER = LayerDraft(kind="mtp", start_s=0.0, step_s=0.0)


def models(replica, **given):
    return Speculative(base=Spec(), **given).iteration_model(replica), Spec().iteration_model(replica)


def test_a_token_takes_its_share_of_a_pass_and_of_the_drafts(replica):
    model, base = models(replica, num_draft_tokens=3, accepted_tokens=2.0)
    passes = SpeculativeModel(base, LAYER, replica)
    assert model.seconds(DECODES) == passes.pass_seconds(8, 8 * 1000, 3) / 2
    assert model.seconds(DECODES) < base.seconds(DECODES)


def test_a_prompt_takes_as_long_as_without_drafts(replica):
    model, base = models(replica)
    assert model.seconds(CHUNK) == base.seconds(CHUNK)
    added_s = base.seconds(BOTH) - base.seconds(DECODES)
    assert model.seconds(BOTH) - model.seconds(DECODES) == pytest.approx(added_s)


@pytest.mark.parametrize("shape", [DECODES, CHUNK, BOTH])
def test_arrays_give_the_bits_of_numbers_and_parts_sum_to_the_whole(replica, shape):
    model, _ = models(replica)
    contexts = shape.decode_context_tokens + shape.decode_seqs * np.arange(5)
    many = model.seconds(shape._replace(decode_context_tokens=contexts))
    one_by_one = [model.seconds(shape._replace(decode_context_tokens=int(n))) for n in contexts]
    assert many.tolist() == one_by_one
    assert sum(model.breakdown(shape).values()) == pytest.approx(model.seconds(shape))
    assert sum(line.seconds for line in model.explain(shape)) == pytest.approx(model.seconds(shape))


def test_the_ends_of_a_leap_are_those_of_its_iterations(replica):
    model, _ = models(replica)
    end_s, expected = 2.0, []
    for i in range(4):
        end_s += model.seconds(DECODES._replace(decode_context_tokens=8000 + 8 * i))
        expected.append(end_s)
    assert model.decode_ends(2.0, 8, 8000, 4) == expected


def test_a_token_moves_its_share_of_the_bytes_of_a_pass(replica):
    """Otherwise weights seem to be read once per token, and the memory to be busier than it can be."""
    model, base = models(replica, num_draft_tokens=3, accepted_tokens=2.0)
    passes = SpeculativeModel(base, LAYER, replica)
    verified = passes.bytes_moved(decodes_with_drafts(8, 8 * 1000, 3))
    assert model.bytes_moved(DECODES) == pytest.approx(verified / 2)
    assert model.bytes_moved(CHUNK) == base.bytes_moved(CHUNK)
    added = base.bytes_moved(BOTH) - base.bytes_moved(DECODES)
    assert model.bytes_moved(BOTH) == pytest.approx(verified / 2 + added)
    many = model.bytes_moved(DECODES._replace(decode_context_tokens=np.array([8000, 9000])))
    assert many[0] == model.bytes_moved(DECODES) < many[1]
    assert model.bytes_moved(DECODES) / model.seconds(DECODES) < model.peak_bytes_per_s


@pytest.mark.parametrize("accepted", [0.9, 4.1])
def test_more_tokens_than_a_pass_verifies_cannot_be_accepted(accepted):
    with pytest.raises(ValueError, match="must be from 1 to 4, num_draft_tokens"):
        Speculative(num_draft_tokens=3, accepted_tokens=accepted)
