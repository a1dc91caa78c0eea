"""Speculation changes no token: outputs equal those of the same engine without drafts."""

from dataclasses import replace

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.scheduling.fcfs import Fcfs
from policies.speculation import TokenTree
from policies.speculation.proposers import DraftModel, Medusa
from realengine.model.architecture import Architecture
from realengine.runner import rank
from realengine.serving.sampling_params import SamplingParams
from realengine.speculation.drafter import LoadedDraft
from realengine.speculation.settings import SpeculationSettings
from tests.realengine.adapters import random_adapter
from tests.realengine.small_models import CONFIGS, make
from tests.realengine.speculation.scripted import ScriptedDrafter

torch.set_num_threads(1)

TREE = TokenTree.of_paths([[0], [1], [2], [0, 0], [0, 1], [2, 0], [2, 1], [2, 1, 0]])
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, top_k=40, max_tokens=20, ignore_eos=True, seed=3, logprobs=2)
PENALISED = SamplingParams(
    temperature=0.8, max_tokens=20, ignore_eos=True, seed=5, repetition_penalty=1.3, frequency_penalty=0.4
)
WAYS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED}


def prompts():
    """Returns repetitive prompts whose first tokens differ, of one token to four blocks."""
    generator = torch.Generator().manual_seed(7)
    lengths = (1, 3, 15, 16, 17, 20)
    made = [torch.randint(0, 96, (n,), generator=generator).tolist() for n in lengths]
    return [[index, *part, *part, *part] for index, part in enumerate(made)]


_PLAIN = {}


def plain_outputs(params, **settings):
    """Returns the outputs of an engine without drafts, computed once for equal settings."""
    key = repr((params, sorted(settings.items())))
    if key not in _PLAIN:
        _PLAIN[key] = make(**settings).generate(prompts(), params)
    return _PLAIN[key]


def tokens_of(outputs):
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_host_proposers_change_no_token(method, num_tokens, way):
    config = {"method": method, "num_speculative_tokens": num_tokens}
    if method == "ngram":
        config |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    plain = plain_outputs(WAYS[way])
    drafted = make(speculative_config=config).generate(prompts(), WAYS[way])
    assert tokens_of(plain) == tokens_of(drafted)
    assert sum(output.drafts.num_draft_tokens for output in drafted if output.drafts) > 0
    if way == "sampled":
        for one, other in zip(plain, drafted, strict=True):
            pairs = zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
            assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)


@pytest.fixture
def scripted(monkeypatch):
    """Returns a function that makes engines draft the given texts."""

    def script(texts, rate, tree=None):
        def load(settings, context):
            drafter = ScriptedDrafter(texts, rate, CONFIGS["llama"]["vocab_size"], tree)
            return LoadedDraft(0, lambda cache: drafter)

        monkeypatch.setattr(rank, "load_draft", load)

    return script


RATES_AND_WAYS = [
    *((rate, "greedy") for rate in (0.0, 0.7, 1.0)),
    *((0.7, way) for way in ("sampled", "penalised")),
    *(
        pytest.param(rate, way, marks=pytest.mark.slow)
        for rate in (0.0, 1.0)
        for way in ("sampled", "penalised")
    ),
]
"""Shares of right drafts, and ways to sample: greedy requests have every share, and 0.7 has every way."""


@pytest.mark.sampled(fast=16, slow=24)
@pytest.mark.parametrize(("rate", "way"), RATES_AND_WAYS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("setting", ["paged", "prefix", "radix", "chunks", "tight", "mistral"])
def test_drafts_on_the_device_change_no_token(scripted, setting, shape, rate, way):
    settings = {
        "paged": {"caching": Paged()},
        "prefix": {"caching": PrefixCaching()},
        "radix": {"caching": Radix()},
        "chunks": {"batching": Chunked(max_num_batched_tokens=32)},
        "tight": {"num_kv_blocks": 16},
        "mistral": {"config": "mistral"},
    }[setting]
    plain = plain_outputs(WAYS[way], **settings)
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts(), tokens_of(plain), strict=True)]
    scripted(texts, rate, TREE if shape == "tree" else None)
    if shape == "tree":
        proposer = Medusa(draft=None, num_speculative_tokens=TREE.num_nodes, tree=TREE)
    else:
        proposer = DraftModel(draft=None, num_speculative_tokens=4)
    speculation = SpeculationSettings(proposer=proposer, models=("unused",))
    llm = make(**settings, speculative_config=speculation)
    drafted = llm.generate(prompts(), WAYS[way])
    assert tokens_of(plain) == tokens_of(drafted)
    counts = [output.drafts for output in drafted]
    if rate == 1.0 and setting == "paged":
        depth = TREE.depth if shape == "tree" else 4
        assert all(each.num_accepted_tokens >= 14 for each in counts), depth
    if rate == 0.0:
        assert all(each.num_accepted_tokens == 0 for each in counts if each)
    llm.engine.core.block_pool.check_integrity([])


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def both(params, names=None, **settings):
    """Serves the prompts without and with prompt lookup; asserts that some drafts were accepted."""
    plain = make(**settings).generate(prompts(), params, names)
    llm = make(**settings, speculative_config=NGRAM)
    drafted = llm.generate(prompts(), params, names)
    assert sum(output.drafts.num_accepted_tokens for output in drafted if output.drafts) > 3
    llm.engine.core.check_integrity()
    return plain, drafted


@pytest.mark.parametrize("caching", [Paged(block_size=4), PrefixCaching(block_size=4), Radix(block_size=4)])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_changes_no_token(caching, mode):
    settings = {"scheduling": Fcfs(preemption_mode=mode), "caching": caching, "num_kv_blocks": 40}
    plain, drafted = both(GREEDY, **settings)
    assert tokens_of(plain) == tokens_of(drafted)


def test_adapters_change_no_token():
    architecture = Architecture.from_hf(CONFIGS["llama"])
    adapters = {
        name: random_adapter(architecture, 4, seed=seed, scaling=40.0) for seed, name in enumerate("ab")
    }
    names = [None, "a", "b", "a", None, "b"]
    plain, drafted = both(GREEDY, names, lora_adapters=adapters, max_loras=2)
    assert tokens_of(plain) == tokens_of(drafted)


def test_two_ranks_change_no_token():
    plain, drafted = both(GREEDY, config="even", tensor_parallel_size=2)
    assert tokens_of(plain) == tokens_of(drafted)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4"])
def test_quantised_kv_of_trees_moves_with_its_scales(scripted, kv_cache_dtype):
    plain = make(kv_cache_dtype=kv_cache_dtype).generate(prompts(), GREEDY)
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts(), tokens_of(plain), strict=True)]
    scripted(texts, 0.8, TREE)
    proposer = Medusa(draft=None, num_speculative_tokens=TREE.num_nodes, tree=TREE)
    speculation = SpeculationSettings(proposer=proposer, models=("unused",))
    drafted = make(kv_cache_dtype=kv_cache_dtype, speculative_config=speculation).generate(prompts(), GREEDY)
    assert tokens_of(plain) == tokens_of(drafted)


def test_a_stop_token_inside_a_burst_ends_the_output_there():
    longer = replace(GREEDY, max_tokens=30)
    tokens = tokens_of(make().generate(prompts(), longer))
    stopping = [replace(longer, stop_token_ids=(each[11], each[17])) for each in tokens]
    plain = make().generate(prompts(), stopping)
    drafted = make(speculative_config=NGRAM).generate(prompts(), stopping)
    assert tokens_of(plain) == tokens_of(drafted)
    assert {output.outputs[0].finish_reason for output in drafted} == {"stop"}


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_the_limit_inside_a_burst_ends_the_output_there(max_tokens):
    limited = replace(GREEDY, max_tokens=max_tokens)
    drafted = make(speculative_config=NGRAM).generate(prompts(), limited)
    assert tokens_of(make().generate(prompts(), limited)) == tokens_of(drafted)
    assert {len(tokens) for tokens in tokens_of(drafted)} == {max_tokens}


def test_the_end_of_the_context_ends_the_output_there():
    endless = replace(GREEDY, max_tokens=500)
    plain, drafted = both(endless, max_model_len=70)
    assert tokens_of(plain) == tokens_of(drafted)


@pytest.mark.parametrize("batch", [1, 32])
def test_batches_of_any_size_change_no_token(batch):
    asked = [[index, *prompt] for index in range(batch) for prompt in prompts()[2:3]]
    plain = make(max_num_seqs=32, num_kv_blocks=300).generate(asked, GREEDY)
    drafted = make(max_num_seqs=32, num_kv_blocks=300, speculative_config=NGRAM).generate(asked, GREEDY)
    assert tokens_of(plain) == tokens_of(drafted)


@pytest.mark.slow
def test_triton_kernels_give_the_same_tokens(scripted):
    """In Triton's interpreter: a tree, beside chunks of prompts."""
    settings = {"backend": "triton", "batching": Chunked(max_num_batched_tokens=48)}
    short = replace(GREEDY, max_tokens=5)
    asked = prompts()[:4]
    wanted = tokens_of(make().generate(asked, short))
    texts = [[*prompt, *tokens] for prompt, tokens in zip(asked, wanted, strict=True)]
    scripted(texts, 0.7, TREE)
    proposer = Medusa(draft=None, num_speculative_tokens=TREE.num_nodes, tree=TREE)
    speculation = SpeculationSettings(proposer=proposer, models=("unused",))
    assert tokens_of(make(**settings, speculative_config=speculation).generate(asked, short)) == wanted


@pytest.mark.parametrize("settings", [{"max_iterations": 4}, {"overlap": True}, {"cudagraph_mode": None}])
def test_settings_that_run_ahead_change_no_token(settings):
    plain, drafted = both(GREEDY, **settings)
    assert tokens_of(plain) == tokens_of(drafted)
