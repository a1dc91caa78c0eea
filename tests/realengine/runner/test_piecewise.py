"""Steps in pieces between captured graphs change no token (a recomputed call stands for a CUDA graph)."""

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from kernels.launch import Repeated
from policies.batching.chunked import Chunked
from policies.scheduling.fcfs import Fcfs
from realengine.model.architecture import Architecture
from realengine.model.decoder import Decoder
from realengine.runner import piecewise
from realengine.runner.piecewise import PiecewiseGraphs
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.settings import EngineSettings
from tests.realengine.adapters import random_adapter
from tests.realengine.recorded import record_on_cpu
from tests.realengine.small_models import CONFIGS, GREEDY, make, prompts, tokens_of
from tests.realengine.speculation.methods import DRAFTERS, LIKE_TARGET
from tests.realengine.test_families import CONFIGS as FAMILIES

torch.set_num_threads(1)

FEW = Chunked(max_num_batched_tokens=32)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=3, logprobs=1)


@pytest.fixture
def recorders(monkeypatch):
    return record_on_cpu(monkeypatch)


@pytest.fixture
def whole_steps(monkeypatch):
    """Returns the numbers of tokens of the steps that were not computed in pieces."""
    inner, found = Decoder.sampled_states, []

    def sampled_states(self, batch, cache):
        found.append(len(batch.tokens_T))
        return inner(self, batch, cache)

    monkeypatch.setattr(Decoder, "sampled_states", sampled_states)
    return found


def outputs(params, **settings):
    llm = make(**settings)
    found = tokens_of(llm.generate(prompts(), params))
    llm.engine.core.check_integrity()
    return found


@pytest.mark.sampled(fast=3, slow=7)
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batching": FEW, "num_kv_blocks": 24},
        {"batching": FEW, "num_kv_blocks": 24, "scheduling": Fcfs(preemption_mode="swap")},
        {"config": "mistral", "overlap": True},
        {"config": "qwen3", "kv_cache_dtype": "int8", "max_iterations": 4},
    ],
    ids=["plain", "recompute", "swap", "window", "iterations"],
)
def test_pieces_change_no_token(recorders, settings, mode):
    for params in (GREEDY, SAMPLED, replace(GREEDY, n=3, temperature=1.0, presence_penalty=0.3)):
        expected = outputs(params, **settings)
        assert outputs(params, **settings, cudagraph_mode=mode) == expected
        assert recorders[-1].num_replayed > 0


def test_all_steps_of_up_to_512_tokens_are_in_pieces(recorders, whole_steps):
    llm = make(cudagraph_mode="PIECEWISE", max_num_seqs=4)
    whole_steps.clear()
    llm.generate(prompts(), GREEDY)
    assert whole_steps == []
    long = Architecture.from_hf(CONFIGS["llama"] | {"max_position_embeddings": 1024})
    llm = LLM(long, seed=1, device="cpu", num_kv_blocks=200, max_num_seqs=4, cudagraph_mode="PIECEWISE")
    whole_steps.clear()
    llm.generate([[5] * 513, [7] * 512], replace(GREEDY, max_tokens=2))
    assert whole_steps == [1025]


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 100, 512])
def test_padding_changes_nothing(recorders, num_tokens):
    """A prompt of any length leaves the KV and the states that it leaves without pieces."""
    architecture = Architecture.from_hf(CONFIGS["llama"] | {"max_position_embeddings": 1024})
    found = []
    for mode in ("NONE", "PIECEWISE"):
        llm = LLM(architecture, seed=1, device="cpu", num_kv_blocks=40, max_num_seqs=2, cudagraph_mode=mode)
        output = llm.generate([[5] * num_tokens], replace(GREEDY, logprobs=5, max_tokens=3))[0].outputs[0]
        found.append(output)
    plain, pieces = found
    assert pieces.token_ids == plain.token_ids
    for one, other in zip(pieces.logprobs, plain.logprobs, strict=True):
        assert list(one.top) == list(other.top)
        assert list(one.top.values()) == pytest.approx(list(other.top.values()), abs=1e-4)


@pytest.mark.sampled(fast=2, slow=4)
@pytest.mark.parametrize("method", ["ngram", "draft_model", "medusa_tree", "eagle", "eagle3", "mtp"])
def test_passes_with_drafts_in_pieces_change_no_token(recorders, monkeypatch, method):
    num_pieces, inner = Counter(), PiecewiseGraphs.states

    def states(self, batch):
        num_pieces[len(batch.tokens_T)] += 1
        return inner(self, batch)

    monkeypatch.setattr(PiecewiseGraphs, "states", states)
    penalised = replace(GREEDY, presence_penalty=0.6, logprobs=1)
    for params in (GREEDY, penalised):
        expected = outputs(params)
        for mode in ("PIECEWISE", "FULL_AND_PIECEWISE"):
            num_pieces.clear()
            assert outputs(params, cudagraph_mode=mode, speculative_config=DRAFTERS[method]) == expected
            assert bool(num_pieces) == (method != "eagle3")  # it reads the inputs of layers


def test_steps_with_adapters_run_whole(recorders, whole_steps):
    adapters = {"a": random_adapter(LIKE_TARGET, 4, seed=0, scaling=40.0)}
    names = [None, "a"] * (len(prompts()) // 2)
    settings = {"lora_adapters": adapters}
    expected = tokens_of(make(**settings).generate(prompts(), GREEDY, names))
    llm = make(**settings, cudagraph_mode="PIECEWISE")
    whole_steps.clear()
    assert tokens_of(llm.generate(prompts(), GREEDY, names)) == expected
    assert whole_steps


@pytest.mark.parametrize("name", FAMILIES)
def test_families_in_pieces_change_no_token(recorders, monkeypatch, name):
    steps, inner = [], PiecewiseGraphs.states
    monkeypatch.setattr(PiecewiseGraphs, "states", lambda self, batch: steps.append(1) or inner(self, batch))
    architecture = Architecture.from_hf(FAMILIES[name])
    texts, settings = prompts(), {"seed": 1, "device": "cpu", "num_kv_blocks": 200, "max_num_seqs": 8}
    expected = tokens_of(LLM(architecture, **settings).generate(texts, GREEDY))
    llm = LLM(architecture, **settings, cudagraph_mode="FULL_AND_PIECEWISE")
    assert tokens_of(llm.generate(texts, GREEDY)) == expected
    assert bool(steps) == (architecture.latent is None)


@pytest.mark.parametrize("mode", ["FULL", "full", "eager"])
def test_other_modes_are_refused_by_name(mode):
    with pytest.raises(ValueError, match=f"cudagraph_mode={mode}: .*FULL_AND_PIECEWISE"):
        EngineSettings(device="cpu", cudagraph_mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", pytest.param("baichuan", marks=pytest.mark.slow)])
def test_layers_of_a_kind_repeat_the_first_ones_launches(recorders, monkeypatch, name):
    """Kernels in the interpreter: the second layer launches the attention of the first one on its tensors."""
    monkeypatch.setattr(piecewise, "SIZES", (32,))
    architecture = replace(Architecture.from_hf(FAMILIES[name]), num_layers=2)
    counts, inner = Counter(), Repeated.on
    monkeypatch.setattr(Repeated, "on", lambda self, on: counts.update(["repeated"]) or inner(self, on))
    texts = [[5] * 20, [7] * 9]
    settings = {"seed": 1, "device": "cpu", "num_kv_blocks": 20, "max_num_seqs": 2}
    short = replace(GREEDY, max_tokens=2)
    expected = tokens_of(LLM(architecture, **settings).generate(texts, short))
    llm = LLM(architecture, **settings, backend="triton", cudagraph_mode="PIECEWISE")
    assert tokens_of(llm.generate(texts, short)) == expected
    assert counts["repeated"]
