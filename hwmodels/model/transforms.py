"""Smaller models from a model: pruning in depth and width, sparsity, distillation.

Each transformation returns the new `ModelSpec` and a `Change` that says what it saves. None of them says what
it costs in quality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hwmodels.checks import check_whole, is_finite
from hwmodels.model.attention import Attention, GroupedQueryAttention, LatentAttention
from hwmodels.model.block import Block
from hwmodels.model.mlp import DenseMlp, Mlp
from hwmodels.model.model_spec import ModelSpec

GRAIN = 64
"""Pruned widths are multiples of this, so that tiles of the tensor cores come out even."""

RETRAIN = "quality must be won back by training, usually by distillation from the whole model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What a model costs, whatever it runs on."""

    num_parameters: int
    weight_bytes: float
    """In memory, all ranks together."""
    checkpoint_bytes: float
    """On disk."""
    kv_bytes_per_token: float
    flops_per_token: float
    """2 N, the attention over its context left out; 2:4: as sparse tensor cores do it."""

    @classmethod
    def of(cls, model: ModelSpec) -> Sizes:
        weight_bytes = model.weight_bytes_per_rank()
        return cls(
            num_parameters=model.num_parameters,
            weight_bytes=weight_bytes,
            checkpoint_bytes=weight_bytes,
            kv_bytes_per_token=model.kv_bytes_per_token(),
            flops_per_token=model.flops_per_token,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What a transformation changes."""

    what: str
    before: Sizes
    after: Sizes
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line a quantity: before -> after (share that is left), then the remarks."""
        rows = (
            ("parameters", "num_parameters", 1e9, "B"),
            ("weights in memory", "weight_bytes", 1e9, "GB"),
            ("checkpoint", "checkpoint_bytes", 1e9, "GB"),
            ("KV of a token", "kv_bytes_per_token", 1e3, "kB"),
            ("FLOPs of a token", "flops_per_token", 1e9, "GFLOP"),
        )
        lines = [f"{self.what}:"]
        for label, field, scale, unit in rows:
            before, after = getattr(self.before, field), getattr(self.after, field)
            share = f" ({after / before:.1%})" if before else ""
            lines.append(f"  {label}: {before / scale:.4g} -> {after / scale:.4g} {unit}{share}")
        return "\n".join([*lines, *(f"  {remark}" for remark in self.remarks)])


def prune_layers(model: ModelSpec, keep_layers: int) -> tuple[ModelSpec, Change]:
    """Depth pruning, or a student of fewer layers: keep_layers remain, of each kind its share.

    KV shrinks with the layers that keep any. Raises ValueError unless 1 <= keep_layers <= all.
    """
    check_whole("keep_layers", keep_layers)
    if keep_layers > model.num_layers:
        raise ValueError(
            f"keep_layers={keep_layers}: {model.name} has {model.num_layers}; must be 1 to {model.num_layers}"
        )
    counts = shared_out(keep_layers, [block.count for block in model.blocks])
    blocks = tuple(
        replace(block, count=count) for block, count in zip(model.blocks, counts, strict=True) if count
    )
    pruned = replace(model, name=f"{model.name}, {keep_layers} layers", blocks=blocks)
    return pruned, change(f"{keep_layers} of {model.num_layers} layers kept", model, pruned, (RETRAIN,))


def prune_width(
    model: ModelSpec, *, hidden_share: float = 1.0, intermediate_share: float = 1.0, heads_share: float = 1.0
) -> tuple[ModelSpec, Change]:
    """Width pruning: shares to keep of the hidden size, of each MLP's width, and of the heads.

    Widths become multiples of 64. Heads go by whole groups, so KV heads and KV shrink alike.
    Raises ValueError for a share outside (0, 1].
    """
    shares = {
        "hidden_share": hidden_share,
        "intermediate_share": intermediate_share,
        "heads_share": heads_share,
    }
    for name, share in shares.items():
        check_share(name, share)
    blocks = tuple(
        Block(
            count=block.count,
            attention=with_fewer_heads(block.attention, heads_share),
            mlp=narrower(block.mlp, intermediate_share),
            num_norms=block.num_norms,
        )
        for block in model.blocks
    )
    pruned = replace(
        model,
        name=f"{model.name}, pruned",
        hidden_size=kept_width(model.hidden_size, hidden_share),
        blocks=blocks,
    )
    kept = ", ".join(f"{name} {share:g}" for name, share in shares.items() if share < 1)
    return pruned, change(f"width pruned to {kept or 'nothing less'}", model, pruned, (RETRAIN,))


def sparsify_2_4(model: ModelSpec) -> tuple[ModelSpec, Change]:
    """Structured sparsity: two of four neighbouring weights of attention and MLPs are zero.

    Half of the weights are stored, each with 2 bits of position: in bf16 (1 + 1/8) / 2 = 0.5625 of the bytes.
    Sparse tensor cores do twice their dense FLOP/s (Mishra et al., 2021).
    """
    sparse = replace(model, name=f"{model.name}, 2:4", sparsity="2:4")
    remarks = (
        "half the FLOPs only on sparse tensor cores (NVIDIA since Ampere); elsewhere as before",
        "embedding table, LM head and router stay dense",
        RETRAIN,
    )
    return sparse, change("2:4 sparsity", model, sparse, remarks)


def sparsify_unstructured(model: ModelSpec, share: float) -> tuple[ModelSpec, Change]:
    """Zeros anywhere, `share` of the matrices of attention and MLPs: a smaller file and nothing else.

    The model returned is the same. File: the weights left, and one bit for each to say where they are.
    Raises ValueError for a share outside (0, 1].
    """
    check_share("share", share)
    before = Sizes.of(model)
    elements = sum(matrix.elements for matrix in model.quantised_matrices())
    stored = sum(m.elements * model.bytes_per_weight(m.role) for m in model.quantised_matrices())
    saved_bytes = max(0.0, share * stored - elements / 8)
    remarks = (
        "saves no time and no memory: GPUs multiply zeros at any place like other numbers",
        "use 2:4 sparsity or pruning for that",
    )
    after = replace(before, checkpoint_bytes=before.checkpoint_bytes - saved_bytes)
    return model, Change(
        what=f"unstructured sparsity of {share:.0%}", before=before, after=after, remarks=remarks
    )


def distill(teacher: ModelSpec, student: ModelSpec) -> tuple[ModelSpec, Change]:
    """The student in the teacher's place."""
    remarks = []
    if student.vocab_size != teacher.vocab_size:
        remarks.append(
            f"vocabularies differ ({teacher.vocab_size:,} and {student.vocab_size:,}): the student can learn "
            "from the teacher's text, not from its logits"
        )
    if student.num_parameters >= teacher.num_parameters:
        remarks.append(f"{student.name} is no smaller than {teacher.name}")
    return student, change(f"{student.name} in place of {teacher.name}", teacher, student, tuple(remarks))


def change(what: str, before: ModelSpec, after: ModelSpec, remarks: tuple[str, ...]) -> Change:
    return Change(what=what, before=Sizes.of(before), after=Sizes.of(after), remarks=remarks)


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


def kept_heads(num_heads: int, share: float) -> int:
    return max(1, round(num_heads * share))


def with_fewer_heads(attention: Attention, share: float) -> Attention:
    """Whole groups go: queries with their KV head, values with their key head."""
    match attention:
        case GroupedQueryAttention():
            kv_heads = kept_heads(attention.num_kv_heads, share)
            group = attention.num_heads // attention.num_kv_heads
            return replace(attention, num_heads=kv_heads * group, num_kv_heads=kv_heads)
        case LatentAttention():
            return replace(attention, num_heads=kept_heads(attention.num_heads, share))
    key_heads = kept_heads(attention.num_key_heads, share)
    group = attention.num_value_heads // attention.num_key_heads
    return replace(attention, num_key_heads=key_heads, num_value_heads=key_heads * group)


def narrower(mlp: Mlp, share: float) -> Mlp:
    width = kept_width(mlp.intermediate_size, share)
    if isinstance(mlp, DenseMlp):
        return replace(mlp, intermediate_size=width)
    shared = kept_width(mlp.shared_intermediate_size, share)
    return replace(mlp, intermediate_size=width, shared_intermediate_size=shared)
