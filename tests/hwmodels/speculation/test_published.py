"""Published times per output token, compared with ours; of them only the mean accepted length is an input."""

from statistics import median

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_scenario

LENGTHS = {
    "eagle": {2: 2.10, 3: 2.29, 4: 2.39, 5: 2.43, 6: 2.45, 7: 2.47},
    "eagle3": {2: 2.36, 3: 2.79, 4: 3.08, 5: 3.32, 6: 3.46, 7: 3.54},
}
TPOT_MS = {
    "eagle": {2: 4.37, 3: 4.29, 4: 4.48, 5: 4.71, 6: 4.94, 7: 5.20},
    "eagle3": {2: 4.32, 3: 4.09, 4: 4.05, 5: 4.13, 6: 4.20, 7: 4.29},
}
"""vLLM 0.9, Llama-3.1-8B, one request at a time, MT-Bench (vllm-project/vllm, issue 20780); GPU: H100."""

CONTEXT = 600
"""Tokens of a context in the middle of an answer; the times hardly depend on it."""


def model_of(*settings):
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    return build_scenario(
        source.compose(["model=llama3_1_8b", "hardware=h100_sxm", *settings])
    ).iteration_model()


@pytest.mark.parametrize(("method", "within"), [("eagle", 0.02), ("eagle3", 0.08)])
def test_times_per_token_of_vllm_by_draft_tokens(method, within):
    """The host's times per step were read off these rows: three numbers for twelve times."""
    model = model_of("engine=vllm_sync", f"speculation={method}")
    errors = {
        k: 1e3 * model.pass_seconds(1, CONTEXT, k) / length / TPOT_MS[method][k] - 1
        for k, length in LENGTHS[method].items()
    }
    assert max(map(abs, errors.values())) < within, errors
    assert median(map(abs, errors.values())) < 0.75 * within


def test_the_best_number_of_draft_tokens_is_the_published_one():
    """EAGLE is fastest with 3 draft tokens, EAGLE-3 with 4 or 5 (4.05 and 4.13 ms)."""
    best = {}
    for method, lengths in LENGTHS.items():
        model = model_of("engine=vllm_sync", f"speculation={method}")
        best[method] = min(lengths, key=lambda k: model.pass_seconds(1, CONTEXT, k) / lengths[k])
    assert best["eagle"] == 3
    assert best["eagle3"] in (4, 5)
