"""Settings of `windtunnel whatif`: the changes, the seeds and the number of requests."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.app.settings.override import Override
from experiments.compare.whatif.offered import OFFERED
from experiments.study.override_lines import by_name, check_lines
from experiments.study.seeds import check_seeds
from experiments.study.settings import StudySettings, check_least, check_num_runs
from sim.settings.errors import suggest

BASELINE = "baseline"
RESERVED = {
    "seed": "whatif.seeds sets the seeds",
    "output": "whatif writes its own files",
    "hydra": "it applies to the whole command",
    "whatif": "it applies to the whole command",
}
"""Keys that no change may set -> the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatifSettings(StudySettings):
    """Node `whatif`, configs/whatif/*.yaml; the rest of the config is the baseline."""

    changes: tuple[str, ...] = ()
    """Changes to try, each alone against the baseline: overrides separated by spaces.

    A name before a colon is optional; without one, a change is named by its overrides. Each must be possible.
    """
    offered: tuple[str, ...] = tuple(OFFERED)
    """Changes to try if `changes` is empty: names of `OFFERED`, or overrides as above.

    Changes that do not apply to the baseline are left out.
    """
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    requests: int | None = 1000
    """Number of requests per run, the first of the workload; None: all. Unused if the workload sets it."""

    def __post_init__(self) -> None:
        check_seeds(self.seeds, "five")
        check_least(self, {"requests": 10, "jobs": 1}, "; null: no limit")
        if not self.changes and not self.offered:
            raise ValueError("changes=[]: must contain a change, such as 'double the traffic: load=2'")
        self._check("changes", self.changes)
        plain = [one for one in self.offered if not Override.parse(one).is_whole]
        for one in plain:
            if one not in OFFERED:
                raise ValueError(
                    f"offered={one}: is neither a change nor an override key=value; {suggest(one, OFFERED)}"
                )
        self._check("offered", tuple(one for one in self.offered if one not in plain))
        num_runs = (1 + len(self.changes or self.offered)) * len(self.seeds)
        check_num_runs(num_runs, "seeds", len(self.seeds), "all changes and seeds")

    @staticmethod
    def _check(name: str, lines: tuple[str, ...]) -> None:
        check_lines(name, lines, RESERVED)
        overrides = by_name(lines)
        if BASELINE in overrides:
            raise ValueError(f"{name}={BASELINE}: is the name of the baseline; choose another name")
        for i, (change, own) in enumerate(overrides.items()):
            if not own:
                raise ValueError(f"{name}[{i}]={change}: must contain an override, such as load=2")
