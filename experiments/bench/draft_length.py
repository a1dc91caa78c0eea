"""Draft lengths at loads from 1 to 100 % of capacity: `python -m experiments.bench.draft_length`.

Llama-3.1-8B on an H100 with EAGLE-3, 512 tokens in and 256 out, Poisson arrivals. Every choice gets the same
requests and the same acceptance. Printed is the mean TPOT of each number of draft tokens and of
draft_length=adaptive, with its distance from the best number at this load. The capacity is the rate at which
requests are completed if all are there from the start, with the best number.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sim import simulate

WORLD = (
    "model=llama3_1_8b",
    "hardware=h100_sxm",
    "slo=none",
    "workload=poisson",
    "speculation=eagle3",
    "speculation.num_speculative_tokens=5",
    "acceptance=by_position",
    "acceptance.rates=[0.72,0.68,0.66,0.64,0.62]",
)
CAPACITY_PER_S = 37.1  # requests/s of this world with 2 draft tokens; 33.0 without drafts
LOADS = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
LENGTHS = (0, 1, 2, 3, 4, 5)


def mean_tpot_s(choice: str, load: float, num_requests: int, *overrides: str) -> float:
    """Returns the mean TPOT of a draft length at a share of the capacity, in seconds."""
    arrivals = (
        f"workload.arrivals.rate_per_s={load * CAPACITY_PER_S}",
        f"workload.num_requests={num_requests}",
    )
    return float(simulate(*WORLD, *arrivals, choice, *overrides).summary["tpot"]["mean_s"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per load."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.draft_length",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=1500, help="number of requests of each run")
    parser.add_argument("overrides", nargs="*", help="further settings, such as acceptance.rates=[0.5,0.4]")
    options = parser.parse_args(arguments)
    header = "".join(f"{f'K={length}':>8}" for length in LENGTHS)
    print(f"{'TPOT in ms, load':18}{header}{'adaptive':>10}{'to best':>9}")
    for load in LOADS:
        settings = (load, options.requests, *options.overrides)
        fixed = [1e3 * mean_tpot_s(f"draft_length.num_tokens={length}", *settings) for length in LENGTHS]
        adaptive = 1e3 * mean_tpot_s("draft_length=adaptive", *settings)
        columns = "".join(f"{tpot:8.2f}" for tpot in fixed)
        print(f"{load:<18.0%}{columns}{adaptive:10.2f}{adaptive / min(fixed) - 1:+9.1%}", flush=True)


if __name__ == "__main__":
    main()
