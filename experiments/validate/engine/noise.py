"""Detects that the machine was too noisy during a measurement; its errors then get no verdict.

Only a CPU's clock knows the pace of the machine (`experiments.validate.engine.paced`). It counts from the
calibration on: other paces in the run than in the calibration are noise as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from experiments.calibrate.engine.pace import Pace, in_words, is_noisy, variation
from experiments.validate.engine.recording import Recording

MORE_RUNS = 3
"""Largest number of runs of a case that are repeated because the machine was too noisy."""
WHAT_TO_DO = (
    "run it again while fewer other programs run on this machine, or add thresholds=none to get the errors "
    "without a verdict; the decisions do not depend on it"
)


def refusal_of(recordings: Sequence[Recording]) -> str:
    """Says why there can be no verdict on recordings; empty if there can be one."""
    paces = [pace for one in recordings for pace in _paces(one)]
    return f"{in_words(*paces)} between the calibration and the runs" if is_noisy(*paces) else ""


def quiet_runs(run: Callable[[], Recording], count: int) -> Iterator[Recording]:
    """Yields `count` recordings; each is repeated while the machine is too noisy, and the quietest is kept.

    The choice depends on the machine alone, never on the measured latencies. Nothing is repeated if the
    calibration was too noisy itself.
    """
    left = MORE_RUNS
    for _ in range(count):
        best, attempts = run(), 1
        while left and is_noisy(*_paces(best)) and not is_noisy(*_paces(best)[1:]):
            again = run()
            best = min(best, again, key=_noise)
            attempts += 1
            left -= 1
        best.engine["attempts"] = attempts
        yield best


def _noise(recording: Recording) -> tuple[bool, float]:
    """Returns a sort key: recordings that are quiet enough come first, then those with little variation."""
    paces = _paces(recording)
    return is_noisy(*paces), variation(*paces)


def _paces(recording: Recording) -> list[Pace]:
    """Returns the pace during the run, and during the calibration; what is not known is left out."""
    about = recording.engine
    return [Pace(**about[name]) for name in ("pace", "calibration_pace") if about.get(name) is not None]
