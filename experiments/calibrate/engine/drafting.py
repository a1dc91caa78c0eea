"""The engine's settings of speculative decoding for a simulated scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.calibrate.engine.served import architecture_of
from hwmodels.speculation import SpeculativeModel
from hwmodels.speculation.draft import HeadDraft, LayerDraft, ModelDraft, SeveralDrafts, SkipDraft
from policies.speculation import Proposer, num_places
from policies.speculation.proposers import (
    DraftModel,
    Eagle,
    Eagle3,
    Medusa,
    Mtp,
    SelfSpeculative,
    SpecinferTree,
)
from realengine.model.architecture import Architecture
from realengine.speculation.settings import DraftSource, SpeculationSettings
from sim.setup.scenario import Scenario


def drafting_of(scenario: Scenario, config: Mapping[str, Any]) -> SpeculationSettings | None:
    """Returns the engine's settings of a scenario's speculation; None: it has none.

    config: the scenario's resolved configuration. Drafts have random weights, as the target has, of the sizes
    that the simulator prices. Raises ValueError, with the key, for a draft that the engine cannot build.
    """
    proposer, draft_length = scenario.speculation, scenario.draft_length
    if proposer is None or draft_length is None:
        return None
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


def _models(proposer: Proposer, config: Mapping[str, Any]) -> tuple[DraftSource, ...]:
    if not isinstance(proposer, DraftModel | SpecinferTree | Eagle | Eagle3 | Medusa | Mtp):
        return ()
    draft = proposer.draft
    if isinstance(draft, ModelDraft):
        return (architecture_of(config["speculation"]["draft"]["model"]),)
    if isinstance(draft, SeveralDrafts):
        nodes = config["speculation"]["draft"]["drafts"].values()
        return tuple(architecture_of(node["model"]) for node in nodes)
    target = architecture_of(config["model"])
    if isinstance(draft, HeadDraft):
        _check_heads(draft, num_places(proposer))
        return (target,)
    assert isinstance(draft, LayerDraft)
    return (_layer(draft, target),)


def _check_heads(draft: HeadDraft, places: int) -> None:
    """Raises ValueError for heads that are not those that the engine draws: one layer, one per place."""
    for name, wanted in (("num_heads", places), ("num_layers", 1)):
        if getattr(draft, name) != wanted:
            raise ValueError(
                f"speculation.draft.{name}={getattr(draft, name)}: heads with random weights have "
                f"{wanted} here; set it to {wanted}"
            )


def _layer(draft: LayerDraft, target: Architecture) -> Architecture:
    """Returns the layer of a draft. Raises ValueError for one that is not of the target's kind."""
    if draft.num_layers != 1:
        raise ValueError(f"speculation.draft.num_layers={draft.num_layers}: must be 1 on the engine")
    if draft.attention is not None:
        raise ValueError(
            "speculation.draft.attention: a layer with random weights has the target's; set it to null"
        )
    return replace(
        target,
        num_layers=1,
        intermediate_size=draft.intermediate_size or target.intermediate_size,
        vocab_size=draft.vocab_size or target.vocab_size,
    )


def _skipped(proposer: object, num_layers: int) -> tuple[int, ...] | None:
    """Returns the layers that self_speculative leaves out: the last ones, so that its draft exits early."""
    if not isinstance(proposer, SelfSpeculative):
        return None
    draft = proposer.draft
    assert isinstance(draft, SkipDraft)
    return tuple(range(draft.num_layers, num_layers))
