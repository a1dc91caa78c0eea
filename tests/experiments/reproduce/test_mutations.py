"""Mutations of the simulator: which rows of the gallery they break, and that each row is of its kind."""

from __future__ import annotations

import csv
import math

import pytest

from experiments.reproduce import findings as kept
from experiments.reproduce import mutations
from experiments.reproduce.claims import FAMILIES
from experiments.reproduce.findings import LEAST_MOVE, Finding, broken_by, known
from experiments.reproduce.mutations import MUTATIONS, WORSE, figures_and_uses, figures_under, findings
from experiments.reproduce.rows import Direct, Kind, Row, Source
from hwmodels.costs import Tariff
from tests.drawn import drawn_of

ROWS = {row.name: row for family in FAMILIES for row in family.rows}
TOY = Row(
    name="toy",
    kind=Kind.SIMULATED,
    claim="a toy",
    published=(10.0, 10.0),
    unit="times",
    source=Source("Toy et al., 2024"),
    setting="none",
    ours=Direct(function=lambda: 10.0),
)


def named(kind: Kind, *, differs: bool) -> list[str]:
    return [name for name, row in ROWS.items() if row.kind is kind and row.differs is differs]


def breaking(row: str, found: tuple[Finding, ...]) -> set[str]:
    return {line.mutation for line in found if line.breaks(ROWS[row])}


@pytest.mark.parametrize("name", named(Kind.SIMULATED, differs=False))
def test_a_tenth_off_breaks_every_simulated_row_that_holds(name):
    assert breaking(name, known().get(name, ())), f"{name}: no mutation breaks it; it is indicative"


@pytest.mark.parametrize("name", named(Kind.SIMULATED, differs=True))
def test_a_tenth_off_moves_every_simulated_row_that_differs(name):
    assert known().get(name), f"{name}: no mutation moves it by {LEAST_MOVE:.0%}; it is indicative"


@pytest.mark.parametrize("name", named(Kind.INDICATIVE, differs=False))
def test_nothing_breaks_an_indicative_row(name):
    assert not breaking(name, known().get(name, ())), f"{name}: it is simulated"


def test_the_findings_name_rows_and_mutations():
    lines = [line for found in known().values() for line in found]
    assert {line.row for line in lines} <= ROWS.keys()
    assert {line.mutation for line in lines} <= MUTATIONS.keys()
    wrong = {line.row for line in lines if ROWS[line.row].holds(line.ours) == ROWS[line.row].differs}
    assert not wrong, "rows that are not in the state that they claim"


@pytest.mark.slow
def test_a_new_run_of_the_grid_finds_what_is_kept():
    names = drawn_of(list(ROWS), 5, "mutations")
    fresh: dict[str, list[Finding]] = {name: [] for name in names}
    for line in findings(names, jobs=2):
        fresh[line.row].append(line)
    for name, lines in fresh.items():
        old = known().get(name, ())
        assert breaking(name, tuple(lines)) == breaking(name, old), name
        before = {line.mutation: line.most for line in old}
        for line in lines:  # a move of about 1 % is kept or not
            least = before.get(line.mutation, LEAST_MOVE)
            if math.isfinite(least) or math.isfinite(line.most):
                assert line.most == pytest.approx(least, abs=0.01), f"{name}, {line.mutation}"


def changes(mutation: str, *names: str) -> dict[str, float]:
    plain, changed = figures_under(None, 1.0, names), figures_under(mutation, WORSE, names)
    return {name: changed[name] / plain[name] - 1 for name in names}


def test_each_mutation_changes_what_depends_on_it_and_nothing_else():
    assert changes("kv_bytes", "kv_token", "batch_50") == {"kv_token": pytest.approx(0.1), "batch_50": 0}
    found = changes("discount", "batch_50", "cached_90", "kv_token")
    assert found["batch_50"] == pytest.approx(-0.1)  # 45 % for 50 %
    assert found["cached_90"] == pytest.approx(-1 / 90)
    assert found["kv_token"] == 0


def test_the_use_of_what_a_mutation_changes_is_noticed():
    found = figures_and_uses(["kv_token", "batch_50", "usual"])
    assert {name: used for name, (_, used) in found.items() if name != "usual"} == {
        "kv_token": {"kv_bytes"},
        "batch_50": {"discount"},
    }
    ours, used = found["usual"]
    assert "acceptance" in used
    assert ours == figures_under(None, 1.0, ["usual"])["usual"]


def test_a_mutation_ends_with_its_context():
    original = Tariff.bill_usd
    tokens = {"input_tokens": 1e6, "found": 0.0, "written": 0.0, "output_tokens": 0.0, "pinned_token_s": 0.0}
    tariff = Tariff(batch_factor=0.5)
    with MUTATIONS["discount"].applied(1.1):
        assert tariff.bill_usd(**tokens) == pytest.approx(1.1 * 1.5)
    assert tariff.bill_usd(**tokens) == pytest.approx(1.5)
    assert Tariff.bill_usd is original


@pytest.mark.parametrize(
    ("worse", "better", "is_broken", "most"),
    [
        (9.3, 10.6, True, 0.07),
        (9.7, 10.6, True, 0.06),
        (9.7, 10.3, False, 0.03),
        (9.3, None, True, 0.07),
        (math.nan, None, True, math.inf),
        (math.inf, None, True, math.inf),
    ],
)
def test_what_breaks_a_row_that_holds(worse, better, is_broken, most):
    finding = Finding("toy", "bandwidth", 10.0, worse, better)
    assert finding.breaks(TOY) is is_broken
    assert finding.most == pytest.approx(most)


def test_a_row_that_differs_is_not_broken():
    assert not Finding("toy", "bandwidth", 13.0, 10.0, None).breaks(TOY)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], ""),
        ([Finding("toy", "bandwidth", 10.0, 9.3, None)], "Falls out with bandwidth 10 % off."),
        (
            [
                Finding("toy", "bandwidth", 10.0, 9.3, None),
                Finding("toy", "launches", 10.0, 9.8, 10.1),
                Finding("toy", "compute", 10.0, 10.0, 10.8),
            ],
            "Falls out with compute or bandwidth 10 % off; others move it by at most: launches 2.0 %.",
        ),
        (
            [Finding("toy", "bandwidth", 13.0, 12.0, None)],
            "10 % off moves it by at most: bandwidth 7.7 %.",
        ),
    ],
)
def test_the_sentence_on_what_breaks_a_row(lines, said, tmp_path, monkeypatch):
    file = tmp_path / "mutations.csv"
    monkeypatch.setattr(kept, "FILE", file)
    monkeypatch.setattr(mutations, "FILE", file)
    monkeypatch.setattr(mutations, "_rows", lambda names: [TOY])
    file.write_text(",".join(Finding._fields) + "\n")
    known.cache_clear()
    mutations.write(lines, {"toy"}, MUTATIONS)
    known.cache_clear()
    try:
        assert broken_by(TOY) == said
        with file.open() as written:
            assert len(list(csv.reader(written))) == 1 + len(lines)
    finally:
        known.cache_clear()
