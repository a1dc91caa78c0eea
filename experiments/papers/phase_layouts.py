"""DistServe's placement search: layouts and numbers of replicas for disaggregated prefill and decode.

    python -m experiments.papers.phase_layouts --gpus 8 --tp 1 2 4 --pp 1 2 -- [override of `simulate` ...]

After Zhong et al., "DistServe", OSDI 2024, section 4.1 (high node-affinity), with our simulator instead of
the paper's. For each layout it finds the largest request rate that one replica of either phase serves alone
within its part of the SLO: TTFT for prefill, TPOT for decode. The layouts with the largest rate per GPU win;
each phase gets as many replicas as the GPUs allow and the slower phase needs. The whole is then simulated,
beside co-located replicas of every layout on the same GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.study.workers import whole
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario

SEARCH_RATIO = 1.06
"""Precision of a rate: the next larger rate tried is this many times as large, and fails."""
NUM_REQUESTS = 500
"""Minimum number of requests; high rates get as many as last MIN_RUN_S, so that not only a burst is tried."""
MIN_RUN_S = 30.0
MAX_RATE = 1e5


class Layout(NamedTuple):
    """Parallel layout of a replica."""

    tensor: int
    pipeline: int

    @property
    def num_gpus(self) -> int:
        return self.tensor * self.pipeline

    @property
    def overrides(self) -> list[str]:
        return [f"tensor_parallel_size={self.tensor}", f"pipeline_parallel_size={self.pipeline}"]

    def __str__(self) -> str:
        return f"TP{self.tensor} PP{self.pipeline}"


class Placement(NamedTuple):
    """Layouts and numbers of replicas of both phases."""

    prefill: Layout
    num_prefill: int
    decode: Layout
    num_decode: int

    @property
    def num_gpus(self) -> int:
        return self.num_prefill * self.prefill.num_gpus + self.num_decode * self.decode.num_gpus

    def __str__(self) -> str:
        return f"{self.num_prefill} x prefill {self.prefill}, {self.num_decode} x decode {self.decode}"


def largest_rate(
    holds: Callable[[float], bool], start: float = 1.0, ratio: float = SEARCH_RATIO, step: float = 2.0
) -> float:
    """Returns the largest rate that holds, up to a factor of `ratio`, assuming all smaller rates hold.

    Returns 0 if it is below 1e-3. The search starts at `start` and moves by factors of `step`. Raises
    ValueError if MAX_RATE holds.
    """
    low, high = 0.0, start
    while holds(high):
        if high > MAX_RATE:
            raise ValueError(f"{MAX_RATE:g} requests/s meet the SLO: it limits nothing; make it tighter")
        low, high = high, high * step
    while not low:
        if high < 1e-3:
            return 0.0
        low, high = (high / step, high) if holds(high / step) else (0.0, high / step)
    while high / low > ratio:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def best_placement(prefill: dict[Layout, float], decode: dict[Layout, float], num_gpus: int) -> Placement:
    """Returns the placement with the largest rate, of each phase's layout with the largest rate per GPU.

    prefill, decode: requests/s that one replica serves. Of equal placements, the one with the fewest GPUs
    wins. Raises ValueError if none fits.
    """
    layouts = [
        max((layout for layout, rate in rates.items() if rate), key=lambda lay: rates[lay] / lay.num_gpus)
        for rates in (prefill, decode)
    ]
    one, other = layouts
    placements = [
        Placement(one, x, other, y)
        for x in range(1, num_gpus // one.num_gpus + 1)
        for y in range(1, num_gpus // other.num_gpus + 1)
    ]
    fitting = [placement for placement in placements if placement.num_gpus <= num_gpus]
    if not fitting:
        raise ValueError(
            f"gpus={num_gpus}: must be >= {one.num_gpus + other.num_gpus}, one replica of each phase"
        )
    return max(
        fitting,
        key=lambda p: (min(p.num_prefill * prefill[one], p.num_decode * decode[other]), -p.num_gpus),
    )


class Search:
    """Finds rates of whole services and of single phases, with the same requests at different rates."""

    def __init__(self, overrides: Sequence[str], num_requests: int = NUM_REQUESTS) -> None:
        self._source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
        self._common = list(overrides)
        self._num_requests = num_requests

    def rate(self, *overrides: str) -> float:
        """Returns the requests/s that attain the SLO; 0 if a replica's GPUs cannot hold the model."""

        @cache
        def holds(rate_per_s: float) -> bool:
            num_requests = max(self._num_requests, int(rate_per_s * MIN_RUN_S))
            traffic = [f"workload.arrivals.rate_per_s={rate_per_s}", f"workload.num_requests={num_requests}"]
            scenario = build_scenario(self._source.compose([*self._common, *overrides, *traffic]))
            return bool(whole(scenario.run()).summary["goodput"]["attained"])

        try:
            return largest_rate(holds)
        except ValueError as error:
            if "memory" in str(error):
                return 0.0
            raise

    def prefill_rate(self, layout: Layout) -> float:
        """Returns the rate of one replica that only computes prompts."""
        return self.rate(
            "batching=prefill_first", "workload.max_tokens=1", "slo.tpot_ms=null", *layout.overrides
        )

    def decode_rate(self, layout: Layout, feeder: Layout, num_feeders: int = 64) -> float:
        """Returns the rate of one replica that decodes, fed by more prefill replicas than it needs."""
        return self.rate(
            "slo.ttft_ms=null",
            "routing=least_outstanding_tokens",
            *pool_overrides(Placement(feeder, num_feeders, layout, 1)),
        )

    def placed_rate(self, placement: Placement) -> float:
        """Returns the rate of a whole disaggregated service."""
        return self.rate("routing=least_outstanding_tokens", *pool_overrides(placement))

    def colocated_rate(self, layout: Layout, num_gpus: int, *batching: str) -> float:
        """Returns the rate of co-located replicas that fill the GPUs."""
        replicas = f"replicas={num_gpus // layout.num_gpus}"
        return self.rate("routing=least_outstanding", replicas, *batching, *layout.overrides)


def pool_overrides(placement: Placement) -> list[str]:
    """Returns the overrides of a placement, based on the shipped pools of both roles."""
    overrides = ["pools=disaggregated"]
    for name, layout, count in (
        ("prefill", placement.prefill, placement.num_prefill),
        ("decode", placement.decode, placement.num_decode),
    ):
        own = [f"replicas={count}", *layout.overrides]
        overrides += [f"+pools.{name}.{override}" for override in own[1:]] + [f"pools.{name}.{own[0]}"]
    return overrides


def main() -> None:
    """Runs the search and prints one line per result."""
    parser = argparse.ArgumentParser(
        description="DistServe's placement search: layouts of disaggregated prefill and decode"
    )
    parser.add_argument("--gpus", type=int, default=8, help="number of GPUs")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4], help="tensor-parallel sizes to try")
    parser.add_argument("--pp", type=int, nargs="+", default=[1], help="pipeline-parallel sizes to try")
    parser.add_argument(
        "--requests", type=int, default=NUM_REQUESTS, help="minimum number of requests per run"
    )
    parser.add_argument(
        "--colocated", nargs="+", default=["batching=prefill_first"], help="overrides of co-located replicas"
    )
    parser.add_argument("overrides", nargs="*", help="overrides of `windtunnel simulate`, after --")
    given = parser.parse_args()
    layouts = [Layout(tp, pp) for tp, pp in product(given.tp, given.pp) if tp * pp < given.gpus]
    search = Search(given.overrides, given.requests)
    prefill = {layout: search.prefill_rate(layout) for layout in layouts}
    feeder = max(prefill, key=lambda layout: prefill[layout] / layout.num_gpus)
    decode = {layout: search.decode_rate(layout, feeder) for layout in layouts}
    print(f"{'layout':>12} {'prefill/GPU':>12} {'decode/GPU':>12} {'co-located/GPU':>15}  requests/s")
    whole = [*layouts, *(Layout(tp, pp) for tp, pp in product(given.tp, given.pp) if tp * pp == given.gpus)]
    best = 0.0
    for layout in whole:
        colocated = search.colocated_rate(layout, given.gpus, *given.colocated) / given.gpus
        best = max(best, colocated)
        alone = [rates.get(layout, 0.0) / layout.num_gpus for rates in (prefill, decode)]
        print(f"{layout!s:>12} {alone[0]:>12.3f} {alone[1]:>12.3f} {colocated:>15.3f}", flush=True)
    placement = best_placement(prefill, decode, given.gpus)
    rate = search.placed_rate(placement) / placement.num_gpus
    print(
        f"{placement}: {rate:.3f} requests/s per GPU, {rate / best:.2f} x the best co-located"
        if best
        else placement
    )


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
