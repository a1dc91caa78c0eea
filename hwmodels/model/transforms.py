"""Transformations to smaller models: pruning in depth and width, sparsity, distillation, smaller KV caches.

Each transformation creates a new `ModelSpec` with notes on the savings; its `source` is empty if the weights
change, because they are not the published ones. Quality is not modelled; it is an input (`quality`) that the
notes repeat: the share of the original's benchmark score that the smaller model keeps. A loss is recovered by
training, usually by distillation from the original model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated

from fieldlimits import Checked, Positive, PositiveInt, PositiveShare
from hwmodels.model import Block, DenseMlp, Mlp, ModelSpec, NoMlp
from hwmodels.model.attention import GroupedQueryAttention
from hwmodels.model.weights import Role

GRAIN = 64
"""Pruned widths are multiples of this, so that they divide evenly into tiles of the tensor cores."""


Quality = Annotated[Positive | None, "a share of the original's score"]
"""Ratio of a model's benchmark score to the original's; a student may be better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneDepth(Checked):
    """Removes complete layers, an equal share of each kind (ShortGPT: Men et al., 2024; Minitron, 2024)."""

    keep: PositiveShare = 0.5
    """Share of the layers that is kept; at least one layer is."""
    quality: Quality = None
    """Share of the original's benchmark score that is kept, as measured elsewhere; None: unknown."""

    def applied(self, model: ModelSpec) -> ModelSpec:
        """Returns the pruned model; its KV shrinks with the layers that keep KV."""
        num_layers = max(1, round(self.keep * model.num_layers))
        counts = shared_out(num_layers, [block.count for block in model.blocks])
        blocks = tuple(
            replace(block, count=count) for block, count in zip(model.blocks, counts, strict=True) if count
        )
        pruned = replace(model, name=f"{model.name}-{num_layers}-layers", source="", blocks=blocks)
        return noted(pruned, f"{num_layers} of {model.num_layers} layers are kept", model, self.quality)


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneWidth(Checked):
    """Makes layers narrower (Sheared LLaMA: Xia et al., 2024; Minitron, 2024).

    The fields are the kept shares. Widths become multiples of 64. Heads are removed in whole groups, so KV
    heads and KV shrink equally.
    """

    hidden: PositiveShare = 1.0
    """Share of the hidden size that is kept."""
    intermediate: PositiveShare = 1.0
    """Share of each MLP's width that is kept."""
    heads: PositiveShare = 1.0
    """Share of the attention heads that is kept."""
    quality: Quality = None
    """Share of the original's benchmark score that is kept, as measured elsewhere; None: unknown."""

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
        return noted(pruned, f"layers keep {kept}", model, self.quality)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparse24(Checked):
    """Structured sparsity: two of four neighbouring weights of attention and MLPs are zero.

    Half of the weights are stored, each with 2 bits of position: in bf16 (1 + 1/8) / 2 = 0.5625 of the bytes.
    Sparse tensor cores reach twice their dense FLOP/s (Mishra et al., 2021). Embedding table, LM head and
    router stay dense.
    """

    quality: Quality = None
    """Share of the original's benchmark score that is kept, as measured elsewhere; None: unknown."""

    def applied(self, model: ModelSpec) -> ModelSpec:
        sparse = replace(model, name=f"{model.name}-2:4", source="", sparsity="2:4")
        return noted(sparse, "two of four neighbouring weights are zero", model, self.quality)


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseUnstructured(Checked):
    """Zeros at any position in the matrices of attention and MLPs; only the file becomes smaller."""

    zeros: PositiveShare = 0.5
    """Share of the weights that is zero."""
    quality: Quality = None
    """Share of the original's benchmark score that is kept, as measured elsewhere; None: unknown."""

    def applied(self, model: ModelSpec) -> ModelSpec:
        """Returns the model with a note.

        The file holds the non-zero weights and one position bit per weight.
        """
        matrices, file_bytes = model.quantised_matrices(), model.weight_bytes_per_rank()
        stored_bytes = sum(model.matrix_bytes(matrix) for matrix in matrices)
        place_bytes = sum(matrix.elements for matrix in matrices) / 8
        saved_bytes = max(0.0, self.zeros * stored_bytes - place_bytes)
        note = (
            f"model.transform: {100 * self.zeros:.4g} % of the weights are zero: the file takes "
            f"{(file_bytes - saved_bytes) / 1e9:.4g} instead of {file_bytes / 1e9:.4g} GB, and no time "
            "or memory is saved, as GPUs multiply unstructured zeros like other numbers (2:4 sparsity and "
            f"pruning save time and memory). {quality_sentence(self.quality)}"
        )
        return replace(model, notes=(*model.notes, note))


@dataclass(frozen=True, kw_only=True, slots=True)
class Distill(Checked):
    """Serves a student model instead of the teacher (Hinton et al., 2015)."""

    student: ModelSpec
    quality: Quality = None
    """Share of the original's benchmark score that is kept, as measured elsewhere; None: unknown."""

    def applied(self, model: ModelSpec) -> ModelSpec:
        """Returns the student in the number formats of `model`, or in its own if `model` sets none."""
        teacher, student = model, served_as(self.student, model)
        change = f"{student.name} replaces {teacher.name}"
        if student.vocab_size != teacher.vocab_size:
            change += (
                f", and can learn from its text only, not from its logits, as vocabularies differ "
                f"({teacher.vocab_size:,} and {student.vocab_size:,} tokens)"
            )
        if student.num_parameters >= teacher.num_parameters:
            change += ", and is no smaller"
        return noted(student, change, teacher, self.quality)


def served_as(student: ModelSpec, teacher: ModelSpec) -> ModelSpec:
    """Returns the student in the teacher's number formats: model.weights=fp8 applies to the served model."""
    dense, routed = teacher.weights, teacher.moe_weights if student.has_experts else None
    roles = (*([Role.dense] if dense else []), *([Role.routed] if routed else []))
    return replace(
        student,
        blocks=tuple(block.without_formats(*roles) for block in student.blocks),
        dtype=teacher.dtype,
        weights=dense or student.weights,
        moe_weights=routed or student.moe_weights,
        kv_cache_dtype=student.kv_cache_dtype if teacher.kv_cache_dtype == "auto" else teacher.kv_cache_dtype,
    )


def noted(after: ModelSpec, change: str, before: ModelSpec, quality: float | None) -> ModelSpec:
    """Returns the model with a note on the transformation, its savings, and the quality that is given."""
    active = ("active parameters", before.num_active_parameters, after.num_active_parameters, 1e9, "B")
    savings = (
        ("parameters", before.num_parameters, after.num_parameters, 1e9, "B"),
        *([active] if before.has_experts or after.has_experts else []),
        ("weights", before.weight_bytes_per_rank(), after.weight_bytes_per_rank(), 1e9, "GB"),
        ("KV of a token", before.kv_bytes_per_token(), after.kv_bytes_per_token(), 1e3, "kB"),
        ("FLOPs of a token", before.flops_per_token, after.flops_per_token, 1e9, "GFLOP"),
    )
    savings_text = "; ".join(
        f"{label} {old / scale:.4g} -> {new / scale:.4g} {unit}"
        + (f" ({100 * new / old:.1f} %)" if old else "")
        for label, old, new, scale, unit in savings
    )
    note = f"model.transform: {change}: {savings_text}. {quality_sentence(quality)}"
    return replace(after, notes=(*after.notes, note))


def quality_sentence(quality: float | None) -> str:
    """Returns the sentence on the quality of a smaller model, a share of the original's score."""
    if quality is None:
        return "The loss of quality is not modelled, and none is given (model.transform.quality)."
    return f"Its quality is an input: {100 * quality:.4g} % of the original's score."


def shared_out(total: int, counts: Sequence[int]) -> list[int]:
    """Divides total in proportion to the counts into integers, by largest remainder."""
    exact = [total * count / sum(counts) for count in counts]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def kept_width(size: int, share: float) -> int:
    """Returns the width that pruning to a share keeps: a multiple of GRAIN, never more than before."""
    return size if share == 1 else min(size, max(GRAIN, round(size * share / GRAIN) * GRAIN))


def narrower(mlp: Mlp, share: float) -> Mlp:
    """Returns the MLP pruned to a share of its width, shared experts included."""
    if isinstance(mlp, NoMlp):
        return mlp
    width = kept_width(mlp.intermediate_size, share)
    if isinstance(mlp, DenseMlp):
        return replace(mlp, intermediate_size=width)
    shared = kept_width(mlp.shared_intermediate_size, share)
    return replace(mlp, intermediate_size=width, shared_intermediate_size=shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedKv(Checked):
    """Multi-query attention, windows and shared KV in all layers with grouped-query attention.

    Latent and linear attention are unchanged. Such a model is trained, not converted.

    "Optimizing AI Inference at Character.AI", 2024: multi-query attention in all layers; one layer of six
    attends to the whole context, the others to a window of 1,024 tokens; two or three neighbouring layers
    share one cache, and layers with full attention share across blocks. Cross-layer attention: Brandon et
    al., NeurIPS 2024.

    KV bytes of a sequence of n tokens, of L layers with b bytes per token, window w, one full layer in f, and
    s layers sharing a cache:

        L / s (n / f + (1 - 1 / f) min(n, w)) b,   each kind of layer rounded up to whole layers

    30 layers of 8 KV heads, 10,240 tokens: 5 layers are full, 25 have a window of 1,024, which keeps a tenth.
    2 of the full layers and 9 of the others have a cache, so KV is 8 (heads) x 30 x 10 / (2 x 10 + 9) = 83
    times smaller.
    """

    num_kv_heads: PositiveInt | None = 1
    """Number of KV heads; None: the model's."""
    window: PositiveInt | None = 1024
    """Tokens to which most layers attend; None: no layer gets a window."""
    full_every: PositiveInt = 6
    """One layer in this many attends to the whole context, if there is a window."""
    layers_per_kv: PositiveInt = 3
    """Number of layers of the same kind that share one cache; 1: each has its own."""
    quality: Quality = None
    """Share of the original's benchmark score that is kept, as measured elsewhere; None: unknown."""

    def applied(self, model: ModelSpec) -> ModelSpec:
        """Returns the model with its smaller cache. Raises ValueError if num_kv_heads does not divide."""
        blocks = tuple(part for block in model.blocks for part in self._parts(block))
        smaller = replace(model, name=f"{model.name}-shared-kv", source="", blocks=blocks)
        window = "no window" if self.window is None else f"a window of {self.window:,} tokens in most layers"
        heads = "unchanged" if self.num_kv_heads is None else self.num_kv_heads
        sharing = f"one cache for up to {self.layers_per_kv} layers"
        return noted(smaller, f"KV heads: {heads}, {window}, {sharing}", model, self.quality)

    def _parts(self, block: Block) -> Iterator[Block]:
        """Yields the layers of a block by window, those with a cache before those that share it."""
        attention = block.attention
        if not isinstance(attention, GroupedQueryAttention) or attention.shares_kv:
            yield block
            return
        if self.num_kv_heads is not None:
            attention = replace(attention, num_kv_heads=self.num_kv_heads)
        num_full = block.count if self.window is None else ceil(block.count / self.full_every)
        widths = [width for width in (self.window, attention.window) if width is not None]
        of_window = replace(attention, window=min(widths, default=None))
        for kind, count in ((attention, num_full), (of_window, block.count - num_full)):
            num_own = ceil(count / self.layers_per_kv)
            for layers, num_layers in ((kind, num_own), (replace(kind, shares_kv=True), count - num_own)):
                if num_layers:
                    yield replace(block, attention=layers, count=num_layers)
