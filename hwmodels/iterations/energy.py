"""Power model of a device by its utilisation, and the energy, electricity and emissions that follow.

    P = idle + (TDP - idle) * min(1, a_c * MFU + a_m * MBU + a_l * link utilisation)

MFU, MBU: shares of the data sheet's FLOP/s and bytes/s that the iteration reaches. The weights say which
share of the span between idle and TDP a unit at its data-sheet rate would take; they may sum to more than 1,
because the board then holds its limit by lowering clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from fieldlimits import FINITE, Checked, Ge, NonNegative, Positive, Unit, check
from hwmodels.device import Device
from hwmodels.exact import Num
from hwmodels.iterations.iteration import IterationModel, IterationShape

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerModel(Checked):
    """Power of one device.

    The weights are defaults for all devices, from three measurements on an H100 SXM (700 W, 70 W idle):

        decode, batch 1     300 W  MBU 0.65, MFU 0     -> a_m = (300 - 70) / 630 / 0.65 = 0.56
        decode, batch 128   600 W  MBU 0.75, MFU 0.25  -> a_c = ((600 - 70) / 630 - 0.55 * 0.75) / 0.25 = 1.7
        prefill             at TDP                     -> reached at MFU 0.55 and above: 1.7 * 0.55 = 0.94

    Watts of decode: ML.ENERGY benchmark 3.0 (Chung et al., arXiv 2601.22076) as Chen et al. quote it (arXiv
    2603.17280). Prefill at TDP: Patel et al., ASPLOS 2024 (arXiv 2308.12908), A100. MFU and MBU are our own
    estimates for an 8B model in bf16, so the weights are accurate to some 20 %. Decode on an H200 was
    measured at 137 to 300 W elsewhere (Ma et al., arXiv 2605.11999), which the weights give for MBU 0.17 to
    0.65.
    """

    idle_w: NonNegative
    tdp_w: Positive
    compute_weight: NonNegative = 1.7
    memory_weight: NonNegative = 0.55
    link_weight: NonNegative = 0.1
    """Assumed: links take a small part of a board's power, and no measurement of them alone was found."""

    def __post_init__(self) -> None:
        check(self)
        if self.idle_w >= self.tdp_w:
            raise ValueError(f"idle_w={self.idle_w}: must be below tdp_w={self.tdp_w} W")

    @classmethod
    def of(cls, device: Device) -> PowerModel:
        """Returns the power model with the device's own limits and the default weights."""
        return cls(idle_w=device.idle_w, tdp_w=device.tdp_w)

    def watts(self, *, compute_utilisation: Num, memory_utilisation: Num, link_utilisation: Num = 0.0) -> Num:
        """Returns the power of one device at these utilisations; idle_w at 0, never above tdp_w."""
        load: Any = self.compute_weight * compute_utilisation
        load = load + self.memory_weight * memory_utilisation + self.link_weight * link_utilisation
        watts: Num = self.idle_w + (self.tdp_w - self.idle_w) * np.minimum(1.0, load)
        return watts


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergySettings(Checked):
    """Converts joules of the boards to electricity and greenhouse gas; CPUs and fans are not included."""

    grid_g_co2e_per_kwh: Annotated[NonNegative, Unit("g/kWh")] = 473.0
    """Carbon intensity of the grid: world average of 2024 (Ember, Global Electricity Review 2025).

    France has some 40, Poland some 600.
    """
    pue: Annotated[float, Ge(1), FINITE, "1 is a data centre without any overhead"] = 1.56
    """Power usage effectiveness: electricity of the data centre over electricity of its machines.

    Average of 2024 (Uptime Institute, Global Data Center Survey); the largest operators report 1.1.
    """
    max_power_factor: Annotated[float, Ge(1), FINITE, "a multiple of the TDP"] = 1.1
    """Power of a board in short peaks, over its TDP, which supplies must provide: 1.1 to 1.5 in data sheets.

    The TDP limits the mean over some tens of milliseconds, so energy does not depend on it.
    """
    training_tokens: Positive | None = None
    """Tokens that the model was trained on; None: nothing is said about training."""

    def kwh(self, joules: Num) -> Num:
        """Returns the electricity bought for these joules: 1 MJ at a PUE of 1.56 is 0.433 kWh."""
        return joules * self.pue / JOULES_PER_KWH

    def g_co2e(self, joules: Num) -> Num:
        """Returns grams of CO2 equivalent for these joules: 1 MJ at 473 g/kWh and a PUE of 1.56 is 205 g."""
        return self.kwh(joules) * self.grid_g_co2e_per_kwh


def energy_joules(
    power: PowerModel,
    model: IterationModel,
    shape: IterationShape,
    duration_s: Num,
    *,
    num_devices: int,
    link_utilisation: Num = 0.0,
) -> Num:
    """Returns the energy of one replica's boards in an iteration; for arrays, in each iteration.

    num_devices * watts(MFU, MBU, link) * duration_s, MFU = flops / (duration_s * peak) of the whole replica.
    duration_s > 0: as recorded, or model.seconds(shape). Time between iterations: see `idle_joules`.
    """
    done = model.flops(shape), model.bytes_moved(shape)
    return joules_of_work(
        power, model, *done, duration_s, num_devices=num_devices, link_utilisation=link_utilisation
    )


def joules_of_work(
    power: PowerModel,
    model: IterationModel,
    flops: Num,
    moved_bytes: Num,
    duration_s: Num,
    *,
    num_devices: int,
    link_utilisation: Num = 0.0,
) -> Num:
    """Computes `energy_joules` from the FLOPs and bytes of the iteration."""
    watts = power.watts(
        compute_utilisation=flops / (duration_s * model.peak_flops_per_s),
        memory_utilisation=moved_bytes / (duration_s * model.peak_bytes_per_s),
        link_utilisation=link_utilisation,
    )
    return num_devices * watts * duration_s


def idle_joules(power: PowerModel, idle_s: float, *, num_devices: int) -> float:
    """Returns the energy of boards that run nothing for idle_s seconds."""
    return num_devices * power.idle_w * idle_s
