"""`windtunnel place`: decides which models go on which GPUs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.app.run_folder import file_errors_reported, print_path
from experiments.app.settings.compose import Composition
from experiments.app.terminal import plain_table, terminal_console
from experiments.place.problem import Placed, place
from experiments.place.settings import read_settings
from sim.report.files import write_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceJob:
    """A placement, computed while the settings are checked, since unmeetable demand is a user's error."""

    placed: Placed

    def run(self, folder: Path) -> None:
        """Prints the placement and writes it to a file."""
        console, out = terminal_console(), self.placed.settings.out
        print_plan(self.placed, console)
        if out is not None:
            with file_errors_reported(Path(out), "choose another file with out="):
                write_whole(Path(out), json.dumps(as_json(self.placed), indent=2) + "\n")
            print_path(out, console)


def prepare(cfg: dict[str, Any], composition: Composition) -> PlaceJob:
    """Computes the placement. Raises ConfigError for every mistake of the user."""
    composed = composition.source.compose_plain(composition.overrides)  # limits depend on each GPU
    return PlaceJob(placed=place(read_settings(composed), composition.source.dirs))


def print_plan(placed: Placed, console: Console) -> None:
    """Prints what each GPU holds, what each model gets, and the totals."""
    plan, problem, unit = placed.plan, placed.problem, placed.settings.counts
    held = [["GPUs", "", "holds", "$/h"]]
    for found, count in sorted(plan.units, key=lambda pair: (pair[0].pool, pair[0].models)):
        rent = problem.pool(found.pool).usd_per_hour * found.num_gpus * count
        models = ", ".join(
            f"{found.models.count(name)} x {name}" if found.models.count(name) > 1 else name
            for name in dict.fromkeys(found.models)
        )
        held.append([f"{count * found.num_gpus}", found.pool, models, f"{rent:.2f}"])
    console.print(plain_table(held, label_columns=(1, 2)))
    served = [["model", "replicas", f"{unit} served", "demand", "value"]]
    for demand in problem.demands:
        amount = plan.served[demand.model]
        demanded = "all" if demand.rate is None else f"{demand.rate:,.0f}"
        replicas = str(plan.replicas.get(demand.model, 0))
        served.append([demand.model, replicas, f"{amount:,.1f}", demanded, f"{amount * demand.value:,.1f}"])
    console.print(plain_table(served))
    used = sum(plan.gpus.values())
    there = sum(pool.count for pool in problem.pools)
    console.print(
        f"value {plan.value:,.1f}, {used} of {there} GPUs, ${plan.usd_per_hour:.2f}/hour"
        f"{', all demands met' if plan.met else ''}",
        highlight=False,
    )
    for found, _ in plan.units if problem.time_shared else ():
        if len(found.models) > 1:
            console.print(
                f"{', '.join(found.models)} on one {found.pool}: while all models are busy, "
                "an iteration takes "
                f"{found.slowdown:.2f} times as long as alone ({1 - found.time_share:.1%} of the time is "
                "spent on switches)",
                style="dim",
                highlight=False,
            )
    for note in placed.notes:
        console.print(note, style="yellow", highlight=False)


def as_json(placed: Placed) -> dict[str, Any]:
    """Returns the content of the output file."""
    plan = placed.plan
    return {
        "units": [
            {
                "gpu": unit.pool,
                "gpus_each": unit.num_gpus,
                "count": count,
                "models": list(unit.models),
                "tokens_per_s_alone": list(unit.rates),
                "time_share": unit.time_share,
                "slowdown": unit.slowdown if placed.problem.time_shared else 1.0,
            }
            for unit, count in plan.units
        ],
        "served": dict(plan.served),
        "replicas": plan.replicas,
        "gpus": plan.gpus,
        "value": plan.value,
        "usd_per_hour": plan.usd_per_hour,
        "met": plan.met,
        "alone": placed.alone,
        "notes": placed.notes,
    }
