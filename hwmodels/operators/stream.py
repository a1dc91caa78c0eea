"""Elementwise operators over the activations: norms, rotary embedding, activation functions, sampling."""

from __future__ import annotations

from dataclasses import dataclass

from hwmodels.checks import check_curve
from hwmodels.device import Device
from hwmodels.exact import Num


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamCurve:
    """Performance of kernels without data reuse."""

    bandwidth_share: float = 0.80
    """Share of the data sheet's memory bandwidth that is reached for tensors of many megabytes."""
    start_s: float = 2.0e-6
    """Seconds of start and drain of one kernel in a stream; small norms take 2 us."""

    def __post_init__(self) -> None:
        check_curve(self)


def stream_seconds(num_bytes: Num, device: Device, curve: StreamCurve, *, kernels: float = 1) -> Num:
    """Returns seconds of elementwise kernels: kernels start_s + bytes / (B share), bytes read and written.

    H100, 4 MiB, share 0.8: 2.0 us + 4,194,304 / (0.8 x 3.35e12) = 3.57 us.
    """
    return kernels * curve.start_s + num_bytes / (device.memory_bandwidth_bytes_per_s * curve.bandwidth_share)
