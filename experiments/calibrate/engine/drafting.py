"""The engine's settings of speculative decoding for a simulated scenario."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.calibrate.engine.served import architecture_of
from hwmodels.speculation.draft import SkipDraft
from hwmodels.speculation.model import SpeculativeModel
from policies.speculation.proposers.draft_model import DraftModel
from policies.speculation.proposers.eagle import Eagle
from policies.speculation.proposers.eagle3 import Eagle3
from policies.speculation.proposers.medusa import Medusa
from policies.speculation.proposers.mtp import Mtp
from policies.speculation.proposers.self_speculative import SelfSpeculative
from policies.speculation.proposers.specinfer_tree import SpecinferTree
from realengine.speculation.settings import DraftSource, SpeculationSettings
from sim.setup.scenario import Scenario

NO_WEIGHTS = (Eagle, Eagle3, Medusa, Mtp)
"""Proposers whose heads and layers the simulator describes by sizes that no engine builds."""


def drafting_of(scenario: Scenario, config: Mapping[str, Any]) -> SpeculationSettings | None:
    """Returns the engine's settings of a scenario's speculation; None: it has none.

    config: the scenario's resolved configuration. A draft model has random weights, as the target has.
    Raises ValueError, with the key, for a proposer that the engine cannot build from a scenario.
    """
    proposer, draft_length = scenario.speculation, scenario.draft_length
    if proposer is None or draft_length is None:
        return None
    if isinstance(proposer, NO_WEIGHTS):
        raise ValueError(
            f"speculation={proposer.method}: the engine needs the weights of a checkpoint for it; validate "
            "with speculation=ngram, suffix, draft_model, self_speculative, specinfer_tree or lookahead"
        )
    model = scenario.iteration_model()
    assert isinstance(model, SpeculativeModel)
    return SpeculationSettings(
        proposer=proposer,
        draft_length=draft_length,
        models=_models(proposer, config),
        estimate=model.pass_seconds,
        tpot_s=scenario.tpot_s,
        skipped_layers=_skipped(proposer, scenario.model.num_layers),
    )


def _models(proposer: object, config: Mapping[str, Any]) -> tuple[DraftSource, ...]:
    if isinstance(proposer, DraftModel | SpecinferTree):
        return (architecture_of(config["speculation"]["draft"]["model"]),)
    return ()


def _skipped(proposer: object, num_layers: int) -> tuple[int, ...] | None:
    """Returns the layers that self_speculative leaves out: the last ones, so that its draft exits early."""
    if not isinstance(proposer, SelfSpeculative):
        return None
    draft = proposer.draft
    assert isinstance(draft, SkipDraft)
    return tuple(range(draft.num_layers, num_layers))
