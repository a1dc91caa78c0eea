"""Simulates the batches of `speculation_speed`, without drafts and with them, and prices attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from hwmodels.iterations.iteration import DraftWork, IterationModel, IterationShape
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_scenario

PROPOSERS: Mapping[str, Sequence[str]] = {
    "draft_model": ("speculation=draft_model", "speculation.draft.start_s=0", "speculation.draft.step_s=0"),
    "ngram": ("speculation=ngram",),
}
"""Settings of the proposers, by method. The engine's host launches a draft while the last pass runs."""


def tpots(
    *,
    hardware: str,
    method: str,
    acceptance: Sequence[str],
    batch: int,
    num_drafts: int,
    num_prompt_tokens: int,
    num_output_tokens: int,
    model: str = "llama3_1_8b",
) -> tuple[float, float]:
    """Returns the mean seconds per output token of one batch, without drafts and with them.

    acceptance: settings of the group acceptance.
    """
    common = (
        f"model={model}",
        f"hardware={hardware}",
        "workload=offline_batch",
        "workload/lengths=fixed",
        f"workload.num_requests={batch}",
        f"workload.lengths.prompt_tokens.value={num_prompt_tokens}",
        f"workload.lengths.output_tokens.value={num_output_tokens}",
        f"engine.max_num_seqs={batch}",
        "slo=none",
    )
    drafting = (
        *common,
        *PROPOSERS[method],
        f"speculation.num_speculative_tokens={num_drafts}",
        *acceptance,
    )
    return _tpot_s(common), _tpot_s(drafting)


def attention_s(hardware: str, num_seqs: int, context_len: int, num_drafts: int) -> float:
    """Returns the seconds of one layer's attention in a pass of Llama-3.1-8B.

    Sequences have 1 + num_drafts rows, which are the last tokens of a context of context_len.
    """
    drafts = None
    if num_drafts:
        pairs = num_drafts * (context_len - num_drafts) + num_drafts * (num_drafts + 1) // 2
        drafts = DraftWork(num_seqs * num_drafts, num_seqs * pairs, 0, 0, 0)
    contexts = num_seqs * (context_len - num_drafts)
    shape = IterationShape(num_seqs, contexts, 0, 0, 0, 0, num_seqs * (1 + num_drafts), drafts=drafts)
    lines = _model(hardware).explain(shape)
    return sum(line.seconds / line.calls for line in lines if line.operator == "attention_decode")


@cache
def _model(hardware: str) -> IterationModel:
    settings = ["model=llama3_1_8b", f"hardware={hardware}", "speculation=ngram", "slo=none"]
    scenario = build_scenario(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(settings), {})
    (pool,) = scenario.pools_by_name.values()
    return pool.iteration_model()


def _tpot_s(settings: Sequence[str]) -> float:
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    return float(build_scenario(source.compose(list(settings)), {}).run().summary["tpot"]["mean_s"])
