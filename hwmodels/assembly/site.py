"""The site of operators, and the operators that all layers are made of: GEMMs, streams and messages.

A site is a rank of a model on a device, with the figures that prices depend on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fieldlimits import Checked, OneOf
from hwmodels.device import DTYPE_BYTES, Device
from hwmodels.exact import smaller
from hwmodels.iterations.layout import ParallelLayout, RankBatch
from hwmodels.iterations.ops import Operator, Per, Quantity, per_row, per_token
from hwmodels.model.model_spec import Block, ModelSpec
from hwmodels.model.weights import Matrix, Ranks, Role, WeightFormat, weight_format
from hwmodels.operators.attention import CHOICES as ATTENTION_CHOICES
from hwmodels.operators.calibration import Calibration
from hwmodels.operators.collectives import collective_seconds, torus_seconds
from hwmodels.operators.gemm import gemm_seconds, stream_seconds
from hwmodels.operators.lora_kernels import LoraKernels
from hwmodels.operators.moe_routing import Routing
from hwmodels.operators.systolic import systolic_gemm_seconds

SUMS = ("all_reduce", "reduce_scatter")
"""Collectives that need the results of all ranks, and wait for the last one: `Calibration.peer_wait_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels(Checked):
    """The kernels that the engine runs, as far as times depend on them."""

    library: Annotated[str, OneOf(("vllm", "trtllm"))] = "vllm"
    """Library of attention and MoE kernels: vllm (SGLang's are much the same) or trtllm."""
    attention_kernels: Annotated[str | None, OneOf(ATTENTION_CHOICES)] = None
    """Kernels of attention in place of the library's: standard, flash_attention_1, 2 or 3, flash_decoding.

    Latent attention always has the library's.
    """
    moe_backend: Annotated[str, OneOf(("auto", "marlin", "sglang", "deepgemm"))] = "auto"
    """Kernels of the routed experts: auto, the library's; marlin for weights of 4 and 8 bits; sglang; or
    deepgemm for weights in fp8 by block on Blackwell.

    sglang: SGLang's own choice, more often Triton: see `operators.moe_kernels.kernel_family`.
    """
    gemm_library: Annotated[str, OneOf(("vllm", "trtllm"))] = "vllm"
    """Library of GEMM kernels: vllm or trtllm."""
    fused_quantisation: bool = False
    """Whether the operator before a GEMM also quantises to one scale (fp8, int8); else a kernel does."""
    absorbed_latent_decode: bool = True
    """Whether decode attends to the cached latent vectors; false: keys and values are expanded first."""
    lora: LoraKernels = LoraKernels()
    """Kernels of LoRA adapters."""
    routing: Routing = Routing(kind="zipf", exponent=0.8)
    """Distribution of tokens over experts. The default is skewed, as measured also with random prompts."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """One rank of a model on a device; its methods build the operators that all kinds of layers share."""

    model: ModelSpec
    device: Device
    layout: ParallelLayout
    calibration: Calibration
    kernels: Kernels
    formats: Mapping[str, str] = field(default_factory=dict)
    """Storage formats of the layer's matrices, by name, that are not those of their role."""

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

        own: the format of a matrix that has another one than its role.

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

        nodes: number of nodes that the devices span; None: the fewest that hold them.
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
