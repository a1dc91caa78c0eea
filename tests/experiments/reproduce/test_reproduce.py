"""`windtunnel reproduce`: published figures that need no simulation, states of rows, exit codes and files."""

from __future__ import annotations

import json
import math

import pytest

from experiments.app.cli import main
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.reproduce import command, tasks
from experiments.reproduce.claims import FAMILIES
from experiments.reproduce.rows import Compared, Direct, Family, Kind, Row, Sampled, Searched, Source
from experiments.reproduce.tasks import planned
from experiments.reproduce.verdicts import State, Verdict
from sim.metrics.confidence import mean_interval

ROWS = {row.name: row for family in FAMILIES for row in family.rows}
INF = math.inf


def make_row(value=10.0, **given) -> Row:
    default = {
        "name": "toy",
        "claim": "a toy",
        "published": (10.0, 10.0),
        "unit": "times",
        "source": Source("Toy et al., 2024"),
        "setting": "none",
        "kind": Kind.SIMULATED,
        "ours": Direct(function=lambda: value),
    }
    return Row(**{**default, **given})


def verdict_of(row: Row) -> Verdict:
    return Verdict(row=row, ours=mean_interval([row.ours.function()]))


def reproduce(tmp_path, *arguments: str) -> int:
    folder = f"hydra.run.dir={tmp_path}/out"
    return main(["reproduce", *arguments, folder, f"cache={tmp_path}/kept", "progress=false"])


@pytest.mark.sampled(fast=16, slow=40)
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if isinstance(row.ours, Direct)])
def test_a_computed_row_is_in_the_state_that_it_claims(name):
    row = ROWS[name]
    verdict = verdict_of(row)
    assert verdict.state is (State.DIFFERS if row.differs else State.HOLDS), verdict.ours_text


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("kv_token", 524_288),
        ("ttft_mean", 390),
        ("ttft_median", 100),
        ("goodput_minute", 30),
        ("goodput_second", 3),
        ("usd_million", 2e6 / 3600 / 100),
        ("usd_decode", 2 / 3600 * 2000),
        ("usd_prefill", 2 / 6),
        ("usd_requests", 2 / 3600 * 2600),
        ("cached_90", 90),
        ("cached_75", 75),
        ("cache_rent", 1),
        ("batch_50", 50),
        ("mla_ratio", 2 * 128 * 128 / 576),
        ("kv_70b", 2 * 80 * 8 * 128 * 2 * 64 * 1024 / 2**30),
        ("alpha_050", (1 - 0.5**5) / 0.5 / 1.4),
        ("alpha_060", (1 - 0.6**5) / 0.4 / 1.4),
        ("alpha_070", (1 - 0.7**5) / 0.3 / 1.4),
        ("alpha_080", (1 - 0.8**5) / 0.2 / 1.4),
        ("alpha_090", (1 - 0.9**5) / 0.1 / 1.4),
        ("alpha_095", (1 - 0.95**5) / 0.05 / 1.4),
    ],
)
def test_exact_rows_are_exact(name, exact):
    assert ROWS[name].ours.function() == pytest.approx(exact, rel=1e-9)


def test_names_of_rows_and_families_differ():
    names = [row.name for family in FAMILIES for row in family.rows] + [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_every_comparison_of_a_row_can_be_composed():
    simulated = [row for row in ROWS.values() if isinstance(row.ours, Compared)]
    plan = planned(simulated, [0], [CONFIG_DIR])
    assert {name for name, _, _ in plan.points} == {row.ours.experiment for row in simulated}
    assert {key[:3] for key in plan.tasks()} <= plan.points.keys()


@pytest.mark.parametrize(
    ("value", "given", "state", "ratio"),
    [
        (10.4, {}, State.HOLDS, 1.04),
        (10.6, {}, State.FELL_OUT, 1.06),
        (10.3, {"tolerance": 0.02}, State.FELL_OUT, 1.03),
        (9.4, {}, State.FELL_OUT, 0.94),
        (12.6, {"differs": True, "why": "Another setting."}, State.DIFFERS, 1.26),
        (12.6, {"band": (12, 13), "why": "Another setting."}, State.HOLDS, 1.26),
        (3.0, {"published": (2.0, 4.0)}, State.HOLDS, 1.0),
        (88.0, {"published": (20.0, INF)}, State.HOLDS, 1.0),
        (4.1, {"published": (0.0, 4.0)}, State.HOLDS, 1.025),
        (4.3, {"published": (0.0, 4.0)}, State.FELL_OUT, 1.075),
        (math.nan, {}, State.MISSING, math.nan),
    ],
)
def test_states_and_ratios(value, given, state, ratio):
    verdict = verdict_of(make_row(value, **given))
    assert verdict.state is state
    assert verdict.ratio == pytest.approx(ratio, nan_ok=True)


@pytest.mark.parametrize(
    ("published", "unit", "text"),
    [
        ((10.0, 10.0), "times", "10 times"),
        ((5.556, 5.556), "$", "$5.556"),
        ((20.0, INF), "times", "more than 20 times"),
        ((0.0, 4.0), "%", "less than 4 %"),
        ((2.0, 4.0), "times", "2 to 4 times"),
    ],
)
def test_the_published_figure_in_words(published, unit, text):
    assert make_row(published=published, unit=unit).published_text == text


@pytest.mark.parametrize("given", [{"differs": True, "verified": True}, {"band": (9, 11)}])
def test_a_verified_cause_and_a_band_need_a_sentence(given):
    with pytest.raises(ValueError, match="toy: a verified cause or a band of a row's own needs a sentence"):
        make_row(**given)


def test_the_output_says_which_causes_are_not_verified(tmp_path, monkeypatch, capsys):
    known, other = {"why": "Another setting.", "verified": True}, {"why": "A guess.", "name": "other"}
    use(monkeypatch, make_row(13.0, differs=True, **known), make_row(12.0, differs=True, **other))
    assert reproduce(tmp_path, "report=false") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "Another setting. other: none." in words
    assert "A guess. Cause not verified. 2 simulated rows: 2 differ, 1 of them by at most 25 %." in words
    assert "Not within the band, and the cause is not verified: other." in words


def toy_search() -> float:
    """Stands for a function that simulates."""
    return 10.0


def toy_fail() -> float:
    """Stands for a function that must not be called."""
    raise AssertionError("the run began")


def toy_sample(seed: int) -> float:
    """Stands for a function of the seed that simulates."""
    return 9.0 + seed


def use(monkeypatch, *rows: Row) -> None:
    families = (Family(name="toys", title="Toys", rows=rows),)
    monkeypatch.setattr(command, "FAMILIES", families)


def test_a_row_that_falls_out_of_its_band_gives_exit_code_3(tmp_path, monkeypatch, capsys):
    use(monkeypatch, make_row(13.0), make_row(name="other"))
    assert reproduce(tmp_path) == 3
    printed = capsys.readouterr()
    assert printed.err == "windtunnel: 1 row fell out of the band: toy\n"
    assert "2 simulated rows: 1 holds, 1 fell out." in printed.out
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]
    assert [row["state"] for row in rows] == ["fell out", "holds"]
    assert "Toy et al., 2024 (not read here)" in (tmp_path / "out" / "gallery.html").read_text()


@pytest.mark.parametrize(
    ("seeds", "said"),
    [("[0,1]", "95 % interval over 2 seeds"), ("[0]", "have one seed, and none either")],
)
def test_the_page_says_whether_comparisons_have_intervals(tmp_path, monkeypatch, seeds, said):
    use(monkeypatch, make_row(10.0))
    assert reproduce(tmp_path, f"seeds={seeds}") == 0
    assert said in (tmp_path / "out" / "gallery.html").read_text()


def test_a_row_that_is_known_to_differ_gives_exit_code_0(tmp_path, monkeypatch, capsys):
    use(monkeypatch, make_row(13.0, differs=True, why="Another setting."))
    assert reproduce(tmp_path, "report=false") == 0
    assert "Another setting." in capsys.readouterr().out
    assert not (tmp_path / "out" / "gallery.html").exists()


def test_the_page_has_setting_source_and_reason_of_each_row(tmp_path, monkeypatch):
    source = Source("Toy et al., 2024", "https://toy.example/?a=1&b=2", was_read=True)
    use(monkeypatch, make_row(13.0, differs=True, why="A & B.", verified=True, source=source))
    assert reproduce(tmp_path) == 0
    link = '<a href="https://toy.example/?a=1&amp;b=2" rel="noreferrer">Toy et al., 2024</a>'
    page = (tmp_path / "out" / "gallery.html").read_text()
    assert f"<li>toy: none. From: {link}. A &amp; B.</li>" in page
    cells = ("simulated", "10 times", "13 times", "1.30", "differs")
    assert "<th>a toy [toy]</th>" + "".join(f"<td>{cell}</td>" for cell in cells) in page


def test_results_are_kept_and_read_again(tmp_path, monkeypatch):
    use(
        monkeypatch,
        make_row(ours=Searched(function=toy_search)),
        make_row(
            name="paged",
            published=(0, INF),
            ours=Compared(
                experiment="contiguous_vs_paged",
                metric="kv.wasted_share",
                arm="paged",
                shown="percent",
            ),
        ),
    )
    assert reproduce(tmp_path, "report=false", "seeds=[0]", "jobs=1") == 0
    kept = sorted((tmp_path / "kept").iterdir())
    assert len(kept) == 2
    for file in kept:
        file.write_text(file.read_text().replace("10.0", "10.4"))
    assert reproduce(tmp_path, "report=false", "seeds=[0]", "jobs=1", "overwrite=true") == 0
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]
    assert rows[0]["ours"]["mean"] == 10.4
    assert 0 < rows[1]["ours"]["mean"] < 4


def test_a_function_of_the_seed_has_an_interval_over_all_seeds(tmp_path, monkeypatch):
    use(monkeypatch, make_row(ours=Sampled(function=toy_sample)))
    assert reproduce(tmp_path, "report=false", "jobs=1", "seeds=[0,1,2]") == 0
    (row,) = json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]
    half = 4.303 / math.sqrt(3)  # Student's t with two degrees of freedom, standard deviation 1
    assert row["ours"] == pytest.approx({"mean": 10.0, "low": 10.0 - half, "high": 10.0 + half}, rel=1e-3)
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_a_cache_that_cannot_be_made_is_reported_before_the_runs(tmp_path, monkeypatch, capsys):
    use(monkeypatch, make_row(ours=Searched(function=toy_fail)))
    (tmp_path / "file").touch()
    settings = [f"cache={tmp_path}/file/kept", f"hydra.run.dir={tmp_path}/out", "jobs=1"]
    assert main(["reproduce", *settings]) == 1
    assert "choose another folder with cache=, or cache=null" in capsys.readouterr().err


def test_a_run_that_ctrl_c_cut_short_is_not_kept(tmp_path, monkeypatch, capsys):
    def cut_short(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "simulate_config", cut_short)
    ours = Compared(experiment="contiguous_vs_paged", metric="kv.wasted_share", arm="paged", shown="percent")
    use(monkeypatch, make_row(ours=ours))
    assert reproduce(tmp_path, "report=false", "seeds=[0]", "jobs=1") == 130
    assert "1 simulated row: 1 not run." in capsys.readouterr().out
    assert not any((tmp_path / "kept").iterdir())


def test_a_damaged_kept_result_is_computed_again(tmp_path, monkeypatch):
    use(monkeypatch, make_row(ours=Searched(function=toy_search)))
    assert reproduce(tmp_path, "report=false", "jobs=1") == 0
    (file,) = (tmp_path / "kept").iterdir()
    file.write_text("{")
    assert reproduce(tmp_path, "report=false", "jobs=1", "overwrite=true") == 0
    assert json.loads(file.read_text()) == {"value": 10.0}


def test_rows_are_chosen_by_name(tmp_path, capsys):
    assert reproduce(tmp_path, "kernels", "kv_token", "report=false") == 0
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]
    assert [row["row"] for row in rows] == [
        "kv_token",
        *(name for name in ROWS if name.startswith("flash_") and "decoding" not in name),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config-dir", "kernels", "kernels"],
        ["kernels", "--config-dir", "kernels"],
        ["--config-dir=kernels", "kernels"],
    ],
)
def test_a_folder_may_have_the_name_of_a_family(arguments, tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    monkeypatch.chdir(tmp_path)
    assert reproduce(tmp_path, *arguments, "report=false") == 0
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]
    assert {row["family"] for row in rows} == {"kernels"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernel"], "only=kernel: is neither a family nor a row of the gallery; nearest: kernels"),
        (["jobs=0"], "jobs=0: must be >= 1"),
        (["seeds=[]"], "seeds=[]: must contain at least one seed"),
        (["cache=pyproject.toml"], "cache=pyproject.toml: must be a folder"),
        (["kv_token", "only=[mqa]"], "kv_token: give names as words or by only=, not both"),
        ([""], "'': a name is empty; leave it out, or give a name"),
    ],
)
def test_wrong_settings_are_refused(arguments, message, tmp_path, capsys):
    assert main(["reproduce", *arguments, f"hydra.run.dir={tmp_path}/out"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_whole_gallery_holds(tmp_path, capsys):
    assert reproduce(tmp_path) == 0, capsys.readouterr().err
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]
    assert len(rows) == len(ROWS)
    assert {row["state"] for row in rows} == {"holds", "differs"}
