"""An engine that speculates and overlaps: the same tokens, read one step late."""

from dataclasses import replace

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.core.endings import LateEnds
from policies.scheduling.fcfs import Fcfs
from policies.speculation.proposers import DraftModel
from realengine.model.architecture import Architecture
from realengine.runner import rank
from realengine.speculation.drafter import LoadedDraft
from realengine.speculation.settings import SpeculationSettings
from tests.realengine.small_models import CONFIGS, make
from tests.realengine.speculation.scripted import ScriptedDrafter
from tests.realengine.speculation.test_lossless import (
    GREEDY,
    NGRAM,
    RATES_AND_WAYS,
    WAYS,
    plain_outputs,
    prompts,
    tokens_of,
)

torch.set_num_threads(1)

SETTINGS = {
    "paged": {"caching": Paged()},
    "prefix": {"caching": PrefixCaching()},
    "radix": {"caching": Radix(block_size=4), "num_kv_blocks": 60},
    "chunks": {"batching": Chunked(max_num_batched_tokens=32)},
    "tight": {"num_kv_blocks": 16},
}
NUM_DRAFTS = 4


@pytest.fixture
def overlapped(monkeypatch):
    """Returns a function that makes engines that overlap, and draft the given texts."""

    def engine(texts, rate, **settings):
        def load(speculation, context):
            drafter = ScriptedDrafter(texts, rate, CONFIGS["llama"]["vocab_size"])
            return LoadedDraft(0, lambda cache: drafter)

        monkeypatch.setattr(rank, "load_draft", load)
        proposer = DraftModel(draft=None, num_speculative_tokens=NUM_DRAFTS)
        speculation = SpeculationSettings(proposer=proposer, models=("unused",))
        return make(overlap=True, speculative_config=speculation, **settings)

    return engine


def texts_of(asked, outputs):
    return [[*prompt, *tokens] for prompt, tokens in zip(asked, tokens_of(outputs), strict=True)]


@pytest.mark.sampled(slow=6)
@pytest.mark.parametrize(("rate", "way"), RATES_AND_WAYS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_overlapping_changes_no_token(overlapped, setting, rate, way):
    plain = plain_outputs(WAYS[way], **SETTINGS[setting])
    llm = overlapped(texts_of(prompts(), plain), rate, **SETTINGS[setting])
    drafted = llm.generate(prompts(), WAYS[way])
    assert isinstance(llm.engine.core._ends, LateEnds)
    assert tokens_of(plain) == tokens_of(drafted)
    if rate == 1.0 and setting == "paged":
        assert all(output.drafts.num_accepted_tokens >= 14 for output in drafted)
    assert llm.engine.core.num_unfinished == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("layers", [2, 1], ids=["equal", "smaller"])
def test_preemption_changes_no_token(mode, layers):
    settings = {
        "scheduling": Fcfs(preemption_mode=mode),
        "caching": Paged(block_size=4),
        "num_kv_blocks": 40,
    }
    model = Architecture.from_hf(CONFIGS["llama"] | {"num_hidden_layers": layers})
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    llm = make(overlap=True, speculative_config=drafts, **settings)
    drafted = llm.generate(prompts(), GREEDY)
    assert tokens_of(make(**settings).generate(prompts(), GREEDY)) == tokens_of(drafted)
    assert llm.engine.core.num_preemptions > 0
    assert llm.engine.core.num_unfinished == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_the_limit_inside_a_burst_ends_the_output_there(overlapped, max_tokens):
    asked = prompts()
    texts = texts_of(asked, make().generate(asked, GREEDY))
    limited = replace(GREEDY, max_tokens=max_tokens)
    found = overlapped(texts, 1.0).generate(asked, limited)
    assert tokens_of(found) == tokens_of(make().generate(asked, limited))
    assert {output.outputs[0].finish_reason for output in found} == {"length"}


def test_a_stop_token_inside_a_burst_ends_the_output_there(overlapped):
    asked = prompts()
    plain = make().generate(asked, GREEDY)
    stopping = [replace(GREEDY, stop_token_ids=(each[8], each[15])) for each in tokens_of(plain)]
    found = overlapped(texts_of(asked, plain), 0.9, num_kv_blocks=16).generate(asked, stopping)
    assert tokens_of(found) == tokens_of(make().generate(asked, stopping))
    assert {output.outputs[0].finish_reason for output in found} == {"stop"}


def test_an_aborted_request_ends_while_its_pass_is_in_flight(overlapped):
    asked = prompts()
    plain = make().generate(asked, GREEDY)
    engine = overlapped(texts_of(asked, plain), 0.7).engine
    answers = [engine.add(prompt, GREEDY) for prompt in asked]
    for _ in range(4):
        engine.step()
    engine.abort(answers[2].request_id)
    engine.run()
    assert answers[2].outputs[0].finish_reason == "aborted"
    others = [answer for answer in answers if answer is not answers[2]]
    wanted = [tokens for index, tokens in enumerate(tokens_of(plain)) if index != 2]
    assert [tuple(answer.outputs[0].tokens) for answer in others] == wanted
    assert engine.core.num_unfinished == 0


def test_a_proposer_of_the_host_does_not_overlap():
    assert make(overlap=True, speculative_config=NGRAM).engine.core._ends is None
