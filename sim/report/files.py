"""Writes files atomically: tables as Parquet, summaries as JSON, configs as YAML.

A file gets its name only when it is complete, even if the process is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:  # commands that write no tables load no numpy
    from sim.records.table import AnyTable


def write_whole(file: Path, content: bytes | str) -> None:
    """Writes a file; readers see either the old or the complete new content. Text is written as UTF-8."""
    with written_whole(file) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder to write to; at the end it is renamed to the file.

    If writing fails, the temporary file is removed and an existing file is kept. Raises OSError with the name
    of the file.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, file)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        named = error.filename if error.filename not in (None, str(part)) else str(file)
        raise OSError(error.errno, error.strerror or str(error), named) from error
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def summary_json(summary: Mapping[str, Any]) -> str:
    """Returns the text of summary.json."""
    return f"{json.dumps(summary, indent=2)}\n"


def remove_folder_of_table(path: Path) -> None:
    """Removes a table that is a folder of files: see `sim.report.chunk_tables`.

    Raises OSError if other files are in it.
    """
    if path.is_dir():
        for file in path.glob("part-*.parquet"):
            file.unlink()
        path.rmdir()


def table_bytes(table: AnyTable) -> bytes:
    """Returns the table in the parquet format."""
    from sim.records.table import Table, to_pandas  # noqa: PLC0415 (numpy takes a tenth of a second)

    if isinstance(table, Table):
        from sim.records.parquet import parquet_bytes  # noqa: PLC0415 (so does pyarrow)

        return parquet_bytes(table, "zstd")
    content = BytesIO()
    to_pandas(table).to_parquet(content, index=False, compression="zstd")
    return content.getvalue()


def write_table(table: AnyTable, file: Path) -> None:
    """Writes the table to a parquet file."""
    write_whole(file, table_bytes(table))


def config_digest(config: Mapping[str, Any]) -> str:
    """Returns the digest of a resolved configuration, which does not depend on the order of its keys."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def config_yaml(config: Mapping[str, Any]) -> str:
    """Returns the config as YAML that OmegaConf reads, ten times faster than OmegaConf's own dump.

    The runs of a sweep share most of their settings, so the text of each root key is cached.
    """
    return "".join(_text_of(_Entry(repr(item), item)) for item in config.items()) or "{}\n"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A root key and its value, compared by their representation."""

    written: str
    item: tuple[str, Any] = field(compare=False)


@lru_cache(maxsize=1024)
def _text_of(entry: _Entry) -> str:
    return yaml_text(dict([entry.item]))


def yaml_text(value: Any) -> str:
    """Returns a plain value (dictionaries, lists, texts, numbers) as YAML, in the format of `config_yaml`."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Dumper that quotes text which OmegaConf would read as a number (1e6, which is text in YAML 1.1)."""

    def ignore_aliases(self, data: Any) -> bool:
        """Returns True, so a list in two places is written twice instead of as an alias."""
        return True


def _text_node(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if _is_number(text) else None)


def _is_number(text: str) -> bool:
    try:
        float(text.replace("_", ""))
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _text_node)
