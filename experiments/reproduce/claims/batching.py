"""Continuous against static batching."""

from __future__ import annotations

import numpy as np

from experiments.reproduce.claims.built import device, model
from experiments.reproduce.claims.shipped import result, summary
from sim.metrics.result import RunResult
from sim.records.table import to_pandas

SYSTEMS = "static_against_continuous_systems"
NUM_TOKENS = 958
"""Expected longest of 1,000 outputs that are exponential with a mean of 128: 128 (ln 1,000 + 0.577)."""
LONGEST = (
    "workload.lengths.output_tokens.probabilities=[0,1]",
    f"workload.lengths.output_tokens.values=[{NUM_TOKENS},{NUM_TOKENS}]",
    "workload.num_requests=200",
)
SERVER_OF_2023 = (  # flags of the text's script, and a model in eager PyTorch
    "batching.waiting_served_ratio=1.2",
    "batching.max_waiting_tokens=7",
    "engine.cuda_graphs.enabled=false",
    "engine.host.launch_s=60e-6",
    "engine.host.iteration_s=2e-3",
    "engine.host.sequence_s=5e-6",
    "engine.kernels.attention_kernels=standard",
)
COPY_SHARE = 0.9
"""Share of the memory bandwidth that copies of large tensors reach."""
REQUESTS = "throughput.requests_per_s"


def over_naive(arm: str) -> float:
    """Returns requests/s of an arm over those of naive batches, which run to the queue's longest output."""
    return summary(SYSTEMS, arm)[REQUESTS] / summary(SYSTEMS, "naive", *LONGEST)[REQUESTS]


def server_of_2023() -> float:
    """Returns the same for text-generation-inference as of June 2023, with its copies of padded KV."""
    run = result(SYSTEMS, "continuous", *SERVER_OF_2023)
    num_requests = len(run.requests)
    seconds = num_requests / run.summary["throughput"]["requests_per_s"] + copy_seconds(run)
    return float(num_requests / seconds / summary(SYSTEMS, "naive", *LONGEST)[REQUESTS])


def copy_seconds(run: RunResult) -> float:
    """Returns the seconds in which a run's KV would have been padded and copied.

    KV is padded to the longest sequence of an iteration, and attention reads the padding. Every decode copies
    all of it, to append a token, and so does every iteration that a sequence joins or leaves.
    """
    iterations = to_pandas(run.records.iterations)
    requests = to_pandas(run.requests).sort_values("first_token_s")
    starts, decoding = iterations["start_s"].to_numpy(), iterations["decode_seqs"].to_numpy()
    first, finished = requests["first_token_s"].to_numpy(), requests["finished_s"].to_numpy()
    # The sequence that has run longest is the first that has not finished; all prompts have the same length.
    oldest = np.searchsorted(np.maximum.accumulate(finished), starts, side="right").clip(max=len(first) - 1)
    num_decodes = np.concatenate([[0], np.cumsum(decoding > 0)])
    since = num_decodes[:-1] - num_decodes[np.searchsorted(starts, first[oldest], side="left")] + 1
    longest = requests["prompt_tokens"].to_numpy()[oldest] + np.maximum(since, 0)
    padded = decoding * longest
    changes = (iterations["prefill_seqs"].to_numpy() > 0) | (np.diff(decoding, append=0) < 0)
    padding = np.maximum(padded - iterations["decode_context_tokens"].to_numpy(), 0)[decoding > 0].sum()
    tokens = padding + 2 * padded.sum() + 2 * padded[changes].sum()
    bandwidth = COPY_SHARE * device("hardware=a100_40gb_sxm").memory_bandwidth_bytes_per_s
    return float(tokens * model("model=llama2_13b").kv_bytes_per_token() / bandwidth)
