"""Operators: seconds of one call on one device, one kind per file. Here: the calibration of their curves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hwmodels.checks import check_finite
from hwmodels.device import Device
from hwmodels.operators.attention import AttentionCurve
from hwmodels.operators.collectives import CollectiveCurve
from hwmodels.operators.gemm import GemmCurve, StreamCurve
from hwmodels.operators.mla import MlaCurve
from hwmodels.operators.moe import MoeCurve


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Parameters of the curves.

    The defaults are medians over the measured devices; level `spec` uses them.
    """

    measured_on: str | None = None
    """Name of the measured device; None: none was measured."""
    source: str = ""
    """Source of the measurements, with the date of the fit."""
    sm_clock_hz: float | None = None
    """Boost clock of the SMs of the measured device; None: latencies do not depend on the device."""
    sustained_clock_share: float = 0.9
    """Ratio of the SM clock under an engine's continuous load to the clock in single-operator benchmarks.
    Power, not silicon, limits long prefills. The value comes from whole-engine TTFT of long prompts, not from
    operators.
    """
    start_share: float = 0.8
    """Share of a single kernel's measured start time that remains between kernels of a stream or graph. The
    start of one kernel overlaps the end of the previous one. The value comes from whole-engine TPOT of small
    batches.
    """
    peer_wait_s: float = 0.0
    """Seconds that a reduction in a busy engine waits per other rank. In benchmarks of single collectives the
    ranks arrive together. The value comes from whole-engine TPOT of dense models on 2 to 8 devices.
    """
    gemm: GemmCurve = field(default_factory=GemmCurve)
    attention: AttentionCurve = field(default_factory=AttentionCurve)
    mla: MlaCurve = field(default_factory=MlaCurve)
    moe: MoeCurve = field(default_factory=MoeCurve)
    collectives: CollectiveCurve = field(default_factory=CollectiveCurve)
    stream: StreamCurve = field(default_factory=StreamCurve)

    def __post_init__(self) -> None:
        if self.sm_clock_hz is not None:
            check_finite("sm_clock_hz", self.sm_clock_hz, unit="Hz")
        for name in ("sustained_clock_share", "start_share"):
            value = getattr(self, name)
            check_finite(name, value)
            if value > 1:
                raise ValueError(f"{name}={value}: must be a share, > 0 and <= 1")
        check_finite("peer_wait_s", self.peer_wait_s, unit="s", zero_allowed=True)

    def on(self, device: Device) -> Calibration:
        """Returns the calibration with kernel latencies converted to another device's clock, in seconds.

        In clock cycles the latencies are nearly equal on the five measured devices (1.41 to 2.43 GHz): 3,400
        to 4,500 for the start of a GEMM, 17,000 to 21,000 for the start of decode attention, 6,400 to 7,100
        for one of its items.
        """
        if self.sm_clock_hz is None or device.sm_clock_hz is None or device.sm_clock_hz == self.sm_clock_hz:
            return self
        slower = self.sm_clock_hz / device.sm_clock_hz
        return replace(
            self,
            sm_clock_hz=device.sm_clock_hz,
            gemm=replace(self.gemm, start_s=slower * self.gemm.start_s),
            attention=replace(
                self.attention,
                decode_start_s=slower * self.attention.decode_start_s,
                decode_item_s=slower * self.attention.decode_item_s,
            ),
            moe=replace(self.moe, kernel_s=slower * self.moe.kernel_s),
        )

    def under_load(self, device: Device) -> Device:
        """Returns the device with its peaks at the sustained clock, as in a busy engine."""
        share = self.sustained_clock_share
        peaks = {dtype: peak * share for dtype, peak in device.peak_flops_per_s.items()}
        return replace(device, peak_flops_per_s=peaks)

    def in_a_stream(self) -> Calibration:
        """Returns the calibration with the kernel start times of a stream or graph."""
        share = self.start_share
        return replace(
            self,
            gemm=replace(self.gemm, start_s=share * self.gemm.start_s),
            attention=replace(self.attention, decode_start_s=share * self.attention.decode_start_s),
            moe=replace(self.moe, kernel_s=share * self.moe.kernel_s),
            stream=replace(self.stream, start_s=share * self.stream.start_s),
        )
