"""YAML beyond the limits is refused in a sentence, at once."""

import time

import pytest

from experiments.app.settings.bounded_yaml import TooLargeError, parse_yaml, read_yaml
from sim.settings.errors import ConfigError

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
BOMBS = {
    "billion laughs": (LAUGHS, "must have at most 100,000 values"),
    "merged": (
        f"a: &a {{{', '.join(f'k{i}: 1' for i in range(400))}}}\nb: [{'*a, ' * 400}1]\n",
        "at most 100,000",
    ),
    "brackets": ("a: " + "[" * 51 + "]" * 51, "must nest lists and mappings at most 50 levels deep"),
    "dashes": ("- " * 900 + "1", "must nest lists and mappings at most 50 levels deep"),
    "braces": ("{a: " * 60 + "1" + "}" * 60, "must nest lists and mappings at most 50 levels deep"),
    "long": ("x" * 1_000_001, "must have at most 1,000,000 characters, has 1,000,001"),
    "itself": ("a: &a [1, *a]", "the alias *a refers to a value that contains it"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once(name, tmp_path):
    text, message = BOMBS[name]
    begun = time.process_time()
    with pytest.raises(TooLargeError) as error:
        parse_yaml(text, "it")
    assert message in str(error.value)
    (tmp_path / "it.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_yaml(tmp_path / "it.yaml")
    assert str(refused.value).startswith(f"{tmp_path}/it.yaml: ")
    assert time.process_time() - begun < 10


def test_aliases_within_the_limits_are_read():
    assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]\n", "it") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    assert parse_yaml("a: " + "[" * 49 + "]" * 49, "it")


@pytest.mark.parametrize("text", ["a: !!python/object/apply:os.system [true]", "a: [1", "a: 1\na: 2"])
def test_tags_broken_and_double_keys_are_refused(text, tmp_path):
    (tmp_path / "it.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"it\.yaml:\d:\d+: not valid YAML: "):
        read_yaml(tmp_path / "it.yaml")


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"bytes\.yaml: must be UTF-8 text"):
        read_yaml(tmp_path / "bytes.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file or directory"):
        read_yaml(tmp_path / "none.yaml")
