"""An engine that drops KV, beside a plain model that masks the same keys and a core without an engine."""

import torch

from policies.caching.pool import KvMemory
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request
from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.settings import EngineSettings
from realengine.weights.load import load_weights
from tests.realengine.checkpoints import LLAMA
from tests.realengine.eager import eager_logits
from tests.realengine.steps import prompts

ASKED = prompts(40, (1, 9, 14, 15, 33, 60))
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def make(caching, config=LLAMA, **settings):
    settings = {"device": "cpu", "num_kv_blocks": 200, "seed": 1} | settings
    return LLM(Architecture.from_hf(config), caching=caching, **settings)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def greedy(prompt, prefills, mask):
    """Returns 30 tokens of the plain model.

    prefills: numbers of tokens that were computed as a prompt. mask(last prefill): arguments of
    `eager_logits` that mask the dropped keys.
    """
    architecture = Architecture.from_hf(LLAMA)
    weights = load_weights(None, architecture, torch.float32, "cpu", seed=1)
    tokens = list(prompt)
    for _ in range(30):
        masked = mask(max(num for num in prefills if num <= len(tokens)))
        tokens.append(int(eager_logits(architecture, weights, torch.tensor(tokens), **masked)[-1].argmax()))
    return tuple(tokens[len(prompt) :])


def preempted(llm, asked):
    """Returns the tokens of requests of which some are preempted, and the lengths of all prefills of each."""
    launch, prefills = llm.engine.runner.launch, [[] for _ in asked]

    def launched(plan, num_iterations=1):
        for chunk in plan.chunks:
            if chunk.completes:
                prefills[chunk.seq.request_id].append(chunk.num_cached + chunk.num_tokens)
        return launch(plan, num_iterations)

    llm.engine.runner.launch = launched
    found = tokens_of(llm.generate(asked, GREEDY))
    assert llm.engine.core.num_preemptions
    llm.engine.core.check_integrity()
    return found, prefills


def steps_beside_a_core(caching, num_blocks=40):
    """Yields the engine's core after each step, once it holds the same blocks as a core without an engine."""
    settings = EngineSettings(device="cpu")
    core = EngineCore(
        batching=settings.batching,
        scheduling=settings.scheduling,
        block_pool=caching.pool(KvMemory(num_blocks)),
        max_num_seqs=256,
        max_model_len=128,
    )
    engine = make(caching, num_kv_blocks=num_blocks).engine
    for number, prompt in enumerate(ASKED):
        engine.add(prompt, GREEDY)
        core.add(Request(number, 0.0, Prompt(len(prompt)), max_tokens=30))
    while (plan := core.plan(0.0)) is not None:
        core.commit(plan, StepOutcome(), 0.0)
        engine.step()
        ours, theirs = engine.core, core
        assert ours.block_pool.num_free == theirs.block_pool.num_free
        assert (ours.num_unfinished, ours.num_waiting) == (theirs.num_unfinished, theirs.num_waiting)
        yield ours


def num_equal_starts(outputs, expected):
    """Returns how many outputs have the expected first four tokens."""
    return sum(a[:4] == b[:4] for a, b in zip(tokens_of(outputs), expected, strict=True))
