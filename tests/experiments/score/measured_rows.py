"""Rows of measured tables, of each kind."""

import numpy as np

SILICON = {
    "id": "row-0",
    "source": "lab",
    "backend": "vllm",
    "model": "smollm2-135m",
    "gpu": "l4",
    "weights": "bf16",
    "mode": "agg",
    "isl": 200,
    "osl": 9,
    "concurrency": 2.0,
    "tp_size": 1.0,
    "pp_size": 1.0,
    "attention_dp_size": 1,
    "moe_tp_size": 1,
    "moe_ep_size": 1,
    "gpus": 1.0,
    "ttft_ms": 12.0,
    "tpot_ms": 4.0,
}
RUN = {
    "id": "run-0",
    "set": "eval",
    "model": "HuggingFaceTB/SmolLM2-135M",
    "gpu": "RTX 4090",
    "tp": 1,
    "precision": "BF16",
    "workload": "general",
    "stages": "4x3;8x2",
    "system_prompt_len": 1000,
    "question_len": 500,
    "output_len": 5,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.9,
    "prefix_caching": False,
    "ttft_mean_ms": 20.0,
    "itl_mean_ms": 3.0,
}
REPLAYED_RUN = {
    "run": "night",
    "gpu": "L4",
    "model": "HuggingFaceTB/SmolLM2-135M",
    "tp": 1,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "max_model_len": np.nan,
    "num_gpu_blocks": np.nan,
    "gpu_memory_utilization": 0.9,
}


def replayed(count, **given):
    return [
        {
            "id": f"night/{i}",
            "run": "night",
            "arrival_s": i / 4,
            "input_tokens": 50,
            "output_tokens": 6,
            **given,
        }
        for i in range(count)
    ]
