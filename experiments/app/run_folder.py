"""The folder of a run: it is claimed, gets the files that every command writes, and its path is printed.

The path of an output file is checked before a command runs; there is a message if a file cannot be written.

A folder is claimed so that two runs never write into the same one. A folder whose name comes from the clock
is made anew; where another run of the same second has it, `-2`, `-3` and so on are appended. A folder that
the user names must be new or empty, unless `overwrite=true` is given: then what an earlier run has left in it
is removed first. A run in shards may also take a folder with shards of a run that has not ended, which it
continues if it is the same.

A folder that one process works on is locked; the lock ends with the process, whatever ends that.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, read_write

from experiments.app.job import CannotWriteError
from sim.report.files import remove_folder_of_table, write_whole
from sim.settings.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


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


OVERWRITE = "overwrite"
UNFINISHED = Path("shards", "shards.json")
"""What a run in shards leaves in its folder until its result is written."""
STUDIES = ("report", "sweep", "goodput", "capacity", "compare", "whatif", "validation", "suite", "placement")
TABLES = (
    *("requests", "iterations", "replicas", "events", "gaps", "itl", "bursts", "series"),
    *("runs", "candidates", "chunks"),
)
RESULTS = (
    *(
        "config.yaml",
        "multirun.yaml",
        "run.json",
        "summary.json",
        "records.json",
        "timeline.json",
        "vllm_bench.json",
    ),
    *("recording.json", "events.jsonl", "steps.parquet", "tokens.parquet"),
    *("requests.csv.gz", "error.txt", "plots.bin"),
    *("simulated_*.parquet", "measured_*.parquet", ".*.part"),
    *(f"{name}.{kind}" for name in STUDIES for kind in ("json", "html")),
    *(f"{name}.parquet" for name in TABLES),
    *("shards/*.zip", "shards/*.arrow", "shards/.*.part", "shards/shards.json"),
)
"""Files that commands write into the folder of a run; others in it are left alone."""


def overwrite_of(overrides: Sequence[str]) -> tuple[bool, list[str]]:
    """Splits `overwrite=true` from the overrides, as it is about the folder and not about the run."""
    given = [override for override in overrides if override.startswith(f"{OVERWRITE}=")]
    for override in given:
        if override not in (f"{OVERWRITE}=true", f"{OVERWRITE}=false"):
            raise ConfigError(f"{override}: must be true or false")
    rest = [override for override in overrides if override not in given]
    return bool(given) and given[-1] == f"{OVERWRITE}=true", rest


def claim(cfg: DictConfig, key: str, *, overwrite: bool, continues: bool = False) -> Path:
    """Makes the folder that a key of `hydra` names (`run.dir`, `sweep.dir`), and returns it.

    continues: whether the command continues a run in shards. The config then names the folder that was made.
    Raises ConfigError for a folder with results of another run, and OSError if the folder cannot be made.
    """
    section, name = key.split(".")
    node = cfg.hydra[section]
    folder = Path(str(node[name]))
    written: Any = OmegaConf.to_container(node, resolve=False)
    given = any(override.startswith(f"hydra.{key}=") for override in cfg.hydra.overrides.hydra)
    if written[name] == "." and not given:  # a command that has no folder of results
        return folder
    if "${now:" not in str(written[name]):
        _take(folder, f"hydra.{key}", overwrite=overwrite, continues=continues)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        own = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            own.mkdir()
        except FileExistsError:
            continue
        set_folder(cfg, key, own)
        return own
    raise AssertionError("unreachable")


def set_folder(cfg: DictConfig, key: str, folder: Path) -> None:
    """Writes the folder into the config, whose node `hydra` is read-only."""
    section, name = key.split(".")
    node = cfg.hydra[section]
    with read_write(node):
        node[name] = str(folder)


def _take(folder: Path, key: str, *, overwrite: bool, continues: bool) -> None:
    """Makes a folder that the user has named, or clears what an earlier run has left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "sweep.json").exists():
        raise ConfigError(
            f"{folder}: contains a sweep; continue it with resume={folder}, or choose another folder"
        )
    if all(file.name == LOCK for file in folder.iterdir()):
        return
    if not overwrite and (folder / UNFINISHED).exists():
        if continues:
            return
        raise ConfigError(
            f"{key}={folder}: holds shards of a run that has not ended, which only the same command "
            "continues; choose another folder, or add overwrite=true to remove them"
        )
    if not overwrite:
        raise ConfigError(f"{key}={folder}: is not empty; choose another folder, or add overwrite=true")
    if (folder / "sweep.json").exists():
        raise ConfigError(
            f"{key}={folder}: contains a sweep, which is not overwritten; choose another folder"
        )
    points = (inner for inner in folder.iterdir() if inner.is_dir() and inner.name.isdigit())
    for place in (folder, *points):
        for pattern in RESULTS:
            for file in place.glob(pattern):
                _remove(file)


def _remove(result: Path) -> None:
    """Removes a file, or a table that is a folder of files. Raises OSError if other files are in it."""
    if not result.is_dir():
        result.unlink()
        return
    remove_folder_of_table(result)


LOCK = ".lock"


def lock_folder(folder: Path) -> IO[str]:
    """Returns an open file that holds the lock until it is closed.

    Raises ConfigError, which names the holder, while another process has it, and OSError if the folder cannot
    be written. A file system without locks gives none.
    """
    file = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ConfigError(f"{folder}: {holder} works on it; wait until it ends, or end it") from None
    except OSError:
        return file
    file.truncate(0)
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    file.write(f"process {os.getpid()} on {platform.node()} since {since}\n")
    file.flush()
    return file
