"""The lines on clients and tasks: what they say, and that other runs have none."""

from sim.report.lines import traffic_lines

CLIENTS = {
    "streams": False,
    "hidden_share": 0.75,
    "publish_slo_s": 15.0,
    "publish_slo_share": 0.8999,
    "reading": {"tokens_per_s": 7.0, "never_slower_share": 0.5, "stall": {"mean_s": 0.25, "p99_s": 12.0}},
}
TASKS = {"count": 9, "finished": 8, "calls_per_task": 12.5, "slo_s": None, "slo_share": None}


def test_runs_of_other_workloads_have_no_lines():
    assert traffic_lines({"publish": {"mean_s": 1.0}}) == []
    assert traffic_lines({"clients": None, "tasks": TASKS | {"count": 0}}) == []


def test_lines_have_the_figures_with_their_units():
    latency = {"mean_s": 42.0, "p99_s": 300.0}
    summary = {
        "publish": {"mean_s": 4.0, "p99_s": 20.0},
        "clients": CLIENTS,
        "tasks": TASKS | {"latency": latency, "makespan_s": None},
    }
    assert traffic_lines(summary) == [
        "Time to publish (complete answers, 75.0 % of the output tokens hidden): mean 4.00 s, p99 20.0 s; "
        "89.9 % within 15 s",
        "Reading at 7 tokens/s: 50.0 % of requests are never slower; readers wait mean 0.25 s, p99 12.0 s",
        "Tasks: 8 of 9 finished, 12.5 calls each; latency mean 42.0 s, p99 5.0 min; makespan unknown",
    ]
