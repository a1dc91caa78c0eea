"""Passes that are replayed as graphs change no token, and write no KV of others."""

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from kernels.launch import compiling_for
from policies.batching.chunked import Chunked
from policies.speculation.draft_lengths import Adaptive, ByBatchSize, Fixed, NoDrafts
from policies.speculation.engine.drafts import Shapes
from policies.speculation.proposers import DraftModel, Medusa
from realengine.model.architecture import Architecture
from realengine.model.kv_cache import KvCache
from realengine.model.lora import make_segments
from realengine.runner import graphs, rank
from realengine.runner.executor import Executor
from realengine.runner.graphs import Recording, default_sizes
from realengine.runner.packing import num_pass_segments, pack_uniform
from realengine.runner.rank import build_executor
from realengine.runner.work import NO_TOKEN, Padding, Shape
from realengine.serving.model import Model
from realengine.settings import EngineSettings
from realengine.speculation.drafter import LoadedDraft
from realengine.speculation.graph_sizes import captured_levels, sizes_of
from realengine.speculation.settings import SpeculationSettings
from tests.realengine.adapters import random_adapter
from tests.realengine.recorded import record_on_cpu
from tests.realengine.small_models import CONFIGS, make
from tests.realengine.speculation.methods import DRAFTERS, LIKE_TARGET
from tests.realengine.speculation.scripted import ScriptedDrafter
from tests.realengine.speculation.test_lossless import (
    GREEDY,
    PENALISED,
    SAMPLED,
    TREE,
    plain_outputs,
    prompts,
    tokens_of,
)

torch.set_num_threads(1)

WAYS = {
    "greedy": GREEDY,
    "sampled": replace(SAMPLED, logprobs=None),
    "penalised": PENALISED,
    "logprobs": SAMPLED,
}


@pytest.fixture
def recorders(monkeypatch):
    return record_on_cpu(monkeypatch)


def expected(params, **settings):
    return tokens_of(plain_outputs(params, **settings))


def replayed(recorders, params=GREEDY, **settings):
    """Returns the tokens of an engine with graphs, and how often it has replayed one."""
    recorders.clear()
    llm = make(cudagraph_mode="FULL_DECODE_ONLY", **settings)
    (recorder,) = recorders
    num_recorded = recorder.num_recorded
    tokens = tokens_of(llm.generate(prompts(), params))
    assert recorder.num_recorded == num_recorded > 0, "a graph was captured in service"
    llm.engine.core.check_integrity()
    return tokens, recorder.num_replayed


@pytest.mark.parametrize("way", WAYS)
def test_plain_decodes_in_graphs_give_the_same_tokens(recorders, way):
    tokens, num = replayed(recorders, WAYS[way])
    assert tokens == expected(WAYS[way])
    assert num > 0


@pytest.mark.sampled(fast=7, slow=10)
@pytest.mark.parametrize("method", DRAFTERS)
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_passes_in_graphs_give_the_same_tokens(recorders, method, way):
    tokens, num = replayed(recorders, WAYS[way], speculative_config=DRAFTERS[method])
    assert tokens == expected(WAYS[way])
    assert num > 0


@pytest.mark.parametrize("method", ["ngram", "smaller", "medusa_tree", "eagle"])
@pytest.mark.parametrize("way", ["penalised", "logprobs"])
def test_penalties_and_logprobs_are_drawn_after_the_graph(recorders, method, way):
    """The target is replayed; what draws, verifies and drafts runs eagerly."""
    llm = make(cudagraph_mode="FULL_DECODE_ONLY", speculative_config=DRAFTERS[method])
    graphs = llm.engine.runner._graphs
    finished = Mock(wraps=graphs.finish)
    graphs.finish = finished
    recorders[-1].num_replayed = 0
    outputs, plain = llm.generate(prompts(), WAYS[way]), plain_outputs(WAYS[way])
    assert tokens_of(outputs) == tokens_of(plain)
    for one, other in zip(outputs, plain, strict=True):
        pairs = zip(one.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True)
        assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)
    assert recorders[-1].num_replayed > 0
    finished.assert_not_called()


@pytest.mark.sampled(fast=7, slow=10)
@pytest.mark.parametrize("method", ["ngram", "draft_model", "medusa_tree"])
@pytest.mark.parametrize(
    "settings",
    [
        {"batching": Chunked(max_num_batched_tokens=32)},
        {"num_kv_blocks": 24},
        {"overlap": True},
        {"max_iterations": 4},
        {"config": "mistral"},
        {"kv_cache_dtype": "int8"},
        {"max_model_len": 70},
        {"max_num_seqs": 3},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_mixed_steps_and_other_settings_with_graphs_change_no_token(recorders, settings, method):
    config = {key: value for key, value in settings.items() if key == "config"}
    draft = DRAFTERS[method]
    if config and method == "draft_model":
        draft = draft | {"model": Architecture.from_hf(CONFIGS["mistral"])}
    tokens, num = replayed(recorders, replace(GREEDY, max_tokens=30), speculative_config=draft, **settings)
    alone = {key: value for key, value in settings.items() if key not in ("overlap", "max_iterations")}
    assert tokens == expected(replace(GREEDY, max_tokens=30), **alone)
    assert num > 0


def test_adapters_in_graphs_change_no_token(recorders):
    adapters = {
        name: random_adapter(LIKE_TARGET, 4, seed=seed, scaling=40.0) for seed, name in enumerate("ab")
    }
    names, settings = [None, "a", "b", "a", None, "b"], {"lora_adapters": adapters, "max_loras": 2}
    plain = make(**settings).generate(prompts(), GREEDY, names)
    for method in ("ngram", "draft_model", "medusa_tree"):
        llm = make(**settings, cudagraph_mode="FULL_DECODE_ONLY", speculative_config=DRAFTERS[method])
        assert tokens_of(llm.generate(prompts(), GREEDY, names)) == tokens_of(plain)
        assert recorders[-1].num_replayed > 0


def test_graphs_without_a_gpu_are_refused():
    with pytest.raises(
        ValueError, match="cudagraph_mode: CUDA graphs need a GPU, and the engine runs on the"
    ):
        make(cudagraph_mode="FULL_DECODE_ONLY")


def scripted(monkeypatch, rate, tree=None):
    """Makes engines draft the right tokens at a rate; the drafter runs on the host, so outside of graphs."""
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts(), expected(GREEDY), strict=True)]

    def load(settings, context):
        drafter = ScriptedDrafter(texts, rate, CONFIGS["llama"]["vocab_size"], tree)
        return LoadedDraft(0, lambda cache: drafter)

    monkeypatch.setattr(rank, "load_draft", load)


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_drafters_that_read_back_run_after_the_graph(recorders, monkeypatch, rate, shape):
    tree = TREE if shape == "tree" else None
    scripted(monkeypatch, rate, tree)
    proposer = DraftModel(draft=None, num_speculative_tokens=4)
    if tree is not None:
        proposer = Medusa(draft=None, num_speculative_tokens=tree.num_nodes, tree=tree)
    speculation = SpeculationSettings(proposer=proposer, models=("unused",))
    tokens, num = replayed(recorders, speculative_config=speculation)
    assert tokens == expected(GREEDY)
    assert num > 0


@pytest.mark.parametrize(
    "policy",
    [
        Fixed(num_tokens=0),
        NoDrafts(),
        Fixed(num_tokens=2),
        ByBatchSize(num_speculative_tokens_per_batch_size=((1, 2, 4), (3, 4, 2), (5, 9, 0))),
        Adaptive(),
    ],
    ids=["zero", "none", "two", "by_batch_size", "adaptive"],
)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_any_draft_length_with_graphs_changes_no_token(recorders, policy, method):
    config = DRAFTERS[method] | {"draft_length": policy}
    tokens, num = replayed(recorders, speculative_config=config)
    assert tokens == expected(GREEDY)
    assert num > 0


@pytest.mark.parametrize("method", ["ngram", "smaller", "medusa_tree"])
def test_padding_writes_no_kv(recorders, monkeypatch, method):
    """Three sequences leave the KV that they leave without graphs, in all blocks but the unused 0."""
    found, caches = [], []

    class Kept(KvCache):
        def __init__(self, *args):
            super().__init__(*args)
            caches.append(self)

    monkeypatch.setattr(rank, "KvCache", Kept)
    for mode in ("NONE", "FULL_DECODE_ONLY"):
        llm = make(cudagraph_mode=mode, speculative_config=DRAFTERS[method], num_kv_blocks=40)
        llm.generate(prompts()[3:], GREEDY)
        found.append([x for sets in caches[-1].cache_sets for x in sets.tensors])
    assert recorders[-1].num_replayed > 0
    for eager, graph in zip(*found, strict=True):
        torch.testing.assert_close(eager[1:], graph[1:], rtol=1e-4, atol=1e-5)


def test_drawn_drafts_in_graphs_are_those_without(recorders):
    """Drafts that are drawn make other tokens than no drafts, but the same with graphs and without them."""
    config = DRAFTERS["smaller"] | {"draft_sample_method": "probabilistic"}
    params = [replace(WAYS["sampled"], seed=seed) for seed in range(6)]
    eager = make(speculative_config=config).generate(prompts(), params)
    graph = make(speculative_config=config, cudagraph_mode="FULL_DECODE_ONLY").generate(prompts(), params)
    assert tokens_of(graph) == tokens_of(eager)
    assert recorders[-1].num_replayed > 0
    assert sum(output.drafts.num_accepted_tokens for output in graph if output.drafts) > 0


def test_a_warm_up_times_the_graphs(recorders):
    config = DRAFTERS["draft_model"] | {"draft_length": Adaptive(), "num_speculative_tokens": 4}
    llm = make(cudagraph_mode="FULL_DECODE_ONLY", speculative_config=config)
    # Two graphs of 1 and of 8 sequences, 0 and 4 drafts, three times.
    assert recorders[-1].num_replayed == 2 * 2 * 2 * 3
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected(GREEDY)


def graphs_of(num_drafts, levels, *, max_num_seqs=256, drafts=False, max_context_len=4096):
    shapes = Shapes(DraftModel(draft=None, num_speculative_tokens=num_drafts))
    sizes = sizes_of(shapes, levels, default_sizes(max_num_seqs), max_context_len, drafts=drafts)
    return graphs.Graphs(PaddedSteps(max_num_seqs), sizes, has_adapters=False, device=torch.device("cpu"))


class PaddedSteps:
    """Stands for an executor: tells the steps of padding only."""

    def __init__(self, max_num_seqs):
        self._padding = Padding(max_num_seqs, 10)

    def padded(self, size, draw, *, has_adapters):
        return pack_uniform(size, 4096, draw, self._padding, token=NO_TOKEN, has_tree=False)


@given(
    num_drafts=st.lists(st.integers(0, 8), min_size=1, max_size=256),
    next_levels=st.integers(0, 8),
    drafts=st.booleans(),
)
def test_a_graph_fits_its_pass(num_drafts, next_levels, drafts):
    with pytest.MonkeyPatch.context() as patch:
        record_on_cpu(patch)
        found = graphs_of(8, (0, 4, 8), drafts=drafts).fit(
            len(num_drafts), len(num_drafts) + sum(num_drafts), max(num_drafts), next_levels
        )
    if found is None:
        return
    assert found.num_seqs >= len(num_drafts)
    assert found.num_drafts >= max(num_drafts)
    assert found.num_rows <= graphs.MAX_ROWS
    assert found.num_rows <= max(graphs.FEW_ROWS, 2 * (len(num_drafts) + sum(num_drafts)))
    assert found.num_levels == (next_levels if drafts else None)


def test_a_uniform_pass_has_a_graph_up_to_the_most_rows(recorders):
    made = graphs_of(4, (4,))
    for num_seqs in range(1, 257):
        size = made.fit(num_seqs, 5 * num_seqs, 4, 4)
        assert (size is not None) == (num_seqs <= 96), num_seqs  # 96 is the last size with 5 rows each in 512


def test_more_drafts_than_the_graphs_have_rows_run_eagerly(recorders, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_ROWS", 4)
    config = DRAFTERS["draft_model"] | {"num_speculative_tokens": 6}
    recorders.clear()
    llm = make(cudagraph_mode="FULL_DECODE_ONLY", speculative_config=config)
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected(GREEDY)
    assert [(each.num_recorded, each.num_replayed) for each in recorders] == [(0, 0)]


def test_rows_beyond_the_context_are_not_captured(recorders):
    assert graphs_of(8, (0, 4, 8), max_context_len=8).fit(1, 9, 8, 8) is None
    assert graphs_of(8, (0, 4, 8), max_context_len=9).fit(1, 9, 8, 8) is not None


@pytest.mark.parametrize(
    ("policy", "on_device", "levels"),
    [
        (Fixed(), True, (6,)),
        (Fixed(), False, (0, 6)),
        (Fixed(num_tokens=9), True, (6,)),
        (NoDrafts(), True, (0,)),
        (
            ByBatchSize(num_speculative_tokens_per_batch_size=((1, 2, 8), (3, 4, 2), (5, 9, 0))),
            True,
            (0, 2, 6),
        ),
        (Adaptive(), True, (0, 3, 6)),
    ],
)
def test_graphs_have_the_numbers_that_a_policy_may_decide(policy, on_device, levels):
    shapes = Shapes(DraftModel(draft=None, num_speculative_tokens=6))
    assert captured_levels(shapes, policy, drafts_on_device=on_device) == levels


def test_uneven_adapters_fit_the_segments_of_a_graph(recorders):
    size = graphs_of(7, (7,)).fit(48, 48 * 8, 7, 7)
    bank = SimpleNamespace(max_segment_tokens=lambda only_decodes: 8 if only_decodes else 64)
    rng = np.random.default_rng(0)
    for _ in range(50):
        slots = rng.integers(-1, 3, size.num_seqs).tolist()
        segments = make_segments(slots, [8] * size.num_seqs, 64)
        assert len(segments.slots) <= num_pass_segments(size, bank)


class NoHostData(TorchFunctionMode):
    """Refuses tensors of the host's data, which a graph would copy once and for all."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy), func
        return func(*args, **(kwargs or {}))


class Captured:
    """Runs what is recorded as a capture does: nothing may be read back or copied from the host."""

    shapes: ClassVar[list] = []

    def __init__(self, device):
        self.shapes.clear()

    def record(self, prepare, run):
        run()  # as before a capture: what is kept is made now
        with NoHostData():
            result = run()
        self.shapes.append(next(each for each in run.args if isinstance(each, Shape)))
        return Recording(lambda: None, result)


@pytest.mark.sampled(fast=3, slow=6)
@pytest.mark.parametrize(
    ("method", "draw"),
    [
        *((name, "greedy") for name in DRAFTERS if name not in ("ngram", "suffix", "specinfer", "lookahead")),
        ("smaller", "probabilistic"),
        *(pytest.param(x, "probabilistic", marks=pytest.mark.slow) for x in ("draft_model", "self")),
    ],
)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_captured_pass_reads_nothing_back_to_the_host(monkeypatch, method, draw):
    """Fake tensors have no values, and reading one raises."""
    monkeypatch.setattr("realengine.runner.graphs.Recorder", Captured)
    monkeypatch.setattr(Executor, "warm_up", lambda executor: None)
    launched = []
    settings = EngineSettings(
        device="cpu",
        backend="triton",
        dtype="float16",
        cudagraph_mode="FULL_DECODE_ONLY",
        max_num_seqs=3,
        num_kv_blocks=20,
        speculative_config=DRAFTERS[method] | {"draft_sample_method": draw},
    )
    with FakeTensorMode(), compiling_for("sm_90", lambda kernel, *_: launched.append(kernel.__name__)):
        build_executor(Model.of(LIKE_TARGET), settings, torch.device("cpu"))
    assert {shape.num_decodes for shape in Captured.shapes} == {1, 2, 3}
    assert {"prefill_attention_kernel", "match_kernel", "draw_kernel"} <= set(launched)
    assert ("move_tokens_kernel" in launched) == ("tree" in method)
