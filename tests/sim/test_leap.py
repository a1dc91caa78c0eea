"""Leaping over iterations and stepping through them leave the same records and take the same decisions."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

quick = settings(max_examples=8000, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@quick
@given(data=st.data())
def test_leap_equals_step(data, worlds, same_records):
    world = data.draw(worlds)
    same_records(world.fly(leap=True).records, world.fly(leap=False).records)
