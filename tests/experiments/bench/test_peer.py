"""The comparison with AISimulate, for which a stub stands in: what both are given, and what is printed."""

import json
import sys
from itertools import pairwise

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.bench import peer
from sim.settings.scenario import build_run

SMALL = ("engine=vllm", "workload=poisson", "workload.num_requests=20", "replicas=2")
STUB = """#!{python}
import json, sys
from pathlib import Path
config = json.loads(Path(sys.argv[3]).read_text())
rows = Path(config["traffic"]["source"]["paths"][0]).read_text().splitlines()
if len(rows) != 20:
    sys.exit("not all requests")
Path(sys.argv[5]).mkdir(exist_ok="--overwrite" in sys.argv)
Path(sys.argv[5], "prediction.json").write_text(json.dumps({{"mean_ttft_ms": 12.25}}))
"""


@pytest.fixture
def python(tmp_path):
    """Makes an environment whose command `aisimulate` is a stub; returns the path of its interpreter."""
    stub = tmp_path / "aisimulate"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    return tmp_path / "python"


@pytest.fixture
def run():
    return build_run(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose([*SMALL]))


def test_the_trace_has_our_requests_and_no_shared_prompts(tmp_path, run):
    scenario, source = run
    peer.write_trace(tmp_path / "trace.jsonl", source)
    rows = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    arrivals = [*scenario.source().arrivals()]
    assert [row["timestamp"] for row in rows] == [1000 * one.request.arrival_s for one in arrivals]
    assert [row["input_length"] for row in rows] == [one.request.prompt.num_tokens for one in arrivals]
    assert [row["output_length"] for row in rows] == [one.num_output_tokens for one in arrivals]
    assert all(one["hash_ids"][-1] < other["hash_ids"][0] for one, other in pairwise(rows))


def test_the_peer_has_our_replicas_and_limits(tmp_path, run):
    config = peer.peer_config(run[0], tmp_path / "trace.jsonl")
    workers = config["engine"]["workers"]["aggregated"]
    assert workers["parallelism"] == {"replicas": 2}
    assert workers["scheduler"] == {"max_batched_tokens": 8192, "max_sequences": 1024}


def test_a_line_has_the_times_of_both_and_their_ratio(monkeypatch, python):
    monkeypatch.setattr(peer, "cpu_s_of", lambda *_: (2.0, {"ttft": {"mean_s": 0.0125}}))
    ours_median, ours, _, theirs, ratio, ttft_ms, its_ttft_ms = map(
        float, peer.line_of(SMALL, python, 2).split()
    )
    assert ours_median == ours == 2
    assert ratio == pytest.approx(theirs / 2, abs=0.01)
    assert (ttft_ms, its_ttft_ms) == (12.5, 12.2)


def test_a_run_that_fails_is_named(monkeypatch, python, capsys):
    monkeypatch.setattr(peer, "cpu_s_of", lambda *_: (2.0, {}))
    monkeypatch.setattr(peer, "chosen_runs", lambda *_: {"W1": (*SMALL, "workload.num_requests=3")})
    assert peer.main([str(python)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "W1 fails in AISimulate: not all requests"


def test_an_environment_without_the_peer_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        peer.main([str(tmp_path / "python")])
    assert error.value.code == 2
    assert "has no command aisimulate beside it" in capsys.readouterr().err
