"""Tables of models with experts, and of models with layers that tables cannot describe."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from hwmodels.iterations import IterationShape
from hwmodels.levels import Calibrated
from hwmodels.levels.files import TableLevel
from sim.settings.scenario import build_scenario

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
DECODE = IterationShape(8, 8 * 500, 0, 0, 0, 0, 8)


def replica_of(model, *overrides):
    cfg = SOURCE.compose(["workload=poisson", f"model={model}", "hardware=h200_sxm", *overrides])
    return build_scenario(cfg).replica


@pytest.fixture(scope="module")
def mixtral():
    return replica_of("mixtral_8x7b")


def layer_tables(folder, *operators, **more):
    """Writes LLMServingSim's tables with 100 us for each operator of a layer, 500 us for the LM head."""
    attention = [
        *((0, 0, n, kv) for n in (1, 64) for kv in (16, 1024)),
        *((chunk, cached, 0, 0) for chunk in (16, 512) for cached in (0, 512)),
    ]
    tables = {
        "dense": [{"layer": name, "tokens": n} for name in operators for n in (1, 1024)],
        "attention": [
            {"prefill_chunk": chunk, "kv_prefill": cached, "n_decode": n, "kv_decode": kv}
            for chunk, cached, n, kv in attention
        ],
        "per_sequence": [{"layer": "lm_head", "sequences": n, "time_us": 500.0} for n in (1, 256)],
        **more,
    }
    for name, rows in tables.items():
        times = {} if "time_us" in rows[0] else {"time_us": 100.0}
        pd.DataFrame(rows).assign(tp=1, **times).to_csv(folder / f"layers_{name}.csv", index=False)
    return TableLevel(path=str(folder))


def seconds_of(operators, name):
    (found,) = (line.seconds for line in operators if line.operator == name)
    return found


def test_experts_that_a_table_lacks_are_those_of_the_roofline(mixtral, tmp_path):
    level = layer_tables(tmp_path, "qkv_proj", "o_proj", "layernorm")
    model, roofline = level.iteration_model(mixtral), Calibrated().iteration_model(mixtral)
    lines = roofline.explain(DECODE)
    added_s = seconds_of(lines, "experts") + seconds_of(lines, "router")
    assert added_s > 5e-3
    assert model.breakdown(DECODE)["gemm"] == pytest.approx(2 * 32 * 100e-6 + added_s)
    assert "router, experts from the roofline" in level.basis(mixtral)
    parts = sum(model.breakdown(DECODE).values())
    assert model.seconds(DECODE) == pytest.approx(parts)
    many = model.seconds(IterationShape(*(np.array([field, field]) for field in DECODE.counts)))
    assert many.tolist() == [model.seconds(DECODE)] * 2
    assert model.decode_ends(0.0, 8, 8 * 500, 1) == [model.seconds(DECODE)]


def test_shared_experts_come_from_the_roofline_only_if_the_table_has_none(tmp_path):
    replica = replica_of("llama4_scout", "tensor_parallel_size=1", "model.weights=fp8")
    one_kind = replace(replica, model=replace(replica.model, blocks=replica.model.blocks[:1]))
    without = layer_tables(tmp_path, "qkv_proj", "o_proj")
    assert "router, experts, shared_gate_up_proj, shared_down_proj from" in without.basis(one_kind)
    assert "taken as those of weights in fp8" in without.basis(one_kind)
    (folder := tmp_path / "with").mkdir()
    named = layer_tables(folder, "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "router")
    assert "; experts from the roofline" in named.basis(one_kind)


def test_measured_experts_are_used_at_the_expected_number_that_get_tokens(mixtral, tmp_path):
    """With one token, two of eight experts; with thousands of tokens, all of them."""
    moe = [
        {"ep": ep, "tokens": tokens, "activated_experts": reached, "time_us": 100.0 * reached * ep}
        for ep in (1, 2)
        for tokens in (1, 1024)
        for reached in (1, 2, 4, 8)
    ]
    level = layer_tables(tmp_path, "qkv_proj", "o_proj", moe=moe)
    model = level.iteration_model(mixtral)
    assert "roofline" not in level.basis(mixtral).split("elementwise")[0]
    one, many = (
        model.breakdown(IterationShape(0, 0, 1, n, n * (n + 1) / 2, n, 1))["gemm"] for n in (1, 1024)
    )
    assert one == pytest.approx(32 * (200 + 200) * 1e-6)
    assert many == pytest.approx(32 * (200 + 800) * 1e-6, rel=1e-3)


def test_the_table_of_a_dense_model_is_refused_for_one_with_experts(mixtral, tmp_path):
    level = layer_tables(tmp_path, "qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    with pytest.raises(ValueError, match="down_proj: calls=32: mixtral-8x7b has experts in place of a dense"):
        level.iteration_model(mixtral)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("deepseek_v2_lite", "qkv_proj: deepseek-v2-lite has latent attention without such a matrix"),
        ("qwen3_5_397b_a17b", "has linear attention, which tables do not describe"),
        ("gemma3_27b", "gemma-3-27b has 2 kinds of attention, tables have one"),
    ],
)
def test_layers_that_tables_cannot_describe_are_refused(model, reason, tmp_path):
    level = layer_tables(tmp_path, "qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    with pytest.raises(ValueError, match=reason):
        level.iteration_model(replica_of(model))


def test_a_table_without_tp_is_of_a_whole_model(tmp_path):
    own = {"operator": "norm", "component": "elementwise", "calls": 64, "num_tokens": [1, 99]}
    pd.DataFrame({**own, "latency_us": 9.0}).to_csv(tmp_path / "mine.csv", index=False)
    level = TableLevel(path=str(tmp_path / "mine.csv"))
    assert level.iteration_model(replica_of("llama3_1_8b")).missing == ("attention", "gemm", "lm_head")
    with pytest.raises(ValueError, match="tensor_parallel_size=2: the table has no column tp"):
        level.iteration_model(replica_of("llama3_1_8b", "tensor_parallel_size=2"))
