"""The result of a simulated run: its records and the figures computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from hwmodels.iterations.iteration import IterationModel
from sim.metrics.fleet import down_s_by_replica
from sim.metrics.slo import Slo
from sim.records.requests import Status
from sim.records.run import RunRecords


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The records of a run, the figures computed from them, and the models needed to draw plots."""

    records: RunRecords
    requests: pd.DataFrame
    """The request records with TTFT, TPOT, E2E, queue time and whether the SLO was met."""
    summary: dict[str, Any]
    models: tuple[IterationModel, ...]
    """Hardware models, one per pool."""
    slo: Slo | None

    @property
    def replicas(self) -> pd.DataFrame:
        """One row per replica: its requests, tokens, iterations and busy time.

        A request that was transferred from a prefill to a decode replica counts in `requests` for both; its
        prompt counts for the prefill replica, its status and output for the decode replica.
        """
        iterations = self.records.iterations.groupby("replica")
        requests = self.requests[self.requests["replica"] >= 0].groupby("replica")
        computed_by = self.requests["prefill_replica"]
        transferred = self.requests[computed_by >= 0].groupby("prefill_replica")
        prompts = self.requests.assign(by=computed_by.where(computed_by >= 0, self.requests["replica"]))
        table = pd.DataFrame(index=pd.RangeIndex(self.records.num_replicas, name="replica"))
        names = [self.records.pools[replica.pool].name for replica in self.records.replicas]
        table["requests"] = requests.size().add(transferred.size(), fill_value=0)
        for status in Status:
            mine = self.requests[self.requests["status"] == status.name]
            table[status.name] = mine.groupby("replica").size()
        table["prompt_tokens"] = prompts[prompts["by"] >= 0].groupby("by")["prompt_tokens"].sum()
        table["output_tokens"] = requests["output_tokens"].sum()
        table["preemptions"] = requests["preemptions"].sum()
        table["iterations"] = iterations.size()
        table = table.fillna(0).astype("int64")
        table["busy_s"] = iterations["duration_s"].sum()
        table["start_s"] = [replica.start_s for replica in self.records.replicas]
        table["end_s"] = [replica.end_s for replica in self.records.replicas]
        table["crashes"] = [len(replica.down) for replica in self.records.replicas]
        table["down_s"] = down_s_by_replica(self.records)
        table["busy_share"] = table["busy_s"] / (table["end_s"] - table["start_s"])
        table.insert(0, "pool", names)
        return table.fillna(0.0).reset_index()
