"""The records from which a workload computes figures of its own: those of all its requests in a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics import definitions
from sim.metrics.token_times import TokenTimes, known_token_times
from sim.metrics.window import Window
from sim.records.run import RunRecords


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadRecords:
    """Records of the requests of one workload: all of a run, or those of a part of a mix.

    requests: see `RequestLog.table`. iterations: those of the whole run. own_gaps, bursts: see `RunRecords`;
    rows of other requests may remain. window: the measured part of the run.
    """

    requests: pd.DataFrame
    iterations: pd.DataFrame
    own_gaps: pd.DataFrame
    bursts: pd.DataFrame | None
    window: Window
    is_part: bool = False
    """Whether these are the requests of a part of a mix."""

    @classmethod
    def of(cls, records: RunRecords, window: Window) -> WorkloadRecords:
        """Returns the records of all requests of a run."""
        return cls(
            requests=records.requests,
            iterations=records.iterations,
            own_gaps=records.own_gaps,
            bursts=records.bursts,
            window=window,
        )

    def token_times(self) -> TokenTimes | None:
        """Returns the times of all tokens, or None if a request has several samples."""
        return known_token_times(self.requests, self.iterations, self.own_gaps, self.bursts)

    def plain_latencies(self) -> dict[str, NDArray[np.float64]]:
        """Returns the latencies of requests that the workload says nothing about, in seconds.

        publish: TTFT, NaN without a token; task: E2E, NaN if the request has not finished.
        """
        arrival_s, first_s, last_s = (
            self.requests[f"{name}_s"].to_numpy(np.float64)
            for name in ("arrival", "first_token", "last_token")
        )
        finished = (self.requests["status"] == "finished").to_numpy(np.bool_)
        return {
            "publish": definitions.ttft_s(arrival_s, first_s),
            "task": np.where(finished, definitions.e2e_s(arrival_s, last_s), np.nan),
        }

    def part(
        self, rows: NDArray[np.bool_], name: str, index: int, num_parts: int, first: int = 0
    ) -> WorkloadRecords:
        """Returns the records of the requests of one part of a mix, with numbers of its own.

        Requests are numbered from `first` on in their order in the run. Tenants and ids of sessions are those
        that the part gave them: in the mix, tenants begin with its name, and sessions are id * num_parts +
        index (-1: none).
        """
        requests = self.requests[rows]
        number = pd.Series(first + np.arange(len(requests)), index=requests["request_id"].to_numpy())
        session = requests["session_id"].to_numpy()
        return WorkloadRecords(
            requests=requests.assign(
                request_id=number.to_numpy(),
                tenant=requests["tenant"].str.removeprefix(name).str.removeprefix("/"),
                session_id=np.where(session < 0, session, (session - index) // num_parts),
            ).reset_index(drop=True),
            iterations=self.iterations,
            own_gaps=_renumbered(self.own_gaps, number),
            bursts=None if self.bursts is None else _renumbered(self.bursts, number),
            window=self.window,
            is_part=True,
        )


def _renumbered(table: pd.DataFrame, number: pd.Series) -> pd.DataFrame:
    """Returns the rows of the numbered requests, with their numbers as request_id."""
    kept = table[table["request_id"].isin(number.index)]
    return kept.assign(request_id=number[kept["request_id"].to_numpy()].to_numpy()).reset_index(drop=True)
