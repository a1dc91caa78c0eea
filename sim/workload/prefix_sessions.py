r"""Requests whose prompts share prefixes: sessions with a tree of prefixes, and questions about documents.

    system prompt 0 ---- session a: turn 0 ---- turn 1 ---- turn 2
                    \--- session b: turn 0 ---- turn 1

The times of turns do not depend on the engine, as in a recorded trace, so all policies get the same prompts
at the same times and a cache that knows the future can be compared.

In retrieval-augmented generation a prompt has a system prompt, retrieved documents, and a question.

    | system prompt | document 17 | document 3 | document 254 | question |

Popular documents are in many prompts, but a prefix cache finds a document only behind the same tokens: with
the documents in order of relevance, which is random here, two prompts with the same documents mostly share
only the system prompt. `order: popularity` sorts them, which a service may do to raise its hit rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import numpy as np

from policies.core.request import Segment
from sim.workload.arrivals import ArrivalProcess, ClosedLoop
from sim.workload.base import Source
from sim.workload.chunks import TableSource
from sim.workload.distributions import (
    MAX_TOKENS,
    Distribution,
    FloatArray,
    IntArray,
    require_at_most,
    require_counts,
    require_not_negative,
    require_positive,
    stream,
    whole_numbers,
    zipf_draws,
)
from sim.workload.sessions import begin_s, in_a_loop, require_number_in_a_loop

MAX_TURNS = 10_000
MAX_SYSTEM_PROMPTS = 1_000_000
MAX_SESSIONS = 10_000_000
"""Limit of the sessions of a run; each of their prompts takes about 100 bytes."""

Numbers = TypeVar("Numbers", FloatArray, IntArray)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixSessions:
    """Sessions that begin according to `arrivals`; the traffic consists of their requests in duration_s.

    A session draws one of num_system_prompts system prompts, the k-th most popular with weight
    k^-system_prompt_skew. Its first prompt adds first_tokens to it, and each later prompt adds turn_tokens
    (the last output and the new message) to the one before, gap_s seconds later. Sessions also begin in the
    running_s seconds before the traffic, so that the mix of turns is the same from the start.

    In a closed loop each user has one session at a time; its turns keep their gaps regardless of the engine.
    max_requests must then be set: it is the number of turns of all sessions, which begin in duration_s;
    running_s is not used.
    """

    arrivals: ArrivalProcess | ClosedLoop
    turns: Distribution
    first_tokens: Distribution
    turn_tokens: Distribution
    output_tokens: Distribution
    gap_s: Distribution
    system_prompt_tokens: Distribution
    duration_s: float
    num_system_prompts: int = 1
    system_prompt_skew: float = 1.0
    running_s: float = 3600.0
    max_requests: int | None = None
    patience_s: float | None = None

    def __post_init__(self) -> None:
        require_positive(self, "duration_s", "num_system_prompts", "max_requests", "patience_s")
        require_at_most(self, MAX_SYSTEM_PROMPTS, "num_system_prompts")
        require_not_negative(self, "running_s", "system_prompt_skew")
        require_counts(self, MAX_TURNS, "turns", "turns")
        names = ("first_tokens", "turn_tokens", "output_tokens", "system_prompt_tokens")
        require_counts(self, MAX_TOKENS, "tokens", *names)
        require_number_in_a_loop(self, "max_requests")
        if isinstance(self.arrivals, ClosedLoop):
            require_at_most(self, MAX_SESSIONS, "max_requests")

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the requests of the sessions in [0, duration_s), in order of time."""
        start_s = self._begins_s(seed)
        z_S = stream(seed, "sessions/turns").standard_normal(len(start_s))
        num_turns = whole_numbers(self.turns, z_S, MAX_TURNS)
        first_T = np.cumsum(num_turns) - num_turns  # row of each session's first turn
        session_T = np.repeat(np.arange(len(start_s)), num_turns)
        z_T3 = stream(seed, "sessions/said").standard_normal((len(session_T), 3))
        is_first = np.zeros(len(session_T), np.bool_)
        is_first[first_T] = True
        added_T: IntArray = np.where(
            is_first,
            whole_numbers(self.first_tokens, z_T3[:, 0]),
            whole_numbers(self.turn_tokens, z_T3[:, 0]),
        )
        wait_T = np.where(is_first, 0.0, self.gap_s.from_normal(z_T3[:, 1]))
        time_T = start_s[session_T] + _sums_within(wait_T, first_T, num_turns)
        system_tokens = whole_numbers(
            self.system_prompt_tokens, stream(seed, "system_prompts").standard_normal(self.num_system_prompts)
        )
        system_S = zipf_draws(
            stream(seed, "system_prompt_of"), self.num_system_prompts, self.system_prompt_skew, len(start_s)
        )
        prompt_T: IntArray = system_tokens[system_S][session_T] + _sums_within(added_T, first_T, num_turns)
        rows = np.arange(len(time_T))[: self.max_requests]  # of a closed loop: session after session
        if not isinstance(self.arrivals, ClosedLoop):
            inside = np.flatnonzero((time_T >= 0) & (time_T < self.duration_s))
            rows = inside[np.argsort(time_T[inside], kind="stable")][: self.max_requests]
        if not len(rows):
            raise ValueError(f"duration_s={self.duration_s}: must be longer; no request arrives in this time")
        output_T = whole_numbers(self.output_tokens, z_T3[:, 2])

        def segments(row: int, num_tokens: int) -> tuple[Segment, ...]:
            turn = int(rows[row])
            session = int(session_T[turn])
            system = int(system_S[session])
            pieces = [(system, int(system_tokens[system]))]
            turns = range(int(first_T[session]), turn + 1)
            pieces += [(self.num_system_prompts + t, int(added_T[t])) for t in turns]
            return cut_segments(pieces, num_tokens)

        sessions = TableSource.clipped(
            arrival_s=time_T[rows],
            prompt_tokens=prompt_T[rows],
            output_tokens=output_T[rows],
            max_model_len=max_model_len,
            segments=segments,
            patience_s=self.patience_s,
            session_ids=session_T[rows],
        )
        return in_a_loop(sessions, self.arrivals, seed=seed, duration_s=self.duration_s)

    def _begins_s(self, seed: int) -> FloatArray:
        """Returns the start of each session, in seconds from the start of the traffic; 0 in a closed loop."""
        if isinstance(self.arrivals, ClosedLoop):
            assert self.max_requests is not None, "checked by require_number_in_a_loop"
            return np.zeros(self.max_requests)  # enough, as each has a turn
        span_s = self.running_s + self.duration_s
        start_s = self.arrivals.times_s(stream(seed, "sessions"), num_requests=None, duration_s=span_s)
        if len(start_s) > MAX_SESSIONS:
            raise ValueError(
                f"duration_s={self.duration_s}, running_s={self.running_s}: {len(start_s):,} sessions begin "
                f"in it; must be at most {MAX_SESSIONS:,}, as they are drawn at once; lower the rate or "
                "the times"
            )
        return start_s - self.running_s


def cut_segments(pieces: list[tuple[int, int]], num_tokens: int) -> tuple[Segment, ...]:
    """Returns the segments (content id, tokens) of the first num_tokens tokens."""
    kept, left = [], num_tokens
    for content_id, length in pieces:
        if left <= 0:
            break
        kept.append(Segment(content_id, min(length, left)))
        left -= length
    return tuple(kept)


def _sums_within(values_T: Numbers, first_T: IntArray, num_turns: IntArray) -> Numbers:
    """Sums the values of each session up to and including each turn."""
    total_T = np.cumsum(values_T)
    before_T = np.repeat(total_T[first_T] - values_T[first_T], num_turns)
    return total_T - before_T


MAX_DOCUMENTS = 10_000
"""Limit of the documents; each question draws a number for each of them."""
ROWS_AT_ONCE = 256  # questions drawn at once; a change of this number does not change the draws


@dataclass(frozen=True, kw_only=True, slots=True)
class Rag:
    """Questions that arrive according to `arrivals`, each with documents_per_question different documents.

    The k-th most popular of num_documents documents is drawn with weight k^-document_skew. num_requests and
    duration_s both limit the traffic; at least one must be set.
    """

    task: ClassVar[str] = "rag"
    """Task of the requests, for published rates of drafts."""

    arrivals: ArrivalProcess | ClosedLoop
    system_prompt_tokens: Distribution
    document_tokens: Distribution
    question_tokens: Distribution
    output_tokens: Distribution
    num_documents: int = 1000
    document_skew: float = 1.0
    documents_per_question: int = 4
    order: Literal["relevance", "popularity"] = "relevance"
    num_requests: int | None = None
    duration_s: float | None = None
    patience_s: float | None = None

    def __post_init__(self) -> None:
        require_positive(self, "num_requests", "duration_s", "patience_s")
        require_not_negative(self, "document_skew")
        names = ("system_prompt_tokens", "document_tokens", "question_tokens", "output_tokens")
        require_counts(self, MAX_TOKENS, "tokens", *names)
        if self.num_requests is None and self.duration_s is None:
            raise ValueError("num_requests=null, duration_s=null: at least one must be set")
        if not 1 <= self.num_documents <= MAX_DOCUMENTS:
            raise ValueError(f"num_documents={self.num_documents}: must be >= 1 and <= {MAX_DOCUMENTS:,}")
        if not 1 <= self.documents_per_question <= self.num_documents:
            raise ValueError(
                f"documents_per_question={self.documents_per_question}: must be >= 1 and <= "
                f"num_documents={self.num_documents}"
            )
        require_number_in_a_loop(self, "num_requests")

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the questions. Content id 0 is the system prompt, 1 + d document d, then the questions."""
        arrival_s = begin_s(
            self.arrivals, seed=seed, num_sessions=self.num_requests, duration_s=self.duration_s
        )
        if not len(arrival_s):
            raise ValueError(f"duration_s={self.duration_s}: must be longer; no request arrives in this time")
        z_D = stream(seed, "rag/documents").standard_normal(self.num_documents)
        document_tokens = whole_numbers(self.document_tokens, z_D)
        system_tokens = int(
            whole_numbers(self.system_prompt_tokens, stream(seed, "rag/system").standard_normal(1))[0]
        )
        found_RK = self._retrieved(seed, len(arrival_s))
        z_R2 = stream(seed, "rag/questions").standard_normal((len(arrival_s), 2))
        question_R = whole_numbers(self.question_tokens, z_R2[:, 0])

        def segments(row: int, num_tokens: int) -> tuple[Segment, ...]:
            documents = [(1 + d, int(document_tokens[d])) for d in found_RK[row].tolist()]
            question = (1 + self.num_documents + row, int(question_R[row]))
            return cut_segments([(0, system_tokens), *documents, question], num_tokens)

        questions = TableSource.clipped(
            arrival_s=arrival_s,
            prompt_tokens=system_tokens + document_tokens[found_RK].sum(axis=1) + question_R,
            output_tokens=whole_numbers(self.output_tokens, z_R2[:, 1]),
            max_model_len=max_model_len,
            segments=segments,
            patience_s=self.patience_s,
        )
        return in_a_loop(questions, self.arrivals, seed=seed, duration_s=self.duration_s)

    def _retrieved(self, seed: int, count: int) -> IntArray:
        """Draws the different documents of each question [R, K], in the order of the prompt.

        The K largest of log weight + Gumbel noise, in falling order, are draws without replacement (Yellott,
        Journal of Mathematical Psychology 1977).
        """
        rng = stream(seed, "rag/retrieved")
        log_weight_D = -self.document_skew * np.log(np.arange(1.0, self.num_documents + 1))
        found_RK = np.empty((count, self.documents_per_question), np.int64)
        for start in range(0, count, ROWS_AT_ONCE):
            rows = slice(start, min(start + ROWS_AT_ONCE, count))
            noise = rng.gumbel(size=(rows.stop - rows.start, self.num_documents))
            found_RK[rows] = np.argsort(-(log_weight_D + noise), axis=1)[:, : self.documents_per_question]
        return np.sort(found_RK, axis=1) if self.order == "popularity" else found_RK
