"""Level `recorded`: replays the durations of a recorded run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations import (
    COUNTED,
    IterationModel,
    IterationShape,
    UnknownIterationError,
    counted,
)
from hwmodels.levels import InProportions
from hwmodels.levels.physical import PHYSICAL_SHARE
from hwmodels.levels.profile import check_columns


class Recorded(InProportions):
    """An `IterationModel` that looks iterations up by their shape.

    A shape that was recorded several times takes the median. The argument is a shape, not the n-th iteration,
    so the order of the recording and the scatter of equal iterations are lost. An unrecorded shape is
    unknown, or, with allow_missing, priced by the base. FLOPs, bytes, peaks and component shares always come
    from the base.
    """

    def __init__(
        self,
        *,
        shapes: IterationShape,
        durations_s: Any,
        base: IterationModel,
        allow_missing: bool = False,
        cached_bytes: float = 0.0,
    ) -> None:
        """Takes the shapes and durations of the recorded iterations.

        shapes: arrays, one value per iteration; durations_s: seconds, one per iteration.
        cached_bytes: bytes that the caches of all devices may hold from one iteration to the next. Raises
        ValueError naming the first iteration whose duration is not finite and > 0, or too short for the
        base's FLOPs and bytes at the peaks.
        """
        durations = np.asarray(durations_s, dtype=np.float64)
        wrong = ~(np.isfinite(durations) & (durations > 0))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(f"recorded, row {row}: duration_s={durations[row]:g}: must be finite and > 0 s")
        counts = (np.asarray(field, dtype=np.float64) for field in counted("recorded", shapes))
        fields: tuple[Any, ...] = np.broadcast_arrays(*counts, durations)
        _check_physical(IterationShape(*fields[:-1]), durations, base, cached_bytes)
        by_shape: dict[tuple[float, ...], list[float]] = {}
        for key, duration in zip(_keys(fields[:-1]), durations.tolist(), strict=True):
            by_shape.setdefault(key, []).append(duration)
        self._seconds = {key: float(np.median(times)) for key, times in by_shape.items()}
        super().__init__(base)
        self.base = base
        self._allow_missing = allow_missing

    @classmethod
    def from_iterations(
        cls,
        iterations: Mapping[str, Any],
        *,
        base: IterationModel,
        allow_missing: bool = False,
        cached_bytes: float = 0.0,
    ) -> Recorded:
        """Builds it from columns of a run's iterations.parquet: fields of `IterationShape`, duration_s."""
        check_columns("iterations", iterations, (*COUNTED, "duration_s"))
        columns: list[Any] = [np.asarray(iterations[name]) for name in COUNTED]
        return cls(
            shapes=IterationShape(*columns),
            durations_s=iterations["duration_s"],
            base=base,
            allow_missing=allow_missing,
            cached_bytes=cached_bytes,
        )

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the recorded wall time in seconds; for arrays, of each, NaN if it was not recorded.

        Raises UnknownIterationError for a single shape that was not recorded.
        """
        counts = counted("recorded", shape)
        if not any(isinstance(field, np.ndarray) for field in counts):
            return self._known(tuple(float(field) for field in counts))
        fields = np.broadcast_arrays(*counts)
        seconds = np.array([self._look_up(key) for key in _keys(fields)], dtype=np.float64)
        return seconds.reshape(fields[0].shape)

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive decode-only iterations; see `IterationModel`."""
        last = num_context_tokens + num_seqs * num_iterations
        keys = [
            (float(num_seqs), float(context), 0.0, 0.0, 0.0, 0.0, float(num_seqs))
            for context in range(num_context_tokens, last, num_seqs)
        ]
        ends_s = [start_s + self._known(keys[0])]
        for key in keys[1:]:
            end_s = ends_s[-1] + self._look_up(key)
            if math.isnan(end_s):
                break
            ends_s.append(end_s)
        return ends_s

    def _known(self, key: tuple[float, ...]) -> float:
        seconds = self._look_up(key)
        if math.isnan(seconds):
            sizes = zip(COUNTED, key, strict=True)
            shape = ", ".join(f"{name}={size:g}" for name, size in sizes)
            raise UnknownIterationError(
                f"recorded: no iteration of {shape}; set allow_missing=true to use the base model for it"
            )
        return seconds

    def _look_up(self, key: tuple[Any, ...]) -> float:
        """Returns the recorded seconds, or NaN if the shape was not recorded."""
        if key not in self._seconds and self._allow_missing:
            return float(self.base.seconds(IterationShape(*key)))
        return self._seconds.get(key, math.nan)


def _check_physical(
    shapes: IterationShape, durations_s: NDArray[np.float64], base: IterationModel, cached_bytes: float
) -> None:
    compute_s = base.flops(shapes) / base.peak_flops_per_s
    memory_s = (base.bytes_moved(shapes) - cached_bytes) / base.peak_bytes_per_s
    limit_s = np.broadcast_to(np.maximum(compute_s, memory_s), durations_s.shape)
    wrong = durations_s < PHYSICAL_SHARE * limit_s
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"recorded, row {row}: duration_s={durations_s[row]:g}: the devices cannot do it in less than "
            f"{limit_s[row]:.3g} s; check the unit, the hardware and the model"
        )


def _keys(fields: Any) -> list[tuple[float, ...]]:
    """Returns a key of seven floats per iteration."""
    return [
        tuple(row) for row in np.stack([np.ravel(field) for field in fields], axis=1).astype(float).tolist()
    ]
