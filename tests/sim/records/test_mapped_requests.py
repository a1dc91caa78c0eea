"""The log of requests whose memory is returned: the same table, and pages that are given back."""

from pathlib import Path

import pytest

from policies.core.request import Prompt, Request
from sim.records import mapped_requests
from sim.records.mapped_requests import MappedRequestLog
from sim.records.requests import RequestLog
from sim.records.table import joined
from tests.tables import assert_equal_tables

PAGE_ROWS = 4096


def fill(log, ids):
    for request_id in ids:
        log.arrive(Request(request_id, request_id / 8, Prompt(request_id % 9 + 1, ()), None, tenant="t"))
        log.send(request_id, request_id % 3)
        log.reject(request_id, f"reason {request_id % 2}", request_id / 4)
    return log


def test_groups_that_are_taken_one_by_one_are_the_table():
    log = MappedRequestLog(group_rows=PAGE_ROWS)
    parts = []
    for group in range(3):
        fill(log, range(group * PAGE_ROWS, (group + 1) * PAGE_ROWS))
        assert log.group_has_arrived(group * PAGE_ROWS)
        assert not log.group_has_arrived((group + 1) * PAGE_ROWS)
        parts.append(log.take((group + 1) * PAGE_ROWS))
        assert not log.reason
    fill(log, [3 * PAGE_ROWS + 5])
    parts.append(log.take())
    plain = fill(RequestLog(), [*range(3 * PAGE_ROWS), 3 * PAGE_ROWS + 5]).table()
    assert_equal_tables(joined(parts), plain)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_of_taken_rows_is_returned():
    log = MappedRequestLog(group_rows=PAGE_ROWS)
    before, most = resident_bytes(), 0
    for group in range(60):  # 50 MB of rows
        for _ in range(PAGE_ROWS // 1024):
            log._append_empty_rows(1024)
        for column in (log.output_tokens, log.gateway_s, log.kv_transfer_bytes):
            column[group * PAGE_ROWS : (group + 1) * PAGE_ROWS] = column[0:PAGE_ROWS]
        log.take((group + 1) * PAGE_ROWS)
        most = max(most, resident_bytes() - before)
    assert most < 15e6


def test_a_system_that_reserves_less_takes_fewer_requests(monkeypatch):
    reserve = mapped_requests.mmap.mmap

    def limited(number, num_bytes, **settings):
        if num_bytes > 1 << 20:
            raise OSError
        return reserve(number, num_bytes, **settings)

    monkeypatch.setattr(mapped_requests.mmap, "mmap", limited)
    log = MappedRequestLog()
    with pytest.raises(MemoryError, match=r"reserves memory for 131,072 requests only"):
        log._append_empty_rows(131_073)
