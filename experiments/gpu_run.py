"""All checks and measurements that need a GPU, in one program: `python -m experiments.gpu_run [part ...]`.

Each part runs in its own process with its own time limit and writes its rows as it measures them, so that a
hang, a CUDA error or a crash of one part loses neither the other parts nor the rows already measured. A table
of the results is printed at the end. Results are written to OUT/<gpu>/<date>/<part>.json, beside
environment.json (see docs/gpu_measurements.md). The exit status is 0 if all parts that ran passed; a target
figure that is missed is reported, but is not a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.gpu.parts import CALLS, PARTS, in_order, limit_s, named
from experiments.gpu.sensors import readings, sampled
from experiments.gpu.table import table_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results")
GRACE_S = 6.0  # time that a part has to end by itself after its limit
RESERVE_S = 4.0  # part of the call's time that is kept for the table
ENVIRONMENT_LIMIT_S = 90.0
MOST_RESTARTS = 8
POISONED = 70  # same value as in experiments.gpu.record, which imports torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Options that all parts of one call share."""

    folder: Path
    device: str
    quick: bool
    seed: int


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts, prints the table and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_run", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="part",
        help=f"{', '.join(PARTS)}; a prefix of several names, such as engine; or {', '.join(CALLS)}, which "
        "together run all parts; default: call1",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="root folder of the results; default: %(default)s"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=540.0,
        help="time limit of the whole call, in s; default: %(default)s",
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="device to run on; default: %(default)s"
    )
    parser.add_argument("--quick", action="store_true", help="use tiny sizes, as a dry run of the program")
    parser.add_argument("--seed", type=int, help="seed of the random inputs; default: a new one")
    parser.add_argument("--list", action="store_true", help="describe the parts and run nothing")
    asked = parser.parse_args(argv)
    end = time.monotonic() + asked.limit_s - RESERVE_S
    for word in asked.parts:
        if not named(word):
            parser.error(f"there is no part {word!r}; the parts are {', '.join((*PARTS, *CALLS))}")
    if asked.device == "cpu" and not asked.quick:
        parser.error("--device cpu interprets the kernels, which takes hours at full size; add --quick")
    if asked.list:
        for name, part in PARTS.items():
            print(f"{name:19} {part.about}")
        for name, parts in CALLS.items():
            print(f"{name:19} {', '.join(parts)}")
        return 0
    environment = _environment(asked.device)
    if environment is None:
        return 2
    seed = secrets.randbelow(1 << 31) if asked.seed is None else asked.seed
    folder = asked.out.resolve() / _slug(environment["gpu"]) / time.strftime("%Y-%m-%d")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")
    call = Call(folder=folder, device=asked.device, quick=asked.quick, seed=seed)
    names = in_order(asked.parts, done=[name for name in PARTS if _passed(call, name)])
    for place, name in enumerate(names):
        left_s = end - time.monotonic()
        part_s = limit_s(name, names[place + 1 :], left_s) - GRACE_S
        if part_s < (1.0 if asked.quick else PARTS[name].least_s):
            why = f"only {left_s:.0f} s of the call's time were left"
            _write(call, name, {"status": "skipped", "why": why})
        else:
            run_part(call, name, part_s)
        print(f"{name}: {_read(call, name)['status']}", flush=True)
    found = {name: _read(call, name) for name in names}
    print("\n".join(table_of(environment["gpu"], folder, found)), flush=True)
    return int(any(part["status"] not in ("passed", "skipped") for part in found.values()))


def run_part(call: Call, name: str, part_s: float) -> None:
    """Runs a part until it ends or its time limit; it leaves its JSON file, and its log beside it."""
    (call.folder / f"{name}.json").unlink(missing_ok=True)
    end = time.monotonic() + part_s
    sensors = call.folder / f"{name}.sensors.log"
    with (call.folder / f"{name}.log").open("w") as log, sampled(sensors):
        for restart in range(MOST_RESTARTS + 1):
            status = _run_process(call, name, end - time.monotonic(), log.fileno(), resume=restart > 0)
            if status in (0, 1):
                break
            again = status is not None and restart < MOST_RESTARTS and end - time.monotonic() > 10
            if not _note_death(call, name, status) or not again:
                break
    found = _read(call, name)
    if found["status"] == "running":
        found |= {"status": "out of time" if status is None else "died", "log": _tail(call, name)}
    _write(call, name, found | {"sensors": readings(sensors)})


def _run_process(call: Call, name: str, left_s: float, log: int, *, resume: bool) -> int | None:
    """Runs one process of a part. Returns its exit status, or None if it reached its time limit.

    Its child processes are ended with it.
    """
    process = subprocess.Popen(
        _command(call, name, left_s, resume=resume),
        cwd=ROOT,
        env=_variables(call.device),
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        return process.wait(left_s + GRACE_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _command(call: Call, name: str, left_s: float, *, resume: bool) -> list[str]:
    command = [sys.executable, "-m", "experiments.gpu.part", name]
    command += ["--folder", str(call.folder), "--device", call.device, "--seed", str(call.seed)]
    command += ["--limit-s", f"{left_s:.1f}", *(["--quick"] if call.quick else [])]
    command += ["--resume"] if resume else []
    return command


def _variables(device: str) -> dict[str, str]:
    """Returns the environment variables of the parts; kernels are interpreted on a CPU only."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1" if device == "cpu" else "0"}


def _note_death(call: Call, name: str, status: int | None) -> bool:
    """Records in the unfinished row how its process ended. Returns whether the part can be resumed."""
    found = _read(call, name)
    row = found.get("now")
    if row is not None:
        how = (
            "had not ended at the time limit" if status is None else f"ended its process ({_ending(status)})"
        )
        found["rows"].append({"name": row, "error": how, "log": _tail(call, name)})
        found["now"] = None
        _write(call, name, found)
    return row is not None or status == POISONED


def _ending(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _environment(device: str) -> dict[str, Any] | None:
    """Returns the output of `experiments.gpu.environment`, or None, with the error on stderr, if it fails."""
    command = [sys.executable, "-m", "experiments.gpu.environment", device]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=_variables(device),
            capture_output=True,
            text=True,
            timeout=ENVIRONMENT_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(
            f"--device={device}: the device did not respond within {ENVIRONMENT_LIMIT_S:.0f} s",
            file=sys.stderr,
        )
        return None
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        print(
            f"--device={device}: the device cannot be used; without a GPU, use --device cpu --quick",
            file=sys.stderr,
        )
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().split("\n")[-1])
    return found


def _passed(call: Call, name: str) -> bool:
    """Returns whether the folder holds a passed result of the part from the same kind of run."""
    try:
        found = _read(call, name)
    except (OSError, ValueError):
        return False
    return bool(found["status"] == "passed" and found["quick"] == call.quick)


def _read(call: Call, name: str) -> dict[str, Any]:
    file = call.folder / f"{name}.json"
    if not file.exists():
        return {"part": name, "status": "running", "seconds": 0.0, "rows": []}
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _write(call: Call, name: str, content: dict[str, Any]) -> None:
    file = call.folder / f"{name}.json"
    file.with_suffix(".tmp").write_text(
        json.dumps({"part": name, "seconds": 0.0, "rows": [], **content}, indent=1) + "\n"
    )
    os.replace(file.with_suffix(".tmp"), file)


def _tail(call: Call, name: str) -> list[str]:
    """Returns the last 40 lines of a part's log."""
    return (call.folder / f"{name}.log").read_text(errors="replace").split("\n")[-40:]


def _slug(gpu: str) -> str:
    """Returns the GPU's name in the form of a folder name: NVIDIA H200 -> nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
