"""The question of the league for a row: model, devices, layout, limits and requests, as in our scenario.

A tool gets the same requests in the same order. A closed loop has no times of arrival: each client sends the
next request of the list when its last one has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd

from experiments.score import public
from hwmodels.levels import Calibrated
from sim.setup.scenario import Scenario
from sim.workload.arrivals import ClosedLoop
from sim.workload.base import Source
from sim.workload.synthetic import Synthetic

FIGURES = ("ttft_ms", "tpot_ms", "tokens_per_s")
"""The compared quantities: TTFT and TPOT in ms, and the throughput that a row states."""


class RefusedError(Exception):
    """The reason why a tool has no prediction of a row."""


class Sent(NamedTuple):
    """A request: its time, and its lengths in tokens. No two prompts share content."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A measured row, and the scenario and the requests that describe it."""

    row: dict[str, Any]

    @cached_property
    def scenario(self) -> Scenario:
        """The run as windtunnel simulates it. Raises NotSimulatedError or ValueError."""
        return public.scenario_of(self.row, Calibrated())

    @property
    def backend(self) -> str:
        return str(self.row["backend"])

    @property
    def concurrency(self) -> int | None:
        """Clients of a closed loop, of all replicas together; None: requests come at times of their own."""
        workload = self.scenario.workload
        if isinstance(workload, Synthetic) and isinstance(workload.arrivals, ClosedLoop):
            return workload.arrivals.num_users
        return None

    @property
    def statistics(self) -> dict[str, str]:
        """The compared quantities of `FIGURES` that the row states, each with its statistic."""
        found = {figure: public.stated(self.row, public.STATED[figure]) for figure in FIGURES}
        return {figure: name for figure, name in found.items() if pd.notna(self.row.get(name))}

    @cached_property
    def requests(self) -> Sequence[Sent]:
        """All requests of the run, in the order in which they are sent if each ends at once."""
        scenario = self.scenario
        return sent_by(scenario.workload.source(seed=scenario.seed, max_model_len=scenario.max_model_len))


def sent_by(source: Source) -> list[Sent]:
    """Returns the requests of a source whose follow-ups are sent in the order of their predecessors."""
    waiting, found = deque(source.arrivals()), []
    while waiting:
        one = waiting.popleft()
        request = one.request
        found.append(Sent(one.at_s, request.prompt.num_tokens, one.num_output_tokens))
        waiting.extend(source.follow_ups(request, one.at_s, one.num_output_tokens))
    return found
