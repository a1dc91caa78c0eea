"""A measurement of a GPU run, and the process that makes those of one step, a line of JSON each.

`python -m experiments.gpu.measurement STEP ...` is started by experiments.gpu_run before its turn, so that
its imports take none of the run's time; it begins when a line with its seconds comes on stdin. Exit status:
0 passed, 1 failed, 70 the GPU is unusable for this process and a new one may make the measurements that are
left.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.gpu.steps import STEPS
from experiments.gpu.targets import Row, is_failed, rows_of

POISONED = 70
SETUP_S = 75.0
"""Seconds that a set-up may take, such as the start of an engine."""


class UnavailableError(Exception):
    """A measurement needs something that this machine or version lacks; its row says so and does not fail."""


class Run:
    """The context of measurements: the device, the seed, the folder of the results, and the seconds left.

    rehearse: whether sizes are tiny, to try the program on a CPU, where kernels are interpreted.
    """

    def __init__(self, folder: Path, device: str, *, rehearse: bool, seed: int, left_s: float) -> None:
        self.folder, self.rehearse, self.seed = folder, rehearse, seed
        self.device = torch.device(device)
        self._end = time.monotonic() + left_s

    @property
    def left_s(self) -> float:
        """Seconds until the step must end."""
        return self._end - time.monotonic()

    def size(self, real: Any, small: Any) -> Any:
        """Returns the real value, or in a rehearsal the small one."""
        return small if self.rehearse else real

    def row(self, step: str, name: str) -> Row | None:
        """Returns the row of a measurement that was made before, if it has no error."""
        rows = rows_of(self.folder / f"{step}.jsonl")
        return next((row for row in rows if row["name"] == name and "error" not in row), None)

    @cached_property
    def limits(self) -> Row:
        """Rates that were measured: copy and read in bytes/s, bf16 in FLOP/s."""
        return self.row("limits", "rates") or {}

    def share(self, rate: float, of: str) -> float | None:
        """Returns a rate as a share of a limit; None: it was not measured."""
        return rate / self.limits[of] if of in self.limits else None


class Measurement(NamedTuple):
    """A row of a step's table. measure(run, what the set-up yields) returns the fields of its line.

    setup: consecutive measurements with the same one share it. limit_s: after so many seconds its process is
    ended, and a new one makes the measurements after it. Its target, if any, is in experiments.gpu.targets.
    """

    name: str
    measure: Callable[[Run, Any], Mapping[str, Any]]
    setup: Callable[[Run], AbstractContextManager[Any]] | None = None
    limit_s: float = 20.0


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the measurements of a step; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu.measurement")
    parser.add_argument("step", choices=list(STEPS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args(argv)
    table = STEPS[asked.step].table()
    left_s = float(sys.stdin.readline() or "0")
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(left_s, 1.0))  # shows in the log where it hangs
    if asked.device == "cpu":
        torch.set_num_threads(1)  # two threads on a busy machine are ten times slower
    torch.manual_seed(asked.seed)
    run = Run(asked.folder, asked.device, rehearse=asked.rehearse, seed=asked.seed, left_s=left_s)
    file = asked.folder / f"{asked.step}.jsonl"
    try:
        chosen = [one for one in table(run) if any(one.name.startswith(name) for name in asked.only)]
        if not chosen:
            raise ValueError(f"no measurement of {asked.step} begins with {' or '.join(asked.only)}")
    except Exception as error:  # results of another step that it needs are missing, for example
        append(file, {"name": "table", **_failure(error)})
        return 1
    Recorder(run, file).record(chosen)
    faulthandler.cancel_dump_traceback_later()
    return int(any(map(is_failed, rows_of(file))))


class Recorder:
    """Appends a line to STEP.jsonl per measurement; STEP.now names the one that is being made."""

    def __init__(self, run: Run, file: Path) -> None:
        self._run, self._file, self._now = run, file, file.with_suffix(".now")

    def record(self, measurements: Iterable[Measurement]) -> None:
        """Makes the measurements that have no line yet, each set-up once; what fails leaves the others."""
        done = {row["name"] for row in rows_of(self._file)}
        left = [one for one in measurements if one.name not in done]
        for setup, group in groupby(left, key=lambda one: one.setup):
            several = list(group)
            if setup is None:
                self._group(several, nullcontext())
            elif self._has_time([one.name for one in several], SETUP_S):
                begun = self._tried(partial(setup, self._run), several)
                if begun is not None:
                    self._group(several, begun)
        self._now.unlink(missing_ok=True)

    def _group(self, group: list[Measurement], manager: AbstractContextManager[Any]) -> None:
        entered = self._tried(lambda: [manager.__enter__()], group)
        if entered is None:
            return
        try:
            for one in group:
                if self._has_time([one.name], one.limit_s):
                    begin = time.perf_counter()
                    row = self._tried(partial(one.measure, self._run, entered[0]), [one])
                    if row is not None:
                        seconds = round(time.perf_counter() - begin, 3)
                        append(self._file, {"name": ""} | {**row, "name": one.name, "row_s": seconds})
        finally:
            manager.__exit__(None, None, None)
        entered.clear()
        free(self._run.device)

    def _has_time(self, names: list[str], limit_s: float) -> bool:
        """Notes what is being made; returns False, with a line for each, if the step's time is over."""
        if self._run.left_s < 1.0:
            for name in names:
                append(self._file, {"name": name, "late": "the step's time was over"})
            return False
        beside = self._file.with_suffix(".tmp")
        beside.write_text(json.dumps({"names": names, "limit_s": limit_s, "began": time.time()}))
        beside.replace(self._now)
        return True

    def _tried(self, call: Callable[[], Any], group: list[Measurement]) -> Any:
        """Returns what a call returns, or None, with a line for each measurement, if it fails.

        Ends the process if every further CUDA call would fail.
        """
        try:
            return call()
        except UnavailableError as error:
            row: Row = {"unavailable": str(error)}
        except Exception as error:  # whatever it is, the other measurements are made
            row = _failure(error)
        for one in group:
            append(self._file, {"name": one.name, **row})
        try:
            free(self._run.device)
        except RuntimeError as error:
            print(f"the GPU is unusable for this process: {error}", file=sys.stderr, flush=True)
            os._exit(POISONED)
        return None


def append(file: Path, row: Mapping[str, Any]) -> None:
    """Appends a line of JSON; NaN and infinities, which JSON lacks, become strings."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(_plain(row)) + "\n")


def _failure(error: Exception) -> Row:
    text = str(error)
    short = text if len(text) <= 600 else f"{text[:300]} [...] {text[-280:]}"
    return {"error": f"{type(error).__name__}: {short}", "traceback": traceback.format_exc()[-2500:]}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | bool | None) else str(value)


def free(device: torch.device) -> None:
    """Frees unused memory of Python and the device. Raises RuntimeError if CUDA is unusable."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    # As a module of that name, so that measurements raise the UnavailableError which is caught here.
    sys.exit(importlib.import_module("experiments.gpu.measurement").main())
