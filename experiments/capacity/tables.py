"""The answer as sentences, tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.app.launch_lines.written import sglang_launch, tensorrt_llm_launch, vllm_launch
from experiments.app.settings.override import Override
from experiments.app.terminal import plain_table
from experiments.capacity.advice import advice_lines
from experiments.capacity.advice import to_json as advice_json
from experiments.capacity.answer import Answer
from experiments.capacity.candidates import Candidate
from experiments.capacity.first_limit import growth_sentence
from experiments.capacity.precision import precision_sentence
from experiments.capacity.probe import at_target
from experiments.capacity.results import Ranked, effort, excluded, exclusion_lines, exclusions_json
from experiments.capacity.within_error import (
    kv_shortage,
    start_doubt,
    verdict,
    verdict_json,
    verdict_sentence,
)
from experiments.study.notes import expected_error_lines
from experiments.study.trace_runs import blocks_text
from experiments.study.verdicts import LEVEL
from sim.metrics.confidence import Interval, Outcome
from sim.metrics.definitions import plain_json
from sim.report.numbers import (
    MISSING,
    mean_text,
    number,
    seconds,
    supported,
    with_interval,
)
from sim.report.wording import LATENCIES

PRICE, SOURCE = "hardware.price_usd_per_hour", "hardware.price_source"
AT_ONCE = 5
"""Candidates side by side in a table on the terminal."""


def print_answer(found: Answer, console: Console) -> None:
    """Prints the answer, its caveats, the tables and the launch commands."""
    for sentence in sentences(found):
        console.print(Text(sentence), soft_wrap=True)
    for warning in caveats(found):
        console.print(Text(f"  {warning}", style="yellow"), soft_wrap=True)
    if found.ranked:
        for first in range(0, len(found.ranked), AT_ONCE):
            console.print(plain_table(turned(found.ranked[first : first + AT_ONCE]), (0,)))
        if len(found.seeds) > 1:
            text = f"  ±: half the width of the {LEVEL} over {len(found.seeds)} seeds"
            console.print(Text(text, style="dim"))
        elif found.is_trace:
            console.print(Text(f"  ±: half the width of the {LEVEL} over blocks of the trace", style="dim"))
    if len(found.stages) > 1:
        console.print(plain_table(stage_rows(found), (0, 2)))
    for line in exclusion_lines(excluded(found.question, found.search)):
        console.print(Text(line, style="dim"), soft_wrap=True)
    for title, launch in launches(found).items():
        console.print(Text(f"{title}:"))
        console.print(Text(launch[0]), soft_wrap=True)
        for note in launch[1]:
            console.print(Text(f"  {note}", style="dim"), soft_wrap=True)


def sentences(found: Answer) -> list[str]:
    """Returns sentences on the winner, its confidence, the runner-up and the search, or the advice."""
    lines = []
    if found.ranked:
        lines += [_winner(found), *_limits(found), *_sure(found)]
        if found.unchanged is not None:
            lines.append(precision_sentence(found.unchanged, found.ranked[0].usd_per_hour))
        if len(found.ranked) > 1:
            lines.append(_runner_up(found.ranked[0], found.ranked[1]))
            if decided := verdict(found.ranked[0], found.ranked[1]):
                lines.append(verdict_sentence(decided, found.ranked[1].candidate.name))
    elif found.advice is not None:
        lines += advice_lines(found.advice, found.question.slo, _growth(found))
    elif not found.interrupted:
        lines.append("No candidate fits in memory.")
    if found.day is not None:
        lines.append(found.day.sentence)
    lines.append(effort(found.question, found.search))
    if found.ranked:
        lines.append(price_sentence([row.candidate for row in found.ranked], found.question.base))
    return lines


def _growth(found: Answer) -> str:
    """Returns the first month and the growth of its traffic; empty without growth."""
    load = found.search.load
    return (
        "" if load == 1 else f" in month {found.question.settings.months[0]} ({load:.3g} times the traffic)"
    )


def _winner(found: Answer) -> str:
    best, settings = found.ranked[0], found.question.settings
    spares = best.replicas - best.num_up
    margins = [f"{100 * settings.headroom:g} % more traffic"] if settings.headroom else []
    margins += [f"{spares} of them down"] if spares else []
    keeping = f"the SLO{_growth(found)}"
    keeping += f" with {' and '.join(margins)}" if margins else ""
    terms = ", ".join(f"{LATENCIES[t]} {1e3 * s:g} ms" for t, s in found.question.slo.limits_s.items())
    gpus = f"{best.num_devices} GPU{'s' * (best.num_devices > 1)}"
    return (
        f"{best.replicas} x {best.candidate.name} ({gpus}) meet{'s' * (best.replicas == 1)} {keeping} "
        f"({100 * found.question.slo.attainment_target:g} % of requests within {terms}) for "
        f"${best.usd_per_hour:,.2f}/hour, "
        f"${_figure(best.figures['usd_per_million_output_tokens'])} per million output tokens."
    )


def _limits(found: Answer) -> list[str]:
    """Returns a sentence on what the winner would miss first with fewer replicas, or with more traffic."""
    best, first = found.ranked[0], found.first_limit
    if best.limit is not None:
        return [f"With one replica fewer {LATENCIES[best.limit.term]} fails first ({best.limit.cause})."]
    has_margins = found.question.settings.headroom > 0
    return [] if first is None else [growth_sentence(first, best.num_up, has_margins=has_margins)]


def _sure(found: Answer) -> list[str]:
    best, target = found.ranked[0], found.question.slo.attainment_target
    share = best.share_at_margin
    lines = []
    if share.num_values > 1 and not share.is_exact:
        reaches = (
            "; the interval reaches below the target, so other traffic may miss it"
            if share.low < target
            else ""
        )
        shown = supported(share, 100)
        assert shown is not None
        most = shown.high if share.high <= 1 else "100"
        each = f", at least {100 * target:g} % in each of {share.num_values} seeds"
        each = "" if found.is_trace else each
        lines.append(
            f"SLO attainment, including the margins: {shown.mean} % ({LEVEL} {shown.low} to {most})"
            f"{each}{reaches}."
        )
    if found.kept_with_one_less is not None:
        kept, seeds = found.kept_with_one_less
        lines.append(f"With one replica fewer the SLO is met in {kept} of {seeds} seeds.")
    return lines


def _runner_up(best: Ranked, other: Ranked) -> str:
    text = (
        f"Next: {other.replicas} x {other.candidate.name} "
        f"({other.num_devices} GPU{'s' * (other.num_devices > 1)}) for ${other.usd_per_hour:,.2f}/hour"
    )
    if best.usd_per_hour > 0:
        more = other.usd_per_hour / best.usd_per_hour - 1
        is_worse = other.share_at_margin.mean < best.share_at_margin.mean
        as_much = f", the same cost{' but lower SLO attainment' * is_worse}"
        if more < -1e-9:
            text += f", {number(-100 * more)} % less, but it may not start"
        else:
            text += f", {number(100 * more)} % more" if more > 1e-9 else as_much
    if other.limit is not None:
        text += f"; with one replica fewer {LATENCIES[other.limit.term]} fails ({other.limit.cause})"
    elif other.num_up == other.candidate.least_up:
        fewest = "one replica is" if other.num_up == 1 else f"{other.num_up} replicas are"
        text += f"; {fewest} the minimum"
    ratio = None if other.ahead is None else other.ahead.ratio
    shown = None if ratio is None or not _differs(ratio) else supported(ratio)
    if other.ahead is not None and shown is not None:
        same = other.ahead.outcome("lower") in (Outcome.NO_DIFFERENCE, Outcome.EQUAL)
        text += (
            f". Per token it costs {shown.mean} times as much ({LEVEL} {shown.low} to {shown.high}"
            f"{', no difference beyond noise' if same else ''})"
        )
    return f"{text}."


def _differs(ratio: Interval) -> bool:
    """Returns whether a ratio with three decimals differs from 1 or is uncertain; False for one seed."""
    bounds = (ratio.mean, ratio.low, ratio.high)
    return ratio.num_values > 1 and any(abs(bound - 1) >= 5e-4 for bound in bounds)


def price_sentence(candidates: Sequence[Candidate], base: Sequence[str]) -> str:
    """Returns a sentence on the price of each GPU of the candidates; base: overrides of the command line."""
    prices = []
    for candidate in candidates:
        device = candidate.scenario.hardware
        names = {Override.parse(text).name for text in (*base, *candidate.overrides)}
        source = f"set by {PRICE}" if PRICE in names and SOURCE not in names else device.price_source
        prices.append(f"{device.name} ${device.price_usd_per_hour:,.2f} ({source})")
    return (
        f"Prices of a GPU for an hour: {'; '.join(dict.fromkeys(prices))}. They are the "
        "price_usd_per_hour of configs/hardware and age fast; to use your own, give a GPU its price in "
        "capacity.hardware: "
        f"'mine: hardware=h100_sxm {PRICE}=1.9'."
    )


def caveats(found: Answer) -> list[str]:
    """Returns warnings about the answer."""
    settings, lines = found.question.settings, []
    if found.interrupted:
        lines.append("Interrupted: the ranking contains only the candidates evaluated so far.")
    if found.is_trace:
        lines.append(
            f"{blocks_text([row.share_at_margin for row in found.ranked])} Other parts of a longer trace are "
            "drawn with workload.window_by_seed=true."
        )
    elif len(found.seeds) < 2:
        lines.append("One seed gives no confidence interval; use two or more.")
    if found.ranked and (lack := found.lack) is not None:
        lines.append(
            f"The fleet is one for this traffic only, which is too short for a steady state: {lack}; use a "
            "workload with more requests to plan for traffic that goes on."
        )
    if found.window_start_s > 0:
        lines.append(
            f"Planned for the busiest {_span(settings.window_s or 0.0)} of the traffic (most tokens), from "
            f"{_span(found.window_start_s)} on; for all of it: capacity.window_s=null."
        )
    if found.ranked and (short := kv_shortage(found.ranked[0])):
        lines.append(f"{short[0].upper()}{short[1:]}.")
    lines += [
        f"{row.candidate.name} costs less (${row.usd_per_hour:,.2f}/hour), but comes last: "
        f"{start_doubt(row.candidate)}."
        for row in found.ranked[1:]
        if row.usd_per_hour < found.ranked[0].usd_per_hour
    ]
    if settings.search == "optuna":
        lines.append("Optuna evaluated only some of the candidates: a better one may be among the others.")
    return [*lines, *expected_error_lines(found.notes)]


def ranked_rows(ranked: Sequence[Ranked]) -> list[list[str]]:
    """Returns a table with one row per candidate; the heading first."""
    lines = [_line(row) for row in ranked]
    return [list(lines[0]), *(list(line.values()) for line in lines)]


def turned(ranked: Sequence[Ranked]) -> list[list[str]]:
    """Returns a table with one column per candidate."""
    return [list(column) for column in zip(*ranked_rows(ranked), strict=True)]


def _line(row: Ranked) -> dict[str, str]:
    """Returns heading -> cell; figures that differ between seeds have half their 95 % interval after a ±."""
    spares = row.replicas - row.num_up
    figures = row.figures
    return {
        "candidate": row.candidate.name,
        "replicas": f"{row.num_up} + {spares}" if spares else f"{row.replicas}",
        "GPUs": f"{row.num_devices}",
        "$/hour": f"{row.usd_per_hour:,.2f}",
        "$ per M output tokens": with_interval(figures["usd_per_million_output_tokens"]),
        **_api_figures(row),
        "SLO attainment, %": with_interval(row.share_at_margin, 100),
        **{
            f"{label}, ms": with_interval(figures[at_target(term)], 1e3)
            for term, label in _percentiles(row).items()
        },
        "goodput, requests/s": with_interval(figures["goodput_per_s"]),
        "goodput per GPU": with_interval(figures["goodput_per_s_and_gpu"]),
        "good requests per $": with_interval(figures["good_requests_per_usd"]),
        "good requests per kWh": with_interval(figures["good_requests_per_kwh"]),
        "output tokens/s per GPU": with_interval(figures["tokens_per_s_and_gpu"]),
        "output tokens/s per user": with_interval(figures["tokens_per_s_and_user"]),
        "W, all GPUs": with_interval(figures["watts"]),
        "MFU, %": with_interval(figures["mfu"], 100),
        "MBU, %": with_interval(figures["mbu"], 100),
        "peak KV use, %": with_interval(figures["kv_peak"], 100),
        "fails with one replica fewer": MISSING if row.limit is None else str(row.limit),
    }


def _api_figures(row: Ranked) -> dict[str, str]:
    """Returns the bill of an API, and the multiple of the traffic at which it is the fleet's cost; if any."""
    if row.candidate.scenario.tariff is None:
        return {}
    return {
        "$/hour of an API": with_interval(row.figures["bill_usd_per_hour"]),
        "cheaper than an API from, x the traffic": with_interval(row.figures["break_even_load"]),
    }


def _percentiles(row: Ranked) -> dict[str, str]:
    """Returns term of the SLO -> label with the percentile of its target: TTFT p95."""
    slo = row.candidate.scenario.slo
    assert slo is not None
    percentile = f"p{100 * slo.attainment_target:g}" if slo.attainment_target < 1 else "max"
    return {term: f"{LATENCIES[term]} {percentile}" for term in slo.limits_s}


def stage_rows(found: Answer) -> list[list[str]]:
    """Returns the table of the forecast; the heading first."""
    first = found.ranked[0].candidate.name if found.ranked else ""
    return [
        ["month", "traffic", "cheapest", "replicas", "$/hour", f"replicas of {first}" if first else "–"],
        *(
            [
                str(stage.month),
                f"x {stage.load:.2f}",
                stage.cheapest or "none meets the SLO",
                str(stage.replicas) if stage.cheapest else MISSING,
                f"{stage.usd_per_hour:,.2f}" if stage.cheapest else MISSING,
                MISSING if stage.grown_replicas is None else str(stage.grown_replicas),
            ]
            for stage in found.stages
        ),
    ]


def launches(found: Answer) -> dict[str, tuple[str, list[str]]]:
    """Returns title -> launch command, and notes on what it cannot express."""
    if not found.ranked:
        return {}
    best = found.ranked[0]
    each = "the replica" if best.replicas == 1 else f"each of {best.replicas} replicas"
    of_engines = {"vLLM": vllm_launch, "SGLang": sglang_launch, "TensorRT-LLM": tensorrt_llm_launch}
    found_by = {name: launch(best.candidate) for name, launch in of_engines.items()}
    return {f"{name}, {each}": (own.command, own.notes) for name, own in found_by.items()}


def to_json(found: Answer) -> dict[str, Any]:
    """Returns the answer as plain values; a figure that does not exist is null."""
    out = excluded(found.question, found.search)
    by_status: dict[str, int] = {"refused": len(found.question.refused)}
    for state in found.search.states:
        name = found.search.status(state).name
        by_status[name] = by_status.get(name, 0) + 1
    return {
        "interrupted": found.interrupted,
        "answer": sentences(found),
        "caveats": caveats(found),
        "seeds": list(found.seeds),
        "requests": found.requests,
        "window_start_s": found.window_start_s,
        "candidates": by_status,
        "excluded": exclusions_json(out),
        "unchanged_precision": None if found.unchanged is None else asdict(found.unchanged),
        "first_limit": None if found.first_limit is None else found.first_limit.to_json(),
        "ranked": [_ranked_json(row, found.question.settings.headroom) for row in found.ranked],
        "kept_with_one_less": found.kept_with_one_less,
        "winner_within_error": verdict_json(verdict(*found.ranked[:2])) if len(found.ranked) > 1 else None,
        "stages": [asdict(stage) for stage in found.stages],
        "autoscaling": None if found.day is None else found.day.to_json(),
        "advice": None if found.advice is None else advice_json(found.advice),
        "launch": {
            title: {"command": command, "notes": notes} for title, (command, notes) in launches(found).items()
        },
        "notes": list(found.notes),
    }


def kept_tokens_per_s(row: Ranked, headroom: float) -> float:
    """Returns the output tokens/s that each replica serves within the SLO, for `windtunnel place`."""
    return row.figures["output_tokens_per_s"].mean * (1 + headroom) / row.num_up


def _ranked_json(row: Ranked, headroom: float) -> dict[str, Any]:
    scenario = row.candidate.scenario
    return {
        "candidate": row.candidate.name,
        "overrides": list(row.candidate.overrides),
        "model": scenario.model.name,
        "weights": scenario.model.weights,
        "gpu": scenario.hardware.name,
        "gpus_per_replica": row.candidate.num_devices,
        "tensor_parallel_size": scenario.tensor_parallel_size,
        "replicas_up": row.num_up,
        "replicas": row.replicas,
        "gpus": row.num_devices,
        "usd_per_hour": row.usd_per_hour,
        "kept_output_tokens_per_s_and_replica": kept_tokens_per_s(row, headroom),
        "share_at_margin": plain_json(row.share_at_margin._asdict()),
        "figures": {name: plain_json(value._asdict()) for name, value in row.figures.items()},
        "limit": None if row.limit is None else row.limit._asdict(),
        "cost_per_token_to_winner": None
        if row.ahead is None or row.ahead.ratio is None
        else plain_json(row.ahead.ratio._asdict()),
    }


def _span(value_s: float) -> str:
    """Formats a time in seconds, minutes or hours; minutes from ten on have no decimals."""
    return f"{value_s / 60:.0f} min" if 600 <= value_s < 7200 else seconds(value_s)


def _figure(interval: Interval) -> str:
    """Formats the mean with its confidence interval, if there is one."""
    shown = supported(interval)
    return mean_text(interval) if shown is None else f"{shown.mean} ({LEVEL} {shown.low} to {shown.high})"
