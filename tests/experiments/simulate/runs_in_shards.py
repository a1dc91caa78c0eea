"""A small run in shards with whole and with streamed tables, and its results in one process."""

import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.simulate.sharded_run import ShardedRun
from experiments.study.launchers.local import Local
from sim.report.run_files import run_files, write_result
from sim.settings.scenario import build_run
from sim.setup.streaming import stream_to

SETTINGS = (
    "model=smollm2_135m", "hardware=l4", "replicas=6", "workload=synthetic", "workload.num_requests=60",
    "load=4", "sim.shards=6",
)  # fmt: skip


@cache
def config():
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    return resolved(source.compose_plain(list(SETTINGS)))


TWO = Local(jobs=2)


def sharded(launcher=TWO, *, streams=False):
    scenario, source = build_run(config())
    return ShardedRun(
        scenario=scenario,
        config=config(),
        launcher=launcher,
        overrides=SETTINGS,
        config_dirs=(),
        num_requests=source.num_requests,
        progress=False,
        streams=streams,
    )


def content(result):
    """Returns the tables and the summary of a result, by name."""
    return dict(run_files(result, {}, tables=True))


@cache
def expected():
    """Returns the content of the same run in one process."""
    plain = config()
    scenario, source = build_run({**plain, "sim": {**plain["sim"], "shards": None}})
    return content(scenario.run(source))


QUIET = Console(file=open(os.devnull, "w"))  # noqa: SIM115 (open while the tests run)


def run(folder, launcher=TWO):
    result, shards = sharded(launcher).result(folder, QUIET)
    shards.remove()
    return content(result)


def files_of(folder):
    """Returns the results of a run that streams, by path."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def run_streamed(folder, launcher=TWO):
    result, shards = sharded(launcher, streams=True).result(folder, QUIET)
    if result.error is not None:
        raise result.error
    write_result(folder, result, config(), tables=False, report=False)
    shards.remove()
    return files_of(folder)


@cache
def expected_streamed():
    """Returns the results of the same run in one process that streams."""
    plain = config()
    one = {**plain, "sim": {**plain["sim"], "shards": None}}
    scenario, source = build_run(one)
    with TemporaryDirectory() as folder:
        result = stream_to(Path(folder), scenario, source, plain, plots=False)
        write_result(Path(folder), result, plain, tables=False, report=False)
        return files_of(Path(folder))


RUNS = {"whole": (run, expected), "streamed": (run_streamed, expected_streamed)}


def children_of(pid):
    """Returns the ids of the child processes of a process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
