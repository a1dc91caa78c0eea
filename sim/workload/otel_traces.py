"""Reads OpenTelemetry traces of generative AI: spans with `gen_ai.usage.*`, in OTLP JSON or in lists."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Any

from sim.workload.trace_columns import MAX_UNIX_S, Columns, shown
from sim.workload.trace_tables import JsonElements, Record
from sim.workload.traces import READY, Trace

INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
OPERATION, CONVERSATION = "gen_ai.operation.name", "gen_ai.conversation.id"
MODELS = ("gen_ai.request.model", "gen_ai.response.model")
TRACE, SPAN = ("traceId", "trace_id"), ("spanId", "span_id")
PARENT = ("parentSpanId", "parent_span_id", "parent_id")
START = ("startTimeUnixNano", "start_time_unix_nano", "start_time", "startTime")
END = ("endTimeUnixNano", "end_time_unix_nano", "end_time", "endTime")
CALLS = ("chat", "text_completion", "generate_content", "completion", "responses")
"""Operations that are one call of a model; an agent's span has the sum of its calls."""
WRAPS = "contains the call of its child span"
WANTED = "spans: resourceSpans of OTLP JSON, or an object with a list spans"
OBJECTS = JsonElements(WANTED)
NS_RULE = "ns since 1970, or a date such as 2026-02-25T10:00:00.5Z"


@dataclass(frozen=True, kw_only=True, slots=True)
class OtelTrace(Trace):
    """Spans of calls of a model: start time, gen_ai.usage.input_tokens and output_tokens.

    The session of a call is its gen_ai.conversation.id, otherwise its trace. Spans of tools and agents are
    not calls. If a call is within another span that counts the same tokens, only the inner one is replayed.
    Spans may be in any order; the earliest call is at 0 s. A trace must lie within one object of the file.
    """

    table = OBJECTS
    times = READY
    has_any_order = True
    note = (
        "0 s of the run is the first call, {start}. The calls of a trace are a session, at their recorded "
        "times; spans do not say what their prompts share, so no prefix cache finds them."
    )
    nothing = f": expected spans of calls with {INPUT[0]}"
    columns = Columns(
        arrival="start time",
        prompt=INPUT[0],
        output=OUTPUT[0],
        empty="no token counts, or no output",
        session=CONVERSATION,
        left_out="left out",
    )

    def records(self, found: Iterator[Record]) -> Iterator[Record]:
        """Yields the calls in the order of the file."""
        number = count(1)
        for element in found:
            calls = [span for span in _spans(element) if span.is_call]
            inside = _wrappers(calls)
            for span in calls:
                given = span.attributes
                span.number = next(number)
                span.values = {
                    "start time": span.start_ns / 1e9,
                    INPUT[0]: _given(given, *INPUT) or 0,
                    OUTPUT[0]: _given(given, *OUTPUT) or 0,
                    CONVERSATION: str(given.get(CONVERSATION) or span.trace),
                    "left out": WRAPS if (span.trace, span.id) in inside else "",
                }
                yield span

    def column_names(self) -> Iterable[str]:
        """Returns the attributes of the first object of the file that name several models."""
        spans = _spans(next(OBJECTS.records(self.path)))
        named = {name: {str(span.attributes.get(name)) for span in spans} - {"None"} for name in MODELS}
        return [name for name, values in named.items() if len(values) > 1]


class Span(Record):
    """The needed part of a span; times in ns since 1970."""

    is_text = True  # OTLP has whole numbers as texts

    def __init__(self, element: Record, place: int, found: dict[str, Any]) -> None:
        """Reads a span of an object of the file. Raises ValueError."""
        super().__init__(element.path, place, {})
        self.place = f"{element.path}: element {element.number}: span {place}"
        self.attributes = self._attributes(found.get("attributes", {}))
        context = found.get("context")
        names = found | context if isinstance(context, dict) else found
        self.trace = str(_given(names, *TRACE) or f"element {element.number}")
        self.id = str(_given(names, *SPAN) or f"span {element.number}.{place}")
        self.parent = str(_given(names, *PARENT) or "")
        self.start_ns = self._time_ns("start time", _given(found, *START))
        end = _given(found, *END)
        self.end_ns = None if end is None else self._time_ns("end time", end)

    @property
    def is_call(self) -> bool:
        """Returns whether the span is one call of a model."""
        operation = self.attributes.get(OPERATION)
        if operation is not None:
            return str(operation).lower() in CALLS
        return any(name in self.attributes for name in (*INPUT, *OUTPUT))

    def where(self, name: str) -> str:
        """Returns the place of a value, for messages."""
        return f"{self.place}: {name}"

    def _attributes(self, found: Any) -> dict[str, Any]:
        """Returns attributes by name; OTLP has them as a list of keys and typed values."""
        if isinstance(found, dict):
            return found
        if not isinstance(found, list):
            raise self.bad("attributes", "an object or a list", found)
        plain = {}
        for one in found:
            is_pair = isinstance(one, dict) and isinstance(one.get("key"), str)
            if not is_pair or not isinstance(one.get("value"), dict):
                raise self.bad("attributes", "objects with key and value", one)
            plain[one["key"]] = next(iter(one["value"].values()), None)
        return plain

    def _time_ns(self, name: str, found: Any) -> int:
        """Returns a time in ns since 1970, from a number or its text, in ns, or from a date."""
        try:
            if type(found) is int or (isinstance(found, str) and found.isdecimal()):
                time_ns = int(found)
            elif isinstance(found, float) and math.isfinite(found):
                time_ns = round(found * 1e9)  # seconds
            else:
                date = datetime.fromisoformat(str(found))
                date = date if date.tzinfo else date.replace(tzinfo=UTC)
                time_ns = round(date.timestamp() * 1e6) * 1000
        except (ValueError, OverflowError):
            raise self.bad(name, NS_RULE, found) from None
        if not 0 <= time_ns <= MAX_UNIX_S * 1e9:
            raise self.bad(name, NS_RULE, found)
        return time_ns


def _spans(element: Record) -> list[Span]:
    """Returns the spans of an object of the file."""
    found = element.values
    if "resourceSpans" in found:
        scopes = _within(element, [found], "resourceSpans")
        spans = _within(element, scopes, "scopeSpans", "instrumentationLibrarySpans")
        listed = _within(element, spans, "spans")
    elif "spans" in found:
        listed = _within(element, [found], "spans")
    elif "attributes" in found:
        listed = [found]
    else:
        raise ValueError(
            f"{element.path}: element {element.number}: expected {WANTED}, "
            f"found {shown(', '.join(found), 200)}"
        )
    return [Span(element, place, one) for place, one in enumerate(listed)]


def _within(element: Record, owners: list[Any], *names: str) -> list[Any]:
    """Returns the elements of the lists that the owners have under one of the names."""
    found: list[Any] = []
    for owner in owners:
        for name in names:
            inner = owner.get(name, []) if isinstance(owner, dict) else None
            if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
                raise ValueError(f"{element.where(name)}: expected a list of objects")
            found += inner
    return found


def _wrappers(calls: list[Span]) -> set[tuple[str, str]]:
    """Returns the traces and ids of calls that contain another call, so that both count the same tokens."""
    by_id = {(span.trace, span.id): span for span in calls}
    found = set()
    for span in calls:
        parent = by_id.get((span.trace, span.parent))
        if parent is None or parent.end_ns is None or parent is span:
            continue
        if parent.start_ns <= span.start_ns < parent.end_ns:
            found.add((parent.trace, parent.id))
    return found


def _given(found: dict[str, Any], *names: str) -> Any:
    return next((found[name] for name in names if found.get(name) is not None), None)
