"""All that needs a GPU, in one program: `python -m experiments.gpu_run main --limit-s 480`.

It runs the steps of experiments.gpu.steps, each in its own process with a hard share of the time, and writes
a line of JSON per measurement as it is made, so that a hang, a CUDA error or a crash costs one measurement.
The results are in experiments/results/GPU/DATE; if the variable OUT names a folder, an archive of them is
written there after every step. A table of targets comes last (see docs/gpu_measurements.md). The exit status
is 0 if all that was measured is right; a target that is missed is reported, but is not a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from experiments.gpu.steps import STEPS, in_order, limit_s
from experiments.gpu.targets import is_failed, rows_of, table_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results")
GRACE_S = 3.0  # time that a step has to end by itself before it is ended
RESERVE_S = 4.0  # part of the run's time that is kept for the table and the last archive
LEAST_S = 8.0  # a step is not begun with less time
POISONED = 70  # as in experiments.gpu.measurement, which imports torch
ARCHIVE_BYTES = 15 << 20
"""Largest archive; files that exceed it are left out, the largest first, and named in left_out.txt."""
SENSORS = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"


class Call(NamedTuple):
    """The options of a run. only: beginnings of the names of measurements, by step; none: all."""

    folder: Path
    device: str
    rehearse: bool
    seed: int
    only: dict[str, list[str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the steps, prints the table of targets and returns the exit status."""
    begin, parser = time.monotonic(), _parser()
    asked = parser.parse_args(argv)
    only = _only(parser, asked)
    if asked.list or asked.what == "table":
        newest = {file.parents[1]: file.parent for file in sorted(asked.results.glob("*/*/run.jsonl"))}
        steps = (
            f"{name:16} {'main' if s.is_main else '':5}{s.share_s:4} s  {s.about}"
            for name, s in STEPS.items()
        )
        print("\n".join(steps if asked.list else table_of(list(newest.values()))))
        return 0
    device = "cpu" if asked.rehearse else "cuda"
    gpu = "cpu" if asked.rehearse else _gpu()
    if not gpu:
        print("no GPU was found; without one, try the program with --rehearse", file=sys.stderr)
        return 2
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")  # NVIDIA H200 -> nvidia-h200
    folder = asked.results.resolve() / slug / time.strftime("%Y-%m-%d")
    folder.mkdir(parents=True, exist_ok=True)
    seed = secrets.randbelow(1 << 31) if asked.seed is None else asked.seed
    call = Call(folder, device, asked.rehearse, seed, only)
    names = in_order(list(only), done=[name for name in STEPS if _is_done(folder, name)])
    end = begin + (asked.limit_s or (180.0 if only else 480.0)) - RESERVE_S
    # Other cores compile the kernels into Triton's cache while the first steps run.
    compiling = _process(
        call, "compiling", [*names, "--folder", _of_checkout(folder)], fresh=True, TRITON_INTERPRET="0"
    )
    try:
        failed = _steps(call, names, end)
    finally:
        _kill(compiling)
    archive(folder)
    print("\n".join(summary(folder)), flush=True)
    return int(failed)


def _is_done(folder: Path, name: str) -> bool:
    """Returns whether a folder has the results of a step, none of which failed."""
    rows = rows_of(folder / f"{name}.jsonl")
    return bool(rows) and not any(map(is_failed, rows))


def _steps(call: Call, names: Sequence[str], end: float) -> bool:
    """Runs the steps one after the other; the next one's process imports while one runs."""
    failed, process = False, _started(call, names[0])
    for place, name in enumerate(names):
        later, left_s = names[place + 1 :], end - time.monotonic()
        share_s, own = limit_s(name, later, left_s), process
        if later:
            process = _started(call, later[0])
        if share_s < LEAST_S:
            _kill(own)
            done: dict[str, Any] = {"status": "skipped", "why": f"{left_s:.0f} s of the run were left"}
        else:
            done = run_step(call, name, share_s, own)
        failed |= done["status"] in ("failed", "died")
        about = {"step": name, "seed": call.seed, "rehearse": call.rehearse, "limit_s": round(share_s, 1)}
        with (call.folder / "run.jsonl").open("a") as lines:
            lines.write(json.dumps(about | done) + "\n")
        print(f"{name}: {done['status']} after {done.get('seconds', 0):.0f} of {share_s:.0f} s", flush=True)
        archive(call.folder)
    return failed


def run_step(call: Call, name: str, share_s: float, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Runs a step until it ends, or until its share of the time is over; returns its status."""
    begin = time.monotonic()
    end, sensors = begin + share_s, None
    if tool := shutil.which("nvidia-smi"):  # clocks, power and temperature while the step runs
        command = [tool, SENSORS, "--format=csv", "--loop-ms=500"]
        with (call.folder / f"{name}.sensors.csv").open("w") as lines:
            sensors = subprocess.Popen(command, stdout=lines, stderr=lines, start_new_session=True)
    try:
        while True:
            code = _watched(call, name, process, end)
            if code in (0, 1):
                has_rows = bool(rows_of(call.folder / f"{name}.jsonl"))  # else it ended while it imported
                status = "passed" if not code else "failed" if has_rows else "died"
                break
            is_over = time.monotonic() >= end
            was_making = _note_death(call, name, code, is_over=is_over)
            if end - time.monotonic() < LEAST_S or not (was_making or code == POISONED):
                status = "out of time" if code is None else "died"
                break
            process = _started(call, name, fresh=False)
    finally:
        _kill(sensors)
    log = (call.folder / f"{name}.log").read_text(errors="replace").splitlines()[-20:]
    about = {"log": log} if status == "died" else {}
    return {"status": status, "seconds": round(time.monotonic() - begin, 1), **about}


def _started(call: Call, name: str, *, fresh: bool = True) -> subprocess.Popen[str]:
    """Starts the process of a step, which imports and then waits for its seconds."""
    words = [name, "--folder", _of_checkout(call.folder), "--device", call.device, "--seed", str(call.seed)]
    words += ["--only", *call.only[name]] if name in call.only else []
    for ending in ("jsonl", "now") if fresh else ():
        (call.folder / f"{name}.{ending}").unlink(missing_ok=True)
    return _process(call, "measurement", words, log=name, fresh=fresh)


def _of_checkout(folder: Path) -> str:
    """Returns a folder as the steps see it, relative to the checkout if it lies there.

    Files that they write name others of the folder, and are read on other machines, too.
    """
    return str(folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder)


def _process(
    call: Call, module: str, words: list[str], *, fresh: bool, log: str = "", **variables: str
) -> subprocess.Popen[str]:
    """Starts a module of experiments.gpu in a process group of its own."""
    command = [sys.executable, "-m", f"experiments.gpu.{module}", *words]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "TRITON_INTERPRET": "1" if call.rehearse else "0",  # kernels are interpreted on a CPU only
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic algorithms, which fill memory with NaN
    }
    with (call.folder / f"{log or module}.log").open("w" if fresh else "a") as lines:
        return subprocess.Popen(
            command + (["--rehearse"] if call.rehearse else []),
            cwd=ROOT,
            env=os.environ | own | variables,
            stdin=subprocess.PIPE,
            stdout=lines,
            stderr=lines,
            text=True,
            start_new_session=True,
        )


def _watched(call: Call, name: str, process: subprocess.Popen[str], end: float) -> int | None:
    """Lets a process make its measurements; returns its exit status, or None if it was ended for its time."""
    try:
        assert process.stdin is not None
        with suppress(OSError):  # it died while it imported
            process.stdin.write(f"{end - time.monotonic() - GRACE_S:.2f}\n")
            process.stdin.close()
        while time.monotonic() < end and not _overrun(call, name):
            with suppress(subprocess.TimeoutExpired):
                return process.wait(min(0.25, max(end - time.monotonic(), 0.01)))
        return None
    finally:
        _kill(process)


def _overrun(call: Call, name: str) -> bool:
    """Returns whether the measurement that is being made has taken longer than its own limit."""
    now, slower = _now(call, name), 20.0 if call.rehearse else 1.0  # kernels are interpreted
    return now is not None and time.time() - now["began"] > slower * now["limit_s"]


def _now(call: Call, name: str) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((call.folder / f"{name}.now").read_text())
        return found
    return None


def _note_death(call: Call, name: str, code: int | None, *, is_over: bool) -> bool:
    """Writes a line for each measurement that was being made when its process ended; False: none was."""
    now, file = _now(call, name), call.folder / f"{name}.jsonl"
    (call.folder / f"{name}.now").unlink(missing_ok=True)
    done = {row["name"] for row in rows_of(file)}
    how = {"error": f"ended its process (exit status {code})"}
    if code is None:
        how = {"late": "was being made"} if is_over else {"error": "had not ended at its own limit"}
    with file.open("a") as lines:
        for each in now["names"] if now else ():
            if each not in done:
                lines.write(json.dumps({"name": each, **how}) + "\n")
    return now is not None


def _kill(process: subprocess.Popen[Any] | None) -> None:
    """Ends a process and its children."""
    if process is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def archive(folder: Path) -> None:
    """Writes gpu_run.tar.gz and table.txt into the folder that OUT names, if it does, whole or not at all."""
    if not os.environ.get("OUT"):
        return
    out, left_out = Path(os.environ["OUT"]), list[str]()
    out.mkdir(parents=True, exist_ok=True)
    found = (file for file in folder.rglob("*") if file.is_file() and file.suffix not in (".tmp", ".now"))
    files = sorted(found, key=lambda file: file.stat().st_size)
    while True:
        with tarfile.open(out / "gpu_run.tmp", "w:gz", compresslevel=6) as tar:
            for file in files:
                tar.add(file, arcname=file.relative_to(folder.parents[1]))
        if (out / "gpu_run.tmp").stat().st_size <= ARCHIVE_BYTES or len(files) < 2:
            break
        left_out.append(str(files.pop().relative_to(folder)))
        (folder / "left_out.txt").write_text("\n".join(left_out) + "\n")
    os.replace(out / "gpu_run.tmp", out / "gpu_run.tar.gz")
    (out / "table.tmp").write_text("\n".join(summary(folder)) + "\n")
    os.replace(out / "table.tmp", out / "table.txt")


def summary(folder: Path) -> list[str]:
    """Returns the lines of a run: what failed, then the table of targets."""
    runs = rows_of(folder / "run.jsonl")
    lines = ["A rehearsal: the figures mean nothing."] if runs and runs[-1]["rehearse"] else []
    for name, rows in ((name, rows_of(folder / f"{name}.jsonl")) for name in STEPS):
        failed = [row for row in rows if is_failed(row)]
        counts = {"measured": len(rows), "failed": len(failed)}
        for word, key in (("not begun", "late"), ("not available", "unavailable")):
            counts[word] = sum(key in row for row in rows)
        counts["measured"] -= counts["not begun"] + counts["not available"]
        if rows:
            lines.append(f"{name}: {', '.join(f'{count} {word}' for word, count in counts.items() if count)}")
        for row in failed[:12]:
            why = " ".join(str(row.get("error") or row.get("why") or "the check does not hold").split())
            lines.append(f"  FAILED {row['name']}: {why[:140]}")
    return [*lines, "", *table_of([folder]), "", f"results: {folder}"]


def _parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").split("\n", 1)[0]
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_run", description=about)
    add = parser.add_argument
    table = "main: run the steps; table: print the targets and what the results folder has of them"
    add("what", nargs="?", choices=["main", "table"], default="main", help=table)
    only = "run these steps, or measurements STEP/BEGINNING-OF-NAME, instead of those of main; see --list"
    add("--only", nargs="+", default=[], metavar="NAME", help=only)
    add("--tiles", action="store_true", help="search tile sizes, beside --only or alone")
    limit = "time limit of the whole run, in s; default: 480, with --only or --tiles 180"
    add("--limit-s", type=float, help=limit)
    add("--rehearse", action="store_true", help="a dry run on a CPU: tiny sizes and interpreted kernels")
    add("--results", type=Path, default=RESULTS, help="root of the results; default: %(default)s")
    add("--seed", type=int, help="seed of the random inputs; default: a new one")
    add("--list", action="store_true", help="describe the steps and run nothing")
    return parser


def _only(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the steps that are asked for, with the beginnings of the names of their measurements."""
    found: dict[str, list[str]] = {}
    for word in [*asked.only, *(["tiles"] if asked.tiles else [])]:
        step, _, name = word.partition("/")
        if step not in STEPS:
            parser.error(f"--only {word}: there is no step {step!r}; the steps are {', '.join(STEPS)}")
        found.setdefault(step, []).append(name)
    if asked.limit_s is not None and asked.limit_s <= RESERVE_S:
        parser.error(f"--limit-s {asked.limit_s:g}: must be more than {RESERVE_S:g} s")
    return found


def _gpu() -> str:
    """Returns the name of the first GPU; empty: there is none. This process must not hold it itself."""
    torch = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    for command in (["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], torch):
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            return done.stdout.strip().split("\n")[0]
    return ""


if __name__ == "__main__":
    sys.exit(main())
