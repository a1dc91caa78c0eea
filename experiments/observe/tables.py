"""Converts replies to the records of a simulation, so that the same code reads both.

arrival_s is the time of sending, because the server is not to blame for a late client. Columns that a client
cannot see are empty: iterations, queue times, KV blocks. Tokens of one chunk have the same time, so the gaps
between them are 0 s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.observe.reply import Reply
from policies.caching.content import Places
from sim.records.iterations import IterationLog
from sim.records.requests import RequestLog
from sim.records.run import PoolRecord, RunRecords, expanded, replicas_throughout

BLOCK_TOKENS = 16
"""Tokens per block whose contents requests.csv names."""


def records_of(replies: Sequence[Reply], end_s: float, *, interrupted: bool = False) -> RunRecords:
    """Returns the run's records, without iterations."""
    log = RequestLog()
    gap_s, gap_end_s = [np.zeros(0)], [np.zeros(0)]
    for reply in replies:
        token_s = _enter(log, reply)
        gap_s.append(np.diff(token_s))
        gap_end_s.append(token_s[1:])
    gaps_s = np.concatenate(gap_s)
    iterations, _ = expanded([IterationLog(0, BLOCK_TOKENS)])
    return RunRecords(
        requests=log.table().to_pandas().merge(_seen(replies), on="request_id", validate="one_to_one"),
        iterations=pd.DataFrame(iterations),
        gap_s=gaps_s,
        gap_count=np.ones(len(gaps_s), np.int64),
        gap_end_s=np.concatenate(gap_end_s),
        pools=(PoolRecord(0, BLOCK_TOKENS),),
        replicas=replicas_throughout(1, end_s),
        end_s=end_s,
        interrupted=interrupted,
    )


def chunks_table(replies: Sequence[Reply]) -> pd.DataFrame:
    """Returns one row per chunk that holds tokens: request_id, time_s, tokens."""
    chunks = [reply.chunks() for reply in replies]
    sizes = [len(found.time_s) for found in chunks]
    return pd.DataFrame(
        {
            "request_id": np.repeat(np.array([r.request.request_id for r in replies], np.int64), sizes),
            "time_s": np.array([t for found in chunks for t in found.time_s], np.float64),
            "tokens": np.array([n for found in chunks for n in found.num_tokens], np.int64),
        }
    )


def capture_table(requests: pd.DataFrame, replies: Sequence[Reply], run: str) -> pd.DataFrame:
    """Returns the finished requests in the columns of LLMServingSim's captures of vLLM, by arrival.

    arrival_s: scheduled time; queued_s: time of sending. scheduled_s is empty, because only the server knows
    it. prefix_block_ids: a number per full 16-token block of the prompt, equal if the prompts are equal up to
    its end.
    """
    finished = requests[requests["status"] == "finished"].sort_values(["due_s", "request_id"])
    blocks = _block_ids(replies)
    ids = finished["request_id"].astype(str)
    queued_s, first_s, last_s = (
        finished[f"{name}_s"].to_numpy(dtype=np.float64) for name in ("arrival", "first_token", "last_token")
    )
    gaps = finished["output_tokens"].to_numpy() - 1
    tpot_s = np.divide(last_s - first_s, gaps, out=np.full(len(gaps), np.nan), where=gaps > 0)
    table = pd.DataFrame(
        {
            "id": f"{run}/" + ids,
            "run": run,
            "req": finished["request_id"],
            "arrival_s": finished["due_s"].round(6),
            "input_tokens": finished["prompt_tokens"],
            "output_tokens": finished["output_tokens"],
            "prefix_block_ids": [blocks[request_id] for request_id in finished["request_id"]],
            "queued_s": queued_s.round(6),
            "scheduled_s": np.nan,
            "first_token_s": first_s.round(6),
            "last_token_s": last_s.round(6),
            "ttft_ms": ((first_s - queued_s) * 1e3).round(3),
            "tpot_ms": (tpot_s * 1e3).round(3),
            "e2e_ms": ((last_s - queued_s) * 1e3).round(3),
        }
    )
    return table.reset_index(drop=True)


def _enter(log: RequestLog, reply: Reply) -> NDArray[np.float64]:
    """Fills in the row of one request; returns the time of each of its tokens."""
    request, chunks = reply.request, reply.chunks()
    num_prompt = request.prompt.num_tokens if reply.prompt_tokens is None else reply.prompt_tokens
    prompt = request.prompt._replace(num_tokens=num_prompt)
    log.arrive(request._replace(arrival_s=reply.sent_s, prompt=prompt))
    row = request.request_id
    token_s = np.repeat(np.array(chunks.time_s, np.float64), chunks.num_tokens)
    log.replica[row] = 0
    log.status[row] = reply.status
    log.finished_s[row] = reply.ended_s
    log.output_tokens[row] = log.longest_tokens[row] = len(token_s)
    log.cached_tokens[row] = reply.cached_tokens
    reason = reply.error or reply.finish_reason
    if reason and reason != "stop":
        log.reason[row] = reason
    if len(token_s):
        log.first_token_s[row], log.last_token_s[row] = token_s[0], token_s[-1]
    return token_s


def _seen(replies: Sequence[Reply]) -> pd.DataFrame:
    """Builds the columns that only a client knows, one row per request."""
    chunks = [reply.chunks() for reply in replies]
    due_s = np.array([reply.due_s for reply in replies], np.float64)
    sent_s = np.array([reply.sent_s for reply in replies], np.float64)
    return pd.DataFrame(
        {
            "request_id": np.array([reply.request.request_id for reply in replies], np.int64),
            "due_s": due_s,
            "lag_s": sent_s - due_s,
            "headers_s": np.array([reply.headers_s for reply in replies], np.float64),
            "http_status": np.array([reply.http_status for reply in replies], np.int32),
            "finish_reason": [reply.finish_reason for reply in replies],
            "error": [reply.error for reply in replies],
            "failed": np.array([reply.has_failed for reply in replies], np.bool_),
            "chunks": np.array([len(found.time_s) for found in chunks], np.int64),
            "tokens_counted_by": [found.counted for found in chunks],
            "asked_prompt_tokens": np.array([r.request.prompt.num_tokens for r in replies], np.int64),
            "asked_output_tokens": pd.array([r.num_asked for r in replies], "Int64"),
        }
    )


def _block_ids(replies: Sequence[Reply]) -> dict[int, str]:
    places = Places(BLOCK_TOKENS)
    numbers: dict[tuple[int, int], int] = {}  # by place, and block of it
    found = {}
    for reply in replies:
        start, ids = 0, []
        num_blocks = reply.request.prompt.num_tokens // BLOCK_TOKENS
        for place, end in places.path(reply.request):
            for block in range(start, min(end, num_blocks)):
                ids.append(numbers.setdefault((place, block - start), len(numbers)))
            start = min(end, num_blocks)
        found[reply.request.request_id] = " ".join(map(str, ids))
    return found
