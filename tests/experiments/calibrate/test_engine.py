"""`windtunnel calibrate device=cpu`: sections add up to steps, tables price them, `simulate` reads them."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from experiments.app.cli import main  # noqa: E402
from experiments.calibrate.engine import gpu_sections, host_time, pace, run  # noqa: E402
from experiments.calibrate.engine.collectives import SIZES, link_of, measure_link  # noqa: E402
from experiments.calibrate.engine.draft_host import (  # noqa: E402
    Measured,
    add_texts,
    engine_of_texts,
    fitted,
    measure_draft_host,
)
from experiments.calibrate.engine.files import Files, engine_yaml, hardware_yaml  # noqa: E402
from experiments.calibrate.engine.grids import (  # noqa: E402
    VERIFYING,
    Point,
    decode_points,
    prefill_points,
    spread_around,
    verifying_points,
)
from experiments.calibrate.engine.host_time import HostClock, HostTime, measure_host  # noqa: E402
from experiments.calibrate.engine.machine import Machine  # noqa: E402
from experiments.calibrate.engine.measure import Sections, measure  # noqa: E402
from experiments.calibrate.engine.pace import Pace, in_words, is_noisy, paces, variation  # noqa: E402
from experiments.calibrate.engine.profile_rows import profile_rows  # noqa: E402
from experiments.calibrate.engine.residuals import errors_by_kind, random_steps, residual_table  # noqa: E402
from experiments.calibrate.engine.run import Results, device_of  # noqa: E402
from experiments.calibrate.engine.served import Served, architecture_of, quantization_of, serve  # noqa: E402
from experiments.calibrate.engine.settings import MeasureSettings  # noqa: E402
from experiments.calibrate.engine.steps import Chunk, Step, Tables  # noqa: E402
from experiments.calibrate.engine.watch import Catcher  # noqa: E402
from hwmodels.devices.host import CudaGraphs, HostOverhead  # noqa: E402
from hwmodels.levels.profile import Profile  # noqa: E402
from hwmodels.model.model_spec import ModelSpec  # noqa: E402
from hwmodels.speculation.host import DraftHost  # noqa: E402
from policies.speculation.proposers.ngram import Ngram  # noqa: E402
from realengine.model.decoder import Decoder  # noqa: E402
from realengine.model.kv_cache import KvCache  # noqa: E402
from sim.settings.build import build  # noqa: E402
from sim.settings.compose import ConfigSource  # noqa: E402
from sim.settings.config_groups import CONFIG_DIR  # noqa: E402
from sim.setup.engine_profile import EngineProfile  # noqa: E402
from tests.realengine.steps import batch_of  # noqa: E402

torch.set_num_threads(1)

TINY = {
    "_target_": "hwmodels.hf.config.from_hf_fields",
    "name": "tiny",
    "source": "windtunnel/tiny",
    "dtype": "fp32",
    "weights": None,
    "config": {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 97,
        "max_position_embeddings": 256,
        "torch_dtype": "float32",
    },
}
SMALLEST = [
    "measure.budget_s=0.1",
    "measure.max_num_seqs=3",
    "measure.max_model_len=64",
    "measure.max_num_batched_tokens=64",
    "measure.iterations=6",
]
SECTIONS = {
    *("inputs", "embedding", "layernorm", "rope_and_write_kv", "activation", "lm_head", "sampler", "outputs"),
    *("qkv", "o", "gate_up", "down"),
}
MACHINE = Machine(
    name="a processor",
    copy_bytes_per_s=20e9,
    read_bytes_per_s=24e9,
    flops_per_s={"fp32": 91e9},
    memory_bytes=24 << 30,
    cache_bytes=32 << 20,
    num_sms=1,
    host_copy_bytes_per_s=10e9,
    host_copy_s=4e-6,
    launch_s=0.0,
    graph_replay_s=0.0,
)


def quiet(text: str) -> None:
    pass


def spec(**changes) -> ModelSpec:
    return build(OmegaConf.create({**TINY, **changes}), "model")


@pytest.fixture(scope="module")
def served() -> Served:
    return serve(
        spec(),
        architecture_of(TINY),
        torch.device("cpu"),
        max_num_seqs=4,
        max_model_len=128,
        block_size=16,
    )


@pytest.fixture(autouse=True, scope="module")
def _any_pace():
    """Accepts every pace: the machine that runs the tests may be busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "MOST_VARIATION", math.inf)
        patch.setattr(pace, "LEAST_CORE_SHARE", 0.0)
        yield


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory) -> Path:
    """Returns the config folder that the command wrote for the model random_8m."""
    folder = tmp_path_factory.mktemp("calibrated") / "mine"
    assert main(["calibrate", "device=cpu", "model=random_8m", f"out={folder}", *SMALLEST]) == 0
    return folder


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
    assert shape == (2, 38, 2, 11, 7 * 8 // 2 + 4 * 16 + 10, 27, 3, None, None)


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


def test_the_pace_of_a_machine_comes_out_of_what_it_did():
    """Steps of 1 ms to 1 s in random order, 10 % of noise; by and by the machine takes 1.4 times as long."""
    random = np.random.default_rng(0)
    usual_s, places = np.geomspace(1e-3, 1, 100), random.permutation(np.repeat(np.arange(100), 10))
    slower = np.linspace(1, 1.4, 1000)
    seconds = usual_s[places] * slower * random.lognormal(0, 0.1, 1000)
    found = paces(places, seconds)
    assert np.median(found) == pytest.approx(1)
    assert np.std(np.log(found / slower)) < 0.06
    assert paces(np.zeros(3, int), np.ones(3)).tolist() == [1, 1, 1]


def test_the_pace_may_vary_by_a_quarter_over_all_measurements():
    calm, slow = Pace(1.0, 0.95, 1.1), Pace(1.15, 1.05, 1.2)
    assert variation(calm) == pytest.approx(1.1 / 0.95 - 1)
    assert variation(calm, slow) == pytest.approx(1.2 / 0.95 - 1)
    assert Pace.of(np.linspace(1, 2, 101), 0.9) == pytest.approx((1.5, 1.1, 1.9, 0.9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "MOST_VARIATION", 0.25)
        patch.setattr(pace, "LEAST_CORE_SHARE", 0.8)
        assert is_noisy(calm._replace(core_share=0.7))
        assert [is_noisy(calm), is_noisy(slow), is_noisy(calm, slow), is_noisy()] == [
            False,
            False,
            True,
            False,
        ]
        assert in_words(calm, slow) == (
            "the machine's pace varied by 26 % (a reference step took 0.95 to 1.20 times its usual time; "
            "25 % is accepted) and its thread got 100 % of a core (at least 80 % is needed)"
        )


def test_a_noisy_calibration_is_written_and_refused(served, tmp_path, monkeypatch, capsys):
    """The measured machine is replaced by a recorded one that became slower by half."""
    files = Files.under(tmp_path, "cpu", "tiny")
    errors = errors_by_kind(residual_table([Step(contexts=(4,))], [1.0], [1.1]))
    operators = pd.DataFrame(
        columns=["operator", "component", "calls", "points", "smallest_us", "largest_us"]
    )
    contents = {files.report: "{}"}
    found = Results(operators, errors, ["A note."], "Next.", files, Pace(1.0, 0.9, 1.35), contents)
    files.report.parent.mkdir()
    monkeypatch.setattr(run, "measure", lambda *given: found)
    monkeypatch.setattr(pace, "MOST_VARIATION", 0.25)
    monkeypatch.setattr(pace, "LEAST_CORE_SHARE", 0.8)
    assert main(["calibrate", "device=cpu", "model=random_8m", f"out={tmp_path}"]) == 3
    said = capsys.readouterr()
    assert "Next." in said.out
    assert files.report.read_text() == "{}"
    assert said.err == (
        "windtunnel: the machine was too noisy: the machine's pace varied by 50 % (a reference step took "
        "0.90 to 1.35 times its usual time; 25 % is accepted) and its thread got 100 % of a core (at "
        "least 80 % is needed); the files are written; measure again while fewer other programs run\n"
    )
    found = found._replace(pace=Pace(1.0, 0.95, 1.1))
    assert main(["calibrate", "device=cpu", "model=random_8m", f"out={tmp_path}"]) == 0


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


def test_grids_are_full_and_reach_their_limits():
    decodes, chunks = decode_points(5, 100), prefill_points(40, 100)
    assert {point.decode_seqs for point in decodes} == {1, 2, 3, 4, 5}
    assert {point.decode_kv_tokens for point in decodes} == {16, 64, 100}
    assert len(decodes) == 15
    assert max(point.prefill_tokens for point in chunks) == 38
    assert len(chunks) == len({point[1:] for point in chunks})


def test_steps_of_several_chunks_have_sizes_that_are_measured_alone():
    points = verifying_points(32, 1024, 1024)
    alone = {(point.prefill_tokens, point.cached_tokens) for point in prefill_points(1024, 1024)}
    assert len(points) == len(VERIFYING)
    for point in points:
        assert len(point.step.chunks) == point.prefill_seqs > 1
        assert (point.prefill_tokens, point.cached_tokens) in alone
    assert verifying_points(32, 40, 100) == []
    assert {point.prefill_seqs for point in verifying_points(4, 40, 512)} == {2, 4}


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("mean", [10, 1000, 1900])
def test_spread_contexts_keep_their_mean_and_the_limit(count, mean):
    contexts = spread_around(mean, count, 2000)
    assert np.mean(contexts) == pytest.approx(mean, abs=1)
    assert 1 <= min(contexts) <= max(contexts) <= 2000


def test_every_small_batch_is_measured_with_one_context_and_the_grid_is_whole():
    points = decode_points(40, 100) + prefill_points(40, 100)
    assert {point.decode_seqs for point in points} == {0, *range(1, 33), 40}
    times = dict.fromkeys(["qkv", "lm_head", "decode_attention"], 1e-3)
    rows = profile_rows([Sections(point, times) for point in points], num_layers=2)
    profile = Profile.from_rows({name: rows[name].to_numpy() for name in rows})
    assert profile.attention.decode_seconds_many(29, np.array([29 * 90.0])) == pytest.approx([1e-3])


def test_random_steps_stay_within_the_limits():
    limits = {"max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 100}
    steps = random_steps(200, **limits, seed=3)
    assert max(len(step.contexts) + len(step.chunks) for step in steps) <= 8
    assert max(step.num_tokens for step in steps) <= 100
    assert max(chunk.cached + chunk.new for step in steps for chunk in step.chunks) <= 128
    assert {step.kind for step in steps} == {"decode", "prefill", "mixed"}


def test_errors_are_of_the_price_against_the_measurement():
    steps = [Step(contexts=(4,)), Step(contexts=(4,)), Step(chunks=(Chunk(0, 4),))]
    errors = errors_by_kind(residual_table(steps, [1.0, 1.0, 2.0], [1.1, 0.8, 3.0])).set_index("kind")
    assert errors.loc["decode", "median"] == pytest.approx(0.15)
    assert errors.loc["decode", "total"] == pytest.approx(-0.05)
    assert errors.loc["prefill", "bias"] == pytest.approx(0.5)
    assert errors.loc["all", "iterations"] == 3


def test_block_tables_of_different_slots_share_nothing_while_blocks_last():
    tables = Tables.drawn(3, 12, 4, seed=0).ids_SM
    assert sorted(tables.ravel().tolist()) == list(range(1, 13))
    assert Tables.drawn(3, 5, 4, seed=0).ids_SM.max() == 5


def test_the_host_time_of_a_step_is_fitted_by_its_sequences(monkeypatch):
    monkeypatch.setattr(host_time, "_step_s", lambda count, *_: 20e-6 + 0.5e-6 * count)
    host = measure_host(256, 16)
    assert min(host.by_batch) == 1
    assert max(host.by_batch) == 256
    assert host.by_batch[256] == 148e-6
    assert (host.iteration_s, host.sequence_s) == (pytest.approx(20e-6), pytest.approx(0.5e-6))


def test_the_host_needs_longer_for_more_sequences(monkeypatch):
    """Time is counted in executed lines of Python here, so that the machine's pace does not matter."""
    lines = 0

    def count(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return count

    monkeypatch.setattr(time, "thread_time", lambda: lines * 1e-6)
    traced = sys.gettrace()
    sys.settrace(count)
    try:
        host = measure_host(64, 16)
    finally:
        sys.settrace(traced)
    assert 0 < host.by_batch[1] < host.by_batch[64]
    assert host.iteration_s + 64 * host.sequence_s == pytest.approx(host.by_batch[64], rel=0.5)


def test_the_host_is_measured_without_the_executor_that_works_in_between(served, monkeypatch):
    run = served.plain.run

    def slow(work):
        end_s = time.thread_time() + 20e-3
        while time.thread_time() < end_s:
            pass
        return run(work)

    monkeypatch.setattr(served.plain, "run", slow)
    host = measure_host(2, 16, served)
    assert set(host.by_batch) == {1, 2}
    assert 0 < host.by_batch[1] < 20e-3
    corrected = measure_host(2, 16, served, usual_s=1e-3)  # the reference step takes at least 20 ms
    assert 0 < corrected.by_batch[1] < 0.25 * host.by_batch[1]


def test_draft_tokens_take_the_host_longer_and_searches_the_longest():
    found = measure_draft_host(HostTime(iteration_s=0.0, sequence_s=0.0, by_batch={}), 16)
    assert set(found) == {"ngram", "suffix", "others"}
    assert found["others"].host.kilotoken_s == 0
    for host, steps in found.values():
        assert host.iteration_s + host.sequence_s + host.token_s > 0
        assert max(step.num_drafts for step in steps) > 1
    assert found["suffix"].steps[-1].seconds > found["others"].steps[-1].seconds


@given(st.floats(0, 1e-3), st.floats(0, 1e-4), st.floats(0, 1e-4), st.floats(0, 1e-5), st.floats(1e-4, 1e-3))
def test_the_host_time_of_drafts_comes_back_from_the_steps_that_it_makes(fixed, each, token, kilo, plain_s):
    plain = HostTime(iteration_s=plain_s, sequence_s=2e-6, by_batch={})
    steps = [
        Measured(
            num_seqs,
            drafts,
            context,
            plain_s + 2e-6 * num_seqs + fixed + each * num_seqs + token * drafts + kilo * 1e-3 * context,
        )
        for num_seqs, drafts, context in (
            (1, 4, 90),
            (1, 8, 2000),
            (4, 3, 300),
            (12, 90, 900),
            (12, 6, 25000),
        )
    ]
    found = fitted(steps, plain, searches=True)
    for ours, theirs in (
        (found.iteration_s, fixed),
        (found.sequence_s, each),
        (found.token_s, token),
        (found.kilotoken_s, kilo),
    ):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-10)


def test_draft_tokens_are_accepted_as_far_as_they_agree_with_a_text():
    """The stand-in of the executor leaves every request with the beginning of its own text."""
    text = np.arange(60) % 7
    texts = [text, text[3:], np.arange(60)]
    proposer = Ngram(draft=None, num_speculative_tokens=3, prompt_lookup_max=2)
    engine, _ = engine_of_texts(proposer, texts, 20, 16, HostClock(None, None))
    add_texts(engine, texts, 20)
    found = {}
    num_steps = 0
    while engine.num_unfinished:
        found |= {answer.request_id: answer for answer in engine.step() if answer.is_finished}
        num_steps += 1
    assert [found[index].outputs[0].tokens for index in range(3)] == [each[20:].tolist() for each in texts]
    assert [found[index].drafts.num_accepted_tokens > 20 for index in range(2)] == [True, True]
    assert found[2].drafts is None  # nothing repeats
    assert num_steps == 40


def test_the_written_machine_is_a_device():
    device = device_of(hardware_yaml("cpu", MACHINE))
    assert (device.name, device.num_sms, device.l2_bytes) == ("cpu", 1, 32 << 20)
    assert device.memory_bandwidth_bytes_per_s == 24e9
    assert device.peak_flops_per_s == {"fp32": 91e9}
    assert device.pcie.bandwidth_bytes_per_s == 10e9


def test_a_link_comes_back_from_the_times_of_its_ring():
    """Four ranks, 2 us a hop and 100 GB/s: 6 hops and 1.5 times the bytes."""
    times = {size: 6 * 2e-6 + 1.5 * size / 100e9 for size in SIZES}
    link = link_of(4, times)
    assert link.latency_s == pytest.approx(2e-6)
    assert link.bandwidth_bytes_per_s == pytest.approx(100e9)
    device = device_of(hardware_yaml("node", MACHINE, link))
    assert (device.gpus_per_node, device.scale_up.bandwidth_bytes_per_s) == (4, 100e9)
    assert device_of(hardware_yaml("alone", MACHINE)).scale_up is None


@pytest.mark.slow
def test_two_processes_measure_their_link():
    link = measure_link("cpu", 2)
    assert set(link.by_bytes) == set(SIZES)
    assert 1e6 < link.bandwidth_bytes_per_s < 1e12


def test_the_written_engine_is_the_profile_that_it_was_written_from():
    profile = EngineProfile(
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        max_model_len=512,
        num_kv_blocks=100,
        host=HostOverhead(iteration_s=123e-6, sequence_s=1.5e-6, launch_s=0.0, graph_replay_s=0.0),
        cuda_graphs=CudaGraphs(enabled=False, max_capture_size=32),
    )
    node = OmegaConf.create(engine_yaml("cpu", profile, 16))
    node.pop("defaults")
    assert build(node, "engine") == profile
    node.pop("draft_host")  # as written before it was measured
    assert build(node, "engine") == profile
    draft_host = {"suffix": DraftHost(sequence_s=21e-6, token_s=3e-5), "others": DraftHost(iteration_s=2e-4)}
    profile = replace(profile, draft_host=draft_host)
    node = OmegaConf.create(engine_yaml("cpu", profile, 16))
    node.pop("defaults")
    assert build(node, "engine") == profile


@pytest.mark.slow
def test_what_calibrate_writes_is_read_by_simulate(calibrated, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = ["hardware=cpu", "engine=cpu", "latency=cpu_random_8m", "model=random_8m", "model.dtype=fp32"]
    traffic = ["workload=offline_batch", "workload.num_requests=3", "workload/lengths=fixed"]
    lengths = ["workload.lengths.prompt_tokens.value=20", "workload.lengths.output_tokens.value=4"]
    folder = ["--config-dir", str(calibrated), "hydra.run.dir=run", "output.report=false"]
    arguments = ["simulate", *folder, *chosen, *traffic, *lengths]
    composed = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR, calibrated]).compose(chosen)
    assert composed.calibration.get("measured_on") is None
    assert main(arguments) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["requests"]["finished"] == 3


def test_the_table_holds_every_component_and_its_whole_grid(calibrated):
    table = pd.read_parquet(calibrated / "profiles" / "cpu_random_8m.parquet")
    profile = Profile.from_rows({name: table[name].to_numpy() for name in table})
    assert profile.components == {"gemm", "elementwise", "attention", "lm_head"}
    assert set(table["gpu"]) == {"cpu"}
    assert set(table["model"]) == {"random-8m"}


def test_the_report_says_how_far_whole_iterations_are_from_the_table(calibrated):
    """Wide bounds: three repetitions on a busy machine. What it reaches stands in the command's output."""
    report = json.loads((calibrated / "profiles" / "cpu_random_8m.json").read_text())
    errors = {row["kind"]: row for row in report["errors"]}
    assert errors["all"]["iterations"] == 6
    assert errors["all"]["median"] < 0.4
    assert report["settings"]["dtype"] == "fp32"
    assert report["machine"]["copy_bytes_per_s"] > 1e8


@pytest.mark.slow
def test_calibrating_again_writes_over_its_own_files_only(calibrated, capsys):
    assert main(["calibrate", "device=cpu", "model=random_8m", f"out={calibrated}", *SMALLEST]) == 0
    (calibrated / "hardware" / "hers.yaml").write_text("_target_: hwmodels.devices.device.Device\n")
    arguments = ["calibrate", "device=cpu", "model=random_8m", f"out={calibrated}", "measure.name=hers"]
    assert main([*arguments, *SMALLEST]) == 2
    assert "was not written by calibrate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["device=cpu"], "model: must be chosen, such as model=random_8m"),
        (["device=tpu", "model=random_8m"], "device=tpu: must be one of cpu, cuda"),
        (["device=cpu", "model=random_9m"], "model=random_9m: no such choice; nearest: random_8m"),
        (["device=cpu", "model=glm_5"], "model: the engine does not support GlmMoeDsaForCausalLM"),
        (["device=cpu", "model=deepseek_v2_lite"], "model_type=deepseek_v2: latent attention computes"),
        (["device=cpu", "model=hf", "model.path=nowhere"], "nowhere"),
        (
            ["device=cpu", "model=random_8m", "model.weights=nvfp4"],
            "model.weights=nvfp4: the engine supports",
        ),
        (["device=cpu", "model=random_8m", "out=a_file"], "out=a_file: cannot be written"),
        (["device=cpu", "model=random_8m", "measure.max_num_seqs=0"], "max_num_seqs=0: must be a whole"),
        (["device=cpu", "model=random_8m", "measure.budget=3"], "measure.budget"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a_file").write_text("")
    assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named_with_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "device=cuda", "model=random_8m"]) == 2
    assert "no GPU was found; device='cpu'" in capsys.readouterr().err
    assert not Path("mine").exists()


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


def test_limits_never_exceed_the_models_context():
    settings = MeasureSettings(device="cpu", model=spec())
    assert settings.limit("max_model_len") == 256
    assert settings.limit("max_num_seqs") == 32


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


def test_files_are_named_after_machine_and_model(tmp_path):
    files = Files.under(tmp_path, "cpu", "HuggingFaceTB/SmolLM2-135M")
    assert files.latency == tmp_path / "latency" / "cpu_smollm2_135m.yaml"
    assert files.hardware == tmp_path / "hardware" / "cpu.yaml"
