"""Runs the installed wheel outside of the repository; `make wheel-test` calls it with its environment.

Uses the standard library only, as the environment has nothing but the wheel and its requirements. Usage:
check.py FOLDER_OF_WHEEL_AND_SDIST FOLDER_OF_THE_WHEEL_BUILT_FROM_THE_SDIST
"""

from __future__ import annotations

import importlib.metadata
import json
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("fieldlimits", "policies", "hwmodels", "sim", "kernels", "realengine", "experiments", "configs")
WINDTUNNEL = str(Path(sys.executable).with_name("windtunnel"))
METADATA = ("Summary", "Author", "Keywords", "License-Expression", "Requires-Python", "Description")


def main(dist: Path, from_sdist: Path) -> None:
    """Checks files, metadata and commands; the first failure ends the program with a traceback."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    (rebuilt,) = from_sdist.glob("*.whl")
    check_files(wheel, sdist, rebuilt)
    check_metadata()
    with tempfile.TemporaryDirectory() as folder:
        check_installed(Path(folder))
        check_commands(Path(folder))
        check_serve(Path(folder))
    print(f"{wheel.name} works on Python {sys.version.split()[0]}")


def check_files(wheel: Path, sdist: Path, rebuilt: Path) -> None:
    """Checks that the wheel has all packages with their data, and that the sdist gives the same wheel."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES if package != "configs"} <= names
    assert {"configs/scenario.yaml", "sim/report/page.html", "hwmodels/trust/expected_errors.csv"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    assert set(zipfile.ZipFile(rebuilt).namelist()) == names
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "docs/start.md"} <= inside


def check_metadata() -> None:
    """Checks the metadata that a registry shows, with the README as the description."""
    metadata = importlib.metadata.metadata("windtunnel")
    assert [name for name in METADATA if not (metadata.get(name) or metadata.get_payload())] == []
    assert "# windtunnel" in (metadata.get("Description") or str(metadata.get_payload()))
    classifiers = metadata.get_all("Classifier") or []
    assert f"Programming Language :: Python :: {sys.version_info[0]}.{sys.version_info[1]}" in classifiers


def check_installed(folder: Path) -> None:
    """Checks that the package is imported from the environment, and runs its Python interface."""
    code = (
        "import sim; from sim import simulate; r = simulate(workload__num_requests=20); print(sim.__file__)"
    )
    file = run([sys.executable, "-c", code], folder).strip().splitlines()[-1]
    assert Path(file).is_relative_to(sys.prefix), file


def check_commands(folder: Path) -> None:
    """Runs `list`, `simulate` and `report` in an empty folder."""
    assert "chunked" in run([WINDTUNNEL, "list", "batching"], folder)
    printed = run([WINDTUNNEL, "simulate", "workload.num_requests=50"], folder)
    assert "of 50 requests met it" in printed
    run_folder = folder / printed.strip().splitlines()[-1]
    assert (run_folder / "report.html").stat().st_size > 1_000_000
    assert json.loads((run_folder / "summary.json").read_text())["ttft"]["mean_s"] > 0
    (run_folder / "report.html").unlink()
    run([WINDTUNNEL, "report", f"run={run_folder}"], folder)
    assert list(run_folder.glob("**/report.html"))


def check_serve(folder: Path) -> None:
    """Starts `serve`, sends it one request, and ends it by SIGTERM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([WINDTUNNEL, "serve", f"port={port}"], cwd=folder)
    try:
        body = {"prompt": "hello", "max_tokens": 3}
        answer = answered(f"http://127.0.0.1:{port}/v1/completions", body, deadline_s=time.monotonic() + 60)
    finally:
        server.terminate()
    assert answer["usage"]["completion_tokens"] == 3
    server.wait(timeout=60)


def answered(url: str, body: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    """Returns the answer to a request, which is sent again until the server listens."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.URLError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


def run(command: Sequence[str], folder: Path) -> str:
    """Returns what a command prints. Raises CalledProcessError if it fails."""
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
