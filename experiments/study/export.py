"""Exports figures as PNG and SVG with kaleido and Chromium: the extra `png`."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from sim.report.files import write_whole
from sim.settings.errors import ConfigError

WIDTH_PX = 1100


def export(figures: Mapping[str, go.Figure], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Exports every figure in every format under its name; the browser is started once.

    Raises ConfigError if kaleido or Chromium is missing, and OSError if the folder cannot be written.
    """
    if not formats:
        return []
    kaleido = _kaleido()
    _check_browser(formats)
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    kaleido.start_sync_server(silence_warnings=True)
    try:
        for name, figure in figures.items():
            for kind in formats:
                file = folder / f"{re.sub('[^A-Za-z0-9.]+', '_', name)}.{kind}"
                size = {"width": WIDTH_PX, "height": figure.layout.height or 400}
                opaque = go.Figure(figure).update_layout(paper_bgcolor="white", plot_bgcolor="white")
                write_whole(file, kaleido.calc_fig_sync(opaque, opts={"format": kind, **size}))
                written.append(file)
    finally:
        kaleido.stop_sync_server(silence_warnings=True)
    return written


def _check_browser(formats: Sequence[str]) -> None:
    """Raises ConfigError if no browser is found, for which kaleido's server would wait forever."""
    path = importlib.import_module("choreographer.browsers.chromium").Chromium.find_browser(skip_local=False)
    if path is None or shutil.which(path) is None:
        named = f" at {path}" if path else ""
        raise ConfigError(
            f"report.format={','.join(formats)}: no Chromium or Chrome was found{named}; install one, or "
            "set BROWSER_PATH to its path"
        )


def _kaleido() -> Any:
    try:
        return importlib.import_module("kaleido")
    except ImportError as error:
        raise ConfigError(
            "report.format: images need kaleido: pip install 'windtunnel[png]', and a Chromium on the PATH"
        ) from error
