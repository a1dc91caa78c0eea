"""Time slicing: processes take turns on one GPU, as drivers do without MPS or MIG.

A slice lasts 2 ms (nvidia-smi compute-policy --set-timeslice: short 2, medium 10, long 30); a process that
has nothing to run gives its turn away. At the end of a slice the state of the SMs is written to memory and
that of the next process is read: registers and shared memory, state over bandwidth as in Tanasic et al.,
"Enabling preemptive multiprogramming on GPUs" (ISCA 2014); then the L2 cache is filled again.

    switch_s = (2 SMs state per SM + L2) / bandwidth
    H100 SXM: (2 x 132 x 0.5 MB + 52 MB) / 3.35e12 = 55 us, 2.7 % of the time

While n processes are busy, an iteration of one of them takes n / (1 - switch share) times as long as alone,
because the slices of the others lie in between. This is a model that was compared with no measurement; it
leaves out kernels that do not end at the end of a slice, and hosts that wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, Positive, Unit
from hwmodels.devices.device import Device

STATE_BYTES = 496 * 1024
"""Largest state per SM: 256 KiB registers (since Kepler), up to 228 KiB L1 and shared memory (Hopper)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSlicing(Checked):
    """Settings of time slicing: the length of a slice, after which the next process runs."""

    slice_s: Annotated[Positive, Unit("s")] = 2e-3

    def switch_s(self, device: Device) -> float:
        """Returns the seconds of a switch from one process to the next."""
        moved = 2 * device.num_sms * STATE_BYTES + device.l2_bytes
        return moved / device.memory_bandwidth_bytes_per_s

    def switch_share(self, device: Device) -> float:
        """Returns the share of time lost to switches while two or more processes are busy."""
        switch_s = self.switch_s(device)
        return switch_s / (self.slice_s + switch_s)
