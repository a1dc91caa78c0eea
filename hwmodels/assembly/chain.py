"""Iterations on a chain of chips that hold all weights in SRAM, as a pipeline over the chips.

The weights are spread evenly over N chips. The m tokens of an iteration enter in min(m, N) micro-batches of
g = ceil(m / N) tokens, so that all chips work on tokens of the same iteration at the same time; an iteration
takes as long as one micro-batch on all chips:

    t = N (hop + g hidden / link) + layers layer_s + sum over operators of max(bytes(g) / b, FLOPs(g) / f)

b, f: bandwidth and peak of one chip. Up to N tokens take as long as one. A context is read by one sequence on
all chips in turn; min(sequences, N) sequences read at the same time, and chunks of prompts fill all chips.

Groq, Llama-2-70B in int8 on 576 chips of 80e12 bytes/s: 68.5e9 bytes of layers take 0.86 ms to read, 576 hops
of 0.72 us and 0.14 us for the hidden state 0.49 ms: at the least 1.37 ms per token with a context of 1,000.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hwmodels.assembly.site import Site
from hwmodels.devices.chain import Chain
from hwmodels.exact import Lines, divided_up, larger, smaller
from hwmodels.iterations.layout import RankBatch
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
