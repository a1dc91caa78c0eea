"""The memory of one rank's device: what is needed beside the KV cache, and how many KV blocks fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.prefill_hopper import DENSE_BYTES
from policies.caching.selective import SnapKv
from policies.speculation.engine.drafts import Shapes
from realengine.model.architecture import Architecture
from realengine.model.latent_attention import EXPANDED_BYTES
from realengine.runner.graph_mode import GraphMode
from realengine.runner.host_kv import STAGED_BLOCKS
from realengine.runner.kept_tokens import selection_bytes
from realengine.settings import EngineSettings
from realengine.speculation.drafter import LoadedDraft
from realengine.speculation.graph_sizes import captured_levels

CPU_KV_BYTES = 1 << 30
GIB = 1 << 30
GRAPH_BYTES = GIB  # rough estimate for captured steps of one number of drafts, and libraries' workspaces
PIECEWISE_BYTES = GIB // 2  # rough estimate for the pieces of all sizes
CPU_NO_MEMORY = "can't allocate memory"
"""Part of the message of torch's RuntimeError on a CPU; on a GPU it is a torch.OutOfMemoryError."""


class Memory(NamedTuple):
    """Number of KV blocks on the device, and in host memory for swapped-out sequences."""

    num_blocks: int
    num_swap_blocks: int
    block_bytes: int  # bytes of a block, summed over all ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes that one rank needs: of a KV block, and of everything beside weights and KV."""

    block_bytes: int
    step_bytes: float
    """Activations and logits of the largest step."""
    graph_bytes: int
    probs_bytes: int
    """Distributions from which the draft tokens of all sequences were drawn."""
    block_size: int
    utilization: float
    """Share of a GPU's memory that the engine may take."""
    has_drafts: bool

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        settings: EngineSettings,
        dtype: torch.dtype,
        max_model_len: int,
        block_bytes: int,
        draft: LoadedDraft | None,
        mode: GraphMode,
    ) -> MemoryPlan:
        """Returns the plan of an engine. draft: drafts on the device. mode: which steps it captures."""
        speculation, num_drafts, num_levels = settings.speculation, 0, 1
        if speculation is not None:
            shapes = Shapes(speculation.proposer)
            num_drafts = shapes.num_rows
            levels = captured_levels(shapes, speculation.draft_length, drafts_on_device=draft is not None)
            num_levels = len(levels)
        probs_bytes = 0
        if draft is not None and draft.draws:
            probs_bytes = 4 * (settings.max_num_seqs + 1) * num_drafts * architecture.vocab_size
        step_bytes = _step_bytes(architecture, settings, dtype, max_model_len, num_drafts)
        if isinstance(settings.caching, SnapKv):
            step_bytes += selection_bytes(architecture, settings.caching, max_model_len, dtype)
        return cls(
            block_bytes=block_bytes,
            step_bytes=step_bytes + probs_bytes,  # a draft makes them anew, before they are kept
            graph_bytes=num_levels * GRAPH_BYTES * mode.full_decodes + PIECEWISE_BYTES * mode.piecewise,
            probs_bytes=probs_bytes,
            block_size=settings.caching.block_size,
            utilization=settings.gpu_memory_utilization,
            has_drafts=speculation is not None,
        )

    def num_blocks(self, device: torch.device) -> int:
        """Returns the number of KV blocks that fit beside weights and the largest step.

        Raises ValueError if none does.
        """
        free_bytes = float(CPU_KV_BYTES)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(device)
            free_bytes = free - (1 - self.utilization) * total
            free_bytes -= self.step_bytes + self.graph_bytes + STAGED_BLOCKS * self.block_bytes
        if self.probs_bytes and free_bytes - self.probs_bytes < 2 * self.block_bytes:
            raise ValueError(
                "draft_sample_method=probabilistic: the distributions of draft tokens need "
                f"{self.probs_bytes / GIB:.2f} GiB, and {max(free_bytes, 0) / GIB:.2f} GiB are left for them "
                "and for KV; lower max_num_seqs or num_speculative_tokens, or set greedy"
            )
        num_blocks = int((free_bytes - self.probs_bytes) // self.block_bytes) - 1
        if num_blocks < 1:
            drafts = " with the KV of drafts" if self.has_drafts else ""
            raise ValueError(
                f"gpu_memory_utilization={self.utilization}: only {max(free_bytes, 0) / GIB:.2f} GiB are "
                f"left for KV; a block of {self.block_size} tokens needs {self.block_bytes / GIB:.4f} GiB"
                f"{drafts}; raise it, or serve a smaller model"
            )
        return num_blocks

    def no_room(self, num_blocks: int, device: torch.device) -> ValueError:
        """Returns the error of a number of KV blocks for which the device has no memory."""
        what = "weights of the model and of its draft" if self.has_drafts else "weights"
        if self.probs_bytes:
            what += f" and {self.probs_bytes / GIB:.2f} GiB of distributions of draft tokens"
        return ValueError(
            f"num_kv_blocks={num_blocks}: the {'CPU' if device.type == 'cpu' else 'GPU'} has no memory for "
            f"{num_blocks * self.block_bytes / GIB:.2f} GiB of KV beside the {what}; "
            f"{self.num_blocks(device)} blocks would fit, as with num_kv_blocks=None"
        )


def _step_bytes(
    architecture: Architecture,
    settings: EngineSettings,
    dtype: torch.dtype,
    max_model_len: int,
    num_drafts: int,
) -> float:
    """Returns an upper bound of the bytes of the largest step's activations and logits, also in fp32."""
    spec = architecture
    heads = spec.num_heads + 2 * spec.num_kv_heads
    width = 4 * spec.hidden_size + 2 * heads * spec.head_dim + 3 * spec.intermediate_size
    if spec.num_experts:
        width += spec.num_experts_per_tok * (2 * spec.hidden_size + 3 * spec.moe_intermediate_size)
    if settings.quantization == "w4a16" or spec.packed is not None:  # large steps unpack a weight
        unpacked = 2.0 * spec.intermediate_size * spec.hidden_size * dtype.itemsize
    else:
        unpacked = 0.0
    num_tokens = settings.max_num_batched_tokens or max_model_len
    num_drawn = min(settings.max_num_seqs * (1 + num_drafts), max(num_tokens, settings.max_num_seqs))
    logits = num_drawn * spec.vocab_size * (dtype.itemsize + 12)  # fp32 twice, and penalties
    expanded = 0.0 if spec.latent is None else EXPANDED_BYTES + 2.0 * EXPANDED_BYTES  # with temporaries
    copied = 0.0 if settings.attention_backend == "triton" else float(DENSE_BYTES)
    return float(num_tokens * width * dtype.itemsize + logits) + unpacked + expanded + copied
