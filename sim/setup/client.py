"""The client that measures: what a load generator adds to the TTFT that it reports.

Its clock starts before the engine has the request: it opens a connection, writes the request, and may be late
to read the answer. That is a part of a measurement, and not of the engine: `engine.frontend_s` and
`engine.frontend` have the engine's own time. Where runs of a load generator show more of one engine than of
others, the cause is unknown, and the figure holds for runs of this load generator only.

A run states what its TTFT includes besides the engine: the front end's time and the client's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fieldlimits import Checked, NonNegative, Unit, check
from sim.engine.frontend import TOKENS, check_range
from sim.setup.engine_profile import EngineProfile

OTHERS = "others"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
"""Names of engines by family."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Client(Checked):
    """A load generator. Without any `seconds`, requests reach the front end as soon as they are sent."""

    name: str = "none"
    seconds: Mapping[str, Annotated[NonNegative, Unit("s")]] = field(default_factory=dict)
    """Seconds that it adds to the TTFT, by the family of the engine; `others`: of all other engines."""
    range_s: Mapping[str, tuple[float, float] | None] = field(default_factory=dict)
    """Least and largest of these that its runs show, likewise; None: no measurement shows them."""

    def __post_init__(self) -> None:
        for name in ("seconds", "range_s"):
            for engine in getattr(self, name):
                if engine not in (*ENGINES, OTHERS):
                    raise ValueError(f"{name}.{engine}: must be one of {', '.join((*ENGINES, OTHERS))}")
        check(self)
        for engine, range_s in self.range_s.items():
            if range_s is not None:
                check_range(f"range_s.{engine}", range_s)

    def added_s(self, family: str | None) -> float:
        """Returns the seconds that it adds to the TTFT of an engine."""
        return self.seconds.get(family or OTHERS, self.seconds.get(OTHERS, 0.0))

    def added_range_s(self, family: str | None) -> tuple[float, float] | None:
        """Returns the least and largest of them in measurements, s; None: none shows them."""
        return self.range_s.get(family or OTHERS, self.range_s.get(OTHERS))


NO_CLIENT = Client()
"""The client of a run without a load generator, which adds no time."""


def frontend_json(engine: EngineProfile, client: Client) -> dict[str, Any]:
    """Returns the times of front end and client for summary.json, s."""
    range_s = None if engine.frontend is None else engine.frontend.range_s
    return {
        "engine_s": engine.idle_frontend_s,
        "engine_range_s": None if range_s is None else list(range_s),
        "client_s": client.added_s(engine.family),
        "client_range_s": (of := client.added_range_s(engine.family)) and list(of),
    }


def frontend_note(engine: EngineProfile, client: Client) -> str:
    """Returns the note on what the TTFT includes, with the range of measurements."""
    whose = ENGINES.get(engine.family or "", "the engine")
    own_range_s = None if engine.frontend is None else engine.frontend.range_s
    own = _ms(engine.idle_frontend_s, own_range_s)
    own = f"{own} of {whose}'s idle front end (prompt of {TOKENS:,} tokens)"
    if client.name == "none":
        return f"TTFT includes {own}, and no time of a client (client=none)."
    range_s = client.added_range_s(engine.family)
    return f"TTFT includes {own}, and {_ms(client.added_s(engine.family), range_s)} of client={client.name}."


def _ms(value_s: float, range_s: tuple[float, float] | None) -> str:
    """Returns a time with the range of its measurements, ms."""
    if range_s is None:
        return f"{value_s * 1e3:.3g} ms (not measured)" if value_s else "0 ms (not measured)"
    return f"{value_s * 1e3:.3g} ms (measured: {range_s[0] * 1e3:.3g} to {range_s[1] * 1e3:.3g})"
