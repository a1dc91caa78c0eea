"""Retracted requests that lose a token which was not read: it is computed again and counted once."""

import pytest

from sim import simulate


@pytest.mark.parametrize("is_overlapped", [True, False])
def test_every_token_has_one_gap_although_some_are_computed_twice(is_overlapped):
    """60 requests of 100 + 300 tokens, for which 16 slots and 3,000 tokens of KV are too few."""
    result = simulate(
        *("engine=sglang", "model=llama3_1_8b", "hardware=l40s", "workload=poisson"),
        *("workload.num_requests=60", "workload.arrivals.rate_per_s=6", "workload/lengths=fixed"),
        *("workload.lengths.prompt_tokens.value=100", "workload.lengths.output_tokens.value=300"),
        *("workload.max_tokens=exact", "engine.max_num_seqs=16", "engine.num_kv_blocks=3000"),
        *("batching.schedule_conservativeness=0.05", f"engine.host.overlapped={is_overlapped}"),
    )
    requests = result.requests
    assert requests["preemptions"].sum() > 0
    assert (requests["output_tokens"] == 300).all()
    assert result.summary["itl"]["count"] == 60 * 299
    tpot_s = (requests["last_token_s"] - requests["first_token_s"]) / 299
    assert result.summary["tpot"]["mean_s"] == pytest.approx(tpot_s.mean())
    assert result.summary["itl"]["mean_s"] == pytest.approx(tpot_s.mean())
