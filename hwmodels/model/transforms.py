"""Smaller models from a model: pruning in depth and width, sparsity, distillation.

Each transformation makes a new `ModelSpec`, whose notes say what it saves; its `source` is empty where the
weights change, as they are not those that were published. None of them says what it costs in quality, which
is won back by training, usually by distillation from the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hwmodels.checks import is_finite
from hwmodels.model.mlp import DenseMlp, Mlp
from hwmodels.model.model_spec import ModelSpec

GRAIN = 64
"""Pruned widths are multiples of this, so that tiles of the tensor cores come out even."""

QUALITY = "No figure here says how much worse the answers are."


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneDepth:
    """Whole layers are left out, of each kind its share (ShortGPT: Men et al., 2024; Minitron, 2024)."""

    keep: float = 0.5
    """Of the layers; at least one is kept."""

    def __post_init__(self) -> None:
        check_share("keep", self.keep)

    def applied(self, model: ModelSpec) -> ModelSpec:
        """KV shrinks with the layers that keep any."""
        num_layers = max(1, round(self.keep * model.num_layers))
        counts = shared_out(num_layers, [block.count for block in model.blocks])
        blocks = tuple(
            replace(block, count=count) for block, count in zip(model.blocks, counts, strict=True) if count
        )
        pruned = replace(model, name=f"{model.name}-{num_layers}-layers", source="", blocks=blocks)
        return noted(pruned, f"{num_layers} of {model.num_layers} layers are kept", model)


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneWidth:
    """Layers become narrower (Sheared LLaMA: Xia et al., 2024; Minitron, 2024). Shares that are kept.

    Widths become multiples of 64. Heads go by whole groups, so KV heads and KV shrink alike.
    """

    hidden: float = 1.0
    """Of the hidden size."""
    intermediate: float = 1.0
    """Of each MLP's width."""
    heads: float = 1.0
    """Of the attention heads."""

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "heads"):
            check_share(name, getattr(self, name))

    def applied(self, model: ModelSpec) -> ModelSpec:
        blocks = tuple(
            replace(
                block,
                attention=block.attention.with_fewer_heads(self.heads),
                mlp=narrower(block.mlp, self.intermediate),
            )
            for block in model.blocks
        )
        hidden_size = kept_width(model.hidden_size, self.hidden)
        pruned = replace(
            model, name=f"{model.name}-pruned", source="", hidden_size=hidden_size, blocks=blocks
        )
        shares = {"hidden size": self.hidden, "MLP width": self.intermediate, "heads": self.heads}
        kept = " and ".join(f"{100 * share:.4g} % of the {name}" for name, share in shares.items())
        return noted(pruned, f"layers keep {kept}", model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparse24:
    """Structured sparsity: two of four neighbouring weights of attention and MLPs are zero.

    Half of the weights are stored, each with 2 bits of position: in bf16 (1 + 1/8) / 2 = 0.5625 of the bytes.
    Sparse tensor cores do twice their dense FLOP/s (Mishra et al., 2021). Embedding table, LM head and router
    stay dense.
    """

    def applied(self, model: ModelSpec) -> ModelSpec:
        sparse = replace(model, name=f"{model.name}-2:4", source="", sparsity="2:4")
        return noted(sparse, "two of four neighbouring weights are zero", model)


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseUnstructured:
    """Zeros anywhere in the matrices of attention and MLPs: a smaller file and nothing else."""

    zeros: float = 0.5
    """Of the weights."""

    def __post_init__(self) -> None:
        check_share("zeros", self.zeros)

    def applied(self, model: ModelSpec) -> ModelSpec:
        """The file holds the weights that are left, and one bit for each to say where they are."""
        matrices, file_bytes = model.quantised_matrices(), model.weight_bytes_per_rank()
        stored_bytes = sum(matrix.elements * model.bytes_per_weight(matrix.role) for matrix in matrices)
        place_bytes = sum(matrix.elements for matrix in matrices) / 8
        saved_bytes = max(0.0, self.zeros * stored_bytes - place_bytes)
        note = (
            f"model.transform: {100 * self.zeros:.4g} % of the weights are zero: the file takes "
            f"{(file_bytes - saved_bytes) / 1e9:.4g} instead of {file_bytes / 1e9:.4g} GB, and no time "
            "or memory is saved, as GPUs multiply zeros at any place like other numbers (2:4 sparsity and "
            f"pruning save some). {QUALITY}"
        )
        return replace(model, notes=(*model.notes, note))


@dataclass(frozen=True, kw_only=True, slots=True)
class Distill:
    """A student in the teacher's place (Hinton et al., 2015)."""

    student: ModelSpec

    def applied(self, model: ModelSpec) -> ModelSpec:
        """The student in the number formats of `model`, or in its own where `model` names none."""
        teacher, student = model, served_as(self.student, model)
        what = f"{student.name} is in the place of {teacher.name}"
        if student.vocab_size != teacher.vocab_size:
            what += (
                f", and can learn from its text only, not from its logits, as vocabularies differ "
                f"({teacher.vocab_size:,} and {student.vocab_size:,} tokens)"
            )
        if student.num_parameters >= teacher.num_parameters:
            what += ", and no smaller"
        return noted(student, what, teacher)


def served_as(student: ModelSpec, teacher: ModelSpec) -> ModelSpec:
    """The student in the teacher's number formats: model.weights=fp8 is about the model that serves."""
    return replace(
        student,
        dtype=teacher.dtype,
        weights=teacher.weights or student.weights,
        moe_weights=(teacher.moe_weights or student.moe_weights) if student.has_experts else None,
        kv_cache_dtype=student.kv_cache_dtype if teacher.kv_cache_dtype == "auto" else teacher.kv_cache_dtype,
    )


def noted(after: ModelSpec, what: str, before: ModelSpec) -> ModelSpec:
    """With a note on what was done, and what it saves."""
    active = ("active parameters", before.num_active_parameters, after.num_active_parameters, 1e9, "B")
    savings = (
        ("parameters", before.num_parameters, after.num_parameters, 1e9, "B"),
        *([active] if before.has_experts or after.has_experts else []),
        ("weights", before.weight_bytes_per_rank(), after.weight_bytes_per_rank(), 1e9, "GB"),
        ("KV of a token", before.kv_bytes_per_token(), after.kv_bytes_per_token(), 1e3, "kB"),
        ("FLOPs of a token", before.flops_per_token, after.flops_per_token, 1e9, "GFLOP"),
    )
    told = "; ".join(
        f"{label} {old / scale:.4g} -> {new / scale:.4g} {unit}"
        + (f" ({100 * new / old:.1f} %)" if old else "")
        for label, old, new, scale, unit in savings
    )
    return replace(after, notes=(*after.notes, f"model.transform: {what}: {told}. {QUALITY}"))


def check_share(name: str, share: float) -> None:
    if not (is_finite(share) and 0 < share <= 1):
        raise ValueError(f"{name}={share}: must be a share, > 0 and <= 1")


def shared_out(total: int, counts: Sequence[int]) -> list[int]:
    """total in proportion to the counts, whole numbers by largest remainder."""
    exact = [total * count / sum(counts) for count in counts]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def kept_width(size: int, share: float) -> int:
    return size if share == 1 else min(size, max(GRAIN, round(size * share / GRAIN) * GRAIN))


def narrower(mlp: Mlp, share: float) -> Mlp:
    width = kept_width(mlp.intermediate_size, share)
    if isinstance(mlp, DenseMlp):
        return replace(mlp, intermediate_size=width)
    shared = kept_width(mlp.shared_intermediate_size, share)
    return replace(mlp, intermediate_size=width, shared_intermediate_size=shared)
