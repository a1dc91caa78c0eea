"""Parameters of published models, read from the fields of their config.json, against what their makers state.

known_models.csv holds one model per row: those fields that its price depends on, its repository, and the
parameters that its name or card states, in billions.
"""

import csv
import json
from pathlib import Path

import pytest

from hwmodels.hf.config import from_hf_fields

TABLE = Path(__file__).with_name("known_models.csv")
with TABLE.open(newline="") as lines:
    ROWS = list(csv.DictReader(lines))

IN_NAME_ONLY = {"EXAONE-4.5-33B": 0.03}
"""Models whose makers round their parameters, tower included, in a name only."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["model"])
def test_has_the_parameters_that_are_published(row):
    """Within 2 %; active ones within 20 %, as makers count tables in or out of a figure of one digit."""
    model = from_hf_fields(json.loads(row["fields"]), row["model"])
    tolerance = IN_NAME_ONLY.get(row["model"], 0.02)
    assert model.num_parameters / 1e9 == pytest.approx(float(row["parameters_billion"]), rel=tolerance)
    if row["active_billion"]:
        stated = float(row["active_billion"])
        assert model.num_active_parameters / 1e9 == pytest.approx(stated, rel=0.2, abs=1.0)
    assert model.kv_bytes_per_token() == float(row["kv_bytes_per_token"])
    assert model.state_bytes_per_sequence() == float(row["state_bytes_per_sequence"])
    assert not model.read_by_fields


def test_the_table_names_a_repository_for_every_model():
    assert len(ROWS) > 75
    assert all("/" in row["source"] for row in ROWS)
    assert len({row["model"] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        # 7 of 27 layers have MLA: (512 + 64) x 2 bytes.
        ("Kimi-Linear-48B-A3B", 7 * 576 * 2),
        # 4 of 40 layers have attention: 2 (K, V) x 8 heads x 128 x 2 bytes.
        ("Granite-4.0-H-Small", 4 * 2 * 8 * 128 * 2),
        # 6 of 52 layers: 2 x 2 heads x 128 x 2 bytes.
        ("Nemotron-3-Nano-30B-A3B", 6 * 2 * 2 * 128 * 2),
        # 78 layers of MLA; the 21 that select tokens keep an fp8 key of 128 and its scale.
        ("GLM-5.2", 78 * 576 * 2 + 21 * 132),
        # 9 full layers of 4 KV heads, 39 with a window of 8; keys of 192, values of 128.
        ("MiMo-V2-Flash", (9 * 4 + 39 * 8) * (192 + 128) * 2),
        # 21 layers of 4 tokens per entry with an index key, 20 of 128: 512 x 2 bytes per entry.
        ("DeepSeek-V4-Flash", 21 * (1024 + 132) / 4 + 20 * 1024 / 128),
        # Multi-query attention: one head of 64 in 32 layers.
        ("Falcon-7B", 32 * 2 * 64 * 2),
    ],
)
def test_kv_bytes_are_those_counted_by_hand(name, kv_bytes):
    [row] = [row for row in ROWS if row["model"] == name]
    assert from_hf_fields(json.loads(row["fields"]), name).kv_bytes_per_token() == kv_bytes


@pytest.mark.parametrize(
    ("name", "number", "parameters"),
    [
        # 0.33 B a module, as its report states: a window, whose values are narrower, and a dense MLP.
        ("MiMo-V2-Flash", 3, 4096 * (64 * (192 + 128) + 8 * (192 + 128)) + 3 * 4096 * 16384),
        # MLA and a dense MLP.
        (
            "LongCat-Flash",
            1,
            6144 * (1536 + 576) + 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 6144 + 3 * 6144 * 12288,
        ),
    ],
)
def test_modules_for_multi_token_prediction_that_no_config_names_have_no_experts(name, number, parameters):
    model = from_hf_fields(json.loads(next(row["fields"] for row in ROWS if row["model"] == name)), name)
    assert model.num_mtp_modules == number
    matrices = model.mtp_block.layer_matrices(model.hidden_size)
    assert sum(matrix.elements for matrix in matrices) == pytest.approx(parameters, rel=1e-3)
