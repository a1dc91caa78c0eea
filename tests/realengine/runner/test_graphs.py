"""Decode steps in graphs with any kinds of requests (a recomputed call stands for a CUDA graph)."""

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from realengine.runner.executor import Executor
from realengine.runner.sampler import Sampler
from realengine.serving.sampling_params import SamplingParams
from tests.realengine.recorded import record_on_cpu
from tests.realengine.small_models import make, prompts

torch.set_num_threads(1)

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
KINDS = {
    "penalties": replace(GREEDY, presence_penalty=0.7, repetition_penalty=1.3),
    "logprobs": replace(GREEDY, logprobs=3),
    "penalties_and_logprobs": replace(GREEDY, temperature=0.9, seed=5, frequency_penalty=0.7, logprobs=1),
    "masks": replace(GREEDY, min_tokens=9, stop_token_ids=tuple(range(20, 60))),
}


@pytest.fixture
def recorders(monkeypatch):
    return record_on_cpu(monkeypatch)


def outputs(params, **settings):
    found = make(**settings).generate(prompts(), params)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found]


def counted(monkeypatch, owner, name):
    """Counts the calls of a method."""
    inner, calls = getattr(owner, name), []

    def call(self, *args):
        calls.append(args)
        return inner(self, *args)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.mark.parametrize(
    "settings", [{}, {"overlap": True, "max_iterations": 4}], ids=["plain", "iterations"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_row_of_a_kind_keeps_the_batch_in_the_graphs(recorders, monkeypatch, kind, settings):
    params = [KINDS[kind] if row == 2 else GREEDY for row in range(len(prompts()))]
    expected = outputs(params)
    eager_steps = counted(monkeypatch, Executor, "_eager")
    assert outputs(params, cudagraph_mode="FULL_DECODE_ONLY", **settings) == expected
    assert recorders[-1].num_replayed > 0
    assert eager_steps
    assert not any(shape.is_decode for shape, *_ in eager_steps if shape is not None and shape.num_rows > 1)


@pytest.mark.parametrize("kind", ["greedy", "sampled", *KINDS])
def test_only_penalties_make_the_engine_count_tokens(recorders, monkeypatch, kind):
    params = {"greedy": GREEDY, "sampled": replace(GREEDY, temperature=1.0), **KINDS}[kind]
    calls = counted(monkeypatch, Sampler, "counts")
    outputs(params, cudagraph_mode="FULL_DECODE_ONLY")
    assert bool(calls) == (kind not in ("greedy", "sampled", "logprobs"))


def test_no_graph_is_captured_in_service(recorders):
    llm = make(cudagraph_mode="FULL_DECODE_ONLY")
    num_recorded = recorders[-1].num_recorded
    llm.generate(prompts(), [list(KINDS.values())[row % len(KINDS)] for row in range(len(prompts()))])
    assert recorders[-1].num_recorded == num_recorded == 3 * len(llm.engine.runner._graphs.sizes)
