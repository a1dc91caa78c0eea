"""The numbers that measurements are judged by, and the tables of the steps."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from experiments.gpu import tiles
from experiments.gpu.compiling import jobs, shape_of
from experiments.gpu.engine_correct import COMMON, HALF, agreement, variants
from experiments.gpu.engine_models import (
    KINDS,
    LLAMA_8B,
    TINY,
    kv_token_bytes,
    layer_weights,
    model_of,
    prefill_flops,
    public_workload,
    read_once_bytes,
    served,
)
from experiments.gpu.engine_speed import idle_of, kernels_of
from experiments.gpu.kernels_speed import cases
from experiments.gpu.measurement import Run, UnavailableError
from experiments.gpu.steps import STEPS
from kernels.decode_attention import decode_case
from kernels.prefill_attention import prefill_case
from realengine.model.backend import TRITON, check_supported
from realengine.speculation.settings import SpeculationSettings


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, "cpu", rehearse=False, seed=0, left_s=1.0)


def test_llama_8b_reads_15_gb_a_step():
    """A block: 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336 = 218,103,808; and the output head."""
    assert layer_weights(LLAMA_8B) == 32 * 218_103_808
    assert read_once_bytes(LLAMA_8B, 2) == 2 * (32 * 218_103_808 + 128256 * 4096) == 15_009_316_864
    assert kv_token_bytes(LLAMA_8B, 2) == 131_072
    assert prefill_flops(TINY, 1) == 2 * layer_weights(TINY) + 4 * 2 * 4 * 32 * 1 + 2 * 512 * 64


def test_the_public_workload_is_the_published_one():
    requests = public_workload()
    assert len(requests) == 256
    assert sum(request.num_output_tokens for request in requests) == 133_966
    assert all(100 <= len(request.prompt) <= 1024 for request in requests)


def test_idle_time_is_what_no_interval_covers():
    """Two steps: 0-3 (two overlap, a gap of 0.5 between), 10-12; the gap between the steps is 7."""
    idle = idle_of([(10.0, 12.0), (0.0, 1.0), (0.5, 2.0), (2.5, 3.0)], num_steps=2)
    assert idle["gap_s"] == 7.0
    assert idle["busy_s"] == pytest.approx((2.0 + 0.5 + 2.0) / 2)
    assert idle["idle_s"] == pytest.approx((0.5 + 7.0) / 2)
    assert idle_of([(1.0, 2.0)], num_steps=1) == {"gap_s": 0.0, "busy_s": 1.0, "idle_s": 0.0}


def test_kernels_are_summed_by_name_and_step_the_longest_first():
    seen = [("gemm", 0.0, 1.0), ("norm", 1.0, 1.5), ("gemm", 2.0, 4.0)]
    found = kernels_of(seen, num_steps=2)
    assert found == {"gemm": [1.0, 1.5], "norm": [0.5, 0.25]}
    assert list(found) == ["gemm", "norm"]


def test_agreement_says_where_answers_part():
    assert agreement([(1, 2)], [(1, 2)])["ok"]
    row = agreement([(1, 2), (3, 4, 5)], [(1, 2), (3, 9, 5)])
    assert not row["ok"]
    assert row["same_share"] == 0.5
    assert "request 1 from token 1" in row["why"]


@pytest.mark.parametrize("kind", KINDS)
def test_our_kernels_compute_every_kind_of_attention_in_the_dtype_of_its_check(kind, run):
    dtype = torch.bfloat16 if kind in HALF else torch.float32
    check_supported(model_of(kind, run), TRITON, dtype, dtype, quantization=None, world_size=1)


def test_every_way_to_draft_has_its_own_name_and_valid_settings():
    found = list(variants(TINY))
    assert len({name for name, _, _ in found}) == len(found)
    for _, config, _ in found:
        SpeculationSettings.of(config)


@pytest.mark.parametrize("step", [name for name, one in STEPS.items() if one.needs != "calibrate"])
def test_the_names_of_a_step_are_unique_and_set_ups_are_not_taken_up_again(step, run):
    """Each set-up is entered once, as it may take half a minute."""
    table = STEPS[step].table()(run)
    assert max(Counter(one.name for one in table).values()) == 1
    seen, last = set(), None
    for one in table:
        if one.setup is not last:
            assert one.setup is None or id(one.setup) not in seen or step == "engine_correct", one.name
            seen.add(id(one.setup))
            last = one.setup


def test_a_pass_with_drafts_reads_the_kv_of_a_decode_once():
    decode = decode_case("llama_8b", "batch8", [1024] * 8, torch.bfloat16)
    verify = prefill_case("llama_8b", 8, 4, 1024, torch.bfloat16)
    rows = 8 * 32 * 128 * 4.0  # bytes of the queries and outputs of one row of each sequence
    assert verify.bytes_moved - decode.bytes_moved == 3 * rows
    assert verify.flops == pytest.approx(4 * decode.flops, rel=2e-3)


def test_cases_with_a_target_come_first_and_those_that_may_hang_last():
    names = [case.name for case in cases()]
    assert "decode_attention/llama_8b-bfloat16-batch16-context4096" in names[:7]
    assert names[-1].startswith("prefill_hopper/")


@pytest.mark.parametrize("search", [*tiles.SEARCHES, *tiles.REHEARSED])
def test_every_search_names_a_case_and_its_neighbours_are_taken_back(search):
    assert f"{search.partition('/')[0]}/{tiles.case_of(search).name}" == search
    module = search.partition("/")[0]
    table = __import__(f"kernels.{module}", fromlist=["TILES"]).TILES
    before, found = dict(table), tiles.changes(module)
    assert len({str(change) for change in found}) == len(found)
    own = [tile._asdict() for tile in tiles.tiles_in(table)]
    for change in (found[0], found[-1]):
        with tiles.changed(module, change):
            new = [tile._asdict() for tile in tiles.tiles_in(table)]
            differing = {name for a, b in zip(own, new, strict=True) for name in a if a[name] != b[name]}
            assert differing <= set(change)
            assert differing
        assert table == before


def test_kernels_of_every_engine_and_check_are_compiled_ahead():
    names = list(jobs(["smoke", "kernels_correct", "engine_correct", "llama_8b", "peers"], rehearse=False))
    assert names[0] == "smoke/smoke"
    assert {f"engine_correct/{kind}" for kind in KINDS} <= set(names)
    assert "llama_8b/llama_8b" in names
    assert "kernels_correct/decode_attention/llama_8b-bfloat16-kv-int8" in names
    assert shape_of(LLAMA_8B, max_model_len=1024, max_num_seqs=8).dtype == torch.bfloat16
    assert shape_of(TINY, **COMMON).dtype == torch.float32


def test_an_attention_backend_that_this_machine_lacks_is_no_failure(run):
    settings = {"attention_backend": "torch_varlen", "max_model_len": 64, "num_kv_blocks": 20}
    with (
        pytest.raises(UnavailableError, match="attention_backend=torch_varlen: needs a GPU"),
        served(TINY, settings, run),
    ):
        pass
