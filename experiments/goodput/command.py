"""`windtunnel goodput`: SLO attainment against the request rate, and the highest rate that keeps the SLO."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.app.terminal import terminal_console
from experiments.goodput.arms import build_arms
from experiments.goodput.page import write_goodput
from experiments.goodput.results import Highest, highest_of, runs_table
from experiments.goodput.search import FACTOR, Arm, Bracket, Found, Rough, RoughSearch, Search
from experiments.goodput.settings import GoodputSettings
from experiments.goodput.tables import caveats, print_goodput, sentences, to_json
from experiments.study.workers import Report, in_turn, progress_of
from sim.engine.interrupt import ctrl_c_noted
from sim.report.files import write_table
from sim.settings.compose import Composition, running_source
from sim.settings.config_groups import CONFIG_DIR

AROUND = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.15, 1.3)
"""Rates of a curve as shares of the highest: closest where it falls."""

# What was built for the settings checked last: arms are composed once, not twice.
_checked: dict[str, tuple[GoodputSettings, list[Arm]]] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """All that a search found."""

    settings: GoodputSettings
    arms: Sequence[Arm]
    found: dict[str, list[Found]]
    """By arm, in the order of the seeds; after Ctrl-C perhaps not all."""
    scale_rate: float | None
    highest: Sequence[Highest]
    interrupted: bool
    short: Sequence[str]
    """Arms whose workload has too few requests for runs that last."""


def check(cfg: DictConfig, composition: Composition) -> None:
    """Raises ConfigError for whatever a user can mend."""
    _checked.clear()
    _checked[OmegaConf.to_yaml(cfg)] = build_arms(cfg, composition.source, composition.overrides)


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="goodput")
def main(cfg: DictConfig) -> None:
    """Search, write, print."""
    key, folder = OmegaConf.to_yaml(cfg), Path(HydraConfig.get().runtime.output_dir)
    source, overrides = running_source(), list(HydraConfig.get().overrides.task)
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()  # the arms are composed from here on
    settings, arms = _checked.pop(key) if key in _checked else build_arms(cfg, source, overrides)
    GlobalHydra.instance().hydra = state  # a multirun goes on with it
    console = terminal_console()
    with progress_of(console, enabled=settings.progress, what="searches") as report:
        outcome = search(settings, arms, report)
    if outcome is None:
        raise KeyboardInterrupt  # before an arm was searched
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    _write(folder, outcome, config)
    print_goodput(outcome.highest, caveats(settings, outcome.short), console)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    console.print(str(shown), style="dim", soft_wrap=True, highlight=False)
    if outcome.interrupted:
        raise KeyboardInterrupt  # the partial result is written


def search(settings: GoodputSettings, arms: Sequence[Arm], report: Report) -> Outcome | None:
    """All arms with all seeds; None if Ctrl-C came before a whole arm was searched."""
    rough_seed, total = settings.seeds[0], len(arms) * (1 + len(settings.seeds))
    with ctrl_c_noted() as interrupt:
        rough: dict[str, Rough] = {}
        rough_tasks = [
            RoughSearch(arm=arm, seed=rough_seed, num_requests=settings.requests or arm.num_requests)
            for arm in arms
        ]
        for index, about in in_turn(RoughSearch.run, rough_tasks, settings.num_processes, interrupt):
            rough[arms[index].name] = about
            report(len(rough), total)
        if len(rough) < len(arms):
            return None
        is_open = {name: one.bracket.high == inf for name, one in rough.items()}
        lows = [arm.base_rate if is_open[arm.name] else rough[arm.name].bracket.low for arm in arms]
        scale_rate = settings.scale_rate or min(filter(None, lows), default=None)
        tasks = [
            Search(
                arm=arm,
                seed=seed,
                rates=_rates(settings, rough[arm.name].bracket, arm.base_rate),
                scale_rate=scale_rate,
                start=arm.base_rate,
                precision=settings.precision,
                num_requests=rough[arm.name].num_requests,
                least_requests=settings.requests or arm.num_requests,
                near=arm.base_rate
                if is_open[arm.name]
                else 0.9 * rough[arm.name].bracket.low or arm.base_rate,
                is_open=is_open[arm.name],
            )
            for seed in settings.seeds
            for arm in arms
        ]
        done: dict[int, Found] = {}
        for index, found in in_turn(Search.run, tasks, settings.num_processes, interrupt):
            done[index] = found
            report(len(arms) + len(done), total)
    by_arm = {arm.name: [done[i] for i in sorted(done) if tasks[i].arm is arm] for arm in arms}
    searched = [arm for arm in arms if by_arm[arm.name]]
    if not searched:
        return None
    return Outcome(
        settings=settings,
        arms=searched,
        found=by_arm,
        scale_rate=scale_rate,
        highest=highest_of(searched, by_arm),
        short=tuple(name for name, one in rough.items() if not one.is_long),
        interrupted=len(done) < len(tasks),
    )


def _rates(settings: GoodputSettings, rough: Bracket, base_rate: float) -> tuple[float, ...]:
    """Of an arm's curve. base_rate: of its workload as it is."""
    if settings.rates is not None:
        return tuple(sorted(settings.rates))
    if rough.high == inf:  # nothing to be close to
        return tuple(base_rate * FACTOR**i for i in range(settings.num_rates))
    middle = (rough.low * rough.high) ** 0.5 if rough.low > 0 else 0.0
    if not middle:
        return ()  # it keeps the SLO at no rate
    positions = [i * (len(AROUND) - 1) / (settings.num_rates - 1) for i in range(settings.num_rates)]
    shares = [
        AROUND[int(p)] + (p - int(p)) * (AROUND[min(int(p) + 1, len(AROUND) - 1)] - AROUND[int(p)])
        for p in positions
    ]
    return tuple(middle * share for share in shares)


def _write(folder: Path, outcome: Outcome, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    write_table(runs_table(outcome.arms, outcome.settings.seeds, outcome.found), folder / "runs.parquet")
    record: dict[str, Any] = {
        "interrupted": outcome.interrupted,
        "scale_rate": outcome.scale_rate,
        "verdicts": sentences(outcome.highest),
        "caveats": caveats(outcome.settings, outcome.short),
        "arms": to_json(outcome.highest),
        "notes": {
            arm.name: list(outcome.found[arm.name][0].at_rates[0].notes)
            for arm in outcome.arms
            if outcome.found[arm.name][0].at_rates
        },
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (folder / "summary.json").write_text(f"{text}\n", encoding="utf-8")
    if outcome.settings.report:
        write_goodput(folder / "goodput.html", outcome, config, record["notes"])
