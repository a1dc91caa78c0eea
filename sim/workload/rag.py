"""Retrieval-augmented generation: prompts of a system prompt, retrieved documents, and a question.

    | system prompt | document 17 | document 3 | document 254 | question |

Popular documents are in many prompts, but a prefix cache finds a document only behind the same tokens: with
the documents in order of relevance, which is random here, two prompts with the same documents mostly share
only the system prompt. `order: popularity` sorts them, which a service may do to raise its hit rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from policies.core.request import Segment
from sim.workload.arrivals import ArrivalProcess, ClosedLoop
from sim.workload.base import Source
from sim.workload.chunks import TableSource
from sim.workload.distributions import (
    MAX_TOKENS,
    Distribution,
    IntArray,
    require_counts,
    require_not_negative,
    require_positive,
    stream,
    whole_numbers,
)
from sim.workload.prefix_sessions import cut_segments
from sim.workload.sessions import begin_s, in_a_loop, require_number_in_a_loop

MAX_DOCUMENTS = 10_000
"""Limit of the documents; each question draws a number for each of them."""
ROWS_AT_ONCE = 256  # questions drawn at once; a change of this number does not change the draws


@dataclass(frozen=True, kw_only=True, slots=True)
class Rag:
    """Questions that arrive by `arrivals`, each with documents_per_question different documents.

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
