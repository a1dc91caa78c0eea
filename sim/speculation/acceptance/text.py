"""Acceptance from token ids: drafts that matching finds in recorded texts, compared with the output.

A draft token is accepted if it equals the recorded output's token, as with greedy decoding. The proposer's
drafts follow from the same texts (`policies.speculation.matching`), so no random number is drawn. A request
is found in the file by the content of its prompt, which `workload=token_ids_jsonl` reads from the same file.

Suffix decoding also looks at earlier answers. The answers of earlier requests in the file count as complete,
so verdicts do not depend on the times at which answers are generated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from policies.speculation import Proposer
from policies.speculation.matching import SEPARATOR, SuffixRules, Text, ngram_matches
from policies.speculation.proposers import Ngram, Suffix
from sim.speculation import Acceptance, Verdicts
from sim.workload.token_ids import TokenIds, kept_token_ids
from sim.workload.trace_files import require_file


@dataclass(frozen=True, kw_only=True, slots=True)
class TextAcceptance:
    """Accepts the draft tokens that equal those of the recorded output."""

    path: Path
    """JSON lines with prompt_token_ids and output_token_ids: the file of workload=token_ids_jsonl."""
    otherwise: Acceptance
    """Acceptance of requests that are not in the file, or whose recorded output is shorter."""
    _texts: Texts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser())
        require_file(self.path)
        object.__setattr__(self, "_texts", Texts(kept_token_ids(self.path)))

    def check(self, proposer: Proposer) -> None:
        """Raises ValueError for a proposer that does not match token ids."""
        if not isinstance(proposer, Ngram | Suffix):
            raise ValueError(
                f"path={self.path}: only speculation=ngram and suffix draft from texts, and the proposer is "
                f"{proposer.method}; choose another acceptance, such as acceptance=iid"
            )
        self.otherwise.check(proposer)

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns the verdicts on drafts that begin at output positions 0 to num_positions - 1."""
        row = self._texts.row_of(request, num_positions)
        if row is None:
            return self.otherwise.verdicts(request, seed, num_positions, proposer)
        if isinstance(proposer, Ngram):
            return self._texts.of_ngrams(row, num_positions, proposer)
        assert isinstance(proposer, Suffix), "check refuses other proposers"
        return self._texts.of_suffixes(row, num_positions, proposer)


class Texts:
    """The recorded texts, and the answers in the order of the file for suffix decoding."""

    def __init__(self, texts: list[TokenIds]) -> None:
        self._texts = texts
        self._rows: dict[tuple[int, ...], list[int]] = {}
        for row, text in enumerate(texts):
            self._rows.setdefault(text.content_ids(), []).append(row)
        lengths = [len(text.output) + 1 for text in texts]  # with the separator
        self._answer_at = np.concatenate([[0], np.cumsum(lengths)])
        self._answers: Text | None = None

    def row_of(self, request: Request, num_positions: int) -> int | None:
        """Returns the row of a request's text; None: it has no text, or a shorter output."""
        content = tuple(segment.content_id for segment in request.prompt.segments)
        rows = self._rows.get(content, [])
        row = request.request_id if request.request_id in rows else next(iter(rows), None)
        if row is None or num_positions > len(self._texts[row].output):
            return None
        return row if request.prompt.num_tokens == len(self._texts[row].prompt) else None

    def of_ngrams(self, row: int, num_positions: int, proposer: Ngram) -> Verdicts:
        """Compares the drafts of prompt lookup with the output."""
        prompt, output = self._texts[row]
        tokens = np.concatenate([np.array(proposer.reference, np.int64), prompt, output])
        first = len(tokens) - len(output)
        starts, limits = ngram_matches(tokens, first, proposer.min_ngram, proposer.prompt_lookup_max)
        proposed = np.minimum(limits, proposer.num_speculative_tokens)
        places = np.arange(proposer.num_speculative_tokens)
        ahead = np.concatenate([tokens, np.full(len(places), SEPARATOR)])
        ends = np.arange(first, len(tokens))
        equal_PK = ahead[starts[:, None] + places] == ahead[ends[:, None] + places]
        equal_PK &= (places < proposed[:, None]) & (ends[:, None] + places < len(tokens))
        accepted = np.logical_and.accumulate(equal_PK, axis=1).sum(axis=1)
        return _verdicts(accepted[:num_positions], proposed[:num_positions])

    def of_suffixes(self, row: int, num_positions: int, proposer: Suffix) -> Verdicts:
        """Compares the drafts of suffix decoding with the output."""
        text, (begin, end) = self._texts[row], self._earlier_answers(row, proposer)
        answers, own = self._indexed_answers(), Text()
        prompt, output = text.prompt.tolist(), text.output.tolist()
        own.extend(prompt)
        depth, most = proposer.suffix_decoding_max_tree_depth, proposer.num_speculative_tokens
        rules = SuffixRules(
            depth, proposer.suffix_decoding_max_spec_factor, proposer.suffix_decoding_min_token_prob
        )
        accepted, proposed = np.zeros(num_positions, np.int64), np.zeros(num_positions, np.int64)
        for position in range(num_positions):
            if position:
                own.extend([output[position - 1]])
            context = (prompt[max(0, len(prompt) + position - depth) :] + output[:position])[-depth:]
            draft = own.draft(context, most, rules)
            if proposer.suffix_decoding_max_cached_requests:
                of_answers = answers.draft(context, most, rules, begin, end + position)
                draft = max(draft, of_answers, key=lambda found: found.score)  # the first of equal ones
            proposed[position] = len(draft.tokens)
            pairs = zip(draft.tokens, output[position:], strict=False)
            accepted[position] = next(
                (place for place, (token, true) in enumerate(pairs) if token != true),
                min(len(draft.tokens), len(output) - position),
            )
        return _verdicts(accepted, proposed)

    def _earlier_answers(self, row: int, proposer: Suffix) -> tuple[int, int]:
        """Returns the range of the cached answers when a request begins to answer; its own answer follows."""
        num_cached = proposer.suffix_decoding_max_cached_requests  # its own answer is one of them
        begin, end = self._answer_at[[max(0, row - num_cached + 1), row]]
        return int(begin), int(end)

    def _indexed_answers(self) -> Text:
        if self._answers is None:
            self._answers = Text()
            for text in self._texts:
                self._answers.extend([*text.output.tolist(), SEPARATOR])
        return self._answers


def _verdicts(accepted: NDArray[np.int64], proposed: NDArray[np.int64]) -> Verdicts:
    return Verdicts(accepted.astype(np.uint8), proposed.astype(np.uint8))
