"""The measured sections of a step: they name every operator, add up to the step, and become profile rows."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from experiments.calibrate.engine import gpu_sections
from experiments.calibrate.engine.grids import Point
from experiments.calibrate.engine.measure import Sections, measure
from experiments.calibrate.engine.pace import variation
from experiments.calibrate.engine.profile_rows import profile_rows
from experiments.calibrate.engine.served import architecture_of, quantization_of, serve
from experiments.calibrate.engine.steps import Chunk, Step
from experiments.calibrate.engine.watch import Catcher
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.runner.work import StepSize
from tests.experiments.calibrate.engine.tiny import TINY, quiet, spec
from tests.realengine.steps import batch_of

torch.set_num_threads(1)


SECTIONS = {
    *("inputs", "embedding", "layernorm", "rope_and_write_kv", "activation", "lm_head", "sampler", "outputs"),
    *("qkv", "o", "gate_up", "down"),
}


@pytest.mark.parametrize("verifies", [False, True])
def test_a_watched_step_draws_the_tokens_of_the_decoder_alone(served, verifies):
    """Two decodes and a chunk, by packed words, against `Decoder.logits` of the same tokens and blocks.

    verifies: whether the first chunk draws at all of its 7 rows.
    """
    step = Step(contexts=(5, 33), chunks=(Chunk(0, 7, verifies=verifies), Chunk(16, 4, completes=False)))
    drawn_rows = [0, 1, *(range(2, 9) if verifies else [8])]
    assert step.num_drawn == step.shape.sampled_seqs == len(drawn_rows)
    work = served.work(step)
    served.executor.run(work)
    drawn = served.executor.run(work)
    words = work.words[12 * len(drawn_rows) :]
    tokens, positions = words[:13], words[13:26]
    assert positions.tolist() == [4, 32, *range(7), *range(16, 20)]
    decoder = Decoder(served.architecture, served.weights, served.backend, 128)
    cache = served.executor._cache
    tables = served.executor._tables_SM[:4]
    sequences, at = [], 0
    for first, count in ((4, 1), (32, 1), (0, 7), (16, 4)):
        sequences.append([0] * first + tokens[at : at + count].tolist())
        at += count
    rows = [(0, 4, 1), (1, 32, 1), (2, 0, 7), (3, 16, 4)]
    logits = decoder.logits(batch_of(rows, sequences, tables, 16, torch.tensor(drawn_rows)), cache)
    assert drawn.tokens_IS[0].tolist() == logits.argmax(-1).tolist()


def test_shape_counts_pairs_and_rows_by_hand():
    shape = Step(contexts=(5, 33), chunks=(Chunk(0, 7), Chunk(16, 4, completes=False))).shape
    assert shape == (2, 38, 2, 11, 7 * 8 // 2 + 4 * 16 + 10, 27, 3, None, None, None)


def test_sections_name_every_operator_and_add_up_to_the_step(served):
    points = [Point(Step(contexts=(40,) * 4), decode_seqs=4, decode_kv_tokens=40)]
    points.append(Point(Step(chunks=(Chunk(32, 64),)), prefill_tokens=64, cached_tokens=32))
    steps = [point.step for point in points]
    sections, totals, _ = measure(served, points, steps, 2.0, 0, quiet)
    assert set(sections[0].seconds) == SECTIONS | {"decode_attention"}
    assert set(sections[1].seconds) == SECTIONS | {"prefill_attention"}
    for section, total in zip(sections, totals, strict=True):
        assert sum(section.seconds.values()) == pytest.approx(total.seconds, rel=0.35)


class Clockwork:
    """A session with its own clock: 1 ms per token and operator, 0.1 ms per mark; all slower later on.

    plain: factor on the time of steps without a watch.
    """

    def __init__(self, plain: float = 1.0) -> None:
        self.now_s = 0.0
        self.plain_factor = plain
        self.watched = SimpleNamespace(watch=None)
        self.executor, self.plain = SimpleNamespace(run=self.watch), SimpleNamespace(run=self.compute)

    def work(self, step: Step) -> Step:
        return step

    def spend(self, seconds: float) -> None:
        self.now_s += seconds * (1.5 if self.now_s > 4 else 1.0)

    def compute(self, step: Step) -> None:
        self.spend(self.plain_factor * 4e-3 * step.num_tokens)

    def watch(self, step: Step) -> None:
        for name in ("qkv", "o", "qkv"):
            self.spend(1e-3 * step.num_tokens + 100e-6)
            self.watched.watch.mark(name)
        self.spend(1e-3 * step.num_tokens + 100e-6)


def test_what_is_measured_is_without_the_watch_and_at_one_pace(monkeypatch):
    clockwork = Clockwork()
    monkeypatch.setattr("time.thread_time", lambda: clockwork.now_s)
    points = [Point(Step(contexts=(9,) * count), 0, 0, count, 9) for count in range(1, 9)]
    sections, totals, reference = measure(clockwork, points, [Step(contexts=(9,) * 6)], 20.0, 0, quiet)
    usual = totals[0].seconds / 24e-3
    assert usual == pytest.approx(1.0, rel=1e-6) or usual == pytest.approx(1.5, rel=1e-6)
    assert totals[0].spread < 0.05
    assert reference.seconds == pytest.approx(32e-3 * usual)
    assert variation(reference.pace) == pytest.approx(0.5, rel=1e-6)
    for place, section in enumerate(sections, start=1):
        assert section.seconds["qkv"] == pytest.approx(2e-3 * place * usual, rel=0.01)
        assert section.seconds["o"] == pytest.approx(1e-3 * place * usual, rel=0.01)


@pytest.mark.parametrize("plain", [0.1, 3.0])
def test_noise_in_whole_steps_leaves_every_operator_some_time(plain, monkeypatch):
    """Steps without a watch are much faster or slower, as if another program came and went."""
    clockwork = Clockwork(plain)
    monkeypatch.setattr("time.thread_time", lambda: clockwork.now_s)
    points = [Point(Step(contexts=(9,) * count), 0, 0, count, 9) for count in range(1, 9)]
    sections, _, _ = measure(clockwork, points, [Step(contexts=(9,) * 6)], 20.0, 0, quiet)
    for place, section in enumerate(sections, start=1):
        assert section.seconds["o"] >= 0.1e-3 * place
        assert section.seconds["o"] <= 1.7 * (1e-3 * place + 100e-6)


def test_a_catcher_keeps_calls_that_can_be_made_again(served):
    catcher = Catcher(limit=1)
    served.watched.watch = catcher
    try:
        served.executor.run(served.work(Step(contexts=(9, 17))))
    finally:
        served.watched.watch = None
    assert catcher.counts["qkv"] == catcher.counts["decode_attention"] == 2
    assert {name: len(calls) for name, calls in catcher.calls.items()} == dict.fromkeys(catcher.calls, 1)
    assert catcher.calls["qkv"][0]().shape == (2, (6 + 2 * 2) * 8)


def test_the_way_of_a_gpu_finds_the_same_operators_call_by_call(served):
    """A dry run on a CPU: the timing falls back to the wall clock, nothing is captured in a graph."""
    points = [
        Point(Step(contexts=(40,) * 4), decode_seqs=4, decode_kv_tokens=40),
        Point(Step(contexts=(80,) * 4), decode_seqs=4, decode_kv_tokens=80),
        Point(Step(chunks=(Chunk(32, 64),)), prefill_tokens=64, cached_tokens=32),
    ]
    first, second, chunk = gpu_sections.measure_sections(served, points, quiet)
    assert set(first.seconds) == SECTIONS - {"outputs"} | {"decode_attention"}
    assert set(second.seconds) == {"decode_attention"}
    assert set(chunk.seconds) == SECTIONS - {"outputs"} | {"prefill_attention"}
    assert chunk.seconds["inputs"] == first.seconds["inputs"]
    (total,) = gpu_sections.measure_totals(served, [points[0].step])
    assert total.seconds > 0
    assert served.watched.watch is None


def test_a_step_with_a_chunk_is_launched_for_the_host_time_of_a_kernel(served, monkeypatch):
    """The clock advances by 1 s a call: a launch between two calls takes 1 s; each step has its own work."""
    clock, steps, run = itertools.count(), [], served.plain.run
    monkeypatch.setattr(gpu_sections.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(served.plain, "run", lambda work: (steps.append(work), run(work))[1])
    assert gpu_sections.measure_launches(served) == 1.0
    assert len(steps) == len(set(map(id, steps))) == gpu_sections.REPEATS + 1
    assert all(not work.shape.is_decode for work in steps)


def test_a_step_of_a_graph_is_watched_call_by_call_with_its_padding(served, monkeypatch):
    """Three sequences run in the graph of four; the watched executor has no graphs."""
    graphs = SimpleNamespace(fit=lambda num_seqs, num_rows: StepSize(4))
    monkeypatch.setattr(served.plain, "graphs", graphs)
    step = Step(contexts=(9, 17, 5))
    assert served.work(step).size == StepSize(4)
    with torch.inference_mode():
        calls = gpu_sections._calls(served, step)
    (qkv, *_others) = calls["qkv"][1]
    assert qkv.args[2].shape[0] == 4


def test_profile_rows_divide_by_layers_and_take_medians():
    """Three layers: 0.3 ms of qkv in a step are 100 us a call; two steps of 4 tokens have one median."""
    decode = Point(Step(contexts=(8, 16, 24, 32)), decode_seqs=4, decode_kv_tokens=20)
    chunk = Point(Step(chunks=(Chunk(8, 4),)), prefill_tokens=4, cached_tokens=8)
    rows = profile_rows(
        [
            Sections(decode, {"qkv": 0.3e-3, "lm_head": 1e-3, "decode_attention": 0.6e-3}),
            Sections(chunk, {"qkv": 0.9e-3, "lm_head": 0.5e-3, "prefill_attention": 1.2e-3}),
        ],
        num_layers=3,
    )
    found = {
        tuple(row[:2]): row[2:] for row in rows[["operator", "num_tokens", "calls", "latency_us"]].values
    }
    assert found["qkv_proj", 4.0].tolist() == [3, pytest.approx(200)]
    heads = rows[rows["operator"] == "lm_head"]
    assert dict(zip(heads["num_seqs"], heads["latency_us"], strict=True)) == pytest.approx({1: 500, 4: 1000})
    fewer = Point(Step(contexts=(9,)), decode_seqs=1, decode_kv_tokens=9)
    sections = [Sections(chunk, {"lm_head": 0.5e-3}), Sections(fewer, {"lm_head": 0.3e-3})]
    heads = profile_rows(sections, num_layers=3).query("operator == 'lm_head'")
    assert heads["latency_us"].tolist() == pytest.approx([300])  # not after the longer chunk
    attention = rows[rows["operator"] == "attention"]
    assert attention["latency_us"].tolist() == pytest.approx([200, 400])
    assert attention["decode_kv_tokens"].tolist() == [20, 0]


def test_quantised_models_are_measured_with_their_own_linear_layers():
    model = spec(weights="int8_wo")
    assert quantization_of(model) == "w8a16"
    assert quantization_of(spec()) is None
    quantised = serve(
        model, architecture_of(TINY), torch.device("cpu"), max_num_seqs=2, max_model_len=64, block_size=16
    )
    points = [Point(Step(contexts=(8, 9)), decode_seqs=2, decode_kv_tokens=8)]
    sections, _, _ = measure(quantised, points, [], 0.1, 0, quiet)
    assert sections[0].seconds["gate_up"] > 0


def test_kv_that_does_not_fit_one_sequence_is_refused(monkeypatch):
    block_bytes = KvCache.bytes_per_block(architecture_of(TINY), 16, torch.float32)
    monkeypatch.setattr("experiments.calibrate.engine.served.CPU_KV_BYTES", 3 * block_bytes)
    with pytest.raises(ValueError, match=r"measure\.max_model_len=128: memory has room for 3 KV blocks"):
        serve(
            spec(),
            architecture_of(TINY),
            torch.device("cpu"),
            max_num_seqs=2,
            max_model_len=128,
            block_size=16,
        )
