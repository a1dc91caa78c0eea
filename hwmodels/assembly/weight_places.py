"""Iterations with weights in other places than the device's memory: a chain of chips with SRAM, or the host.

On a chain, chips hold all weights in SRAM, as a pipeline over the chips. The weights are spread evenly over N
chips. The m tokens of an iteration enter in min(m, N) micro-batches of g = ceil(m / N) tokens, so that all
chips work on tokens of the same iteration at the same time; an iteration takes as long as one micro-batch on
all chips:

    t = N (hop + g hidden / link) + layers layer_s + sum over operators of max(bytes(g) / b, FLOPs(g) / f)

b, f: bandwidth and peak of one chip. Up to N tokens take as long as one. A context is read by one sequence on
all chips in turn; min(sequences, N) sequences read at the same time, and chunks of prompts fill all chips.

Groq, Llama-2-70B in int8 on 576 chips of 80e12 bytes/s: 68.5e9 bytes of layers take 0.86 ms to read, 576 hops
of 0.72 us and 0.14 us for the hidden state 0.49 ms: at the least 1.37 ms per token with a context of 1,000.

Operators of a device whose weights are partly in host memory (see `hwmodels.iterations.layout`):

cpu_offload_gb   one more operator per pass: offloaded bytes / (PCIe bandwidth share)
n_gpu_layers     layers on the CPU take max(bytes / CPU bandwidth, FLOPs / CPU FLOP/s) per operator, and the
                 hidden states of all tokens cross PCIe once
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hwmodels.assembly.site import Site
from hwmodels.device import Chain
from hwmodels.exact import Lines, divided_up, larger, smaller
from hwmodels.host import Offload
from hwmodels.iterations.layout import Part, RankBatch
from hwmodels.iterations.memory import weight_bytes
from hwmodels.iterations.ops import DecodeSeconds, Operator, Per, Quantity, per_token


def over_chips(operators: list[Operator], site: Site, chain: Chain) -> list[Operator]:
    """Returns the operators with their prices on the chain, and the links between its chips.

    Nothing is launched: the chips follow a schedule that was compiled. Raises ValueError for a replica of
    several devices.
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
    """Returns the seconds of contexts, which as many sequences as there are chips read at a time.

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
    """Returns the operators of a pass with offloading. Raises ValueError if the layout does not allow it."""
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
    """Yields the operators of the device's layers and of the CPU's, and the way between them."""
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
    """Returns the operator as the CPU computes it."""

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
