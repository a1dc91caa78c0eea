"""Locks a folder that one process works on; the lock ends with the process, whatever ends that."""

from __future__ import annotations

import fcntl
import os
import platform
from datetime import datetime
from pathlib import Path
from typing import IO

from sim.settings.errors import ConfigError

LOCK = ".lock"


def lock_folder(folder: Path) -> IO[str]:
    """Returns an open file that holds the lock until it is closed.

    Raises ConfigError, which names the holder, while another process has it, and OSError if the folder cannot
    be written. A file system without locks gives none.
    """
    file = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ConfigError(f"{folder}: {holder} works on it; wait until it ends, or end it") from None
    except OSError:
        return file
    file.truncate(0)
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    file.write(f"process {os.getpid()} on {platform.node()} since {since}\n")
    file.flush()
    return file
