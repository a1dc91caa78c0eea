"""Ends a worker process when the process that started it has ended, however that ended."""

from __future__ import annotations

import os
import threading
import time

PATIENCE_S = 0.5
"""Longest time in seconds until the parent's end is noticed."""


def end_with_parent(parent: int) -> None:
    """Ends this process when its parent, a process id, has ended, whatever it is doing meanwhile.

    A pipe does not show the end of the parent: a forked worker, and those forked after it, hold the parent's
    side of it open. So a worker whose parent was killed would wait for ever, with the parent's locks.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PATIENCE_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
