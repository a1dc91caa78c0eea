"""Drafts that are drawn from a distribution leave the target's own distribution of tokens."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from realengine.model.architecture import Architecture
from realengine.serving.sampling_params import SamplingParams
from realengine.weights.load import load_weights
from tests.realengine.eager import eager_logits
from tests.realengine.speculation.test_lossless import GREEDY, prompts, tokens_of
from tests.realengine.test_engine import CONFIGS, make

torch.set_num_threads(1)

PROMPT = [5, 9, 33, 2]
NUM_REQUESTS = 6000


def drawing(**settings):
    draft = Architecture.from_hf(CONFIGS["llama"] | {"num_hidden_layers": 1, "hidden_size": 32})
    config = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
    }
    return make(speculative_config=config, max_num_seqs=64, num_kv_blocks=600, **settings)


def marginals(temperature, top_k):
    """Computes the target's distributions of the first and of the second token after the prompt."""
    spec = Architecture.from_hf(CONFIGS["llama"])
    weights = load_weights(None, spec, torch.float32, "cpu", seed=1)

    def after(tokens):
        logits = eager_logits(spec, weights, torch.tensor(tokens))[-1] / temperature
        if top_k:
            logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
        return logits.softmax(-1).double().numpy()

    first = after(PROMPT)
    second = sum(p * after([*PROMPT, token]) for token, p in enumerate(first) if p > 0)
    return first, second


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.3, 12)])
def test_tokens_follow_the_target_s_distribution(temperature, top_k):
    params = SamplingParams(temperature=temperature, top_k=top_k, max_tokens=4, ignore_eos=True)
    outputs = drawing().generate([PROMPT] * NUM_REQUESTS, params)
    tokens = np.array(tokens_of(outputs))
    accepted = sum(output.drafts.num_accepted_tokens for output in outputs)
    assert 0 < accepted < sum(output.drafts.num_draft_tokens for output in outputs)
    for place, wanted in enumerate(marginals(temperature, top_k)):
        counts = np.bincount(tokens[:, place], minlength=len(wanted))
        possible = wanted > 0
        assert not counts[~possible].any()
        found = chisquare(counts[possible], wanted[possible] / wanted.sum() * NUM_REQUESTS)
        assert found.pvalue > 1e-3, (place, found)


def test_greedy_requests_get_their_tokens_also_beside_drawn_ones():
    drawn = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    mixed = [GREEDY if index % 2 else drawn for index in range(len(prompts()))]
    outputs = tokens_of(drawing().generate(prompts(), mixed))
    wanted = tokens_of(make().generate(prompts(), GREEDY))
    assert outputs[1::2] == wanted[1::2]


def test_draws_depend_on_the_request_alone():
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=4)
    together = tokens_of(drawing().generate(prompts(), params))
    alone = [tokens_of(drawing().generate([prompt], params))[0] for prompt in prompts()]
    assert together == alone
