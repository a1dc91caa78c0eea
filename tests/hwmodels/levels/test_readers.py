"""Tables of LLMServingSim and Vidur: their operators as a model runs them."""

from pathlib import Path

import numpy as np
import pytest

from hwmodels.levels.files import MeasuredTable
from hwmodels.levels.physical import check_physical
from hwmodels.levels.profile import Profile
from hwmodels.levels.tables import Layers, llmservingsim_rows, vidur_rows
from tests.hwmodels.levels.measured_rows import ATTENTION, NO_GRAPHS, NO_HOST, Base, decode

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"


LAYER_TABLES = {
    "dense": {
        "layer": np.array(["qkv_proj", "qkv_proj", "layernorm", "layernorm", "embedding", "embedding"]),
        "tokens": np.array([1, 100] * 3),
        "time_us": np.array([10.0, 20, 1, 2, 3, 4]),
    },
    "per_sequence": {
        "layer": np.array(["lm_head", "lm_head", "sampler", "sampler"]),
        "sequences": np.array([1, 100] * 2),
        "time_us": np.array([50.0, 60, 5, 15]),
    },
    "attention": {
        name: np.array([row[column] for row in ATTENTION])
        for name, column in {
            "prefill_chunk": "prefill_tokens",
            "kv_prefill": "cached_tokens",
            "n_decode": "decode_seqs",
            "kv_decode": "decode_kv_tokens",
            "time_us": "latency_us",
        }.items()
    },
}


def test_llmservingsim_layers_are_counted_as_a_model_runs_them():
    rows = llmservingsim_rows(**LAYER_TABLES, layers=Layers(3, 3))
    table = MeasuredTable(profile=Profile.from_rows(rows), base=Base(), host=NO_HOST, cuda_graphs=NO_GRAPHS)
    parts = table.breakdown(decode(1, 100))
    assert parts["gemm"] == pytest.approx(3 * 10e-6)
    assert parts["elementwise"] == pytest.approx((6 * 1 + 3) * 1e-6)
    assert parts["lm_head"] == pytest.approx(55e-6)
    assert parts["attention"] == pytest.approx(3 * 10e-6)


def test_llmservingsim_rejects_missing_columns_and_mixed_gpus():
    without = {name: column for name, column in LAYER_TABLES["dense"].items() if name != "tokens"}
    with pytest.raises(ValueError, match="dense: has no column tokens; it has layer, time_us"):
        llmservingsim_rows(**{**LAYER_TABLES, "dense": without}, layers=Layers(3, 3))
    two = {**LAYER_TABLES["dense"], "gpu": np.array(["A", "A", "A", "B", "B", "B"])}
    with pytest.raises(ValueError, match="dense: gpu is A, B; select the rows of one"):
        llmservingsim_rows(**{**LAYER_TABLES, "dense": two}, layers=Layers(3, 3))


def test_vidur_operators_leave_attention_to_the_base():
    linear_ops = {
        "num_tokens": np.array([1, 100]),
        "attn_pre_proj_us": np.array([10.0, 20]),
        "add_us": np.array([1.0, 2]),
        "post_attention_layernorm_us": np.array([np.nan, np.nan]),
    }
    profile = Profile.from_rows(vidur_rows(linear_ops, layers=Layers(3, 3)))
    assert {operator.name: operator.calls for operator in profile.operators} == {"qkv_proj": 3, "add": 6}
    assert MeasuredTable(profile=profile, base=Base()).missing == ("attention", "lm_head")


needs_layer_tables = pytest.mark.skipif(
    not (DATA / "vllm_requests" / "layers_dense.parquet").exists(),
    reason="needs ../shared/data/vllm_requests",
)


@needs_layer_tables
@pytest.mark.parametrize(
    ("gpu", "tp", "preset"),
    [
        ("RTX4090", 1, "rtx_4090"),
        ("RTXPRO6000", 1, "rtx_pro_6000_server"),
        ("RTXPRO6000", 2, "rtx_pro_6000_server"),
    ],
)
def test_measured_layer_tables_are_read_whole(gpu, tp, preset, llama, devices):
    pd = pytest.importorskip("pandas")

    def table(name):
        rows = pd.read_parquet(DATA / "vllm_requests" / f"layers_{name}.parquet")
        rows = rows[(rows.gpu == gpu) & (rows.tp == tp)]
        return {column: rows[column].to_numpy() for column in rows}

    dense, attention = table("dense"), table("attention")
    rows = llmservingsim_rows(
        dense=dense, attention=attention, per_sequence=table("per_sequence"), layers=Layers(32, 32)
    )
    check_physical(rows, model=llama, device=devices[preset], tensor_parallel_size=tp)
    model = MeasuredTable(profile=Profile.from_rows(rows), base=Base(), host=NO_HOST, cuda_graphs=NO_GRAPHS)
    measured = (
        (attention["prefill_chunk"] == 0) & (attention["n_decode"] == 64) & (attention["kv_decode"] == 4_096)
    )
    parts = model.breakdown(decode(64, 64 * 4_096))
    assert parts["attention"] == pytest.approx(32e-6 * attention["time_us"][measured].item())
    # Weights once over the data sheet's bandwidth are a floor, twice that is far from any measurement.
    floor_s = 16.06e9 / tp / devices[preset].memory_bandwidth_bytes_per_s
    assert floor_s < model.seconds(decode(1, 128)) < 1.5 * floor_s
