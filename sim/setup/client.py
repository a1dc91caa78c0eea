"""The client that measures: what a load generator adds to the TTFT that it reports.

Its clock starts before the engine has the request: it opens a connection, writes the request, and may be late
to read the answer. That is a part of a measurement, and not of the engine: `engine.frontend_s` and
`engine.frontend` have the engine's own time. Where runs of a load generator show more of one engine than of
others, the cause is unknown, and the figure holds for runs of this load generator only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import Checked, NonNegative, Unit, check
from sim.engine.frontend import check_range

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
