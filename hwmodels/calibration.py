"""What kernels reach on one device: the figures of every operator's curve, and where they were measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hwmodels.checks import check_finite
from hwmodels.device import Device
from hwmodels.operators.attention import AttentionCurve
from hwmodels.operators.collectives import CollectiveCurve
from hwmodels.operators.gemm import GemmCurve
from hwmodels.operators.mla import MlaCurve
from hwmodels.operators.moe import MoeCurve
from hwmodels.operators.stream import StreamCurve


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Parameters of the curves. The defaults are medians over the measured devices: level `spec`."""

    measured_on: str | None = None
    """Name of the device that was measured; None: nothing was."""
    source: str = ""
    """Of the measurements, with the date of the fit."""
    sustained_clock_share: float = 0.9
    """Clock of the SMs under an engine's continuous load, over that in a benchmark of single operators.

    Power, not silicon, limits long prefills. From whole-engine TTFT of long prompts, not from operators.
    """
    gemm: GemmCurve = field(default_factory=GemmCurve)
    attention: AttentionCurve = field(default_factory=AttentionCurve)
    mla: MlaCurve = field(default_factory=MlaCurve)
    moe: MoeCurve = field(default_factory=MoeCurve)
    collectives: CollectiveCurve = field(default_factory=CollectiveCurve)
    stream: StreamCurve = field(default_factory=StreamCurve)

    def __post_init__(self) -> None:
        check_finite("sustained_clock_share", self.sustained_clock_share)
        if self.sustained_clock_share > 1:
            raise ValueError(
                f"sustained_clock_share={self.sustained_clock_share}: must be a share, > 0 and <= 1"
            )

    def under_load(self, device: Device) -> Device:
        """The device as operators of a busy engine find it: its peaks at the sustained clock."""
        share = self.sustained_clock_share
        peaks = {dtype: peak * share for dtype, peak in device.peak_flops_per_s.items()}
        return replace(device, peak_flops_per_s=peaks)
