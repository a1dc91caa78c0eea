"""Turns of adapters that always have requests, and merged weights, which serve one at a time."""

from __future__ import annotations

from policies.adapters.exchange import Exchange
from policies.adapters.merged import Merged
from tests.policies.adapters.machine import Machine


def test_adapters_that_always_have_requests_all_get_their_turns():
    """Four, two of them active at a time for two steps: they start about equally often."""
    machine = Machine(Exchange(max_loras=3, max_active_adapters=2, cycle_time_s=2.0), max_num_seqs=4)
    starts = {name: [] for name in "abcd"}
    sequences = []
    for step in range(120):
        for name in "abcd":  # never an empty queue
            num_waiting = sum(s.request.adapter == name and s.state.name == "waiting" for s in sequences)
            for _ in range(3 - num_waiting):
                sequences.append(machine.ask(name, 4, 2))
        machine.step()
        for seq in sequences:
            if seq.state.name != "waiting" and seq.request_id not in starts[seq.request.adapter]:
                starts[seq.request.adapter].append(seq.request_id)
        sequences = [seq for seq in sequences if seq.state.name != "ended"]
        assert len(machine.residents.active) <= 2
        assert step < 20 or all(starts.values())
    counts = sorted(len(started) for started in starts.values())
    assert counts[0] >= 0.7 * counts[-1]


def test_no_adapter_leaves_while_no_other_is_waited_for():
    machine = Machine(Exchange(max_loras=2, max_active_adapters=1, cycle_time_s=2.0))
    machine.ask("a", 4, 50)
    for _ in range(30):
        machine.step()
    assert machine.residents.active == ("a",)
    machine.ask("b")
    machine.step()
    assert machine.residents.active == ("b",)  # its time was over, and a request waits
    assert machine.residents.is_resident("a")  # it still runs


def test_merged_weights_serve_one_adapter_at_a_time_and_the_next_in_line_comes_then():
    machine = Machine(Merged(max_serve_s=None))
    for name in (None, "a", "b", "a", "b"):
        machine.ask(name)
    together = []
    for _ in range(60):
        plan = machine.step()
        if plan is not None:
            together.append(machine.served)
            assert plan.adapters is None
    assert max(map(len, together)) == 2
    order = [frozenset(group) for group in together]
    assert [group for i, group in enumerate(order) if group not in order[:i]] == [{0}, {1, 3}, {2, 4}]
    assert [name for name, _ in machine.log] == ["a", "b"]


def test_an_adapter_whose_time_is_over_lets_others_in():
    machine = Machine(Merged(max_serve_s=3.0), max_num_seqs=1)
    first = [machine.ask("a", 4, 2) for _ in range(6)]
    other = machine.ask("b", 4, 2)
    machine.run()
    assert [name for name, _ in machine.log] == ["a", "b", "a"]
    assert other.finish_reason is not None
    assert all(seq.finish_reason is not None for seq in first)
