"""States what a run's TTFT includes besides the engine: the front end's time and the client's."""

from __future__ import annotations

from typing import Any

from sim.engine.frontend import TOKENS
from sim.setup.client import ENGINES, Client
from sim.setup.engine_profile import EngineProfile


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
