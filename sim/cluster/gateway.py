"""The gateway of a simulation: `policies.gateway.gateway` with simulated replicas and arrivals.

A run attaches the parts that it needs: clients that time out, an admission policy, prefill pools, crashes.
"""

from __future__ import annotations

from typing import TypeAlias

from policies.core.sequence import Sequence
from policies.gateway.gateway import AdmissionControl as AdmissionControlOf
from policies.gateway.gateway import Gateway as GatewayOf
from policies.gateway.gateway import GatewayAttachment as GatewayAttachmentOf
from policies.gateway.gateway import LengthPredictions as LengthPredictionsOf
from policies.gateway.gateway import RequestAttempt as RequestAttemptOf
from sim.cluster.fleet import Fleet
from sim.engine.replica import Replica
from sim.records.requests import FINISHED, RequestLog
from sim.workload.base import Arrival

AdmissionControl: TypeAlias = AdmissionControlOf[Replica, Arrival, Sequence]
GatewayAttachment: TypeAlias = GatewayAttachmentOf[Replica, Arrival, Sequence]
LengthPredictions: TypeAlias = LengthPredictionsOf[Replica, Arrival, Sequence]
RequestAttempt: TypeAlias = RequestAttemptOf[Replica, Arrival]


class Gateway(GatewayOf[Replica, Arrival, Sequence]):
    """The gateway of a simulated fleet."""

    fleet: Fleet


def output_length(requests: RequestLog, request_id: int) -> int | None:
    """Returns the output tokens of a complete request; None for any other end."""
    return requests.output_tokens[request_id] if requests.status[request_id] == FINISHED else None
