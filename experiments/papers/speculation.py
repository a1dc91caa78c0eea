"""Published speed-ups of speculative decoding beside those of the hardware models, row by row.

    python -m experiments.papers.speculation

A row is priced as one pass in the middle of the answers of a fixed batch:

    speed-up = seconds of a decode x tokens per pass / seconds of a pass with its drafting

`python -m experiments.papers.speculation --simulate` simulates one row of every kind of proposer,
with the tokens per pass as its acceptance, and prints the speed-up of the mean TPOT beside that of the price.

Prices in units of a pass use a latency level in which every pass of the target takes a second.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, repeat
from typing import Any, NamedTuple

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.papers.published_speedups import Comparison, Row
from experiments.papers.speculation_rows import COMPARISONS
from experiments.study.errors import SHARE, errors
from experiments.study.workers import whole
from hwmodels.exact import Num
from hwmodels.iterations import IterationModel, IterationShape
from hwmodels.levels import Calibrated, LatencyLevel, Replica
from hwmodels.speculation import decodes_with_drafts
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario
from sim.setup.deployment import Deployment
from sim.setup.scenario import Scenario
from sim.speculation.acceptance.lengths import rate_of_chain, rate_of_tree

PASS_S = 1.0


class ConstantModel:
    """An `IterationModel` of passes of one second; all other quantities come from the roofline."""

    def __init__(self, base: IterationModel) -> None:
        self._base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def seconds(self, shape: IterationShape) -> Num:
        """Returns a second, for each of several iterations too."""
        return PASS_S + 0.0 * shape.decode_context_tokens

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive iterations; see `IterationModel`."""
        return list(accumulate(repeat(PASS_S, num_iterations), initial=start_s))[1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantPasses:
    """A latency level whose passes last a second each, and whose drafts have the prices of `calibrated`."""

    def iteration_model(self, replica: Replica) -> IterationModel:
        """Returns the iteration model."""
        return ConstantModel(Calibrated().iteration_model(replica))

    def basis(self, replica: Replica) -> str:
        return "Iteration times: a second for every pass."


WIDTH = 100
SEQUENTIAL_REQUESTS = 8
"""Requests of a simulated row with one sequence at a time."""
MANY_TOKENS = 10_000
"""Output tokens of a simulated request with constant prices."""
RANK_DECAY = 0.32
"""Rate of further branches of a tree over that of the first: the default of the acceptance models."""


class Result(NamedTuple):
    """A published row and our speed-up."""

    comparison: Comparison
    row: Row
    ours: float

    @property
    def error(self) -> float:
        """Our speed-up relative to the published one, less 1."""
        return self.ours / self.row.published - 1


def results(comparisons: Iterable[Comparison] = COMPARISONS) -> Iterator[Result]:
    """Yields every row with our speed-up."""
    for comparison in comparisons:
        for row in comparison.rows:
            yield Result(comparison, row, speedup(comparison, row))


def speedup(comparison: Comparison, row: Row) -> float:
    """Returns the speed-up of a row by the price of a pass."""
    if row.draft_steps is not None:
        return row.tokens / (1 + row.draft_steps)
    alone, drafting = engines(comparison, row)
    batch, context = row.batch, comparison.context
    plain = IterationShape(batch, batch * context, 0, 0, 0, 0, batch)
    plain_s = deployment_of(alone).iteration_model().seconds(plain)
    deployment = deployment_of(drafting)
    proposer = deployment.speculation
    assert proposer is not None
    places = proposer.num_speculative_tokens
    at_once = batch if comparison.limit is None else min(batch, comparison.limit // (1 + places))
    shape = decodes_with_drafts(at_once, at_once * context, places)
    if proposer.tree is not None:
        assert shape.drafts is not None
        shape = shape._replace(drafts=shape.drafts._replace(steps=proposer.tree.depth))
    pass_s = deployment.iteration_model().seconds(shape)
    return float(plain_s * at_once / batch * row.tokens / pass_s)


def engines(comparison: Comparison, row: Row) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the settings of the engine without speculation and with it."""
    drafting = (*comparison.engine, *comparison.speculating, *row.draft)
    own_model = tuple(setting for setting in row.draft if setting.startswith("model="))
    return (*comparison.engine, *own_model), drafting


@cache
def scenario(settings: tuple[str, ...], latency: LatencyLevel | None = None) -> Scenario:
    """Returns the scenario with some settings of `windtunnel simulate`; latency: None for the default."""
    objects = {} if latency is None else {"latency": latency}
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    return build_scenario(source.compose(list(settings)), objects)


def deployment_of(settings: tuple[str, ...]) -> Deployment:
    """Returns the model, the engine and the hardware of a scenario."""
    return next(iter(scenario(settings).pools_by_name.values()))


def simulated(comparison: Comparison, row: Row, *, seed: int = 0) -> float:
    """Returns the speed-up of the mean TPOT in runs of the simulator, with a fixed batch of equal requests.

    The prompts are half of the context. All places of a draft, or of the first branch of a tree, have the
    rate with which a pass has the row's tokens. Rows with prices in units of a pass get these prices.

    seed: that of both runs.
    """
    is_constant = row.draft_steps is not None
    num_tokens = MANY_TOKENS if is_constant else comparison.context
    workload = (
        "workload=offline_batch",
        "workload/lengths=fixed",
        f"workload.num_requests={row.batch if row.batch > 1 else SEQUENTIAL_REQUESTS}",
        f"workload.lengths.prompt_tokens.value={comparison.context // 2}",
        f"workload.lengths.output_tokens.value={num_tokens}",
        f"engine.max_num_seqs={row.batch}",
        "slo=none",
        f"seed={seed}",
    )
    alone, drafting = engines(comparison, row)
    proposer = deployment_of(drafting).speculation
    assert proposer is not None
    rate = (
        rate_of_chain(row.tokens, proposer.num_speculative_tokens)
        if proposer.tree is None
        else rate_of_tree(row.tokens, proposer.tree, RANK_DECAY)
    )
    drafting += ("acceptance=iid", f"acceptance.rate={rate}", f"acceptance.rank_decay={RANK_DECAY}")
    if is_constant:
        drafting += (f"+speculation.draft.start_s={row.draft_steps}",)
    latency = ConstantPasses() if is_constant else None
    alone_s, drafting_s = (
        whole(scenario((*settings, *workload), latency).run()).summary["tpot"]["mean_s"]
        for settings in (alone, drafting)
    )
    return float(alone_s / drafting_s)


def kinds() -> Iterator[tuple[Comparison, Row]]:
    """Yields the first row of every proposer, with chains and trees, one sequence and batches.

    Yields all rows with prices in units of a pass.
    """
    seen = set()
    for comparison in COMPARISONS:
        for row in comparison.rows:
            kind = [setting for setting in row.draft if setting.startswith(("speculation=", "speculation/"))]
            key = (*kind, row.batch > 1, row.draft_steps)
            if key not in seen and not comparison.shares_memory:
                seen.add(key)
                yield comparison, row


def report(found: Iterable[Result]) -> Iterator[str]:
    """Yields the lines of the table: rows by comparison, each with its source and the reason for errors."""
    groups: dict[str, list[Result]] = {}
    for result in found:
        groups.setdefault(result.comparison.name, []).append(result)
    yield f"{'speed-up':30} {'tokens/pass':>12} {'published':>10} {'ours':>6} {'error':>7}"
    for group in groups.values():
        comparison = group[0].comparison
        yield ""
        yield from wrapped(f"{comparison.name}. {comparison.source}.")
        for result in group:
            yield line_of(result)
        yield from wrapped(f"Median error {percent(median_error(group))}. {comparison.reason}")
    rows = [result for group in groups.values() for result in group]
    parts = {
        "all rows": rows,
        "with published tokens per pass": [result for result in rows if not result.row.assumed],
        "to which nothing is fitted": [result for result in rows if not result.comparison.is_fitted],
    }
    yield ""
    for name, part in parts.items():
        yield f"Median absolute error, {name}: {percent(median_error(part))} of {len(part)}"


def line_of(result: Result) -> str:
    """Returns the line of a row; tokens per pass with a star are assumed."""
    row = result.row
    tokens = f"{row.tokens:.2f}{'*' if row.assumed else ' '}"
    return f"  {row.setting:28} {tokens:>12} {row.published:10.2f} {result.ours:6.2f} {result.error:+7.1%}"


def median_error(found: Iterable[Result]) -> float:
    """Returns the median of the absolute errors, as a share."""
    rows = list(found)
    return errors([row.ours for row in rows], [row.row.published for row in rows], unit=SHARE).median


def percent(share: float) -> str:
    """Returns a share in per cent."""
    return f"{100 * share:.1f} %"


def wrapped(text: str) -> list[str]:
    """Returns a text in lines."""
    return textwrap.wrap(text, WIDTH)


def main() -> None:
    """Prints the table, or one simulated row of every proposer."""
    parser = argparse.ArgumentParser(description="Published speed-ups of speculative decoding beside ours")
    parser.add_argument("--simulate", action="store_true", help="simulate one row of every proposer")
    if not parser.parse_args().simulate:
        print("\n".join(report(results())))
        return
    for comparison, row in kinds():
        priced, run = speedup(comparison, row), simulated(comparison, row)
        print(f"{comparison.name:28} {row.setting:26} price {priced:.2f}, simulator {run:.2f}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
