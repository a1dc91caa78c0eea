"""Definitions of metrics, costs, prices and energy: worked numbers of textbooks and price lists."""

from __future__ import annotations

import numpy as np
import pandas as pd

from experiments.reproduce.claims.built import decode, device, tariff
from hwmodels.costs import EnergySettings, SplitCost, split_cost
from sim.metrics.definitions import Window, describe
from sim.metrics.measured import goodput
from sim.metrics.slo import Slo

TTFT_MS = (100, 102, 100, 100, 99, 104, 110, 90, 3000, 95)
"""The ten requests of the textbook, one of which is slow."""
RENT_USD_PER_HOUR = 2.0
TOKENS_PER_S = 100.0
OUTPUT_TOKENS = 200.0
PROMPTS_PER_MINUTE = 100.0
YEAR_S = 365 * 24 * 3600
MILLION = 1_000_000


def ttft_ms(statistic: str) -> float:
    """Returns a statistic of the ten times to first token."""
    return 1e3 * describe(np.array(TTFT_MS) / 1e3)[statistic]


def good_per_s(num_good: int, num_all: int, duration_s: float, unit_s: float = 1.0) -> float:
    """Returns the requests within the SLO per second, or other unit, if num_good of a period are."""
    fast, slow = 0.1, 1.0
    table = pd.DataFrame(
        {
            "status": "finished",
            "finished_s": np.linspace(0, duration_s, num_all, endpoint=False),
            "output_tokens": 10,
            "ttft_s": [fast] * num_good + [slow] * (num_all - num_good),
            "tpot_s": 0.05,
            "e2e_s": 1.0,
        }
    )
    slo = Slo(ttft_ms=200, tpot_ms=100)
    table["slo_met"] = slo.met(table)
    return unit_s * float(goodput(table, table, Window(0.0, duration_s), slo)["requests_per_s"])


def rent(num_requests: float, seconds: float, prefill_share: float) -> SplitCost:
    """Returns the rent of a period, split over tokens and requests."""
    return split_cost(
        usd=RENT_USD_PER_HOUR * seconds / 3600,
        prefill_time_share=prefill_share,
        num_input_tokens=MILLION,
        num_output_tokens=num_requests * OUTPUT_TOKENS,
        num_requests=num_requests,
    )


def decode_usd() -> float:
    """Returns the rent of decoding 1,000 outputs."""
    seconds = 1000 * OUTPUT_TOKENS / TOKENS_PER_S
    return rent(1000, seconds, 0.0).usd_per_thousand_requests


def prefill_usd() -> float:
    """Returns the rent of computing 1,000 prompts."""
    return rent(1000, 60 * 1000 / PROMPTS_PER_MINUTE, 1.0).usd_per_thousand_requests


def request_usd() -> float:
    """Returns the rent of computing 1,000 prompts and decoding their outputs."""
    return decode_usd() + prefill_usd()


def token_usd() -> float:
    """Returns the rent of a million output tokens, for an hour of which 360,000 are decoded."""
    return rent(1800, 3600.0, 0.0).usd_per_million_output_tokens


def discount(name: str, found: float = 0.0) -> float:
    """Returns the percentage by which a bill is lower than the list price. found: tokens in the cache."""
    tokens = {"input_tokens": MILLION, "written": 0.0, "output_tokens": 0.0, "pinned_token_s": 0.0}
    whole = tariff("cached_prompts").bill_usd(found=0.0, **tokens)
    chosen = tariff(name)
    base = whole * chosen.usd_per_million_input_tokens / tariff("cached_prompts").usd_per_million_input_tokens
    return 100 * (1 - chosen.bill_usd(found=float(found), **tokens) / base)


def rent_of_cache() -> float:
    """Returns the price of keeping a million tokens for an hour."""
    return tariff("cached_storage").bill_usd(
        input_tokens=0.0, found=0.0, written=0.0, output_tokens=0.0, pinned_token_s=MILLION * 3600.0
    )


def kwh_per_year() -> float:
    """Returns the electricity of an H100 at its limit for a year, with the overhead of a data centre."""
    watts = device("hardware=h100_sxm").tdp_w
    return float(EnergySettings().kwh(watts * YEAR_S))


def bytes_per_s(unit: float) -> float:
    """Returns the bytes per second that 100 tokens/s of a 7B model read, in units of so many."""
    point = decode("model=mistral_7b", "hardware=a100_80gb_sxm", context=1)
    return point.bytes_moved * TOKENS_PER_S / unit


def training_mfu(hardware: str, num_chips: int, parameters: float, tokens_per_s: float) -> float:
    """Returns the MFU of training without attention, in per cent: 6 FLOPs per parameter and token."""
    peak = num_chips * device(f"hardware={hardware}").peak_flops_per_s["bf16"]
    return 100 * 6 * parameters * tokens_per_s / peak


def bandwidth_tb_per_s(hardware: str) -> float:
    """Returns the memory bandwidth of a device, TB/s."""
    return device(f"hardware={hardware}").memory_bandwidth_bytes_per_s / 1e12
