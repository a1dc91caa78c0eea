"""Old names of settings are accepted for one version."""

import pytest

from experiments.app.cli import main
from sim.api import simulate
from sim.settings import renamed
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.renamed import NEW_NAMES, with_new_names
from sim.settings.variants import Variants

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])


@pytest.mark.parametrize(("old", "new"), NEW_NAMES.items())
def test_only_the_key_of_an_override_is_renamed(old, new, capsys):
    renamed._note.cache_clear()
    texts = [f"{old}=a", f"++{old}.b=1", f"~{old}", f"{old}s=1", f"engine.{old}=1", f"name={old}"]
    assert with_new_names(texts) == [f"{new}=a", f"++{new}.b=1", f"~{new}", *texts[3:]]
    note = f"windtunnel: {old} is now called {new}; the old name is accepted for one more version.\n"
    assert capsys.readouterr().err == note


def test_old_names_are_accepted_wherever_overrides_are_given(capsys):
    old, new = "handover.overflow_tokens=7", "kv_transfer.overflow_tokens=7"
    assert main(["simulate", old, "--cfg", "job"]) == 0
    assert "overflow_tokens: 7" in capsys.readouterr().out
    assert SOURCE.compose_plain([old]) == SOURCE.compose_plain([new])
    assert Variants(SOURCE).config([old]) == Variants(SOURCE).config([new])
    result = simulate("workload.num_requests=1", handover__overflow_tokens=7)
    assert result.config["kv_transfer"]["overflow_tokens"] == 7
    assert result.command is not None
    assert new in result.command
