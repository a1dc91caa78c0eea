"""Draws a world from a seed and checks it; makes a world that fails smaller."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from sim.settings.errors import ConfigError
from tests.worlds.fuzz.checking import Finding, check_world, is_pressed
from tests.worlds.fuzz.drawing import (
    Overrides,
    accepted,
    as_list,
    build_world,
    draw_cut,
    draw_failures,
    draw_pressure,
    draw_world,
    is_small,
)
from tests.worlds.fuzz.running import run

MAX_ATTEMPTS = 10
"""Worlds drawn for one seed until one is accepted."""
Found = tuple[Overrides, Finding]


@dataclass
class Tally:
    """Counts of the worlds that were checked."""

    checked: int = 0
    refused: int = 0
    pressed: int = 0
    cut: int = 0
    failing: int = 0
    failed: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        num = max(1, self.checked)
        return (
            f"{self.checked} worlds checked, {len(self.failed)} failed; KV memory was short in "
            f"{self.pressed / num:.0%}, {self.cut / num:.0%} were cut, {self.failing / num:.0%} had "
            f"failures; {self.refused} draws were refused"
        )


def fuzz_one(seed: int, tally: Tally) -> Found | None:
    """Draws and checks the world of a seed; returns it if it fails a check."""
    world = None
    for attempt in range(MAX_ATTEMPTS):
        rng = Random(f"{seed}.{attempt}")
        try:
            world = _whole_world(rng)
        except Finding as finding:
            tally.failed.append(seed)
            return finding.world, finding
        if world is not None:
            break
        tally.refused += 1
    if world is None:
        return None
    tally.checked += 1
    tally.cut += "sim.until_s" in world
    tally.failing += "failures.events" in world
    try:
        tally.pressed += is_pressed(check_world(build_world(as_list(world))).records)
    except Finding as finding:
        tally.failed.append(seed)
        return world, finding
    return None


def _whole_world(rng: Random) -> Overrides | None:
    """Draws a world; its pressure, failures and cut follow from a run without them."""
    world = draw_world(rng)
    if world is None:
        return None
    for draw, share in ((draw_pressure, 0.9), (draw_failures, 0.35), (draw_cut, 0.4)):
        if rng.random() < share:
            try:
                records = run(build_world(as_list(world))).records
            except Exception as error:
                raise Finding(f"run ({type(error).__name__})", str(error), world) from error
            changed = draw(rng, world, records)
            if accepted(rng, changed):
                world = changed
    return world


def shrunk(found: Found) -> Found:
    """Returns the world with as few overrides as fail the same check."""
    world, finding = found
    goes_on = True
    while goes_on:
        goes_on = False
        for key in list(world):
            smaller = {other: value for other, value in world.items() if other != key}
            again = fails(smaller)
            if again is not None and again.check == finding.check:
                world, finding, goes_on = smaller, again, True
    return world, finding


def fails(world: Overrides) -> Finding | None:
    """Returns the check that a world fails, if it is small and fails one."""
    try:
        scenario = build_world(as_list(world))
        if is_small(scenario):
            check_world(scenario)
    except Finding as finding:
        return finding
    except ConfigError:
        return None
    return None
