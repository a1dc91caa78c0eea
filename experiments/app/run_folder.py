"""Files that every command writes into the folder of its run, and the folder's path as it is printed.

The path of an output file is checked before a command runs; there is a message if a file cannot be written.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from experiments.app.job import CannotWriteError
from sim.report.whole_file import write_whole

SERVER_KEYS = ("backend", "device", "host", "port", "time_scale", "serve")
"""Root keys of `windtunnel serve` beside those of the scenario."""


def write_study(folder: Path, config: dict[str, Any], summary: dict[str, Any]) -> None:
    """Writes config.yaml and summary.json, which the folder of every study has."""
    write_config(folder, config)
    text = json.dumps(summary, indent=2, ensure_ascii=False)
    write_whole(folder / "summary.json", f"{text}\n")


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Writes the resolved config to config.yaml."""
    write_whole(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))


def scenario_part(config: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns a config without the root keys of a server, which no scenario has."""
    return {key: value for key, value in config.items() if key not in SERVER_KEYS}


def print_folder(folder: Path, console: Console) -> None:
    """Prints the path of a file or folder that was written, relative to the current folder."""
    print_path(seen_from_here(folder), console)


def print_path(path: str, console: Console) -> None:
    """Prints a path unchanged."""
    console.print(path, style="dim", soft_wrap=True, highlight=False)


def seen_from_here(path: Path) -> str:
    """Returns the path, relative to the current folder if it is below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if TYPE_CHECKING:
    from rich.console import Console

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_output_file(name: str, path: str) -> None:
    """Raises ValueError if the path is a folder, or if the folder of the file does not exist."""
    if Path(path).is_dir():
        raise ValueError(f"{name}={path}: is a folder; name a file in it")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{name}={path}: there is no folder {Path(path).resolve().parent}; create it first")


def check_distinct_files(**paths: str | None) -> None:
    """Raises ValueError if two of these settings name the same file, which one would overwrite."""
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        first = seen.setdefault(Path(path).resolve(), name)
        if first != name:
            raise ValueError(f"{name}={path}: is the file of {first}, which it would overwrite; name another")


@contextmanager
def file_errors_reported(place: Path, cure: str = "choose another hydra.run.dir") -> Iterator[None]:
    """Raises CannotWriteError in place of an OSError about a file or folder, what is in it, or what holds it.

    An OSError about any other file comes from a policy or from a bug, and keeps its traceback. cure: what the
    user can do apart from making room on a full disk.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or not _is_above_or_below(
            Path(error.filename).absolute(), place.absolute()
        ):
            raise
        advice = f"make room or {cure}" if error.errno in FULL else cure
        raise CannotWriteError(f"{error.filename}: {error.strerror}; {advice}") from error


def _is_above_or_below(path: Path, other: Path) -> bool:
    return path.is_relative_to(other) or other.is_relative_to(path)
