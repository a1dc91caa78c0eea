"""Our own entry of the league: the row is simulated with the shipped constants, as by `windtunnel score`."""

from __future__ import annotations

import time

from experiments.score import public
from experiments.score.league.asked import Asked, RefusedError
from experiments.study.presets import NotSimulatedError


def predict(asked: Asked) -> dict[str, float]:
    """Returns the compared quantities and `cpu_s`, the CPU seconds. Raises RefusedError."""
    began = time.process_time()
    try:
        figures = public.figures_of(asked.scenario)
    except (NotSimulatedError, ValueError) as error:
        raise RefusedError(" ".join(str(error).split())) from error
    found = {figure: figures[name] for figure, name in asked.statistics.items()}
    return {**found, "cpu_s": time.process_time() - began}
