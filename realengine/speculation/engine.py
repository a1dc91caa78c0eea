"""The serving loop of an engine that speculates: an `Engine` whose sequences get several tokens in a step."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, StepPlan
from policies.core.sequence import FinishReason, Sequence
from policies.speculation.engine.drafts import DraftPlan
from realengine.engine import Engine
from realengine.runner.launch import Launch
from realengine.serving.answer import DraftCounts
from realengine.speculation.guarded import Guarded, ProposerError
from realengine.speculation.host import HostDrafter
from realengine.speculation.runner import DraftRunner


class SpeculatingEngine(Engine):
    """An `Engine` that verifies draft tokens. Its other arguments are those of `Engine`.

    host: drafts on the host, between two steps; None: the device drafts. timeout_s: seconds after which a
    call of a user's drafter ends its request; None: it is one of ours, which needs no guard.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: DraftRunner,
        *,
        host: HostDrafter | None,
        timeout_s: float | None,
        vocab_size: int,
        **settings: Any,
    ) -> None:
        super().__init__(core, runner, vocab_size=vocab_size, **settings)
        assert core.drafts is not None
        self._drafts = core.drafts
        self._draft_length = core.drafts.speculation.draft_length
        self._host = host if host is None or timeout_s is None else Guarded(host, timeout_s, vocab_size)
        self._failed: dict[Sequence, str] = {}  # requests whose proposer has failed in this step
        self._num_places = core.view.max_tokens_per_pass - 1
        self._accepted: list[list[int]] = []  # of the rows of the launch that was read last, by iteration

    @property
    def _drafting_runner(self) -> DraftRunner:
        """The runner, which is another one after a sleep."""
        assert isinstance(self.runner, DraftRunner)
        return self.runner

    @property
    def policies(self) -> dict[str, object]:
        """The policies by their settings' names, for messages."""
        return {**super().policies, "draft_length": self._draft_length}

    def _tokens_of(self, launch: Launch) -> list[list[int]]:
        """Waits for the tokens of each row; those beyond the limit of a request are left out."""
        columns = launch.tokens()
        if self._drafting_runner.pass_times is not None:
            self._drafting_runner.pass_times.read()
        self._accepted = launch.accepted() if columns else []
        num_without = len(columns) - len(launch.num_drafts)  # they complete their prompts
        counts = [*launch.num_drafts, *[0] * num_without]
        rows = zip(launch.rows, columns, counts, self._accepted, strict=True)
        for (seq, _), tokens, num_drafts, accepted in rows:
            answer = self._answer_of.get(seq)
            if answer is None:
                continue
            num_left = seq.max_num_tokens - seq.num_prompt_tokens - len(answer.alive[0].tokens)
            del tokens[num_left:]
            if num_drafts:
                if answer.drafts is None:
                    answer.drafts = DraftCounts([0] * self._num_places)
                for num_accepted in accepted:
                    answer.drafts.add(num_drafts, num_accepted)
        return columns

    def _outcome(self, plan: StepPlan, num_iterations: int) -> StepOutcome:
        drafts = plan.drafts
        assert isinstance(drafts, DraftPlan)
        accepted = np.array(self._accepted[: len(drafts.seqs)], np.int64).reshape(-1, num_iterations).T
        proposed = None if self._host is None else self._propose(self._host, drafts)
        outcome = super()._outcome(plan, num_iterations)
        return outcome._replace(accepted=accepted, proposed=proposed)

    def _num_iterations(self, plan: StepPlan) -> int:
        limit = self._max_iterations
        if limit == 1 or plan.chunks or not self._drafting_runner.may_repeat(plan):
            return 1
        num_iterations = self._drafts.max_iterations_of(plan, limit)
        if num_iterations > 1:
            self.core.reserve(plan, num_iterations)
        return num_iterations

    def _propose(self, host: HostDrafter, drafts: DraftPlan) -> np.ndarray:
        """Has the host draft for the next pass; returns the number of draft tokens of each sequence."""
        proposed = np.zeros(len(drafts.next_seqs), np.int64)
        for index, (seq, num_asked) in enumerate(
            zip(drafts.next_seqs, drafts.next_drafts.tolist(), strict=True)
        ):
            answer = self._answer_of.get(seq)
            if answer is None or not num_asked or answer.alive[0].form is not None:
                continue
            output = answer.alive[0].tokens
            try:
                tokens = host.draft(seq.request_id, answer.prompt_tokens, output, num_asked)
            except ProposerError as error:
                self._failed[seq] = str(error)
                continue
            proposed[index] = len(tokens)
            self._drafting_runner.set_drafts(seq, tokens)
        return proposed

    def _commit(self, plan: StepPlan, num_iterations: int) -> None:
        super()._commit(plan, num_iterations)
        failed, self._failed = self._failed, {}
        for seq, reason in failed.items():
            if (answer := self._answer_of.get(seq)) is not None:
                answer.error = reason
                self._end_all(seq, "error")
                self._take_out(seq.request_id, FinishReason.aborted)

    def _end_all(self, seq: Sequence, reason: str) -> None:
        answer = self._answer_of.get(seq)
        if answer is not None and self._host is not None:
            with suppress(ProposerError):  # the output is complete without it
                self._host.forget(seq.request_id, answer.outputs[0].tokens)
        super()._end_all(seq, reason)
