"""draft_length=adaptive is never slower than no drafts, and near the best number at every load."""

import pytest

from experiments.bench.draft_length import LENGTHS, main, mean_tpot_s

NUM_REQUESTS = 400
PROBES = 1.005  # the share of the time that probes may take


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.01, 0.5, 0.75, 1.0])
def test_adaptive_is_within_5_percent_of_the_best_number(load):
    fixed = [mean_tpot_s(f"draft_length.num_tokens={length}", load, NUM_REQUESTS) for length in LENGTHS]
    adaptive = mean_tpot_s("draft_length=adaptive", load, NUM_REQUESTS)
    assert adaptive <= fixed[0]
    assert adaptive <= 1.05 * min(fixed)
    assert max(fixed) > 1.05 * min(fixed)  # the choice matters


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 1.0])
def test_adaptive_is_not_slower_than_no_drafts_where_no_draft_pays(load):
    rates = "acceptance.rates=[0.05,0.05,0.05,0.05,0.05]"
    adaptive = mean_tpot_s("draft_length=adaptive", load, NUM_REQUESTS, rates)
    assert adaptive <= PROBES * mean_tpot_s("draft_length=none", load, NUM_REQUESTS, rates)


def test_the_table_has_a_line_per_load(capsys, monkeypatch):
    monkeypatch.setattr("experiments.bench.draft_length.LOADS", (0.01, 0.5))
    main(["--requests", "20"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["TPOT", "1%", "50%"]
    assert len(lines[1].split()) == 1 + len(LENGTHS) + 2
