"""Logs that were moved out of the heap come back complete and in order."""

import numpy as np
import pytest

from sim.records import mapped_buffers
from sim.records.mapped_buffers import MappedBuffers


@pytest.mark.parametrize("moves_after", [(), (0,), (0, 1), (0, 1, 2)], ids=str)
def test_what_was_written_comes_back_in_its_order_however_often_it_was_moved(moves_after):
    numbers, letters = bytearray(), bytearray()
    both = MappedBuffers(numbers, letters)
    for turn in range(3):
        numbers += np.arange(4.0 * turn, 4.0 * turn + 4).tobytes()
        letters += b"ab"
        if turn in moves_after:
            both.move()
            assert not numbers
            assert not letters
    assert both.num_bytes(numbers) == 12 * 8
    assert both.num_bytes(letters) == 6
    assert both.take(numbers, np.float64).tolist() == list(range(12))
    assert both.take(letters, "S1").tolist() == [b"a", b"b"] * 3


def test_nothing_written_comes_back_as_nothing():
    assert len(MappedBuffers(empty := bytearray()).take(empty, np.float64)) == 0


def test_the_maps_of_a_long_log_are_few():
    log = bytearray()
    long = MappedBuffers(log)
    num_moves = 0
    for _ in range(100):
        log += bytes(mapped_buffers.NUM_BYTES)
        if len(log) >= long.limit:
            long.move()
            num_moves += 1
    assert num_moves < 60


@pytest.mark.parametrize("leap", [True, False], ids=["leap", "step"])
def test_a_run_whose_logs_move_often_leaves_the_same_tables(make_world, ask, monkeypatch, leap):
    world = make_world(*[ask(0.3 * i, 4 + i % 7, 3 + 5 * (i % 4)) for i in range(40)], max_num_seqs=4)
    whole = world.simulate(leap=leap).records
    monkeypatch.setattr(mapped_buffers, "NUM_BYTES", 64)
    moved = world.simulate(leap=leap).records
    assert moved.iterations.equals(whole.iterations)
    assert moved.events.equals(whole.events)
    assert moved.gap_s.tolist() == whole.gap_s.tolist()


def test_without_maps_all_stays_in_the_buffers(monkeypatch):
    def refuse(*_):
        raise OSError("out of maps")

    log = bytearray()
    whole = MappedBuffers(log)
    log += b"abc"
    whole.move()
    log += b"de"
    monkeypatch.setattr(mapped_buffers, "mmap", refuse)
    whole.move()
    assert len(log) < whole.limit
    assert whole.take(log, "S1").tolist() == [b"a", b"b", b"c", b"d", b"e"]
