"""What a part of the GPU run finds: rows, on disk after each, so that a hang or a crash loses one of them."""

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

POISONED = 70  # exit status: the GPU answers this process with errors only; a new process may go on
LEAST_S = 4.0  # with less time than this no row is begun

Row = dict[str, Any]


class UnavailableError(Exception):
    """Something that a row needs is not on this machine, or not in this version: said, and no failure."""


class Record:
    """The rows of one part, and its time.

    A row's `name` is its own. `error`: what it raised; `ok`: whether what it checks holds; `unavailable`:
    what was missing; `target`, `reached`, `met`: a number to reach; `said`: its line in the last table.
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
        self._before_s = 0.0  # of processes that ended before this one took over

    def resume(self) -> None:
        """Go on where a process that died left off: its rows stay, the one that killed it among them."""
        before = read(self.path)
        self.rows = before["rows"]
        self._before_s = before["seconds"]

    @property
    def left_s(self) -> float:
        """Seconds until the part must end."""
        return self.deadline - time.monotonic()

    @property
    def folder(self) -> Path:
        """Where the results of the whole run lie."""
        return self.path.parent

    def measure(
        self, name: str, call: Callable[[], Mapping[str, Any]], *, least_s: float = LEAST_S
    ) -> Row | None:
        """A row of what `call` returns, or of how it failed. None where a row failed or was not begun.

        A row that is there already (after `resume`) is returned as it is. Exits with POISONED where the GPU
        is lost to this process.
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
        except Exception as error:  # whatever it is, the other rows go on
            failure = error
            row["error"] = f"{type(error).__name__}: {_shortened(str(error))}"
            row["traceback"] = traceback.format_exc()[-3000:]
        row["row_s"] = round(time.perf_counter() - begin, 3)
        self.rows.append(row)
        if failure is not None:
            failure.__traceback__ = None  # its frames hold tensors
            self._check_the_gpu(row)
        self.save("running")
        return None if "error" in row or "unavailable" in row else row

    def add(self, row: Mapping[str, Any]) -> None:
        """A row that was measured elsewhere."""
        self.rows.append(dict(row))
        self.save("running")

    def save(self, status: str, *, now: str | None = None) -> None:
        """Write the file; `now`: the row being measured."""
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
        """Write the last word: passed where no row failed and there are rows. Returns whether it passed."""
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
            row["error"] += f" | the GPU is lost to this process: {_shortened(str(error))}"
            self.save("running")
            os._exit(POISONED)


def is_failed(row: Mapping[str, Any]) -> bool:
    """Whether a row raised, or what it checks does not hold. A number not reached is no failure."""
    return "error" in row or row.get("ok") is False


def read(path: Path) -> dict[str, Any]:
    """A part's file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write(path: Path, content: Mapping[str, Any]) -> None:
    """The file as a whole or not at all; numbers that JSON has none of become words."""
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
