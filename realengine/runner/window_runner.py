"""A runner that tells the executor which prompts are cut, as `KeptTokens` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from policies.core.engine import EngineCore
from policies.core.plan import StepPlan
from policies.core.sequence import Sequence
from realengine.runner.graphs import Drawn
from realengine.runner.kept_tokens import Cut, KeptTokens
from realengine.runner.launch import Launch, Row
from realengine.runner.runner import Runner
from realengine.runner.work import Work


class WindowRunner(Runner):
    """Packs plans and launches them. window: what decoding sequences keep; the rest as `Runner`."""

    def __init__(
        self, window: KeptTokens, core: EngineCore, execute: Callable[[Work], Drawn | None], **others: Any
    ) -> None:
        super().__init__(core, execute, **others)
        self._window = window
        self._filled: list[int] = []  # slots that have got another sequence since the last launch
        self._cuts: tuple[Cut, ...] = ()

    def fill_slot(self, seq: Sequence, branch: int, *arguments: Any, **others: Any) -> None:
        super().fill_slot(seq, branch, *arguments, **others)
        self._filled.append(seq.slots[branch])

    def launch(self, plan: StepPlan, num_iterations: int = 1) -> Launch:
        self._cuts = self._window.cuts(plan, self._filled)
        return super().launch(plan, num_iterations)

    def _launched(self, rows: list[Row], work: Work, num_iterations: int) -> Launch:
        launch = super()._launched(rows, replace(work, cuts=self._cuts), num_iterations)
        self._filled.clear()
        return launch
