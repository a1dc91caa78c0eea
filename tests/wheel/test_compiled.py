"""`make compiled`: the compiled core gives the runs of the plain one, digit by digit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.worlds.fuzz.drawing import as_list, draw_world

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / ".venv-compiled" / "bin" / "python"
NUM_WORLDS = 40
POISSON = ("workload=poisson", "workload.num_requests=200")
FIXED = [
    ["model=llama3_1_8b", "hardware=h100_sxm", *overrides]
    for overrides in (
        [*POISSON],
        [*POISSON, "speculation=eagle3"],
        [*POISSON, "speculation=ngram", "attention_data_parallel_size=2"],
        ["workload=lora", "adapters=exchange", "workload.of.num_requests=200"],
        [*POISSON, "scheduling=mlfq", "prediction=oracle"],
        [*POISSON, "caching=tiered", "engine.num_kv_blocks=300"],
        [*POISSON, "scheduling.preemption_mode=swap", "engine.swap_space_gib=1", "engine.num_kv_blocks=300"],
        [*POISSON, "caching=paged", "workload.branching.width=3"],
        [*POISSON, "pipeline_parallel_size=2"],
        [*POISSON, "batching=static"],
        [*POISSON, "pools=disaggregated"],
        [*POISSON, "engine.num_kv_blocks=1"],
    )
]
"""Features whose code is compiled, and memory in which no request fits."""


def run_in(python: Path, worlds: Path, environment: dict[str, str]) -> dict:
    command = [python, "-P", Path(__file__).with_name("run_digests.py"), worlds]
    done = subprocess.run(
        command, cwd=worlds.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_compiled_runs_equal_plain_ones(tmp_path):
    subprocess.run(
        ["make", "compiled", f"PYTHON={sys.executable}"], cwd=ROOT, check=True, capture_output=True
    )
    drawn = [draw_world(Random(f"compiled.{number}")) for number in range(NUM_WORLDS)]
    worlds = tmp_path / "worlds.json"
    worlds.write_text(json.dumps([*FIXED, *(as_list(world) for world in drawn if world)]), encoding="utf-8")
    installed = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    compiled, plain = (
        run_in(COMPILED, worlds, installed),
        run_in(Path(sys.executable), worlds, {**os.environ}),
    )
    assert Path(compiled["engine"]).suffix == ".so"
    assert Path(plain["engine"]).suffix == ".py"
    assert compiled["runs"] == plain["runs"]
    assert sum(isinstance(run[0], int) and run[0] > 0 for run in plain["runs"]) > NUM_WORLDS // 2
