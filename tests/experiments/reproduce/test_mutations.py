"""Mutations of the simulator: which rows of the gallery they move, and that each simulated one is moved."""

from __future__ import annotations

import csv
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from experiments.reproduce import findings as kept
from experiments.reproduce import mutations
from experiments.reproduce.claims import FAMILIES
from experiments.reproduce.findings import Finding, broken_by, known
from experiments.reproduce.mutations import FACTORS, LEAST_MOVE, MUTATIONS, figures_under
from experiments.reproduce.rows import Kind
from hwmodels.tariff import Tariff
from sim.settings import build as building

ROWS = {row.name: row for family in FAMILIES for row in family.rows}
SIMULATED = [name for name, row in ROWS.items() if row.kind is Kind.SIMULATED]


def changes(cases: dict[str, list[str]]) -> dict[tuple[str, str], float]:
    """Returns the change of rows by mutation, each in a process of its own: (row, mutation) -> share."""
    context = get_context("spawn")
    names = sorted({name for rows in cases.values() for name in rows})
    with ProcessPoolExecutor(max_workers=2, mp_context=context, max_tasks_per_child=1) as pool:
        ours, *changed = pool.map(
            figures_under, [None, *cases], [FACTORS[0]] * (1 + len(cases)), [names, *cases.values()]
        )
    return {
        (name, mutation): found[name] / ours[name] - 1
        for mutation, found in zip(cases, changed, strict=True)
        for name in found
    }


@pytest.mark.parametrize("name", SIMULATED)
def test_a_change_of_the_simulator_moves_every_simulated_row(name):
    found = known().get(name, ())
    assert any(abs(line.change) >= LEAST_MOVE or line.falls_at is not None for line in found), (
        f"{name}: no mutation moves it by {LEAST_MOVE:.0%}; it is computed, not simulated"
    )


def test_the_findings_name_rows_and_mutations():
    assert known().keys() <= ROWS.keys()
    assert {line.mutation for lines in known().values() for line in lines} <= MUTATIONS.keys()
    assert all(line.falls_at in (None, *FACTORS) for lines in known().values() for line in lines)


@pytest.mark.slow
def test_each_mutation_changes_what_depends_on_it_and_nothing_else():
    found = changes(
        {
            "bandwidth": ["gpt_fast_compiled", "batch_50", "kv_token"],
            "compute": ["tp_prompt_4", "kv_token"],
            "launches": ["gpt_fast_eager", "kv_token"],
            "kv_bytes": ["kv_token", "batch_50"],
            "acceptance": ["usual", "gpt_fast_compiled"],
            "discount": ["batch_50", "cached_90", "gpt_fast_compiled"],
        }
    )
    assert -0.1 < found["gpt_fast_compiled", "bandwidth"] < -0.05  # weights are most of the time
    assert -0.1 < found["gpt_fast_eager", "launches"] < -0.05
    assert found["kv_token", "kv_bytes"] == pytest.approx(0.1)
    assert -0.1 < found["usual", "acceptance"] < -0.05
    assert found["batch_50", "discount"] == pytest.approx(-0.1)  # 45 % for 50 %
    assert found["cached_90", "discount"] == pytest.approx(-1 / 90)
    for untouched in (
        ("batch_50", "bandwidth"),
        ("kv_token", "bandwidth"),
        ("kv_token", "launches"),
        ("gpt_fast_compiled", "acceptance"),
        ("gpt_fast_compiled", "discount"),
    ):
        assert found[untouched] == 0


@pytest.mark.slow
def test_the_strongest_mutation_of_every_simulated_row_still_moves_it():
    cases: dict[str, list[str]] = {}
    for name in SIMULATED:
        strongest = max(known()[name], key=lambda line: abs(line.change))
        if abs(strongest.change) >= LEAST_MOVE:
            cases.setdefault(strongest.mutation, []).append(name)
    left = {place: change for place, change in changes(cases).items() if abs(change) < LEAST_MOVE}
    assert not left, "rows that the simulator no longer moves; run experiments.reproduce.mutations"


def test_a_mutation_ends_with_its_context():
    original = building.build_as
    with MUTATIONS["discount"].applied(1.1):
        dearer = building.build_as(Tariff, {"batch_factor": 0.5}, "tariff")
    assert dearer.batch_factor == pytest.approx(0.55)
    assert building.build_as is original


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], ""),
        ([Finding("toy", "bandwidth", -0.07, 1.25, 1.25)], "Falls out with bandwidth x 1.25."),
        (
            [Finding("toy", "bandwidth", 0.03, None, 2.0), Finding("toy", "launches", 0.01, None, 1.1)],
            "Still holds with bandwidth x 2; x 1.1 moves it by +3.0 %.",
        ),
    ],
)
def test_the_sentence_on_what_breaks_a_row(lines, said, tmp_path, monkeypatch):
    file = tmp_path / "mutations.csv"
    monkeypatch.setattr(kept, "FILE", file)
    monkeypatch.setattr(mutations, "FILE", file)
    file.write_text(",".join(Finding._fields) + "\n")
    known.cache_clear()
    mutations.write(lines)
    known.cache_clear()
    try:
        assert broken_by("toy") == said
        if lines and "Still" in said:
            assert broken_by("toy", differs=True) == "Moves by +3.0 % with bandwidth x 1.1."
        with file.open() as written:
            assert len(list(csv.reader(written))) == 1 + len(lines)
    finally:
        known.cache_clear()
