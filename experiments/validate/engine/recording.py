"""Records the steps of a real engine: enough to replay every decision, and every time that a user saw.

A recording is a folder:

    recording.json       the engine: its policies, sizes and clock, with a digest of them
    steps.parquet        one row per launch: times of its plan and commit, its plan's digest and shape
    requests.parquet     the simulator's columns, and `known_s`: when the policies learnt of a request
    tokens.parquet       the time at which a user saw each token
    events.jsonl         inputs of the core, in order: requests, ends, calls of the policies without work

Lines of events.jsonl contain the step before which they happened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwmodels.checks import read_text
from hwmodels.levels.table_files import read_parquet
from policies.core.engine import EngineCore
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.request import Branching, Prompt, Request, Segment
from policies.core.sequence import FinishReason, Sequence
from policies.speculation.engine.drafts import DraftPlan
from sim.engine.iteration_times import shape_of
from sim.records.requests import NAN, RequestLog, Status
from sim.report.files import write_whole
from sim.speculation.log import DRAFT_WORK_COLUMNS, first_shape

if TYPE_CHECKING:
    from realengine.serving.answer import Answer


class Step(NamedTuple):
    """One launch; the fields from decode_seqs on are those of IterationShape, of its first iteration.

    Those from draft_tokens on are its `DraftWork`.

    start_s: the policies were called; end_s: the plan was committed; read_s: its tokens were read, NaN if
    never. compute_s: time of the executor, NaN if not measured. num_left: requests unfinished at the commit.
    plan: see `in_words`.
    """

    step: int
    start_s: float
    end_s: float
    read_s: float
    compute_s: float
    num_left: int
    num_iterations: int
    digest: str
    plan: str
    running: int
    waiting: int
    kv_blocks_used: int
    kv_tokens_used: int
    preempted: int
    decode_seqs: int
    decode_context_tokens: int
    prefill_seqs: int
    prefill_tokens: int
    prefill_pairs: int
    prefill_context_tokens: int
    sampled_seqs: int
    draft_tokens: int = 0
    draft_pairs: int = 0
    draft_seqs: int = 0
    draft_steps: int = 0
    drafted_tokens: int = 0


KINDS = ("enter", "leave", "wait", "end", "parents", "pass", "drafted")


@dataclass(slots=True)
class Event:
    """An input of the core before a step, or with its commit.

    kind: enter (value: a request), leave (a reason), wait; with the step's commit: end, parents, pass,
    drafted. wait: the policies were called and had no work; value: seconds after which they want to be called
    again, 0 if KV has arrived that they waited for, None: after the next event from outside. pass: draft
    tokens of a request were verified; value: the output tokens that it had, its draft tokens, the accepted
    ones of each iteration. drafted: value: the draft tokens that were found for a request's next pass.
    """

    step: int
    kind: str
    now_s: float
    request_id: int = -1
    value: Any = None


@dataclass(slots=True)
class Recording:
    """Recording of a run. engine: as written by `engine_run.run_on_engine`. is_whole: it is not truncated."""

    engine: dict[str, Any]
    steps: pd.DataFrame
    requests: pd.DataFrame
    events: list[Event]
    token_times_s: dict[int, list[float]] = field(default_factory=dict)
    is_whole: bool = True

    def save(self, folder: Path) -> None:
        """Writes the recording to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "steps.parquet", self.steps.to_parquet())
        write_whole(folder / "requests.parquet", self.requests.to_parquet())
        ids = [request_id for request_id, times_s in self.token_times_s.items() for _ in times_s]
        seen_s = [time_s for times_s in self.token_times_s.values() for time_s in times_s]
        tokens = pd.DataFrame({"request_id": ids, "time_s": seen_s})
        write_whole(folder / "tokens.parquet", tokens.to_parquet())
        about = {"engine": self.engine, "num_steps": len(self.steps), "num_events": len(self.events)}
        rows = ([e.step, e.kind, e.now_s, e.request_id, _plain(e.value)] for e in self.events)
        write_whole(folder / "events.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
        write_whole(folder / "recording.json", json.dumps(about, indent=2) + "\n")


class Recorder:
    """Observes one engine and builds its `recording`.

    compute_s: called once per step, returns the executor's seconds since the last call.
    """

    def __init__(self, core: EngineCore, compute_s: Callable[[], float] = lambda: NAN) -> None:
        self._core = core
        self._compute_s = compute_s
        self._steps: list[Step] = []
        self._open: Step | None = None  # planned, not yet committed
        self._plan: StepPlan | None = None  # of the open step
        self._drafts: DraftPlan | None = None  # of the open step; None: it does not speculate
        self._late_step = 0  # the last step that was committed before it was known what it accepted
        self._events: list[Event] = []
        self._requests = RequestLog()
        self._read_s: list[float] = []
        self._known_s: dict[int, float] = {}
        self._times_s: dict[int, list[float]] = {}

    def entered(self, seq: Sequence, now_s: float) -> None:
        request = seq.request
        self._requests.arrive(request)
        self._requests.replica[request.request_id] = 0
        self._known_s[request.request_id] = now_s
        self._times_s[request.request_id] = []
        self._note("enter", now_s, request.request_id, request)

    def planned(self, plan: StepPlan, num_iterations: int, now_s: float) -> None:
        core = self._core
        self._plan = plan
        self._drafts = plan.drafts if isinstance(plan.drafts, DraftPlan) else None
        shape = shape_of(plan, 0) if self._drafts is None else first_shape(plan, self._drafts)
        for seq in plan.admitted:
            if np.isnan(self._requests.scheduled_s[seq.request_id]):
                self._requests.schedule(seq, now_s)
        for chunk in plan.chunks:
            self._requests.prefill_iterations[chunk.seq.request_id] += num_iterations
        self._open = Step(
            len(self._steps),
            now_s,
            now_s,
            NAN,
            NAN,
            0,
            num_iterations,
            plan.digest(),
            in_words(plan),
            len(core.running),
            core.num_waiting,
            core.block_pool.num_used,
            core.num_tokens_held,
            len(plan.preempted),
            *(int(number) for number in (*shape.counts, *(shape.drafts or ()))),
        )

    def waited(self, now_s: float) -> None:
        core = self._core
        pause_s = 0.0 if core.arrived else core.wake_s - now_s
        self._note("wait", now_s, value=pause_s if pause_s < math.inf else None)

    def committed(self, outcome: StepOutcome, progress: Progress, now_s: float) -> None:
        for seq in outcome.ended:
            self._note("end", now_s, seq.request_id)
        for request_id, going in outcome.parents.items():
            self._note("parents", now_s, request_id, going)
        if self._drafts is not None and outcome.accepted is None and self._drafts.seqs:
            self._late_step = len(self._steps)
        elif self._drafts is not None and self._drafts.seqs:
            self._note_passes(self._drafts, outcome.accepted, len(self._steps), now_s)
        if self._drafts is not None and outcome.proposed is not None:
            for seq, num_drafts in zip(self._drafts.next_seqs, outcome.proposed.tolist(), strict=True):
                self._note("drafted", now_s, seq.request_id, num_drafts)
        assert self._open is not None
        compute_s, num_left = self._compute_s(), self._core.num_unfinished
        self._steps.append(self._open._replace(end_s=now_s, compute_s=compute_s, num_left=num_left))
        _, finished = progress
        for seq in finished:
            self._end(seq, Status.finished, now_s)

    def verified(self, plan: StepPlan, accepted: NDArray[np.int64]) -> None:
        assert isinstance(plan.drafts, DraftPlan)
        if plan.drafts.seqs:
            end_s = self._steps[self._late_step].end_s
            self._note_passes(plan.drafts, accepted[None], self._late_step, end_s)
        if self._open is not None and self._open.step == len(self._steps):
            assert self._plan is not None
            self._open = self._open._replace(digest=self._plan.digest(), plan=in_words(self._plan))

    def left(self, seq: Sequence, reason: FinishReason, now_s: float) -> None:
        self._note("leave", now_s, seq.request_id, reason.name)
        status = Status.finished if reason is FinishReason.stop else Status.aborted
        self._end(seq, status, now_s)

    def read(self, now_s: float) -> None:
        self._read_s.append(now_s)

    def emitted(self, answer: Answer, num_tokens: int, now_s: float) -> None:
        request_id = answer.request_id
        times_s = self._times_s[request_id]
        if not times_s:
            self._requests.first_token_s[request_id] = now_s
        times_s += [now_s] * num_tokens
        self._requests.last_token_s[request_id] = now_s
        if answer.is_finished:
            self._requests.finished_s[request_id] = now_s
            tokens = [len(output.tokens) for output in answer.outputs]
            self._requests.output_tokens[request_id] = sum(tokens)
            self._requests.longest_tokens[request_id] = max(tokens)

    def recording(self, engine: dict[str, Any]) -> Recording:
        """Returns the recording of the run so far. engine: description of the engine."""
        steps = pd.DataFrame(self._steps, columns=list(Step._fields))
        num_read = min(len(self._read_s), len(steps))
        steps.loc[: num_read - 1, "read_s"] = self._read_s[:num_read]
        requests = self._requests.table().to_pandas()
        requests["known_s"] = [self._known_s[request_id] for request_id in requests["request_id"]]
        events = sorted(self._events, key=lambda event: event.step)  # acceptances may be known late
        return Recording(engine, steps, requests, events, self._times_s)

    def _end(self, seq: Sequence, status: Status, now_s: float) -> None:
        """Ends a request in the table; its tokens may be emitted later, if launches are read late."""
        self._requests.end(seq, status, self._requests.last_token_s[seq.request_id], now_s)

    def _note_passes(self, drafts: DraftPlan, accepted: Any, step: int, now_s: float) -> None:
        """Notes what was accepted in a step: accepted [iterations, sequences of drafts]."""
        rows = zip(drafts.seqs, drafts.num_computed.tolist(), drafts.num_drafts.tolist(), strict=True)
        for (seq, num_computed, num_drafts), own in zip(rows, accepted.T.tolist(), strict=True):
            value = [num_computed + 1 - seq.num_prompt_tokens, num_drafts, *own]
            self._events.append(Event(step, "pass", now_s, seq.request_id, value))

    def _note(self, kind: str, now_s: float, request_id: int = -1, value: Any = None) -> None:
        self._events.append(Event(len(self._steps), kind, now_s, request_id, value))


def in_words(plan: StepPlan) -> str:
    """Describes a plan: tokens by request id, and the preempted requests."""
    preempted = [seq.request_id for seq in plan.preempted]
    return f"tokens by request {plan.tokens_by_request}, preempted {preempted}"


def _plain(value: Any) -> Any:
    """Converts a request to plain data; returns other values as they are."""
    return value._asdict() if isinstance(value, Request) else value


def load(folder: Path) -> Recording:
    """Reads a recording; of a truncated one, its complete prefix, with is_whole false.

    Raises ValueError if it is not a recording or its clock goes backwards.
    """
    try:
        about = json.loads(read_text(folder / "recording.json"))
        engine, num_events, num_whole = about["engine"], about["num_events"], about["num_steps"]
        steps = _with_drafts(read_parquet(folder / "steps.parquet"))[list(Step._fields)]
        requests = read_parquet(folder / "requests.parquet")
        tokens = read_parquet(folder / "tokens.parquet")
        events = list(_events(read_text(folder / "events.jsonl").splitlines()))
    except RecursionError:
        raise ValueError(f"{folder}: not a recording: its JSON nests values too deeply") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: not a recording: {error}") from error
    num_steps = len(steps)
    is_whole = len(events) == num_events and num_steps == num_whole
    if len(events) < num_events:
        last = events[-1].step if events else 0
        num_steps = min(num_steps, last)  # events of the last step may be missing
    if not is_whole:
        events = [event for event in events if event.step < num_steps]
    if not num_steps:
        raise ValueError(f"{folder}: not a recording: no step of it is complete")
    steps = steps.iloc[:num_steps]
    _check_steps(folder, steps)
    try:
        _check_requests(folder, requests, tokens, events)
        if not is_whole:
            requests, tokens = _known_by(steps, requests, tokens)
    except KeyError as error:
        raise ValueError(f"{folder}: not a recording: {error} is missing") from error
    seen_s: dict[int, list[float]] = {}
    for request_id, time_s in zip(tokens["request_id"].tolist(), tokens["time_s"].tolist(), strict=True):
        seen_s.setdefault(request_id, []).append(time_s)
    return Recording(engine, steps, requests, events, seen_s, is_whole)


def _with_drafts(steps: pd.DataFrame) -> pd.DataFrame:
    """Adds the columns of draft tokens to a recording that was made before there were any."""
    return steps.assign(**{name: 0 for name in DRAFT_WORK_COLUMNS if name not in steps})


def _check_steps(folder: Path, steps: pd.DataFrame) -> None:
    times_s = steps[["start_s", "end_s"]].to_numpy(dtype=np.float64).reshape(-1)
    backwards = np.flatnonzero(~(np.diff(times_s) >= 0))
    if len(backwards):
        step = int(backwards[0] + 1) // 2
        raise ValueError(f"{folder}/steps.parquet: step {step}: its time goes backwards or is missing")
    early = np.flatnonzero((steps["read_s"] < steps["start_s"]).to_numpy())
    if len(early):
        raise ValueError(
            f"{folder}/steps.parquet: step {early[0]}: its tokens were read before it was planned"
        )


def _check_requests(folder: Path, requests: pd.DataFrame, tokens: pd.DataFrame, events: list[Event]) -> None:
    entered = [event.request_id for event in events if event.kind == "enter"]
    if requests["request_id"].duplicated().any() or not set(entered) <= set(requests["request_id"]):
        raise ValueError(f"{folder}/requests.parquet: must have one row for each request in events.jsonl")
    order = ["arrival_s", "known_s", "scheduled_s", "first_token_s", "last_token_s", "finished_s"]
    times_s = requests[order].ffill(axis=1).to_numpy(dtype=np.float64)
    wrong = np.flatnonzero((np.diff(times_s, axis=1) < 0).any(axis=1))
    if len(wrong):
        request_id = requests["request_id"].iloc[wrong[0]]
        raise ValueError(f"{folder}/requests.parquet: request {request_id}: its times are out of order")
    if (tokens.groupby("request_id")["time_s"].diff() < 0).any():
        raise ValueError(f"{folder}/tokens.parquet: its times go backwards")


def _known_by(
    steps: pd.DataFrame, requests: pd.DataFrame, tokens: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns requests and tokens as known at the commit of the last step."""
    until_s = steps["end_s"].max() if len(steps) else -math.inf
    known = requests[requests["known_s"] <= until_s].copy()
    is_open = ~(known["finished_s"] <= until_s)
    seen = tokens[tokens["time_s"] <= until_s]
    num_tokens = seen.groupby("request_id").size().reindex(known["request_id"], fill_value=0).to_numpy()
    known.loc[is_open, "status"] = Status.unfinished.name
    known.loc[is_open, "reason"] = ""
    known.loc[is_open, "longest_tokens"] = num_tokens[is_open]
    known.loc[is_open, "output_tokens"] = (num_tokens * known["samples"])[is_open]
    for column in ("scheduled_s", "first_token_s", "last_token_s", "finished_s"):
        known[column] = known[column].where(known[column] <= until_s)
    return known, seen


def _events(lines: list[str]) -> Iterator[Event]:
    for line in lines:
        try:
            step, kind, now_s, request_id, value = json.loads(line)
        except ValueError:
            return  # truncated: later events are lost
        if kind not in KINDS:
            raise ValueError(f"events.jsonl: {kind}: must be one of {', '.join(KINDS)}")
        if kind == "enter":
            value = _request(value)
        elif kind == "parents":
            value = tuple(value)
        yield Event(step, kind, now_s, request_id, value)


def _request(fields: dict[str, Any]) -> Request:
    num_tokens, segments, num_pinned = fields["prompt"]
    prompt = Prompt(num_tokens, tuple(Segment(*segment) for segment in segments), num_pinned)
    branching = None if fields["branching"] is None else Branching(*fields["branching"])
    return Request(**fields | {"prompt": prompt, "branching": branching})
