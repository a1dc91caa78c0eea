"""Any way to draft, with any settings, requests and events at once, changes no token and leaves no block."""

import pytest
import torch

from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from realengine.serving.model import Model
from tests.realengine.recorded import record_on_cpu
from tests.realengine.small_models import CONFIGS
from tests.realengine.speculation.guided import guide_drafters
from tests.realengine.speculation.random_case import METHODS, drawn_case
from tests.realengine.speculation.test_stops import Letters

torch.set_num_threads(1)


def engine_of(config, settings):
    settings = {"device": "cpu", "num_kv_blocks": 900, **settings}
    model = Model(Architecture.from_hf(CONFIGS[config]), None, Letters())
    return LLM(model, seed=1, **settings).engine


def served(engine, case, aborts):
    """Serves the requests of a case, each from its step on; returns their answers."""
    answers = {}
    step = 0
    while len(answers) < len(case.prompts) or engine.num_unfinished:
        for index, (prompt, params) in enumerate(zip(case.prompts, case.params, strict=True)):
            if case.arrivals[index] == step:
                answers[index] = engine.add(prompt, params, lora=case.adapters[index])
        for index, at in aborts.items():
            if at == step and index in answers:
                engine.abort(answers[index].request_id)
        engine.step()
        step += 1
        assert step < 20_000, "the engine does not come to an end"
    return [answers[index] for index in range(len(case.prompts))]


def check(monkeypatch, seed, method=None):
    """Serves a drawn case with and without drafts; asserts that outputs are equal. Returns its counts."""
    case = drawn_case(seed, method)
    record_on_cpu(monkeypatch)
    order = sorted(range(len(case.prompts)), key=lambda index: (case.arrivals[index], index))
    plain = engine_of(case.config, {**case.plain, "num_kv_blocks": 4000})
    wanted = served(plain, case, {})
    case.guide.texts = [[*wanted[index].prompt_tokens, *wanted[index].outputs[0].tokens] for index in order]
    guide_drafters(monkeypatch, case.guide, case.tree)
    engine = engine_of(case.config, {**case.plain, **case.settings, "speculative_config": case.speculation})
    case.guide.engine = engine
    found = served(engine, case, case.aborts)
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert (one.error, other.error) == (None, None), (index, one.error, other.error)
        ours, theirs = one.outputs[0], other.outputs[0]
        if index in case.aborts:
            num = min(len(ours.tokens), len(theirs.tokens))
            assert ours.tokens[:num] == theirs.tokens[:num], index
            continue
        assert ours.tokens == theirs.tokens, (index, ours.tokens, theirs.tokens)
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason), index
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        for a, b in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert abs(a.logprob - b.logprob) < 1e-3, index
    engine.core.check_integrity()
    assert engine.core.num_unfinished == 0
    return case, engine, found


FAST = ("suffix", "lookahead", "self_speculative", "medusa", "eagle", "mtp")
"""Ways to draft of which one drawn case each takes less than a second."""
CASES = [
    pytest.param(seed, method, marks=() if seed == 0 and method in FAST else pytest.mark.slow)
    for seed in range(2)
    for method in METHODS
]


@pytest.mark.sampled(slow=8)
@pytest.mark.parametrize(("seed", "method"), CASES)
def test_drafts_change_nothing_whatever_else_happens(monkeypatch, seed, method):
    check(monkeypatch, 1000 * seed + METHODS.index(method), method)
