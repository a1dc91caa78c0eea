"""Imports are most of the start of a command: each has a list of the heavy packages that it may import."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    *("hydra", "importlib.metadata", "numpy", "omegaconf", "optuna", "pandas", "plotly", "pyarrow", "rich"),
    *("scipy", "simpy", "torch", "triton", "yaml"),
}
SETTINGS = {"hydra", "omegaconf", "yaml"}
SIMULATION = {*SETTINGS, "importlib.metadata", "numpy", "pandas", "pyarrow", "rich", "simpy"}
TEN_REQUESTS = ("simulate", "workload.num_requests=10")


def imported(arguments):
    """Names of all modules that the command imports."""
    command = "import sys; from experiments.app.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", command, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.M))


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--help"], set()),
        (["list"], {"rich"}),
        (["simulate", "--help"], SETTINGS),
        (["simulate", "workload.nume_requests=10"], SETTINGS),
        (TEN_REQUESTS, SIMULATION),
    ],
    ids=["overview", "list", "help of a command", "misspelt key", "ten requests"],
)
def test_a_command_imports_no_heavy_package_that_it_does_not_use(arguments, allowed, tmp_path):
    is_run = arguments == TEN_REQUESTS
    modules = imported([*arguments, f"hydra.run.dir={tmp_path}"] if is_run else arguments)
    assert "experiments.app.cli" in modules
    assert modules & HEAVY <= allowed
    assert not is_run or (tmp_path / "report.html").exists()


def test_nothing_of_hydra_is_used_that_is_not_public():
    root = Path(__file__).parents[3]
    own = [file for folder in ("sim", "experiments", "tests") for file in (root / folder).rglob("*.py")]
    private = re.compile(r"^\s*(from|import) hydra\.(\w+\.)*_\w*|^\s*from hydra\S* import _", re.M)
    assert len(own) > 500
    assert [str(file) for file in own if private.search(file.read_text(encoding="utf-8"))] == []
