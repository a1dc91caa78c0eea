"""Records the rows of one part, saved after each row, so a hang or a crash loses at most one."""

from __future__ import annotations

import gc
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

POISONED = 70  # exit status: every CUDA call of this process fails; a new process may continue
LEAST_S = 4.0  # seconds; with less time left no row is begun

Row = dict[str, Any]


class UnavailableError(Exception):
    """A row needs something that this machine or version lacks; the row says so and does not fail."""


class Record:
    """The rows of one part and its time limit.

    Keys of a row: `name`, unique in the part; `error`, the exception raised; `ok`, whether the check holds;
    `unavailable`, what was missing; `target`, `reached` and `met`, a value to reach; `said`, its line in the
    final table.
    """

    def __init__(
        self, path: Path, name: str, device: torch.device, *, quick: bool, limit_s: float, seed: int
    ) -> None:
        self.path = path
        self.device = device
        self.quick = quick
        self.seed = seed
        self.deadline = time.monotonic() + limit_s
        self.rows: list[Row] = []
        self.not_measured: list[str] = []
        self.name = name
        self._begin = time.time()
        self._before_s = 0.0  # seconds of earlier processes of this part

    def resume(self) -> None:
        """Continues after a process that died: its rows stay, including the one that killed it."""
        before = read(self.path)
        self.rows = before["rows"]
        self._before_s = before["seconds"]

    @property
    def left_s(self) -> float:
        """Seconds until the part must end."""
        return self.deadline - time.monotonic()

    @property
    def folder(self) -> Path:
        """Folder that holds the results of the whole run."""
        return self.path.parent

    def measure(
        self, name: str, call: Callable[[], Mapping[str, Any]], *, least_s: float = LEAST_S
    ) -> Row | None:
        """Adds a row with the result of `call`, or with its error.

        Returns None if the row failed or was not begun for lack of time. After `resume`, a row that exists is
        returned as it is. Exits with POISONED if the GPU is unusable for this process.
        """
        for row in self.rows:
            if row["name"] == name:
                return None if "error" in row else row
        if self.left_s < least_s:
            self.not_measured.append(name)
            self.save("running")
            return None
        self.save("running", now=name)
        begin = time.perf_counter()
        row = {"name": name}
        failure: BaseException | None = None
        try:
            row |= call()
        except UnavailableError as error:
            row["unavailable"] = str(error)
        except Exception as error:  # whatever it is, the other rows are measured
            failure = error
            row["error"] = f"{type(error).__name__}: {_shortened(str(error))}"
            row["traceback"] = traceback.format_exc()[-3000:]
        row["row_s"] = round(time.perf_counter() - begin, 3)
        self.rows.append(row)
        if failure is not None:
            failure.__traceback__ = None  # its frames keep tensors alive
            self._check_the_gpu(row)
        self.save("running")
        return None if "error" in row or "unavailable" in row else row

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row that was measured elsewhere."""
        self.rows.append(dict(row))
        self.save("running")

    def save(self, status: str, *, now: str | None = None) -> None:
        """Writes the file; `now` names the row that is being measured."""
        write(
            self.path,
            {
                "part": self.name,
                "status": status,
                "device": self.device.type,
                "quick": self.quick,
                "seed": self.seed,
                "began": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self._begin)),
                "seconds": round(self._before_s + time.time() - self._begin, 1),
                "now": now,
                "not_measured": self.not_measured,
                "rows": self.rows,
            },
        )

    def finish(self) -> bool:
        """Writes the final status: passed if there are rows and none failed. Returns whether it passed."""
        passed = bool(self.rows) and not any(is_failed(row) for row in self.rows)
        self.save("passed" if passed else "failed")
        return passed

    def _check_the_gpu(self, row: Row) -> None:
        if self.device.type != "cuda":
            return
        gc.collect()
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            row["error"] += f" | the GPU is unusable for this process: {_shortened(str(error))}"
            self.save("running")
            os._exit(POISONED)


def is_failed(row: Mapping[str, Any]) -> bool:
    """Returns whether a row raised or its check does not hold. A target that is not met is no failure."""
    return "error" in row or row.get("ok") is False


def read(path: Path) -> dict[str, Any]:
    """Reads a part's file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes the file atomically; NaN and infinities, which JSON lacks, become strings."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(_plain(content), indent=1) + "\n")
    os.replace(beside, path)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | bool | None) else str(value)


def _shortened(text: str) -> str:
    return text if len(text) <= 600 else f"{text[:300]} [...] {text[-280:]}"
