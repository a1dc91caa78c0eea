"""Costs: of tokens, on rented hardware or at an API's prices, and of energy.

Prompt caching of APIs: tokens found in the cache are billed at a discount; tokens of a prefix that the client
asked to keep cost more when they are first computed, or rent while they are kept. Worked number: 1,000
prompts of 10,000 tokens, 9,000 of which are found in all but the first, at $3 per million: all computed, $30;
with a read factor of 0.1 and a write factor of 1.25, 9,000 written tokens cost $0.034, 8.991 million read
ones $2.70, 1 million others $3: $5.73.

Batch APIs, which answer within a day, sell all tokens at half price (OpenAI, Anthropic, Google, 2025).

Break-evens compare a self-hosted fleet with an API's bill, and serving with training.

The power of a device follows from its utilisation, and energy, electricity and emissions from the power:

    P = idle + (TDP - idle) * min(1, a_c * MFU + a_m * MBU + a_l * link utilisation)

MFU, MBU: shares of the data sheet's FLOP/s and bytes/s that the iteration reaches. The weights are the shares
of the range between idle and TDP that a unit takes at its data-sheet rate; they may sum to more than 1,
because the board then stays within its limit by lowering clocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

from fieldlimits import FINITE, Checked, Ge, NonNegative, NonNegativeInt, Positive, Unit, check
from hwmodels.checks import check_finite
from hwmodels.device import Device
from hwmodels.exact import Num
from hwmodels.iterations import IterationModel, IterationShape, causal_pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class Tariff(Checked):
    """List prices of a provider with prompt caching.

    Defaults have the structure of Anthropic's prompt caching with a lifetime of five minutes.
    """

    usd_per_million_input_tokens: NonNegative = 3.0
    usd_per_million_output_tokens: NonNegative = 15.0
    read_factor: NonNegative = 0.1
    """Price of tokens found in the cache, as a fraction of the input price."""
    write_factor: NonNegative = 1.25
    """Price of pinned tokens that had to be computed, as a fraction of the input price."""
    usd_per_million_token_hours: NonNegative = 0.0
    """Rent of pinned tokens per million tokens and hour (Google's explicit caches: about $1 to $4.5)."""

    min_cached_tokens: NonNegativeInt = 0
    """Minimum number of cached tokens of a prompt for the discount; fewer are billed in full."""
    batch_factor: NonNegative = 1.0
    """Factor on the prices of all tokens, not on the rent; 0.5: a batch API."""

    def bill_usd(
        self,
        *,
        input_tokens: float,
        found: float,
        written: float,
        output_tokens: float,
        pinned_token_s: float,
    ) -> float:
        """Returns the bill in US dollars; `found` and `written` are parts of input_tokens."""
        at_full_price = input_tokens - found - written
        input_usd = at_full_price + self.read_factor * found + self.write_factor * written
        return (
            self.batch_factor * self.usd_per_million_input_tokens * input_usd
            + self.batch_factor * self.usd_per_million_output_tokens * output_tokens
            + self.usd_per_million_token_hours * pinned_token_s / 3600
        ) / 1e6


class SplitCost(NamedTuple):
    """The rent of a run, split over its tokens and requests; infinite where a count is 0."""

    usd_per_million_input_tokens: float
    """Prefill share of the rent per million input tokens."""
    usd_per_million_output_tokens: float
    """Decode share of the rent per million output tokens."""
    usd_per_thousand_requests: float
    """Total rent per thousand requests."""


def split_cost(
    *,
    usd: float,
    prefill_time_share: float,
    num_input_tokens: float,
    num_output_tokens: float,
    num_requests: float,
) -> SplitCost:
    """Splits the rent over input tokens, output tokens and requests, including idle time.

    Prefill and decode share the rent in proportion to their busy time; idle time is split in the same
    proportion.

    Of $1, a prefill share of 0.25 over 500,000 input tokens makes $0.50 per million, the rest over 100,000
    output tokens $7.50, and 200 requests $5 per thousand. usd: the rent of all devices. Raises ValueError for
    a value that is negative or not finite, and for a share above 1.
    """
    check_finite("usd", usd, unit="$", zero_allowed=True)
    check_finite("prefill_time_share", prefill_time_share, zero_allowed=True)
    if prefill_time_share > 1:
        raise ValueError(f"prefill_time_share={prefill_time_share}: must be a share, 0 to 1")
    check_finite("num_input_tokens", num_input_tokens, unit="tokens", zero_allowed=True)
    check_finite("num_output_tokens", num_output_tokens, unit="tokens", zero_allowed=True)
    check_finite("num_requests", num_requests, unit="requests", zero_allowed=True)
    return SplitCost(
        _each(prefill_time_share * usd, num_input_tokens) * 1e6,
        _each((1 - prefill_time_share) * usd, num_output_tokens) * 1e6,
        _each(usd, num_requests) * 1e3,
    )


def _each(usd: float, count: float) -> float:
    return usd / count if count else math.inf


TRAINING_CONTEXT = 4096
"""Tokens of a training sequence, assumed; attention adds a few percent to the FLOPs."""
PASSES_OF_TRAINING = 3
"""Ratio of training FLOPs to a forward pass; the backward pass takes twice as many (Kaplan et al. 2020)."""


def break_even_load(fleet_usd: float, bill_usd: float) -> float:
    """Returns the multiple of the traffic above which the same fleet costs less than the API's bill.

    The fleet costs the same for any traffic that it can serve; the bill grows with the traffic. $2.70 per
    hour against a bill of $10 for the same hour: 0.27 of the traffic. Infinite if the API is free.
    """
    check_finite("fleet_usd", fleet_usd, unit="$", zero_allowed=True)
    check_finite("bill_usd", bill_usd, unit="$", zero_allowed=True)
    return fleet_usd / bill_usd if bill_usd else math.inf


def training_flops(model: IterationModel, num_tokens: float) -> float:
    """Returns the FLOPs of training on num_tokens tokens: 6 per active parameter and token, and attention."""
    context = TRAINING_CONTEXT
    shape = IterationShape(0, 0, 1, context, causal_pairs(context), context, context)
    return PASSES_OF_TRAINING * num_tokens / context * float(model.flops(shape))


def tokens_to_match_training(train_flops: float, served_flops: float, output_tokens: float) -> float:
    """Returns the number of output tokens after which serving has used the FLOPs of training.

    served_flops: of all work for output_tokens, including prompts. Short prompts and a dense model give 3
    times the tokens of training; one prompt token per output token halves that.
    """
    return train_flops * output_tokens / served_flops if served_flops and output_tokens else math.inf


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
    estimates for an 8B model in bf16, so the weights are accurate to about 20 %. Decode on an H200 was
    measured at 137 to 300 W elsewhere (Ma et al., arXiv 2605.11999), which the weights give for MBU 0.17 to
    0.65.
    """

    idle_w: NonNegative
    tdp_w: Positive
    compute_weight: NonNegative = 1.7
    memory_weight: NonNegative = 0.55
    link_weight: NonNegative = 0.1
    """Assumed: links take a small part of a board's power, and no separate measurement was found."""

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

    France has about 40, Poland about 600.
    """
    pue: Annotated[float, Ge(1), FINITE, "1 is a data centre without any overhead"] = 1.56
    """Power usage effectiveness: electricity of the data centre divided by that of its machines.

    Average of 2024 (Uptime Institute, Global Data Center Survey); the largest operators report 1.1.
    """
    max_power_factor: Annotated[float, Ge(1), FINITE, "a multiple of the TDP"] = 1.1
    """Ratio of a board's power in short peaks to its TDP, which power supplies must provide: 1.1 to 1.5 in
    data sheets. The TDP limits the mean over tens of milliseconds, so energy does not depend on it.
    """
    training_tokens: Positive | None = None
    """Number of training tokens of the model; None: no statement about training."""

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
    """Returns the energy of boards that are idle for idle_s seconds."""
    return num_devices * power.idle_w * idle_s
