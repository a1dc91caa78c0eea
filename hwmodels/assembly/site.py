"""The site of operators, and the operators common to all layers: GEMMs, streams, messages, adapters.

A site is a rank of a model on a device, with the parameters that prices depend on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

from fieldlimits import Checked, OneOf
from hwmodels.device import DTYPE_BYTES, Device
from hwmodels.exact import larger, smaller
from hwmodels.iterations import AdapterBatch, IterationShape
from hwmodels.iterations.layout import NO_ADAPTERS, ParallelLayout, RankBatch
from hwmodels.iterations.ops import Operator, Per, Quantity, per_row, per_token, total_seconds
from hwmodels.model import Block, ModelSpec
from hwmodels.model.weights import Lora, Matrix, Ranks, Role, WeightFormat, weight_format
from hwmodels.operators import Calibration
from hwmodels.operators.attention import CHOICES as ATTENTION_CHOICES
from hwmodels.operators.collectives import collective_seconds, torus_seconds
from hwmodels.operators.gemm import gemm_seconds, stream_seconds
from hwmodels.operators.lora_kernels import (
    PEAK_SHARE,
    LoraKernels,
    LoraWork,
    Projection,
    num_launches,
    projection_seconds,
)
from hwmodels.operators.moe_routing import Routing
from hwmodels.operators.systolic import systolic_gemm_seconds

SUMS = ("all_reduce", "reduce_scatter")
"""Collectives that need the results of all ranks and wait for the last one: `Calibration.peer_wait_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels(Checked):
    """The engine's kernels, as far as times depend on them."""

    library: Annotated[str, OneOf(("vllm", "trtllm"))] = "vllm"
    """Library of attention and MoE kernels: vllm (SGLang's are much the same) or trtllm."""
    attention_kernels: Annotated[str | None, OneOf(ATTENTION_CHOICES)] = None
    """Attention kernels used instead of the library's: standard, flash_attention_1, 2 or 3, flash_decoding.

    Latent attention always uses the library's.
    """
    moe_backend: Annotated[str, OneOf(("auto", "marlin", "sglang", "deepgemm"))] = "auto"
    """Kernels of the routed experts: auto, the library's; marlin for 4- and 8-bit weights; sglang; or
    deepgemm for block-scaled fp8 weights on Blackwell.

    sglang: SGLang's own choice, more often Triton: see `operators.moe_kernels.kernel_family`.
    """
    gemm_library: Annotated[str, OneOf(("vllm", "trtllm"))] = "vllm"
    """Library of GEMM kernels: vllm or trtllm."""
    fused_quantisation: bool = False
    """Whether the operator before a GEMM also quantises to one scale (fp8, int8); if not, a separate kernel
    does.
    """
    absorbed_latent_decode: bool = True
    """Whether decode attends to the cached latent vectors; False: keys and values are first expanded."""
    lora: LoraKernels = LoraKernels()
    """Kernels of LoRA adapters."""
    routing: Routing = Routing(kind="zipf", exponent=0.8)
    """Distribution of tokens over experts. The default is skewed, as measured even with random prompts."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """One rank of a model on a device; its methods build the operators common to all kinds of layers."""

    model: ModelSpec
    device: Device
    layout: ParallelLayout
    calibration: Calibration
    kernels: Kernels
    formats: Mapping[str, str] = field(default_factory=dict)
    """Storage formats of the layer's matrices, by name, if they differ from those of their role."""

    def of(self, block: Block) -> Site:
        """Returns the site of one kind of layers, with the storage formats of their matrices."""
        return replace(self, formats=dict(block.formats)) if block.formats else self

    @property
    def tp(self) -> int:
        return self.layout.tensor_parallel_size

    @property
    def ranks(self) -> Ranks:
        return Ranks(
            tensor=self.tp,
            moe_tensor=self.layout.expert_tensor_parallel_size,
            expert=self.layout.expert_parallel_size,
        )

    @property
    def dtype(self) -> str:
        return self.device.compute_dtype(self.model.dtype)

    @property
    def hidden_bytes(self) -> float:
        """Bytes of one token's hidden state."""
        return self.model.hidden_size * self.model.element_bytes

    def stream(self, name: str, calls: float, bytes_per_token: float) -> Operator:
        """Returns a memory-bound operator over the activations of all tokens."""
        return Operator(
            name=name,
            component="elementwise",
            per=Per.token,
            calls=calls,
            seconds=lambda b: stream_seconds(
                bytes_per_token * b.tokens, self.device, self.calibration.stream
            ),
            bytes_moved=per_token(bytes_per_token),
            dtype=self.dtype,
        )

    def norm(self, name: str, calls: float, num_norms: float = 1) -> Operator:
        """Returns norms with residual add: each reads and writes two hidden states.

        Sequence parallelism splits them over tokens.
        """
        split = self.tp if self.layout.sequence_parallel else 1
        return self.stream(name, calls, num_norms * 4 * self.hidden_bytes / split)

    def gemm(self, matrix: Matrix, calls: float, per: Per = Per.token) -> Iterator[Operator]:
        """Yields x[m, k] w[k, n] for m tokens (or sampled rows)."""
        weights, device = self.stored(matrix.role, matrix.stored or self.formats.get(matrix.name))
        k, n, b = matrix.k, matrix.n, self.model.element_bytes
        rows = per.value
        weight_bytes = k * n * weights.bytes_per_weight

        compute = weights.compute_dtype(device, self.model.dtype)
        fused = self.kernels.fused_quantisation and weights.name in ("fp8", "int8")
        quantises = not fused and DTYPE_BYTES[compute] < DTYPE_BYTES[self.dtype]

        def seconds(batch: RankBatch) -> Any:
            m = getattr(batch, rows)
            curve, library = self.calibration.gemm, self.kernels.gemm_library
            if device.systolic is not None:
                return systolic_gemm_seconds(m, n, k, weights, device, curve, dtype=self.dtype)
            return gemm_seconds(
                m, n, k, weights, device, curve, dtype=self.dtype, kernels=library, fused_input=fused
            )

        def stored_bytes(batch: RankBatch) -> Any:
            return weight_bytes * smaller(getattr(batch, rows), 1)

        yield Operator(
            name=matrix.name,
            component="lm_head" if per is Per.row else "gemm",
            per=per,
            calls=calls * matrix.count,
            seconds=seconds,
            flops=per_row(2 * k * n) if per is Per.row else per_token(2 * k * n),
            stored_bytes=stored_bytes,
            bytes_moved=lambda batch: stored_bytes(batch) + (k + n) * b * getattr(batch, rows),
            dtype=compute,
            kernels=1 + quantises,
        )

    def stored(self, role: Role, own: str | None = None) -> tuple[WeightFormat, Device]:
        """Returns the storage format of matrices of that role, and the device with their peaks.

        own: the format of a matrix, if it differs from its role's.

        2:4 sparse matrices store half of the values plus two bits of position each, and run at twice the peak
        on chips that have sparse tensor cores.
        """
        weights = weight_format(own or self.model.weight_format_of(role))
        if self.model.sparsity is None or role is Role.plain:
            return weights, self.device
        scales = weights.scale_bytes_per_weight / 2
        halved = replace(weights, bits=weights.bits / 2 + 1, scale_bytes_per_weight=scales)
        if not self.device.sparse_tensor_cores:
            return halved, self.device
        peaks = {dtype: 2 * peak for dtype, peak in self.device.peak_flops_per_s.items()}
        return halved, replace(self.device, peak_flops_per_s=peaks)

    def message(
        self,
        collective: str,
        name: str,
        calls: float,
        message_bytes: Quantity,
        num_ranks: int,
        per: Per = Per.token,
        component: str = "communication",
        nodes: int | None = None,
    ) -> Operator:
        """Returns a collective among num_ranks devices; message_bytes as `operators.collectives` counts them.

        nodes: number of nodes that the devices span; None: the minimum.
        """
        nodes = nodes or self.layout.nodes_spanned(num_ranks, self.device)
        device, curve, library = self.device, self.calibration.collectives, self.kernels.library

        wait_s = (num_ranks - 1) * self.calibration.peer_wait_s if collective in SUMS else 0.0

        def seconds(batch: RankBatch) -> Any:
            size = message_bytes(batch)
            if device.link.torus is not None:
                return torus_seconds(collective, size, num_ranks, device, curve)
            priced_s = collective_seconds(
                collective, size, num_ranks, device, curve, kernels=library, nodes=nodes
            )
            return priced_s + wait_s * smaller(size, 1) if wait_s else priced_s

        return Operator(
            name=name,
            component=component,
            per=per,
            calls=calls,
            seconds=seconds,
            bytes_moved=message_bytes,
            dtype=self.dtype,
            is_message=True,
        )

    def reduced(self, of: str, calls: float) -> Iterator[Operator]:
        """Yields the sum of hidden states over all tensor parallel ranks, on every rank."""
        if self.tp == 1:
            return
        size = per_token(self.hidden_bytes)
        if self.layout.sequence_parallel:
            yield self.message("reduce_scatter", f"{of}_reduce_scatter", calls, size, self.tp)
            yield self.message("all_gather", f"{of}_all_gather", calls, size, self.tp)
        else:
            yield self.message("all_reduce", f"{of}_all_reduce", calls, size, self.tp)


SPLIT_BY_ROWS = ("o_proj", "out_proj", "down_proj")
"""Suffixes of the names of matrices that tensor parallel ranks split over their inputs."""


def adapter_operators(site: Site) -> Iterator[Operator]:
    """Yields one operator per shape of dense matrices; they take 0 s if no token has an adapter.

    If kernels also run without adapters (`cudagraph_specialize_lora` false), they take the time of empty
    kernels.
    """
    calls: Counter[tuple[Projection, bool]] = Counter()
    for matrix in site.model.layer_matrices(site.ranks):
        if matrix.role is Role.dense:
            calls[_projection(site, matrix)] += matrix.count
    for (projection, by_rows), count in calls.items():
        yield _operator(site, projection, count)
        if site.kernels.lora.fully_sharded_loras and site.tp > 1:
            yield _exchange(site, projection, by_rows, count)


class AddedByAdapters:
    """The adapter operators of a site, built when the first batch with an adapter is priced.

    launch_s: CPU seconds to launch one of the other kernels. lora: adapters that are the same in every batch;
    None: requests name them, or there are none.

    Chen et al., "Punica", MLSys 2024 (SGMV); Sheng et al., "S-LoRA", MLSys 2024. T tokens have an adapter,
    each with its rank r; R is the sum of the ranks of the different adapters, each of which is read once. For
    a matrix w[k, n] that fuses p projections (q, k, v: 3; gate, up: 2), each with its own adapter:

        FLOPs   2 (p k + n) sum of r over tokens
        bytes   b ((p k + n) R + (k + 2 n) T + 2 p sum of r over tokens)

    The time is that of the engine's kernels: see `hwmodels.operators.lora_kernels`. Each tensor parallel rank
    has its share of k or n; with `fully_sharded_loras` also of the ranks of the first product or the outputs
    of the second, and the ranks exchange the result of width r between the products.
    """

    def __init__(self, site: Site, launch_s: float = 0.0, lora: Lora | None = None) -> None:
        self._site = site
        self._launch_s = launch_s
        self._lora = lora
        kernels = site.kernels.lora
        self.captured = kernels.is_captured
        self.in_every_batch = lora is not None or _runs_idle(site)
        """Whether batches without adapters also run adapter kernels."""

    @cached_property
    def operators(self) -> list[Operator]:
        return list(adapter_operators(self._site))

    @cached_property
    def _launches(self) -> float:
        """Launches of an iteration, as the equivalent number of other kernels' launches."""
        if self._launch_s == 0:
            return 0.0
        kernels = self._site.kernels.lora
        each = kernels.seconds_per_launch / self._launch_s
        return sum(
            op.calls * (op.kernels if op.is_message else each * (op.kernels - kernels.family.fills))
            for op in self.operators
        )

    def of(self, shape: IterationShape) -> IterationShape:
        """Returns the shape with the adapters common to every batch, if any."""
        if not self.in_every_batch or shape.adapters is not None:
            return shape
        lora = self._lora
        if lora is None:
            return shape._replace(adapters=NO_ADAPTERS)
        tokens = shape.decode_seqs + shape.prefill_tokens
        if shape.drafts is not None:
            tokens = tokens + shape.drafts.tokens
        active = smaller(tokens, lora.num_active)
        return shape._replace(adapters=AdapterBatch(active, tokens, lora.rank * tokens, lora.rank * active))

    def seconds(self, batch: RankBatch) -> tuple[Any, Any]:
        """Returns GPU seconds, and launches as the equivalent number of other kernels' launches."""
        gpu_s = total_seconds(self.operators, batch)
        if _runs_idle(self._site):
            return gpu_s, self._launches
        return gpu_s, self._launches * smaller(batch.adapter_ranks, 1)


def _runs_idle(site: Site) -> bool:
    """Returns whether the kernels also run for batches without adapters."""
    kernels = site.kernels.lora
    return kernels.max_loras is not None and not kernels.cudagraph_specialize_lora


def _projection(site: Site, matrix: Matrix) -> tuple[Projection, bool]:
    """Returns the projection of a matrix on one rank, and whether ranks split it over its inputs."""
    by_rows = matrix.name.endswith(SPLIT_BY_ROWS)
    slices = matrix.slices or (matrix.n,)
    if site.tp == 1 or not site.kernels.lora.fully_sharded_loras:
        return Projection(matrix.k, slices), by_rows
    if by_rows:
        return Projection(matrix.k, tuple(-(-n // site.tp) for n in slices)), by_rows
    return Projection(matrix.k, slices, shrink_share=1 / site.tp), by_rows


def _operator(site: Site, projection: Projection, calls: float) -> Operator:
    b, device, curve = site.model.element_bytes, site.device, site.calibration.stream
    kernels = site.kernels.lora
    k, n, parts = projection.k, projection.n, len(projection.slices) * projection.shrink_share
    peak = device.peak_flops_per_s[site.dtype] * PEAK_SHARE
    idles = _runs_idle(site)

    def flops(batch: RankBatch) -> Any:
        return 2 * (parts * k + n) * batch.adapter_rank_tokens

    def read(batch: RankBatch) -> Any:
        return (parts * k + n) * b * batch.adapter_ranks

    def moved(batch: RankBatch) -> Any:
        activations = (k + 2 * n) * b * batch.adapter_tokens
        return read(batch) + activations + 2 * parts * b * batch.adapter_rank_tokens

    def seconds(batch: RankBatch) -> Any:
        work = LoraWork(
            batch_tokens=batch.tokens,
            prefill_tokens=batch.prefill_tokens,
            seqs=batch.decode_seqs + batch.prefill_seqs,
            tokens=batch.adapter_tokens,
            adapters=batch.adapter_count,
            rank=batch.adapter_ranks / larger(batch.adapter_count, 1),
        )
        time = larger(flops(batch) / peak, projection_seconds(work, projection, kernels, device, curve, b))
        return time if idles else time * smaller(batch.adapter_ranks, 1)

    return Operator(
        name="lora",
        component="gemm",
        per=Per.adapter,
        calls=calls,
        seconds=seconds,
        flops=flops,
        stored_bytes=read,
        bytes_moved=moved,
        dtype=site.dtype,
        kernels=sum(num_launches(projection, kernels.family)),
    )


def _exchange(site: Site, projection: Projection, by_rows: bool, calls: float) -> Operator:
    """Returns the collective of shrink's results (width r, fp32), if ranks divide both products."""
    parts = len(projection.slices)
    collective = "all_reduce" if by_rows else "all_gather"
    message = site.message(
        collective,
        f"lora_{collective}",
        calls,
        lambda batch: 4 * parts * batch.adapter_rank_tokens,
        site.tp,
        per=Per.adapter,
    )
    return replace(message, seconds=lambda batch: message.seconds(batch) * smaller(batch.adapter_ranks, 1))
