"""The draft tokens of an engine: it reads which were accepted, and has the host draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.core.endings import Ends
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, StepPlan
from policies.core.sequence import Sequence
from policies.speculation.engine.drafting import Drafting
from policies.speculation.engine.drafts import DraftPlan, Speculation
from realengine.clock import Clock
from realengine.runner.graphs import Drawn, Graphs
from realengine.runner.launch import Launch
from realengine.runner.runner import Runner
from realengine.runner.work import Work
from realengine.serving.answer import Answer, DraftCounts
from realengine.speculation.host import Guarded, HostDrafter, ProposerError, drafter_of
from realengine.speculation.packer import DraftPacker
from realengine.speculation.pass_times import PassTimes
from realengine.speculation.settings import SpeculationSettings

Answers = Mapping[Sequence, Answer]


class EngineDrafts:
    """The draft tokens of an engine whose core has the part that verifies them.

    host: drafts on the host, between two steps; None: the device drafts. timeout_s: seconds after which a
    call of a user's drafter ends its request; None: it is one of ours, which needs no guard. pass_times: is
    told of every pass; None: no policy needs its time. reads_late: whether the core is told what a pass has
    accepted after the next plan (`Ends.one_step_late`); the device then drafts.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        host: HostDrafter | None,
        timeout_s: float | None,
        pass_times: PassTimes | None,
        reads_late: bool,
        vocab_size: int,
    ) -> None:
        assert core.drafts is not None
        self._of_core = core.drafts
        self.draft_length = core.drafts.speculation.draft_length
        self.pass_times = pass_times
        self.reads_late = reads_late
        self._core = core
        self._host = host if host is None or timeout_s is None else Guarded(host, timeout_s, vocab_size)
        self._num_places = core.view.max_tokens_per_pass - 1
        self._failed: dict[Sequence, str] = {}  # requests whose proposer has failed in this step
        self._unread: StepPlan | None = None  # committed without acceptances; its launch is not read yet
        self._num_before: list[int] = []  # tokens of the outputs of the launch that was read last, before it
        self._accepted: list[list[int]] = []  # of the rows of that launch, by iteration

    def packer(self, execute: Callable[[Work], Drawn | None], graphs: Graphs | None) -> DraftPacker:
        """Returns the part of a new runner that packs draft tokens. execute, graphs: the runner's."""
        on_device = self._host is None
        return DraftPacker(
            self._core, execute, drafts_on_device=on_device, pass_times=self.pass_times, graphs=graphs
        )

    def max_iterations(self, plan: StepPlan, limit: int) -> int:
        """Returns the number of passes that may run in one launch, whatever they accept."""
        return self._of_core.max_iterations_of(plan, limit)

    def read(self, launch: Launch, columns: list[list[int]], answers: Answers) -> None:
        """Counts the draft tokens of a launch, and cuts the tokens of its rows to the limits of requests."""
        if self.pass_times is not None:
            self.pass_times.read()
        self._accepted = launch.accepted() if columns else []
        self._num_before = []
        counts = [*launch.num_drafts, *[0] * (len(columns) - len(launch.num_drafts))]  # 0: they end a prompt
        rows = zip(launch.rows, columns, counts, self._accepted, strict=True)
        for (seq, _), tokens, num_drafts, accepted in rows:
            answer = answers.get(seq)
            self._num_before.append(0 if answer is None else len(answer.outputs[0].tokens))
            if answer is None:
                continue
            num_left = seq.max_num_tokens - seq.num_prompt_tokens - len(answer.alive[0].tokens)
            del tokens[num_left:]
            if num_drafts:
                if answer.drafts is None:
                    answer.drafts = DraftCounts([0] * self._num_places)
                for num_accepted in accepted:
                    answer.drafts.add(num_drafts, num_accepted)

    def read_late(
        self, stopped: Mapping[Sequence, Answer]
    ) -> tuple[StepPlan, NDArray[np.int64], list[Sequence]]:
        """Tells the core what the launch that was just read has accepted, and which sequences it stopped.

        Returns its plan, the accepted draft tokens of each sequence, and the sequences at their limit.
        """
        plan, self._unread = self._unread, None
        assert plan is not None
        assert isinstance(plan.drafts, DraftPlan)
        seqs = plan.drafts.seqs
        accepted = np.array([num for (num,) in self._accepted[: len(seqs)]], np.int64)
        for seq, answer in stopped.items():
            if seq in seqs:
                index = seqs.index(seq)
                accepted[index] = len(answer.outputs[0].tokens) - self._num_before[index] - 1
        return plan, accepted, self._of_core.read(plan, accepted[None], list(stopped))

    def outcome(self, plan: StepPlan, outcome: StepOutcome, answers: Answers, runner: Runner) -> StepOutcome:
        """Returns the outcome of a plan with what it accepted, and what the host drafts for the next pass."""
        if self.reads_late:
            self._unread = plan
            return StepOutcome(outcome.iterations)
        drafts = plan.drafts
        assert isinstance(drafts, DraftPlan)
        num_seqs = len(drafts.seqs)
        accepted = np.array(self._accepted[:num_seqs], np.int64).reshape(-1, outcome.iterations).T
        proposed = None if self._host is None else self._propose(self._host, drafts, answers, runner)
        return outcome._replace(accepted=accepted, proposed=proposed)

    def _propose(
        self, host: HostDrafter, drafts: DraftPlan, answers: Answers, runner: Runner
    ) -> NDArray[np.int64]:
        """Has the host draft for the next pass; returns the number of draft tokens of each sequence."""
        proposed = np.zeros(len(drafts.next_seqs), np.int64)
        for index, (seq, num_asked) in enumerate(
            zip(drafts.next_seqs, drafts.next_drafts.tolist(), strict=True)
        ):
            answer = answers.get(seq)
            if answer is None or not num_asked or answer.alive[0].form is not None:
                continue
            output = answer.alive[0].tokens
            try:
                tokens = host.draft(seq.request_id, answer.prompt_tokens, output, num_asked)
            except ProposerError as error:
                self._failed[seq] = str(error)
                continue
            proposed[index] = len(tokens)
            runner.set_drafts(seq, tokens)
        return proposed

    def take_failed(self) -> dict[Sequence, str]:
        """Returns the sequences whose proposer has failed since the last call, with the reasons."""
        failed, self._failed = self._failed, {}
        return failed

    def ended(self, seq: Sequence, answer: Answer) -> None:
        """Tells the host's drafter that a request has ended."""
        if self._host is not None:
            with suppress(ProposerError):  # the output is complete without it
                self._host.forget(seq.request_id, answer.outputs[0].tokens)


def core_of(
    settings: SpeculationSettings | None, clock: Clock, *, overlap: bool, vocab_size: int, **others: Any
) -> tuple[EngineCore, EngineDrafts | None]:
    """Returns a core, and the engine's part in its draft tokens; None: it does not speculate.

    clock: the engine's, which measures passes for draft-length policies that need their cost. overlap:
    whether the engine launches a step before it reads the one before, if the proposer allows it. others: as
    of EngineCore.
    """
    if settings is None:
        return EngineCore(ends=Ends.one_step_late if overlap else Ends.at_once, **others), None
    host = settings.host or drafter_of(settings.proposer)
    measures = settings.draft_length.needs_cost and settings.estimate is None
    pass_times = PassTimes(settings.proposer, clock.now) if measures else None
    speculation = Speculation(
        proposer=settings.proposer,
        draft_length=settings.draft_length,
        estimate=settings.estimate or pass_times,
        tpot_s=settings.tpot_s,
    )
    reads_late = overlap and host is None and settings.proposer.rules.overlaps
    ends = Ends.one_step_late if reads_late else Ends.at_once
    core = EngineCore(ends=ends, new_drafts=partial(Drafting, speculation), **others)
    drafts = EngineDrafts(
        core,
        host=host,
        timeout_s=None if settings.host is None else settings.host_timeout_s,
        pass_times=pass_times,
        reads_late=reads_late,
        vocab_size=vocab_size,
    )
    return core, drafts
