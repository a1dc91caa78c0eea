"""The import graph of the packages: no file circles, and scenario configs that name libraries only."""

from __future__ import annotations

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fieldlimits", "policies", "hwmodels", "kernels", "sim", "realengine", "experiments")
LIBRARIES = ("policies.", "hwmodels.", "sim.")


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Returns the modules that each module imports, imports for type checking included.

    `from package import module` imports the package's own file as well.
    """
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    found = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    for module, others in found.items():
        for other in list(others):
            package = other.rpartition(".")[0]
            lines = (
                one["line_contents"] for one in graph.get_import_details(importer=module, imported=other)
            )
            if package != module and any(line.startswith(f"from {package} import") for line in lines):
                others.add(package)
    return found


def test_no_files_import_each_other_in_a_circle(imports):
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"these files import each other: {' -> '.join(error.args[1])}")


def test_parts_of_a_scenario_come_from_libraries():
    """A scenario is built without any command: its config groups name policies, hwmodels and sim only."""
    defaults = yaml.safe_load((ROOT / "configs/scenario.yaml").read_text())["defaults"]
    groups = {str(key).partition("@")[0] for entry in defaults if isinstance(entry, dict) for key in entry}
    choices = (file for group in groups for file in (ROOT / "configs" / group).rglob("*.yaml"))
    files = [ROOT / "configs/scenario.yaml", *choices]
    assert len(files) > 100
    outside = [
        f"{file.relative_to(ROOT)}: {target}"
        for file in files
        for target in _targets(yaml.safe_load(file.read_text()))
        if not target.startswith(LIBRARIES)
    ]
    assert not outside


def _targets(node: object) -> Iterable[str]:
    """Yields every `_target_` in a config, at any depth."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _targets(child)
