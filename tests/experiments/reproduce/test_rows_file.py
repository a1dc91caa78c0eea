"""Rows of the gallery as data: what a YAML file of a family becomes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from experiments.reproduce import rows_file
from experiments.reproduce.rows import Compared, Direct, Kind, Sampled, Searched, Source
from experiments.reproduce.rows_file import read_family

SOURCES = "toy: {text: 'Toy et al., 2024', url: https://toy.example, was_read: true}\n"
ROW = "kind: simulated, claim: a toy, unit: times, source: toy, setting: none"
FUNCTIONS = SimpleNamespace(twice=lambda value, seed=0: 2 * value + seed)


def read(rows: str, tmp_path, monkeypatch):
    (tmp_path / "sources.yaml").write_text(SOURCES)
    (tmp_path / "toys.yaml").write_text(f"title: Toys\nrows:\n{rows}")
    monkeypatch.setattr(rows_file, "FOLDER", tmp_path)
    rows_file._sources.cache_clear()
    try:
        return read_family("toys", FUNCTIONS)
    finally:
        rows_file._sources.cache_clear()


@pytest.mark.parametrize(("ours", "kind"), [("function", Direct), ("search", Searched), ("sample", Sampled)])
def test_a_function_of_the_module_gives_our_figure(ours, kind, tmp_path, monkeypatch):
    text = f"  one: {{{ROW}, published: 4, ours: {{{ours}: twice, arguments: [2]}}}}\n"
    family = read(text, tmp_path, monkeypatch)
    (row,) = family.rows
    assert (family.name, family.title) == ("toys", "Toys")
    assert (row.name, row.kind, row.published) == ("one", Kind.SIMULATED, (4, 4))
    assert row.source == Source("Toy et al., 2024", "https://toy.example", was_read=True)
    assert isinstance(row.ours, kind)
    assert row.ours.function(*([1] if kind is Sampled else [])) == (5 if kind is Sampled else 4)


def test_an_arm_of_a_comparison_and_a_band(tmp_path, monkeypatch):
    ours = "{experiment: e, metric: m, arm: a, over: b, at: 5, over_at: 1}"
    text = f"  one: {{{ROW}, published: [20, .inf], band: [19, 30], why: So., ours: {ours}}}\n"
    (row,) = read(text, tmp_path, monkeypatch).rows
    assert row.ours == Compared(experiment="e", metric="m", arm="a", over="b", at=5, over_at=1)
    assert row.published == (20, math.inf)
    assert row.limits == (19, 30)


def test_an_unknown_field_or_source_is_refused(tmp_path, monkeypatch):
    ours = "ours: {function: twice, arguments: [2]}"
    with pytest.raises(TypeError, match="tolerances"):
        read(f"  one: {{{ROW}, published: 4, tolerances: 1, {ours}}}\n", tmp_path, monkeypatch)
    with pytest.raises(KeyError, match="other"):
        read(f"  one: {{{ROW.replace('toy,', 'other,')}, published: 4, {ours}}}\n", tmp_path, monkeypatch)
