"""Reads the JSON files of a checkpoint, within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 1 << 28
"""Largest JSON file that is read; the index of a checkpoint with a million tensors has half of it."""


def load_json_object(file: Path) -> dict[str, Any]:
    """Reads a JSON object of at most MAX_JSON_BYTES; raises ValueError that names file, line and column."""
    try:
        if file.exists() and not file.is_file():  # a pipe or a device may never end
            raise ValueError(f"{file}: must be a file")
        if (size := file.stat().st_size) > MAX_JSON_BYTES:
            raise ValueError(f"{file}: must have at most {MAX_JSON_BYTES:,} bytes, has {size:,}")
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{file}: nests values too deeply to be read") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: must hold one JSON object, holds a {type(config).__name__}")
    return config
