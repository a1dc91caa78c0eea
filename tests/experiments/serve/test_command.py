"""The command refuses settings that the chosen back end does not have, and a folder that is in use."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from experiments.serve.driver import sole_server
from sim.settings.errors import ConfigError
from tests.worlds.serving import make_job


@pytest.mark.parametrize("given", ["serve.engine.max_iterations=4", "serve.engine.model=smollm2"])
def test_settings_of_the_real_engine_are_refused_by_a_simulated_fleet(given):
    with pytest.raises(ConfigError, match=f"{re.escape(given)}: is of the real engine.*add backend=engine"):
        make_job(given)


def test_two_servers_do_not_write_to_one_folder(tmp_path):
    with (
        sole_server(tmp_path),
        pytest.raises(ConfigError, match=f"hydra.run.dir={re.escape(str(tmp_path))}: another server"),
        sole_server(tmp_path),
    ):
        pass
    with sole_server(tmp_path):  # it is free again
        assert not list(tmp_path.iterdir())
