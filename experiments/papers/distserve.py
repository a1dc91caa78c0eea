"""DistServe's experiments: prefill and decode on GPUs of their own against vLLM, as in its artifact.

    python -m experiments.papers.distserve

After Zhong et al., "DistServe", OSDI 2024, section 6.2 (figures 8 and 9), and the scripts of its artifact
(github.com/LLMServe/DistServe, `evaluation/`): lengths, limits, layouts, batch limits, and 25 to 100 requests
per GPU. The figure is the largest request rate with 90 % of the requests within both limits. The paper runs
each rate once; here the requests of several seeds are counted together. Iteration times are those that the
authors measured for either engine (`distserve_prices.py`), or those of our roofline. The table has the
figures with one thing changed at a time.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.papers.distserve_lengths import Draw, humaneval, longbench, sharegpt, with_lognormal_outputs
from experiments.papers.distserve_prices import Profiled
from experiments.papers.phase_layouts import SEARCH_RATIO, Layout, Placement, largest_rate, pool_overrides
from experiments.study.workers import whole
from sim.settings.scenario import build_scenario

Engine = Literal["vllm", "distserve"]

MODELS = {  # an MLP's two matrices become three of the same total size
    name: [
        "model=llama2_70b",
        f"model.name={name}",
        f"model.config.num_hidden_layers={layers}",
        f"model.config.hidden_size={hidden}",
        f"model.config.num_attention_heads={heads}",
        f"model.config.num_key_value_heads={heads}",
        f"model.config.intermediate_size={8 * hidden // 3}",
        "model.config.vocab_size=50272",
        "model.config.max_position_embeddings=2048",
    ]
    for name, layers, hidden, heads in (("opt-13b", 40, 5120, 40), ("opt-66b", 64, 9216, 72))
}
COMMON = [
    "hardware=a100_80gb_sxm",
    "workload=plain_csv",
    "engine=vllm_v0",
    "engine.max_num_seqs=1024",
    "engine.gpu_memory_utilization=0.95",
    "engine.frontend_s=0",
    "engine.frontend=null",
    "kv_transfer.first_token_at=prefill",
    "signal_age_s=0",
]
MAX_TOKENS = {"vllm": 16_384, "distserve": 8_192}
"""Tokens of an iteration in the artifact's scripts."""
TARGET = 0.9
NUM_SEEDS = 4
ENGINES: tuple[Engine, Engine] = ("distserve", "vllm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Application:
    """An application of the paper with its model, limits and layouts."""

    name: str
    published: tuple[float, float]
    """Requests/s per GPU of DistServe and vLLM: figures 8 and 9, also in the artifact's notebook."""
    model: str
    mean_output: float
    """Mean output tokens (section 6.1)."""
    lengths: Draw
    ttft_s: float
    tpot_s: float
    vllm: Layout
    prefill: Layout
    decode: Layout
    requests_per_gpu: int
    start: float
    """Requests/s per GPU at which searches start."""

    def num_gpus(self, engine: Engine) -> int:
        """Returns the GPUs of one replica of vLLM, or of one prefill and one decode replica."""
        return self.vllm.num_gpus if engine == "vllm" else self.prefill.num_gpus + self.decode.num_gpus

    def overrides(self, engine: Engine) -> list[str]:
        """Returns the settings of `windtunnel simulate`, without requests."""
        limits = [f"slo.ttft_ms={1e3 * self.ttft_s}", f"slo.tpot_ms={1e3 * self.tpot_s}"]
        own = [f"engine.max_num_batched_tokens={MAX_TOKENS[engine]}", *MODELS[self.model], *limits]
        if engine == "vllm":
            return [*own, "batching=prefill_first", *self.vllm.overrides]
        return [*own, *pool_overrides(Placement(self.prefill, 1, self.decode, 1))]


CHAT = Application(
    name="chatbot",
    published=(2.3, 0.5),
    mean_output=200,
    model="opt-13b",
    lengths=sharegpt,
    ttft_s=0.25,
    tpot_s=0.1,
    vllm=Layout(1, 1),
    prefill=Layout(2, 1),
    decode=Layout(1, 1),
    requests_per_gpu=100,
    start=0.5,
)
CODE = Application(
    name="code completion",
    published=(1.14, 0.2),
    mean_output=98,
    model="opt-66b",
    lengths=humaneval,
    ttft_s=0.125,
    tpot_s=0.2,
    vllm=Layout(4, 1),
    prefill=Layout(4, 1),
    decode=Layout(2, 2),
    requests_per_gpu=50,
    start=0.25,
)
SUMMARIES = Application(
    name="summarisation",
    published=(0.53, 0.125),
    mean_output=91,
    model="opt-66b",
    lengths=longbench,
    ttft_s=15,
    tpot_s=0.15,
    vllm=Layout(4, 1),
    prefill=Layout(4, 1),
    decode=Layout(2, 2),
    requests_per_gpu=25,
    start=0.125,
)

APPLICATIONS = (CHAT, CODE, SUMMARIES)


@contextmanager
def attainment(
    application: Application,
    engine: Engine,
    num_seeds: int,
    *,
    priced_as: Engine | None = None,
    num_runs: int = 1,
) -> Iterator[Callable[[float], float]]:
    """Yields a function of the requests/s per GPU: the share of the requests within both limits.

    priced_as: engine whose measured times are used; None: our roofline. num_runs: factor on the number of
    requests.
    """
    num_gpus = application.num_gpus(engine)
    num_requests = application.requests_per_gpu * num_gpus * num_runs
    profiled = None if priced_as is None else Profiled(engine=priced_as, model=application.model)
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{seed}.csv" for seed in range(num_seeds)]
        for seed, path in enumerate(paths):
            _write_requests(path, application, num_requests, seed)
        config = source.compose([*COMMON, f"workload.path={paths[0]}", *application.overrides(engine)])

        def share(rate: float) -> float:
            config.load = rate * num_gpus
            shares = []
            for path in paths:
                config.workload.path = str(path)
                scenario = build_scenario(config)
                if profiled is not None:
                    pools = {name: replace(pool, latency=profiled) for name, pool in scenario.pools.items()}
                    scenario = replace(scenario, latency=profiled, pools=pools)
                shares.append(whole(scenario.run()).summary["goodput"]["share"])
            return float(np.mean(shares))

        yield share


def largest_attained(
    application: Application,
    engine: Engine,
    num_seeds: int,
    *,
    priced_as: Engine | None = None,
    num_runs: int = 1,
) -> float:
    """Returns the largest requests/s per GPU with TARGET of the requests within both limits.

    priced_as, num_runs: as for `attainment`.
    """
    with attainment(application, engine, num_seeds, priced_as=priced_as, num_runs=num_runs) as share:
        return largest_rate(lambda rate: share(rate) >= TARGET, start=application.start, ratio=SEARCH_RATIO)


def gain(application: Application, num_seeds: int = NUM_SEEDS) -> float:
    """Returns DistServe's largest rate per GPU over vLLM's, each with its own measured times."""
    ours, other = (largest_attained(application, engine, num_seeds, priced_as=engine) for engine in ENGINES)
    return ours / other


def attained_as_published(application: Application, engine: Engine) -> float:
    """Returns the share of the requests within both limits at the engine's published rate, with its times."""
    rate = application.published[ENGINES.index(engine)]
    with attainment(application, engine, NUM_SEEDS, priced_as=engine) as share:
        return share(rate)


def _write_requests(path: Path, application: Application, num_requests: int, seed: int) -> None:
    """Writes requests with Poisson arrivals at 1 request/s."""
    rng = np.random.default_rng(seed)
    arrivals = rng.exponential(size=num_requests).cumsum().round(7)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arrival_s", "prompt_tokens", "output_tokens"])
        writer.writerows(zip(arrivals, *application.lengths(rng, num_requests), strict=True))


def variants(application: Application) -> dict[str, Callable[[Engine, int], float]]:
    """Returns the searches of the table by name: of an engine and a number of seeds."""
    spread = replace(
        application, lengths=with_lognormal_outputs(application.lengths, application.mean_output)
    )
    return {
        "as in the artifact": lambda engine, n: largest_attained(application, engine, n, priced_as=engine),
        "DistServe's times for both": lambda engine, n: largest_attained(
            application, engine, n, priced_as="distserve"
        ),
        "our roofline for both": lambda engine, n: largest_attained(application, engine, n),
        "lognormal outputs": lambda engine, n: largest_attained(spread, engine, n, priced_as=engine),
        "our roofline, lognormal outputs": lambda engine, n: largest_attained(spread, engine, n),
        "ten times as many requests": lambda engine, n: largest_attained(
            application, engine, n, priced_as=engine, num_runs=10
        ),
    }


def main() -> None:
    """Prints one line per variant of each application."""
    parser = argparse.ArgumentParser(description="DistServe's experiments: largest requests/s per GPU")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help=f"number of seeds; default: {NUM_SEEDS}")
    names = [application.name for application in APPLICATIONS]
    parser.add_argument("--applications", nargs="+", choices=names, default=names, help="default: all")
    given = parser.parse_args()
    if given.seeds < 1:
        parser.error(f"--seeds {given.seeds}: must be >= 1")
    for application in APPLICATIONS:
        if application.name not in given.applications:
            continue
        print(f"{application.name:<31}  DistServe   vLLM  ratio")
        _print_rates("published", *application.published)
        for name, search in variants(application).items():
            _print_rates(name, *(search(engine, given.seeds) for engine in ENGINES))


def _print_rates(name: str, ours: float, other: float) -> None:
    print(
        f"  {name:<31} {ours:>7.3f} {other:>6.3f} {ours / other if other else float('inf'):>6.1f}", flush=True
    )


if __name__ == "__main__":
    main()
