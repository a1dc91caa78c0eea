"""Reads OpenTelemetry traces of generative AI: spans with `gen_ai.usage.*`, in OTLP JSON or in lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, NamedTuple

from sim.workload.checks import MAX_ARRIVAL_S
from sim.workload.json_elements import objects_in
from sim.workload.trace_blocks import Block, TraceRow, blocks_of_rows
from sim.workload.trace_files import shown
from sim.workload.traces import Trace
from sim.workload.values import MAX_UNIX_S, tokens, tokens_rule

INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
OPERATION, CONVERSATION = "gen_ai.operation.name", "gen_ai.conversation.id"
CALLS = ("chat", "text_completion", "generate_content", "completion", "responses")
"""Operations that are one call of a model; an agent's span has the sum of its calls."""
NO_TOKENS, WRAPS = "no token counts, or no output", "contains the call of its child span"
WANTED = "spans: resourceSpans of OTLP JSON, or an object with a list spans"
NO_CONTENTS = (
    "The calls of a trace are a session, at their recorded times; spans do not say what their prompts share, "
    "so no prefix cache finds them."
)


MODELS = ("gen_ai.request.model", "gen_ai.response.model")


class _Span(NamedTuple):
    """A span as far as it is needed; times in ns since 1970."""

    element: int
    place: int
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int | None
    attributes: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class OtelTrace(Trace):
    """Spans of calls of a model: start time, gen_ai.usage.input_tokens and output_tokens.

    The session of a call is its gen_ai.conversation.id, otherwise its trace. Spans of tools and of agents are
    no calls, and of a call within another span that counts the same tokens only the inner one is replayed.
    Spans may be in any order; the earliest call is at 0 s. A trace must lie within one object of the file.
    """

    has_any_order: ClassVar[bool] = True

    def rows(self) -> Iterator[TraceRow]:
        """Yields the calls in the order of the file, at Unix times."""
        sessions: dict[str, int] = {}
        number = 0
        for element, found in objects_in(self.path, WANTED):
            spans = [
                self._span(element, place, one) for place, one in enumerate(self._listed(element, found))
            ]
            calls = [one for one in spans if _is_call(one)]
            inside = _wrappers(calls)
            for span in calls:
                number += 1
                yield self._row(number, span, sessions, (span.trace, span.id) in inside)
        if not number:
            raise ValueError(f"{self.path}: expected spans of calls with {INPUT[0]}, found none")

    def column_names(self) -> Iterable[str]:
        """Returns the attributes of the first object of the file that name models."""
        _, found = next(objects_in(self.path, WANTED))
        spans = [self._span(1, place, one) for place, one in enumerate(self._listed(1, found))]
        named = {name: {span.attributes.get(name) for span in spans} - {None} for name in MODELS}
        return [name for name, values in named.items() if len(values) > 1]

    def finished(self, blocks: Callable[[], Iterator[Block]]) -> Iterator[Block]:
        return blocks_of_rows(self._since_first(blocks))

    def _since_first(self, blocks: Callable[[], Iterator[Block]]) -> Iterator[TraceRow]:
        """Yields the calls at seconds after the first, unless the window begins at a Unix time."""
        zero_s = 0.0 if (self.start_s or 0.0) >= MAX_ARRIVAL_S else None
        for block in blocks():
            for row in _rows_of(block):
                if zero_s is None:
                    zero_s = row.arrival_s
                    start = f"{datetime.fromtimestamp(zero_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
                    row = row._replace(remark=f"0 s of the run is the first call, {start}. {NO_CONTENTS}")
                if row.arrival_s - zero_s > MAX_ARRIVAL_S and zero_s:
                    raise ValueError(
                        f"{self.path}: call {row.line}: must start at most {MAX_ARRIVAL_S:g} s after the "
                        f"first one, starts {row.arrival_s - zero_s:,.0f} s after it"
                    )
                yield row._replace(arrival_s=row.arrival_s - zero_s)

    def _listed(self, element: int, found: dict[str, Any]) -> list[Any]:
        """Returns the spans of an object of the file."""
        if "resourceSpans" in found:
            scopes = self._within(element, [found], "resourceSpans")
            spans = self._within(element, scopes, "scopeSpans", "instrumentationLibrarySpans")
            return self._within(element, spans, "spans")
        if "spans" in found:
            return self._within(element, [found], "spans")
        if "attributes" in found:
            return [found]
        raise ValueError(
            f"{self.path}: element {element}: expected {WANTED}, found {shown(', '.join(found), 200)}"
        )

    def _within(self, element: int, owners: list[Any], *names: str) -> list[Any]:
        """Returns the elements of the lists that the owners have under one of the names."""
        found: list[Any] = []
        for owner in owners:
            for name in names:
                inner = owner.get(name, []) if isinstance(owner, dict) else None
                if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
                    raise ValueError(f"{self.path}: element {element}: {name}: expected a list of objects")
                found += inner
        return found

    def _span(self, element: int, place: int, found: dict[str, Any]) -> _Span:
        where = f"{self.path}: element {element}: span {place}"
        attributes = _attributes(where, found.get("attributes", {}))
        start = _given(found, "startTimeUnixNano", "start_time_unix_nano", "start_time", "startTime")
        end = _given(found, "endTimeUnixNano", "end_time_unix_nano", "end_time", "endTime")
        context = found.get("context")
        names = found | context if isinstance(context, dict) else found
        return _Span(
            element,
            place,
            str(_given(names, "traceId", "trace_id") or f"element {element}"),
            str(_given(names, "spanId", "span_id") or f"span {element}.{place}"),
            str(_given(names, "parentSpanId", "parent_span_id", "parent_id") or ""),
            _time_ns(where, "start time", start),
            None if end is None else _time_ns(where, "end time", end),
            attributes,
        )

    def _row(self, number: int, span: _Span, sessions: dict[str, int], wraps: bool) -> TraceRow:
        session = str(span.attributes.get(CONVERSATION, span.trace))
        lengths = [self._tokens(span, names) for names in (INPUT, OUTPUT)]
        reason = WRAPS if wraps else "" if all(lengths) else NO_TOKENS
        return TraceRow(
            number,
            span.start_ns / 1e9,
            lengths[0],
            lengths[1],
            skip_reason=reason,
            session_id=sessions.setdefault(session, len(sessions)),
        )

    def _tokens(self, span: _Span, names: tuple[str, ...]) -> int:
        """Returns a number of tokens; 0 if the span does not have it."""
        found = _given(span.attributes, *names)
        try:
            return 0 if found is None else tokens(found, 0)
        except ValueError:
            raise ValueError(
                f"{self.path}: element {span.element}: span {span.place}: {names[0]}: expected "
                f"{tokens_rule(0)}, found {shown(found)}"
            ) from None


def _rows_of(block: Block) -> Iterator[TraceRow]:
    reasons = [""] * len(block) if block.skip_reason is None else block.skip_reason.tolist()
    assert block.session_id is not None
    columns = (block.line, block.arrival_s, block.prompt_tokens, block.output_tokens, block.session_id)
    for row, reason in zip(zip(*(one.tolist() for one in columns), strict=True), reasons, strict=True):
        line, arrival_s, prompt, output, session = row
        yield TraceRow(line, arrival_s, prompt, output, skip_reason=reason, session_id=session)


def _is_call(span: _Span) -> bool:
    operation = span.attributes.get(OPERATION)
    if operation is not None:
        return str(operation).lower() in CALLS
    return any(name in span.attributes for name in (*INPUT, *OUTPUT))


def _wrappers(calls: list[_Span]) -> set[tuple[str, str]]:
    """Returns the traces and ids of calls with a call inside of their time: both count the same tokens."""
    by_id = {(span.trace, span.id): span for span in calls}
    found = set()
    for span in calls:
        parent = by_id.get((span.trace, span.parent))
        if parent is None or parent.end_ns is None or parent is span:
            continue
        if parent.start_ns <= span.start_ns < parent.end_ns:
            found.add((parent.trace, parent.id))
    return found


def _attributes(where: str, found: Any) -> dict[str, Any]:
    """Returns attributes by name; OTLP has them as a list of keys and typed values."""
    if isinstance(found, dict):
        return found
    if not isinstance(found, list):
        raise ValueError(f"{where}: attributes: expected an object or a list, found {shown(found)}")
    plain = {}
    for one in found:
        if (
            not isinstance(one, dict)
            or not isinstance(one.get("key"), str)
            or not isinstance(one.get("value"), dict)
        ):
            raise ValueError(f"{where}: attributes: expected objects with key and value, found {shown(one)}")
        plain[one["key"]] = next(iter(one["value"].values()), None)
    return plain


def _time_ns(where: str, name: str, found: Any) -> int:
    """Returns a time in ns since 1970, from a number or its text, in ns, or from a date."""
    rule = "ns since 1970, or a date such as 2026-02-25T10:00:00.5Z"
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
        raise ValueError(f"{where}: {name}: expected {rule}, found {shown(found)}") from None
    if not 0 <= time_ns <= MAX_UNIX_S * 1e9:
        raise ValueError(f"{where}: {name}: expected {rule}, found {shown(found)}")
    return time_ns


def _given(found: dict[str, Any], *names: str) -> Any:
    return next((found[name] for name in names if found.get(name) is not None), None)
