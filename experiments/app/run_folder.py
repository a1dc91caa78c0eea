"""Files that every command writes into the folder of its run, and the folder's path as it is printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

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
