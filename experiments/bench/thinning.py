"""Coverage of the intervals of thinned fleets: `python -m experiments.bench.thinning`.

Random fleets (router, load, lengths, sessions, size) run whole and thinned, with the same seed and until the
same time. Printed is, for each figure, the share of the fleets in which the interval of the thinned run has
the figure of the whole one in it, and the medians of half widths and differences, in percent of the figure.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from sim import simulate

ROUTERS = (
    "random",
    "round_robin",
    "weighted",
    "least_outstanding",
    "least_outstanding_tokens",
    "power_of_two",
)
CAPACITY_PER_S = 30.0
"""Requests/s of a replica with the default lengths, about."""
NAMES = (
    *((name, key) for name in ("ttft", "tpot", "e2e") for key in ("mean_s", "p50_s", "p90_s", "p99_s")),
    ("goodput", "share"),
    ("throughput", "requests_per_s"),
    ("throughput", "output_tokens_per_s"),
)


def random_fleet(draw: random.Random) -> tuple[int, list[str]]:
    """Returns `sim.thin` and the settings of a random fleet."""
    thin = draw.choice((4, 5, 10, 20))
    replicas = thin * draw.choice((16, 20, 32))
    load = draw.uniform(0.3, 0.9)
    settings = [
        f"replicas={replicas}",
        f"routing={draw.choice(ROUTERS)}",
        f"seed={draw.randrange(1000)}",
    ]
    requests = replicas * draw.choice((40, 60, 100))
    until_s = requests / (load * CAPACITY_PER_S * replicas)
    settings.append(f"sim.until_s={until_s:.4g}")
    if draw.random() < 0.25:
        rate = load * CAPACITY_PER_S * replicas / 6
        settings += [
            "workload=conversation",
            f"workload.num_conversations={requests // 6}",
            f"workload.arrivals.rate_per_s={rate}",
            "caching=paged",
        ]
    else:
        settings += [
            "workload=poisson",
            f"workload.num_requests={requests}",
            f"workload.arrivals.rate_per_s={load * CAPACITY_PER_S * replicas}",
            f"workload/lengths={draw.choice(('fixed', 'lognormal'))}",
        ]
    return thin, settings


def checked(thin: int, settings: Sequence[str]) -> Iterator[tuple[tuple[str, str], float, Mapping[str, Any]]]:
    """Yields the figures of the whole fleet beside those of the thinned one, with their bounds."""
    whole = simulate(*settings).summary
    part = simulate(*settings, f"sim.thin={thin}").summary["thinned"]
    for section, key in NAMES:
        if whole[section] is not None and whole[section][key] is not None:
            yield (section, key), whole[section][key], part[section][key]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per figure."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.thinning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fleets", type=int, default=200, help="number of random fleets")
    parser.add_argument("--seed", type=int, default=0, help="seed of the fleets")
    parser.add_argument("--misses", action="store_true", help="print the fleets of which a figure was missed")
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    held, widths, errors = (defaultdict(list) for _ in range(3))
    for _ in range(options.fleets):
        thin, settings = random_fleet(draw)
        for name, true, found in checked(thin, settings):
            low, high = (found[side] for side in ("low", "high"))
            tolerance = 1e-9 * abs(true)
            is_held = (low is None or low - tolerance <= true) and (high is None or true <= high + tolerance)
            held[name].append(is_held)
            if low is not None and high is not None and true:
                widths[name].append((high - low) / 2 / true)
                errors[name].append(abs(found["value"] - true) / true)
            if options.misses and not is_held:
                print(f"{name}: {true:.6g} not in {low} to {high}: sim.thin={thin} {' '.join(settings)}")
    print(f"{'figure':34}{'fleets':>7}{'covered':>9}{'half width':>12}{'difference':>12}")
    for name in held:
        share = sum(held[name]) / len(held[name])
        spread = median(widths[name]) if widths[name] else float("nan")
        error = median(errors[name]) if errors[name] else float("nan")
        print(f"{'.'.join(name):34}{len(held[name]):7}{share:9.1%}{spread:12.2%}{error:12.2%}")


if __name__ == "__main__":
    main()
