"""ServeGen's data: rates, patterns and lengths by time of files made to its format, and every bad value."""

import json
from collections import Counter

import numpy as np
import pytest

from sim.workload.servegen import ServeGenData

TRACE = "0,2.0,1.5,Gamma,0.44,1.1\n600,0,0,,0,0\n1200,1.0,2.2,Weibull,0.5,0.5\n"
DATASET = {
    "0": {"input_tokens": "{100: 0.25, 300: 0.75}", "output_tokens": {"50": 1.0}},
    "1200": {"input_tokens": "{700: 1.0}", "output_tokens": "{0: 1.0}"},
}


def write(folder, trace=TRACE, dataset=DATASET, chunk=0):
    (folder / f"chunk-{chunk}-trace.csv").write_text(trace)
    text = dataset if isinstance(dataset, str) else json.dumps(dataset)
    (folder / f"chunk-{chunk}-dataset.json").write_text(text)
    return folder


def arrivals_of(folder, seed=0, **settings):
    return list(ServeGenData(path=folder, **settings).source(seed=seed, max_model_len=10_000).arrivals())


def test_each_bin_has_its_rate_and_lengths_are_those_of_the_time(tmp_path):
    """2 requests/s in the first ten minutes, none in the second, 1 request/s in the third."""
    sent = arrivals_of(write(tmp_path), duration_s=1800.0)
    at_s = np.array([a.at_s for a in sent])
    assert np.bincount((at_s // 600).astype(int)).tolist() == [1200, 0, 600]
    early = [a for a in sent if a.at_s < 600]
    share = Counter(a.request.prompt.num_tokens for a in early)
    assert share.keys() == {100, 300}
    assert share[300] / 1200 == pytest.approx(0.75, abs=0.04)
    assert {a.num_output_tokens for a in early} == {50}
    assert {(a.request.prompt.num_tokens, a.num_output_tokens) for a in sent[1200:]} == {(700, 1)}


@pytest.mark.parametrize(("line", "cv"), [("0,20,2.0,Gamma,0,0", 2.0), ("0,20,9,Weibull,0.5,1", 5**0.5)])
def test_gaps_have_the_variation_of_the_pattern(tmp_path, line, cv):
    sent = arrivals_of(write(tmp_path, line))
    gaps_s = np.diff([a.at_s for a in sent])
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.08)
    assert len(sent) == 12_000


def test_clients_are_tenants_and_a_window_begins_at_0(tmp_path):
    write(tmp_path, "timestamp,rate,cv,pattern,a,b\n600,1,1,Gamma,1,1\n", chunk=0)
    write(tmp_path, "0,1,1,Gamma,1,1\n600,2,1,Gamma,1,1\n", chunk=12)
    sent = arrivals_of(tmp_path, start_s=600.0, duration_s=300.0)
    tenants = Counter(a.request.tenant for a in sent)
    assert tenants.keys() == {"chunk-0", "chunk-12"}
    assert tenants["chunk-12"] / tenants["chunk-0"] == pytest.approx(2, rel=0.2)
    assert 0 <= sent[0].at_s < 10
    assert sent[-1].at_s < 300
    assert arrivals_of(tmp_path, start_s=600.0, max_requests=5) == arrivals_of(tmp_path, start_s=600.0)[:5]


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("0,1,1\n", r"chunk-0-trace.csv:1:1: expected timestamp, rate, cv, pattern, arguments"),
        ("0,x,1,Gamma,1,1\n", r"trace.csv:1:3: rate: expected requests/s from 0 .* found 'x'"),
        ("0,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", r"trace.csv:2:1: timestamp: expected more than 0, found '0'"),
        ("0,1,1,Pareto,1,1\n", r"trace.csv:1:7: pattern: expected Gamma or Weibull, found 'Pareto'"),
        ("0,1,0,Gamma,1,1\n", r"trace.csv:1:5: cv: expected a number from 0.01 to 1000, found '0'"),
        ("0,1,1,Weibull\n", r"trace.csv:1:7: pattern: expected Weibull and its shape after it"),
        ("0,1,1,Weibull,nan,1\n", r"trace.csv:1:15: first argument of the pattern: expected a shape"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_column(tmp_path, trace, message):
    with pytest.raises(ValueError, match=message):
        arrivals_of(write(tmp_path, trace))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ('{"0": \n x}', r"chunk-0-dataset.json:2:2: expected a JSON object"),
        ("[]", r"dataset.json:1:1: expected a JSON object of times"),
        ('{\n  "noon": {}}', r"dataset.json:2:3: noon: expected a time in seconds as key"),
        ('{"0": 3}', r"dataset.json:1:2: 0: expected an object with input_tokens and output_tokens"),
        ('{"0": {"input_tokens": "{1: }"}}', r"dataset.json:1:2: 0: expected input_tokens with lengths"),
        ('{"0": {"input_tokens": "{[1]: 1.0}"}}', r"dataset.json:1:2: 0: expected input_tokens with lengths"),
        ('{"0": {"input_tokens": "{1: -1.0}"}}', r"dataset.json:1:2: 0: expected input_tokens with lengths"),
        ('{"0": {"input_tokens": "{1: 1.0}"}}', r"dataset.json:1:2: 0: expected output_tokens with lengths"),
    ],
)
def test_a_bad_dataset_is_named_with_file_line_and_column(tmp_path, dataset, message):
    with pytest.raises(ValueError, match=message):
        arrivals_of(write(tmp_path, dataset=dataset))


def test_a_client_without_its_second_file_is_refused(tmp_path):
    (write(tmp_path) / "chunk-0-dataset.json").unlink()
    with pytest.raises(ValueError, match=r"chunk-0-dataset.json: cannot be read: No such file or directory$"):
        arrivals_of(tmp_path)


def test_a_folder_without_clients_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must have files such as chunk-0-trace\.csv; found none"):
        arrivals_of(tmp_path)
    with pytest.raises(ValueError, match=r"must be a folder with chunk-0-trace\.csv"):
        ServeGenData(path=tmp_path / "missing")
    with pytest.raises(ValueError, match=r"no client of .* sends a request in this window"):
        arrivals_of(write(tmp_path), start_s=600.0)
