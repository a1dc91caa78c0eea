"""What is asked: which changes of the settings, with which seeds, over how many requests."""

from __future__ import annotations

import os
from dataclasses import dataclass

from experiments.compare.whatif.offered import OFFERED
from experiments.study.override_lines import by_name, check_lines
from experiments.study.seeds import check_seeds
from sim.settings.errors import suggest
from sim.settings.override import Override

BASELINE = "baseline"
MAX_RUNS = 10_000
RESERVED = {
    "seed": "whatif.seeds names the seeds",
    "output": "the command writes its own files",
    "hydra": "it belongs to the whole command",
    "whatif": "a change is of what is simulated",
}
"""Keys that no change may set, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatifSettings:
    """The node `whatif`, configs/whatif/*.yaml; what is simulated is in the rest of the config."""

    changes: tuple[str, ...] = ()
    """Each is tried alone against the settings as they are: overrides with blanks between them.

    May have a name before a colon, and is else called by what it overrides. Each must be possible.
    """
    offered: tuple[str, ...] = tuple(OFFERED)
    """What is tried where there are no `changes`: names of `OFFERED`, and overrides as above.

    Those that the baseline does not admit are left out.
    """
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    requests: int | None = 1000
    """Of each run, the first of the workload; None: all. Not where the workload's own number is set."""
    jobs: int | None = None
    """Processes; None: one a core."""
    report: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        check_seeds(self.seeds, "five")
        for name, least in (("requests", 10), ("jobs", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: must be >= {least}; null for no limit of ours")
        if not self.changes and not self.offered:
            raise ValueError("changes=[]: must name a change, such as 'double the traffic: load=2'")
        self._check("changes", self.changes)
        plain = [one for one in self.offered if not Override.parse(one).is_whole]
        for one in plain:
            if one not in OFFERED:
                raise ValueError(f"offered={one}: no such change; {suggest(one, OFFERED)}; or key=value")
        self._check("offered", tuple(one for one in self.offered if one not in plain))
        num_runs = (1 + len(self.changes or self.offered)) * len(self.seeds)
        if num_runs > MAX_RUNS:
            raise ValueError(f"seeds={len(self.seeds)}: {num_runs:,} runs; must be <= {MAX_RUNS:,}")

    @property
    def num_processes(self) -> int:
        return self.jobs or os.cpu_count() or 1

    @staticmethod
    def _check(name: str, lines: tuple[str, ...]) -> None:
        check_lines(name, lines, RESERVED)
        overrides = by_name(lines)
        if BASELINE in overrides:
            raise ValueError(f"{name}={BASELINE}: is the name of what they are changes of; choose another")
        for i, (change, own) in enumerate(overrides.items()):
            if not own:
                raise ValueError(f"{name}[{i}]={change}: must override something, such as load=2")
