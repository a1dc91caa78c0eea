"""When Python's cyclic garbage collector runs in a command: not while it starts.

The objects of imported modules and of the composed config stay to the end, and the collector would walk them
again and again: a twentieth of the time of a short run.
"""

from __future__ import annotations

import gc


def begin_collection() -> None:
    """Enables the collector, if it was disabled for the start; objects that exist by now are left out."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
