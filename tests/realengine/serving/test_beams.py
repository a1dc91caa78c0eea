"""Beam search against all continuations, transformers' own search, and itself under memory pressure."""

import re
from itertools import product

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request
from policies.scheduling.mlfq import Mlfq
from realengine.model.architecture import Architecture
from realengine.serving.beams import BeamSearchParams
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.settings import EngineSettings
from realengine.weights.load import load_weights
from sim.workload.base import Answers
from tests.realengine.checkpoints import LLAMA
from tests.realengine.eager import eager_logits
from tests.realengine.steps import prompts

torch.set_num_threads(1)

TINY = LLAMA | {"vocab_size": 4, "eos_token_id": 3}
PLAIN = BeamSearchParams(beam_width=4, max_tokens=11, ignore_eos=True)


def make(config=LLAMA, **settings):
    return LLM(Architecture.from_hf(config), **{"device": "cpu", "num_kv_blocks": 300, "seed": 1} | settings)


def found(outputs):
    return [[sequence.tokens for sequence in output.sequences] for output in outputs]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0, -1.0])
def test_a_beam_that_holds_everything_finds_the_best_of_all_continuations(length_penalty):
    """Three tokens go on and one ends: 27 hypotheses of three tokens are all that there are."""
    prompt, num_tokens = [1, 2, 0, 1, 1], 4
    architecture = Architecture.from_hf(TINY)
    weights = load_weights(None, architecture, torch.float32, "cpu", seed=1)
    scored = {}
    for body in product(range(3), repeat=num_tokens):
        logprobs = eager_logits(architecture, weights, torch.tensor([*prompt, *body])).log_softmax(-1)
        at = [logprobs[len(prompt) - 1 + place] for place in range(num_tokens)]
        for end in range(num_tokens + 1):
            total = sum(float(at[place][body[place]]) for place in range(end))
            tokens = (*prompt, *body[:end])
            if end < num_tokens:
                tokens, total = (*tokens, 3), total + float(at[end][3])
            scored[tokens] = (total / (len(prompt) + end) ** length_penalty, total)
    params = BeamSearchParams(beam_width=27, max_tokens=num_tokens, length_penalty=length_penalty)
    (output,) = make(TINY).beam_search([prompt], params)
    best = sorted(scored, key=lambda tokens: -scored[tokens][0])[:27]
    assert [sequence.tokens for sequence in output.sequences] == best
    for sequence in output.sequences:
        assert sequence.cum_logprob == pytest.approx(scored[sequence.tokens][1], abs=1e-4)
        assert sequence.finish_reason == ("stop" if sequence.tokens[-1] == 3 else "length")


@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_search_of_transformers_finds_the_same(width, tmp_path):
    hf = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(2)
    config = hf.LlamaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=128, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    llm = LLM(
        tmp_path, device="cpu", dtype="float32", num_kv_blocks=40, batching=Chunked(max_num_batched_tokens=24)
    )
    params = BeamSearchParams(beam_width=width, max_tokens=12, ignore_eos=True)
    for prompt, output in zip(prompts(61), llm.beam_search(prompts(61), params), strict=True):
        made = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)),
            num_beams=width, num_return_sequences=width, max_new_tokens=12,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        assert [list(sequence.tokens) for sequence in output.sequences] == made.tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_kv_blocks": 13},
        {
            "num_kv_blocks": 26,
            "caching": PrefixCaching(block_size=4),
            "scheduling": Mlfq(quantum_tokens=3, num_levels=3, preemption_mode="swap"),
        },
        {"overlap": True, "max_iterations": 4},
        {"batching": Chunked(max_num_batched_tokens=16), "caching": PrefixCaching(block_size=2)},
    ],
    ids=["recompute", "swap", "overlap", "chunks"],
)
def test_whatever_happens_around_it_a_search_finds_the_same(settings):
    asked = prompts(40, (1, 15, 33, 16, 7))
    ends = BeamSearchParams(beam_width=3, max_tokens=14, length_penalty=0.5)
    plain = make()
    expected = [
        found(plain.beam_search([prompt], params)[0:1])[0] for params in (PLAIN, ends) for prompt in asked
    ]
    llm = make(**settings)
    beside = [llm.engine.add(prompt, SamplingParams(temperature=0, max_tokens=20)) for prompt in asked[:2]]
    both = found(llm.beam_search(asked, PLAIN)) + found(llm.beam_search(asked, ends))
    assert both == expected
    greedy = [plain.generate([prompt], SamplingParams(temperature=0, max_tokens=20)) for prompt in asked[:2]]
    assert [tuple(one.outputs[0].tokens) for one in beside] == [one[0].outputs[0].token_ids for one in greedy]
    core = llm.engine.core
    core.check_integrity()
    assert core.num_unfinished == 0
    assert (core.num_preemptions > 0) == ("num_kv_blocks" in settings)


def test_the_simulators_model_of_beams_driven_by_the_same_parents_has_the_same_plans():
    """Its clock and its parents are inputs: then blocks, copies and contexts of all steps are equal."""
    asked = prompts(40, (15, 33, 16))
    llm = make(num_kv_blocks=11, caching=Paged())
    plans, outcomes = [], []
    plan_of, commit = llm.engine.core.plan, llm.engine.core.commit

    def planned(now):
        plan = plan_of(now)
        if plan is not None:
            plans.append(summary(llm.engine.core, plan))
        return plan

    def committed(plan, outcome, now):
        outcomes.append(dict(outcome.parents))
        return commit(plan, outcome, now)

    llm.engine.core.plan, llm.engine.core.commit = planned, committed
    llm.beam_search(asked, PLAIN)
    assert llm.engine.core.num_preemptions
    settings = EngineSettings(device="cpu")
    core = EngineCore(
        batching=settings.batching,
        scheduling=settings.scheduling,
        block_pool=Paged().pool(KvMemory(11)),
        max_num_seqs=256,
        max_model_len=128,
    )
    for number, prompt in enumerate(asked):
        branching = Answers(width=4, every=1).branching
        core.add(Request(number, 0.0, Prompt(len(prompt)), max_tokens=11, branching=branching))
    for expected, parents in zip(plans, outcomes, strict=True):
        plan = core.plan(0.0)
        assert summary(core, plan) == expected
        core.commit(plan, StepOutcome(parents=parents), 0.0)
    assert core.num_unfinished == 0


def summary(core, plan):
    return (
        [(chunk.seq.request_id, chunk.num_tokens) for chunk in plan.chunks],
        [seq.request_id for seq in plan.branched],
        plan.num_copied_tokens,
        plan.num_decode_context_tokens,
        core.block_pool.num_free,
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width=0: must be a whole number >= 1 and <= 50"),
        ({"beam_width": 51}, "beam_width=51: must be a whole number >= 1 and <= 50"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens=0: must be a whole number >= 1"),
        ({"beam_width": 2, "ignore_eos": 1}, "ignore_eos=1: must be true or false"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature=0.7: must be 0, because a beam search draws"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty=nan: must be a number >= -20"),
        ({"beam_width": 2, "length_penalty": 400}, "length_penalty=400: must be a number >= -20 and <= 20"),
    ],
)
def test_bad_parameters_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BeamSearchParams(**fields)


def test_a_search_that_cannot_be_served_is_an_error():
    with pytest.raises(ValueError, match="prompt token 0 is 99"):
        make().beam_search([[99]], PLAIN)
    llm = make(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    with pytest.raises(
        ValueError, match="4 branches: an engine that speculates serves one answer per request"
    ):
        llm.beam_search([[1, 2]], PLAIN)
