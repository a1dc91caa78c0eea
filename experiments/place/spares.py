"""`windtunnel spares`: computes how many replicas are enough, if `needed` of them must be up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from experiments.app.settings.compose import Composition
from experiments.app.terminal import plain_table, terminal_console
from experiments.study.verdicts import minus
from fieldlimits import Checked, Positive, Unit, check
from sim.cluster.availability import (
    FATAL,
    at_least_up,
    availability,
    simulated_at_least_up,
    simulated_kv_copies_left,
)
from sim.cluster.failures import Failures, Random, Recovery
from sim.metrics.confidence import Interval
from sim.report.numbers import bounds_text, mean_text, supported
from sim.report.wording import plural
from sim.settings.build import build_as
from sim.settings.errors import ConfigError

MINUTES_PER_YEAR = 365.25 * 24 * 60
SETTLED = 20
"""Mean times to repair after which the state at the start, with all replicas up, no longer matters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparesSettings(Checked):
    """Settings of `windtunnel spares`."""

    failures: Failures
    recovery: Recovery = Recovery()
    """With way=kv, the output also says how often a copy of the KV survived."""
    needed: int = 8
    wanted_share: float = 0.999
    most_spares: int = 3
    at_s: Annotated[Positive | None, Unit("s"), "null for the long run"] = None
    replications: int = 2000
    confidence: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)
        for name, least in (("needed", 1), ("most_spares", 0), ("replications", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be >= {least}")
        for name in ("wanted_share", "confidence"):
            if not 0 < (share := getattr(self, name)) < 1:
                percent = f"; write {share / 100:.12g} for {share:g} %" if 1 < share < 100 else ""
                raise ValueError(f"{name}={share}: must be > 0 and < 1{percent}")
        if not self.failures.events:
            raise ValueError(
                "failures=none: must contain a failure; choose for example failures=random_crashes"
            )
        if self.at_s is None and not all(isinstance(event, Random) for event in self.failures.events):
            raise ValueError(
                "at_s=null: scripted failures and releases have no long run; give a time, such as at_s=120"
            )
        self.failures.check(self.needed)

    @property
    def moment_s(self) -> float:
        """Time at which the replicas that are up are counted, in seconds."""
        if self.at_s is not None:
            return self.at_s
        random = [event for event in self.failures.events if isinstance(event, Random)]
        return SETTLED * max(event.mttr_s for event in random) + max(event.mtbf_s for event in random)

    @property
    def up_share(self) -> float | None:
        """Long-run share of time that a replica is up; None if failures are not independent."""
        share = 1.0
        for event in self.failures.events:
            if not isinstance(event, Random) or event.together or event.replicas or self.at_s is not None:
                return None
            if event.kind in FATAL:
                share *= availability(event.mtbf_s, event.mttr_s)
        return share


@dataclass(frozen=True, kw_only=True, slots=True)
class SparesJob:
    """Checked settings of `windtunnel spares`."""

    settings: SparesSettings

    def run(self, folder: Path) -> None:
        """Prints one line per number of replicas."""
        try:
            report(self.settings, terminal_console())
        except ValueError as error:
            raise ConfigError(str(error)) from error


def prepare(cfg: dict[str, Any], composition: Composition) -> SparesJob:
    """Builds the job. Raises ConfigError for every mistake of the user."""
    return SparesJob(settings=build_as(SparesSettings, cfg, ""))


def report(settings: SparesSettings, console: Console) -> None:
    """Prints the table, and the smallest number of replicas that is enough."""
    k, up_share = settings.needed, settings.up_share
    low, high = f"{100 * settings.confidence:g} % CI from", "to"
    rows = [["replicas", f"{k} or more up", "analytical", low, high, "fewer up, min/year"]]
    enough: int | None = None
    for n in range(k, k + settings.most_spares + 1):
        found = simulated_at_least_up(
            settings.failures,
            k,
            n,
            at_s=settings.moment_s,
            num_replications=settings.replications,
            seed=settings.seed,
            confidence=settings.confidence,
        )
        theory = None if up_share is None else at_least_up(k, n, up_share)
        best = found.share if theory is None else theory
        shown = "–" if theory is None else f"{theory:.4%}"
        share = Interval(found.share, found.low, found.high, found.num_replications)
        simulated = supported(share, 100)
        cells = [f"{text}%" for text in simulated[:3]] if simulated else [f"{found.share:.3%}", "–", "–"]
        down = supported(minus(share, 1.0), -MINUTES_PER_YEAR)
        minutes = f"{(1 - best) * MINUTES_PER_YEAR:,.0f}" if theory is not None or down is None else down.mean
        spares = f"{k} + {n - k}" if n > k else f"{k}"
        rows.append([spares, cells[0], shown, *cells[1:], minutes])
        if enough is None and (best if theory is not None else found.low) >= settings.wanted_share:
            enough = n
    console.print(plain_table(rows))
    wanted = f"{100 * settings.wanted_share:.6g} %"
    if enough is None:
        most = k + settings.most_spares
        verdict = f"{most} replicas are not enough for {k} to be up for {wanted} of the time"
    else:
        spares = plural(enough - k, "spare")
        verdict = f"{enough} replicas ({spares}) are enough for {k} to be up for {wanted} of the time"
    basis = "analytical" if up_share is not None else f"lower bound of {plural(settings.replications, 'run')}"
    console.print(f"{verdict} ({basis})", highlight=False)
    if settings.recovery.way == "kv":
        n = k + settings.most_spares if enough is None else enough
        console.print(_kv_copies_left(settings, n), highlight=False)


def _kv_copies_left(settings: SparesSettings, n: int) -> str:
    """Returns a sentence on how often a copy of a crashed replica's KV survived on another replica."""
    if n == 1:
        return "KV replication with 1 replica: no other replica can hold a copy"
    found = simulated_kv_copies_left(
        settings.failures,
        n,
        until_s=settings.moment_s,
        num_replications=settings.replications,
        seed=settings.seed,
        confidence=settings.confidence,
    )
    if found is None:
        return f"KV replication with {n} replicas: none of them crashed"
    share = Interval(found.share, found.low, found.high, found.num_replications)
    return (
        f"KV replication with {n} replicas: a copy survived in {mean_text(share, 100)}% of "
        f"{found.num_replications:,} crashes "
        f"({100 * settings.confidence:g} % confidence interval: {bounds_text(share, 100)}%)"
    )
