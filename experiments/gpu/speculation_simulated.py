"""Simulates the batches of `speculation_speed`, without drafts and with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    rate: float,
    batch: int,
    num_drafts: int,
    num_prompt_tokens: int,
    num_output_tokens: int,
) -> tuple[float, float]:
    """Returns the mean seconds per output token of one batch of Llama-3.1-8B, without drafts and with them.

    rate: probability that a draft token is accepted after those before it.
    """
    common = (
        "model=llama3_1_8b",
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
        "acceptance=iid",
        f"acceptance.rate={rate}",
    )
    return _tpot_s(common), _tpot_s(drafting)


def _tpot_s(settings: Sequence[str]) -> float:
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    return float(build_scenario(source.compose(list(settings)), {}).run().summary["tpot"]["mean_s"])
