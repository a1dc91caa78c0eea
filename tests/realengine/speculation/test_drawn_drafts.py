"""Drafts that are drawn from a distribution leave the target's own distribution of tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from realengine.model.architecture import Architecture
from realengine.serving.sampling_params import SamplingParams
from realengine.weights.load import load_weights
from tests.realengine.eager import eager_logits
from tests.realengine.small_models import CONFIGS, make
from tests.realengine.speculation.test_lossless import GREEDY, prompts, tokens_of

torch.set_num_threads(1)

PROMPT = [5, 9, 33, 2]
NUM_REQUESTS = 6000
FEW_REQUESTS = 1000


def drawing(**settings):
    draft = Architecture.from_hf(CONFIGS["llama"] | {"num_hidden_layers": 1, "hidden_size": 32})
    config = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
    }
    return make(**{"speculative_config": config, "max_num_seqs": 64, "num_kv_blocks": 600} | settings)


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


@pytest.mark.parametrize("num_requests", [FEW_REQUESTS, pytest.param(NUM_REQUESTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.3, 12)])
def test_tokens_follow_the_target_s_distribution(temperature, top_k, num_requests):
    params = SamplingParams(temperature=temperature, top_k=top_k, max_tokens=4, ignore_eos=True)
    outputs = drawing().generate([PROMPT] * num_requests, params)
    tokens = np.array(tokens_of(outputs))
    accepted = sum(output.drafts.num_accepted_tokens for output in outputs)
    assert 0 < accepted < sum(output.drafts.num_draft_tokens for output in outputs)
    for place, wanted in enumerate(marginals(temperature, top_k)):
        counts = np.bincount(tokens[:, place], minlength=len(wanted))
        possible = wanted > 0
        assert not counts[~possible].any()
        found = chisquare(counts[possible], wanted[possible] / wanted.sum() * num_requests)
        assert found.pvalue > 1e-3, (place, found)


FILTERED = SamplingParams(temperature=0.9, top_k=9, top_p=0.95, min_p=0.02, max_tokens=3, ignore_eos=True)
SMALL = Architecture.from_hf(CONFIGS["llama"] | {"num_hidden_layers": 1, "hidden_size": 32})
KINDS = {
    "drawn by a model": {"method": "draft_model", "model": SMALL, "draft_sample_method": "probabilistic"},
    "drawn by skipping": {"method": "self_speculative", "draft_sample_method": "probabilistic"},
    "likeliest": {"method": "self_speculative"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_thousand_draws_with_all_filters_follow_the_target_s_distribution(kind, record_property):
    """Three places each of so many requests, of which the last two may be drafts; -rP prints the p-values."""
    num_requests = 34_000
    config = KINDS[kind] | {"num_speculative_tokens": 2}
    llm = make(speculative_config=config, max_num_seqs=256, num_kv_blocks=1000)
    outputs = llm.generate([PROMPT] * num_requests, FILTERED)
    tokens = np.array(tokens_of(outputs))
    assert sum(output.drafts.num_accepted_tokens for output in outputs) > num_requests // 50
    spec = Architecture.from_hf(CONFIGS["llama"])
    weights = load_weights(None, spec, torch.float32, "cpu", seed=1)
    before = {(): 1.0}
    for place in range(3):
        wanted, following = np.zeros(spec.vocab_size), {}
        for text, probability in before.items():
            of_next = filtered(eager_logits(spec, weights, torch.tensor([*PROMPT, *text]))[-1], FILTERED)
            wanted += probability * of_next
            for token in np.flatnonzero(of_next):
                following[(*text, int(token))] = probability * of_next[token]
        counts = np.bincount(tokens[:, place], minlength=len(wanted))
        possible = wanted > 0
        assert not counts[~possible].any()
        often = possible & (wanted * num_requests > 5)
        kept = np.append(counts[often], counts[~often].sum() + 1e-9)
        share = np.append(wanted[often], max(wanted[~often].sum(), 1e-12))
        found = chisquare(kept, share / share.sum() * kept.sum())
        record_property(f"p-value of place {place}", float(found.pvalue))
        print(
            f"{kind}, place {place}: chi-square {found.statistic:.2f} of {len(kept)}, p = {found.pvalue:.4f}"
        )
        assert found.pvalue > 1e-3, (place, found)
        before = following


def filtered(logits, params):
    """Computes a distribution by the definitions of min-p, top-k and top-p, in this order, in float64."""
    p = np.exp((logits.double().numpy() - float(logits.max())) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[p[order] >= params.min_p * p[order[0]]][: params.top_k]
    q = p[kept] / p[kept].sum()
    kept = kept[np.cumsum(q) - q < params.top_p]
    result = np.zeros_like(p)
    result[kept] = p[kept] / p[kept].sum()
    return result


@pytest.mark.slow
def test_tokens_with_penalties_follow_the_penalised_target_s_distribution():
    """The second token's distribution counts the first one, which may have been a draft token of its pass."""
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.6}
    params = SamplingParams(temperature=0.6, max_tokens=3, ignore_eos=True, **penalties)
    outputs = drawing().generate([PROMPT] * NUM_REQUESTS, params)
    tokens = np.array(tokens_of(outputs))
    assert sum(output.drafts.num_accepted_tokens for output in outputs) > 0
    for place, wanted in enumerate(penalised_marginals(params)):
        counts = np.bincount(tokens[:, place], minlength=len(wanted))
        found = chisquare(counts, wanted * NUM_REQUESTS)
        assert found.pvalue > 1e-3, (place, found)


def penalised_marginals(params):
    """Computes the distributions of the first and the second token, by a formula of its own in numpy."""
    spec = Architecture.from_hf(CONFIGS["llama"])
    weights = load_weights(None, spec, torch.float32, "cpu", seed=1)

    def after(tokens):
        x = eager_logits(spec, weights, torch.tensor([*PROMPT, *tokens]))[-1].double().numpy()
        seen = np.isin(np.arange(len(x)), [*PROMPT, *tokens])
        x = np.where(seen, np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty), x)
        counts = np.bincount(np.array(tokens, int), minlength=len(x))
        x = x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        weights_of = np.exp((x - x.max()) / params.temperature)
        return weights_of / weights_of.sum()

    first = after([])
    yield first
    yield sum(p * after([token]) for token, p in enumerate(first))


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param("sampled", marks=pytest.mark.slow), "penalised"])
def test_triton_kernels_draw_the_same_tokens(way):
    """In Triton's interpreter: drawn drafts, filters, and penalties that count the drafts before a row."""
    params = SamplingParams(temperature=0.6, top_p=0.9, max_tokens=4, ignore_eos=True, seed=4)
    if way == "penalised":
        params = replace(params, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.6)
    asked = prompts()[1:3]
    ours = drawing(backend="triton").generate(asked, params)
    assert tokens_of(ours) == tokens_of(drawing().generate(asked, params))
    assert sum(output.drafts.num_accepted_tokens for output in ours if output.drafts) > 0


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
