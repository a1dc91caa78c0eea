"""JSON files that are data, such as the summary of a run: damage is reported in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hwmodels.bounded_files import UnreadableFileError, read_text
from sim.settings.errors import ConfigError


def read_json_object(file: Path, where: str = "") -> dict[str, Any]:
    """Reads a file that holds one JSON object. where: the setting that named its folder, for messages.

    Raises ConfigError for a file that cannot be read, is empty or cut short, or holds something else.
    """
    name = f"{where}: {file.name}" if where else str(file)
    text = ""
    try:
        text = read_text(file)
        found = json.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from error
    except UnreadableFileError as error:
        raise ConfigError(f"{name}: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: must be UTF-8 text, byte {error.start} is not") from None
    except RecursionError:
        raise ConfigError(f"{name}: nests values too deeply to be read") from None
    except ValueError as error:
        what = "is empty" if not text else f"is damaged or cut short: {error}"
        raise ConfigError(f"{name}: {what}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: must hold one JSON object, holds a {type(found).__name__}")
    return found
