"""A toy application with its own config folder replaces `simulate`: whole messages can be compared."""

import logging
import sys
import textwrap

import pytest

from experiments.app.application import Application

CONFIGS = {
    "toy.yaml": """
        defaults:
          - _self_
          - wheel: wooden
          - sail: square
          - override hydra/job_logging: none
          - override hydra/hydra_logging: none
        seed: 0  # of every random draw
        trip:
          days: 3  # how long
          fast: false
        hydra:
          output_subdir: null
          run: {dir: "out/${seed}"}
          sweep: {dir: out, subdir: "${hydra.job.num}"}
        """,
    "wheel/wooden.yaml": "# Four spokes.\n_target_: toy_classes.Wheel\nspokes: 4  # at least 3\n",
    "wheel/steel.yaml": "_target_: toy_classes.Wheel\nspokes: 16\n",
    "wheel/custom.yaml": "_target_: toy_classes.Wheel\nspokes: ???\n",
    "sail/none.yaml": "# No sail.\ncloth: null\n",
    "sail/square.yaml": "# One square sail.\ndefaults:\n  - cloth: linen\n  - _self_\narea_m2: 12.5\n",
    "sail/cloth/linen.yaml": "grams: 200\n",
    "sail/cloth/silk.yaml": "grams: 40\n",
    "hydra/ours.yaml": "x: 1\n",
}

MODULES = {
    "toy_classes.py": """
        from dataclasses import dataclass

        @dataclass(frozen=True, kw_only=True)
        class Wheel:
            spokes: int

            def __post_init__(self):
                if self.spokes < 3:
                    raise ValueError(f"spokes={self.spokes}: must be at least 3")
        """,
    "toy_log.py": """
        CALLED = []

        class Log:
            def __getattr__(self, name):
                return lambda **_: CALLED.append(name)
        """,
    "toy_application.py": """
        import os
        from dataclasses import dataclass

        from hydra.core.hydra_config import HydraConfig

        from experiments.app.job import UnsuccessfulError
        from sim.settings.build import build
        from sim.settings.errors import ConfigError

        RUNS, FOLDERS, SEEN, PREPARED = [], [], [], []

        @dataclass
        class Sail:
            cfg: object
            spokes: int

            def run(self, folder):
                RUNS.append((self.cfg["seed"], self.spokes))
                FOLDERS.append(str(folder.relative_to(os.getcwd())))
                note = self.cfg["sail"].get("area_m2")
                SEEN.append((HydraConfig.get().job.name, note, os.environ.get("SAIL")))
                days = self.cfg["trip"]["days"]
                if days == 12:
                    raise ConfigError("the wind is wrong")
                if days == 13:
                    raise RuntimeError("a bug")
                if days == 14:
                    raise KeyboardInterrupt
                if days == 15:
                    raise UnsuccessfulError(f"seed {self.cfg['seed']} was wet")

        def prepare(cfg, composition):
            PREPARED.append(list(composition.overrides))
            return Sail(cfg, build(cfg["wheel"], "wheel").spokes)
        """,
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Writes the toy application, changes to an empty folder, and returns the folder with its configs."""
    home = tmp_path / "home"
    for name, text in {**{f"configs/{name}": text for name, text in CONFIGS.items()}, **MODULES}.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(home)
    monkeypatch.setattr(sys, "argv", ["windtunnel"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers])  # --info adds one
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name in ("toy_classes", "toy_application", "toy_log"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return Application(
        name="toy",
        summary="Sail a toy.",
        module="toy_application",
        config_name="toy",
        config_dir=home / "configs",
    )
