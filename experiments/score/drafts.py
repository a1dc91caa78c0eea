"""Speculative decoding of the rows of silicon tables, which no column states.

InferenceMAX used some engine images and layouts only in configurations with `spec-decoding: mtp`
(github.com/SemiAnalysisAI/InferenceX, Apache-2.0; .github/configs/nvidia-master.yaml, 2026-01 to 2026-04).
"""

from __future__ import annotations

from typing import Any

from hwmodels.levels import LatencyLevel
from hwmodels.levels.speculative import Speculative

TOKENS_PER_PASS = {"deepseek-r1": {1: 1.79, 2: 2.27, 3: 2.49}, "qwen3.5-397b-a17b": {3: 3.39}}
"""Mean tokens of a pass by number of drafted ones: InferenceX's golden_al_distribution with thinking, on
coding prompts; for DeepSeek-R1 that of DeepSeek-V4-Pro, whose draft layer is alike."""


def num_draft_tokens(row: dict[str, Any]) -> int:
    """Returns the number of tokens that the engine drafted for each sequence; 0: no speculative decoding.

    These images and layouts were used only in configurations with spec-decoding: mtp.
    """
    backend, model, gpu = row["backend"], row["model"], row["gpu"]
    version = str(row.get("backend_version"))
    if row["source"] == "inferencemax" and backend == "trtllm" and model == "deepseek-r1":
        on_h200 = gpu == "h200_sxm" and version == "1.1.0rc2.post2" and row["gpus"] <= 8
        if version == "1.2.0rc6.post3" or on_h200:
            return 3 if row["attention_dp_size"] == 1 else 1
    if backend != "sglang" or gpu != "b200_sxm" or row["weights"] != "fp8" or version != "0.5.9":
        return 0
    if model == "qwen3.5-397b-a17b" and row["gpus"] == 4 and row["moe_ep_size"] == 1:
        return 3
    return 2 if model == "deepseek-r1" and row["concurrency"] >= 128 else 0


def tokens_per_pass(row: dict[str, Any]) -> float:
    """Returns the mean number of tokens that a sequence gets from a pass."""
    drafts = num_draft_tokens(row)
    return TOKENS_PER_PASS[row["model"]][drafts] if drafts else 1.0


def with_drafts(latency: LatencyLevel, row: dict[str, Any]) -> LatencyLevel:
    """Returns the level of iteration times with the row's speculative decoding, if it had any.

    SGLang's passes with drafts take 1.6 to 2 times as long as their operators, for unknown reasons, so that a
    token takes about as long as without drafts: they are left out.
    """
    drafts = num_draft_tokens(row)
    if not drafts or row["backend"] == "sglang":
        return latency
    return Speculative(base=latency, num_draft_tokens=drafts, accepted_tokens=tokens_per_pass(row))
