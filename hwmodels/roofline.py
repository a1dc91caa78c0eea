"""Level `spec`: an iteration priced operator by operator from the data sheet.

The roofline is that of Williams, Waterman, Patterson, CACM 2009:

    operator    max(flops / (peak e_c), bytes / (bandwidth e_m)) + kernel start       e_c, e_m: `Efficiency`
    collective  the faster of ring and tree (`interconnect`) + kernel start
    gpu         sum over operators, tokens padded to the captured size where a CUDA graph replays
    iteration   max(gpu, launches) + host, or max(gpu, launches + host): see `HostOverhead`

Llama-3.1-8B in bf16 on an H100 SXM, one sequence, context 1,024: the layers' 13.96e9 bytes of weights at
0.80 x 3.35e12 bytes/s take 5.21 ms; with LM head, attention and kernel starts the GPU needs 6.65 ms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hwmodels.device import Device, Efficiency
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iteration import COMPONENTS, IterationShape, Num
from hwmodels.model_spec import ModelSpec
from hwmodels.ops import iteration_operators
from hwmodels.pricing import ByCount, MergedPrices, price_operators

NUM_TABULATED_TOKENS, NUM_TABULATED_ROWS = 32_768, 4_096
"""Iterations up to this size are looked up; larger ones are computed, a few microseconds each."""


class Roofline:
    """An `IterationModel` of one replica: a model on tensor_parallel_size equal devices of one node.

    `seconds` is asked millions of times in a simulation. All but attention depends on the numbers of tokens
    and of sampled rows, and is looked up in tables; attention is a product on top. A leap over k decode
    iterations so costs two look-ups and a few operations on an array of k. No operation but + * min max
    touches an array, so that numbers and arrays agree to the last bit. `breakdown` goes operator by operator.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        device: Device,
        tensor_parallel_size: int = 1,
        efficiency: Efficiency | None = None,
        host: HostOverhead | None = None,
        cuda_graphs: CudaGraphs | None = None,
    ) -> None:
        device.check_node_holds(tensor_parallel_size)
        dtype = device.compute_dtype(model.dtype)
        self.model = replace(model, dtype=dtype)
        self.device = device
        self.tensor_parallel_size = tensor_parallel_size
        self.efficiency = efficiency or Efficiency()
        self.host = host or HostOverhead()
        self.peak_flops_per_s = tensor_parallel_size * device.peak_flops_per_s[dtype]
        self.peak_bytes_per_s = tensor_parallel_size * device.memory_bandwidth_bytes_per_s

        operators = iteration_operators(self.model, tensor_parallel_size)
        self.operators = price_operators(operators, device, dtype, tensor_parallel_size, self.efficiency)
        self._merged = MergedPrices(self.operators)
        self._tokens_s = ByCount(self._merged.tokens_s, NUM_TABULATED_TOKENS)
        self._sampled_s = ByCount(self._merged.sampled_s, NUM_TABULATED_ROWS)
        self._launches_s = self.host.launch_s * sum(op.calls * op.kernels for op in operators)
        self._padded = (cuda_graphs or CudaGraphs()).padded()
        self._padded_array = np.array(self._padded)
        self._decode_terms: dict[int, tuple[float, float, float]] = {}  # by sequences: base, floor, added

    def seconds(self, shape: IterationShape) -> Any:
        """Wall time of the iteration; for arrays, of each."""
        decode_seqs, decode_context, prefill_seqs, prefill_tokens, pairs, prefill_context, sampled = shape
        merged = self._merged
        gpu_s: Any
        if (
            isinstance(decode_seqs, np.ndarray)
            or isinstance(prefill_seqs, np.ndarray)
            or isinstance(prefill_tokens, np.ndarray)
            or isinstance(sampled, np.ndarray)
        ):
            gpu_s, launch_s = self._look_up_many(decode_seqs, prefill_tokens, sampled)
        else:
            if prefill_tokens == 0:
                num_tokens, launch_s = self._look_up_decodes(int(decode_seqs))
            else:
                num_tokens, launch_s = int(decode_seqs + prefill_tokens), self._launches_s
            gpu_s = self._tokens_s.of(num_tokens) + self._sampled_s.of(int(sampled))
        if isinstance(pairs, np.ndarray) or isinstance(prefill_context, np.ndarray):
            gpu_s = gpu_s + np.maximum(merged.pair_s * pairs, merged.prefill_context_s * prefill_context)
        elif pairs or prefill_context:
            gpu_s = gpu_s + max(merged.pair_s * pairs, merged.prefill_context_s * prefill_context)
        gpu_s = gpu_s + merged.decode_context_s * decode_context
        floor_s, added_s = self._host_seconds(launch_s, decode_seqs + prefill_seqs)
        if isinstance(gpu_s, np.ndarray) or isinstance(floor_s, np.ndarray):
            return np.maximum(gpu_s, floor_s) + added_s
        return max(gpu_s, floor_s) + added_s

    def decode_seconds(self, num_seqs: int, num_context_tokens: int, num_iterations: int) -> list[float]:
        """`seconds` of consecutive decode-only iterations; see `IterationModel`.

        Below some 60 iterations Python floats are faster than numpy arrays.
        """
        if num_seqs not in self._decode_terms:
            num_tokens, launch_s = self._look_up_decodes(num_seqs)
            base_s = self._tokens_s.of(num_tokens) + self._sampled_s.of(num_seqs)
            self._decode_terms[num_seqs] = (base_s, *self._host_seconds(launch_s, num_seqs))
        base_s, floor_s, added_s = self._decode_terms[num_seqs]
        context_s = self._merged.decode_context_s
        last = num_context_tokens + num_seqs * num_iterations
        if num_iterations > 60:
            gpu_s = base_s + context_s * np.arange(num_context_tokens, last, num_seqs, dtype=np.float64)
            times_s: list[float] = (np.maximum(gpu_s, floor_s) + added_s).tolist()
            return times_s
        contexts = range(num_context_tokens, last, num_seqs)
        if base_s + context_s * num_context_tokens >= floor_s:  # the first is the shortest
            return [base_s + context_s * context + added_s for context in contexts]
        return [max(base_s + context_s * context, floor_s) + added_s for context in contexts]

    def operator_seconds(self, shape: IterationShape) -> dict[str, Num]:
        """GPU seconds of every operator, all its calls together."""
        num_tokens = self._padded_tokens(shape.decode_seqs, shape.prefill_tokens)
        return {priced.op.name: priced.seconds(shape, num_tokens) for priced in self.operators}

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Seconds by component: `launch` is the GPU waiting for launches, `host` the wait for the rest."""
        nothing = np.zeros(np.broadcast(*shape).shape)[()]
        parts: dict[str, Any] = dict.fromkeys(COMPONENTS, nothing)
        by_operator = self.operator_seconds(shape)
        for priced in self.operators:
            parts[priced.op.component] = parts[priced.op.component] + by_operator[priced.op.name]
        gpu_s = sum(parts.values())
        launch_s = self._launch_seconds(shape.decode_seqs, shape.prefill_tokens)
        floor_s, added_s = self._host_seconds(launch_s, shape.decode_seqs + shape.prefill_seqs)
        launched_s = np.maximum(gpu_s, launch_s)
        parts["launch"] = launched_s - gpu_s
        parts["host"] = np.maximum(gpu_s, floor_s) - launched_s + added_s
        return parts

    def flops(self, shape: IterationShape) -> Num:
        """2 a weight and token, 4 heads head_dim a query-key pair and layer; LM head: sampled rows only."""
        model = self.model
        layer_weights = model.num_matmul_parameters - model.embedding_elements
        pair_flops = 4.0 * model.num_layers * model.num_heads * model.head_dim
        return (
            2.0 * layer_weights * (shape.decode_seqs + shape.prefill_tokens)
            + pair_flops * (shape.decode_context_tokens + shape.prefill_pairs)
            + 2.0 * model.embedding_elements * shape.sampled_seqs
        )

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Matrices of all layers, the LM head where a row is sampled, the KV of every context attended to."""
        ranks = self.tensor_parallel_size
        weights = dict.fromkeys(COMPONENTS, 0.0)
        for op in (priced.op for priced in self.operators):
            weights[op.component] += ranks * op.calls * op.bytes_moved.fixed
        kv_bytes = ranks * self.model.kv_bytes_per_token(ranks)
        return (
            weights["gemm"]
            + weights["lm_head"] * np.minimum(shape.sampled_seqs, 1)
            + kv_bytes * (shape.decode_context_tokens + shape.prefill_context_tokens)
        )

    def _look_up_decodes(self, num_seqs: int) -> tuple[int, float]:
        """Tokens computed, padding included, and launch seconds of a decode-only iteration."""
        if num_seqs < len(self._padded):
            return self._padded[num_seqs], self.host.graph_replay_s
        return num_seqs, self._launches_s

    def _look_up_many(self, decode_seqs: Any, prefill_tokens: Any, sampled: Any) -> tuple[Any, Any]:
        """GPU seconds without attention, and launch seconds, of many iterations."""
        num_tokens = self._padded_tokens(decode_seqs, prefill_tokens)
        num_rows = np.asarray(sampled, dtype=np.intp)
        gpu_s = self._tokens_s.of_many(num_tokens) + self._sampled_s.of_many(num_rows)
        return gpu_s, self._launch_seconds(decode_seqs, prefill_tokens)

    def _host_seconds(self, launch_s: Any, num_seqs: Any) -> tuple[Any, Any]:
        """floor_s and added_s of iteration = max(gpu, floor_s) + added_s."""
        host_s = self.host.iteration_s + self.host.sequence_s * num_seqs
        return (launch_s + host_s, 0.0) if self.host.overlapped else (launch_s, host_s)

    def _replays(self, decode_seqs: Any, prefill_tokens: Any) -> Any:
        """Where a CUDA graph runs the whole iteration."""
        return np.logical_and(prefill_tokens == 0, decode_seqs < len(self._padded))

    def _padded_tokens(self, decode_seqs: Any, prefill_tokens: Any) -> Any:
        num_tokens = np.asarray(decode_seqs + prefill_tokens, dtype=np.intp)
        captured = self._padded_array.take(num_tokens, mode="clip")
        return np.where(self._replays(decode_seqs, prefill_tokens), captured, num_tokens)

    def _launch_seconds(self, decode_seqs: Any, prefill_tokens: Any) -> Any:
        return np.where(
            self._replays(decode_seqs, prefill_tokens), self.host.graph_replay_s, self._launches_s
        )
