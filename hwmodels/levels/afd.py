"""Attention/FFN disaggregation (AFD): attention and experts on different devices, in micro-batches.

MegaScale-Infer (Zhu et al., SIGCOMM 2025) and Step-3 (2025). num_ffn_devices of a replica's devices hold the
experts (or the dense MLPs) of all layers; the others hold attention and the KV cache. A batch is cut into m
micro-batches, which alternate between the two groups ("ping-pong"); each crosses the network twice per layer:

    attention  |a1|a2|a3|a1|a2|a3|a1 ...          a, f, c: seconds of one micro-batch in one layer, for
    to FFN        |c1|c2|c3|c1|c2|c3              attention, FFN and the messages of one direction
    FFN              |f1|f2|f3|f1|f2|f3
    to attention        |c1|c2|c3|c1|c2

    S = a + f + 2 c, the time of one micro-batch in a layer; M = max(a, f, c), the slowest station iteration =
    (L - 1) max(m M, S) + S + (m - 1) M,  L layers

With m M >= S all stations except the slowest wait: MegaScale-Infer's T = (a + f + 2 c) + f (m L - 1) if f is
the slowest. Three micro-batches are enough if a = f and c <= a / 2: 3 a >= 2 a + 2 c.

Example: L = 2, m = 3, a = f = 2, c = 1: max(6, 6) + 6 + 2 x 2 = 16.

Messages (M2N): an attention device sends the hidden state of each of its tokens to min(top_k,
num_ffn_devices) devices, and the same number comes back; FFN devices share them evenly. A dense MLP is cut
over the FFN devices, with an all-reduce among them. All layers are treated as equal, and all micro-batches as
equal to the first one. The KV memory of a run is that of the undivided layout, where every device holds
experts, which is a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fieldlimits import Checked, PositiveInt, PositiveShare
from hwmodels.assembly import mlp_operators
from hwmodels.assembly.roofline import Roofline
from hwmodels.device import Link
from hwmodels.exact import larger
from hwmodels.host import HostShare
from hwmodels.iterations import IterationModel, IterationShape, Jitter, counted
from hwmodels.iterations.layout import ParallelLayout, Part
from hwmodels.iterations.ops import total_seconds
from hwmodels.levels import Calibrated, InProportions, LatencyLevel, Replica, jitter_of
from hwmodels.model import MixtureOfExperts

ON_ATTENTION_DEVICES = ("router",)
"""Operators of an MLP that attention devices run, because messages go to the experts that they select."""


def ping_pong_seconds(
    attention_s: Any, ffn_s: Any, message_s: Any, num_layers: int, num_micro_batches: Any
) -> Any:
    """Returns the seconds of all layers; a, f, c and m of the formula above, numbers or arrays."""
    one_s = attention_s + ffn_s + 2 * message_s
    slowest_s = larger(larger(attention_s, ffn_s), message_s)
    return (
        (num_layers - 1) * larger(num_micro_batches * slowest_s, one_s)
        + one_s
        + (num_micro_batches - 1) * slowest_s
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Afd(Checked):
    """Level `afd`: attention/FFN disaggregation, with operators priced by another level."""

    base: LatencyLevel = Calibrated()
    num_ffn_devices: PositiveInt = 1
    """Number of devices of a replica that hold the experts or MLPs; the others hold attention and KV."""
    num_micro_batches: PositiveInt = 3
    """Maximum number of micro-batches into which a batch is cut."""
    reached_share: PositiveShare = 0.8
    """Share of the link bandwidth that messages reach."""

    @property
    def jitter(self) -> Jitter | None:
        """Random scatter of the iteration times: the base's, if it has this setting."""
        return jitter_of(self.base)

    def num_attention_groups(self, layout: ParallelLayout) -> int:
        """Returns the number of groups of tensor_parallel_size attention devices."""
        return (layout.num_devices - self.num_ffn_devices) // layout.tensor_parallel_size

    def iteration_model(self, replica: Replica) -> IterationModel:
        """Returns the iteration model. Raises ValueError if the layout cannot be divided."""
        layout, num_ffn = replica.layout, self.num_ffn_devices
        groups = self.num_attention_groups(layout)
        if groups < 1 or (layout.num_devices - num_ffn) % layout.tensor_parallel_size:
            raise ValueError(
                f"num_ffn_devices={num_ffn}: must leave a multiple of tensor_parallel_size="
                f"{layout.tensor_parallel_size} of the {layout.num_devices} devices for attention"
            )
        if layout.pipeline_parallel_size > 1 or layout.context_parallel_size > 1:
            raise ValueError(
                "latency=afd: pipeline_parallel_size and context_parallel_size must be 1; more devices are "
                "attention_data_parallel_size"
            )
        for name in ("sequence_parallel", "attention_data_parallel_padding"):
            if getattr(layout, name):
                raise ValueError(f"{name}=true: is not modelled with latency=afd; set it to false")
        if replica.lora is not None:
            raise ValueError("lora: must be null, as latency=afd does not model LoRA adapters")
        attention = ParallelLayout(
            tensor_parallel_size=layout.tensor_parallel_size,
            attention_data_parallel_size=groups,
            num_micro_batches=self.num_micro_batches,
        )
        ffn = (
            ParallelLayout(
                attention_data_parallel_size=num_ffn,
                expert_parallel_size=num_ffn,
                num_micro_batches=self.num_micro_batches,
            )
            if replica.model.has_experts
            else ParallelLayout(tensor_parallel_size=num_ffn, num_micro_batches=self.num_micro_batches)
        )
        sides = [self.base.iteration_model(replace(replica, layout=side)) for side in (attention, ffn)]
        whole = self.base.iteration_model(replica)
        if not (isinstance(sides[0], Roofline) and isinstance(sides[1], Roofline)):
            raise ValueError("latency.base: must be calibrated or spec, which have times of operators")
        return PingPong(self, replica, whole, sides[0], sides[1])

    def basis(self, replica: Replica) -> str:
        num_attention = replica.layout.num_devices - self.num_ffn_devices
        return (
            f"{self.base.basis(replica)} Attention on {num_attention} devices and MLPs on "
            f"{self.num_ffn_devices}, in {self.num_micro_batches} micro-batches; never measured."
        )


class PingPong(InProportions):
    """An `IterationModel` of micro-batches that alternate between attention devices and FFN devices.

    whole: the replica with attention and experts on all devices, for FLOPs, bytes and proportions.
    """

    def __init__(
        self, level: Afd, replica: Replica, whole: IterationModel, attention: Roofline, ffn: Roofline
    ) -> None:
        super().__init__(whole)
        self._level, self._attention, self._ffn = level, attention, ffn
        self._num_layers = attention.model.num_layers
        of_mlp = _mlp_names(attention) - set(ON_ATTENTION_DEVICES)
        in_layers = [op for op in attention.operators if op.part is Part.layers]
        self._attention_ops = [op for op in in_layers if op.name not in of_mlp]
        self._outer_ops = [op for op in attention.operators if op.part in (Part.first, Part.last)]
        names = {name for name in _mlp_names(ffn) if not name.startswith("expert_")}
        self._ffn_ops = [op for op in ffn.operators if op.name in names - set(ON_ATTENTION_DEVICES)]
        self._link = _link(replica)
        operators = [*self._attention_ops, *self._outer_ops, *self._ffn_ops]
        num_kernels = level.num_micro_batches * sum(op.calls * op.kernels for op in operators)
        self._host = HostShare(replica.host, replica.cuda_graphs, num_kernels)
        experts = [block.mlp for block in replica.model.blocks if isinstance(block.mlp, MixtureOfExperts)]
        num_ffn = level.num_ffn_devices
        self._copies = min(max(mlp.top_k for mlp in experts), num_ffn) if experts else num_ffn

    def parts(self, shape: IterationShape) -> tuple[Any, Any, Any, Any]:
        """Returns a, f, c of the formula in seconds, and m."""
        counted("afd", shape)
        layers = self._num_layers
        own = self._attention.layout.rank_batch(shape)
        attention_s = total_seconds(self._attention_ops, own) / layers
        ffn_s = total_seconds(self._ffn_ops, self._ffn.layout.rank_batch(shape)) / layers
        # All devices of an attention group send an equal share of its tokens; FFN devices receive evenly.
        hidden_bytes = self._attention.site.hidden_bytes * self._copies
        sent = own.tokens / self._attention.layout.tensor_parallel_size
        received = own.all_tokens / self._level.num_ffn_devices
        bytes_per_s = self._link.bandwidth_bytes_per_s * self._level.reached_share
        message_s = self._link.latency_s + hidden_bytes * larger(sent, received) / bytes_per_s
        in_flight = self._attention.layout.in_flight(shape)
        return attention_s, ffn_s, message_s, in_flight.full + in_flight.light

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the wall time of the iteration in seconds; for arrays, of each iteration."""
        attention_s, ffn_s, message_s, num_micro_batches = self.parts(shape)
        layers_s = ping_pong_seconds(attention_s, ffn_s, message_s, self._num_layers, num_micro_batches)
        own = self._attention.layout.rank_batch(shape)
        gpu_s = layers_s + num_micro_batches * total_seconds(self._outer_ops, own)
        replays = self._host.replays(own.tokens, shape.prefill_tokens)
        return self._host.wall_seconds(gpu_s, replays, shape.decode_seqs + shape.prefill_seqs)


def _mlp_names(roofline: Roofline) -> set[str]:
    """Returns the names of the operators of a replica's MLPs."""
    blocks = roofline.model.blocks
    return {op.name for block in blocks for op in mlp_operators(roofline.site, block.mlp, 1.0)}


def _link(replica: Replica) -> Link:
    """Returns the link between attention devices and FFN devices. Raises ValueError if there is none."""
    device, num_devices = replica.device, replica.layout.num_devices
    link = device.scale_up or device.pcie if num_devices <= device.gpus_per_node else device.inter_node
    if link is None:
        raise ValueError(f"latency=afd: {device.name} has no link between nodes")
    return link
