"""A user's own experiment on a small model, and the command that compares it."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.compare.arms import points
from experiments.compare.settings import build_settings

SHIPPED = sorted((CONFIG_DIR / "experiment").glob("*.yaml"))

TINY = """\
# A few requests on a small model
title: Tiny
claim: Longer chunks wait less.
base: [model=smollm2_135m, workload=poisson, workload.num_requests=30, "workload.arrivals.rate_per_s=200"]
arms:
  chunked: [batching=chunked]
  mine: [batching=mine]
baseline: chunked
metrics:
  - {key: ttft.mean_s, better: lower}
  - {key: throughput.output_tokens_per_s, better: higher}
seeds: [0, 1]
sweep: null
expect:
  - {metric: ttft.mean_s, arm: mine, at_least_ratio: 1.001}
"""

MINE = "# My own\n_target_: policies.batching.static.Static\nbatch_size: 4\n"


def arms_of(cfg, dirs):
    """Composes and builds every arm of a comparison."""
    return points(build_settings(resolved(cfg)), ConfigSource(config_name="simulate", dirs=dirs))


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes to an empty folder beside a user's own experiment `tiny` and batching policy `mine`."""
    for name, text in (("experiment/tiny", TINY), ("batching/mine", MINE)):
        file = folder / f"own/{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")


def compare(folder: Path, *arguments: str, experiment: str = "tiny") -> int:
    own = ["--config-dir", str(folder / "own"), f"experiment={experiment}", "progress=false"]
    return main(["compare", *own, f"hydra.run.dir={folder}/out", *arguments])
