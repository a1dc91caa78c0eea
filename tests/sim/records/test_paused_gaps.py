"""Pauses in the records."""

from policies.scheduling.mlfq import Mlfq

TICK_S = 0.125


def test_a_pause_lies_between_two_tokens_of_its_sequence(make_world, ask, same_records, list_gaps):
    """Iterations of a tick: 0 has tokens at 1, 2, 3, 4; 1 comes at 3, has tokens from 4 to 7. From 4
    on, 0 stands still: its next token is at 8, a gap of 4 ticks.
    """
    world = make_world(ask(0.0, 8, 6), ask(3 * TICK_S, 2, 4), scheduling=Mlfq(quantum_tokens=6, max_active=1))
    leapt, stepped = world.simulate(leap=True), world.simulate(leap=False)
    same_records(leapt.records, stepped.records)
    assert leapt.records.requests.preemptions.tolist() == [0, 0]
    ticks = [(gap_s / TICK_S, end_s / TICK_S) for gap_s, end_s in list_gaps(leapt.records)]
    assert ticks == [(1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (1, 9), (4, 8)]
