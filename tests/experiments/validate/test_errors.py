"""Distance of two runs: figures by hand, noise floor, verdicts, curves, iteration times."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.validate.fidelity.curves import between, curves
from experiments.validate.fidelity.errors import Part, compare, metric_error
from experiments.validate.fidelity.iteration_errors import iteration_errors
from experiments.validate.fidelity.measured import Measured, of_records
from experiments.validate.fidelity.metrics import Metric, metric_values, scaled
from experiments.validate.fidelity.report import write_validation
from experiments.validate.fidelity.tables import largest_part, metric_rows, part_rows, verdict_line
from experiments.validate.fidelity.thresholds import Thresholds
from hwmodels.iterations import IterationShape
from sim.metrics.slo import Slo
from sim.records.table import Gaps
from sim.settings.build import build
from sim.settings.scenario import build_scenario

NONE = Thresholds()


def run(first_s=(0.5, 1.5), last_s=(1.5, 3.5), tokens=(11, 5), **more) -> Measured:
    """Returns a run of two requests that arrive at 0 s and 1 s."""
    requests = pd.DataFrame(
        {
            "status": "finished",
            "arrival_s": [0.0, 1.0],
            "scheduled_s": [0.25, 1.25],
            "first_token_s": first_s,
            "last_token_s": last_s,
            "finished_s": last_s,
            "prompt_tokens": [100, 200],
            "output_tokens": tokens,
        }
    )
    return Measured(name="toy", requests=requests, **more)


def iterations(durations_s, decode_seqs, prefill_tokens, context=64) -> pd.DataFrame:
    durations_s = np.asarray(durations_s, dtype=np.float64)
    decodes, prompts = np.asarray(decode_seqs), np.asarray(prefill_tokens)
    return pd.DataFrame(
        {
            "replica": 0,
            "start_s": np.concatenate(([0.0], np.cumsum(durations_s)[:-1])),
            "duration_s": durations_s,
            "running": decodes + (prompts > 0),
            "waiting": 0,
            "kv_blocks_used": 10,
            "decode_seqs": decodes,
            "decode_context_tokens": decodes * context,
            "prefill_seqs": (prompts > 0).astype(int),
            "prefill_tokens": prompts,
            "prefill_pairs": prompts * (prompts + 1) // 2,
            "prefill_context_tokens": prompts,
            "sampled_seqs": decodes,
        }
    )


@dataclass
class PerSequence:
    """A hardware model: 1 ms a decoding sequence, 10 us a prompt token."""

    factor: float = 1.0

    def seconds(self, shape: IterationShape):
        return self.factor * (1e-3 * shape.decode_seqs + 1e-5 * shape.prefill_tokens)


def by_name(fidelity) -> dict:
    return {one.metric.name: one for one in fidelity.metrics}


def test_a_run_is_not_apart_from_itself():
    one = run(gaps=Gaps(np.array([0.1, 0.5]), np.array([10, 4]), np.array([1.5, 3.5])))
    slos = scaled(Slo(ttft_ms=600), [0.5, 1])
    fidelity = compare(one, [one], thresholds=Thresholds(ttft_mean=0.01, p99=0.01), slos=slos)
    assert {error.error for error in fidelity.metrics} == {0.0}
    assert fidelity.verdict == "met"
    assert all(curve.difference == 0 for curve in fidelity.curves)


def test_errors_are_simulated_over_real_less_one():
    # TTFT 0.5 and 0.5 s, E2E 1.5 and 2.5 s, TPOT 1 / 10 and 2 / 4 s; simulated first tokens 0.1 s later.
    errors = by_name(compare(run(first_s=(0.6, 1.6)), [run()], thresholds=NONE))
    assert errors["ttft_mean_s"].error == pytest.approx(0.2)
    assert errors["e2e_mean_s"].real == pytest.approx(2.0)
    assert errors["e2e_mean_s"].error == 0
    assert errors["tpot_mean_s"].real == pytest.approx((0.1 + 0.5) / 2)
    assert errors["tpot_mean_s"].error == pytest.approx((0.09 + 0.475) / 0.6 - 1)
    assert errors["output_tokens_per_s"].real == pytest.approx(16 / 3.5)
    assert math.isnan(errors["itl_mean_s"].error)  # no gaps were recorded


def test_slower_is_positive_for_latency_and_negative_for_throughput():
    errors = by_name(compare(run(last_s=(3.0, 7.0)), [run()], thresholds=NONE))
    assert errors["e2e_mean_s"].error > 0
    assert errors["requests_per_s"].error == pytest.approx(-0.5)


def test_itl_is_pooled_over_gaps():
    gaps = Gaps(np.array([0.1, 0.4]), np.array([3, 1]), np.array([1.0, 2.0]))
    values = {metric.name: value for metric, value in metric_values(run(gaps=gaps), []).items()}
    assert values["itl_mean_s"] == pytest.approx(0.7 / 4)
    assert values["itl_p50_s"] == pytest.approx(0.1)


def test_goodput_is_counted_at_each_scale_of_the_slo():
    slos = scaled(Slo(name="chat", e2e_ms=1000), [1, 2, 4])
    values = {metric.name: value for metric, value in metric_values(run(), slos).items()}
    assert [values[f"goodput_x{scale}_per_s"] for scale in (1, 2, 4)] == pytest.approx([0, 1 / 3.5, 2 / 3.5])


def metric(family="ttft", statistic="mean") -> Metric:
    return Metric(name=f"{family}_{statistic}", label="", family=family, statistic=statistic, unit="s")


def test_the_noise_floor_is_the_spread_of_the_real_runs():
    found = metric_error(metric(), 1.1, [0.9, 1.1], NONE)
    assert (found.error, found.noise) == (pytest.approx(0.1), pytest.approx(0.2))
    assert math.isnan(metric_error(metric(), 1.1, [1.0], NONE).noise)


@pytest.mark.parametrize(
    ("simulated", "reals", "allowed", "verdict"),
    [
        (1.02, [1.0], 0.03, "met"),
        (0.98, [1.0], 0.03, "met"),
        (1.04, [1.0], 0.03, "missed"),
        (0.96, [1.0], 0.03, "missed"),
        (1.04, [0.97, 1.03], 0.03, "noise"),
        (1.04, [0.99, 1.01], 0.03, "missed"),
        (0.96, [0.99, 1.01], 0.03, "missed"),
        (1.04, [1.0], None, ""),
        (math.nan, [1.0], 0.03, ""),
        (0.0, [0.0], 0.03, "met"),
        (1.0, [0.0], 0.03, ""),
    ],
)
def test_verdict(simulated, reals, allowed, verdict):
    assert metric_error(metric(), simulated, reals, Thresholds(ttft_mean=allowed)).verdict == verdict


def test_the_worst_verdict_is_that_of_the_whole():
    slow = run(first_s=(0.6, 1.6))
    assert compare(slow, [run()], thresholds=Thresholds(ttft_mean=0.1, e2e_mean=0.1)).verdict == "missed"
    assert compare(slow, [run()], thresholds=Thresholds(e2e_mean=0.1)).verdict == "met"
    assert compare(slow, [run()], thresholds=NONE).verdict == ""


@pytest.mark.parametrize(
    ("family", "statistic", "limit"),
    [
        ("ttft", "mean", 0.06),
        ("tpot", "mean", 0.03),
        ("e2e", "mean", 0.03),
        ("ttft", "p99", 0.10),
        ("e2e", "p99", 0.10),
        ("ttft", "p50", None),
        ("throughput", "requests", 0.02),
        ("throughput", "output_tokens", 0.02),
        ("iteration", "median", 0.03),
        ("running", "mean", None),
    ],
)
def test_the_numbers_to_reach_on_a_gpu(family, statistic, limit):
    cfg = ConfigSource(config_name="validate", dirs=[CONFIG_DIR]).compose([])
    assert build(cfg.thresholds, "thresholds").limit(metric(family, statistic)) == limit


def test_the_numbers_to_reach_on_a_plain_machine():
    cfg = ConfigSource(config_name="validate", dirs=[CONFIG_DIR]).compose(["thresholds=cpu"])
    found = build(cfg.thresholds, "thresholds")
    assert [found.limit(metric(family)) for family in ("ttft", "tpot", "e2e")] == [0.12, 0.08, 0.08]


def test_a_threshold_must_be_positive():
    with pytest.raises(ValueError, match=r"p99=-1: must be > 0, such as 0.03 for 3 %"):
        Thresholds(p99=-1)


# Over time


def test_how_many_are_between_two_moments():
    edges_s = np.array([0.0, 2.0, 4.0, 6.0])
    assert between(np.array([1.0]), np.array([3.0]), edges_s).tolist() == [0.5, 0.5, 0.0]
    assert between(np.array([1.0, 3.0]), np.array([np.nan, 4.0]), edges_s).tolist() == [0.5, 1.5, 1.0]
    assert between(np.array([np.nan]), np.array([np.nan]), edges_s).tolist() == [0, 0, 0]


def curves_by_name(simulated, reals, num_buckets=7):
    return {curve.name: curve for curve in curves(simulated, reals, num_buckets)}


def test_curves_of_timestamps():
    found = curves_by_name(run(last_s=(1.5, 3.0)), [run()])  # buckets of 0.5 s
    in_flight = found["in_flight"]
    assert in_flight.source == "requests"
    assert in_flight.reals[0].tolist() == pytest.approx([1, 1, 2, 1, 1, 1, 1])
    assert in_flight.simulated.tolist() == pytest.approx([1, 1, 2, 1, 1, 1, 0])
    assert in_flight.difference == pytest.approx(1 / 7)
    assert found["waiting"].reals[0].tolist() == pytest.approx([0.5, 0, 0.5, 0, 0, 0, 0])
    assert found["running"].reals[0].tolist() == pytest.approx([0.5, 1, 1.5, 1, 1, 1, 1])
    assert "kv_use_share" not in found


def test_curves_of_a_servers_log_are_held_against_the_simulated_iterations():
    table = iterations([1.0, 1.0, 1.5], [4, 4, 2], [0, 0, 0])
    simulated = run(iterations=table, num_kv_blocks=40)
    log = pd.DataFrame({"time_s": [1.0, 2.0, 3.0], "running": 3.0, "waiting": 0.0, "kv_use_share": 0.5})
    found = curves_by_name(simulated, [run(samples=log)])
    assert found["running"].source == "log"
    assert found["running"].simulated.tolist() == pytest.approx([4, 4, 4, 4, 2, 2, 2])
    # The sample of 1 s stands for 0.5 to 1.5 s, that of 3 s for 2.5 to 3 s.
    assert found["running"].reals[0].tolist() == pytest.approx([0, 3, 3, 3, 3, 3, 0])
    assert found["kv_use_share"].simulated.tolist() == pytest.approx([0.25] * 7)


def test_the_noise_of_a_curve_is_that_of_the_worst_pair_of_real_runs():
    later = run(last_s=(1.5, 3.0))
    in_flight = curves_by_name(run(), [run(), later])["in_flight"]
    assert in_flight.noise == pytest.approx(1 / 7)
    assert in_flight.difference == pytest.approx(0.5 / 7)


def test_replicas_add_up():
    table = iterations([3.5], [4], [0])
    both = pd.concat([table, table.assign(replica=1, running=2)])
    simulated = run(iterations=both, num_kv_blocks=20, num_replicas=2)
    found = curves_by_name(simulated, [simulated])
    assert found["running"].simulated.tolist() == pytest.approx([6] * 7)
    assert found["kv_use_share"].simulated.tolist() == pytest.approx([0.5] * 7)


# Iteration times


def test_iterations_are_priced_from_their_shape():
    table = iterations([0.004, 0.008, 0.010, 0.005], [4, 8, 0, 4], [0, 0, 1000, 100])
    found = iteration_errors([run(iterations=table)], PerSequence(1.1))
    figures = {(one.kind, one.batch, one.context): one for one in found}
    assert figures["decode", "", ""].median == pytest.approx(0.1)
    assert figures["decode", "", ""].count == 2
    assert figures["decode", "4-7", ""].count == figures["decode", "8-15", ""].count == 1
    assert figures["decode", "", "64-127"].count == 2
    assert figures["prefill", "1", ""].median == pytest.approx(0.1)
    assert figures["mixed", "", ""].total == pytest.approx(0.1)
    assert found[0].kind == "all"
    assert found[0].count == 4
    assert sum(figures[kind, "", ""].count for kind in ("decode", "prefill", "mixed")) == 4


def test_signed_and_absolute_errors_of_iterations():
    table = iterations([0.004 / 1.2, 0.004 / 0.8, 0.004], [4, 4, 4], [0, 0, 0])
    found = iteration_errors([run(iterations=table)], PerSequence())[0]
    assert found.median == pytest.approx(0)
    assert found.median_absolute == pytest.approx(0.2)
    assert math.isnan(found.noise)


def test_noise_of_iterations_is_the_spread_of_the_runs_medians():
    quick, slow = (run(iterations=iterations([0.004 / f] * 3, [4] * 3, [0] * 3)) for f in (1.1, 0.9))
    found = iteration_errors([quick, slow], PerSequence())[0]
    assert found.noise == pytest.approx(0.2)
    assert found.count == 6


def test_the_iteration_verdict_is_about_the_median_absolute_error():
    table = iterations([0.004], [4], [0])
    fidelity = compare(
        run(iterations=table),
        [run(iterations=table)],
        thresholds=Thresholds(iteration=0.03),
        model=PerSequence(0.96),
    )
    assert by_name(fidelity)["iteration_median"].error == pytest.approx(0.04)
    assert fidelity.verdict == "missed"


def test_without_iterations_there_are_no_iteration_errors():
    assert iteration_errors([run()], PerSequence()) == []


def test_trimming_takes_what_happened_between():
    gaps = Gaps(np.array([0.1, 0.2]), np.array([1, 1]), np.array([0.2, 0.8]))
    log = pd.DataFrame({"time_s": [0.0, 0.5, 1.0], "running": 1.0})
    whole = run(gaps=gaps, iterations=iterations([0.4, 0.4], [1, 1], [0, 0]), samples=log)
    cut = whole.trimmed(warmup_s=0.3, cooldown_s=0)
    assert cut.requests["arrival_s"].tolist() == [1.0]
    assert cut.gaps is not None
    assert cut.gaps.gap_s.tolist() == [0.2]
    assert len(cut.iterations) == 1
    assert cut.samples["time_s"].tolist() == [0.5, 1.0]
    assert whole.trimmed(warmup_s=0, cooldown_s=0) is whole
    assert whole.trimmed(warmup_s=0, cooldown_s=0.5).requests["arrival_s"].tolist() == [0.0]


# Words and files


def test_the_verdict_names_what_is_outside():
    fidelity = compare(run(first_s=(0.6, 1.6)), [run()], thresholds=Thresholds(ttft_mean=0.1, e2e_mean=0.1))
    assert verdict_line(fidelity) == "1 of 2 figures is within the thresholds; outside: TTFT mean."
    rows = {row[0]: row[1:] for row in metric_rows(fidelity)}
    assert rows["TTFT mean"] == ["600 ms", "500 ms", "+20.0 %", "–", "10.0 %", "outside"]
    assert "ITL mean" not in rows


def test_the_largest_part_is_named():
    parts = [
        Part(name="decisions", errors={"TTFT": 0.0, "TPOT": 0.0}),
        Part(name="host", errors={"TTFT": -0.05, "TPOT": 0.01}),
        Part(name="compute", errors={"TTFT": 0.03, "TPOT": 0.02}),
    ]
    assert largest_part(parts) == ("Largest part of the error: TTFT: host, -5.0 %; TPOT: compute, +2.0 %.")
    assert part_rows(parts)[-1] == ["total", "-2.0 %", "+3.0 %"]
    assert largest_part([]) == ""


def test_page_and_json_hold_everything_and_load_nothing(tmp_path):
    table = iterations([0.004] * 300, [4] * 300, [0] * 300)
    one = run(iterations=table, num_kv_blocks=40)
    fidelity = compare(one, [one, one], thresholds=Thresholds(name="toy", ttft_mean=0.1), model=PerSequence())
    files = write_validation(
        tmp_path,
        fidelity,
        title="A & B",
        config={"seed": 1},
        notes=["a note"],
        parts=[Part(name="host", errors={"TTFT": 0.01})],
        equivalence="300 of 300 plans are equal.",
        measured_environment={"gpu": "none"},
    )
    record = json.loads(files[0].read_text())
    assert record["verdict"] == "met"
    assert record["decomposition"] == [{"name": "host", "errors": {"TTFT": 0.01}}]
    assert record["environment"]["measured"] == {"gpu": "none"}
    assert len(record["environment"]["simulated"]["config_digest"]) == 32
    page = files[1].read_text()
    assert len(page) < 6e6
    assert page.count("<script src=") == 0
    for text in ("A &amp; B", "a note", "300 of 300 plans are equal.", "The first 200 iterations", "seed: 1"):
        assert text in page
    assert page.count("4 decodes, 0 prompt tokens: 4 ms") <= 400


def test_records_of_a_simulated_run_are_measured_as_its_summary_says():
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(
        # Exact limits: no iteration decodes a discarded token behind the last request.
        ["workload=poisson", "workload.num_requests=40", "workload.max_tokens=exact", "caching=paged"]
    )
    result = build_scenario(cfg).run()
    values = {metric.name: value for metric, value in metric_values(of_records(result.records), []).items()}
    for name in ("ttft", "tpot", "itl", "e2e"):
        for statistic in ("mean", "p50", "p90", "p99"):
            assert values[f"{name}_{statistic}_s"] == pytest.approx(result.summary[name][f"{statistic}_s"])
    found = curves_by_name(of_records(result.records), [of_records(result.records)], 500)
    assert found["kv_use_share"].simulated_mean == pytest.approx(
        result.summary["kv"]["mean_use_share"], rel=1e-6
    )
