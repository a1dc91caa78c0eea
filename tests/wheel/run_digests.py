"""Prints the digests of runs, a JSON list: `run_digests.py FILE_WITH_LISTS_OF_OVERRIDES`.

It imports the windtunnel that its interpreter has installed, not that of this checkout. A run that ends with
an error has the error's text in place of digests.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.variants import Variants
from policies.core import engine
from sim.settings.scenario import build_run

VARIANTS = Variants(ConfigSource(config_name="scenario", dirs=[CONFIG_DIR]))


def digest_of(table: Any) -> str:
    """Returns the SHA-256 of a table's columns."""
    digest = hashlib.sha256()
    for name in table:
        column = table[name]
        values = repr(column.tolist()).encode() if column.dtype == object else column.tobytes()
        digest.update(name.encode() + values)
    return digest.hexdigest()


def digests_of(overrides: list[str]) -> list[Any]:
    """Runs overrides of scenario.yaml; returns the digests of the requests and the iterations."""
    try:
        scenario = build_run(resolved(VARIANTS.config(overrides)))[0]
        records = scenario.simulate(scenario.source())
    except Exception as error:
        return [type(error).__name__, str(error)]
    return [len(records.requests), digest_of(records.requests), digest_of(records.iterations)]


def main(worlds: Path) -> None:
    """Runs all worlds of a file."""
    found = [digests_of(world) for world in json.loads(worlds.read_text(encoding="utf-8"))]
    print(json.dumps({"engine": engine.__file__, "runs": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
