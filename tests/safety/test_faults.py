"""Every call with which a command writes fails in turn: one sentence, nothing torn, the next try works."""

import asyncio
import contextlib
import fnmatch
import gc
import gzip
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pandas as pd
import pytest
import yaml

from experiments.app.cli import main
from experiments.app.run_folder import RESULTS
from experiments.observe.scripted_server import Script, ScriptedServer
from tests.drawn import drawn_of
from tests.safety.faults import failing

pytestmark = pytest.mark.slow

SMALL = (
    "model=smollm2_135m",
    "hardware=l4",
    "workload=poisson",
    "workload.num_requests=12",
    "workload.arrivals.rate_per_s=20",
)
MOST_CALLS = 300
MOST_TRIES = 16
MEASURED = """\
id,source,backend,model,gpu,weights,mode,isl,osl,concurrency,tp_size,pp_size,attention_dp_size,moe_tp_size,\
moe_ep_size,gpus,ttft_ms,tpot_ms
0,lab,vllm,smollm2-135m,l4,bf16,agg,200,9,2,1,1,1,1,1,1,12,4
"""
INTO_A_FOLDER = [
    ("simulate", *SMALL, "output.timeline=true", "output.vllm_bench=true"),
    ("simulate", "-m", *SMALL, "seed=0,1", "output.report=false", "output.tables=false"),
    ("sweep", *SMALL, "seed=0,1", "launcher.jobs=1", "sweep.progress=false"),
    (
        "goodput",
        *SMALL,
        "goodput.jobs=1",
        "goodput.seeds=[0]",
        "goodput.requests=50",
        "goodput.precision=0.5",
    ),
    ("whatif", *SMALL, "whatif.changes=['load=2']", "whatif.jobs=1", "whatif.seeds=[0,1]"),
    ("capacity", *SMALL, "capacity.jobs=1", "capacity.max_replicas=2", "capacity.seeds=[0]"),
    (
        "compare",
        "jobs=1",
        "experiment.seeds=[0,1]",
        "experiment.arms={static_32: ['batching=static'], chunked: ['batching=chunked']}",
        "experiment.expect=[]",
        "also=['workload.num_requests=5','model=smollm2_135m','hardware=l4']",
    ),
    (
        "observe",
        "url=URL",
        "workload.num_requests=5",
        "workload.arrivals.rate_per_s=1000",
        "workload.lengths.output_tokens.value=2",
    ),
]
"""Commands that write into the folder of their run."""
OTHERS = [
    ("place", "models=[{name: smollm2_135m, demand: 100}]", "gpus=[{name: l4, count: 1}]"),
    ("roofline", *SMALL[:2], "batch_sizes=[1, 8]"),
    ("score", "measured=measured.csv", "jobs=1"),
    ("report", "run=run"),
    ("report", "sweep=swept"),
    ("dialects", "run=run", "vllm_bench=true"),
    ("new", "policy", "batching", "calm"),
]
"""Commands that write elsewhere: a file, or a folder of files that the user keeps."""
ALL = INTO_A_FOLDER + OTHERS


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns a folder with a finished run, a finished sweep, and a measured table."""
    folder = tmp_path_factory.mktemp("finished")
    assert main(["simulate", *SMALL, f"hydra.run.dir={folder / 'run'}", "output.report=false"]) == 0
    sweep = [*SMALL, "seed=0,1", "launcher.jobs=1", f"hydra.run.dir={folder / 'swept'}"]
    assert main(["sweep", *sweep]) == 0
    gc.collect()  # the lock of the sweep
    (folder / "measured.csv").write_text(MEASURED)
    return folder


@pytest.fixture(scope="module")
def url():
    """Returns the address of a server that answers at once."""
    pytest.importorskip("aiohttp", reason="needs the extra observe: pip install 'windtunnel[observe]'")
    loop, started = asyncio.new_event_loop(), threading.Event()
    server = ScriptedServer(lambda body: Script(first_s=0, gap_s=0))

    async def serve():
        async with server:
            started.set()
            await asyncio.Event().wait()

    task = loop.create_task(serve())

    def run():
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    yield server.url
    loop.call_soon_threadsafe(task.cancel)
    thread.join()


def completed(words, request):
    """Returns the whole command line, with the folder to write into and the address of a server."""
    given = [f"url={request.getfixturevalue('url')}" if word == "url=URL" else word for word in words]
    if words not in INTO_A_FOLDER:
        return given
    return [*given, "hydra.sweep.dir=out" if "-m" in words else "hydra.run.dir=out", "overwrite=true"]


def check_files(folder):
    """Asserts that what has a name is whole, and that no temporary file is left."""
    for file in folder.rglob("*"):
        assert file.suffix != ".part", file
        if file.suffix == ".json":
            json.loads(file.read_text())
        elif file.suffix == ".yaml":
            yaml.safe_load(file.read_text())
        elif file.suffix == ".csv":
            assert file.read_text().endswith("\n"), file
        elif file.suffix == ".gz":
            assert gzip.decompress(file.read_bytes()).endswith(b"\n"), file
        elif file.suffix == ".py":
            compile(file.read_text(), file, "exec")
        elif file.suffix == ".parquet":
            pd.read_parquet(file)
        elif file.suffix == ".html":
            assert file.read_text().rstrip().endswith("</html>"), file


@pytest.mark.parametrize(
    ("words", "stays"),
    [
        *((words, False) for words in ALL),
        (ALL[1], True),
        (ALL[2], True),
        *((words, True) for words in OTHERS),
    ],
    ids=lambda given: {False: "once", True: "for good"}.get(given) or " ".join(given[:2]),
)
def test_each_failing_call_is_reported_and_nothing_is_torn(words, stays, tmp_path, capsys, finished, request):
    if words in OTHERS:
        shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    line, reported, before = completed(words, request), 0, set(tmp_path.rglob("*"))
    for fails_at in calls_to_fail(line, tmp_path, request):
        capsys.readouterr()
        with failing(tmp_path, fails_at, stays=stays) as faults:
            code = main(line)
        captured = capsys.readouterr()
        check_files(tmp_path)
        if faults.failed:  # a folder of an earlier try is not made again
            where = f"call {fails_at}, {faults.failed}: {captured.err}"
            reported += is_reported(code, captured.err, faults.failed, where, words, stays=stays)
        remove_sweep(tmp_path / "out", words)
    assert reported > 3
    if words[0] == "new":  # it writes over nothing
        remove_all_but(before, tmp_path)
    assert main(line) == 0
    check_files(tmp_path)
    for file in (tmp_path / "out").rglob("*"):  # what `overwrite=true` must know
        assert file.is_dir() or any(fnmatch.fnmatch(file.name, known) for known in (*RESULTS, ".lock")), file


def is_reported(code, error, failed, where, words, *, stays):
    """Returns whether the command has said that it failed. Asserts that it has, if a result is missing."""
    if code == 0 and failed == "close out/.lock":
        return False  # all results are written by then
    if code == 0:  # a sweep writes its table several times, score its file at first row by row
        assert "runs.parquet" in failed or words[0] == "score", where
        assert not stays or "unfinished" in failed, where
        return False
    assert code == 1, where
    assert error.count("\n") == 1, where
    assert "No space left on device" in error, where
    return True


def calls_to_fail(line, folder, request):
    """Returns the numbers of the calls that fail, one in each try of the command: those of the draw."""
    before = set(folder.rglob("*"))
    with failing(folder, fails_at=MOST_CALLS) as faults:
        assert main(line) == 0
    assert not faults.failed, "the command makes more calls than are expected"
    remove_all_but(before, folder)
    return drawn_of(range(1, faults.num_calls + 1), MOST_TRIES, request.node.nodeid)


def remove_all_but(before, folder):
    """Removes what a command has written: files that were not there before, and their folders."""
    gc.collect()  # the lock of a sweep
    for file in sorted(set(folder.rglob("*")) - before, reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()


def remove_sweep(folder, words):
    """Continues a sweep that has been begun, as its message says, and removes it."""
    if words[0] != "sweep" or not (folder / "sweep.json").exists():
        return
    gc.collect()  # the lock of the sweep that has failed in this process
    assert main(["sweep", "resume=out", "launcher.jobs=1"]) == 0
    check_files(folder)
    remove_all_but({folder}, folder)


def test_an_answer_is_printed_before_a_full_disk_ends_the_command(tmp_path, capsys, finished, request):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    for words in [words for words in ALL if words[0] not in ("sweep", "report", "new") and "-m" not in words]:
        line = completed(words, request)
        with failing(tmp_path, 4 if words in INTO_A_FOLDER else 1, stays=True) as faults:
            assert main(line) == 1
        assert faults.failed
        assert len(capsys.readouterr().out.splitlines()) > 5, words


def test_commands_that_only_read_write_nothing(tmp_path, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    for words in (
        ["explain", "run=run", "request=3"],
        ["dialects", "run=run"],
        ["spares", "replications=20"],
        ["list", "batching"],
        ["completion", "bash"],
        ["roofline", *SMALL[:2], "out=null"],
    ):
        with failing(tmp_path, 1) as faults:
            assert main(words) == 0
        assert faults.num_calls == 0, words


@pytest.mark.parametrize(
    ("into", "code", "said"),
    [
        ("| true", 0, ""),
        (
            "> /dev/full",
            1,
            "windtunnel: standard output: No space left on device; make room, then try again\n",
        ),
    ],
)
def test_a_reader_that_ends_or_is_full_does_not_lose_the_result(into, code, said, tmp_path):
    words = ["simulate", *SMALL, "output.report=false", "hydra.run.dir=out"]
    command = shlex.join([sys.executable, "-m", "experiments.app.cli", *words])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {into}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stderr) == (code, said)
    assert (tmp_path / "out/summary.json").exists()


def test_the_harness_sees_what_is_written(tmp_path):
    with failing(tmp_path, 1000) as faults:
        Path("a").write_text("x")
        Path("b").mkdir()
        with Path("b/c").open("wb") as file:
            file.write(b"y")
            os.fsync(file.fileno())
        os.replace("a", "d")
    assert faults.num_calls == 3 + 1 + 4 + 1
    assert io.open is not None
