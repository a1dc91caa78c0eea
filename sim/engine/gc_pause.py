"""Pauses Python's cyclic garbage collector while a simulation runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """No collection of cycles inside.

    What a run makes it keeps, or drops without cycles. The collector would look through all of it again and
    again and find nothing: 10 to 20 % of a long run's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
