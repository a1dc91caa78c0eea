"""Everything that awaits a GPU, in one program: `python -m experiments.gpu_run [part ...]`.

Each part runs in a process of its own with a time limit of its own, and writes its rows as it goes: a hang,
a CUDA error or a crash of one leaves the others, and what it had measured. A table comes last on stdout.
Results: OUT/<gpu>/<date>/<part>.json beside environment.json (see docs/gpu_measurements.md). Exit
status: 0 if all parts that ran passed; a number that is not reached is said, and fails nothing.
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

from experiments.gpu.parts import PARTS, in_order, limit_s, named
from experiments.gpu.table import table_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results")
GRACE_S = 6.0  # for a part to end by itself after its limit
RESERVE_S = 4.0  # of the call, for the table
ENVIRONMENT_LIMIT_S = 90.0
MOST_RESTARTS = 8
POISONED = 70  # as in experiments.gpu.record, which imports torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What all parts of one call share."""

    folder: Path
    device: str
    quick: bool
    seed: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, print the table, return the exit status."""
    only = ", ".join(name for name, part in PARTS.items() if part.if_asked)
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_run", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="part",
        help=f"{', '.join(PARTS)}; or the beginning of some names, as engine; default: all but {only}",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="root of the results; default: %(default)s")
    parser.add_argument(
        "--limit-s", type=float, default=540.0, help="of the whole call; default: %(default)s"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a dry run of the program")
    parser.add_argument("--seed", type=int, help="of the random inputs; default: a new one")
    parser.add_argument("--list", action="store_true", help="say what the parts are, and run nothing")
    asked = parser.parse_args(argv)
    end = time.monotonic() + asked.limit_s - RESERVE_S
    for word in asked.parts:
        if not named(word):
            parser.error(f"no part {word!r}; there are: {', '.join(PARTS)}")
    if asked.device == "cpu" and not asked.quick:
        parser.error("--device cpu interprets the kernels, which takes hours at full size: add --quick")
    if asked.list:
        for name, part in PARTS.items():
            print(f"{name:18} {part.about}")
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
            _write(call, name, {"status": "skipped", "why": f"{left_s:.0f} s were left of the call"})
        else:
            run_part(call, name, part_s)
        print(f"{name}: {_read(call, name)['status']}", flush=True)
    found = {name: _read(call, name) for name in names}
    print("\n".join(table_of(environment["gpu"], folder, found)), flush=True)
    return int(any(part["status"] not in ("passed", "skipped") for part in found.values()))


def run_part(call: Call, name: str, part_s: float) -> None:
    """Run a part until it ends or its time is up; what it leaves is its file, and its log beside it."""
    (call.folder / f"{name}.json").unlink(missing_ok=True)
    end = time.monotonic() + part_s
    with (call.folder / f"{name}.log").open("w") as log:
        for restart in range(MOST_RESTARTS + 1):
            status = _run_process(call, name, end - time.monotonic(), log.fileno(), resume=restart > 0)
            if status in (0, 1):
                break
            again = status is not None and restart < MOST_RESTARTS and end - time.monotonic() > 10
            if not _note_death(call, name, status) or not again:
                break
    found = _read(call, name)
    if found["status"] == "running":
        _write(
            call,
            name,
            found | {"status": "out of time" if status is None else "died", "log": _tail(call, name)},
        )


def _run_process(call: Call, name: str, left_s: float, log: int, *, resume: bool) -> int | None:
    """One process of a part: its exit status, or None where its time was up. None of its children stays."""
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
    """The environment of the parts: kernels are interpreted on a CPU and nowhere else."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1" if device == "cpu" else "0"}


def _note_death(call: Call, name: str, status: int | None) -> bool:
    """Write into the row that was begun how its process ended; False: no row was, and nothing can go on."""
    found = _read(call, name)
    row = found.get("now")
    if row is not None:
        how = (
            "had not ended when the time was up"
            if status is None
            else f"ended its process ({_ending(status)})"
        )
        found["rows"].append({"name": row, "error": how, "log": _tail(call, name)})
        found["now"] = None
        _write(call, name, found)
    return row is not None or status == POISONED


def _ending(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _environment(device: str) -> dict[str, Any] | None:
    """What `experiments.gpu.environment` prints; None, and why on stderr, where it fails."""
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
        print(f"--device={device}: it did not answer within {ENVIRONMENT_LIMIT_S:.0f} s", file=sys.stderr)
        return None
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        print(
            f"--device={device}: not usable; --device cpu --quick makes a dry run without one",
            file=sys.stderr,
        )
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().split("\n")[-1])
    return found


def _passed(call: Call, name: str) -> bool:
    """Whether the folder holds a part's result, of the same kind of run."""
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
    """The end of a part's log."""
    return (call.folder / f"{name}.log").read_text(errors="replace").split("\n")[-40:]


def _slug(gpu: str) -> str:
    """NVIDIA H200 -> nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
