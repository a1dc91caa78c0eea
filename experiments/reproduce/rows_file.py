"""Reads rows of the gallery from the YAML files of `claims/`, one file per family.

The fields of a row are those of `rows.Row`, except:

    published    the figure, or its least and largest value
    source       key of `sources.yaml`
    ours         how our figure is obtained, one of
                 {function: NAME, arguments: [...]}   a function of the family's module, in milliseconds
                 {search: NAME, arguments: [...]}     the same in a worker; its result is kept
                 {sample: NAME, arguments: [...]}     the same, once for each seed, which is the last argument
                 {experiment: ..., metric: ..., arm: ..., ...}   the fields of `rows.Compared`
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.app.settings.bounded_yaml import parse_yaml
from experiments.reproduce.rows import Compared, Direct, Family, Kind, Ours, Row, Sampled, Searched, Source

FOLDER = Path(__file__).parent / "claims"
CALLS: Mapping[str, type[Direct | Searched | Sampled]] = {
    "function": Direct,
    "search": Searched,
    "sample": Sampled,
}


def read_family(name: str, functions: ModuleType | None) -> Family:
    """Returns the family of a file. functions: the module with those that its rows name."""
    found = _read(f"{name}.yaml")
    rows = tuple(_row(row, fields, functions) for row, fields in found["rows"].items())
    return Family(name=name, title=found["title"], rows=rows)


@cache
def _sources() -> dict[str, Source]:
    return {key: Source(**fields) for key, fields in _read("sources.yaml").items()}


def _read(file: str) -> Any:
    return parse_yaml((FOLDER / file).read_text(encoding="utf-8"), file)


def _row(name: str, fields: dict[str, Any], functions: ModuleType | None) -> Row:
    published, band = fields.pop("published"), fields.pop("band", None)
    low, high = published if isinstance(published, list) else (published, published)
    return Row(
        name=name,
        kind=Kind(fields.pop("kind")),
        published=(low, high),
        source=_sources()[fields.pop("source")],
        ours=_ours(fields.pop("ours"), functions),
        band=None if band is None else (band[0], band[1]),
        **fields,
    )


def _ours(fields: dict[str, Any], functions: ModuleType | None) -> Ours:
    for key, kind in CALLS.items():
        if key in fields:
            return kind(function=partial(getattr(functions, fields[key]), *fields.get("arguments", ())))
    return Compared(**fields)
