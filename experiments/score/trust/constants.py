"""The constants that whole-engine rows determine: host times of an engine profile, two shares of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hwmodels.fitting.host import Constant
from hwmodels.host import HostOverhead
from hwmodels.operators import Calibration
from sim.setup.pool import PoolSettings
from sim.setup.scenario import Scenario

HOST = ("iteration_s", "sequence_s", "exposed_s")
ENGINE = (*HOST, "frontend_s")
DEVICE = ("sustained_clock_share", "start_share")
NAMES = (*ENGINE, *DEVICE)

_HOST, _CALIBRATION = HostOverhead(), Calibration()
KINDS = {
    "iteration_s": Constant(
        name="iteration_s", neutral=_HOST.iteration_s, lower=0, upper=10e-3, scale=500e-6
    ),
    "sequence_s": Constant(name="sequence_s", neutral=_HOST.sequence_s, lower=0, upper=500e-6, scale=10e-6),
    "exposed_s": Constant(name="exposed_s", neutral=_HOST.exposed_s, lower=0, upper=10e-3, scale=500e-6),
    "frontend_s": Constant(name="frontend_s", neutral=0, lower=0, upper=2, scale=100e-3),
    "sustained_clock_share": Constant(
        name="sustained_clock_share",
        neutral=_CALIBRATION.sustained_clock_share,
        lower=0.5,
        upper=1,
        scale=0.05,
    ),
    "start_share": Constant(
        name="start_share", neutral=_CALIBRATION.start_share, lower=0.4, upper=1, scale=0.05
    ),
}
"""Neutral values are the defaults of the classes; scales are the spread between engines and devices that
Python on a server and power limits explain."""


def values_of(pool: PoolSettings) -> dict[str, float]:
    """Returns the constants of a pool by name."""
    host = {name: float(getattr(pool.engine.host, name)) for name in HOST}
    shares = {name: float(getattr(pool.calibration, name)) for name in DEVICE}
    return {**host, "frontend_s": float(pool.engine.frontend_s), **shares}


def with_values(scenario: Scenario, values: Mapping[str, float]) -> Scenario:
    """Returns the scenario with these constants in all its pools."""
    pools = {name: _changed(pool, values) for name, pool in scenario.pools.items()}
    changed: Scenario = _changed(replace(scenario, pools=pools), values)
    return changed


def _changed(pool: Any, values: Mapping[str, float]) -> Any:
    host = {name: values[name] for name in HOST if name in values}
    shares = {name: values[name] for name in DEVICE if name in values}
    engine = replace(pool.engine, host=replace(pool.engine.host, **host))
    if "frontend_s" in values:
        engine = replace(engine, frontend_s=values["frontend_s"])
    return replace(pool, engine=engine, calibration=replace(pool.calibration, **shares))


def steps(values: Mapping[str, float], *, overlapped: bool) -> list[dict[str, float]]:
    """Returns the changes of one constant at a time that give the slopes: one larger value, one smaller.

    There is one value only where the slope is the same on both sides (`ONE_SIDED`) or a bound is near, and
    none for exposed_s without overlap, which has no effect.
    """
    found: list[dict[str, float]] = []
    for name, value in values.items():
        if name == "exposed_s" and not overlapped:
            continue
        kind = KINDS[name]
        step = max(0.5 * value, kind.scale) if name in ENGINE else kind.scale
        higher, lower = min(kind.upper, value + step), max(kind.lower, value - step)
        sides = [higher, lower] if higher - value >= 0.5 * step else [lower]
        if name in ONE_SIDED or value - lower < 1e-3 * step:
            sides = sides[:1]
        found += [{name: side} for side in sides]
    return found


ONE_SIDED = ("exposed_s", "frontend_s", *DEVICE)
"""Constants with the same slope for larger and smaller values: these times always add up."""
