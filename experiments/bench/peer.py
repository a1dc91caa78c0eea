"""CPU time of ours and of AISimulate, a compiled simulator: `python -m experiments.bench.peer PYTHON`.

PYTHON is the interpreter of an environment that has AISimulate and nothing of ours:

    python3.11 -m venv peer
    peer/bin/pip install aisimulate==0.13.0.dev202610270000000085
    python -m experiments.bench.peer peer/bin/python

The dated nightlies on the package index are whole; 0.13.0 is a stub. Both simulate the same requests: those
of W1, W3 and W4 of `experiments.bench.paired`, which are written as a trace in Mooncake's format. No two
prompts share a hash. Llama-3.1-8B serves them on an H100 with vLLM's scheduler, limits and prefix cache. The
CPU seconds are those of the whole processes, ours without report and tables. The mean TTFT shows that both
simulate a like load; it differs, as each program has iteration times of its own. A ratio above 1: ours is
faster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.bench.commands import timed
from experiments.bench.paired import HERE, FailedError, add_options, chosen_runs, cpu_s_of
from sim.settings.scenario import build_run
from sim.setup.scenario import Scenario
from sim.workload.base import Source

MEASURED = ("W3", "W1", "W4")
HASHED_TOKENS = 512
"""Tokens of a prompt to which a hash of the trace belongs."""


def write_trace(path: Path, source: Source) -> None:
    """Writes the requests of a source in Mooncake's format; no two prompts share a hash."""
    next_hash = 1
    with path.open("w", encoding="utf-8") as file:
        for arrival in source.arrivals():
            num_tokens = arrival.request.prompt.num_tokens
            num_hashes = -(-num_tokens // HASHED_TOKENS)
            row = {
                "timestamp": 1000 * arrival.request.arrival_s,
                "input_length": num_tokens,
                "output_length": arrival.num_output_tokens,
                "hash_ids": [*range(next_hash, next_hash + num_hashes)],
            }
            next_hash += num_hashes
            file.write(json.dumps(row) + "\n")


def peer_config(scenario: Scenario, trace: Path) -> dict[str, Any]:
    """Returns the settings of AISimulate for a scenario with one pool."""
    return {
        "traffic": {
            "source": {
                "type": "trace",
                "format": "mooncake",
                "paths": [str(trace)],
                "block_size": HASHED_TOKENS,
            },
            "load": {"type": "trace_timestamps"},
        },
        "engine": {
            "mode": "aggregated",
            "model": "meta-llama/Meta-Llama-3.1-8B",
            "hardware": "h100_sxm",
            "backend": "vllm",
            "workers": {
                "aggregated": {
                    "parallelism": {"replicas": scenario.num_replicas},
                    "scheduler": {
                        "max_batched_tokens": scenario.max_num_batched_tokens,
                        "max_sequences": scenario.max_num_seqs,
                    },
                    "kv_cache": {"prefix_caching": True},
                }
            },
        },
    }


def peer_cpu_s(python: Path, config: dict[str, Any], folder: Path) -> tuple[float, dict[str, Any]]:
    """Runs AISimulate once; returns its CPU seconds and its figures. Raises FailedError."""
    (folder / "peer.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    words = ("predict", "--config", "peer.yaml", "--output-dir", "peer", "--overwrite")
    took = timed([str(python.with_name("aisimulate").absolute()), *words], folder)
    if took.error is not None:
        raise FailedError(f"in AISimulate: {took.error}")
    found: dict[str, Any] = json.loads((folder / "peer" / "prediction.json").read_text(encoding="utf-8"))
    return took.cpu_s, found


def line_of(overrides: Sequence[str], python: Path, rounds: int) -> str:
    """Runs both programs in turn; returns the figures as a line of the table. Raises FailedError."""
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(list(overrides))
    scenario, source = build_run(cfg)
    ours, theirs = [], []
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_trace(folder / "trace.jsonl", source)
        config = peer_config(scenario, folder / "trace.jsonl")
        for _ in range(rounds):
            cpu_s, summary = cpu_s_of(HERE, overrides)
            ours.append(cpu_s)
            cpu_s, prediction = peer_cpu_s(python, config, folder)
            theirs.append(cpu_s)
    cpu = (median(ours), min(ours), median(theirs), min(theirs), min(theirs) / min(ours))
    ttft_ms = (1000 * summary["ttft"]["mean_s"], prediction["mean_ttft_ms"])
    return "".join(f"{figure:9.2f}" for figure in cpu) + "".join(f"{mean:8.1f}" for mean in ttft_ms)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the runs named on the command line; returns 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("python", type=Path, metavar="PYTHON", help="interpreter that has AISimulate")
    add_options(parser, MEASURED)
    options = parser.parse_args(arguments)
    if not options.python.with_name("aisimulate").is_file():
        parser.error(
            f"{options.python}: has no command aisimulate beside it; --help says how to make its environment"
        )
    columns = f"{'median':>9}{'min':>9}"
    print(f"{'CPU s: ours':>18}{'AISimulate':>18}{'':9}{'TTFT, ms':>16}")
    print(f"{columns}{columns}{'ratio':>9}{'ours':>8}{'its':>8}  run")
    done = True
    for name, overrides in chosen_runs(parser, options, MEASURED).items():
        try:
            print(f"{line_of(overrides, options.python, options.rounds)}  {name}", flush=True)
        except FailedError as error:
            done = False
            print(f"{name} fails {error}", flush=True)
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
