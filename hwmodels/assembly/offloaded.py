"""Operators of a device whose weights are partly in host memory; see `hwmodels.iterations.offload`.

cpu_offload_gb   one more operator per pass: offloaded bytes / (PCIe bandwidth share)
n_gpu_layers     layers on the CPU take max(bytes / CPU bandwidth, FLOPs / CPU FLOP/s) per operator, and the
                 hidden states of all tokens cross PCIe once
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hwmodels.assembly.site import Site
from hwmodels.exact import Lines, larger, smaller
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.memory import weight_bytes
from hwmodels.iterations.offload import Offload
from hwmodels.iterations.ops import DecodeSeconds, Operator, Part, Per, per_token


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
