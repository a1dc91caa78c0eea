"""`windtunnel chat`: its settings, and the messages about impossible ones."""

import pytest

from experiments.simulate import chat
from sim.settings.errors import ConfigError


def test_words_that_are_no_settings_are_the_message():
    settings, message = chat.parse(["max_tokens=8", "What", "is", "2+2=4?"])
    assert settings == chat.DEFAULTS | {"max_tokens": "8"}
    assert message == "What is 2+2=4?"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["temprature=1", "hi"], "temprature: no such setting; nearest: temperature"),
        (["temperature=-1", "hi"], "temperature=-1.0: must be >= 0; 0 for greedy"),
        (["temperature=x", "hi"], "temperature=x: must be a number"),
        (["max_tokens=0", "hi"], "max_tokens=0: must be a whole number >= 1"),
        (["model=nowhere.gguf", "hi"], "nowhere.gguf"),
    ],
)
def test_says_what_cannot_be(arguments, message):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match=message):
        chat.main(arguments)


def test_tells_how_it_is_used(capsys):
    chat.main(["--help"])
    assert "model=smollm2" in capsys.readouterr().out
