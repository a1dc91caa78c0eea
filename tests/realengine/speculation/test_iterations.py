"""Several passes in one launch give the same tokens, and blocks that they did not need are free again."""

from dataclasses import replace

import pytest
import torch

from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from realengine.model.architecture import Architecture
from realengine.observer import Observer
from tests.realengine.small_models import CONFIGS, make
from tests.realengine.speculation.test_lossless import (
    GREEDY,
    PENALISED,
    SAMPLED,
    plain_outputs,
    prompts,
    tokens_of,
)

torch.set_num_threads(1)

LIKE_TARGET = Architecture.from_hf(CONFIGS["llama"])
SMALLER = Architecture.from_hf(CONFIGS["llama"] | {"num_hidden_layers": 1})
WAYS = {"greedy": GREEDY, "sampled": replace(SAMPLED, logprobs=None), "penalised": PENALISED}


class Launches(Observer):
    """Keeps the number of iterations of each launch."""

    def __init__(self):
        self.num_iterations = []

    def planned(self, plan, num_iterations, now_s):
        self.num_iterations.append(num_iterations)


@pytest.mark.sampled(fast=6, slow=10)
@pytest.mark.parametrize(
    ("model", "way"),
    [
        *(pytest.param(SMALLER, way, id=f"smaller-{way}") for way in WAYS),
        pytest.param(LIKE_TARGET, "greedy", id="equal-greedy"),
        *(
            pytest.param(LIKE_TARGET, way, id=f"equal-{way}", marks=pytest.mark.slow)
            for way in ("sampled", "penalised")
        ),
    ],
)
@pytest.mark.parametrize("caching", [Paged, PrefixCaching, Radix])
@pytest.mark.parametrize("overlap", [False, True])
def test_several_passes_in_a_launch_change_no_token(overlap, caching, model, way):
    settings = {"caching": caching(block_size=4), "num_kv_blocks": 300}
    params = replace(WAYS[way], max_tokens=45)
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    llm = make(overlap=overlap, max_iterations=4, speculative_config=drafts, **settings)
    llm.engine.observer = launches = Launches()
    drafted = llm.generate(prompts(), params)
    assert tokens_of(plain_outputs(params, **settings)) == tokens_of(drafted)
    assert max(launches.num_iterations) > 1
    core = llm.engine.core
    core.check_integrity()
    assert core.block_pool.num_free == core.block_pool.num_blocks


def test_a_stop_token_inside_a_launch_ends_the_output_there():
    asked = prompts()
    plain = make(num_kv_blocks=300).generate(asked, replace(GREEDY, max_tokens=60))
    stopping = [
        replace(GREEDY, max_tokens=60, stop_token_ids=(each[17], each[31])) for each in tokens_of(plain)
    ]
    drafts = {"method": "draft_model", "model": LIKE_TARGET, "num_speculative_tokens": 2}
    llm = make(max_iterations=4, speculative_config=drafts, num_kv_blocks=300)
    found = llm.generate(asked, stopping)
    assert tokens_of(found) == tokens_of(make(num_kv_blocks=300).generate(asked, stopping))
    assert llm.engine.core.num_unfinished == 0


def test_the_host_drafts_one_pass_at_a_time():
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = make(max_iterations=4, speculative_config=config, num_kv_blocks=300)
    llm.engine.observer = launches = Launches()
    drafted = llm.generate(prompts(), GREEDY)
    assert tokens_of(make().generate(prompts(), GREEDY)) == tokens_of(drafted)
    assert set(launches.num_iterations) == {1}
