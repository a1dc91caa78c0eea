"""`windtunnel simulate`, through the command line's own entry point."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from experiments.app.cli import main
from sim.cluster.gateway import Gateway
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, build_scenario
from sim.workload.csv_traces import PlainCsv

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = ("workload=poisson", "workload.num_requests=60", "engine.num_kv_blocks=400")


def choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIG_DIR / group).glob("*.yaml"))


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.chdir(folder)
    asked = {argument.partition("=")[0] for argument in arguments}
    small = [choice for choice in SMALL if choice.partition("=")[0] not in asked]
    return main(["simulate", *small, "output.progress=false", *arguments])


def build(*overrides: str):
    return build_run(SOURCE.compose(list(overrides)))


@cache
def composed(*overrides: str):
    return SOURCE.compose(list(overrides))


def with_choice(group: str, choice: str, *overrides: str):
    """Returns the config with another choice in a group.

    Composes anew, slowly, if the choice changes other groups, too.
    """
    own = OmegaConf.load(CONFIG_DIR / group / f"{choice}.yaml")
    if "defaults" in own:
        return SOURCE.compose([*overrides, f"{group}={choice}"])
    cfg = composed(*overrides).copy()
    cfg[group] = own
    return cfg


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run(folder, monkeypatch, f"hydra.run.dir={folder}/out") == 0
    return folder / "out"


def test_leaves_every_file(written):
    names = {file.name for file in written.iterdir()}
    assert names == {
        "config.yaml",
        "summary.json",
        "requests.parquet",
        "iterations.parquet",
        "replicas.parquet",
        "events.parquet",
        "gaps.parquet",
        "itl.parquet",
        "records.json",
        "report.html",
    }


def test_the_tables_agree_with_the_summary(written):
    summary = json.loads((written / "summary.json").read_text())
    requests = pd.read_parquet(written / "requests.parquet")
    iterations = pd.read_parquet(written / "iterations.parquet")
    replicas = pd.read_parquet(written / "replicas.parquet")
    assert summary["requests"]["arrived"] == len(requests) == replicas["requests"].sum() == 60
    assert summary["ttft"]["mean_s"] == pytest.approx(requests["ttft_s"].mean())
    assert requests["output_tokens"].sum() == 60 * 256
    assert summary["iterations"]["discarded_tokens"] == 60  # asynchronous scheduling: one behind each stop
    assert iterations["sampled_seqs"].sum() == 60 * 257
    assert replicas["busy_s"].sum() == pytest.approx(iterations["duration_s"].sum())


def test_the_resolved_config_reproduces_the_run(written, tmp_path):
    cfg = OmegaConf.load(written / "config.yaml")
    again, source = build_run(cfg)
    again.run(source).requests.to_parquet(tmp_path / "again.parquet", index=False, compression="zstd")
    assert (tmp_path / "again.parquet").read_bytes() == (written / "requests.parquet").read_bytes()


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path, monkeypatch):
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        folder = f"hydra.run.dir={tmp_path}/{name}"
        assert run(tmp_path, monkeypatch, folder, f"seed={seed}", "output.report=false") == 0
    for table in ("requests", "iterations", "replicas", "events"):
        one, two, three = (
            (tmp_path / name / f"{table}.parquet").read_bytes() for name in ("one", "two", "three")
        )
        assert one == two
        assert one != three


def test_a_multirun_runs_every_combination(tmp_path, monkeypatch):
    sweep = ("--multirun", f"hydra.sweep.dir={tmp_path}/sweep", "batching=chunked,static", "seed=0,1")
    assert run(tmp_path, monkeypatch, *sweep, "output.report=false") == 0
    found = [OmegaConf.load(file) for file in sorted((tmp_path / "sweep").glob("*/config.yaml"))]
    assert [(cfg.batching._target_.split(".")[-1], cfg.seed) for cfg in found] == [
        ("Chunked", 0),
        ("Chunked", 1),
        ("Static", 0),
        ("Static", 1),
    ]


def test_output_switches_leave_files_out(tmp_path, monkeypatch):
    folder = f"hydra.run.dir={tmp_path}/out"
    assert run(tmp_path, monkeypatch, folder, "output.report=false", "output.tables=false") == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.yaml", "summary.json"}


HALVES_OF_AN_ENGINE = ("prefill_only", "decode_only")  # no answer ends without the other half
FOR_TASKS = ("tasks",)  # needs a workload with tasks
TASKS = ("workload=agentic", "workload.num_tasks=5")
NEEDED = ("prediction=oracle", "engine.num_kv_blocks=20000")  # by some of the choices; a block may be a token


@pytest.mark.parametrize("group", ["batching", "scheduling", "caching", "routing", "slo"])
def test_every_policy_choice_runs(group):
    for choice in choices(group):
        if choice in HALVES_OF_AN_ENGINE:
            with pytest.raises(ConfigError, match="choose a policy that prefills and decodes"):
                build(*SMALL, f"{group}={choice}")
            continue
        requests = TASKS if choice in FOR_TASKS else (*SMALL, "workload.num_requests=10")
        scenario, source = build_run(with_choice(group, choice, *requests, "replicas=2", *NEEDED))
        summary = scenario.run(source).summary["requests"]
        assert summary["finished"] == summary["arrived"] >= 10, choice


BATCHING_OF_ENGINE = {
    "deepspeed_fastgen": "SplitFuse",
    "faster_transformer": "Static",
    "hf_static": "Static",
    "llama_cpp": "Slots",
    "orca": "Orca",
    "sglang": "Sglang",
    "static": "Static",
    "tensorrt_llm": "InFlight",
    "tensorrt_llm_1_0": "InFlight",
    "tensorrt_llm_1_1": "InFlight",
    "tgi": "Tgi",
    "vllm_v0": "PrefillFirst",
}


@pytest.mark.parametrize("engine", choices("engine"))
def test_an_engine_chooses_its_policies_unless_the_command_line_does(engine):
    own = SOURCE.compose([*SMALL, f"engine={engine}"]).batching
    assert own._target_.endswith(f".{BATCHING_OF_ENGINE.get(engine, 'Chunked')}")
    asked_for = build(*SMALL, f"engine={engine}", "batching=chunked", "caching=paged")[0]
    assert type(asked_for.batching).__name__ == "Chunked"


@pytest.mark.parametrize("hardware", choices("hardware"))
def test_every_hardware_runs_a_small_model(hardware):
    scenario, source = build(*SMALL, "model=smollm2_135m", f"hardware={hardware}")
    assert scenario.run(source).summary["requests"]["finished"] == 60


@pytest.mark.parametrize("model", [name for name in choices("model") if name != "hf"])
def test_every_model_runs_on_hardware_that_holds_it(model):
    """On 8 devices: tensor parallelism as far as the heads allow, the rest as a pipeline."""
    cfg = with_choice("model", model, *SMALL, "hardware=mi300x")
    spec = build_scenario(cfg).model
    tensor = max(size for size in (1, 2, 4, 8) if spec.divides(size))
    cfg.tensor_parallel_size, cfg.pipeline_parallel_size = tensor, 8 // tensor
    scenario, source = build_run(cfg)
    assert scenario.run(source).summary["requests"]["finished"] == 60


def test_a_model_is_read_from_its_hugging_face_config(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    scenario, _ = build(*SMALL, "model=hf", f"model.path={tmp_path}/config.json")
    preset, _ = build(*SMALL, "model=smollm2_135m")
    assert scenario.model.num_parameters == preset.model.num_parameters


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model=llama3_1_70b"],
            r"llama-3.1-70b needs .* GiB on each .* GiB more .* the smallest size that fits is 2",
        ),
        (["hardware=h10_sxm"], "nearest: h100_sxm"),
        (["slo.itl_ms=5"], "slo.itl_ms: no such setting"),
        (["slo.attainment_target=1.5"], r"slo.attainment_target=1.5: must be in \(0, 1\]"),
        (["engine.num_kv_blocks=0"], "engine.num_kv_blocks=0: must be >= 1"),
        (["engine.gpu_memory_utilization=2"], "engine.gpu_memory_utilization=2: must be > 0 and <= 1"),
        (["engine.max_num_seqs=0"], "engine.max_num_seqs=0: must be >= 1"),
        (["engine.max_model_len=1"], "engine.max_model_len=1: must be >= 2"),
        (["engine.max_model_len=10000000"], "engine.max_model_len=10000000: must be <= 131072"),
        (["caching.block_size=0"], "caching.block_size=0: must be >= 1 token"),
        (["caching.watermark=1"], "caching.watermark=1: must be >= 0 and < 1"),
        (["batching.max_num_batched_tokens=0"], "batching.max_num_batched_tokens=0: must be >= 1"),
        (["tensor_parallel_size=0"], "tensor_parallel_size=0: must be a whole number >= 1"),
        (["pipeline_parallel_size=33"], "pipeline_parallel_size=33: must be <= 32, the layers of"),
        (["expert_parallel_size=2"], "expert_parallel_size=2: must divide the 1 devices of a stage"),
        (
            ["tensor_parallel_size=2", "expert_parallel_size=2"],
            "expert_parallel_size=2: llama-3.1-8b has no experts",
        ),
        (
            ["replicas=7", "pools=two_gpus"],
            "replicas=7: has no effect beside pools.large.replicas and pools.small.replicas; set these and "
            "leave out replicas=7, or leave out pools=two_gpus",
        ),
        (["pools=two_gpus", "pools.small.replicas=0"], "pools.small.replicas=0: must be >= 1"),
        (["pools=two_gpus", "+pools.small.replcas=2"], "pools.small.replcas: .* nearest: replicas"),
        (["pools=two_gpus", "pools.small.hardware=l40"], "pools.small.hardware=l40: .* nearest: l40s"),
        (["pools=two_gpus", "pools.small=3"], "pools.small=3: must be a mapping of settings"),
        (["pools={a:{replicas:2}}"], r"pools.a: not in the mapping yet; .* '\+\+pools={a:{replicas:2}}'"),
        (["workload=callers", "workload.tenants={a: 1}"], r"'\+\+workload.tenants={a: 1}'"),
        (["failures=crash", "failures.events.0.at_s=-5"], r"failures.events\[0\].at_s=-5: .* begins at 0"),
        (
            ["failures=crash", "failures.events.0.replicas=[7]"],
            r"failures.events\[0\].replicas\[0\]=7: .* < 1",
        ),
        (
            ["scaling=queue_length", "scaling.min_replicas=9"],
            "scaling.min_replicas=9: must be <= max_replicas=8",
        ),
        (["scaling=queue_length", "replicas=20"], "replicas=20: must be from scaling.min_replicas=1 to"),
        (["max_resends=-1"], "max_resends=-1: must be >= 0"),
        (["recovery.way=luck"], "recovery.way=luck: must be one of scratch, tokens, kv"),
        (["recovery=kv", "recovery.every_tokens=0"], "recovery.every_tokens=0: must be >= 1"),
        (["recovery=kv"], "recovery.way=kv, replicas=1: must be >= 2, as KV is copied to another"),
        (["recovery=kv", "replicas=2", "caching=h2o"], "caching=h2o: keeps only a part of the KV"),
        (["recovery=kv", "replicas=2", "hardware=l4", "network=nvlink"], "network.kind=nvlink: L4 has no"),
        (
            ["recovery=tokens", "workload=synthetic", "++workload.branching.width=2"],
            "recovery.way=tokens, workload.branching.width=2: a request with several branches cannot",
        ),
        (["workload=plain_csv"], "workload.path: must be given"),
        (["workload=plain_csv", "workload.path=no_such.csv"], "no_such.csv: no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_settings_exit_2_with_one_message(overrides, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *overrides]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing is written before the settings are right"


def test_a_run_of_two_pools_tells_of_each_and_of_what_went_wrong(tmp_path, monkeypatch, capsys):
    small = ("+pools.small.engine.max_num_seqs=64", "+pools.small.pipeline_parallel_size=2")
    overrides = ("pools=two_gpus", *small, "failures=crash")
    assert run(tmp_path, monkeypatch, *overrides, "failures.events.0.at_s=2", "max_resends=1") == 0
    written = json.loads(next(tmp_path.rglob("summary.json")).read_text())
    assert set(written["by_pool"]) == {"large", "small"}
    assert written["by_pool"]["small"]["requests"] > 0
    assert written["by_pool"]["small"]["pipeline"]["stages"] == 2
    assert written["by_pool"]["large"]["pipeline"] is None
    assert written["troubles"]["crashes"] == 1
    replicas = pd.read_parquet(next(tmp_path.rglob("replicas.parquet")))
    assert replicas["pool"].tolist() == ["large", "small", "small", "small"]
    assert replicas["crashes"].tolist() == [1, 0, 0, 0]
    assert replicas["down_s"][0] > 0
    shown = capsys.readouterr().out
    assert "Failures: 1 crash" in shown
    assert "large" in shown


def test_a_malformed_trace_names_file_line_and_column(tmp_path):
    trace = tmp_path / "bad.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,ten,5\n")
    with pytest.raises(ConfigError, match=r"bad.csv:3:3: prompt_tokens: expected a whole number.*'ten'"):
        build("workload=plain_csv", f"workload.path={trace}")


def test_a_prompt_beyond_the_kv_cache_is_rejected_and_the_run_goes_on(tmp_path):
    trace = tmp_path / "long.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,5000,5\n1,3,5\n")
    scenario, source = build("workload=plain_csv", f"workload.path={trace}", "engine.num_kv_blocks=100")
    result = scenario.run(source)
    assert result.requests["status"].tolist() == ["rejected", "finished"]
    assert "the KV cache holds at most 1600" in result.requests["reason"][0]
    assert result.summary["requests"] == {
        "arrived": 2,
        "finished": 1,
        "rejected": 1,
        "aborted": 0,
        "unfinished": 0,
    }
    assert any("holds at most 1,600 tokens" in note for note in result.summary["notes"])


def test_a_latency_below_the_hardware_is_called_out_of_reach():
    scenario, source = build(*SMALL, "slo.tpot_ms=1")
    notes = scenario.run(source).summary["notes"]
    assert any(note.startswith("slo.tpot_ms=1: cannot be met") for note in notes)


def test_start_up_imports_nothing_heavy():
    program = (
        "import sys, sim, policies.core.engine, hwmodels.assembly.roofline; "
        "print([name for name in ('torch', 'triton', 'hydra', 'plotly') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_activation_memory_follows_the_batching_policys_own_budget():
    own = build("batching.max_num_batched_tokens=65536")[0].plan_memory()
    default = build()[0].plan_memory()
    assert own.activation_bytes > 2 * default.activation_bytes
    assert own.num_blocks < default.num_blocks


def test_running_a_scenario_twice_gives_the_same(tmp_path):
    scenario, source = build(*SMALL, "replicas=3")
    first, second = scenario.run(source).requests, scenario.run().requests
    assert first.equals(second), "a policy that remembers must not carry one run into the next"


def test_ctrl_c_leaves_the_partial_result_and_exits_130(tmp_path, monkeypatch, capsys):
    arrive = Gateway.arrive

    def interrupted(simulation, arrival):
        if arrival.request.request_id == 30:
            signal.raise_signal(signal.SIGINT)
        arrive(simulation, arrival)

    monkeypatch.setattr(Gateway, "arrive", interrupted)
    sweep = ("--multirun", f"hydra.sweep.dir={tmp_path}/sweep", "seed=0,1", "output.report=false")
    assert run(tmp_path, monkeypatch, *sweep) == 130
    assert [folder.name for folder in (tmp_path / "sweep").iterdir() if folder.is_dir()] == ["0"]
    summary = json.loads((tmp_path / "sweep" / "0" / "summary.json").read_text())
    assert summary["interrupted"]
    assert summary["requests"]["arrived"] == 31
    assert "Interrupted at" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_exits_1(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(tmp_path, monkeypatch, f"hydra.run.dir={tmp_path}/file/out") == 1
    assert "choose another hydra.run.dir" in capsys.readouterr().err


def test_a_single_run_reads_its_trace_once(monkeypatch, tmp_path):
    trace, reads = tmp_path / "trace.csv", []
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,100,10\n0.5,200,20\n")
    source = PlainCsv.blocks
    monkeypatch.setattr(PlainCsv, "blocks", lambda trace: reads.append(1) or source(trace))
    recorded = ("workload=plain_csv", f"workload.path={trace}")
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *recorded, f"hydra.run.dir={tmp_path}/out", "output.progress=false"]) == 0
    assert len(reads) == 1
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["requests"]["finished"] == 2


@pytest.mark.parametrize("overlapped", [True, False])
def test_leaping_changes_nothing_behind_a_frontend_and_an_overlapped_host(overlapped):
    engine = (f"engine.host.overlapped={overlapped}", "engine.frontend_s=0.003")
    leapt, stepped = (
        scenario.run(source).requests
        for scenario, source in (build(*SMALL, *engine, f"sim.leap={leap}") for leap in (True, False))
    )
    assert leapt.equals(stepped)


def test_a_frontend_adds_its_time_to_the_first_token_of_an_idle_engine():
    with_it, without = (
        scenario.run(source).requests["ttft_s"][0]
        for scenario, source in (build(*SMALL, f"engine.frontend_s={s}") for s in (0.01, 0))
    )
    assert with_it - without == pytest.approx(0.01)


def test_an_overlapped_host_sees_arrivals_a_step_later():
    """No host time at all and room for everything: a request waits for half a step, or for one more."""
    none = ("engine.host.iteration_s=0", "engine.host.sequence_s=0", "engine.frontend_s=0")
    waits = {}
    for overlapped in (True, False):
        scenario, source = build(*SMALL[:2], *none, f"engine.host.overlapped={overlapped}")
        waits[overlapped] = scenario.run(source).requests["queue_s"].mean()
    assert waits[True] > 2 * waits[False] > 0
