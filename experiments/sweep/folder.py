"""The folder of a sweep: its settings (sweep.json), one folder per run, and one row per run (runs.parquet).

A run is done once its summary.json exists, which is written last. Every file is replaced atomically, so a
kill at any time leaves readable files. runs.parquet lags behind the folders by seconds; `resume` reads the
missing rows from them: the figures from summary.json, the version of the code and the duration from run.json.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pandas as pd

from experiments.app.job import CannotWriteError
from experiments.app.run_folder import lock_folder
from experiments.study.figures import figures
from experiments.sweep.plan import Plan, Point
from experiments.sweep.run_task import FinishedRun
from hwmodels.levels.table_files import read_parquet
from sim.report.files import table_bytes, write_whole
from sim.settings.build import shown
from sim.settings.errors import ConfigError
from sim.settings.recorded import read_json_object

SWEEP, RUNS, SUMMARY, ERROR = "sweep.json", "runs.parquet", "summary.json", "error.txt"
OWN = "run.json"
"""File of a run with what its summary.json does not say."""
KIND = "windtunnel sweep"
DONE, FAILED, REFUSED = "done", "failed", "refused"
OWN_COLUMNS = ("run", "status", "error", "wall_s", "code")
"""Columns of runs.parquet besides one per axis and one per figure."""
MIN_SECONDS_BETWEEN = 2.0
MAX_WRITING_SHARE = 0.05
"""Largest share of the time that is spent on writing runs.parquet during a sweep."""


@dataclass(kw_only=True, slots=True)
class SweepFolder:
    """A sweep on disk. about: content of sweep.json; rows: rows of the finished runs by index."""

    path: Path
    about: dict[str, Any]
    plan: Plan
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    _lock: IO[str] | None = None
    _written_at: float = 0.0
    _write_took_s: float = 0.0

    @classmethod
    def create(cls, path: Path, plan: Plan, about: dict[str, Any]) -> SweepFolder:
        """Creates the folder. Raises ConfigError if it contains a sweep already or cannot be written."""
        if (path / SWEEP).exists():
            raise ConfigError(
                f"{path}: contains a sweep; continue it with resume={path}, or choose another folder"
            )
        folder = cls(path=path, plan=plan, about={"kind": KIND, **about, **plan.to_json()})
        folder.take()
        folder.write_about()
        return folder

    def take(self) -> None:
        """Locks the folder for this process, which writes into it. Raises ConfigError if another one does."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.path)
        except OSError as error:
            raise self._cannot_write(error) from error

    def release(self) -> None:
        """Ends the lock of the folder, if this process has it."""
        if self._lock is not None:
            with suppress(OSError):  # the results are safe, and the lock ends with the process at the latest
                self._lock.close()
            self._lock = None

    @classmethod
    def open(cls, path: Path, named: str) -> SweepFolder:
        """Opens an existing sweep with the rows of all finished runs. named: the setting, for messages.

        Raises ConfigError for a folder that is not a sweep's.
        """
        if not path.is_dir():
            raise ConfigError(
                f"{named}={path}: no such folder; give the folder that windtunnel sweep printed"
            )
        try:
            if not (path / SWEEP).exists():
                raise ConfigError(
                    f"{named}={path}: is not a sweep folder: it has no {SWEEP}; {_others(path)}"
                )
            about = read_json_object(path / SWEEP, f"{named}={path}")
            if about.get("kind") != KIND:
                raise ConfigError(f"{path / SWEEP}: was not written by windtunnel sweep")
            folder = cls(path=path, plan=Plan.from_json(about), about=about)
            texts = [*about.get("overrides", ()), *about.get("config_dirs", ()), about.get("cwd", "")]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("a text is expected")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{named}={path}: {SWEEP} is damaged: {error}") from error
        folder._read_rows()
        return folder

    def missing(self) -> list[Point]:
        """Returns the points whose run is not done: not begun, interrupted, failed or refused."""
        return [point for point in self.plan.points() if self._status(point.index) != DONE]

    def keep(self, point: Point, finished: FinishedRun, code: str) -> None:
        """Writes the files and the row of a run.

        Raises CannotWriteError, after which no files of it are left.
        """
        folder = self.run_dir(point.index)
        try:
            folder.mkdir(exist_ok=True)
            own = {"code": code, "wall_s": finished.wall_s}
            write_whole(folder / OWN, json.dumps(own).encode())
            for name, content in finished.files.items():
                write_whole(folder / name, content)
            (folder / ERROR).unlink(missing_ok=True)  # of an earlier attempt
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise self._cannot_write(error) from error
        row = self._row(point, DONE, "", finished.wall_s, code)
        self.rows[point.index] = {**row, **finished.figures}

    def note_failure(self, point: Point, status: str, message: str, traceback: str, code: str) -> None:
        """Stores the row of a failed or refused run; a traceback goes into error.txt of its folder."""
        self.rows[point.index] = self._row(point, status, message, math.nan, code)
        if traceback:
            folder = self.run_dir(point.index)
            try:
                folder.mkdir(exist_ok=True)
                write_whole(folder / ERROR, traceback.encode())
            except OSError as error:
                raise self._cannot_write(error) from error

    def resume_command(self, path: Path | str) -> str:
        """Returns the command that continues the sweep; path: as it is shown to the user."""
        trust = " --trust" if self.about["config_dirs"] else ""  # its runs may need classes of the user
        return f"windtunnel sweep resume={path}{trust}"

    def run_dir(self, index: int) -> Path:
        return self.path / str(index)

    def table(self) -> pd.DataFrame:
        """Returns one row per finished run, in the order of the points."""
        if not self.rows:
            return pd.DataFrame(columns=["run", *(axis.key for axis in self.plan.axes), *OWN_COLUMNS[1:]])
        in_words = [
            axis.key
            for axis in self.plan.axes
            if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in axis.values)
        ]
        # Converted before pandas, which would turn null into NaN, and 2000 beside it into 2000.0.
        rows = [row | {key: shown(row[key]) for key in in_words} for _, row in sorted(self.rows.items())]
        return pd.DataFrame(rows)

    def write_runs(self, *, now: bool = True) -> None:
        """Writes runs.parquet; if not `now`, only if the last time was seconds ago."""
        begun = time.monotonic()
        pause_s = max(MIN_SECONDS_BETWEEN, self._write_took_s / MAX_WRITING_SHARE)
        if not now and begun - self._written_at < pause_s:
            return
        try:
            write_whole(self.path / RUNS, table_bytes(self.table()))
        except OSError as error:
            raise self._cannot_write(error) from error
        self._written_at = time.monotonic()
        self._write_took_s = self._written_at - begun

    def write_about(self) -> None:
        try:
            write_whole(self.path / SWEEP, f"{json.dumps(self.about, indent=1)}\n".encode())
        except OSError as error:
            raise self._cannot_write(error) from error

    def num_of(self, status: str) -> int:
        return sum(row["status"] == status for row in self.rows.values())

    def _status(self, index: int) -> str | None:
        return str(self.rows[index]["status"]) if index in self.rows else None

    def _row(self, point: Point, status: str, message: str, wall_s: float, code: str) -> dict[str, Any]:
        values = _values_at(self.plan, point.index)
        own = dict(zip(OWN_COLUMNS[1:], (status, message, wall_s, code), strict=True))
        return {"run": point.index, **values, **own}

    def _read_rows(self) -> None:
        """Reads rows from runs.parquet, and from the folders of runs that it lacks."""
        try:
            table = read_parquet(self.path / RUNS)
        except (OSError, ValueError):  # not written yet, or unreadable: the folders hold all runs
            table = pd.DataFrame()
        known: dict[int, dict[str, Any]] = {}
        for found in table.to_dict("records"):
            known[int(found["run"])] = {str(key): value for key, value in found.items()}
        for point in self.plan.points():
            row = known.get(point.index)
            file = self.run_dir(point.index) / SUMMARY
            if row is not None and (row["status"] != DONE or file.exists()):
                self.rows[point.index] = row | _values_at(self.plan, point.index)
            elif file.exists():
                with suppress(ConfigError):  # a damaged result is made again
                    of_run = figures(read_json_object(file))
                    wall_s, code = self._own(point.index)
                    self.rows[point.index] = self._row(point, DONE, "", wall_s, code) | of_run

    def _own(self, index: int) -> tuple[float, str]:
        """Returns the duration of a run and the version of its code; NaN and "" if they are not known."""
        versions = self.about.get("code")
        only = str(versions[0]) if isinstance(versions, list) and len(versions) == 1 else ""
        try:
            found = read_json_object(self.run_dir(index) / OWN)
            return float(found["wall_s"]), str(found["code"])
        except (ConfigError, KeyError, TypeError, ValueError):  # of an earlier version, or damaged
            return math.nan, only

    def _cannot_write(self, error: OSError) -> CannotWriteError:
        if error.errno == errno.ENOENT and not (self.path / SWEEP).exists():
            return CannotWriteError(
                f"{self.path}: was removed during the sweep, with all its runs; nothing is left to resume; "
                "begin the sweep again"
            )
        done = self.num_of(DONE)
        return CannotWriteError(
            f"{error.filename or self.path}: {error.strerror}; {done:,} of {self.plan.num_points:,} runs are "
            f"done and kept; free some space, then run {self.resume_command(self.path)}"
        )


def _values_at(plan: Plan, index: int) -> dict[str, Any]:
    """Returns the value of each axis at a point."""
    found: dict[str, Any] = {}
    for axis in reversed(plan.axes):
        index, place = divmod(index, len(axis.values))
        found[axis.key] = axis.values[place]
    return dict(reversed(found.items()))


def _others(path: Path) -> str:
    inner = sorted(found.parent for found in path.glob(f"*/{SWEEP}"))
    if inner:
        return f"it contains the sweep {inner[0]}"
    if (path / SUMMARY).exists():
        return "it is the folder of a single run"
    return "give the folder that windtunnel sweep printed"
