"""The supported trace formats with arrival times, one declaration each: a table, columns, times, contents.

`otel_traces` and `token_ids` declare two more; formats without times are in `untimed_traces`. Undeclared
columns are not used; a note names those that may matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sim.workload.arrival_times import Clock
from sim.workload.trace_columns import Columns
from sim.workload.trace_reading import Reading
from sim.workload.trace_tables import CSV, JSON_LINES, OBJECTS, PARQUET, Record
from sim.workload.traces import (
    DATES,
    MICROSECONDS,
    MILLISECONDS,
    NANOSECONDS,
    READY,
    SECONDS,
    HashedTrace,
    Trace,
)

FAILED = "failed: no output tokens"
NO_TOKENS = "no input or no output tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class AzureCsv(Trace):
    """Azure LLM inference traces 2023 and 2024 (Patel et al., ISCA 2024; Stojkovic et al., HPCA 2025).

    Times are dates with up to seven fractional digits, all of which are kept; the first row is at 0 s.
    """

    table = CSV
    times = DATES
    columns = Columns(arrival="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class BurstGptCsv(Trace):
    """BurstGPT (Wang et al., KDD 2025). Rows without response tokens are failures; they are only counted."""

    table = CSV
    columns = Columns(arrival="Timestamp", prompt="Request tokens", output="Response tokens", failed=FAILED)


@dataclass(frozen=True, kw_only=True, slots=True)
class VidurCsv(Trace):
    """Vidur's replay traces (Agrawal et al., MLSys 2024)."""

    table = CSV
    columns = Columns(arrival="arrived_at", prompt="num_prefill_tokens", output="num_decode_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitwiseCsv(Trace):
    """The traces of splitwise-sim (Patel et al., ISCA 2024): arrivals in seconds."""

    table = CSV
    columns = Columns(arrival="arrival_timestamp", prompt="prompt_size", output="token_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApexJsonl(Trace):
    """The traces of APEX+ (Lin et al., 2024): offsets in nanoseconds."""

    table = JSON_LINES
    times = NANOSECONDS
    columns = Columns(arrival="StartTimeOffset", prompt="ContextTokens", output="GeneratedTokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainCsv(Trace):
    """A minimal format for your own traces."""

    table = CSV
    columns = Columns(arrival="arrival_s", prompt="prompt_tokens", output="output_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlisTraceV2(Trace):
    """The CSV of a BLIS TraceV2 (inference-sim): times in us, tenants, sessions, statuses, shared prefixes.

    arrival_time_us is used, not send_time_us, which may have a different origin. As in BLIS, input_tokens of
    a request with a prefix_group come after its prefix, and server_input_tokens are used if there is no
    prefix. Rounds of a session are replayed at their recorded times; shared parts of their prompts are not in
    the file.
    """

    table = CSV
    times = MICROSECONDS
    columns = Columns(
        arrival="arrival_time_us",
        prompt="input_tokens",
        output="output_tokens",
        failed=FAILED,
        status="status",
        tenant="tenant_id",
        session="session_id",
        prefix_group="prefix_group",
        prefix_tokens="prefix_length",
        served_prompt="server_input_tokens",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeJsonl(HashedTrace):
    """Mooncake (Qin et al., FAST 2025): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.

    hash_ids identify the prompt's content, one per tokens_per_hash tokens; the last may stand for fewer. A
    request without them shares no content, so no prefix cache finds its prompt; a note says so. A request may
    have its prompt as `text_input` instead of its length. tokenizer: the file that counts its tokens.
    """

    table = JSON_LINES
    times = MILLISECONDS
    columns = Columns(
        arrival="timestamp",
        prompt="input_length",
        output="output_length",
        hashes="hash_ids",
        no_hashes="Requests without hash_ids share no contents, so no prefix cache finds their prompts.",
        prompt_text="text_input",
        refused={
            "delay": "no delays after the previous turn; workload=mooncake_sessions reads them",
        },
    )

    tokens_per_hash: int = 512
    tokenizer: Path | None = None

    def reading(self, columns: Columns, clock: Clock) -> Reading:
        """Returns the reader of the rows of one pass over the file."""
        return Reading(columns, clock, self.time_rule, self.tokens_per_hash, self.tokenizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class BailianJsonl(MooncakeJsonl):
    """Qwen-Bailian (Wang et al., USENIX ATC 2025): Mooncake's keys with seconds, 16 tokens per hash.

    The further keys `chat_id`, `parent_chat_id`, `type` and `turn` are not needed: a later turn shares the
    hashes of the earlier ones.
    """

    times = SECONDS
    tokens_per_hash: int = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BasetenParquet(HashedTrace):
    """Baseten: timestamp_start_unix_ms, input_tokens, output_tokens, total_hashes of whole or partial blocks.

    Each hash stands for tokens_per_hash tokens; the column block_size, if any, must say the same. Canceled
    requests (request_canceled) are counted but not replayed. `org_id` is the tenant.
    """

    table = PARQUET
    times = MILLISECONDS
    columns = Columns(
        arrival="timestamp_start_unix_ms",
        prompt="input_tokens",
        output="output_tokens",
        hashes="total_hashes",
        least_hash=0,
        hash_tokens="block_size",
        canceled="request_canceled",
        empty=NO_TOKENS,
        tenant="org_id",
    )

    tokens_per_hash: int = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ChutesParquet(Trace):
    """Chutes: started_at (a time, or Unix time), it, ot; `user_id` is the tenant.

    Rows without token counts (failed, or no text generation) are counted but not replayed. The file gives the
    number of cached tokens (ct) but not which, so prompts share nothing.
    """

    table = PARQUET
    columns = Columns(
        arrival="started_at",
        prompt="it",
        output="ot",
        unknown="no token counts",
        empty=NO_TOKENS,
        tenant="user_id",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLabJsonl(HashedTrace):
    """TraceLab: one LLM round per line, in any order; the earliest is at 0 s.

    `timing_events` (a list of `event_type` and `timestamp`) give the time at which a round was sent: with the
    last of its inputs (user_message, tool_result), or its first output if it has none. The prompt of
    `input_tokens_total` tokens begins with `prefix_tokens` tokens of the session's previous one, which the
    engine found in its cache; the file has no hashes, so contents are named by blocks of tokens_per_hash.
    `reasoning_output_tokens`, if any, are part of the output.
    """

    table = JSON_LINES
    times = READY
    has_any_order = True
    columns = Columns(
        arrival="timing_events",
        prompt="input_tokens_total",
        output="output_tokens",
        more_output="reasoning_output_tokens",
        empty="no output tokens",
        session="session_id",
        cached="prefix_tokens",
    )

    tokens_per_hash: int = 64

    def records(self, found: Iterator[Record]) -> Iterator[Record]:
        """Yields the rounds with the times at which they were sent."""
        for record in found:
            record.require(self.columns.required)
            record.check(EVENTS)
            record.values["timing_events"] = _sent_s(record, record.values["timing_events"])
            yield record


INPUTS, OUTPUTS = ("user_message", "tool_result"), ("text", "reasoning", "tool_call")
EVENTS = {"timing_events": OBJECTS}


def _sent_s(record: Record, events: list[dict[str, Any]]) -> float:
    """Returns the time at which a round was sent, in Unix seconds. Raises ValueError."""
    rule = "events with an event_type, and a timestamp such as 2026-01-31T12:00:00.5Z"
    inputs_s, outputs_s = [], []
    for event in events:
        try:
            time = datetime.fromisoformat(str(event["timestamp"]))
        except (KeyError, ValueError):
            raise record.bad("timing_events", rule, event) from None
        time_s = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        if event.get("event_type") in INPUTS:
            inputs_s.append(time_s)
        elif event.get("event_type") in OUTPUTS:
            outputs_s.append(time_s)
    if not inputs_s and not outputs_s:
        raise record.bad("timing_events", rule, events)
    return max(inputs_s) if inputs_s else min(outputs_s)
