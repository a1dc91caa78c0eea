"""Launches of whole steps, compiled in a process of its own: this one interprets and cannot compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from kernels.launch import compiling_for
from realengine.ahead import launches as ahead
from realengine.ahead import zeros
from realengine.ahead.setups import DRAFTERS, MODELS, SETUPS, Setup
from realengine.model.architecture import Architecture
from realengine.model.quantization import LINEAR_QUANTIZATIONS
from realengine.speculation.settings import PROPOSERS
from realengine.weights.load import load_weights


def run_ahead(*arguments, timeout=300):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "realengine.ahead", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    return done, [json.loads(line) for line in done.stdout.splitlines()]


def launched(setup, *names):
    """Returns the kernels that the named steps of a setup launch on sm_90."""
    found = set()
    with compiling_for("sm_90", lambda kernel, grid, args, meta: found.add(kernel.__name__)):
        for step in ahead.steps(setup):
            if step.name in names:
                with ahead.WithoutProducts():
                    step.run()
    return found


@pytest.mark.slow
def test_a_sampled_decode_step_compiles_for_sm_90_within_its_limits():
    done, rows = run_ahead("--target", "sm_90", "--model", "smollm2-135m", "--case", "135m graph of 8,")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["kernel"] for row in rows} == {
        "rms_norm_kernel",
        "rope_and_write_kv_kernel",
        "decode_attention_kernel",
        "even_split_kernel",
        "combine_parts_kernel",
        "gated_kernel",
        "scale_kernel",
        "draw_kernel",
    }
    assert all(row["registers"] > 0 and row["spills"] == 0 for row in rows)
    attention = next(row for row in rows if row["kernel"] == "decode_attention_kernel")
    assert attention["dot_rows"] == 16
    assert attention["tensor_ops"] > 0
    assert "HEAD_DIM=64" in attention["launch"]
    limits = json.loads(ahead.LIMITS.read_text())
    assert all("sm_90" in limits[row["kernel"]] for row in rows)


@pytest.mark.slow
def test_what_one_step_has_compiled_serves_all_others_of_its_shape():
    """Batch sizes, context lengths and where words lie do not make new kernels.

    A tile of chunks has two: one that writes outputs, and one that writes parts where contexts are split.
    """
    done, rows = run_ahead("--target", "sm_90", "--model", "smollm2-135m", "--case", "135m 0 decodes")
    done_too, more = run_ahead("--target", "sm_90", "--model", "smollm2-135m", "--case", "135m decode of")
    assert done.returncode == done_too.returncode == 0
    assert set(Counter((row["kernel"], row["launch"]) for row in more).values()) == {1}
    chunks = Counter(row["launch"] for row in rows if row["kernel"] == "prefill_attention_kernel")
    assert set(chunks.values()) == {2}


@pytest.mark.slow
@pytest.mark.sampled(slow=2)  # all launches of a target take ten minutes
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("model", MODELS)
def test_every_launch_keeps_its_limits(model, target):
    done, rows = run_ahead("--target", target, "--model", model, timeout=7200)
    assert done.returncode == 0, [row for row in rows if row.get("broken")] or done.stderr
    refused = {row["module"] for row in rows if row.get("unsupported")}
    without_fp8 = {
        *("llama-3.1-8b fp8", "llama-3.1-8b fp8 draft_model", "llama-3.1-8b kv-fp8"),
        *("llama-3.1-8b kv-fp8 eagle_tree", "qwen2.5-7b fp8"),
    }
    of_model = {name for name in without_fp8 if name.partition(" ")[0] == model}
    assert refused == (of_model if target == "sm_80" else set())


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (Setup(model="smollm2-135m", quantization="w4a16"), {"w4a16_kernel", "sum_splits_kernel"}),
        (Setup(model="smollm2-135m", quantization="w8a16"), {"scaled_gemm_kernel"}),
        (
            Setup(model="smollm2-135m", quantization="fp8"),
            {"scaled_gemm_kernel", "quantise_tokens_kernel"},
        ),
        (Setup(model="qwen3-0.6b", max_rank=16), {"lora_shrink_kernel", "lora_expand_kernel"}),
        pytest.param(
            Setup(model="qwen3-30b-a3b"),
            {
                "moe_route_kernel",
                "moe_place_kernel",
                "moe_gemm_kernel",
                "moe_combine_kernel",
                "qk_norm_kernel",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_setup_launches_its_own_kernels(setup, expected):
    usual = launched(Setup(model="smollm2-135m"), "graph of 8")
    assert expected <= launched(setup, "graph of 8") - usual


def test_chunks_copies_and_swaps_are_launched():
    setup = Setup(model="smollm2-135m")
    assert launched(setup, "copy on write") == launched(setup, "swap") == {"move_blocks_kernel"}
    mixed = launched(setup, "3 decodes, chunks [5, 33, 200] behind 0")
    assert {"decode_attention_kernel", "prefill_attention_kernel", "draw_kernel"} <= mixed
    assert "draw_kernel" not in launched(setup, "nothing drawn")


@pytest.mark.parametrize("quantization", [None, *LINEAR_QUANTIZATIONS])
@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_are_alike_to_loaded_ones(quantization, world_size):
    architecture = Architecture(
        model_type="qwen2",
        vocab_size=64,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=32,
        rms_norm_eps=1e-6,
        qkv_bias=True,
        tie_word_embeddings=True,
    )
    dtype = torch.bfloat16
    loaded = load_weights(None, architecture, dtype, "cpu", quantization=quantization, world_size=world_size)
    weights = zeros.zero_weights(architecture, dtype, quantization, world_size)

    def described(weight):
        if isinstance(weight, torch.Tensor):
            return weight.shape, weight.dtype, weight.is_contiguous()
        if isinstance(weight, tuple):
            return type(weight), *(described(part) for part in weight)
        return weight

    assert {name: described(weight) for name, weight in weights.items()} == {
        name: described(weight) for name, weight in loaded.items()
    }


@pytest.mark.slow
def test_unknown_models_and_the_interpreter_are_refused():
    done, _ = run_ahead("--model", "gpt-2")
    assert done.returncode == 2
    assert "invalid choice: 'gpt-2'" in done.stderr
    done, _ = run_ahead("--target", "sm_90", "--model", "smollm2-135m", "--case", "no such step")
    assert done.returncode == 2
    assert "no step was compiled" in done.stderr


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        (
            "draft_model",
            {"match_kernel", "combine_parts_kernel", "decode_attention_kernel", "draw_kernel"},
        ),
        ("medusa", {"match_kernel", "move_tokens_kernel"}),
        ("lookahead", {"match_kernel", "move_tokens_kernel", "combine_parts_kernel"}),
    ],
)
def test_passes_with_drafts_launch_their_kernels(drafter, expected):
    setup = Setup(model="smollm2-135m", drafter=drafter)
    names = [step.name for step in ahead.steps(setup) if step.name.startswith("pass of 8 ")]
    assert expected <= launched(setup, names[-1])


def test_every_drafter_has_a_setup():
    drafters = {setup.drafter for setup in SETUPS if setup.drafter}
    assert drafters == set(DRAFTERS)
    assert {config["method"] for config in DRAFTERS.values()} >= set(PROPOSERS) - {"suffix"}


@pytest.mark.slow
def test_passes_with_drafts_compile_for_sm_90_without_spills():
    done, rows = run_ahead("--target", "sm_90", "--model", "smollm2-135m", "--case", "135m medusa pass of 8")
    assert done.returncode == 0, done.stdout + done.stderr
    by_kernel = {row["kernel"]: row for row in rows}
    assert {"match_kernel", "move_tokens_kernel", "combine_parts_kernel"} <= set(by_kernel)
    assert all(row["registers"] > 0 and row["spills"] == 0 for row in rows)
