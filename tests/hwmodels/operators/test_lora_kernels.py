"""Shrink and expand kernels: hand-computed grids; growth with tokens, adapters, ranks, slots; bad values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.operators.gemm import StreamCurve
from hwmodels.operators.lora_kernels import (
    BLOCK_CYCLES,
    FAMILIES,
    OPERAND_BYTES_PER_SM_S,
    RESIDENT_TILES,
    TILE_START_S,
    LoraKernels,
    LoraWork,
    Projection,
    num_launches,
    projection_seconds,
)

QKV = Projection(4096, (4096, 1024, 1024))
CURVE = StreamCurve()


@pytest.fixture(scope="module")
def price(devices):
    def seconds(work, projection=QKV, backend="vllm", **settings):
        kernels = LoraKernels(backend=backend, **settings)
        return projection_seconds(work, projection, kernels, devices["h100_sxm"], CURVE, 2)

    return seconds


def decoding(tokens, adapters=1, rank=16):
    return LoraWork(tokens, 0, tokens, tokens, adapters, rank)


def prompt(tokens, adapters=1, rank=16):
    return LoraWork(tokens, tokens, 1, tokens, adapters, rank)


def test_one_token_takes_as_long_as_one_tile_of_each_kernel(price):
    shrink_bytes, expand_bytes = (32 + 16) * 4096 * 2 / 64 + 4 * 32 * 16, 64 * (512 + 64) + 128 * 32
    tiles_s = 2 * TILE_START_S + RESIDENT_TILES * (shrink_bytes + expand_bytes) / OPERAND_BYTES_PER_SM_S
    weights_s = 16 * 2 * 8192 / (3.35e12 * CURVE.bandwidth_share)
    blocks_s = 2 * (64 + 32) * BLOCK_CYCLES / 1.83e9
    found = price(decoding(1), Projection(4096, (4096,)), max_loras=1)
    assert found == pytest.approx(3 * CURVE.start_s + tiles_s + weights_s + blocks_s, rel=1e-12)
    assert found == pytest.approx(24.3e-6, rel=0.002), "as the docstring says"


def test_each_adapter_has_tiles_of_its_own_and_rows_fill_them_up(price):
    """220 tokens: shrink 7 tiles of 32 rows and 8 splits per slice, expand 4 of 64 rows and 32 + 8 + 8."""
    shrink_tile, expand_tile = (32 + 16) * 4096 * 2 / 8 + 4 * 32 * 16, 64 * (512 + 64) + 128 * 32
    sms = 132 * OPERAND_BYTES_PER_SM_S
    for adapters, row_tiles in ((1, (7, 4)), (100, (100 + 120 // 32, 100 + 120 // 64))):
        shrink_s = 3 * 8 * row_tiles[0] * shrink_tile / sms
        expand_s = (32 + 8 + 8) * row_tiles[1] * expand_tile / sms
        floors_s = [
            TILE_START_S + RESIDENT_TILES * one / OPERAND_BYTES_PER_SM_S for one in (shrink_tile, expand_tile)
        ]
        weights_s = adapters * 16 * 2 * (3 * 4096 + 6144) / (3.35e12 * CURVE.bandwidth_share)
        blocks_s = 301 * (7 * 8 * 3 + 4 * 32 * 3) * BLOCK_CYCLES / 1.83e9
        kernels_s = max(shrink_s, floors_s[0]) + max(expand_s, floors_s[1])
        found = price(decoding(220, adapters), max_loras=300)
        assert found == pytest.approx(3 * CURVE.start_s + kernels_s + weights_s + blocks_s, rel=1e-12)


def test_vllm_0_8_with_300_slots_takes_what_was_measured(devices):
    """Llama-3.1-8B, 220 decodes, rank 8, an H100: 0.33 ms per adapter; 18 to 25 ms with 300 slots and one."""
    layer = (QKV, Projection(4096, (4096,)), Projection(4096, (14336,) * 2), Projection(14336, (4096,)))
    kernels = LoraKernels(max_loras=300)

    def step_s(adapters):
        work = decoding(220, adapters, 8)
        return 32 * sum(projection_seconds(work, p, kernels, devices["h100_sxm"], CURVE, 2) for p in layer)

    assert 18e-3 < step_s(1) < 25e-3
    assert (step_s(132) - step_s(32)) / 100 == pytest.approx(0.33e-3, rel=0.15)


def test_slots_cost_thread_blocks_unless_the_grid_has_only_active_adapters(price):
    one, many = (price(decoding(64), max_loras=slots) for slots in (1, 128))
    assert many > 2 * one
    assert price(decoding(64), max_loras=128, specialize_active_lora=True) == one
    assert price(decoding(64), backend="sglang_csgmv", max_loras=128) == price(
        decoding(64), backend="sglang_csgmv"
    )


def test_unfused_kernels_are_launched_once_per_slice():
    assert num_launches(QKV, FAMILIES["vllm"]) == (2, 1)
    assert num_launches(QKV, FAMILIES["vllm_v0"]) == (6, 1)
    assert num_launches(QKV, FAMILIES["sglang_csgmv"]) == (2, 0)
    assert num_launches(Projection(4096, (4096,)), FAMILIES["punica"]) == (2, 1)


def test_punica_reads_the_weights_again_for_every_token_of_a_prompt(price):
    """What pull request 5036 of vLLM mended: its reports of 40 % less with long prompts and short replies."""
    assert price(prompt(8192), backend="punica") > 3 * price(prompt(8192), backend="vllm_v0")
    assert price(decoding(8192), backend="vllm_v0") > 3 * price(prompt(8192), backend="vllm_v0")


def test_sglang_triton_has_a_segment_per_sequence(price):
    alone = price(decoding(256), backend="sglang_triton")
    assert alone > 2 * price(decoding(256), backend="sglang_csgmv")
    assert price(prompt(256), backend="sglang_triton") < alone / 4


families = st.sampled_from(sorted(FAMILIES))
numbers = st.tuples(st.integers(1, 3000), st.integers(1, 300), st.integers(1, 128), st.booleans())


@given(backend=families, drawn=numbers, more=st.sampled_from(["tokens", "adapters", "rank"]))
def test_more_of_anything_is_never_cheaper(price, backend, drawn, more):
    tokens, adapters, rank, is_prompt = drawn
    make = prompt if is_prompt else decoding
    adapters = min(adapters, tokens)
    least = price(make(tokens, adapters, rank), backend=backend, max_loras=300)
    larger = {"tokens": tokens, "adapters": adapters, "rank": rank}
    larger[more] += 1 + larger[more] // 3
    if more == "tokens" and tokens < 128 <= larger["tokens"]:
        return  # vLLM's kernels split k less from 128 tokens on
    larger["adapters"] = min(larger["adapters"], larger["tokens"])
    assert price(make(**larger), backend=backend, max_loras=300) >= least * (1 - 1e-12)


@given(backend=families, drawn=st.lists(numbers, min_size=1, max_size=6))
def test_arrays_equal_numbers_to_the_last_bit(price, backend, drawn):
    works = []
    for tokens, adapters, rank, is_prompt in drawn:
        works.append((prompt if is_prompt else decoding)(tokens, min(adapters, tokens), rank))
    together = LoraWork(*map(np.array, zip(*works, strict=True)))
    found = price(together, backend=backend, max_loras=8)
    assert found.tolist() == [price(work, backend=backend, max_loras=8) for work in works]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "vllm_v2"}, "backend=vllm_v2: must be one of vllm, vllm_v0, punica"),
        (
            {"max_loras": 0},
            "max_loras=0: must be a whole number >= 1; null for the slots of the adapter policy",
        ),
        ({"launch_s": -1.0}, "launch_s=-1.0: must be a finite number >= 0 s"),
        ({"launch_s": float("nan")}, "launch_s=nan: must be a finite number >= 0 s"),
    ],
)
def test_rejects_kernels_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        LoraKernels(**settings)
