"""Builds the operators of an iteration on one device, from a model and a parallel layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hwmodels.assembly.attention import attention_operators
from hwmodels.assembly.mlp import mlp_operators
from hwmodels.assembly.site import Site
from hwmodels.iterations.layout import Part
from hwmodels.iterations.ops import Operator, Per, per_row, per_token
from hwmodels.model.attention import NoAttention
from hwmodels.model.model_spec import Block, NoMlp
from hwmodels.model.weights import Matrix, Ranks, Role, share_of
from hwmodels.operators.gemm import stream_seconds

SAMPLING_KERNELS = 4

Inputs = Callable[[Ranks], Sequence[Matrix]]
"""Returns the matrices of one rank before the first layer."""


def iteration_operators(site: Site, inputs: Inputs | None = None) -> list[Operator]:
    """Returns the operators of an iteration in execution order.

    inputs: returns the matrices that all tokens go through before the first layer, as in draft layers.
    """
    model, before = site.model, () if inputs is None else inputs(site.ranks)
    embedding = site.stream("embedding", 1, 2 * site.hidden_bytes)
    return [
        *placed(Part.first, embedding, *site.reduced("embedding", 1)),
        *placed(Part.first, *(op for matrix in before for op in site.gemm(matrix, 1))),
        *(op for block in model.blocks for op in layer_operators(site, block, block.count)),
        *placed(Part.between, *between_stages(site)),
        *placed(Part.last, site.stream("final_norm", 1, 4 * site.hidden_bytes), *head_operators(site, 1)),
    ]


def placed(part: Part, *operators: Operator) -> Iterator[Operator]:
    """Assigns operators to a part of the model; attention and expert operators keep `Part.layers`."""
    for op in operators:
        yield op if op.per in (Per.decode, Per.prefill, Per.any_token) else replace(op, part=part)


def layer_operators(site: Site, block: Block, calls: float) -> Iterator[Operator]:
    """Yields the operators of `calls` identical layers.

    Norms after attention and after the MLP, if any, are counted with the norms before them. A layer of one
    part alone has that part's norms alone.
    """
    site = site.of(block)
    has_mixer, has_mlp = not isinstance(block.attention, NoAttention), not isinstance(block.mlp, NoMlp)
    norms = block.num_norms / max(1, has_mixer + has_mlp)
    if has_mixer:
        yield site.norm("attention_norm", calls, norms)
        yield from attention_operators(site, block.attention, calls)
        yield from site.reduced("attention", calls)
    if has_mlp:
        yield site.norm("mlp_norm", calls, norms)
        yield from mlp_operators(site, block.mlp, calls)


def between_stages(site: Site) -> Iterator[Operator]:
    """Yields the send of a micro-batch's hidden states to the next pipeline stage, if there is one."""
    layout = site.layout
    stages = layout.pipeline_parallel_size
    if stages > 1:
        crosses = (layout.num_devices > site.device.gpus_per_node) + 1
        size = per_token(site.hidden_bytes)
        yield site.message("send_recv", "stage_send_recv", stages - 1, size, 2, nodes=crosses)


def head_operators(site: Site, calls: float) -> Iterator[Operator]:
    """Yields the LM head for sampled rows, the gather of logits over ranks, and sampling in fp32."""
    model, b = site.model, site.model.element_bytes
    vocab = share_of(model.vocab_size, site.tp)
    head = Matrix("lm_head", model.hidden_size, vocab, role=Role.plain, stored=model.lm_head_weights)
    yield from site.gemm(head, calls, Per.row)
    if site.tp > 1:
        gathered = per_row(site.tp * vocab * b)
        yield site.message("all_gather", "logits_all_gather", calls, gathered, site.tp, Per.row, "lm_head")
    # Reads the logits, writes them in fp32, then reads them for the softmax and again for the draw.
    row_bytes = model.vocab_size * (b + 4.0 + 4.0 + 4.0)
    yield Operator(
        name="sampling",
        component="lm_head",
        per=Per.row,
        calls=calls,
        seconds=lambda batch: stream_seconds(
            row_bytes * batch.rows, site.device, site.calibration.stream, kernels=SAMPLING_KERNELS
        ),
        bytes_moved=per_row(row_bytes),
        dtype=site.dtype,
        kernels=SAMPLING_KERNELS,
    )
