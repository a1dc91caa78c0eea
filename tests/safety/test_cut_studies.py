"""Every command that computes ends at the first signal, and shows no figure of what was cut."""

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest

from tests.experiments.score.measured_rows import SILICON
from tests.safety.test_signals import ENVIRONMENT, ended, started, wait_for

pytestmark = pytest.mark.slow

ENDS_WITHIN_S = 20
"""A stop takes 1 to 3 s on a quiet machine; tests share theirs."""
SIGNALS = pytest.mark.parametrize(
    ("how", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def cut(process, how, code, word):
    """Sends one signal; returns what was printed."""
    found, seconds, printed, error = ended(process, how)
    assert (found, error.splitlines()[-1]) == (code, f"windtunnel: {word}"), error
    assert "Traceback" not in error
    assert seconds < ENDS_WITHIN_S
    return printed


@SIGNALS
def test_score_keeps_whole_predictions_and_prints_no_error_of_the_row_that_was_cut(how, code, word):
    quick = [{**SILICON, "id": f"quick-{i}"} for i in range(2)]
    pd.DataFrame([*quick, {**SILICON, "id": "long", "concurrency": 900.0, "osl": 6000}]).to_csv(
        "measured.csv", index=False
    )
    process = started("score", "measured=measured.csv", "out=predicted.csv", "jobs=1")
    wait_for(lambda: any("quick-1" in file.read_text() for file in Path().glob("predicted*")))
    time.sleep(1.0)
    printed = cut(process, how, code, word)
    assert "1 row left" in printed
    assert "long" not in printed
    assert not any("long" in file.read_text() for file in Path().glob("predicted*"))


@SIGNALS
def test_spares_print_no_answer_that_was_cut(how, code, word):
    process = started("spares", "replications=200000000", "hydra.run.dir=out")
    time.sleep(6.0)
    assert "are enough" not in cut(process, how, code, word)


@pytest.fixture
def silent_server():
    """Starts a server that takes connections and never answers; yields its port and the connections."""
    listener = socket.create_server(("127.0.0.1", 0))
    held = []

    def accept():
        while True:
            try:
                held.append(listener.accept()[0])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1], held
    listener.close()
    for one in held:
        one.close()


@SIGNALS
def test_observe_ends_while_a_server_is_silent(silent_server, how, code, word):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'windtunnel[observe]'")
    port, held = silent_server
    process = started("observe", f"url=http://127.0.0.1:{port}", "hydra.run.dir=out")
    wait_for(lambda: held)
    time.sleep(0.5)
    assert "TTFT" not in cut(process, how, code, word)


def test_an_interrupt_inside_exec_does_not_change_the_exit_code():
    """As in the import of a dataclass, whose methods are made by exec()."""
    Path("cut.py").write_text(
        "import sys\nfrom experiments.app import cli\n"
        "def run(words): exec('import os, signal; os.kill(os.getpid(), signal.SIGTERM)')\n"
        "cli._run = run\nsys.exit(cli.main(['list']))\n"
    )
    found = subprocess.run([sys.executable, "-m", "cut"], env=ENVIRONMENT, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (143, "windtunnel: terminated\n")
