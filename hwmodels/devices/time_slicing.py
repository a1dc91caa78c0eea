"""Several processes on one GPU by turns, as drivers do it where nothing else is set up (no MPS, no MIG).

A slice lasts 2 ms (nvidia-smi compute-policy --set-timeslice: short 2, medium 10, long 30); who has nothing
to run gives its turn away. At its end what the SMs hold is written to memory, and that of the next is read:
registers and shared memory, state over bandwidth as in Tanasic et al., "Enabling preemptive multiprogramming
on GPUs" (ISCA 2014); then the L2 is filled anew.

    switch_s = (2 SMs state an SM + L2) / bandwidth
    H100 SXM: (2 x 132 x 0.5 MB + 52 MB) / 3.35e12 = 55 us, 2.7 % of the time

While n processes are busy, an iteration of one takes n / (1 - switch share) times as long as alone, for the
others' slices lie in between. A model, not a measurement: kernels that do not end at a slice's end, and
hosts that wait for each other, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from hwmodels.checks import check_finite
from hwmodels.devices.device import Device

STATE_BYTES = 496 * 1024
"""Of an SM at most: 256 KiB of registers (since Kepler), up to 228 KiB of L1 and shared memory (Hopper)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSlicing:
    """How long a process runs before the next one does."""

    slice_s: float = 2e-3

    def __post_init__(self) -> None:
        check_finite("slice_s", self.slice_s, unit="s")

    def switch_s(self, device: Device) -> float:
        """From one process to the next."""
        moved = 2 * device.num_sms * STATE_BYTES + device.l2_bytes
        return moved / device.memory_bandwidth_bytes_per_s

    def switch_share(self, device: Device) -> float:
        """Of the time, where two or more are busy."""
        switch_s = self.switch_s(device)
        return switch_s / (self.slice_s + switch_s)
