"""The console script `windtunnel <command> ...`. Commands are imported when called: start-up is cheap.

Exit codes: 0 done, 1 a bug (with its traceback), 2 a wrong command or setting (one message), 3 done, but a
part of a load on a server failed, the engine decided otherwise than the simulator, or no fleet keeps the SLO,
130 Ctrl-C.
"""

import atexit
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from experiments.app.job import UnsuccessfulError
from sim.settings.errors import ConfigError, suggest


class Command(NamedTuple):
    """One line of the table below."""

    module: str  # with main(arguments), or with prepare(cfg, composition): see `job`
    summary: str
    config_name: str | None = None  # its root config, if Hydra composes its settings
    by_runner: bool = True  # the runner composes and runs it; else main(arguments) composes for itself


COMMANDS = {
    "simulate": Command(
        "experiments.simulate.command", "Fly a workload with a policy on a hardware model.", "simulate"
    ),
    "compare": Command(
        "experiments.compare.command",
        "Compare policies on the same traffic: intervals over seeds, and a verdict.",
        "compare",
    ),
    "goodput": Command(
        "experiments.goodput.command",
        "The highest request rate that keeps an SLO, and the share within it at every rate.",
        "goodput",
    ),
    "whatif": Command(
        "experiments.compare.whatif.command",
        "One change at a time against a baseline: twice the traffic, another GPU, FP8, ...",
        "whatif",
    ),
    "dashboard": Command(
        "experiments.dashboard.command",
        "A local page that simulates while its settings are turned.",
        "simulate",
        by_runner=False,
    ),
    "capacity": Command(
        "experiments.capacity.command",
        "How many of which GPUs, with which engine and settings, keep an SLO at the least cost.",
        "capacity",
    ),
    "sweep": Command(
        "experiments.sweep.command",
        "Every combination of several values, one run each, in warm workers; can be resumed.",
        "sweep",
        by_runner=False,
    ),
    "report": Command(
        "experiments.report.command", "Draw a run or a sweep again, without simulating; also PNG and SVG."
    ),
    "score": Command(
        "experiments.score.command", "Simulate every row of a measured table; how far off are we?", "score"
    ),
    "calibrate": Command(
        "experiments.calibrate.command",
        "Fit the hardware model of a GPU to measured operators, or measure this machine for our engine.",
        "calibrate",
    ),
    "roofline": Command(
        "experiments.report.roofline.command",
        "Where a model's prefill and decode lie under the roofline of a GPU, and what bounds them.",
        "roofline",
    ),
    "place": Command(
        "experiments.place.command",
        "Which models go on which GPUs: the most value, or the least rent.",
        "place",
    ),
    "spares": Command(
        "experiments.place.spares", "How many replicas are enough, if so many must be up: N + 1?", "spares"
    ),
    "validate": Command(
        "experiments.validate.command",
        "Fly our own engine, or take what was measured: how far off is the simulator, and why?",
        "validate",
    ),
    "explain": Command(
        "experiments.report.explain.command", "One request's life in a run: every wait with its reason."
    ),
    "dialects": Command(
        "experiments.report.dialects.command",
        "A run's figures by the definitions of vLLM, guidellm, AIPerf, MLPerf.",
    ),
    "observe": Command(
        "experiments.observe.command",
        "Load an OpenAI-compatible server with a workload and record what a client sees.",
        "observe",
    ),
    "chat": Command("experiments.simulate.chat", "Talk to a model that the real engine serves."),
    "new": Command(
        "experiments.conformance.new_policy.command",
        "Write a policy of your own to begin with: code, config and test.",
    ),
    "list": Command("experiments.app.list_choices", "Show the config groups and their choices."),
    "completion": Command("experiments.app.completion", "Print a completion script for bash, zsh or fish."),
}

OVERVIEW = """\
usage: windtunnel <command> [group=choice ...] [key=value ...]

A wind tunnel for LLM serving policies: latencies, goodput and cost of a policy on a workload and a GPU.

commands
{commands}

examples
  windtunnel simulate                                     the default: a chat workload on one H100
  windtunnel simulate model=llama3_1_8b hardware=l40s     another model on another GPU
  windtunnel simulate batching=prefill_first seed=3       another policy, another draw of the traffic
  windtunnel simulate --multirun batching=chunked,prefill_first seed=1,2
                                                          every combination, one run each
  windtunnel list hardware                                what can stand behind hardware=
  windtunnel simulate --help                              every group and setting"""

# `configs` is not among them: it is found by path, never imported.
OWN_PACKAGES = ("experiments", "hwmodels", "kernels", "policies", "realengine", "sim")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    # By default Python looks through all modules for cycles while they are imported, and again at the end:
    # that is a fifth of a short run.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    try:
        _run(given)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"windtunnel: {error}", file=sys.stderr)
        return 2
    except UnsuccessfulError as error:
        if str(error):
            print(f"windtunnel: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("windtunnel: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `windtunnel list | head`; keep the interpreter from flushing again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


def _run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(OVERVIEW.format(commands="\n".join(f"  {name:12}{c.summary}" for name, c in COMMANDS.items())))
        return
    name, *rest = arguments
    if name == "_complete":
        _complete(rest)
        return
    if name == "--version":
        print(f"windtunnel {_installed().version()}")
        return
    if name not in COMMANDS:
        raise ConfigError(f"{name}: no such command; {suggest(name, COMMANDS)}")
    check_not_shadowed(Path(__file__).resolve().parents[2])
    command = COMMANDS[name]
    if command.config_name is None or not command.by_runner:
        importlib.import_module(command.module).main(rest)
        return
    application = importlib.import_module("experiments.app.application")
    application.launch(
        application.Application(
            name=name, summary=command.summary, module=command.module, config_name=command.config_name
        ),
        rest,
    )


def check_not_shadowed(root: Path, packages: Sequence[str] = OWN_PACKAGES) -> None:
    """Raise ConfigError if one of our top-level packages would be imported from outside `root`.

    Their names are plain words, and another distribution owns `kernels`: imported in place of ours it would
    fail much later, with an error that names neither.
    """
    for package in packages:
        spec = importlib.util.find_spec(package)
        found = [Path(folder).resolve() for folder in (spec.submodule_search_locations or [])] if spec else []
        if root / package in found:
            continue
        if not found:
            raise ConfigError(f"package {package} not found; install windtunnel again: pip install -e {root}")
        owner = _installed().owner(package, root)
        raise ConfigError(f"package {package} comes from {found[0]}, not from {root / package}: {owner}")


def _installed() -> ModuleType:
    """What importlib.metadata says; to import it takes as long as all else that `--help` needs."""
    return importlib.import_module("experiments.app.installed")


def _complete(words: Sequence[str]) -> None:
    """Candidates for the last word, one a line (called by the scripts of `windtunnel completion`)."""
    config_names = {name: c.config_name for name, c in COMMANDS.items() if c.config_name}
    completion = importlib.import_module("experiments.app.completion")
    print("\n".join(completion.candidates(words, list(COMMANDS), config_names)))


if __name__ == "__main__":
    sys.exit(main())
