"""A run of one replica with three iterations of 1 s: records that a test can check by hand."""

import numpy as np
import pandas as pd

from sim.records.run import PoolRecord, RunRecords, replicas_throughout


def run_of_three_iterations(requests, *, preempted=(0, 0, 0)):
    """Returns the records of three iterations for two requests: one with three tokens, one with one token."""
    iterations = pd.DataFrame(
        {
            "replica": [0, 0, 0],
            "iteration": [0, 1, 2],
            "start_s": [0.0, 1.0, 2.0],
            "duration_s": [1.0, 1.0, 1.0],
            "decode_seqs": [0, 1, 1],
            "decode_context_tokens": [0, 9, 10],
            "prefill_seqs": [1, 1, 0],
            "prefill_tokens": [8, 4, 0],
            "prefill_pairs": [36, 10, 0],
            "prefill_context_tokens": [8, 4, 0],
            "sampled_seqs": [1, 2, 1],
            "running": [1, 2, 1],
            "waiting": [0, 0, 0],
            "kv_blocks_used": [2, 4, 3],
            "kv_tokens_used": [8, 13, 10],
            "preempted": preempted,
            "waits_for_memory": [0, 0, 0],
        }
    )
    return RunRecords(
        requests=requests,
        iterations=iterations,
        gap_s=np.array([1.0, 1.0]),
        gap_count=np.array([1, 1]),
        gap_end_s=np.array([2.0, 3.0]),
        pools=(PoolRecord(10, 4),),
        replicas=replicas_throughout(1, 4.0),
        end_s=4.0,
    )
