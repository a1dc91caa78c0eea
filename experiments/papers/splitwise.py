"""Splitwise's cluster designs: separate machines for prompts and for tokens, at equal power or equal cost.

    python -m experiments.papers.splitwise AzureLLMInferenceTrace_conv.csv --budget power --prices ours

After Patel et al., "Splitwise", ISCA 2024, section VI, at a fifth of its size: BLOOM-176B on DGX machines,
one replica each; prompt and output lengths drawn independently from an Azure trace, Poisson arrivals. The
figure is the largest request rate at which nine terms hold: 50, 90 and 99 % of the requests within given
multiples of their times alone on a DGX-A100 (`SLOWDOWNS`). All designs get the same requests and, up to the
rate, the same gaps between them.

Not modelled: the pool of machines that change sides, and the effect of a power cap on a GPU's clocks. Capped
token machines (HHcap) run as if uncapped, as the paper finds; the cap counts in their power.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.papers.phase_layouts import largest_rate
from experiments.papers.splitwise_prices import AS_SIMULATED, AS_TIMED, Timed
from sim.metrics.confidence import mean_interval
from sim.metrics.measured import request_metrics
from sim.records.table import to_pandas
from sim.report.numbers import with_interval
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario
from sim.setup.scenario import Scenario

A100, H100 = "a100_80gb_sxm", "h100_sxm"
COST = {A100: 17.6, H100: 38.0}
"""USD per hour of a machine with eight GPUs (table V)."""
POWER = {A100: 1.0, H100: 1.75}
"""Power of a machine, relative to a DGX-A100 (table V)."""
CAP = 0.7
"""Power of a capped machine, as a share."""
SLOWDOWNS: Mapping[str, Sequence[float]] = {
    "ttft_s": (2, 3, 6),
    "tpot_s": (1.25, 1.5, 5),
    "e2e_s": (1.25, 1.5, 5),
}
"""Limits for 50, 90 and 99 % of the requests, relative to each request alone (table VI)."""
PERCENTILES = (50, 90, 99)
SEARCH_RATIO = 1.05
"""Precision of a rate."""
SEARCH_STEP = 1.3
START_RATE = 12.0
MAX_RATE = 64
BLOOM = [  # an MLP's two 4 x 14336 matrices become three of the same total size
    "model=llama2_70b",
    "model.name=bloom-176b",
    "model.config.num_hidden_layers=70",
    "model.config.hidden_size=14336",
    "model.config.num_attention_heads=112",
    "model.config.num_key_value_heads=112",
    "model.config.intermediate_size=38232",
    "model.config.vocab_size=250880",
    "model.config.max_position_embeddings=16384",
]
COMMON = [
    "tensor_parallel_size=8",
    "engine=vllm_v0",
    "engine.max_num_batched_tokens=2048",
    "engine.max_num_seqs=512",
    "engine.frontend_s=0",
    "engine.frontend=null",
    "kv_transfer.first_token_at=prefill",
    "slo=none",
    "signal_age_s=0",
    "routing=least_outstanding_tokens",
    "routing@decode_routing=join_shortest_kv",
    "workload=plain_csv",
]
BASELINE_BATCHING = ["batching=prefill_first"]
"""Whole prompts first, up to 2,048 tokens per iteration, as in vLLM of 2023.

In the paper, decodes run in the same
iterations, for a tenth more time: `batching=orca` does that, without a limit.
"""


class Design(NamedTuple):
    """A cluster: co-located machines, or separate prompt and token machines."""

    name: str
    prompt: str
    num_prompt: int
    token: str = ""
    num_token: int = 0
    is_capped: bool = False
    """True if the token machines are power-capped."""

    @property
    def cost(self) -> float:
        """USD per hour."""
        token = COST[self.token] * self.num_token if self.token else 0
        return COST[self.prompt] * self.num_prompt + token

    @property
    def power(self) -> float:
        """Power, in units of a DGX-A100."""
        share = CAP if self.is_capped else 1.0
        token = POWER[self.token] * self.num_token * share if self.token else 0
        return POWER[self.prompt] * self.num_prompt + token

    @property
    def overrides(self) -> list[str]:
        if not self.token:
            return [f"hardware={self.prompt}", f"replicas={self.num_prompt}"]
        return [
            "pools=disaggregated",
            f"pools.prefill.hardware={self.prompt}",
            f"pools.prefill.replicas={self.num_prompt}",
            f"pools.decode.hardware={self.token}",
            f"pools.decode.replicas={self.num_token}",
        ]

    def __str__(self) -> str:
        machines = f"{self.num_prompt}P, {self.num_token}T" if self.token else str(self.num_prompt)
        return f"{self.name} ({machines})"


LENGTHS = ["ContextTokens", "GeneratedTokens"]
BUDGETS = {  # a fifth of the paper's machines, for the conversations
    "power": [
        Design("Baseline-A100", A100, 14),
        Design("Baseline-H100", H100, 8),
        Design("Splitwise-AA", A100, 9, A100, 5),
        Design("Splitwise-HH", H100, 5, H100, 3),
        Design("Splitwise-HA", H100, 5, A100, 5),
        Design("Splitwise-HHcap", H100, 5, H100, 4, is_capped=True),
    ],
    "cost": [
        Design("Baseline-A100", A100, 17),
        Design("Baseline-H100", H100, 8),
        Design("Splitwise-AA", A100, 10, A100, 7),
        Design("Splitwise-HH", H100, 5, H100, 3),
        Design("Splitwise-HA", H100, 6, A100, 4),
        Design("Splitwise-HHcap", H100, 6, H100, 2, is_capped=True),
    ],
}


def slowdowns(requests: pd.DataFrame, alone: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Computes the `PERCENTILES` of each term's ratios; requests[i] is the same request as alone[i]."""
    alone = alone.iloc[: len(requests)]
    return {
        term: np.nanpercentile(requests[term].to_numpy() / alone[term].to_numpy(), PERCENTILES)
        for term in SLOWDOWNS
    }


def holds(found: Mapping[str, NDArray[np.float64]]) -> bool:
    """Returns whether all nine terms hold."""
    return all((found[term] <= limits).all() for term, limits in SLOWDOWNS.items())


def failing(found: Mapping[str, NDArray[np.float64]]) -> str:
    """Lists the terms that do not hold."""
    return ", ".join(
        f"{term[:-2]} p{percentile} {value:.2f}"
        for term, limits in SLOWDOWNS.items()
        for percentile, value, limit in zip(PERCENTILES, found[term], limits, strict=True)
        if value > limit
    )


def write_requests(path: Path, lengths: pd.DataFrame, num_requests: int, seed: int) -> None:
    """Writes requests with Poisson arrivals at 1 request/s and lengths drawn from `lengths`."""
    rng = np.random.default_rng(seed)
    arrivals = rng.exponential(size=num_requests).cumsum()
    prompts = rng.choice(lengths["ContextTokens"].to_numpy(), num_requests)
    answers = rng.choice(lengths["GeneratedTokens"].to_numpy(), num_requests)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arrival_s", "prompt_tokens", "output_tokens"])
        writer.writerows(zip(arrivals.round(7), prompts, answers, strict=True))


class Trial:
    """Requests of one seed, simulated on any design."""

    def __init__(
        self,
        path: Path,
        duration_s: float,
        prices: Timed | None,
        overrides: Sequence[str] = (),
        batching: Sequence[str] = BASELINE_BATCHING,
    ) -> None:
        self._source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
        self._common = [*COMMON, f"workload.path={path}", *overrides]
        self._batching = batching
        self._duration_s = duration_s
        self._prices = prices
        self._alone = self._run(Design("alone", A100, 1), "load=1e-3")

    def rate(self, design: Design, start: float = START_RATE) -> float:
        """Returns the largest requests/s that the design serves within all terms, searched from `start`."""

        @cache
        def attained(rate_per_s: float) -> bool:
            return holds(self.slowdowns(design, rate_per_s))

        return largest_rate(attained, start=start, ratio=SEARCH_RATIO, step=SEARCH_STEP)

    def slowdowns(self, design: Design, rate_per_s: float) -> dict[str, NDArray[np.float64]]:
        """Computes the slowdowns of a design at a request rate."""
        num_requests = int(rate_per_s * self._duration_s)
        if num_requests > len(self._alone):
            raise ValueError(f"{rate_per_s:g} requests/s: more requests than were drawn")
        scale = [f"load={rate_per_s}", f"workload.max_requests={num_requests}"]
        return slowdowns(self._run(design, *scale), self._alone)

    def _run(self, design: Design, *overrides: str) -> pd.DataFrame:
        batching = [] if design.token else self._batching
        config = self._source.compose([*self._common, *batching, *design.overrides, *overrides])
        scenario = self._priced(build_scenario(config))
        records = scenario.simulate(scenario.source())
        if records.interrupted:
            raise KeyboardInterrupt  # an incomplete run has no figures
        return request_metrics(to_pandas(records.requests), None)

    def _priced(self, scenario: Scenario) -> Scenario:
        if self._prices is None:
            return scenario
        pools = {name: replace(pool, latency=self._prices) for name, pool in scenario.pools.items()}
        return replace(scenario, latency=self._prices, pools=pools)


class Prices(NamedTuple):
    """Iteration times, and the overrides that belong to them."""

    timed: Timed | None
    """None: our roofline."""
    overrides: Sequence[str] = ()


PRICES = {
    "ours": Prices(None),
    "measured": Prices(AS_TIMED),
    "splitwisesim": Prices(
        AS_SIMULATED, ["engine.gpu_memory_utilization=1"]
    ),  # its memory holds only weights and KV
}


def best_split(design: Design, rate: Callable[[Design], float], budget: str) -> tuple[Design, float]:
    """Returns the design with the best number of prompt machines and its rate; the rest are token machines.

    The search starts at the given number. budget: cost or power, which must not exceed that of Baseline-H100.
    """
    limit = getattr(_of(budget, "Baseline-H100"), budget)

    def split(num_prompt: int) -> Design:
        prompts, one = (design._replace(num_prompt=num_prompt, num_token=n) for n in (0, 1))
        spent = getattr(prompts, budget)
        return prompts._replace(num_token=int((limit - spent) / (getattr(one, budget) - spent) + 1e-9))

    best = (design, rate(design))
    for step in (1, -1):
        while True:
            tried = split(best[0].num_prompt + step)
            if not (tried.num_prompt > 0 and tried.num_token > 0) or (served := rate(tried)) <= best[1]:
                break
            best = (tried, served)
    return best


def _of(budget: str, name: str) -> Design:
    return next(design for design in BUDGETS[budget] if design.name == name)


def read_lengths(trace: Path) -> pd.DataFrame:
    """Reads ContextTokens and GeneratedTokens of an Azure trace. Raises ConfigError for another file."""
    try:
        return pd.read_csv(trace, usecols=LENGTHS)
    except (OSError, ValueError) as error:
        message = str(error).splitlines()[0]
        raise ConfigError(
            f"{trace}: must be a CSV with the columns {' and '.join(LENGTHS)}; {message}"
        ) from error


def main() -> None:
    """Prints one line per design."""
    parser = argparse.ArgumentParser(
        description="Splitwise's cluster designs: the largest request rate of each"
    )
    parser.add_argument("trace", type=Path, help="Azure trace of 2023, the source of the lengths")
    parser.add_argument(
        "--budget", choices=list(BUDGETS), default="power", help="what all designs share; default: power"
    )
    parser.add_argument(
        "--prices", choices=list(PRICES), default="ours", help="iteration times; default: ours"
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds; default: 3")
    parser.add_argument("--duration-s", type=float, default=150.0, help="seconds of arrivals; default: 150")
    names = sorted({design.name for designs in BUDGETS.values() for design in designs})
    parser.add_argument("--designs", nargs="+", choices=names, help="run only these designs")
    parser.add_argument(
        "--batching", nargs="+", default=BASELINE_BATCHING, help="overrides of the baselines' batching"
    )
    parser.add_argument(
        "--best-split", action="store_true", help="search the best split into prompt and token machines"
    )
    given = parser.parse_args()
    if given.seeds < 1 or not given.duration_s > 0:
        parser.error(
            f"--seeds {given.seeds} --duration-s {given.duration_s:g}: --seeds must be >= 1 and "
            "--duration-s > 0 s"
        )
    lengths, prices = read_lengths(given.trace), PRICES[given.prices]
    with TemporaryDirectory() as folder:
        trials = []
        for seed in range(given.seeds):
            path = Path(folder) / f"{seed}.csv"
            write_requests(path, lengths, int(given.duration_s * MAX_RATE), seed)
            trials.append(
                Trial(path, given.duration_s, prices.timed, [*BLOOM, *prices.overrides], given.batching)
            )
        print(
            f"{'design':>26} {'USD/h':>6} {'power':>6} {'requests/s':>12}  {'by seed':<20} terms "
            "that fail above"
        )
        for design in BUDGETS[given.budget]:
            if given.designs and design.name not in given.designs:
                continue
            if given.best_split and design.token:
                design, _ = best_split(design, trials[0].rate, given.budget)
            rates: list[float] = []
            for trial in trials:
                rates.append(trial.rate(design, start=rates[-1] if rates else START_RATE))
            each = " ".join(f"{rate:.1f}" for rate in rates)
            beyond = failing(trials[0].slowdowns(design, rates[0] * SEARCH_RATIO))
            figures = f"{design.cost:>6.0f} {design.power:>6.1f} {with_interval(mean_interval(rates)):>12}"
            print(f"{design!s:>26} {figures}  {each:<20} {beyond}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
