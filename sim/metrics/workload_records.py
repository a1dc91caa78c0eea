"""The records from which a workload computes figures of its own: those of all its requests in a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.metrics import definitions
from sim.metrics.definitions import Window
from sim.metrics.token_times import TokenTimes, known_token_times
from sim.records.run import RunRecords
from sim.records.table import AnyTable, column, places_of


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadRecords:
    """Records of the requests of one workload: all of a run, or those of a part of a mix.

    requests: see `RequestLog.table`. iterations: those of the whole run. own_gaps, bursts: see `RunRecords`;
    rows of other requests may remain. window: the measured part of the run.
    """

    requests: AnyTable
    iterations: AnyTable
    own_gaps: AnyTable
    bursts: AnyTable | None
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
            column(self.requests, f"{name}_s", np.float64)
            for name in ("arrival", "first_token", "last_token")
        )
        finished = column(self.requests, "status") == "finished"
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
        ids = column(requests, "request_id")
        session = column(requests, "session_id")
        tenants = [one.removeprefix(name).removeprefix("/") for one in column(requests, "tenant").tolist()]
        return WorkloadRecords(
            requests=requests.assign(
                request_id=first + np.arange(len(requests)),
                tenant=np.array(tenants, dtype=object),
                session_id=np.where(session < 0, session, (session - index) // num_parts),
            ),
            iterations=self.iterations,
            own_gaps=_renumbered(self.own_gaps, ids, first),
            bursts=None if self.bursts is None else _renumbered(self.bursts, ids, first),
            window=self.window,
            is_part=True,
        )


def _renumbered(table: AnyTable, ids: NDArray[np.int64], first: int) -> AnyTable:
    """Returns the rows of the requests with the ids, numbered from `first` on in the order of these."""
    place = places_of(ids, column(table, "request_id"))
    return table[place >= 0].assign(request_id=first + place[place >= 0])
