"""Every choice of a config group runs, and wrong choices are refused with one message."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
from omegaconf import OmegaConf

from experiments.app.cli import main
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, build_scenario
from tests.experiments.simulate.small_run import SMALL, SOURCE, build, choices


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


@pytest.mark.sampled(fast=4, slow=12)
@pytest.mark.parametrize("engine", choices("engine"))
def test_an_engine_chooses_its_policies_unless_the_command_line_does(engine):
    own = SOURCE.compose([*SMALL, f"engine={engine}"]).batching
    assert own._target_.endswith(f".{BATCHING_OF_ENGINE.get(engine, 'Chunked')}")
    asked_for = build(*SMALL, f"engine={engine}", "batching=chunked", "caching=paged")[0]
    assert type(asked_for.batching).__name__ == "Chunked"


@pytest.mark.sampled(fast=6, slow=16)
@pytest.mark.parametrize("hardware", choices("hardware"))
def test_every_hardware_runs_a_small_model(hardware):
    scenario, source = build(*SMALL, "model=smollm2_135m", f"hardware={hardware}")
    assert scenario.run(source).summary["requests"]["finished"] == 60


@pytest.mark.sampled(fast=12, slow=40)
@pytest.mark.parametrize("model", [name for name in choices("model") if name != "hf"])
def test_every_model_runs_on_hardware_that_holds_it(model):
    """On 8 devices: tensor parallelism as far as the heads allow, the rest as a pipeline."""
    cfg = with_choice("model", model, *SMALL, "hardware=mi355x")  # 2.3 TB
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
        (["caching.watermark=1"], "caching.watermark=1: must be a share, >= 0 and < 1"),
        (["batching.max_num_batched_tokens=0"], "batching.max_num_batched_tokens=0: must be >= 1"),
        (["tensor_parallel_size=0"], "tensor_parallel_size=0: must be >= 1"),
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
