"""A prefill replica and a decode replica, whose times are whole ticks."""

from experiments.conformance.same_run import assert_leap_equals_step
from experiments.conformance.toys import TICK_S
from sim.metrics.output import check_conservation
from sim.transfer.kv_transfers import KvTransferSettings
from tests.worlds.services import Service

AT_END = KvTransferSettings(transfer="at_end")


def run_world(*asks, **given):
    records = assert_leap_equals_step(Service(asks=asks, **given)).records
    check_conservation(records)
    return records


def ticks(records, *names):
    """Times of all requests, in ticks."""
    return [tuple(row[f"{name}_s"] / TICK_S for name in names) for _, row in records.requests.iterrows()]
