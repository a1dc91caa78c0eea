"""Configs are what Hydra's own `compose` makes of the same overrides."""

from dataclasses import dataclass

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from sim.settings.errors import ConfigError

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR], with_limits=False)


def plain(cfg):
    """Returns a config as dicts, without the kind of its folders, which is our own."""
    found = OmegaConf.to_container(cfg)
    del found["hydra"]["runtime"]["config_sources"]
    return found


def of_hydra(overrides):
    with hydra.initialize_config_dir(str(CONFIG_DIR), job_name="simulate", version_base="1.3"):
        return hydra.compose("simulate", list(overrides), return_hydra_config=True)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["seed=3", "seed=4", "hardware=l40s"],
        ["workload.num_requests=10", "workload=poisson", "workload.arrivals.rate_per_s=1e1", "slo=none"],
        ["engine.max_model_len=null", "sim={leap: false}", "seed=${load}", "role='a b'", "load=.5"],
        [
            "pp_layer_partition=[20,20]",
            "storage.disk_gib=1_000",
            "hydra.job.chdir=true",
            "metrics.warmup_s=auto",
        ],
        ["load=3", "~load", "+load=4", "seed=2"],
        ["seed=2", "++sim.new=1", "+hydra.job.env_set.A=b", "routing@decode_routing=random"],
    ],
    ids=" ".join,
)
def test_overrides_give_what_hydra_composes_from_them(overrides):
    for _ in range(2):  # composed, and remembered
        assert plain(SOURCE.compose(overrides, with_hydra=True)) == plain(of_hydra(overrides))


def test_the_name_of_overrides_is_made_as_hydra_is_told():
    told = ["hydra.job.config.override_dirname.exclude_keys=[seed]", "load=2", "seed=1", "replicas=3"]
    told += ["hydra.job.config.override_dirname.kv_sep=-"]
    dirname = SOURCE.compose(told, with_hydra=True).hydra.job.override_dirname
    assert dirname == of_hydra(told).hydra.job.override_dirname == "load-2,replicas-3"


def test_a_hydra_that_runs_a_job_is_kept(tmp_path):
    (tmp_path / "other.yaml").write_text("x: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        running = GlobalHydra.instance().hydra
        assert SOURCE.compose(["hardware=l4", "seed=5"]).seed == 5
        assert GlobalHydra.instance().hydra is running
        assert hydra.compose("other") == {"x": 1}


def test_other_hydras_of_the_process_search_their_own_folders(tmp_path):
    (tmp_path / "other.yaml").write_text("x: 1\n")
    SOURCE.compose(["hardware=l4"])
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = hydra.compose("other", return_hydra_config=True)
    assert [found.schema for found in cfg.hydra.runtime.config_sources] == ["pkg", "file", "structured"]


def test_a_schema_that_cannot_be_pickled_is_composed_each_time():
    @dataclass
    class Mine:
        _target_: str = "policies.batching.chunked.Chunked"
        max_num_batched_tokens: int = 77

    ConfigStore.instance().store(group="batching", name="of_a_store", node=Mine)
    for seed in (1, 2):
        cfg = SOURCE.compose(["batching=of_a_store", f"seed={seed}"])
        assert (cfg.batching.max_num_batched_tokens, cfg.seed) == (77, seed)


def test_a_search_path_is_read_within_limits(tmp_path):
    (tmp_path / "batching").mkdir()
    (tmp_path / "batching/deep.yaml").write_text(f"a: {'[' * 4_000}{']' * 4_000}\n")
    (tmp_path / "batching/mine.yaml").write_text("a: 1\n")
    for place in (tmp_path, f"file://{tmp_path}"):
        words = [f"hydra.searchpath=['{place}']"]
        assert SOURCE.compose([*words, "batching=mine", "seed=2"]).batching == {"a": 1}
        with pytest.raises(ConfigError, match="at most 50 levels deep"):
            SOURCE.compose([*words, "batching=deep"])
    (tmp_path / "batching/mine.yaml").write_text("a: 2\n")
    assert SOURCE.compose([*words, "batching=mine", "seed=2"]).batching == {"a": 2}
    with pytest.raises(ConfigError, match=r"hydra\.searchpath must be a list of strings"):
        composed(SOURCE, ["hydra.searchpath=3"])


@pytest.mark.parametrize("text", ["- a\n", "a text\n", "3\n"])
def test_a_file_that_is_no_mapping_is_named(tmp_path, text):
    (tmp_path / "batching").mkdir()
    (tmp_path / "batching/mine.yaml").write_text(text)
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR, tmp_path])
    with pytest.raises(ConfigError, match=r"batching/mine\.yaml: must be a mapping of settings, is a"):
        composed(source, ["batching=mine"])


@pytest.fixture
def source(tmp_path):
    for name, text in {
        "own": "defaults:\n- part: a\n- beside: with_${part}\n- ${part}_alone\n- _self_\n",
        "a_alone": "alone: 1\n",
        "b_alone": "alone: 2\n",
        "part/a": "x: 1\n",
        "part/b": "defaults:\n- a\n- inner: c\n- _self_\nx: 2\n",
        "part/inner/c": "y: 3\n",
        "beside/with_a": "z: 4\n",
        "beside/with_b": "z: 5\n",
    }.items():
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return ConfigSource(config_name="own", dirs=[tmp_path])


def test_a_default_may_refer_to_another_ones_choice(source):
    assert source.compose([]) == {"part": {"x": 1}, "beside": {"z": 4}, "alone": 1}
    chosen = {"part": {"x": 2, "inner": {"y": 3}}, "beside": {"z": 5}, "alone": 2}
    assert source.compose(["part=b"]) == chosen
    assert source.compose(["part=b", "beside=with_a"]) == chosen | {"beside": {"z": 4}}
