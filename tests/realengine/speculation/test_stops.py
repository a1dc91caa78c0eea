"""Stop strings that end inside a burst of accepted tokens end the text there, as without drafts."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from realengine.serving.model import Model
from tests.realengine.recorded import record_on_cpu
from tests.realengine.small_models import make
from tests.realengine.speculation.methods import DRAFTERS
from tests.realengine.speculation.test_lossless import GREEDY, SAMPLED, prompts, tokens_of

torch.set_num_threads(1)

LONG = replace(GREEDY, max_tokens=40)
BURSTS = {"method": "draft_model", "num_speculative_tokens": 4, "model": DRAFTERS["draft_model"]["model"]}


class Letters:
    """Writes each token as a letter and a digit, so that a stop string may begin inside a token."""

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(f"{chr(ord('a') + token // 10)}{token % 10}" for token in token_ids)


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    of = Model.of
    monkeypatch.setattr(Model, "of", lambda model: replace(of(model), tokenizer=Letters()))


def shown(outputs):
    tokens_of(outputs)  # checks that there is no error
    return [(output.outputs[0].text, output.outputs[0].finish_reason) for output in outputs]


@cache
def whole_texts(params):
    """Returns the texts without a stop string."""
    return [text for text, _ in shown(make(num_kv_blocks=300).generate(prompts(), params))]


@cache
def stopped(place, params):
    """Returns the parameters that stop each text, and the outputs of an engine without drafts."""
    stopping = stopping_at(whole_texts(params), place, params)
    return stopping, make(num_kv_blocks=300).generate(prompts(), stopping)


def stopping_at(texts, place, params):
    """Returns parameters that stop each text at the end of a token and the letter of the next one."""
    return [replace(params, stop=(text[2 * place - 1 : 2 * place + 1],)) for text in texts]


SETTINGS = {
    "alone": {},
    "overlap": {"overlap": True},
    "max_iterations": {"max_iterations": 4},
    "graphs": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
}
PLACES = range(5, 10)  # every place in a burst of five tokens


@pytest.mark.sampled(slow=4)
@pytest.mark.parametrize(
    ("settings", "place"),
    [
        *(pytest.param(SETTINGS["alone"], place, id=f"alone-{place}") for place in PLACES),
        *(
            pytest.param(
                *(settings, place), id=f"{name}-{place}", marks=[pytest.mark.slow] if place != 7 else []
            )
            for name, settings in SETTINGS.items()
            if name != "alone"
            for place in PLACES
        ),
    ],
)
def test_a_stop_string_inside_a_burst_ends_the_text_before_it(monkeypatch, settings, place):
    record_on_cpu(monkeypatch)
    texts, (params, wanted) = whole_texts(LONG), stopped(place, LONG)
    llm = make(num_kv_blocks=300, speculative_config=BURSTS, **settings)
    found = llm.generate(prompts(), params)
    assert shown(found) == shown(wanted)
    assert tokens_of(found) == tokens_of(wanted)
    assert {reason for _, reason in shown(found)} == {"stop"}
    for (text, _), whole, each in zip(shown(found), texts, params, strict=True):
        assert text == whole[: whole.index(each.stop[0])]
    assert max(output.drafts.num_accepted_tokens for output in found if output.drafts) >= 4
    core = llm.engine.core
    core.check_integrity()
    assert llm.engine.num_unfinished == 0
    assert core.block_pool.num_free == core.block_pool.num_blocks


@pytest.mark.parametrize("method", DRAFTERS)
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_stop_strings_end_the_text_there_with_every_way_to_draft(method, way):
    params = LONG if way == "greedy" else replace(SAMPLED, logprobs=None, max_tokens=40)
    stopping, wanted = stopped(12, params)
    found = make(num_kv_blocks=300, speculative_config=DRAFTERS[method]).generate(prompts(), stopping)
    assert shown(found) == shown(wanted)
    assert tokens_of(found) == tokens_of(wanted)


def test_a_stream_with_bursts_joins_to_the_text_before_the_stop_string():
    asked = prompts()[1]
    (whole,) = make().generate([asked], LONG)
    text = whole.outputs[0].text
    params = replace(LONG, stop=("not there", text[25:28]))
    pieces = list(make(speculative_config=BURSTS).stream(asked, params))
    assert "".join(pieces) == text[: text.index(text[25:28])]
