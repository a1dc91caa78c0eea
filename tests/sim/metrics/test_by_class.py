"""Figures by priority and tenant: a table of six requests worked out on paper, and sums that must agree.

request  priority  tenant  arrives  first token  finishes   TTFT
0           0        a       0 s       1 s         3 s       1 s
1           7        a       0 s       4 s         6 s       4 s
2           0        b       1 s       2 s         2 s       1 s    one output token
3           7        b       2 s        -           -             rejected at 2 s
4           0        a       4 s       7 s         9 s       3 s
5           3        c       9 s        -           -             unfinished at 10 s
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.metrics.by_class import MAX_CLASSES, ByPriority, ByTenant
from sim.metrics.definitions import Window
from sim.metrics.dialects import MetricsSettings
from sim.metrics.figure import PoolHardware
from sim.metrics.measured import request_metrics
from sim.metrics.output import COUNTS
from sim.metrics.slo import Slo
from sim.metrics.summary import summarise
from sim.records.run import PoolRecord, RunRecords, replicas_throughout
from tests.sim.metrics.figures_of import figure_of, part_of

NAN = float("nan")
WHOLE = Window(0.0, 10.0)
SLO = Slo(ttft_ms=2000)


def six_requests():
    return pd.DataFrame(
        {
            "request_id": range(6),
            "priority": [0, 7, 0, 7, 0, 3],
            "tenant": ["a", "a", "b", "b", "a", "c"],
            "status": ["finished", "finished", "finished", "rejected", "finished", "unfinished"],
            "arrival_s": [0.0, 0.0, 1.0, 2.0, 4.0, 9.0],
            "scheduled_s": [0.0, 2.0, 1.0, NAN, 6.0, NAN],
            "first_token_s": [1.0, 4.0, 2.0, NAN, 7.0, NAN],
            "last_token_s": [3.0, 6.0, 2.0, NAN, 9.0, NAN],
            "finished_s": [3.0, 6.0, 2.0, 2.0, 9.0, NAN],
            "prompt_tokens": [10, 20, 30, 40, 50, 60],
            "output_tokens": [3, 3, 1, 0, 5, 0],
            "preemptions": [0, 2, 0, 0, 1, 0],
        }
    )


def figures_by_class(table, window, slo):
    part = part_of(window, slo=slo, requests=table)
    found = {kind.name: figure_of(kind, part) for kind in (ByPriority, ByTenant)}
    return {name: classes for name, classes in found.items() if classes}


def by_class(slo=SLO, window=WHOLE, **columns):
    return figures_by_class(request_metrics(six_requests().assign(**columns), slo), window, slo)


def test_each_priority_has_its_counts_latencies_rates_and_goodput():
    figures = by_class()["by_priority"]
    assert list(figures) == ["0", "3", "7"]
    online, batch = figures["0"], figures["7"]
    assert online["requests"] == {"arrived": 3, "finished": 3, "rejected": 0, "aborted": 0, "unfinished": 0}
    assert batch["requests"] == {"arrived": 2, "finished": 1, "rejected": 1, "aborted": 0, "unfinished": 0}
    assert (online["ttft"]["mean_s"], online["ttft"]["p50_s"]) == (pytest.approx(5 / 3), 1.0)
    assert (online["tpot"]["count"], online["tpot"]["mean_s"]) == (2, pytest.approx((1.0 + 0.5) / 2))
    assert (batch["e2e"]["count"], batch["e2e"]["max_s"], batch["queue"]["max_s"]) == (1, 6.0, 2.0)
    assert online["throughput"] == {"requests_per_s": 0.3, "input_tokens_per_s": 9.0}
    assert (online["goodput"]["share"], online["goodput"]["requests_per_s"]) == (pytest.approx(2 / 3), 0.2)
    assert (batch["goodput"]["share"], batch["goodput"]["attained"]) == (0.0, False)
    assert (online["preemptions"], batch["preemptions"]) == (1, 2)
    assert figures["3"]["requests"]["unfinished"] == 1


def test_tenants_come_by_their_number_of_requests():
    figures = by_class(slo=None)["by_tenant"]
    assert [(name, tenant["requests"]["arrived"]) for name, tenant in figures.items()] == [
        ("a", 3),
        ("b", 2),
        ("c", 1),
    ]
    assert figures["a"]["goodput"] is None


def test_trimming_leaves_out_what_it_leaves_out_of_the_whole_summary():
    """From 3.5 s on, request 4 arrives and 1 and 4 get their first tokens; counts stay those of the run."""
    figures = by_class(window=Window(3.5, 10.0))["by_priority"]
    assert (figures["0"]["ttft"]["count"], figures["0"]["ttft"]["mean_s"]) == (1, 3.0)
    assert figures["0"]["requests"]["arrived"] == 3
    assert figures["7"]["ttft"]["count"] == 0
    assert figures["7"]["throughput"]["input_tokens_per_s"] == pytest.approx(20 / 6.5)
    assert figures["7"]["throughput"]["requests_per_s"] == pytest.approx(1 / 6.5)
    assert figures["7"]["goodput"]["attained"] is None
    assert figures["7"]["preemptions"] == 0


def test_one_class_is_not_distinguished():
    assert by_class(priority=4, tenant="a") == {}
    assert list(by_class(priority=4)) == ["by_tenant"]
    assert figures_by_class(request_metrics(six_requests().iloc[:0], None), WHOLE, None) == {}
    assert figures_by_class(request_metrics(six_requests().drop(columns=["priority"]), None), WHOLE, None)


def test_of_many_tenants_those_with_the_most_requests_are_reported():
    table = pd.concat([six_requests().iloc[:1]] * 61, ignore_index=True)
    names = [f"t{i:02}" for i in range(60)] + ["t59"]
    figures = figures_by_class(request_metrics(table.assign(tenant=names), None), WHOLE, None)
    assert list(figures["by_tenant"]) == ["t59", *names[: MAX_CLASSES - 1]]


@given(
    st.lists(st.tuples(st.integers(-1, 2), st.sampled_from("xyz")), min_size=6, max_size=6),
    st.floats(0, 4),
    st.floats(5, 10),
)
def test_classes_add_up_to_the_whole(classes, start_s, end_s):
    """Counts, rates and sums of latencies over all classes are those of all requests as one."""
    priorities, tenants = zip(*classes, strict=True)
    window = Window(start_s, end_s)
    found = by_class(window=window, priority=list(priorities), tenant=list(tenants))
    # A stranger makes two classes of what is otherwise one.
    stranger = six_requests().iloc[:1].assign(priority=1, arrival_s=-1.0, prompt_tokens=0, finished_s=-0.5)
    whole_table = pd.concat([six_requests().assign(priority=0), stranger.assign(first_token_s=-0.6)])
    whole = figures_by_class(request_metrics(whole_table, SLO), window, SLO)["by_priority"]["0"]
    assert ("by_priority" in found) == (len(set(priorities)) > 1)
    for parts in (list(figures.values()) for figures in found.values()):
        for name in COUNTS:
            assert sum(part["requests"][name] for part in parts) == whole["requests"][name]
        for path in (("throughput", "requests_per_s"), ("goodput", "requests_per_s")):
            total = sum(part[path[0]][path[1]] for part in parts)
            assert total == pytest.approx(whole[path[0]][path[1]])
        for name in ("ttft", "tpot", "e2e", "queue"):
            counted = [part[name] for part in parts if part[name]["count"]]
            assert sum(part["count"] for part in counted) == whole[name]["count"]
            if whole[name]["count"]:
                total = sum(part["count"] * part["mean_s"] for part in counted)
                assert total == pytest.approx(whole[name]["count"] * whole[name]["mean_s"])
        assert sum(part["preemptions"] for part in parts) == whole["preemptions"]


def records_of(requests):
    shape = ("decode_seqs", "decode_context_tokens", "prefill_seqs", "prefill_tokens", "prefill_pairs")
    names = ("replica", *shape, "prefill_context_tokens", "sampled_seqs", "kv_blocks_used", "kv_tokens_used")
    table = dict.fromkeys((*names, "preempted", "waits_for_memory"), np.zeros(0, np.int64))
    tokens = requests["output_tokens"] - 1
    gaps = requests["first_token_s"].notna()
    return RunRecords(
        requests=requests,
        iterations=pd.DataFrame({**table, "start_s": np.zeros(0), "duration_s": np.zeros(0)}),
        gap_s=np.ones(int(gaps.sum())),
        gap_count=tokens[gaps].to_numpy(),
        gap_end_s=requests["last_token_s"][gaps].to_numpy(),
        pools=(PoolRecord(10, 4),),
        replicas=replicas_throughout(1, 10.0),
        end_s=10.0,
        num_evicted_blocks=3,
    )


def summary_of(records, **trim):
    nothing = SimpleNamespace(
        peak_flops_per_s=1.0, peak_bytes_per_s=1.0, flops=lambda _: 0.0, bytes_moved=lambda _: 0.0
    )
    return summarise(
        records,
        pools=[PoolHardware(model=nothing, price_usd_per_hour=1.0)],
        slo=SLO,
        metrics=MetricsSettings(**trim),
    )


def test_the_summary_has_classes_where_there_are_several():
    records = records_of(six_requests())
    summary = summary_of(records)
    json.dumps(summary, allow_nan=False)
    assert summary["by_priority"]["7"]["tpot"]["count"] == 1
    assert summary["by_priority"]["3"]["ttft"]["mean_s"] is None
    assert sum(tenant["requests"]["arrived"] for tenant in summary["by_tenant"].values()) == 6
    alike = summary_of(replace(records, requests=records.requests.assign(priority=0, tenant="")))
    assert not {"by_priority", "by_tenant"} & alike.keys()


def test_counts_by_status_and_evictions_are_of_the_whole_run_whatever_is_trimmed():
    whole, trimmed = (summary_of(records_of(six_requests()), warmup_s=warmup_s) for warmup_s in (0.0, 3.5))
    assert trimmed["requests"] == whole["requests"]
    assert trimmed["cache"]["evicted_blocks"] == whole["cache"]["evicted_blocks"] == 3
    assert trimmed["ttft"]["count"] < whole["ttft"]["count"]
