"""The operators of one iteration of a dense transformer: FLOPs, bytes moved and bytes communicated, per rank.

Per layer, with tensor parallelism as Megatron-LM cuts it (Shoeybi et al., 2019): QKV and gate/up by columns,
output and down projections by rows, one all-reduce after attention and one after the MLP. Embedding table and
LM head are cut by vocabulary: another all-reduce, and a gather of the logits.

What an operator needs is a linear form in the quantities of `IterationShape`; b = bytes of an element:

                            FLOPs                               bytes
    GEMM x[m, k] w[k, n]    2 m k n                             (k n + m k + m n) b
    attention, decode       4 heads head_dim a context token    2 kv_heads head_dim b a context token
    attention, prefill      4 heads head_dim a query-key pair   the same, for each chunk's context once
    norms, rotary, SwiGLU   not counted                         every tensor read and written once

Attention's queries and outputs are counted where the neighbouring operators write and read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from hwmodels.iteration import IterationShape, Num
from hwmodels.model_spec import ModelSpec


class Collective(Enum):
    all_reduce = "all_reduce"
    all_gather = "all_gather"


class Demand(NamedTuple):
    """FLOPs or bytes of one call, as a linear form in what the iteration computes."""

    fixed: float = 0.0
    per_token: float = 0.0
    """Tokens computed: decodes and chunks (and, for time, the padding of a CUDA graph)."""
    per_sampled_seq: float = 0.0
    per_decode_context_token: float = 0.0
    per_prefill_pair: float = 0.0
    per_prefill_context_token: float = 0.0

    def of(self, shape: IterationShape, num_tokens: Num) -> Num:
        return (
            self.fixed
            + self.per_token * num_tokens
            + self.per_sampled_seq * shape.sampled_seqs
            + self.per_decode_context_token * shape.decode_context_tokens
            + self.per_prefill_pair * shape.prefill_pairs
            + self.per_prefill_context_token * shape.prefill_context_tokens
        )


NOTHING = Demand()


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One kernel, or one collective, and how often an iteration calls it. Demands are per call and rank."""

    name: str
    component: str
    """One of `iteration.COMPONENTS`."""
    calls: int
    flops: Demand = NOTHING
    bytes_moved: Demand = NOTHING
    collective: Collective | None = None
    """Set: a communication, whose message has bytes_moved bytes."""
    kernels: int = 1
    """Kernels a call launches; 0 where it shares one with the operator before it."""


def iteration_operators(model: ModelSpec, tensor_parallel_size: int) -> list[Operator]:
    """All operators of one iteration on one of tensor_parallel_size ranks."""
    model.check_tensor_parallel_size(tensor_parallel_size)
    layers, hidden, b = model.num_layers, model.hidden_size, model.element_bytes
    q_width = model.num_heads // tensor_parallel_size * model.head_dim
    kv_width = model.kv_heads_per_rank(tensor_parallel_size) * model.head_dim
    mlp_width = model.intermediate_size / tensor_parallel_size
    up_width = (2 if model.gated_mlp else 1) * mlp_width
    vocab_width = model.vocab_size / tensor_parallel_size

    return [
        stream("embedding", 1, b * 2 * hidden),
        stream("attention_norm", layers, b * 4 * hidden),  # adds the residual: reads two, writes two
        gemm("qkv_proj", layers, hidden, q_width + 2 * kv_width, b),
        *([stream("qk_norm", layers, b * 2 * (q_width + kv_width))] if model.qk_norm else []),
        stream("rotary", layers, b * 2 * (q_width + kv_width)),
        stream("kv_write", layers, b * 4 * kv_width),
        *attention(layers, model.num_heads // tensor_parallel_size, kv_width, model.head_dim, b),
        gemm("o_proj", layers, q_width, hidden, b),
        stream("mlp_norm", layers, b * 4 * hidden),
        gemm("gate_up_proj" if model.gated_mlp else "up_proj", layers, hidden, up_width, b),
        stream("activation", layers, b * (up_width + mlp_width)),
        gemm("down_proj", layers, mlp_width, hidden, b),
        *across_ranks(2 * layers + 1, b * hidden, tensor_parallel_size),
        stream("final_norm", 1, b * 4 * hidden),
        *lm_head(hidden, vocab_width, model.vocab_size, b, tensor_parallel_size),
    ]


def gemm(name: str, calls: int, k: float, n: float, element_bytes: float) -> Operator:
    return Operator(
        name=name,
        component="gemm",
        calls=calls,
        flops=Demand(per_token=2 * k * n),
        bytes_moved=Demand(fixed=k * n * element_bytes, per_token=(k + n) * element_bytes),
    )


def stream(name: str, calls: int, bytes_per_token: float) -> Operator:
    """A memory-bound operator over the activations of all tokens."""
    return Operator(
        name=name, component="elementwise", calls=calls, bytes_moved=Demand(per_token=bytes_per_token)
    )


def attention(
    calls: int, num_heads: int, kv_width: float, head_dim: int, element_bytes: float
) -> list[Operator]:
    """Decodes and chunks in one variable-length kernel, as in vLLM; each part has a roofline of its own."""
    flops, kv_bytes = 4.0 * num_heads * head_dim, 2.0 * kv_width * element_bytes
    return [
        Operator(
            name="attention_decode",
            component="attention",
            calls=calls,
            flops=Demand(per_decode_context_token=flops),
            bytes_moved=Demand(per_decode_context_token=kv_bytes),
        ),
        Operator(
            name="attention_prefill",
            component="attention",
            calls=calls,
            flops=Demand(per_prefill_pair=flops),
            bytes_moved=Demand(per_prefill_context_token=kv_bytes),
            kernels=0,
        ),
    ]


def across_ranks(calls: int, bytes_per_token: float, tensor_parallel_size: int) -> list[Operator]:
    """All-reduces of every token's hidden state: after the embedding, each attention and each MLP."""
    if tensor_parallel_size == 1:
        return []
    return [
        Operator(
            name="all_reduce",
            component="communication",
            calls=calls,
            bytes_moved=Demand(per_token=bytes_per_token),
            collective=Collective.all_reduce,
        )
    ]


def lm_head(
    hidden: int, vocab_width: float, vocab_size: int, element_bytes: float, tensor_parallel_size: int
) -> list[Operator]:
    """Logits of the sampled rows, gathered from all ranks, and sampling over them in fp32."""
    logits = Operator(
        name="lm_head",
        component="lm_head",
        calls=1,
        flops=Demand(per_sampled_seq=2 * hidden * vocab_width),
        bytes_moved=Demand(
            fixed=hidden * vocab_width * element_bytes, per_sampled_seq=(hidden + vocab_width) * element_bytes
        ),
    )
    gather = Operator(
        name="logits_all_gather",
        component="lm_head",
        calls=1,
        bytes_moved=Demand(per_sampled_seq=vocab_size * element_bytes),
        collective=Collective.all_gather,
    )
    # Reads the logits, writes them in fp32, then reads them for the softmax and again for the draw.
    sampling_bytes = vocab_size * (element_bytes + 4.0 + 4.0 + 4.0)
    sampling = Operator(
        name="sampling",
        component="lm_head",
        calls=1,
        bytes_moved=Demand(per_sampled_seq=sampling_bytes),
        kernels=4,
    )
    return [logits, *([gather] if tensor_parallel_size > 1 else []), sampling]
