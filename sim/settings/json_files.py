"""JSON files that are data, such as the summary of a run: damage is reported in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sim.settings.errors import ConfigError

MAX_BYTES = 1 << 30
"""Largest file that is read; the records of a run with ten million requests have less."""


def read_json_object(file: Path, where: str = "") -> dict[str, Any]:
    """Reads a file that holds one JSON object. where: the setting that named its folder, for messages.

    Raises ConfigError for a file that cannot be read, is empty or cut short, or holds something else.
    """
    name = f"{where}: {file.name}" if where else str(file)
    try:
        size = file.stat().st_size
        if not file.is_file():  # a pipe or a device may never end
            raise ConfigError(f"{name}: must be a file")
        if size > MAX_BYTES:
            raise ConfigError(f"{name}: must have at most {MAX_BYTES:,} bytes, has {size:,}")
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: must be UTF-8 text, byte {error.start} is not") from None
    except RecursionError:
        raise ConfigError(f"{name}: nests values too deeply to be read") from None
    except ValueError as error:
        what = "is empty" if not size else f"is damaged or cut short: {error}"
        raise ConfigError(f"{name}: {what}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: must hold one JSON object, holds a {type(found).__name__}")
    return found
