"""Rows of a measured table by hand, the table of them, and shapes of iterations."""

import numpy as np
from hypothesis import strategies as st

from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations import COMPONENTS, Explained, IterationShape, causal_pairs
from hwmodels.levels.files import MeasuredTable
from hwmodels.levels.profile import Profile

NO_HOST = HostOverhead(iteration_s=0, sequence_s=0, launch_s=0, graph_replay_s=0)
NO_GRAPHS = CudaGraphs(enabled=False)


class Base:
    """Prices what a table lacks: 1 us a token for attention, 2 us for messages, 3 us a sampled row."""

    peak_flops_per_s = 1e15
    peak_bytes_per_s = 4e12

    def flops(self, shape):
        return 5.0 * shape.decode_seqs

    def bytes_moved(self, shape):
        return 7.0 * shape.decode_seqs

    def explain(self, shape):
        parts = self.breakdown(shape)
        lines = {"attention_decode": "attention", "all_reduce": "communication", "lm_head": "lm_head"}
        return [
            *(Explained(n, c, parts[c], 0.0, "memory", 0.0, 0.0, 1.0) for n, c in lines.items()),
            Explained("qkv_proj", "gemm", 3.0, 0.0, "memory", 0.0, 0.0, 1.0),
            Explained("o_proj", "gemm", 1.0, 0.0, "memory", 0.0, 0.0, 1.0),
            Explained("attention_norm", "elementwise", 1.0, 0.0, "memory", 0.0, 0.0, 1.0),
            Explained("host and launches", "host", 0.0, 0.0, "host", 0.0, 0.0, 0.0),
        ]

    def breakdown(self, shape):
        tokens = shape.decode_seqs + shape.prefill_tokens
        parts = dict.fromkeys(COMPONENTS, 0.0 * tokens)
        return parts | {
            "attention": 1e-6 * tokens,
            "communication": 2e-6 * tokens,
            "lm_head": 3e-6 * shape.sampled_seqs,
        }


def rows_of(operator, component, calls, sizes, latency_us):
    """Returns one row per size; a size of attention is (prefill_tokens, cached, decode_seqs, decode_kv)."""
    columns = {"attention": ("prefill_tokens", "cached_tokens", "decode_seqs", "decode_kv_tokens")}.get(
        component, ("num_seqs",) if component == "lm_head" else ("num_tokens",)
    )
    return [
        {"operator": operator, "component": component, "calls": calls, "latency_us": latency}
        | dict(zip(columns, np.atleast_1d(size), strict=True))
        for size, latency in zip(sizes, latency_us, strict=True)
    ]


GEMM = rows_of("qkv_proj", "gemm", 2, [1, 10, 110], [10, 10, 30])
NORM = rows_of("norm", "elementwise", 4, [1, 100], [1, 2])
LM_HEAD = rows_of("lm_head", "lm_head", 1, [1, 100], [50, 149])
DECODES = [(0, 0, n, kv) for n in (1, 10) for kv in (100, 1_100)]
CHUNKS = [(n, cached, 0, 0) for n in (10, 20) for cached in (0, 1_000)]
ATTENTION = [
    *rows_of("attention", "attention", 2, DECODES, [10, 20, 30, 130]),
    *rows_of("attention", "attention", 2, CHUNKS, [8, 28, 12, 52]),
]
BOTH = [chunk[:2] + decode[2:] for chunk in CHUNKS for decode in DECODES]
APART = [row | {"chunks_apart": 1} for row in ATTENTION]
MIXED = rows_of("attention", "attention", 2, BOTH, [60 + 3 * place for place in range(16)])


def columns(*tables):
    rows = [row for table in tables for row in table]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, 0) for row in rows]) for name in names}


def make_table(*tables, host=NO_HOST, cuda_graphs=NO_GRAPHS, **given):
    profile = Profile.from_rows(columns(*tables))
    return MeasuredTable(profile=profile, base=Base(), host=host, cuda_graphs=cuda_graphs, **given)


def decode(num_seqs, context):
    return IterationShape(num_seqs, context, 0, 0, 0, 0, num_seqs)


def prefill(num_tokens, cached=0, chunks=1):
    pairs = chunks * causal_pairs(num_tokens, cached)
    total = chunks * num_tokens
    return IterationShape(0, 0, chunks, total, pairs, chunks * (num_tokens + cached), chunks)


shapes = st.builds(
    lambda n, kv, chunks, each, cached: IterationShape(
        n, n * kv, chunks, chunks * each, chunks * causal_pairs(each, cached), chunks * (each + cached), n + 1
    ),
    st.integers(1, 300),
    st.integers(1, 3_000),
    st.integers(0, 3),
    st.integers(1, 50),
    st.integers(0, 2_000),
)
