"""Writes a calibration as a file of the config group `calibration`, with a comment on every figure."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from experiments.study.yaml_text import figure, quoted
from hwmodels.operators import Calibration
from sim.settings.build import moved_to

MAX_WIDTH = 120
CURVES = [f.name for f in fields(Calibration) if is_dataclass(getattr(Calibration(), f.name))]


def calibration_yaml(
    calibration: Calibration,
    curves: Sequence[str],
    description: str,
    undetermined: Mapping[str, tuple[float, float]],
) -> str:
    """Returns the text of the file.

    curves: the fitted curves; the others are left to their defaults. undetermined: ranges of values that fit
    equally well, by curve.name.
    """
    lines = [
        f"# {description}",
        "# Written by `windtunnel calibrate`; values without a remark were fitted to measurements.",
        f"_target_: {path_of(Calibration)}",
        f"measured_on: {quoted(str(calibration.measured_on))}",
        *textwrap.wrap(f"source: {quoted(calibration.source)}", MAX_WIDTH, subsequent_indent="  "),
    ]
    meanings = field_meanings(Calibration)
    if calibration.sm_clock_hz is not None:
        lines.append(
            commented(f"sm_clock_hz: {figure(calibration.sm_clock_hz)}", meanings["sm_clock_hz"], "")
        )
    for share in ("sustained_clock_share", "start_share", "peer_wait_s"):
        given = f"{share}: {figure(getattr(calibration, share))}"
        lines.append(commented(given, meanings[share], "; a setting, not fitted"))
    for curve in curves:
        ranges = {
            name.removeprefix(f"{curve}."): values
            for name, values in undetermined.items()
            if name.startswith(f"{curve}.")
        }
        lines += [f"{curve}:", *curve_lines(getattr(calibration, curve), ranges)]
    default = [name for name in CURVES if name not in curves]
    lines.append(f"# Not measured, so defaults are used: {', '.join(default)}")
    return "\n".join(lines) + "\n"


def is_calibration(file: Path) -> bool:
    """Returns whether the file is a choice of the group `calibration`, so that it may be overwritten."""
    found = re.search(r"^_target_: (\S+)$", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return found is not None and path_of(Calibration) in (found[1], moved_to(found[1]))


def curve_lines(curve: Any, undetermined: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Yields the YAML lines of a curve: its class, and each figure with its meaning as a comment."""
    yield f"  _target_: {path_of(type(curve))}"
    meanings, default = field_meanings(type(curve)), type(curve)()
    for field in fields(curve):
        value = getattr(curve, field.name)
        is_default = isinstance(value, float) and value == getattr(default, field.name)
        remark = "; default, as no measurement determines it" if is_default else ""
        if field.name in undetermined:
            low, high = undetermined[field.name]
            remark = f"; not determined: {figure(low)} to {figure(high)} fit equally well"
        shown = figure(value) if isinstance(value, float) else str(value)
        yield commented(f"  {field.name}: {shown}", meanings[field.name], remark)


def commented(setting: str, meaning: str, remark: str) -> str:
    """Returns the setting with its meaning as a comment, which `--help` shows, shortened if long."""
    clauses = meaning.split("; ")
    while len(clauses) > 1 and len(f"{setting}  # {'; '.join(clauses)}{remark}") > MAX_WIDTH:
        clauses.pop()
    return f"{setting}  # {'; '.join(clauses)}{remark}"


def field_meanings(settings: type) -> dict[str, str]:
    """Returns the first sentence of the docstring below each field of a dataclass."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(definition, ast.ClassDef)
    meanings = {field.name: "" for field in fields(settings)}
    for entry, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            text = (
                below.value.value
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                else ""
            )
            meanings[entry.target.id] = " ".join(str(text).split()).split(". ")[0].rstrip(".")
    return meanings


def path_of(target: type) -> str:
    """Returns the dotted path of a class, for `_target_`."""
    return f"{target.__module__}.{target.__qualname__}"
