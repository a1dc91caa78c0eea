"""The file of predictions: rows are appended as they come, so that an interruption loses none.

While rows are missing, a file NAME.unfinished.json beside it holds the settings; `resume=true` continues only
with equal settings. At the end the file is replaced as a whole, in the order of the table, and the settings
are removed. A kill at any time leaves complete rows: a last line without its end is left out.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pandas as pd

from hwmodels.checks import read_text
from sim.report.files import write_whole
from sim.settings.errors import ConfigError
from sim.settings.recorded import read_json_object


@dataclass(kw_only=True, slots=True)
class PredictionFile:
    """The file of predictions that a command appends to, row by row."""

    path: Path
    columns: Sequence[str]
    """id, the metrics, status."""
    settings: dict[str, str]
    """Everything that the predictions depend on, by name, for `resume`."""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Rows so far, by their id as a text."""
    _stream: IO[bytes] | None = None

    @property
    def settings_path(self) -> Path:
        """Path of the settings of an unfinished file."""
        return self.path.with_name(f"{self.path.name}.unfinished.json")

    def resume(self) -> None:
        """Reads the rows of an interrupted file, if there is one; nothing if there is no file at all.

        Raises ConfigError for a finished file, a damaged one, and one of other settings.
        """
        where = f"resume=true, out={self.path}"
        if not self.settings_path.exists():
            if self.path.exists():
                raise ConfigError(
                    f"{where}: was not interrupted (there is no {self.settings_path.name} beside it); "
                    "choose another out=, or resume=false to predict all rows again"
                )
            return
        before = read_json_object(self.settings_path, where)
        for name, value in self.settings.items():
            if before.get(name) != value:
                raise ConfigError(
                    f"{where}: {name} is now {value}, was {before.get(name)} when the file was begun; set it "
                    "as before, or resume=false to predict all rows again"
                )
        self._read(where)

    def begin(self) -> None:
        """Starts the file, or opens it to continue; predictions go on if it cannot be written."""
        with suppress(OSError):  # `finish` tries once more, and reports it
            if not self.rows:
                self.settings_path.unlink(missing_ok=True)
            write_whole(self.path, self._text(self.rows.values()))
            write_whole(self.settings_path, f"{json.dumps(self.settings, indent=1)}\n")
            self._stream = self.path.open("ab", buffering=0)

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row. If the disk is full, the file ends with the row before."""
        self.rows[str(row["id"])] = row
        if self._stream is None:
            return
        line = self._text([row]).partition("\n")[2].encode()
        begun = os.fstat(self._stream.fileno()).st_size
        try:
            if self._stream.write(line) != len(line):
                raise OSError
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._stream.fileno(), begun)
            self.close()

    def finish(self, ids: Sequence[Any]) -> None:
        """Writes the rows in this order, and removes the settings. Raises OSError."""
        self.close()
        write_whole(self.path, self._text(self.rows[str(row_id)] for row_id in ids))
        self.settings_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file; further rows cannot be appended."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def table(self, ids: Sequence[Any]) -> pd.DataFrame:
        """Returns the rows so far, in the order of these ids."""
        rows = [{**self.rows[str(row_id)], "id": row_id} for row_id in ids if str(row_id) in self.rows]
        return pd.DataFrame(rows).reindex(columns=list(self.columns))

    def _text(self, rows: Any) -> str:
        return str(pd.DataFrame(list(rows)).reindex(columns=list(self.columns)).to_csv(index=False))

    def _read(self, where: str) -> None:
        try:
            text = read_text(self.path)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: cannot be read: {error}") from error
        lines = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
        if lines and lines[0] != list(self.columns):
            raise ConfigError(
                f"{where}: line 1 must be {','.join(self.columns)}; the file was changed, choose another out="
            )
        for number, cells in enumerate(lines[1:], 2):
            try:
                row = dict(zip(self.columns, cells, strict=True))
                figures = {name: float(row[name]) for name in self.columns[1:-1] if row[name]}
            except ValueError as error:
                raise ConfigError(f"{where}: line {number}: is damaged: {error}") from None
            self.rows[row["id"]] = {"id": row["id"], **figures, "status": row["status"]}
