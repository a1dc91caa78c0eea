"""The console script `windtunnel <command> ...`. A command is imported only when it is called.

Exit codes: 0 success; 1 files or output cannot be written, or a bug (with its traceback); 2 a wrong command
or setting, or a policy of the user's that failed (one message); 3 the command ended, but requests to a server
failed, the engine's decisions differ from the simulator's, no fleet meets the SLO, or a published figure is
no longer reproduced; 130 Ctrl-C; 143 SIGTERM.
"""

import atexit
import gc
import importlib
import importlib.util
import signal
import sys
import threading
import traceback
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType, ModuleType
from typing import NamedTuple

from experiments.app.job import (
    CannotWriteError,
    UnsuccessfulError,
    begin_collection,
    output_errors_kept,
    without_secrets,
)
from policies.user_code import PolicyError, trace_of, with_quote
from sim.settings.errors import ConfigError, suggest


class Command(NamedTuple):
    """One command of `COMMANDS`."""

    module: str  # defines main(arguments), or prepare(cfg, composition): see `experiments.app.job`
    summary: str
    config_name: str | None = None  # its root config, if Hydra composes its settings
    by_runner: bool = True  # false: main(arguments) composes the settings and runs the command itself
    flags: Mapping[str, str] = MappingProxyType({})  # flag -> the setting that it stands for
    secrets: Mapping[str, str] = MappingProxyType(
        {}
    )  # flag with a secret -> environment variable that gets it


COMMANDS = {
    "simulate": Command(
        "experiments.simulate.command", "Simulate a workload under a policy on a hardware model.", "simulate"
    ),
    "compare": Command(
        "experiments.compare.command",
        "Compare policies on the same traffic, with confidence intervals over seeds and a verdict.",
        "compare",
        by_runner=False,
    ),
    "goodput": Command(
        "experiments.goodput.command",
        "Find the highest request rate that meets an SLO, and the SLO attainment at every rate.",
        "goodput",
    ),
    "whatif": Command(
        "experiments.compare.whatif.command",
        "Try single changes against a baseline: twice the traffic, another GPU, FP8, ...",
        "whatif",
    ),
    "reproduce": Command(
        "experiments.reproduce.command",
        "Recompute published figures, and show each beside ours with the reason of a difference.",
        "reproduce",
        by_runner=False,
    ),
    "dashboard": Command(
        "experiments.dashboard.command",
        "Serve a local web page that simulates again whenever a setting is changed.",
        "simulate",
        by_runner=False,
    ),
    "capacity": Command(
        "experiments.capacity.command",
        "Find the cheapest GPUs, replicas and engine settings that meet an SLO.",
        "capacity",
    ),
    "sweep": Command(
        "experiments.sweep.command",
        "Run every combination of several values of settings; can be resumed.",
        "sweep",
        by_runner=False,
    ),
    "report": Command(
        "experiments.report.command", "Draw the report of a finished run or sweep again; also as PNG and SVG."
    ),
    "score": Command(
        "experiments.score.command",
        "Simulate every row of a measured table and report the errors.",
        "score",
        flags={"--update-trust": "update_trust=true", "league": "league=true"},
    ),
    "calibrate": Command(
        "experiments.calibrate.command",
        "Fit the hardware model of a GPU to measured operators, or measure this machine.",
        "calibrate",
    ),
    "roofline": Command(
        "experiments.report.roofline.command",
        "Show where prefill and decode of a model lie on the roofline of a GPU, and what limits them.",
        "roofline",
    ),
    "place": Command(
        "experiments.place.command",
        "Place models on GPUs, for the most value or the lowest cost.",
        "place",
    ),
    "spares": Command(
        "experiments.place.spares",
        "Find how many spare replicas (N + 1, N + 2, ...) an availability target needs.",
        "spares",
    ),
    "validate": Command(
        "experiments.validate.command",
        "Compare the simulator with windtunnel's real engine or with a measured run.",
        "validate",
    ),
    "explain": Command(
        "experiments.report.explain.command",
        "Show the timeline of one request of a run: every wait with its cause.",
    ),
    "dialects": Command(
        "experiments.report.dialects.command",
        "Print the metrics of a run by the definitions of vLLM, guidellm, AIPerf and MLPerf.",
    ),
    "observe": Command(
        "experiments.observe.command",
        "Load an OpenAI-compatible server with a workload and record what a client sees.",
        "observe",
    ),
    "serve": Command(
        "experiments.serve.command",
        "Serve an OpenAI-compatible endpoint over a simulated fleet, or over the real engine.",
        "serve",
        secrets={"--api-key": "WINDTUNNEL_API_KEY"},
        by_runner=False,
    ),
    "chat": Command("experiments.simulate.chat", "Chat with a model that the real engine serves."),
    "new": Command(
        "experiments.conformance.new_policy.command",
        "Write the template of a new policy: code, config and test.",
    ),
    "list": Command("experiments.app.list_choices", "Show the config groups and their choices."),
    "completion": Command("experiments.app.completion", "Print a completion script for bash, zsh or fish."),
}

TRACEBACK = "--traceback"
"""The flag of every command that prints the traceback of an error."""

EVERYDAY = ("simulate", "compare", "goodput", "capacity", "serve")
"""Commands that `windtunnel` without arguments shows."""

OVERVIEW = """\
usage: windtunnel <command> [group=choice ...] [key=value ...]

Simulates LLM serving: latencies, goodput and cost of a policy for a workload on a GPU.

{commands}

examples
  windtunnel simulate                                     the default: a chat workload on one H100
  windtunnel simulate model=llama3_1_8b hardware=l40s     another model on another GPU
  windtunnel simulate batching=prefill_first seed=3       another policy and another random seed
  windtunnel simulate --multirun batching=chunked,prefill_first seed=1,2
                                                          every combination, one run each
  windtunnel list hardware                                the choices for hardware=
  windtunnel simulate --help                              every group and setting

Every command takes --traceback: it prints the whole traceback of an error, such as one in your own policy."""

# `configs` is not listed: it is found by path and never imported.
OWN_PACKAGES = ("experiments", "fieldlimits", "hwmodels", "kernels", "policies", "realengine", "sim")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    given = [word for word in words if word != TRACEBACK]
    # With Python's defaults, garbage collection during the start and at exit takes a fifth of a short run.
    gc.set_threshold(50_000)
    if arguments is None:  # the process belongs to this command
        gc.disable()  # until `begin_collection`
    atexit.register(gc.freeze)
    with output_errors_kept() as output:
        code = _exit_code(given, with_traceback=len(given) < len(words))
    if output.error is None or isinstance(output.error, BrokenPipeError):  # as in `windtunnel list | head`
        return code
    print(f"windtunnel: standard output: {output.error.strerror}; make room, then try again", file=sys.stderr)
    return code or 1


def _exit_code(given: list[str], *, with_traceback: bool) -> int:
    """Runs one command, and prints its errors."""
    terminated = threading.Event()
    try:
        with _terminated_like_ctrl_c(terminated):
            _run(given)
    except (ConfigError, PolicyError) as error:
        _tell(error, with_traceback=with_traceback)
        return 2
    except CannotWriteError as error:
        print(f"windtunnel: {error}", file=sys.stderr)
        return 1
    except UnsuccessfulError as error:
        if str(error):
            print(f"windtunnel: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"windtunnel: {'terminated' if terminated.is_set() else 'interrupted'}", file=sys.stderr)
        # After an interrupt inside exec(), as in the import of a dataclass, `python -m` would exit with 130.
        # The next exec() makes it forget, and namedtuple() has one.
        namedtuple("Forgotten", "interrupt")
        return 143 if terminated.is_set() else 130
    return 0


def _tell(error: ConfigError | PolicyError, *, with_traceback: bool) -> None:
    """Prints an error, and the place in the user's own code; the traceback first, if it is asked for."""
    if with_traceback:
        trace = trace_of(error) or "".join(traceback.format_exception(error))
        print(trace, end="", file=sys.stderr)
    print(f"windtunnel: {with_quote(error)}", file=sys.stderr)


@contextmanager
def _terminated_like_ctrl_c(terminated: threading.Event) -> Iterator[None]:
    """Handles SIGTERM as Ctrl-C, so that partial results are kept and worker processes end.

    terminated: set on SIGTERM, for the exit code.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        terminated.set()
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # a shell starts background commands with SIGINT ignored
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(OVERVIEW.format(commands=_summaries(is_whole=bool(arguments))))
        return
    name, *rest = arguments
    if name == "_complete":
        _complete(rest)
        return
    if name == "--version":
        print(f"windtunnel {_installed().version()}")
        return
    if name not in COMMANDS:
        raise ConfigError(
            f"{name}: no such command; {suggest(name, COMMANDS, listed_by='windtunnel --help')}"
        )
    check_not_shadowed(Path(__file__).resolve().parents[2])
    command = COMMANDS[name]
    rest = [command.flags.get(word, word) for word in without_secrets(rest, command.secrets)]
    if any(word.partition("=")[0] in ("--from", "--from-ignore") for word in rest):
        rest = importlib.import_module("experiments.app.launch_lines.line").with_launch_line(rest, name)
    if command.config_name is None or not command.by_runner:
        run = importlib.import_module(command.module).main
        begin_collection()
        run(rest)
        return
    application = importlib.import_module("experiments.app.application")
    application.launch(
        application.Application(
            name=name, summary=command.summary, module=command.module, config_name=command.config_name
        ),
        rest,
    )


def _summaries(*, is_whole: bool) -> str:
    """Returns the everyday commands with a line about each, then the others, or how to list them."""
    lines = {name: f"  {name:12}{command.summary}" for name, command in COMMANDS.items()}
    everyday = [lines.pop(name) for name in EVERYDAY]
    more = ["more commands", *lines.values()] if is_whole else [f"{len(lines)} more: windtunnel --help"]
    return "\n".join(["everyday commands", *everyday, "", *more])


def check_not_shadowed(root: Path, packages: Sequence[str] = OWN_PACKAGES) -> None:
    """Raises ConfigError if a top-level package of windtunnel would be imported from outside `root`.

    The names are common words, and another distribution on PyPI installs a package `kernels`. Imported in
    place of windtunnel's, it would fail later with an error that names neither.
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
    """Imports `experiments.app.installed`: importlib.metadata takes as long as the rest of `--help`."""
    return importlib.import_module("experiments.app.installed")


def _complete(words: Sequence[str]) -> None:
    """Prints candidates for the last word, one per line (for the scripts of `windtunnel completion`)."""
    config_names = {name: c.config_name for name, c in COMMANDS.items() if c.config_name}
    completion = importlib.import_module("experiments.app.completion")
    print("\n".join(completion.candidates(words, list(COMMANDS), config_names)))


if __name__ == "__main__":
    sys.exit(main())
