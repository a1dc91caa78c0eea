"""A runner that has prompts cut when their prefill is complete, as `KeptWindow` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from policies.core.engine import EngineCore
from policies.core.plan import StepPlan
from realengine.runner.graphs import Drawn
from realengine.runner.kept_window import KeptWindow
from realengine.runner.launch import Launch, Row
from realengine.runner.runner import Runner
from realengine.runner.work import Work


class WindowRunner(Runner):
    """Packs plans and launches them. window: what decoding sequences keep; the rest as `Runner`."""

    def __init__(
        self, window: KeptWindow, core: EngineCore, execute: Callable[[Work], Drawn | None], **others: Any
    ) -> None:
        super().__init__(core, execute, **others)
        self._window = window
        self._cuts: tuple[tuple[int, int], ...] = ()

    def launch(self, plan: StepPlan, num_iterations: int = 1) -> Launch:
        self._cuts = self._window.cuts(plan)
        return super().launch(plan, num_iterations)

    def _launched(self, rows: list[Row], work: Work, num_iterations: int) -> Launch:
        return super()._launched(rows, replace(work, cuts=self._cuts), num_iterations)
