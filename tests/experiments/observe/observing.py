"""Runs of a client against a scripted server, on a clock that does not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.observe.figures import observed_figures
from experiments.observe.scripted_server import Script, ScriptedServer
from experiments.observe.session import Observed, observe
from experiments.observe.settings import ObserveSettings
from experiments.observe.tables import records_of
from sim.metrics.dialects import MetricsSettings
from sim.records.run import RunRecords
from sim.workload.arrivals import Constant
from sim.workload.distributions import Fixed, Lengths
from sim.workload.synthetic import Synthetic
from tests.experiments.observe.jumping_clock import run_jumping

NUM_QUESTIONS = 1
"""Requests with which the server is asked what it takes, if it takes all."""


def make_workload(
    num_requests: int = 20,
    rate_per_s: float = 100.0,
    prompt_tokens: int = 64,
    output_tokens: int = 5,
    **more: Any,
) -> Synthetic:
    lengths = Lengths(prompt_tokens=Fixed(value=prompt_tokens), output_tokens=Fixed(value=output_tokens))
    arrivals = more.pop("arrivals", Constant(rate_per_s=rate_per_s))
    return Synthetic(arrivals=arrivals, lengths=lengths, num_requests=num_requests, **more)


def run(
    script_of: Callable[[dict[str, Any]], Script] = lambda body: Script(),
    workload: Any = None,
    *,
    dies_at: int | None = None,
    **settings: Any,
) -> tuple[Observed, ScriptedServer]:
    """Observes a scripted server in the client's event loop; both sides read its clock, which does not wait.

    dies_at: index of the request at which the server dies.
    """
    servers = []

    def script_or_death(body: dict[str, Any]) -> Script:
        server = servers[0]
        if dies_at is not None and len(server.served) >= dies_at:
            server.die()
        return script_of(body)

    async def both() -> Observed:
        async with ScriptedServer(script_or_death) as server:
            servers.append(server)
            given = ObserveSettings(url=server.url, workload=workload or make_workload(), **settings)
            return await observe(given)

    return run_jumping(both()), servers[0]


def records(observed: Observed) -> RunRecords:
    return records_of(observed.load.replies, observed.load.end_s)


def figures(observed: Observed) -> dict[str, Any]:
    return observed_figures(
        records(observed), observed.load, slo=None, metrics=MetricsSettings(), late_s=0.01
    )
