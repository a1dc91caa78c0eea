"""`simulate()` from Python: the command line's run, objects instead of config choices, figures."""

import json
import shlex
import subprocess
import sys

import pandas as pd
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from experiments.app.api import override_text
from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from policies.batching.static import Static
from sim import ConfigError, Result, simulate
from sim.api import RunConfig, simulate_config
from sim.metrics.slo import Slo
from sim.settings.scenario import NEEDED

SMALL = {"workload": "poisson", "workload__num_requests": 40}


@pytest.fixture(scope="module")
def result() -> Result:
    return simulate(**SMALL, hardware="l40s", policy="vllm_v0", seed=3, engine__max_num_seqs=16)


def test_is_the_run_of_the_command_that_it_names(result, tmp_path):
    assert result.command is not None
    words = result.command.split()
    assert words[:2] == ["windtunnel", "simulate"]
    folder = tmp_path / "cli"
    assert main([*words[1:], f"hydra.run.dir={folder}", "output.report=false"]) == 0
    result.write(tmp_path / "api")
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(result.summary))
    for name in ("requests", "iterations", "replicas", "events"):
        assert (folder / f"{name}.parquet").read_bytes() == (tmp_path / f"api/{name}.parquet").read_bytes()
        assert len(pd.read_parquet(folder / f"{name}.parquet")) == len(getattr(result, name))
    own, given_ = (OmegaConf.load(tmp_path / way / "config.yaml") for way in ("api", "cli"))
    assert own.hardware == given_.hardware
    assert own.engine.max_num_seqs == 16


def test_draws_what_the_report_draws(result):
    drawn = ("latencies", "ttft", "slo", "timeline", "time_by_kind", "iterations")
    for name in drawn:
        figure = getattr(result, f"plot_{name}")()
        assert isinstance(figure, go.Figure)
        assert figure.data
    with pytest.raises(ValueError, match="all replicas served all the time"):
        result.plot_replicas()
    without = simulate(**SMALL, slo=None)
    with pytest.raises(ValueError, match="slo='chat'"):
        without.plot_slo()


def test_shows_its_headline(result):
    assert "of 40 requests met it" in str(result)
    assert "of 40 requests met it" in repr(result)
    assert len(repr(result)) < 120
    assert "<table" in result._repr_html_()
    assert result.latencies.loc["TTFT", "p50_s"] == result.requests["ttft_s"].median()


def test_names_the_folder_of_choices_in_its_command(tmp_path):
    (tmp_path / "my own/slo").mkdir(parents=True)
    (tmp_path / "my own/slo/mine.yaml").write_text(
        "_target_: sim.metrics.slo.Slo\nname: mine\nttft_ms: 123\n"
    )
    found = simulate(**SMALL, slo="mine", config_dir=tmp_path / "my own")
    words = shlex.split(found.command)
    assert main([*words[1:], f"hydra.run.dir={tmp_path}/cli", "output.report=false"]) == 0
    assert json.loads((tmp_path / "cli/summary.json").read_text()) == json.loads(json.dumps(found.summary))


def test_tells_itself_in_other_tools_words(result, tmp_path):
    table = result.dialects
    assert table.loc[("ttft", "ours"), "p50_s"] == result.summary["ttft"]["p50_s"]
    assert set(table.loc["ttft"].index) == {"ours", "vllm_bench", "guidellm", "aiperf", "mlperf"}
    assert table.loc[("per_token", "guidellm"), "name"] == "ITL"
    assert table["value"].unstack().loc["answered"].tolist() == [40] * 5
    assert table.loc[("gap", "vllm_bench"), "p99_s"] == pytest.approx(result.summary["itl"]["p99_s"])
    result.write(tmp_path, vllm_bench=True, timeline=True)
    saved = json.loads((tmp_path / "vllm_bench.json").read_text())
    assert saved["p99_ttft_ms"] == pytest.approx(1e3 * table.loc[("ttft", "vllm_bench"), "p99_s"])
    assert (tmp_path / "timeline.json").exists()


def test_objects_stand_for_choices():
    by_name = simulate(**SMALL, policy={"batching": "static"}, batching__batch_size=4, slo={"ttft_ms": 900})
    by_object = simulate(**SMALL, policy=Static(batch_size=4), slo=Slo(name="mine", ttft_ms=900, tpot_ms=50))
    assert by_object.command is None
    assert by_object.config["batching"] == {"name": "policies.batching.static.Static"}
    assert by_object.requests["finished_s"].equals(by_name.requests["finished_s"])
    assert (
        by_object.summary["goodput"]["term_shares"]["ttft"]
        == by_name.summary["goodput"]["term_shares"]["ttft"]
    )


def test_an_object_keeps_nothing_from_one_run_to_the_next():
    policy = Static(batch_size=4)
    first, second = (simulate(**SMALL, policy=policy) for _ in range(2))
    assert first.requests.equals(second.requests)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"wrkload": "poisson"}, "wrkload: no such group or setting; nearest: workload"),
        ({"hardware": "h200x"}, "hardware=h200x: no such choice; nearest: h20, gh200, h200_sxm"),
        ({"policy": "nope"}, "engine=nope: no such choice"),
        (
            {"policy": "chunked"},
            "policy=chunked: must be the name of an engine.* policy={'batching': 'chunked'}",
        ),
        (
            {"output__timeline": True},
            r"^output.timeline=true: simulate\(\) does not write files; call result.write",
        ),
        ({"output": {"report": False}}, r"^output.*: simulate\(\) does not write files"),
        ({"policy": {"batchng": "static"}}, "batchng: no such group or setting; nearest: batching"),
        ({"policy": object()}, "batching: object has no fill"),
        ({"thing": object()}, "thing=object: an object can only replace a key at the root"),
        ({"workload__num_requests": 0}, "workload.num_requests=0"),
        ({"seed": -1}, "seed=-1: must be >= 0"),
        (
            {"batching": Static(batch_size=4), "pools": "disaggregated"},
            "batching=Static: each pool has its own",
        ),
        ({"config_dir": "nowhere"}, "--config-dir=nowhere: no such folder"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(wrong, message):
    with pytest.raises(ConfigError, match=message):
        simulate(**(SMALL | wrong))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1).filter(
        lambda text: "${" not in text and text != "???"  # OmegaConf's own
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.slow
@given(PLAIN)
def test_any_plain_value_reaches_the_config_as_it_is(value):
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose([f"+{override_text('new', value)}"])
    assert (OmegaConf.to_container(cfg)["new"]) == value


def test_texts_and_numbers_reach_the_config_as_they_are():
    values = {
        "path": "a b/c's \\'d\\", "number": "12", "none": "null", "list": [1, 2.5, "x,y"], "dict": {"a": None}
    }  # fmt: skip
    overrides = [f"+{override_text(f'own_{name}', value)}" for name, value in values.items()]
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(overrides)
    assert {name: OmegaConf.to_container(cfg)[f"own_{name}"] for name in values} == values


@pytest.mark.parametrize("missing", NEEDED)
def test_a_plain_config_that_is_not_whole_is_refused_with_the_missing_key(missing):
    nodes = {key: {} for key in NEEDED if key != missing}
    with pytest.raises(ConfigError, match=f"^{missing}: must be given"):
        simulate_config(RunConfig(nodes=nodes))


def test_a_plain_config_is_a_mapping():
    with pytest.raises(ConfigError, match="must be a mapping of settings, is a list"):
        simulate_config(RunConfig(nodes=[]))


def test_the_package_is_imported_without_hydra_plotly_and_pandas():
    """Workers and policies import parts of it: these should not wait for what only a notebook needs."""
    loaded = "import sys, sim, sim.records.run"
    code = f"{loaded}; assert not {{'hydra', 'plotly', 'pandas'}} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ImportError, match="nothing"):
        from sim import nothing  # noqa: F401, PLC0415
