"""Builds the operators of an iteration of a model in a layout; experts, offloaded weights, chained chips."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from hwmodels.assembly.attention import attention_operators
from hwmodels.assembly.site import Site
from hwmodels.device import Chain
from hwmodels.exact import Lines, divided_up, larger, smaller
from hwmodels.host import Offload
from hwmodels.iterations.layout import Part, RankBatch
from hwmodels.iterations.memory import weight_bytes
from hwmodels.iterations.ops import DecodeSeconds, Operator, Per, Quantity, per_row, per_token
from hwmodels.model import Block, MixtureOfExperts, Mlp, NoMlp
from hwmodels.model.attention import NoAttention
from hwmodels.model.weights import WEIGHT_FORMATS, Matrix, Ranks, Role, share_of
from hwmodels.operators.gemm import stream_seconds
from hwmodels.operators.moe import moe_flops, moe_seconds, moe_weight_bytes
from hwmodels.operators.moe_routing import ExpertLayer
from hwmodels.operators.systolic import systolic_moe_seconds

SAMPLING_KERNELS = 4

Inputs = Callable[[Ranks], Sequence[Matrix]]
"""Returns the matrices of one rank before the first layer."""


def iteration_operators(site: Site, inputs: Inputs | None = None) -> list[Operator]:
    """Returns the operators of an iteration in execution order.

    inputs: returns the matrices applied to all tokens before the first layer, as in draft layers.
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

    Norms after attention and after the MLP, if any, are counted with the norms before them. A layer with only
    one part has only that part's norms.
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


EXPERT_KERNELS = 8
"""Kernel launches of a fused layer of experts: top-k, sort and count tokens, two GEMMs, activation, sum."""


def mlp_operators(site: Site, mlp: Mlp, calls: float) -> Iterator[Operator]:
    """Yields the operators of an MLP, dense or with experts, and of the all-reduce after it."""
    if isinstance(mlp, NoMlp):
        return
    if isinstance(mlp, MixtureOfExperts):
        yield from experts(site, mlp, calls)
    else:
        up, down = mlp.matrices(site.model.hidden_size, site.ranks)
        yield from dense(site, up, down, calls)
        yield from site.reduced("mlp", calls)


def dense(site: Site, up: Matrix, down: Matrix, calls: float) -> Iterator[Operator]:
    """Yields the two GEMMs of a dense MLP, and the activation between them."""
    yield from site.gemm(up, calls)
    yield site.stream("activation", calls, (up.n + down.k) * site.model.element_bytes)
    yield from site.gemm(down, calls)


def experts(site: Site, mlp: MixtureOfExperts, calls: float) -> Iterator[Operator]:
    """Yields the router, the messages to the experts, their grouped GEMMs, and the shared experts."""
    by_name = {matrix.name: matrix for matrix in mlp.matrices(site.model.hidden_size, site.ranks)}
    yield from site.gemm(by_name["router"], calls)
    to_latent = mlp.latent_matrices(site.model.hidden_size)
    for matrix in to_latent[:1]:
        yield from site.gemm(matrix, calls)
    yield from to_experts(site, mlp, "dispatch", calls)
    yield routed(site, mlp, by_name["expert_down_proj"].k, calls)
    yield from to_experts(site, mlp, "combine", calls)
    for matrix in to_latent[1:]:
        yield from site.gemm(matrix, calls)
    if "shared_down_proj" in by_name:
        up = by_name["shared_gate_up_proj" if mlp.gated else "shared_up_proj"]
        yield from dense(site, up, by_name["shared_down_proj"], calls)
    if mlp.shared_gate:
        # A product with one column reads the hidden state; its sigmoid scales the shared experts' output,
        # which is added to that of the routed ones.
        yield site.stream("shared_gate", calls, site.hidden_bytes)
        yield site.stream("shared_sum", calls, 3 * site.hidden_bytes)
    if site.layout.num_token_groups == 1:
        yield from site.reduced("mlp", calls)


def routed(site: Site, mlp: MixtureOfExperts, width: int, calls: float) -> Operator:
    """Returns the fused operator of this rank's routed experts; width: intermediate size on this rank."""
    layer = ExpertLayer(
        hidden_size=mlp.expert_hidden_size(site.model.hidden_size),
        intermediate_size=width,
        top_k=mlp.top_k,
        num_experts=mlp.num_experts,
        ep_size=site.ranks.expert,
        gated=mlp.gated,
    )
    token_bytes = layer.hidden_size * site.model.element_bytes
    weights, device = site.stored(Role.routed, site.formats.get("expert_down_proj"))
    if weights.name == "fp8":
        # With one scale per tensor: the kernels measured in this format on Hopper take five times as long as
        # the block-scaled ones, and engines do not run them (vLLM on Llama-4-Scout: 21 ms per token, not 87).
        weights = WEIGHT_FORMATS["fp8_block"]
    curve, routing = site.calibration.moe, site.kernels.routing
    routing.check(layer)
    library = expert_library(site)

    def seconds(batch: RankBatch) -> Any:
        tokens = batch.all_tokens
        if device.systolic is not None:
            return systolic_moe_seconds(
                tokens, layer, weights, device, curve, dtype=site.dtype, routing=routing
            )
        return moe_seconds(
            tokens, layer, weights, device, curve, dtype=site.dtype, kernels=library, routing=routing
        )

    def stored(batch: RankBatch) -> Any:
        return moe_weight_bytes(batch.all_tokens, layer, weights, routing=routing)

    return Operator(
        name="experts",
        component="gemm",
        per=Per.any_token,
        calls=calls,
        seconds=seconds,
        flops=lambda batch: moe_flops(batch.all_tokens, layer) / layer.ep_size,
        stored_bytes=stored,
        bytes_moved=lambda batch: stored(batch) + 2 * token_bytes * batch.all_tokens,
        dtype=weights.compute_dtype(device, site.model.dtype),
        kernels=EXPERT_KERNELS,
    )


def expert_library(site: Site) -> str:
    """Returns the library whose kernels run the routed experts.

    SGLang's own choice is known only without messages to other ranks; with messages DeepEP uses other
    kernels.
    """
    backend = site.kernels.moe_backend
    with_messages = site.layout.num_token_groups > 1
    return site.kernels.library if backend == "auto" or (backend == "sglang" and with_messages) else backend


def to_experts(site: Site, mlp: MixtureOfExperts, direction: str, calls: float) -> Iterator[Operator]:
    """Yields the messages that carry tokens to their experts' devices ("dispatch") and back ("combine").

    They exist only with attention data parallelism or context parallelism. If every device holds some
    complete experts, they are an all-to-all of top_k copies of each token. If each holds a slice of every
    expert, every token goes to every device (all-gather) and the slices are summed (reduce-scatter).
    """
    layout = site.layout
    hidden_bytes = mlp.expert_hidden_size(site.model.hidden_size) * site.model.element_bytes
    if layout.num_token_groups == 1:
        return
    if layout.expert_parallel_size > 1:
        copies = min(mlp.top_k, layout.expert_parallel_size)
        yield site.message(
            "all_to_all",
            f"expert_{direction}",
            calls,
            per_token(copies * hidden_bytes / site.tp),
            layout.stage_size,
        )
    else:
        ranks = layout.num_token_groups
        collective = "all_gather" if direction == "dispatch" else "reduce_scatter"
        whole = per_token(ranks * hidden_bytes)
        nodes = layout.nodes_spanned(ranks, site.device, stride=site.tp)
        yield site.message(collective, f"expert_{direction}", calls, whole, ranks, nodes=nodes)


def over_chips(operators: list[Operator], site: Site, chain: Chain) -> list[Operator]:
    """Returns the operators with their prices on the chain, and the links between its chips.

    No kernels are launched: the chips follow a compiled schedule. Raises ValueError for a replica of several
    devices.

    On a chain, chips hold all weights in SRAM, as a pipeline over the chips. The weights are spread evenly
    over N chips. The m tokens of an iteration enter in min(m, N) micro-batches of g = ceil(m / N) tokens, so
    all chips work on tokens of the same iteration at the same time; an iteration takes as long as one
    micro-batch on all chips:

        t = N (hop + g hidden / link) + layers layer_s + sum over operators of max(bytes(g) / b, FLOPs(g) / f)

    b, f: bandwidth and peak of one chip. Up to N tokens take as long as one. A sequence reads its context on
    all chips in turn; min(sequences, N) sequences read at the same time, and chunks of prompts fill all
    chips.

    Groq, Llama-2-70B in int8 on 576 chips of 80e12 bytes/s: 68.5e9 bytes of layers take 0.86 ms to read, 576
    hops of 0.72 us and 0.14 us for the hidden state 0.49 ms: at least 1.37 ms per token with a context of
    1,000.
    """
    if site.layout.num_devices > 1:
        raise ValueError(
            f"{site.layout.num_devices} devices per replica: {site.device.name} is a whole machine of "
            f"{chain.num_chips} chips; must be 1, with all parallel sizes 1"
        )
    return [*(_on_chips(op, site, chain) for op in operators), _links(site, chain)]


def _on_chips(op: Operator, site: Site, chain: Chain) -> Operator:
    """Returns the operator with the price of its micro-batch on all chips, one after the other."""
    device = site.device
    bandwidth = device.memory_bandwidth_bytes_per_s / chain.num_chips
    peak = device.peak_flops_per_s[op.dtype] / chain.num_chips

    def of_one_chip(batch: RankBatch) -> Any:
        return larger(op.bytes_moved(batch) / bandwidth, op.flops(batch) / peak)

    def of_micro_batch(batch: RankBatch) -> Any:
        return of_one_chip(_micro_batch(batch, chain))

    def of_all_chips(batch: RankBatch) -> Any:
        return of_one_chip(batch) / chain.num_chips

    seconds: Quantity = of_micro_batch
    if op.per is Per.decode:
        assert isinstance(op.seconds, DecodeSeconds)
        one_token = RankBatch(1, 1, 1, 1, 1, 0, 0, 0, 0)
        seconds = _decode_seconds(float(of_one_chip(one_token)), op.seconds.window, chain)
    elif op.per in (Per.prefill, Per.adapter):
        seconds = of_all_chips
    return replace(op, seconds=seconds, kernels=0, mixed_kernels=0)


def _micro_batch(batch: RankBatch, chain: Chain) -> RankBatch:
    """Returns the tokens and rows of one micro-batch."""
    tokens, rows = divided_up(batch.tokens, chain.num_chips), divided_up(batch.rows, chain.num_chips)
    return batch._replace(tokens=tokens, all_tokens=tokens, rows=rows)


def _decode_seconds(token_s: float, window: int | None, chain: Chain) -> DecodeSeconds:
    """Returns the seconds of contexts, which one sequence per chip reads at a time.

    token_s: seconds of a context token on one chip.
    """

    def lines(rows: int, num_seqs: Any) -> Lines:
        at_once = smaller(larger(num_seqs, 1.0), float(chain.num_chips))
        return ((0.0, token_s / at_once, 0.0, 0.0),)

    return DecodeSeconds(lines, window)


def _links(site: Site, chain: Chain) -> Operator:
    """Returns the hops of a micro-batch's hidden states, and the latency of the layers."""
    fixed_s = chain.num_chips * chain.hop_s + site.model.num_layers * chain.layer_s
    token_s = chain.num_chips * site.hidden_bytes / chain.link_bytes_per_s

    def seconds(batch: RankBatch) -> Any:
        return fixed_s + token_s * _micro_batch(batch, chain).tokens

    return Operator(
        name="chip_to_chip",
        component="communication",
        per=Per.token,
        calls=1,
        seconds=seconds,
        bytes_moved=per_token(site.hidden_bytes),
        dtype=site.dtype,
        kernels=0,
        is_message=True,
    )


def offloaded(operators: list[Operator], site: Site, offload: Offload) -> list[Operator]:
    """Returns the operators of a pass with offloading. Raises ValueError if the layout does not allow it.

    cpu_offload_gb   one more operator per pass: offloaded bytes / (PCIe bandwidth share)
    n_gpu_layers     layers on the CPU take max(bytes / CPU bandwidth, FLOPs / CPU FLOP/s) per operator, and
                     the hidden states of all tokens cross PCIe once
    """
    offload.check(site.layout)
    if offload.n_gpu_layers is None:
        return [*operators, _streamed(site, offload)]
    return list(_split(operators, site, offload))


def _streamed(site: Site, offload: Offload) -> Operator:
    """Returns the read of the offloaded weights, once per pass of each pipeline stage."""
    whole = weight_bytes(site.model, site.layout)
    num_bytes = offload.host_bytes(site.model, site.layout, whole)
    bandwidth = site.device.pcie.bandwidth_bytes_per_s * offload.pcie_share
    return Operator(
        name="cpu_offload",
        component="communication",
        per=Per.token,
        calls=site.layout.pipeline_parallel_size,
        seconds=lambda batch: num_bytes / bandwidth * smaller(batch.tokens, 1),
        bytes_moved=lambda batch: num_bytes * smaller(batch.tokens, 1),
        dtype=site.dtype,
        kernels=0,
        is_message=True,
    )


def _split(operators: list[Operator], site: Site, offload: Offload) -> Iterator[Operator]:
    """Yields the operators of the device's layers and of the CPU's, and the transfers between them."""
    share = offload.layer_share(site.model.num_layers)
    head_on_cpu = not offload.has_head(site.model.num_layers)
    for op in operators:
        if op.part is Part.layers:
            yield replace(op, calls=op.calls * share)
            yield _on_cpu(op, op.calls * (1 - share), offload)
        elif op.part is Part.last and head_on_cpu:
            yield _on_cpu(op, op.calls, offload)
        else:
            yield op
    bandwidth = site.device.pcie.bandwidth_bytes_per_s * offload.pcie_share
    crossing = 1.0 + head_on_cpu
    yield Operator(
        name="cpu_to_gpu",
        component="communication",
        per=Per.token,
        calls=crossing if share < 1 or head_on_cpu else 0.0,
        seconds=lambda batch: site.device.pcie.latency_s + site.hidden_bytes / bandwidth * batch.tokens,
        bytes_moved=per_token(site.hidden_bytes),
        dtype=site.dtype,
        kernels=0,
        is_message=True,
    )


def _on_cpu(op: Operator, calls: float, offload: Offload) -> Operator:
    """Returns the operator computed by the CPU."""

    def seconds(batch: RankBatch) -> Any:
        return larger(
            op.bytes_moved(batch) / offload.cpu_bytes_per_s, op.flops(batch) / offload.cpu_flops_per_s
        )

    on_cpu = replace(op, name=f"cpu {op.name}", calls=calls, seconds=seconds, kernels=0, mixed_kernels=0)
    if op.per is not Per.decode:
        return on_cpu
    assert isinstance(op.seconds, DecodeSeconds)
    token_s = float(seconds(RankBatch(1, 1, 1, 1, 1, 0, 0, 0, 0)))

    def lines(rows: int, num_seqs: Any) -> Lines:
        return ((0.0 * num_seqs, token_s, 0.0, 0.0),)

    return replace(on_cpu, seconds=DecodeSeconds(lines, op.seconds.window))
