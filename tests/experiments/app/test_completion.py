"""The words that are offered to the shell, and that bash really receives them."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from experiments.app import cli
from experiments.app.completion import SCRIPTS, candidates

COMMANDS = ["simulate", "list", "completion"]

CONFIGS = {
    "simulate.yaml": """
        defaults:
          - _self_
          - workload: poisson
          - batching: chunked
        seed: 0
        sim:
          leap: true
        hydra:
          output_subdir: null
        """,
    "batching/chunked.yaml": "_target_: x.Chunked\nmax_num_seqs: 256\nmax_num_batched_tokens: 8192\n",
    "batching/static.yaml": "_target_: x.Static\nbatch_size: 8\n",
    "workload/poisson.yaml": "defaults:\n  - lengths: fixed\n  - _self_\nrate: 8\n",
    "workload/lengths/fixed.yaml": "prompt_tokens: 512\n",
    "workload/lengths/uniform.yaml": "low: 1\n",
}


@pytest.fixture
def complete(tmp_path):
    """Returns candidates() over a small config folder, for words in one string."""
    for name, text in CONFIGS.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return lambda line: candidates(line.split(" "), COMMANDS, {"simulate": "simulate"}, tmp_path)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("si", ["simulate"]),
        ("", COMMANDS),
        ("completion ", ["bash", "zsh", "fish"]),
        ("list work", ["workload", "workload/lengths"]),
        ("simulate --m", ["--multirun"]),
        ("simulate ba", ["batching=", "batching."]),
        ("simulate s", ["seed=", "sim."]),
        ("simulate batching=", ["batching=chunked", "batching=static"]),
        ("simulate batching=s", ["batching=static"]),
        ("simulate -m batching=chunked,s", ["batching=chunked,static"]),
        ("simulate workload/lengths=u", ["workload/lengths=uniform"]),
        ("simulate batching.max_", ["batching.max_num_seqs=", "batching.max_num_batched_tokens="]),
        ("simulate batching=static batching.", ["batching.batch_size="]),
        ("simulate batching=nosuch batching.max_num_s", ["batching.max_num_seqs="]),
        ("simulate workload.l", ["workload.lengths."]),
        ("simulate workload.lengths.", ["workload.lengths.prompt_tokens="]),
        ("simulate sim.l", ["sim.leap="]),
        ("simulate sim.leap=", ["sim.leap=true", "sim.leap=false"]),
        ("simulate seed.x", []),
        ("simulate nosuch.", []),
        ("nosuch a", []),
    ],
)
def test_offers(complete, line, offered):
    assert complete(line) == offered


def test_users_folder_adds_choices(complete, tmp_path):
    (tmp_path / "mine/batching").mkdir(parents=True)
    (tmp_path / "mine/batching/special.yaml").write_text("a: 1\n")
    assert complete(f"simulate --config-dir {tmp_path / 'mine'} batching=sp") == ["batching=special"]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_script_is_valid_shell(shell):
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    done = subprocess.run([shell, "-n"], input=SCRIPTS[shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_cuts_what_stands_before_the_equals_sign(tmp_path):
    """bash has split `list=wo` at the `=`, so the reply must not repeat `list=`."""
    if not shutil.which("bash"):
        pytest.skip("no bash here")
    fake = tmp_path / "windtunnel"
    fake.write_text(
        "#!/bin/sh\nprintf '%s\\n' \"$@\" > \"$0.words\"\nprintf 'workload=a,bb\\nworkload=a,bc\\n'\n"
    )
    fake.chmod(0o755)
    line = f"{fake} simulate workload=a,b"
    script = (
        SCRIPTS["bash"]
        + f'COMP_LINE="{line}" COMP_POINT={len(line)}\n_windtunnel\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'
    )
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["a,bb", "a,bc"]
    assert Path(f"{fake}.words").read_text().split() == ["_complete", "simulate", "workload=a,b"]


def test_hidden_command_prints_one_candidate_a_line(capsys):
    assert cli.main(["_complete", "compl"]) == 0
    assert capsys.readouterr().out == "completion\n"


def test_choices_complete_without_hydra():
    code = (
        "import sys; from experiments.app import cli; cli.main(['_complete', 'simulate', 'model=']);"
        "print(*{'hydra', 'omegaconf', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    assert "model=llama3_1_8b" in done.stdout.split()
    assert done.stderr.split() == []
