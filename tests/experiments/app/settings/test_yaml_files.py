"""Config files read by libyaml equal those that OmegaConf reads."""

import pytest
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf

from experiments.app.settings.bounded_yaml import read_yaml
from experiments.app.settings.compose import ConfigSource, YamlFolder, address
from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from sim.settings.errors import ConfigError


def test_our_own_files_are_read_as_omegaconf_reads_them():
    files = [choice.file for choices in find_groups([CONFIG_DIR]).values() for choice in choices][::9]
    for file in files:
        found = YamlFolder("test", address(str(file.parent))).load_config(file.name)
        assert found.config == OmegaConf.load(file)


@pytest.mark.parametrize(
    "text", ["a: 1e6\nb: 1_000\nc: 2001-01-01\nd: .5\ne: 1e-3\n", "# @package _global_\na: off\n"]
)
def test_numbers_texts_and_headers_are_those_of_hydra(tmp_path, text):
    (tmp_path / "one.yaml").write_text(text)
    found = YamlFolder("test", address(str(tmp_path))).load_config("one")
    assert OmegaConf.to_container(found.config) == OmegaConf.to_container(
        OmegaConf.load(tmp_path / "one.yaml")
    )
    assert found.header["package"] == ("_global_" if "@package" in text else None)


@pytest.mark.parametrize("text", ["a: 1\na: 2\n", "a: [1\n"])
def test_a_key_given_twice_and_broken_yaml_are_refused(tmp_path, text):
    (tmp_path / "one.yaml").write_text(text)
    with pytest.raises(ConfigError):
        YamlFolder("test", address(str(tmp_path))).load_config("one")


@pytest.mark.parametrize("content", ["[" * 4_000 + "]" * 4_000, "[" * 200_000, "- " * 100_000])
def test_values_nested_too_deeply_are_refused_and_do_not_end_the_process(tmp_path, content):
    """libyaml nests calls in C: 200,000 brackets overflowed its stack."""
    (tmp_path / "one.yaml").write_text(f"a: {content}\n")
    with pytest.raises(ConfigError):
        YamlFolder("test", address(str(tmp_path))).load_config("one")


def test_a_long_file_is_read_as_a_short_one(tmp_path):
    (tmp_path / "one.yaml").write_text("a:\n" + "".join(f"- {n}e3\n" for n in range(5_000)))
    found = YamlFolder("test", address(str(tmp_path))).load_config("one")
    assert found.config == OmegaConf.load(tmp_path / "one.yaml")


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "one.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match=r"one\.yaml: must be UTF-8 text"):
        YamlFolder("test", address(str(tmp_path))).load_config("one")


@pytest.mark.parametrize("character", ["\0", "\x01", "\x7f"])
def test_a_file_with_a_control_character_is_named_with_its_line(tmp_path, character):
    (tmp_path / "one.yaml").write_text(f"# é\na: 1\nb: x{character}\n", encoding="utf-8")
    message = rf"one\.yaml:3: not valid YAML: must be text without the character U\+{ord(character):04X}$"
    with pytest.raises(ConfigError, match=message):
        YamlFolder("test", address(str(tmp_path))).load_config("one")
    with pytest.raises(ConfigError, match=message):
        read_yaml(tmp_path / "one.yaml")


def test_a_process_that_composes_again_sees_what_a_file_says_now(tmp_path):
    (tmp_path / "own.yaml").write_text("defaults:\n- part: a\n- _self_\nx: 1\n")
    (tmp_path / "part").mkdir()
    (tmp_path / "part/a.yaml").write_text("y: {z: 2}\n")
    source = ConfigSource(config_name="own", dirs=[tmp_path])
    for _ in range(3):  # read, remembered, remembered
        cfg = source.compose([])
        assert cfg == {"part": {"y": {"z": 2}}, "x": 1}
        cfg.part.y.z = 7  # a config is its owner's
    (tmp_path / "part/a.yaml").write_text("y: {z: 3}\n")
    assert source.compose([]).part.y.z == 3
    (tmp_path / "part/a.yaml").write_text("y: {z: 2}\n")
    assert source.compose([]).part.y.z == 2
    (tmp_path / "part/a.yaml").unlink()
    with pytest.raises(MissingConfigException):
        source.compose([])


def everything(node):
    """Returns the types, flags, declared types and values of a node and of all nodes in it."""
    about = (
        type(node),
        dict(node._metadata.flags or {}),
        node._metadata.ref_type,
        node._metadata.object_type,
    )
    content = node._content if isinstance(node, DictConfig | ListConfig) else None
    if isinstance(content, dict):
        return about, {key: everything(value) for key, value in content.items()}
    return about, [everything(value) for value in content] if isinstance(content, list) else node._value()


@pytest.mark.parametrize("name", ["simulate", "capacity", "sweep"])
def test_files_that_were_merged_before_give_what_hydra_merges(name):
    source = ConfigSource(config_name=name, dirs=[CONFIG_DIR])
    own = ["hardware=l40s", "model=qwen3_8b"] if name == "simulate" else []
    first, _, third = (source.compose([*own, f"seed={seed}"], with_hydra=True) for seed in (1, 2, 1))
    assert everything(third) == everything(first)
    assert third._metadata.flags == {"struct": True}
