"""`make cases`: every case has a check, and those that are not others' work are right."""

import pytest

from tests import cases

needs_cases = pytest.mark.skipif(not cases.FOLDER.is_dir(), reason="the cases are not on this machine")
TRACES = [
    "bench_json_bad_values",
    "blis_tracev2",
    "decimal_tokens",
    "mooncake_block16",
    "mooncake_without_hashes",
    "otel_trace",
    "sharegpt_json",
    "trace_starts_late",
]


@needs_cases
def test_every_case_of_the_folder_has_a_check():
    assert {path.name for path in cases.FOLDER.iterdir() if path.is_dir()} <= {*cases.CASES, *cases.ENDPOINT}


def test_a_machine_without_the_folder_skips_them_with_a_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cases, "FOLDER", tmp_path / "none")
    assert cases.main([]) == 0
    assert "skipped: there is no folder" in capsys.readouterr().out


def test_a_wrong_answer_and_a_refusal_are_told_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cases, "FOLDER", tmp_path)
    (tmp_path / "one").mkdir()

    def shown_for(answer, planned=""):
        check = cases.Case(("simulate",), lambda found: cases.requests(found[0], 3), planned)
        monkeypatch.setattr(cases, "CASES", {"one": check})
        monkeypatch.setattr(cases, "ENDPOINT", {})
        monkeypatch.setattr(cases, "answer_of", lambda words, folder: answer)
        code = cases.main([])
        return code, capsys.readouterr().out.split()[0]

    def finished(count):
        return cases.Answer(0, "", {"requests": {"finished": count}}, 0.1)

    assert shown_for(finished(3)) == (0, "right")
    assert shown_for(finished(2)) == (1, "wrong")
    assert shown_for(finished(2), "known, issue 45 is planned") == (0, "known")
    assert shown_for(cases.Answer(2, "windtunnel: no such key", {}, 0.1)) == (1, "refused")
    assert shown_for(cases.Answer(1, "Traceback", {}, 0.1)) == (1, "wrong")


@needs_cases
@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_traces_and_results_are_right(name):
    found, shown = cases.verdict(name)
    assert found == "right", shown


@needs_cases
@pytest.mark.slow
def test_all_cases_have_a_line(capsys):
    cases.main([name for name in cases.names() if name not in TRACES])
    *lines, counts = capsys.readouterr().out.splitlines()
    assert len(lines) == len(cases.names()) - len(TRACES)
    assert "cannot be checked" not in " ".join(lines)
    assert "right" in counts
