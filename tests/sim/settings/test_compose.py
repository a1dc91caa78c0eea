"""Composing: what our loader leaves out is not missed."""

import pytest

from sim.settings.compose import ConfigSource


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
