"""Checks that a proposer, its draft and the model go together; what they change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from hwmodels.devices.host import HostOverhead
from hwmodels.iterations.iteration import IterationModel
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels.rooflines import Replica
from hwmodels.model.model_spec import ModelSpec
from hwmodels.speculation.draft import Draft, HeadDraft, LayerDraft
from hwmodels.speculation.host import DraftHost, draft_host_of
from hwmodels.speculation.model import SpeculativeModel
from hwmodels.speculation.steps import CHAIN, DraftShape
from policies.caching.pool import BlockPool
from policies.core.release import Release
from policies.speculation import DraftLength, Proposer, num_places
from policies.user_code import name_of
from sim.speculation.acceptance import Acceptance

if TYPE_CHECKING:
    from policies.speculation.engine.drafting import Drafting

KEY = "speculation"
ASSUMED = ("iid", "beta")
"""Acceptance models whose rates have a default, which is of no model and workload in particular."""


def draft_of(proposer: Proposer) -> Draft:
    """Returns the cost and the memory of a proposer's draft. Raises ValueError if it states none."""
    draft = proposer.draft
    if not callable(getattr(draft, "weight_bytes", None)):
        raise ValueError(
            f"{KEY}.draft={draft}: must be what a draft costs, such as hwmodels.speculation.draft.ModelDraft"
        )
    return cast("Draft", draft)


def host_of(host: HostOverhead, proposer: Proposer | None) -> HostOverhead:
    """Returns the host overhead with a proposer: synchronous if drafts need the tokens on the host first."""
    if proposer is None or proposer.rules.overlaps or not host.overlapped:
        return host
    return replace(host, overlapped=False)


def check_proposer(proposer: Proposer, model: ModelSpec, layout: ParallelLayout) -> None:
    """Raises ValueError, with the key of the setting, if a model on some devices cannot have a draft."""
    draft = draft_of(proposer)
    try:
        draft.check(model, layout)
    except ValueError as error:
        raise ValueError(f"{KEY}.draft.{error}") from None
    _check_places(proposer, draft)
    if isinstance(draft, LayerDraft) and draft.kind == "mtp":
        _check_modules(draft, model)
    if isinstance(draft, LayerDraft) and (draft.vocab_size or 0) > model.vocab_size:
        raise ValueError(
            f"{KEY}.draft.vocab_size={draft.vocab_size}: must be <= {model.vocab_size}, the vocabulary of "
            f"{model.name}"
        )


def _check_places(proposer: Proposer, draft: Draft) -> None:
    """Raises ValueError if a proposer drafts for more places than there are heads."""
    places = num_places(proposer)
    if isinstance(draft, HeadDraft) and places > draft.num_heads:
        setting = f"num_speculative_tokens={places}" if proposer.tree is None else f"tree: its depth {places}"
        raise ValueError(
            f"{KEY}.{setting}: must be <= {KEY}.draft.num_heads={draft.num_heads}, as each head predicts one "
            "place"
        )


def _check_modules(draft: LayerDraft, model: ModelSpec) -> None:
    """Raises ValueError unless a model has as many modules for multi-token prediction as are used."""
    modules = model.num_mtp_modules
    if not modules:
        raise ValueError(
            f"{KEY}=mtp: {model.name} has no layers for multi-token prediction; choose another proposer, "
            "such as speculation=eagle3 or draft_model, or a model with them, such as deepseek_r1"
        )
    if draft.num_modules > modules:
        raise ValueError(
            f"{KEY}.num_nextn_predict_layers={draft.num_modules}: must be <= {modules}, the modules of "
            f"{model.name}"
        )


def max_tokens_per_pass(proposer: Proposer | None) -> int:
    """Returns the largest number of tokens that a sequence can get from a pass."""
    return 1 if proposer is None else 1 + num_places(proposer)


def with_drafts(
    base: IterationModel, proposer: Proposer, replica: Replica, hosts: Mapping[str, DraftHost]
) -> IterationModel:
    """Returns the iteration model of a replica that speculates. Raises ValueError if it has no price.

    hosts: the host time of draft tokens by method.
    """
    tree = proposer.tree
    shape = CHAIN
    if tree is not None:
        by_level = Counter(tree.depths)
        shape = DraftShape.of_tree(tuple(by_level[depth] for depth in range(1, tree.depth + 1)))
    host = draft_host_of(hosts, proposer.method)
    return SpeculativeModel(base, draft_of(proposer), replica, shape=shape, host=host)


def drafting_of(
    proposer: Proposer,
    draft_length: DraftLength,
    model: IterationModel,
    tpot_s: float | None,
) -> Callable[[BlockPool, Release], Drafting]:
    """Returns the maker of the part of an engine that verifies draft tokens.

    model: for policies that ask for the price of a pass.
    """
    # Runs without speculation do not import these.
    from policies.speculation.engine.drafting import Drafting  # noqa: PLC0415
    from policies.speculation.engine.drafts import Speculation  # noqa: PLC0415

    assert isinstance(model, SpeculativeModel)
    speculation = Speculation(
        proposer=proposer, draft_length=draft_length, estimate=model.pass_seconds, tpot_s=tpot_s
    )
    return partial(Drafting, speculation)


def stores_kv(proposer: Proposer | None, model: ModelSpec, layout: ParallelLayout) -> bool:
    """Returns whether drafts have KV of their own, which must be computed for the prompt too."""
    return proposer is not None and draft_of(proposer).kv_bytes_per_token(model, layout) > 0


def speculation_notes(proposer: Proposer, acceptance: Acceptance | None, host: HostOverhead) -> Iterator[str]:
    """Yields the notes on a pool whose sequences speculate. host: as set."""
    from sim.speculation.acceptance.iid import Iid  # noqa: PLC0415 (most runs do not speculate)
    from sim.speculation.acceptance.published import TASKS, rate_sentence  # noqa: PLC0415

    if isinstance(acceptance, Iid) and acceptance.rate is None:
        yield rate_sentence(proposer.method, acceptance.task or TASKS[0])
    elif name_of(acceptance) in ASSUMED:
        yield (
            f"acceptance={name_of(acceptance)}: how many draft tokens are accepted is assumed, not "
            "measured, and speed-ups depend on it; set it for your requests, or choose acceptance=table, "
            "text or spec_bench."
        )
    if host.overlapped and not proposer.rules.overlaps:
        yield (
            f"speculation={proposer.method}: is not run with asynchronous scheduling, so the engine "
            "schedules synchronously, although engine.host.overlapped=true."
        )
