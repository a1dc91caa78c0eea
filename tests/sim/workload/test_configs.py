"""Every file of configs/workload builds and makes traffic, and the default one resembles its trace."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from scipy import stats

from experiments.calibrate.workload_stats import extract
from sim.workload.formats import AzureCsv

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
TRACE = CONFIGS / ".." / ".." / "shared" / "data" / "traces" / "azure_2023_conv.csv.gz"
needs_trace = pytest.mark.skipif(not TRACE.is_file(), reason="the Azure 2023 trace is not on this machine")


def names_in(group):
    return sorted(path.stem for path in (CONFIGS / "workload" / group).glob("*.yaml"))


PARQUET = {
    "baseten_parquet": {"timestamp_start_unix_ms": [0], "input_tokens": [9], "output_tokens": [5]},
    "chutes_parquet": {"started_at": [0], "it": [9], "ot": [5]},
}
WEKA = {"id": "s", "block_size": 64, "hash_id_scope": "local"}
TRACES = {
    "bailian_jsonl": '{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [0]}\n',
    "tracelab_jsonl": json.dumps(
        {"session_id": "s", "input_tokens_total": 9, "prefix_tokens": 0, "output_tokens": 5}
        | {"timing_events": [{"event_type": "text", "timestamp": "2026-01-31T12:00:00Z"}]}
    ),
    "weka_jsonl": json.dumps(WEKA | {"requests": [{"t": 0, "type": "n", "in": 9, "out": 5, "hash_ids": []}]}),
    "azure_csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n",
    "burstgpt_csv": "Timestamp,Request tokens,Response tokens\n5,472,18\n",
    "mooncake_jsonl": '{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [0]}\n',
    "blis_tracev2": "arrival_time_us,input_tokens,output_tokens\n0,10,10\n",
    "mooncake_sessions": '{"session_id": "s", "input_length": 9, "output_length": 5}\n',
    "otel_trace": json.dumps(
        {"spans": [{"trace_id": "t", "span_id": "a", "start_time": "2026-02-25T10:00:00Z"}]}
    ).replace('Z"', 'Z", "attributes": {"gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 5}'),
    "sharegpt_json": json.dumps(
        [{"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}]
    ),
    "openai_batch": json.dumps(
        {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "Hello", "max_tokens": 5}}
    ),
    "trace": "timestamp_ms,isl,osl\n0,10,10\n",
    "plain_csv": "arrival_s,prompt_tokens,output_tokens\n0,10,10\n",
    "token_ids_jsonl": '{"arrival_s": 0, "prompt_token_ids": [5, 6], "output_token_ids": [7]}\n',
    "vidur_csv": "arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,10\n",
}
GENERATED = [name for name in names_in(".") if name not in {*TRACES, *PARQUET, "recording", "servegen"}]
"""test_recording.py has the recording, test_servegen_data.py the folder of ServeGen."""


@pytest.fixture(scope="module")
def root_folder(tmp_path_factory):
    """Writes a config folder with nothing but a root that selects a workload from the project's configs."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "root.yaml").write_text(
        f"defaults: [{{workload: synthetic}}, _self_]\nhydra: {{searchpath: ['file://{CONFIGS}']}}\n"
    )
    return folder


@pytest.fixture
def build(root_folder):
    def from_overrides(*overrides):
        with initialize_config_dir(config_dir=str(root_folder), version_base="1.3"):
            config = compose("root", overrides=list(overrides))
        return instantiate(config.workload, _convert_="all")

    return from_overrides


@pytest.mark.parametrize("name", GENERATED)
def test_every_generated_workload_makes_traffic(build, name):
    source = build(f"workload={name}").source(seed=0, max_model_len=8192)
    first = next(source.arrivals())
    assert first.request.request_id == 0
    assert 1 <= first.num_output_tokens < 8192
    assert source.num_requests >= 20


@pytest.mark.parametrize("name", sorted(TRACES))
def test_every_trace_workload_reads_its_format(build, tmp_path, name):
    path = tmp_path / "trace"
    path.write_text(TRACES[name])
    source = build(f"workload={name}", f"workload.path={path}").source(seed=0, max_model_len=8192)
    assert len(list(source.arrivals())) == 1


@pytest.mark.parametrize("name", sorted(PARQUET))
def test_every_parquet_workload_reads_its_format(build, tmp_path, name):
    path = tmp_path / "trace.parquet"
    pd.DataFrame(PARQUET[name]).to_parquet(path)
    source = build(f"workload={name}", f"workload.path={path}").source(seed=0, max_model_len=8192)
    assert len(list(source.arrivals())) == 1


@pytest.mark.parametrize("name", names_in("arrivals"))
def test_every_arrival_process_fits_synthetic(build, name):
    workload = build("workload=synthetic", f"workload/arrivals={name}", "workload.num_requests=20")
    assert len(list(workload.source(seed=0, max_model_len=8192).arrivals())) == 20


@pytest.mark.parametrize("name", sorted(set(names_in("arrivals")) - {"closed_loop"}))
def test_every_open_arrival_process_starts_conversations(build, name):
    workload = build("workload=conversation", f"workload/arrivals={name}", "workload.num_conversations=20")
    assert len(list(workload.source(seed=0, max_model_len=32_768).arrivals())) == 20


@pytest.mark.parametrize("name", names_in("lengths"))
def test_every_distribution_of_lengths_fits_synthetic(build, name):
    workload = build("workload=synthetic", f"workload/lengths={name}", "workload.num_requests=20")
    assert len(list(workload.source(seed=0, max_model_len=8192).arrivals())) == 20


def test_a_setting_of_a_chosen_part_can_be_overridden(build):
    workload = build("workload=synthetic", "workload/arrivals=gamma", "workload.arrivals.rate_per_s=7")
    assert workload.arrivals.rate_per_s == 7


def columns_of(workload):
    """Returns arrays of arrival times in seconds, prompt lengths and output lengths in tokens."""
    arrivals = list(workload.source(seed=0, max_model_len=1_000_000).arrivals())
    rows = [(a.request.arrival_s, a.request.prompt.num_tokens, a.num_output_tokens) for a in arrivals]
    return np.array(rows).T


@needs_trace
def test_azure_conv_like_resembles_the_trace(build):
    times_s, prompts, outputs = columns_of(build("workload=azure_conv_like"))
    real_s, real_prompts, real_outputs = columns_of(AzureCsv(path=TRACE))
    assert abs(len(times_s) - len(real_s)) < 3 * np.sqrt(len(real_s))
    minutes, real_minutes = (np.bincount((t // 60).astype(int), minlength=59) for t in (times_s, real_s))
    assert (abs(minutes - real_minutes) < 4.5 * np.sqrt(real_minutes)).all()
    gaps_s, real_gaps_s = np.diff(times_s), np.diff(real_s)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(real_gaps_s.std() / real_gaps_s.mean(), rel=0.05)
    for made, real in ((prompts, real_prompts), (outputs, real_outputs)):
        assert made.mean() == pytest.approx(real.mean(), rel=0.03)
        assert stats.ks_2samp(made, real).statistic < 0.03
        assert np.percentile(made, [50, 90]) == pytest.approx(np.percentile(real, [50, 90]), rel=0.05)
    rho, real_rho = (
        stats.spearmanr(prompts, outputs).statistic,
        stats.spearmanr(real_prompts, real_outputs).statistic,
    )
    assert rho == pytest.approx(real_rho, abs=2.576 / np.sqrt(len(prompts)))


@needs_trace
def test_the_numbers_in_the_configs_are_those_of_the_trace():
    for name, text in extract(TRACE).items():
        assert (CONFIGS / "workload" / name).read_text() == text
