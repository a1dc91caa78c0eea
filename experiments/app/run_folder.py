"""What every command does with the folder of its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console


def write_study(folder: Path, config: dict[str, Any], summary: dict[str, Any]) -> None:
    """Write config.yaml and summary.json, which the folder of every study has."""
    write_config(folder, config)
    text = json.dumps(summary, indent=2, ensure_ascii=False)
    (folder / "summary.json").write_text(f"{text}\n", encoding="utf-8")


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write the resolved config to config.yaml."""
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")


def resolved_config(cfg: DictConfig) -> dict[str, Any]:
    """The config as it is written to config.yaml: plain, all interpolations replaced by their values."""
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    return config


def print_folder(folder: Path, console: Console) -> None:
    """Print the path of a file or folder that was written, relative to the current folder."""
    print_path(seen_from_here(folder), console)


def print_path(path: str, console: Console) -> None:
    """Print a path as the user named it."""
    console.print(path, style="dim", soft_wrap=True, highlight=False)


def seen_from_here(path: Path) -> str:
    """The path, relative to the current folder where it lies below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
