"""The traces that were checked, for later runs of this process and for other processes.

A check reads the whole file, and sorts it if it must. It holds as long as the file has the same path, size
and time of change.
"""

from __future__ import annotations

import pickle  # nosec B403
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from sim.workload.trace_source import TraceSource, version_of

SETTLED_NS: Final = 1_000_000_000
"""Age of a file from which its time of change identifies its content; file systems have coarse clocks."""
MAX_CHECKED: Final = 4
"""Traces that are remembered; the requests of a short one are in memory, see `trace_source.KEPT_VALUES`."""


class TraceKey(NamedTuple):
    """All on which a check depends. version: size and time of change of the file."""

    settings: Hashable
    version: tuple[int, int]


_checked: OrderedDict[TraceKey, TraceSource] = OrderedDict()  # the one used last at the end


def checked_once(path: Path, settings: Hashable, check: Callable[[], TraceSource]) -> TraceSource:
    """Returns the traffic of a trace for one run; `check` is called if no check is known.

    settings: all on which the traffic depends, besides the content of the file. Without a hash, as those of
    a user's own class may be, the file is checked by each run.
    """
    version = version_of(path)
    try:
        hash(settings)
    except TypeError:
        return check()
    if version is None or time.time_ns() - version[1] < SETTLED_NS:
        return check()
    key = TraceKey(settings, version)
    if key not in _checked or not _checked[key].is_readable:
        _remember(key, check())
    _checked.move_to_end(key)
    return _checked[key].again()


def checks_for_others(folder: Path) -> list[bytes]:
    """Returns the checks of long traces for `adopt` in other processes; sorted rows are copied to the folder.

    A trace of which the rows cannot be written, or which cannot be pickled, is left out: others check it.
    """
    found = []
    for number, (key, source) in enumerate(_checked.items()):
        file = folder / f"trace-{number}.arrow"
        try:
            if (shared := source.for_others(file)) is not None:
                found.append(pickle.dumps((key, shared)))
        except (OSError, pickle.PicklingError, AttributeError, TypeError):
            file.unlink(missing_ok=True)
    return found


def adopt(checks: Iterable[bytes]) -> None:
    """Takes over the checks of the process that has called `checks_for_others`, as far as they help here."""
    for check in checks:
        with suppress(ImportError, AttributeError):  # of a class that is not found here
            # Made by the command of this run.
            key, source = pickle.loads(check)  # nosec B301
            if source.is_readable and key not in _checked:
                _remember(key, source)


def _remember(key: TraceKey, source: TraceSource) -> None:
    _checked[key] = source
    while len(_checked) > MAX_CHECKED:
        _checked.popitem(last=False)
