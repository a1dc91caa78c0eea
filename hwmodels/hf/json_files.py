"""Reads the JSON files of a checkpoint, within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hwmodels.bounded_files import UnreadableFileError, read_text

MAX_JSON_BYTES = 1 << 28
"""Largest JSON file that is read; the index of a checkpoint with a million tensors has half of it."""


def load_json_object(file: Path) -> dict[str, Any]:
    """Reads a JSON object of at most MAX_JSON_BYTES; raises ValueError that names file, line and column."""
    try:
        config = json.loads(read_text(file, MAX_JSON_BYTES))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except UnreadableFileError as error:
        raise ValueError(f"{file}: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{file}: nests values too deeply to be read") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: must hold one JSON object, holds a {type(config).__name__}")
    return config
