"""The result of a live session of the real engine, in the form of a simulated run."""

from __future__ import annotations

from typing import Any

from experiments.serve.engine.fleet_recorder import FleetRecorder
from experiments.serve.engine.recorder import ServingRecorder
from experiments.serve.settings import full_note
from hwmodels.costs import PowerModel
from hwmodels.iterations import IterationModel, UnknownMachine
from sim.metrics.figure import PoolHardware
from sim.metrics.measured import measure
from sim.metrics.result import RunResult
from sim.metrics.summary import summarise
from sim.setup.scenario import Scenario

Recorder = ServingRecorder | FleetRecorder
OF_ITERATIONS = ("gpu_busy", "kv", "iterations", "preemptions", "preemption", "cache", "waiting")
"""Figures of a summary that need the iterations of the engines."""


def result_of(
    scenario: Scenario, recorder: Recorder, *, is_known_machine: bool, has_iterations: bool = True
) -> RunResult:
    """Computes the figures of a session.

    is_known_machine: whether `hardware` describes the machine that served; otherwise there are no figures of
    its peaks, price and energy. has_iterations: whether the iterations of the engines are recorded.
    """
    records = recorder.records()
    part = measure(records, scenario.metrics, scenario.slo)
    machine = _machine(scenario) if is_known_machine else PoolHardware(model=UnknownMachine())
    summary = summarise(
        records,
        pools=[machine],
        slo=scenario.slo,
        energy=scenario.energy,
        tariff=scenario.tariff,
        metrics=scenario.metrics,
        part=part,
    )
    scenario.add_dialects(summary, records)
    if not is_known_machine:
        summary["cost"] = _unknown(summary["cost"])
    summary["notes"] = _notes(recorder, is_known_machine=is_known_machine)
    if not has_iterations:
        for name in OF_ITERATIONS:
            summary[name] = _unknown(summary[name]) if isinstance(summary[name], dict) else None
        summary["notes"].append(
            "A fleet of engines records no iterations: no figures of batches, KV use and utilisation."
        )
    return RunResult(
        records=records,
        requests=part.table,
        summary=summary,
        models=(machine.model,),
        slo=scenario.slo,
    )


def _machine(scenario: Scenario) -> PoolHardware:
    model: IterationModel = scenario.iteration_model()
    return PoolHardware(
        model=model,
        price_usd_per_hour=scenario.price_usd_per_hour,
        power=PowerModel.of(scenario.hardware),
        num_devices=scenario.layout.num_devices,
    )


def _notes(recorder: Recorder, *, is_known_machine: bool) -> list[str]:
    notes = ["Measured: the real engine served these requests, and nothing is simulated."]
    if not is_known_machine:
        notes.append("No figures of peaks, cost and energy: choose hardware= for the machine that serves.")
    drafts = recorder.drafts
    if drafts.num_draft_tokens:
        notes.append(
            f"Speculation: {drafts.num_accepted_tokens:,} of {drafts.num_draft_tokens:,} draft tokens were "
            f"accepted, {drafts.mean_accepted_length:.2f} tokens per pass with drafts; tokens that came "
            "together have gaps of 0 s."
        )
    if recorder.full_s is not None:
        notes.append(full_note(recorder.full_s))
    return notes


def _unknown(figures: dict[str, Any]) -> dict[str, Any]:
    """Returns figures of the same names without values."""
    return {key: _unknown(value) if isinstance(value, dict) else None for key, value in figures.items()}
