"""The fuzzer: worlds that it has found pass, its worlds cover all choices, and it finds a defect."""

import os
import time
from pathlib import Path
from random import Random, SystemRandom

import pytest
import yaml

from sim.engine.replica import Replica
from tests.worlds.fuzz.checking import check_world
from tests.worlds.fuzz.drawing import build_world, draw_choices, families
from tests.worlds.fuzz.fuzzing import Tally, fails, fuzz_one, shrunk

FOUND = yaml.safe_load((Path(__file__).parent / "fuzz" / "found.yaml").read_text(encoding="utf-8"))
NEW_S = 240
"""Seconds for new worlds in `make nightly`."""
NUM_WORLDS = 60
"""Worlds of `make test-all`, the same every time."""


def overrides_of(world):
    return dict(text.split("=", 1) for text in world["overrides"])


@pytest.mark.parametrize("world", FOUND, ids=[world["reason"] for world in FOUND])
def test_a_world_that_once_failed_passes(world):
    """It runs in all ways that the fuzzer compares, and has requests."""
    assert len(check_world(build_world(world["overrides"])).records.requests) > 0


def test_every_choice_is_drawn():
    """Also those of groups that are new: they come from configs/."""
    drawn = {item for seed in range(1500) for item in draw_choices(Random(seed)).items()}
    left_out = {("batching", "prefill_only"), ("batching", "decode_only")}
    for key, choices in families().items():
        missing = {(key, choice) for choice in choices} - drawn - left_out
        assert not missing or key == "model"


@pytest.mark.slow
def test_a_defect_is_found_and_its_world_shrunk(monkeypatch):
    """The defect is that of the first world in found.yaml."""

    def finish_until(replica, now, *, begins_at_now):
        step = replica.step
        if step is not None and step.num_ended(now):
            step.cut(step.num_ended(now))
            replica._finish_step()

    monkeypatch.setattr(Replica, "_finish_until", finish_until)
    world = overrides_of(FOUND[0]) | {"slo": "code", "signal_age_s": "0"}
    found = world, fails(world)
    assert "leap equals step" in str(found[1])
    smaller, finding = shrunk(found)
    assert finding.check == found[1].check
    assert {"sim.until_s", "engine.num_kv_blocks"} <= set(smaller) < set(overrides_of(FOUND[0]))


@pytest.mark.slow
def test_no_new_world_fails():
    """KV memory is short in a third of the worlds at least."""
    is_new = os.environ.get("HYPOTHESIS_PROFILE") == "new"
    first, end_s = SystemRandom().randrange(10**9) if is_new else 0, time.monotonic() + NEW_S
    tally = Tally()
    for seed in range(first, first + (200 if is_new else NUM_WORLDS)):
        found = fuzz_one(seed, tally)
        assert found is None, f"run `python -m tests.worlds.fuzz seed={seed}`: {found[1]}"
        if is_new and time.monotonic() > end_s:
            break
    assert tally.checked < 30 or tally.pressed >= tally.checked / 3, str(tally)
