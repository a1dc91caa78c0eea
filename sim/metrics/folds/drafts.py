"""Draft tokens over time and by the size of the batch, from parts of the table of iterations."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.folds.batches import Ints, added
from sim.metrics.folds.bins import Bins
from sim.metrics.folds.iterations import ends_s

OVER_TIME: Final = ("accepted_tokens", "draft_passes")
BY_BATCH: Final = ("decode_seqs", "kept_tokens", "verified_tokens")


class DraftsFold:
    """Sums of the plot of speculation beside the acceptance by place; start_s: of the measured part."""

    def __init__(self, start_s: float) -> None:
        self.by_time = Bins(start_s)
        """Sums of the columns `OVER_TIME`."""
        self._by_batch: dict[str, Ints] = {name: np.zeros(0, np.int64) for name in BY_BATCH}

    def add(self, iterations: pd.DataFrame) -> None:
        """Adds iterations. Those of replicas that do not speculate may lack the columns of drafts."""
        times_s = ends_s(iterations)
        measured = times_s >= self.by_time.start_s
        if "draft_passes" in iterations:
            drafting = measured & (iterations["draft_passes"].to_numpy() > 0)
            for name in OVER_TIME:
                self.by_time.count(name, times_s[drafting], iterations[name].to_numpy()[drafting])
        seqs = iterations["decode_seqs"].to_numpy()
        decodes = np.flatnonzero(measured & (seqs > 0))
        for name in BY_BATCH if len(decodes) else ():
            values: NDArray[Any] = iterations[name].to_numpy()[decodes] if name in iterations else seqs[:0]
            if len(values):
                sums = np.bincount(seqs[decodes], weights=values).astype(np.int64)
                self._by_batch[name] = added(self._by_batch[name], sums)

    def merge(self, other: DraftsFold) -> None:
        """Adds the iterations of other, which is not changed."""
        self.by_time.merge(other.by_time)
        for name, sums in other._by_batch.items():
            self._by_batch[name] = added(self._by_batch[name], sums)

    @property
    def has_passes(self) -> bool:
        """Returns whether draft tokens were verified."""
        return bool(self.by_time.sums)

    def by_batch(self) -> pd.DataFrame:
        """Returns the sums of the columns `BY_BATCH`, by the number of sequences in the batch."""
        sums = self._by_batch
        seqs = np.flatnonzero(sums["decode_seqs"])
        every = {name: added(sums[name], np.zeros_like(sums["decode_seqs"]))[seqs] for name in BY_BATCH}
        return pd.DataFrame(every, index=seqs)
